"""`stream`: `generate`, token by token."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..ops.operation import without_mesh_context
from ..weights.params import Params
from .batch_generator import BatchGenerator
from .executor_choice import Compilation
from .options import GenerateOptions, GenerateOutput
from .validation import ValidatedCall, validate_call

_SYNC_SECONDS = 0.1  # between two copies of a stream's tokens to the host, which cost milliseconds each
_MAX_STEPS = 32  # between two copies
_COMMON_STEPS = 8  # with several processes: they measure different times, but must take the same steps


@without_mesh_context
def stream(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> "Stream":
    """Generates as `generate` does, and yields tokens while they are sampled.

    It takes the same arguments and gives the same tokens. Arguments are checked at once, and nothing runs
    before you take the first item.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> answer = [token for [token] in xj.stream(model.params, model.config, [ids])]
        >>> model.tokenizer.decode(answer)
        'The capital of France is Paris.'

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        prompts: a list of prompts. Each is a list with at least one token id.
        options: the options of the call. None takes `GenerateOptions()`, which is greedy, with at most 128
            tokens.
        key: one PRNG key (row i then uses `fold_in(key, i)`), or one key per prompt. Only sampling needs it.

    Returns:
        A `Stream`. Each item is a list with one id per answer, or None for an answer that has ended.

    Raises:
        InputError: `generate` would raise it, or `options.best_of` differs from `options.n`, since the best
            answers are known only at the end.
    """
    call = validate_call(params, config, prompts, options, key)
    if call.options.best_of not in (None, call.options.n):
        best_of = call.options.best_of
        raise InputError(
            f"best_of={best_of} cannot be streamed, the best answers are known only at the end: use generate"
        )
    return Stream(call)


class Stream(Iterator[list[int | None]]):
    """A call of `stream`, whose tokens arrive as they are sampled.

    Each item of the iterator is a list with one id per answer, or None for an answer that has ended. The host
    copies tokens from the device about every 100 ms, so a fast model gives several items at a time. You can
    drop a stream at any point. It then costs no more than the programs that are being compiled.
    """

    def __init__(self, call: ValidatedCall):
        """Creates the stream. Nothing runs before the first item is taken.

        Args:
            call: the checked arguments, from `validate_call`.
        """
        self._call = call
        self._num_taken = 0
        self._stopped = False
        self._output: GenerateOutput | None = None
        self._error: BaseException | None = None
        self._ids: Any = self._steps()

    @without_mesh_context
    def prepare(self) -> Compilation:
        """Begins to compile the stream's programs in threads, and returns.

        The parameters may be shapes (`jax.ShapeDtypeStruct`). A later stream with weights of these shapes and
        with equal options uses the programs. For example, you can compile while the weights are loaded.
        """
        return BatchGenerator(self._call, decodes_whole=False).precompile()[0]

    @without_mesh_context
    def __next__(self) -> list[int | None]:
        if self._error is not None:
            raise self._error
        return next(self._ids)

    @without_mesh_context
    def stop(self) -> None:
        """Ends the answers after the ids that you took, with the finish_reason "abort".

        You can call it from another thread. The iteration of a thread that waits for ids then ends. The
        prompts are prefilled in any case.
        """
        self._stopped = True
        if not self._ids.gi_running:
            for _ in self:
                pass

    @property
    def output(self) -> GenerateOutput:
        """The result of the call, as `generate` returns it.

        Raises:
            InputError: the stream has not ended. If an error ended the stream, that error is raised again.
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
        batch = BatchGenerator(self._call, decodes_whole=False)
        batch.start()
        while True:
            for step in range(self._num_taken, batch.steps):
                if self._stopped:
                    break
                ids = batch.ids(step)
                self._num_taken = step + 1
                if any(token is not None for token in ids):
                    yield ids
            if self._stopped or not batch.active_R.any():
                break
            seconds = batch.stats.tpot_seconds or _SYNC_SECONDS
            steps = min(_MAX_STEPS, math.ceil(_SYNC_SECONDS / seconds))
            batch.decode(steps if jax.process_count() == 1 else _COMMON_STEPS)
        self._output = batch.output(self._num_taken if self._stopped else None)
