"""The shape of the code: imports point one way, every public name is documented."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import xinfer_jax as xj

ROOT = Path(__file__).parents[1]
# A module imports only modules to its left. A new module takes its place here.
ORDER = (
    "errors", "brief", "checks", "memory", "settings", "rope_config", "families", "config", "products",
    "quantization", "rounding", "params", "layers", "experts", "kv", "attention", "cache", "model", "awq",
    "greedy", "processors", "biases", "sampling", "logprobs", "stats", "decode", "speculative", "fingerprint",
    "prefix", "options", "faults", "batch", "generation", "beam", "scoring", "files", "chat_template",
    "tokenizer", "quantized_files", "loading", "text", "terminal", "process", "program", "startup", "answer",
    "talk", "cli", "chat",
)  # fmt: skip
TOP = ("__init__", "__main__")  # above all of them
MODULES = sorted(path.stem for path in (ROOT / "xinfer_jax").glob("*.py"))
PROGRAMS = sorted(
    path for folder in ("xinfer_jax", "kernels_pallas", "scripts") for path in (ROOT / folder).rglob("*.py")
)


def imported(path: Path, package: str) -> set[str]:
    """Dotted names of what a file imports from anywhere, also inside functions; relative names made
    absolute.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def modules_of(path: Path) -> set[str]:
    """Our own modules that a file of xinfer_jax imports."""
    names = {name.split(".")[1] for name in imported(path, "xinfer_jax") if name.startswith("xinfer_jax.")}
    return names & {*MODULES, *(path.name for path in (ROOT / "xinfer_jax").iterdir() if path.is_dir())}


def test_every_module_has_its_place():
    assert set(MODULES) == {*ORDER, *TOP}


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name):
    path = ROOT / "xinfer_jax" / f"{name}.py"
    assert modules_of(path) <= set(ORDER[: ORDER.index(name)])
    assert "xinfer_jax" not in imported(path, "")  # only by relative names, module by module
    assert not {"torch", "transformers", "optax"} & {
        name.split(".")[0] for name in imported(path, "xinfer_jax")
    }


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_pallas").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_stand_alone(path):
    assert not {name for name in imported(path, "kernels_pallas") if name.split(".")[0] == "xinfer_jax"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_is(path):
    assert (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").strip()


def test_programs_start_in_one_way():
    """scripts/one_line.py is imported first (it finds the package, and minds Ctrl-C from then on) and starts
    each program that has flags: it refuses wrong ones in one line.
    """
    trees = {
        path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "scripts").glob("*.py")
    }
    flagged = {name for name, tree in trees.items() if "flags.DEFINE_" in ast.unparse(tree)}
    assert {"bench", "check_gpu", "compare_kv_cache", "perplexity", "quantize", "train_tiny"} <= flagged
    flagged.remove("check_gpu")  # asks for packages first, and prints its table when it is interrupted
    for name in flagged | {"chat", "generate"}:
        first = next(node for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom))
        assert "one_line" in ast.unparse(first), name
    for name in flagged:
        assert ast.unparse(trees[name].body[-1].body) == "start(main)", name
        names = {node.id for node in ast.walk(trees[name]) if isinstance(node, ast.Name)}
        assert not {"app", "refuse"} & names, f"{name}: raise InputError, one_line.start says it"


@pytest.mark.parametrize("name", xj.__all__)
def test_public_name_is_documented(name):
    """With words of its own, not the signature that a dataclass gets for a docstring."""
    text = inspect.getdoc(getattr(xj, name)) or ""
    assert text.strip() and not text.startswith(f"{name}(")


def test_public_names_are_sorted_and_complete():
    assert xj.__all__ == sorted(xj.__all__)
    tree = ast.parse((ROOT / "xinfer_jax" / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))  # what a type checker sees
    homes = {node.module: tuple(alias.name for alias in node.names) for node in checked.body}
    assert homes == xj._HOMES


def test_importing_the_package_loads_no_jax():
    program = "import sys, xinfer_jax; assert 'jax' not in sys.modules; xinfer_jax.generate"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
