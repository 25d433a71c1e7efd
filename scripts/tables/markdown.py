"""Tables in Markdown, and the blocks of files that hold them."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from xinfer_jax.errors import InputError

Tables = dict[str, Callable[[], list[str]]]
# A block, which begins with the name of its table.
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

FOLDERS = (".docs", ".github", "kernels_pallas", "scripts", "tests", "xinfer_jax")


def pages(root: Path) -> list[Path]:
    """Returns the Markdown files of a checkout, without the built site."""
    folders = (path for folder in FOLDERS for path in (root / folder).rglob("*.md"))
    return sorted([*root.glob("*.md"), *(path for path in folders if "site" not in path.parts)])


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a table. A text may have `|`, which is escaped, and no line break."""
    texts = [[str(cell).replace("|", r"\|") for cell in row] for row in (head, *rows)]
    assert all(len(row) == len(head) and not any("\n" in cell for cell in row) for row in texts), head
    lines = [f"| {' | '.join(row)} |" for row in texts]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def code(value: object) -> str:
    """Returns a value as code."""
    return f"`{value}`"


def sentence(text: str) -> str:
    """Returns a text that begins with a capital letter, unless it begins with a name, and ends with a full
    stop.
    """
    text = " ".join(text.split())
    begins_with_word = re.match(r"[a-z]+[ ,.:;]", text)
    text = text[:1].upper() + text[1:] if begins_with_word else text
    return text if text.endswith((".", ":", "!")) else f"{text}."


def number(value: float) -> str:
    """Returns a number for people: with commas, and a large power of two as one."""
    if isinstance(value, float):
        return f"{value:g}"
    for shown, whole in ((f"2^{value.bit_length() - 1}", value), (f"2^{value.bit_length()} - 1", value + 1)):
        if whole >= 2**31 and whole & (whole - 1) == 0:
            return shown
    return f"{value:,}"


def stale_blocks(text: str, tables: Tables) -> list[str]:
    """Returns the names of the tables whose blocks in a text are stale.

    Raises:
        InputError: a block names no table.
    """
    return [name for _, name, old, _ in BLOCK.findall(text) if old != _block(name, tables)]


def with_new_blocks(text: str, tables: Tables) -> str:
    """Returns a text with the tables that the functions return now. Raises as `stale_blocks`."""
    return BLOCK.sub(lambda found: found[1] + _block(found[2], tables) + found[4], text)


def _block(name: str, tables: Tables) -> str:
    if name not in tables:
        raise InputError(f"a block names the table {name!r}: the tables are {', '.join(sorted(tables))}")
    return "\n".join(["", *tables[name](), "", ""])
