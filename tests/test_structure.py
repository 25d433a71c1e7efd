"""The shape of the code: imports point one way, every public name is documented."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import xinfer_jax as xj

ROOT = Path(__file__).parents[1]
# A module imports only modules that come before it: the rooms in this order, in a room its files. A new one
# takes its place here.
ROOMS = {
    "": ("errors", "signing", "brief", "checks", "memory", "host", "stats", "sharding"),
    "config": ("values", "rope", "families", "model_config"),
    "weights": ("processor", "products", "ternary", "quantized", "params", "layout", "rotation"),
    "cache": ("quantized", "kinds", "paged", "kv_cache", "fingerprint", "prefix", "prefix_files"),
    "model": ("layers", "experts", "attention", "decoder", "greedy"),
    "sampling": (
        "processors", "biases", "generation_config", "settings", "context", "choice", "logprobs",
    ),
    "compress": ("outliers", "rounding", "awq"),
    "generation": (
        "state", "loop", "doors", "speculation", "options", "faults", "batches", "programs", "roads", "rows",
        "run", "streaming", "kernels", "beam_steps", "beams", "scoring",
    ),
    "checkpoint": (
        "files", "template_work", "chat_template", "tokenizer", "escaping", "conversation", "detokenizer",
        "stop_strings", "tensors", "own_format", "quantized_formats", "spread", "loading",
    ),
    "text": (),
    "embedding": (),
    "engine": (
        "clients", "scheduler", "device", "messages", "lockstep", "requests", "statistics", "submission",
        "engine", "engines",
    ),
    "api": ("fields", "sampling_fields", "prompts", "bodies", "token_texts", "responses", "scoring"),
    "batch": ("lines", "ledger", "work", "run", "dataset"),
    "cli": (
        "terminal", "process", "program", "group", "channel", "watch", "startup", "answer", "chat", "batch",
        "answer_flags", "chat_flags", "batch_flags",
    ),
    "serve": (
        "settings", "metrics", "page", "addresses", "connections", "admission", "body_scan", "offload",
        "formatting", "thoughts", "streams", "embeddings", "under_way", "service", "texts", "app", "command",
    ),
}  # fmt: skip
ORDER = [".".join(filter(None, (room, name))) for room, names in ROOMS.items() for name in names or ("",)]
LIBRARY = ROOT / "xinfer_jax"
FOLDERS = sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))
MODULES = sorted(
    ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
    for path in LIBRARY.rglob("*.py")
    if path.name != "__init__.py"
)
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


def modules_of(name: str) -> set[str]:
    """Our own modules that a module of xinfer_jax imports."""
    path = LIBRARY.joinpath(*name.split(".")).with_suffix(".py")
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*name.split(".")[: -node.level], *(node.module or "").split(".")]
            names |= {".".join(filter(None, (*base, alias.name))) for alias in node.names}
            names.add(".".join(filter(None, base)))
    return names & {*MODULES}


def test_every_module_has_its_place():
    assert set(MODULES) == {*ORDER, "__main__"}


@pytest.mark.parametrize("room", FOLDERS)
def test_every_room_says_what_it_is_for(room):
    text = ast.get_docstring(ast.parse((LIBRARY / room / "__init__.py").read_text(encoding="utf-8")))
    assert len(text or "") > 200
    places = [text.find(f"`{name}`") for name in ROOMS[room]]
    assert -1 not in places and places == sorted(places)  # its files, in the order to read them
    assert not imported(LIBRARY / room / "__init__.py", "")  # a room loads nothing before it is asked to


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name):
    assert modules_of(name) <= set(ORDER[: ORDER.index(name)])
    outside = imported(LIBRARY.joinpath(*name.split(".")).with_suffix(".py"), "")
    assert "xinfer_jax" not in outside  # only by relative names, module by module
    assert not {"torch", "transformers", "optax"} & {name.split(".")[0] for name in outside}


def test_no_module_has_the_name_of_a_public_function():
    """Or `xinfer_jax.name` would be one or the other, as what was imported first decides."""
    assert not {name.split(".")[-1] for name in MODULES} & set(xj.__all__)


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_pallas").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_stand_alone(path):
    assert not {name for name in imported(path, "kernels_pallas") if name.split(".")[0] == "xinfer_jax"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_is(path):
    assert (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").strip()


def test_programs_start_in_one_way():
    """scripts/one_line.py is imported first (it finds the package, and minds Ctrl-C from then on) and starts
    each program that has flags: it refuses wrong ones in one line. The examples come to it by checkout.py.
    """
    trees, examples = (
        {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "scripts").glob(pattern)}
        for pattern in ("*.py", "examples/*.py")
    )
    del examples["checkout"]
    flagged = {name for name, tree in trees.items() if "flags.DEFINE_" in ast.unparse(tree)}
    assert {"bench", "check_gpu", "compare_kv_cache", "perplexity", "quantize", "train_tiny"} <= flagged
    flagged.remove("check_gpu")  # asks for packages first, and prints its table when it is interrupted
    for name in flagged | {"chat", "generate"}:
        first = next(node for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom))
        assert "one_line" in ast.unparse(first), name
    for name, tree in examples.items():
        assert ast.unparse(tree.body[1]) == "from checkout import start", name
        assert ast.unparse(tree.body[-1].body) == "start(main)", name
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
