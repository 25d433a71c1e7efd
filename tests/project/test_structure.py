"""The structure of the code: imports point one way, public names are documented, words are the field's."""

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from closure import OPTIONAL
from paths import ROOT
from public_names import PUBLIC, SPACES

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

# A package, or a module at the top, imports only those that come before it.
PACKAGES = (
    "lazy_names", "registry", "annotations", "errors", "wrong_types", "modes", "plugins", "old_names",
    "checks", "device", "memory_plan", "stats", "sharding", "config", "ops", "weights", "cache", "mixers",
    "feed_forward", "model", "draft_heads", "sampling", "generation", "backends", "layerwise", "tool_calls",
    "grammar", "families", "formats", "tokenization", "checkpoint", "text", "embedding", "reranking",
    "adapters", "compress", "estimates", "processes", "engine", "api", "batch", "cli", "serve", "exporting",
    "testing", "__main__",
)  # fmt: skip
LIBRARY = ROOT / "xinfer_jax"
FORMATTED_BY_HAND = 149  # statements with `# fmt: skip`
KERNELS = ROOT / "kernels_pallas"  # every import names it `xinfer_jax.kernels_pallas`, by a symbolic link
FILES = [path for path in LIBRARY.rglob("*.py") if KERNELS.name not in path.relative_to(LIBRARY).parts]
FOLDERS = sorted(path.parent.name for path in FILES if path.match("xinfer_jax/*/__init__.py"))
MODULES = sorted(
    ".".join(path.relative_to(LIBRARY).with_suffix("").parts) for path in FILES if path.name != "__init__.py"
)
PROGRAMS = sorted([*FILES, *KERNELS.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str) -> Path:
    return LIBRARY.joinpath(*module.split(".")).with_suffix(".py")


def imported(path: Path, package: str) -> set[str]:
    """Returns the dotted names that a file imports, also inside functions; relative names made absolute."""
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported_modules(name: str) -> set[str]:
    """Returns the modules of xinfer_jax that a module of xinfer_jax imports. Imports for annotations, and
    those that are marked as optional, do not count.
    """
    names = set()
    lines = file_of(name).read_text(encoding="utf-8").splitlines()
    for_types = [
        node
        for node in parse(file_of(name)).body
        if getattr(getattr(node, "test", None), "id", "") == "TYPE_CHECKING"
    ]
    left_out = {part for node in for_types for part in ast.walk(node)}
    for node in ast.walk(parse(file_of(name))):
        if node in left_out:
            continue
        if isinstance(node, ast.ImportFrom) and node.level and not OPTIONAL.search(lines[node.lineno - 1]):
            base = [*name.split(".")[: -node.level], *(node.module or "").split(".")]
            names |= {".".join(filter(None, (*base, alias.name))) for alias in node.names}
            names.add(".".join(filter(None, base)))
    return names & {*MODULES}


@pytest.mark.parametrize("package", FOLDERS)
def test_every_package_says_what_it_is_for(package):
    text = ast.get_docstring(parse(LIBRARY / package / "__init__.py"))
    assert len(text or "") > 200
    assert len((text or "").splitlines()) <= 60
    names = [path.stem for path in (LIBRARY / package).glob("*.py") if path.name != "__init__.py"]
    assert not [name for name in names if f"`{name}`" not in text]
    # Importing a package loads none of its modules.
    assert imported(LIBRARY / package / "__init__.py", "") <= {"lazy_names", "lazy_names.lazy_names"}


def test_every_package_has_its_place_in_the_order():
    assert {name.split(".")[0] for name in MODULES} == {*PACKAGES}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    package = name.split(".")[0]
    others = {module.split(".")[0] for module in imported_modules(name)} - {package}
    assert others <= {*PACKAGES[: PACKAGES.index(package)]}
    outside = imported(file_of(name), "")
    assert "xinfer_jax" not in outside  # only by relative names, module by module
    if name != "testing":
        assert not {"torch", "transformers", "optax"} & {name.split(".")[0] for name in outside}


def test_modules_form_no_cycle():
    """Raises graphlib.CycleError, which has the modules of a cycle."""
    TopologicalSorter({name: imported_modules(name) for name in MODULES}).prepare()


def test_no_module_has_the_name_of_a_public_function():
    """Otherwise `xinfer_jax.name` would be the module or the function, whichever was imported first."""
    assert not {name.split(".")[-1] for name in MODULES} & {*xj.__all__} - {*SPACES, "testing"}


@pytest.mark.parametrize("name", MODULES)
def test_private_attributes_are_used_where_they_are_defined(name):
    """`x._name` is of the object itself, or `_name` is defined in this module."""
    tree = parse(file_of(name))
    nodes = [*ast.walk(tree)]
    known = {"_replace", "_asdict", "_fields", "_exit"}  # public, in spite of their names
    known |= {node.name for node in nodes if isinstance(node, DEFINED)}
    used = []
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            known.add(node.attr)
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            used.append((ast.unparse(node.value), node.attr))
    assert not [x for x in used if x[0] not in ("self", "cls", "super()") and x[1] not in known]


def test_rows_and_requests_are_complete_when_they_are_made():
    """Only their own modules and the scheduler assign attributes of rows, answers and requests."""
    own = ("answers", "requests", "row", "scheduler", "prefix_cache", "clients", "replay")
    assigned = set()
    for name in {*MODULES} - {f"engine.{module}" for module in own}:
        path = file_of(name)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assigned.add((name, ast.unparse(node.value).split(".")[-1]))
    assert not {pair for pair in assigned if pair[1] in ("row", "answer", "request")}


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS))
)
def test_kernels_stand_alone(path):
    """They import nothing of the library, and each other by relative names that end inside their folder."""
    assert not {"xinfer_jax", "kernels_pallas"} & {name.split(".")[0] for name in imported(path, "")}
    depth = len(path.relative_to(KERNELS).parts)
    levels = [node.level for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom)]
    assert max(levels, default=0) <= depth


@pytest.mark.parametrize("folder", ["xinfer_jax", "scripts", "tests"])
def test_kernels_have_one_name(folder):
    """Python would load a second copy of each module under a second name, and nothing changes the state of
    that copy.
    """
    if (ROOT / ".git").exists():  # An archive of the sources has a copy of the folder.
        assert (LIBRARY / "kernels_pallas").readlink() == Path("../kernels_pallas")
    paths = (ROOT / folder).rglob("*.py")
    absolute = [node for path in paths for node in ast.walk(parse(path)) if names_kernels(node)]
    assert not [ast.unparse(node) for node in absolute]


def names_kernels(node: ast.AST) -> bool:
    """Returns True if a statement imports `kernels_pallas` as a top-level package."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "kernels_pallas" for alias in node.names)
    is_absolute = isinstance(node, ast.ImportFrom) and not node.level
    return is_absolute and node.module.split(".")[0] == "kernels_pallas"


def test_programs_start_in_one_way():
    """A program with flags imports scripts/launcher.py first: it finds the package, and handles Ctrl-C and
    wrong flags. The examples import it by checkout.py.
    """
    trees, examples = (
        {path.stem: parse(path) for path in (ROOT / "scripts").glob(pattern)}
        for pattern in ("*.py", "examples/*.py")
    )
    del examples["checkout"]
    flagged = {name for name, tree in trees.items() if "flags.DEFINE_" in ast.unparse(tree)}
    # check_gpu and check_tpu check for packages first, and print a table at Ctrl-C.
    assert {"bench_peers", "compare_behaviour", "soak_engine", "train_head", "train_tiny"} <= flagged
    for name in flagged | {"chat", "generate", "bench", "perplexity", "plan", "quantize"}:
        first = next(node for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom))
        assert "launcher" in ast.unparse(first), name
    for name, tree in examples.items():
        assert ast.unparse(tree.body[1]) == "from checkout import start", name
        assert ast.unparse(tree.body[-1].body) == "start(main)", name
    for name in flagged:
        assert ast.unparse(trees[name].body[-1].body) == "start(main)", name
        names = {node.id for node in ast.walk(trees[name]) if isinstance(node, ast.Name)}
        assert not {"app", "exit_with_error"} & names, f"{name}: raise InputError: launcher.start prints it"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name):
    """The signature that a dataclass gets for a docstring is not enough."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text.strip() and not text.startswith(f"{name.split('.')[-1]}(")


def test_public_names_are_defined_once():
    """A name belongs to the package or to one namespace."""
    assert not repeated(name.split(".")[-1] for name in PUBLIC)
    assert not {*SPACES} & {name.split(".")[-1] for name in PUBLIC}


def test_importing_the_package_loads_no_jax():
    program = "import sys, xinfer_jax; assert 'jax' not in sys.modules; xinfer_jax.generate"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# --- names --------------------------------------------------------------------------------------------------

DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def repeated(words: Iterable[str]) -> list[str]:
    return sorted(word for word, count in Counter(words).items() if count > 1)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstring_and_assignments_of_a_file(path):
    """It has a docstring, and values that are assigned one by one: `a, b = x, y` is for values that are
    exchanged, where a target is read on the right.
    """
    nodes = [*ast.walk(tree := parse(path))]
    assert (ast.get_docstring(tree) or "").strip()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            read = {ast.unparse(part) for part in ast.walk(node.value)}
            for target in node.targets:
                parts = {ast.unparse(part) for part in getattr(target, "elts", ())}
                assert not parts or parts & read or "*" in ast.unparse(node), ast.unparse(node)


def test_few_statements_are_exempt_from_the_formatter():
    """Their number does not rise: a type with named fields takes the place of long lists of arguments."""
    texts = (path.read_text(encoding="utf-8") for path in FILES)
    assert sum(text.count("# fmt: skip") for text in texts) <= FORMATTED_BY_HAND


def test_a_public_name_is_defined_once():
    """Among the functions and classes of modules; but for `main`, and for overloads of one module."""
    names = []
    for name in MODULES:
        tree = parse(file_of(name))
        names += {node.name for node in tree.body if isinstance(node, DEFINED)} - {"main"}
    assert not [name for name in repeated(names) if not name.startswith("_")]


def test_a_module_name_is_used_once():
    assert not repeated(name.split(".")[-1] for name in MODULES)


def test_only_the_registry_names_quantized_formats():
    """A new format is a file and a line there. GGUF is a kind of file with a separate format."""
    formats = {name for name in MODULES if name.endswith("_format")}
    others = {name.split(".")[-1] for name in {*MODULES} - formats if imported_modules(name) & formats}
    assert others == {"quantized_formats", "awq_gptq_settings", "gguf_checkpoint"}
