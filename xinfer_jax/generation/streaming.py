"""The host programs `generate` and `stream`: lists of ids in, lists of ids out, along the roads of roads.py.

prompts ─ bucket ─► tokens_BT ─ read ─► first token of each row ─ advance, a stride at a time ─► ids
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..weights.params import Params
from .options import Call, GenerateOptions, GenerateOutput, checked
from .programs import Ahead
from .rows import Rows, prepare
from .run import Run

_SYNC_SECONDS = 0.1  # a stream looks at the device about this often, which costs milliseconds each time …
_MOST_STRIDE = 32  # … but at least every so many tokens
_COMMON_STRIDE = 8  # … and so often where processes that measure different times must do the same


def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> GenerateOutput:
    """Continues every prompt. Their lengths may differ; each gives the tokens that it would give alone.

    The number of rows is rounded up to a power of two, as lengths are, so that few programs are compiled;
    rows that hold nothing cost their share of a step.

    Args:
        params, config: the model.
        prompts: token ids, at least one per prompt.
        options: None: `GenerateOptions()`.
        key: one PRNG key (row i then uses `fold_in(key, i)`) or one per prompt; only sampling needs it.

    Raises:
        InputError: a prompt, an option or a key that cannot be served, before anything is traced.
    """
    call = checked(params, config, prompts, options, key)
    run = Run(call, decodes_whole=True)
    while run.active_R.any():
        run.advance(call.options.max_new_tokens)
    return run.output()


def stream(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> "Stream":
    """`generate`, token by token. Arguments, errors and tokens are those of `generate`."""
    call = checked(params, config, prompts, options, key)
    if call.options.best_of not in (None, call.options.n):
        raise InputError(
            f"best_of={call.options.best_of} cannot be streamed: the best are known at the end, use generate"
        )
    return Stream(call)


class Stream(Iterator[list[int | None]]):
    """A call whose tokens come as they are chosen: iterating it gives one id per prompt at a time, None for a
    prompt that has ended.

    The host looks at the device about every 100 ms, so a fast model brings several tokens at once. One that
    is dropped costs no more than what is being compiled.
    """

    def __init__(self, call: Call):
        """call: from `checked`; nothing runs before the first ids are asked for."""
        self._call = call
        self._given = 0
        self._told = False
        self._output: GenerateOutput | None = None
        self._error: BaseException | None = None
        self._ids: Any = self._steps()

    def prepare(self) -> Ahead:
        """Begins to compile what the stream runs, in threads, and returns: for whoever has other work to do.
        The parameters may be shapes; another stream of the same kind, with the weights, finds its programs.
        """
        return prepare(Rows(self._call, decodes_whole=False, do=Ahead()))[0]

    def __next__(self) -> list[int | None]:
        if self._error is not None:
            raise self._error
        return next(self._ids)

    def stop(self) -> None:
        """Ends the answers after the ids that were given, with the finish_reason "stop"; called while another
        thread waits for ids, it ends them there. The prompts are read all the same.
        """
        self._told = True
        for _ in () if self._ids.gi_running else self:
            pass

    @property
    def output(self) -> GenerateOutput:
        """What `generate` returns.

        Raises:
            InputError: the stream has not ended. What broke it off is raised again.
        """
        if self._error is not None:
            raise self._error
        if self._output is None:
            raise InputError("the stream has not ended: take all its ids, or stop() it, before its output")
        return self._output

    def _steps(self) -> Iterator[list[int | None]]:
        try:
            yield from self._run()
        except BaseException as error:
            self._error = error
            raise

    def _run(self) -> Iterator[list[int | None]]:
        run = Run(self._call, decodes_whole=False)
        while True:
            for step in range(self._given, run.steps):
                if self._told:
                    break
                ids = run.ids(step)
                self._given = step + 1
                if any(token is not None for token in ids):
                    yield ids
            if self._told or not run.active_R.any():
                break
            seconds = run.stats.tpot_seconds or _SYNC_SECONDS
            stride = min(_MOST_STRIDE, math.ceil(_SYNC_SECONDS / seconds))
            run.advance(stride if jax.process_count() == 1 else _COMMON_STRIDE)
        self._output = run.output(self._given if self._told else None)
