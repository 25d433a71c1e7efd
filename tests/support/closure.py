"""The import closure of a module: what `import` statements can load from the library, and how many lines that
is. `python tests/support/closure.py` prints the closures of the core, module by module.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

LIBRARY = "xinfer_jax"
FUNCTIONAL = "xinfer_jax.generation.functional"  # forward, prefill, decode_step, decode_loop
GENERATE = "xinfer_jax.generation.entrypoints"
SIMPLE = "xinfer_jax.generation.simple"  # generation in plain Python
# What `plugins.TABLE` names and a float model of softmax attention and MLPs, or experts, cannot do without:
# it is looked up, so no statement imports it.
LAYER_PARTS = {
    ("mixer", "attention"): "xinfer_jax.mixers.softmax_attention",
    ("feed_forward", "mlp"): "xinfer_jax.feed_forward.mlp",
    ("feed_forward", "experts"): "xinfer_jax.feed_forward.mixture",
    ("router", "softmax"): "xinfer_jax.feed_forward.routers",
}
# What asks for the platform, or depends on it: uses of these names.
PLATFORM_NAMES = {
    "platform_dependent", "optimization_barrier", "default_backend", "devices", "local_devices",
    "device_kind", "platform", "__version__",
}  # fmt: skip
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


class Size(NamedTuple):
    lines: int
    code: int  # without docstrings, comments and blank lines


def source_file(module: str) -> Path | None:
    """Returns the file of a module or package of the library. None if there is none of that name."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    found = (file for file in files if module.split(".")[0] == LIBRARY and file.is_file())
    return next(found, None)


def run_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a module, in all scopes, without what stands in `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        only_for_types = isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
        children = node.orelse if only_for_types else [node]
        for child in children:
            yield child
            yield from run_statements(child)


# The mark of an import inside a function that only some calls need: "# optional: FEATURE".
OPTIONAL = re.compile(r"# optional: (\w[\w ]+)$")


def optional_imports(module: str) -> dict[str, str]:
    """Returns the import statements of a module that are marked as optional, with the feature of each."""
    text = source_file(module).read_text(encoding="utf-8")
    return {line.strip(): found[1] for line in text.splitlines() if (found := OPTIONAL.search(line))}


def imported_names(module: str, file: Path) -> set[str]:
    """Returns the dotted names that a module's statements may import, relative ones made absolute; without
    those that are marked as optional.
    """
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    names = set()
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in run_statements(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and OPTIONAL.search(lines[node.lineno - 1]):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def closure(start: str) -> list[str]:
    """Returns the modules and packages that importing a module, and calling all its functions, may load."""
    found = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        file = source_file(name)
        if file is None or name in found:
            continue
        found.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]
        waiting += imported_names(name, file)
    return sorted(found)


def core(*starts: str) -> list[str]:
    """Returns the modules that these ones, or `generate`, generation in plain Python and the functional API,
    may load, and those of the parts of layers.
    """
    modules = (*(starts or (FUNCTIONAL, GENERATE, SIMPLE)), *LAYER_PARTS.values())
    return sorted({name for module in modules for name in closure(module)})


def size(module: str) -> Size:
    text = source_file(module).read_text(encoding="utf-8")
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                code -= {*range(node.lineno, node.end_lineno + 1)}
    return Size(len(text.splitlines()), len(code))


def total(modules: Iterable[str]) -> Size:
    return Size(*map(sum, zip(*map(size, modules), strict=True)))


def hidden_imports(module: str) -> set[str]:
    """Returns the ways in which a module loads others without an import statement."""
    tree = ast.parse(source_file(module).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    used = functions & {"__getattr__"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="modules") | ast.Name(id="__import__"):
                used.add(ast.unparse(node))
            case ast.Import(names=names) if any(alias.name.split(".")[0] == "importlib" for alias in names):
                used.add(ast.unparse(node))
            case ast.ImportFrom(module=name) if (name or "").split(".")[0] == "importlib":
                used.add(ast.unparse(node))
            case ast.ImportFrom(module="sys", names=names) if any(alias.name == "modules" for alias in names):
                used.add(ast.unparse(node))
    return used


def platform_names(module: str) -> set[str]:
    """Returns the names in a module's code by which it depends on the platform that it runs on."""
    nodes = ast.walk(ast.parse(source_file(module).read_text(encoding="utf-8")))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} & PLATFORM_NAMES


def main() -> None:
    for start in (FUNCTIONAL, GENERATE):
        modules = core(start)
        print(f"{start}: {len(modules)} modules, {total(modules)}")
        for name in sorted(modules, key=lambda name: -size(name).lines):
            print(f"{size(name).lines:6} {size(name).code:6}  {name}")


if __name__ == "__main__":
    main()
