"""The README's Python blocks run as they stand, each on its own."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

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


def vmapped(names, capsys):
    assert names["mapped"].shape == (4, 16)


def gradients(names, capsys):
    assert jax.tree.structure(names["params_gradient"]) == jax.tree.structure(names["model"].params)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(names["params_gradient"]))


def best_of_n(names, capsys):
    assert names["best"] in map(names["tok"].decode, names["out"].tokens) and len(names["candidates"]) > 4


def choices(names, capsys):
    assert names["choice"] == "The capital of Spain is Madrid."


def reinforce(names, capsys):
    assert np.any(names["sampled_BT"] != 0)
    assert not np.array_equal(names["params"]["final_norm"], names["model"].params["final_norm"])


# One line for each block, in their order: what must hold once it has run.
CHECKS = (first, library, rollout, vmapped, gradients, best_of_n, choices, reinforce)


def test_every_block_is_here():
    assert len(BLOCKS) == len(CHECKS)


@pytest.mark.parametrize(
    "block, check", list(zip(BLOCKS, CHECKS, strict=False)), ids=lambda x: getattr(x, "__name__", "")
)
def test_block_runs(block, check, capsys):
    names: dict = {}
    exec(compile(block.replace(FROM_THE_HUB, ""), "README.md", "exec"), names)
    check(names, capsys)
