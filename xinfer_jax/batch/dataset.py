"""`DatasetGenerator`: an engine behind a call that takes and gives batches of columns."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint.loading import load_model
from ..engine.engine import Engine
from ..errors import InputError, shown
from ..generation.options import GenerateOptions
from .lines import Line, plain
from .work import Defaults, Work


class DatasetGenerator:
    """Answers batches of prompts: what Ray Data's `map_batches` takes. It can be pickled; its engine is made
    where it is first called.
    """

    def __init__(  # noqa: PLR0913  a door
        self, model: str | None = None, options: GenerateOptions | None = None, *, seed: int = 0,
        raw: bool = False, system: str | None = None, dtype: str | None = None, quantize: str | None = None,
        activations: str | None = None, escape_control_tokens: bool = True, **shape: Any,
    ):  # fmt: skip
        """Args:
        model, dtype, quantize, activations: as `load_model` takes them.
        options, seed, raw, system, escape_control_tokens: as in `generate_file`.
        shape: further arguments of `Engine`.
        """
        self._model = model, dtype, quantize, None, activations
        self._given = (options, seed, raw, system, False, escape_control_tokens)
        self._shape = shape
        self._engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a batch and those of its answers: `text`, `finish_reason`, `prompt_tokens`,
        `completion_tokens`, and `error`, "" where there is none.

        Args:
            batch: `prompt` (texts) or `messages`. With `custom_id` a row draws as that line of a file does.
                Without it a row draws by what it asks, and by how many rows before it in its batch ask the
                same. So batches may be cut anywhere, but rows that ask the same draw alike where they stand
                in different batches: give each a `custom_id`.

        Raises:
            InputError: neither column; options that no row can be served with, or several answers.
        """
        column = next((name for name in ("messages", "prompt") if name in batch), None)
        if column is None:
            raise InputError(f"a batch needs the column prompt or messages, got {shown(list(batch))}")
        if self._engine is None:
            model = load_model(*self._model)
            self._defaults = Defaults.of(model, *self._given)
            if (n := self._defaults.options.n) != 1:
                raise InputError(f"options.n={n}: a row has room for one answer, repeat the prompts instead")
            engine = Engine(model, **self._shape)
            self._defaults.check(engine)
            self._engine = engine
        asked = [json.dumps(value, default=plain) for value in batch[column]]  # Arrow nests arrays
        names = map(str, batch["custom_id"]) if "custom_id" in batch else _numbered(asked)
        bodies = [{column: json.loads(one)} for one in asked]
        rows = enumerate(zip(names, bodies, strict=True))
        work = [
            Work(Line(i, b"", name, body=body), self._engine, self._defaults, ()) for i, (name, body) in rows
        ]
        while self._engine.step():
            pass
        found = [json.loads(one.answer()) for one in work]
        usage = [row.get("usage", {}) for row in found]
        texts = {name: [row.get(name) or "" for row in found] for name in ("text", "finish_reason")}
        texts["error"] = [one.error for one in work]  # without its number, which hangs on the batch
        counts = {n: [u.get(n, 0) for u in usage] for n in ("prompt_tokens", "completion_tokens")}
        made = {name: np.array(values, object) for name, values in texts.items()}
        return dict(batch) | made | {name: np.array(values, np.int64) for name, values in counts.items()}


def _numbered(asked: Sequence[str]) -> Iterator[str]:
    """Names of rows: what each asks; behind that, where others of the batch asked the same, its number."""
    seen = Counter[str]()
    for one in asked:
        seen[one] += 1
        yield one if seen[one] == 1 else f"{one} #{seen[one]}"
