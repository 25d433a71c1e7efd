"""Python blocks of the READMEs, of TRAINING.md and of the pages in .docs run as they stand, each on its own,
and print what is shown after them.
"""

import re

import closure
import parity_cases as cases
import pytest
import run_script
from paths import ROOT
from quick import full_except
from tables import markdown

import xinfer_jax as xj

pytestmark = pytest.mark.newest

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Python, and the output that follows it, where a README shows one.
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```\n(.*?)```\n)?", re.DOTALL)
# A pattern of what each block prints, in order; None: what the README shows.
PRINTED = {
    "README.md": (r"The capital of France is Paris\.\n\['Hello! .*'\]\n",),
    "xinfer_jax/README.md": (None, None, r"True\n"),
    "xinfer_jax/TRAINING.md": (None, None, None),
    "xinfer_jax/batch/README.md": (None,),
    "xinfer_jax/grammar/README.md": (r'\{"name":".*","age":\d+\}\n', r"((yes|no), \d{1,2}%\n){4}"),
    ".docs/pages/from-mlx-lm.md": (None,),
    ".docs/pages/from-transformers.md": (None,),
    ".docs/pages/from-tunix.md": (None,),
    ".docs/pages/from-vllm.md": (None,),
    ".docs/pages/troubleshooting.md": (None,),
    "xinfer_jax/tool_calls/README.md": (None,),
    "xinfer_jax/generation/README.md": (None, None, None, None, None, None, r"\[\[.+\]\]\n", None),
    "xinfer_jax/draft_heads/README.md": (None, None),
    "xinfer_jax/engine/README.md": (r"The capital of France is Paris\.\n\['.+', '.+'\]\n.+", None, None),
    ".docs/pages/settings.md": (r"'.+'\n",),
}


def blocks(name: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))


def test_every_block_is_tested():
    counts = {str(path.relative_to(ROOT)): len(blocks(path)) for path in markdown.pages(ROOT)}
    assert {name: count for name, count in counts.items() if count} == {
        name: len(patterns) for name, patterns in PRINTED.items()
    }


@pytest.mark.parametrize(
    ("name", "number"),
    full_except((), [(name, i) for name in PRINTED for i in range(len(PRINTED[name]))]),
)
def test_block_prints(name, number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block, shown) = blocks(name)[number]
    pattern = PRINTED[name][number]
    if ".serialize()" in block:
        pytest.importorskip("flatbuffers", reason="jax writes programs with flatbuffers")
    if "make_mesh" in block:
        (program := tmp_path / "program.py").write_text(block, encoding="utf-8")
        out = run_script.run_on_devices(8, program)
    else:
        exec(compile(block, name, "exec"), {})
        out = capsys.readouterr().out
    if pattern is None:
        assert out == shown
    else:
        assert re.fullmatch(pattern, out, re.DOTALL)


def test_the_table_of_leaves_is_that_of_the_specs():
    leaves: dict[str, set[str]] = {}
    for case in cases.CASES.values():
        for leaf in xj.params.param_names(case.config):
            axes = ", ".join(axis or "-" for axis in leaf.axes)
            leaves.setdefault(axes, set()).add(re.sub(r"layers\.\d+", "layers.i", leaf.path))
    table = [f"| {axes} | {', '.join(f'`{x}`' for x in sorted(leaves[axes]))} |" for axes in sorted(leaves)]
    text = (ROOT / "xinfer_jax/TRAINING.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- leaves -->\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()[2:] == table


def test_what_to_install_is_not_asked_of_an_index():
    """The package is on none: an extra comes from the checkout."""
    texts = [
        README,
        *(file.read_text() for part in ("xinfer_jax", "scripts") for file in ROOT.glob(f"{part}/**/*.py")),
    ]
    assert not [text for text in texts if re.search(r"pip install (-\S+ )*['\"]?xinfer-jax", text)]


def test_the_core_is_what_it_lists_and_as_long_as_it_says():
    """A folder stands for all its modules. The number of lines of code is right to a percent."""
    places, said = re.search(
        r"<!-- core -->(.*?)These are ([\d,]+) lines of code", README, re.DOTALL
    ).groups()
    listed = set()
    for place in re.findall("`(.+?)`", places):
        path = ROOT / "xinfer_jax" / place
        files = path.glob("*.py") if path.is_dir() else [path]
        listed |= {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    core = closure.core()
    is_package = lambda name: closure.source_file(name).name == "__init__.py"  # noqa: E731
    listed = {name for name in listed if not name.endswith("__init__")}
    assert listed == {name for name in core if not is_package(name)}
    lines = closure.total(core).code
    assert abs(int(said.replace(",", "")) - lines) < 0.01 * lines, lines
