"""The README's Python block about the library runs as it stands."""

import re
from pathlib import Path

import jax
import numpy as np


def test_library_block_runs():
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "rollout" in b)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (1, names["ids"].shape[1], names["config"].vocab_size) and names["logits"].dtype == np.float32
    assert [len(row) for row in names["out"].tokens] == [8, 8]
    assert names["result"].tokens_BT.shape == (2, 16)
    assert isinstance(names["result"].cache.length_B, jax.Array)
