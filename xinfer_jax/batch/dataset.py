"""`DatasetGenerator`: an engine as a callable from batches of columns to batches of columns."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

import numpy as np

from ..checkpoint.loading import load_model
from ..engine.engine_options import EngineSettings
from ..engine.engines import Engine
from ..errors import InputError, format_value
from ..generation.options import GenerateOptions
from .input_lines import Line, json_default
from .line_request import LineDefaults, LineRequest

Column: TypeAlias = np.ndarray | Sequence[object]


class DatasetGenerator:
    """Answers batches of prompts as Ray Data's `map_batches` calls it.

    You can pickle it. The first call creates its engine.

    Args:
        model: a directory, a name on the hub, or a GGUF file (see `load_model`). None takes the bundled
            checkpoint.
        options: the options of all rows, with `n=1`. If `options.sampling` is None, the settings of the
            model's generation_config.json are used. None takes `GenerateOptions()`.
        seed: the seed of all rows. The random numbers of a row also depend on its custom_id (see
            `generate_file`).
        raw: True encodes the prompt of a row without the chat template.
        system: a system message that is put before the prompt of a row. None adds none.
        dtype: the dtype of floats (see `load_model`).
        quantize: the way in which matrices are quantized while they are loaded (see `load_model`).
        activations: "int8" also quantizes activations on a CPU (see `load_model`).
        escape_control_tokens: True encodes control tokens that a row spells as ordinary text (see
            `encode_prompt`).
        engine: fields of `EngineOptions`, for example `rows=16`.
    """

    def __init__(  # noqa: PLR0913  a public function
        self, model: str | None = None, options: GenerateOptions | None = None, *, seed: int = 0,
        raw: bool = False, system: str | None = None, dtype: str | None = None, quantize: str | None = None,
        activations: str | None = None, escape_control_tokens: bool = True, **engine: Unpack[EngineSettings],
    ):  # fmt: skip
        """Stores the arguments for the engine of the first call."""
        self._load_arguments = (model, dtype, quantize, None, activations)
        self._default_arguments = (options, seed, raw, system, False, escape_control_tokens)
        self._engine_arguments = engine
        self._engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": None}

    def __call__(self, batch: Mapping[str, Column]) -> dict[str, Column]:
        """Answers the prompts of a batch, and returns the columns of the batch with columns of the answers.

        The new columns are `text`, `finish_reason`, `prompt_tokens`, `completion_tokens`, and `error` ("" if
        there is no error).

        Args:
            batch: a mapping with the column `prompt` (texts) or `messages`. If it has the column `custom_id`,
                a row draws the same random numbers as a line of a file with that custom_id. Without it, the
                numbers depend on the prompt, and on the number of earlier rows of the batch with an equal
                prompt. So batches may be cut anywhere, but equal prompts in different batches draw equal
                numbers. To avoid this, give each row a `custom_id`.

        Raises:
            InputError: the batch has neither column, no row can be served with the options, or the options
                ask for several answers.
        """
        column = next((name for name in ("messages", "prompt") if name in batch), None)
        if column is None:
            raise InputError(f"a batch needs the column prompt or messages, got {format_value(list(batch))}")
        if self._engine is None:
            model = load_model(*self._load_arguments)
            self._defaults = LineDefaults.make(model, *self._default_arguments)
            if (n := self._defaults.options.n) != 1:
                raise InputError(f"options.n={n}: a row holds one answer, repeat the prompts instead")
            engine = Engine(model, **EngineSettings(warm_up=True) | self._engine_arguments)
            self._defaults.check(engine)
            self._engine = engine
        prompts = [json.dumps(value, default=json_default) for value in batch[column]]  # Arrow nests arrays
        ids = map(str, batch["custom_id"]) if "custom_id" in batch else _default_ids(prompts)
        bodies = [{column: json.loads(prompt)} for prompt in prompts]
        requests = [
            LineRequest(Line(i, b"", custom_id, body=body), self._engine, self._defaults, ())
            for i, (custom_id, body) in enumerate(zip(ids, bodies, strict=True))
        ]
        while self._engine.step():
            pass
        answers = [json.loads(request.output_line()) for request in requests]
        usage = [answer.get("usage", {}) for answer in answers]
        texts = {name: [answer.get(name) or "" for answer in answers] for name in ("text", "finish_reason")}
        texts["error"] = [request.error for request in requests]  # without the number, which is this batch's
        counts = {
            name: [row.get(name, 0) for row in usage] for name in ("prompt_tokens", "completion_tokens")
        }
        columns = {name: np.array(values, object) for name, values in texts.items()}
        columns |= {name: np.array(values, np.int64) for name, values in counts.items()}
        return dict(batch) | columns


def _default_ids(prompts: Sequence[str]) -> Iterator[str]:
    """Returns ids of rows without a custom_id: the prompt and, from its second occurrence on, a number."""
    seen = Counter[str]()
    for prompt in prompts:
        seen[prompt] += 1
        yield prompt if seen[prompt] == 1 else f"{prompt} #{seen[prompt]}"
