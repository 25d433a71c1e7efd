"""The README's Python blocks run as they stand, each on its own."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import xinfer_jax as xj

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FROM_THE_HUB = '"Qwen/Qwen2.5-0.5B-Instruct"'  # stands for the bundled checkpoint here


def first(names, capsys):
    assert capsys.readouterr().out.strip()


def library(names, capsys):
    assert (
        names["logits"].shape == (1, names["ids"].shape[1], names["config"].vocab_size)
        and names["logits"].dtype == np.float32
    )
    assert [len(row) for row in names["out"].tokens] == [8, 8]


def rollout(names, capsys):
    assert names["result"].tokens_BT.shape == (2, 16)
    assert isinstance(names["result"].cache.length_B, jax.Array)


def choices(names, capsys):
    assert names["choice"] == "The capital of Spain is Madrid."


def engine(names, capsys):
    assert capsys.readouterr().out.startswith("The capital of France is Paris.")
    assert len(names["outs"]) == 2 and names["out"].finish_reason == ["eos"]


# One line for each block, in their order: what must hold once it has run.
CHECKS = (first, library, rollout, choices, engine)


def test_every_block_is_here():
    assert len(BLOCKS) == len(CHECKS)


@pytest.mark.parametrize(
    "block, check", list(zip(BLOCKS, CHECKS, strict=False)), ids=lambda x: getattr(x, "__name__", "")
)
def test_block_runs(block, check, capsys):
    names: dict = {}
    exec(compile(block.replace(FROM_THE_HUB, ""), "README.md", "exec"), names)
    check(names, capsys)


def test_the_core_is_as_long_as_it_says():
    places, said = re.search(r"<!-- core -->(.*?): ([\d,]+) lines", README, re.DOTALL).groups()
    library = Path(xj.__file__).parent
    files = [library / place for place in re.findall("`(.+?)`", places)]
    files = [file for path in files for file in (path.glob("*.py") if path.is_dir() else [path])]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(int(said.replace(",", "")) - lines) < 0.1 * lines, lines
