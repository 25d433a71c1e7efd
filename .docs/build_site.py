"""Builds the documentation site from the texts of the repository.

    pip install -e '.[docs]'
    python .docs/build_site.py                # writes .docs/site; open .docs/site/index.html
    python .docs/build_site.py --execute      # also runs the tutorials, and shows their plots: five minutes
    python .docs/build_site.py --links        # also asks each external link whether it still answers

The READMEs are the pages, and the docstrings of public names are the reference. `CONTENTS` gives each text
its address on the site. The script copies the texts into a temporary folder under these addresses, points
the links between them to the copies, writes a page of the reference for each namespace, and calls Sphinx,
for which a warning is an error.
"""

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

try:
    import jupytext
    from sphinx.cmd.build import build_main
except ImportError as error:
    raise SystemExit(f"{error}: install the extra with pip install -e '.[docs]'") from None

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import xinfer_jax as xj  # noqa: E402

TUTORIALS = ["generate_and_score", "rollouts_in_jit", "lora", "grpo", "look_inside"]  # in reading order
# The parts of the site: the address of each page, and its text.
CONTENTS = {
    "Start": {
        "index": "README.md",
        "recipes": ".docs/pages/recipes.md",
        "models": ".docs/pages/models.md",
        "troubleshooting": ".docs/pages/troubleshooting.md",
    },
    "Tutorials": {"tutorials/index": "scripts/tutorials/README.md"}
    | {f"tutorials/{name}": f"scripts/tutorials/{name}.py" for name in TUTORIALS}
    | {"examples": "scripts/examples/README.md"},
    "You come from": {
        f"from-{name}": f".docs/pages/from-{name}.md" for name in ("transformers", "vllm", "mlx-lm", "tunix")
    },
    "Guides": {
        "library": "xinfer_jax/README.md",
        "generation": "xinfer_jax/generation/README.md",
        "draft-heads": "xinfer_jax/draft_heads/README.md",
        "grammar": "xinfer_jax/grammar/README.md",
        "tools": "xinfer_jax/tool_calls/README.md",
        "training": "xinfer_jax/TRAINING.md",
        "engine": "xinfer_jax/engine/README.md",
        "server": "xinfer_jax/serve/README.md",
        "deployment": "xinfer_jax/serve/deployment/README.md",
        "batch": "xinfer_jax/batch/README.md",
        "kernels": "kernels_pallas/README.md",
    },
    "Reference": {"reference/index": "", "settings": ".docs/pages/settings.md"},
    "The project": {
        "status": ".docs/pages/status.md",
        "measurements": "scripts/bench/README.md",
        "changelog": "xinfer_jax/CHANGELOG.md",
        "contributing": ".github/CONTRIBUTING.md",
        "map": "WORKSPACE.md",
        "scripts": "scripts/README.md",
        "bundled-checkpoint": "xinfer_jax/assets/README.md",
        "security": ".github/SECURITY.md",
    },
}
ADDRESSES = {text: address for part in CONTENTS.values() for address, text in part.items() if text}
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
NAMESPACES = [name for name in xj.__all__ if isinstance(getattr(xj, name), types.ModuleType)]
SUFFIXES = {".md": ".md", ".py": ".ipynb"}  # of a text, and of its copy
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(?=[)\s])")


def copy_text(name: str, address: str, folder: Path) -> None:
    """Copies a text to its address, with its links pointed to the copies of other texts and files."""

    def moved(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        linked = os.path.relpath(ROOT / Path(name).parent / target, ROOT)
        if linked in ADDRESSES:
            there = folder / (ADDRESSES[linked] + SUFFIXES[Path(linked).suffix])
        else:
            if not (ROOT / linked).is_file():
                raise SystemExit(f"{name} links to {target}, which is no file of the repository")
            there = folder / "files" / linked
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / linked, there)
        return f"{before}{os.path.relpath(there, page.parent)}{anchor}"

    page = folder / (address + SUFFIXES[Path(name).suffix])
    page.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / name).read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        notebook = jupytext.reads(text, fmt="py:percent")
        notebook.metadata |= {
            "kernelspec": KERNEL,
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        }
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = LINK.sub(moved, cell.source)
        jupytext.write(notebook, page)
        return
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)  # code has no links
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    page.write_text("".join(parts), encoding="utf-8")


def contents() -> str:
    """Returns the tables of contents, which the front page has in the bar at its side."""
    lines = []
    for part, pages in CONTENTS.items():
        lines += ["", "```{toctree}", ":hidden:", f":caption: {part}", ""]
        lines += ["Overview <self>" if address == "index" else address for address in pages]
        lines += ["```"]
    return "\n".join(lines) + "\n"


def public_names(module: str) -> list[str]:
    """Returns the public names of the root or of a namespace, in alphabetical order."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [name for name in vars(found) if is_defined_in(found, name)]
    return sorted({*names} - {*NAMESPACES}, key=str.lower)


def is_defined_in(module: types.ModuleType, name: str) -> bool:
    return not name.startswith("_") and getattr(vars(module)[name], "__module__", None) == module.__name__


def write_reference(folder: Path) -> None:
    """Writes a page for each namespace, from which autosummary makes a page for each name."""
    (folder / "reference").mkdir()
    modules = ["xinfer_jax", *(f"xinfer_jax.{name}" for name in NAMESPACES)]
    for module in modules:
        names = public_names(module)
        short = module.replace("xinfer_jax", "xj", 1)
        lines = [f"`{short}`", "=" * (len(short) + 2), "", f".. automodule:: {module}", "   :no-members:"]
        lines += ["   :no-inherited-members:", ""]
        lines += [
            f".. currentmodule:: {module}",
            "",
            ".. autosummary::",
            "   :toctree: .",
            "   :nosignatures:",
            "",
        ]
        lines += [f"   {name}" for name in names]
        (folder / "reference" / f"{short}.rst").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "# Reference\n\nWrite `import xinfer_jax as xj`. The public names are in these namespaces:\n\n"
    pages = "\n".join(module.replace("xinfer_jax", "xj", 1) for module in modules)
    text += f"```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```\n"
    (folder / "reference" / "index.md").write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS / "site", help="folder of the site; default: .docs/site"
    )
    parser.add_argument(
        "--execute", action="store_true", help="run the tutorials, and show what they print and plot"
    )
    parser.add_argument("--links", action="store_true", help="check external links in place of building")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, address in ADDRESSES.items():
            copy_text(name, address, folder)
        with (folder / "index.md").open("a", encoding="utf-8") as front:
            front.write(contents())
        write_reference(folder)
        if (given.output / "index.html").exists():  # pages of earlier names
            shutil.rmtree(given.output)
        options = ["-q", "-W", "--keep-going", "-c", DOCS, "-d", folder / ".doctrees"]
        options += ["-b", "linkcheck" if given.links else "html"]
        options += ["-D", f"nb_execution_mode={'force' if given.execute else 'off'}"]
        status = build_main([*map(str, options), str(folder), str(given.output)])
    if not status:
        print(given.output / ("output.txt" if given.links else "index.html"))
    return status


if __name__ == "__main__":
    sys.exit(main())
