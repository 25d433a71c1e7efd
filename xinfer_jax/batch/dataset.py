"""`DatasetGenerator`: an engine behind a call that takes and gives batches of columns."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..checkpoint.loading import load_model
from ..engine.engine import Engine
from ..errors import InputError, shown
from ..generation.options import GenerateOptions
from .lines import Line
from .work import Defaults, Work


class DatasetGenerator:
    """Answers batches of prompts: what Ray Data's `map_batches` takes. It can be pickled; its engine is made
    where it is first called.
    """

    def __init__(
        self, model: str | None = None, options: GenerateOptions | None = None, *, seed: int = 0,
        raw: bool = False, system: str | None = None, dtype: str | None = None, quantize: str | None = None,
        **shape: Any,
    ):  # fmt: skip
        """Args:
        model, dtype, quantize: as `load_model` takes them.
        options, seed, raw, system: as in `generate_file`.
        shape: further arguments of `Engine`.
        """
        self._model, self._shape = (model, dtype, quantize), shape
        self._defaults = Defaults(options or GenerateOptions(), seed, raw, system, False)
        self._engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a batch and those of its answers: `text`, `finish_reason`, `prompt_tokens`,
        `completion_tokens`, and `error`, "" where there is none.

        Args:
            batch: `prompt` (texts) or `messages`. With `custom_id` a row draws as that line of a file does,
                without it by what it asks: batches may be cut anywhere.

        Raises:
            InputError: neither column.
        """
        column = next((name for name in ("messages", "prompt") if name in batch), None)
        if column is None:
            raise InputError(f"a batch needs the column prompt or messages, got {shown(list(batch))}")
        if self._engine is None:
            self._engine = Engine(load_model(*self._model), **self._shape)
        asked = [value.tolist() if isinstance(value, np.ndarray) else value for value in batch[column]]
        names = map(str, batch["custom_id"]) if "custom_id" in batch else map(json.dumps, asked)
        rows = zip(names, asked, strict=True)
        lines = [Line(i, 0, name, body={column: one}) for i, (name, one) in enumerate(rows)]
        work = [Work(line, self._engine, self._defaults) for line in lines]
        while self._engine.step():
            pass
        found = [json.loads(one.answer()) for one in work]
        usage = [row.get("usage", {}) for row in found]
        columns = {
            name: [row.get(name) or "" for row in found] for name in ("text", "finish_reason", "error")
        }
        columns |= {n: [u.get(n, 0) for u in usage] for n in ("prompt_tokens", "completion_tokens")}
        return dict(batch) | {name: np.array(values) for name, values in columns.items()}
