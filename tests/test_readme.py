"""The README's Python blocks run as they stand, each on its own, and print what it says they print."""

import re
from pathlib import Path

import pytest

import xinfer_jax as xj

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Python, and the output that follows it, where the README shows one.
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```\n)?", README, re.DOTALL)
FROM_THE_HUB = '"Qwen/Qwen2.5-0.5B-Instruct"'  # stands for the bundled checkpoint here
# What a block prints that depends on the checkpoint or the machine, in the order of the blocks.
PRINTED = (
    r".+\n",
    None,
    r"\(2, 16\) \[\d+ \d+\]\n",
    r"\[\[.+\]\]\n",
    None,
    r"The capital of France is Paris\.\n\['.+', '.+'\]\n.+",
)


def test_every_block_is_here():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_block_prints(number, capsys):
    (block, shown) = BLOCKS[number]
    pattern = PRINTED[number]
    exec(compile(block.replace(FROM_THE_HUB, ""), "README.md", "exec"), {})
    out = capsys.readouterr().out
    if pattern is None:
        assert out == shown
    else:
        assert re.fullmatch(pattern, out, re.DOTALL)


def test_what_to_install_is_not_asked_of_an_index():
    """The package is on none: an extra comes from the checkout."""
    texts = [
        README,
        *(file.read_text() for part in ("xinfer_jax", "scripts") for file in ROOT.glob(f"{part}/**/*.py")),
    ]
    assert not [text for text in texts if re.search(r"pip install (-\S+ )*['\"]?xinfer-jax", text)]


def test_the_core_is_as_long_as_it_says():
    places, said = re.search(r"<!-- core -->(.*?): ([\d,]+) lines", README, re.DOTALL).groups()
    library = Path(xj.__file__).parent
    files = [library / place for place in re.findall("`(.+?)`", places)]
    files = [file for path in files for file in (path.glob("*.py") if path.is_dir() else [path])]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(int(said.replace(",", "")) - lines) < 0.1 * lines, lines
