"""`Executor`: how a model is run. Everything that a call of `generate` runs is written over it. Sizes of
arrays are rounded up, so that few programs are compiled.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..cache.kv_cache import KVCache
from ..checks import is_traced
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..model.decoder import ModelOutput
from ..model.extras import NO_EXTRAS, Extras
from ..registry import plugin
from ..weights.params import Params
from .state import DecodeState


class RunnableModel(NamedTuple):
    """A model, and the `Extras` that the rows of a call bring along."""

    params: Params
    config: ModelConfig
    extras: Extras = NO_EXTRAS


# tokens_BT, and how many of each row are real, num_tokens_B
PaddedTokens = tuple[Any, Any]
# (program, *args) -> what the jitted function returns for these arguments: `run_program`; within a trace
# `inline`; in a dry run a `Precompiler`, which compiles the program, and returns shapes.
Run = Callable[..., Any]

_MIN_BUCKET = 16
# Tokens of a row in a prefill chunk: small chunks keep attention scores and activations small.
_CHUNK = 512


run_program: Run = operator.call  # program(*args)


def inline(program: Any, *args: Any) -> Any:
    """Traces a jitted function into the caller's program and returns its result."""
    return program.__wrapped__(*args)


class Executor(Protocol):
    """Runs a model and its steps. `loop.TracedExecutor` makes one program of each call. `LayerwiseExecutor`
    calls programs of a few layers from the host. A dry run is one of them with a `run` that compiles.
    """

    host_steps: bool  # the host calls the programs of each step
    name: str
    about: str
    run_config: RunConfig
    run: Run

    def __init__(self, run_config: RunConfig, run: Run = run_program, greedy: bool = False):
        """Makes an executor. greedy: True: no row uses a sampling setting. Layer by layer, no sampler is
        compiled then.
        """

    @staticmethod
    def prefill_width(longest: int, rows: int) -> int:
        """Returns tokens of a row that the prefill program is compiled for. longest: tokens of the longest
        row.
        """

    def prefill(
        self, model: RunnableModel, tokens: PaddedTokens, cache: KVCache | None, chunk: int = 0
    ) -> ModelOutput[Any]:
        """Runs the model on the tokens and returns its output for each row's last token: `logits` takes its
        `hidden`. The tokens are appended to the cache, whose memory is reused. Without a cache the tokens are
        the whole rows.

        Args:
            model: the parameters, the config and the extras.
            tokens: the tokens of the rows, with padding.
            cache: the KV cache, or None.
            chunk: tokens of a row per forward pass, for an executor that runs few layers at once. 0:
                `prefill_width`.
        """

    def hidden(
        self, model: RunnableModel, tokens: PaddedTokens, cache: KVCache | None = None
    ) -> ModelOutput[Any]:
        """Returns the output of the model for each token of one chunk, with hidden states [B, T, D]. Without
        a cache the chunk is whole rows.
        """

    def logits(self, model: RunnableModel, outputs: Any) -> Any:
        """Returns, from the outputs of `prefill`, the values that `sample` and `search` take."""

    def decode(
        self, strategy: Any, constants: tuple, carry: tuple, steps: Any, watched_B: Any = None
    ) -> tuple:
        """Returns the carry after this number of steps (int32) of the strategy. There are fewer steps if all
        rows end, or a row of `watched_B`, bool.
        """

    def run_steps(self, function: Callable, static: Any, donated: Any, args: Any) -> Any:
        """Runs `function(executor, static, donated, args)`: one program of a traced executor, for each
        `static`, which reuses the memory of `donated`.
        """

    def search(self, strategy: Any, constants: tuple, logits: Any, cache: KVCache, steps: int) -> Any:
        """Returns the results of a strategy that runs from the logits of prompts to its end, in at most
        `steps`.
        """

    def reorder(self, cache: KVCache, index_R: Any) -> KVCache:
        """Returns the rows in another order: row r of the result is row index_R[r]."""

    # The steps of a strategy use these too.

    def forward(
        self, model: RunnableModel, make_inputs: Callable, args: tuple, cache: KVCache, position: int | None
    ) -> ModelOutput[Any]:
        """Runs the model on `make_inputs(cache, *args)`: `Inputs`, and the cache to append them to.

        Args:
            position: the position whose logits are used: 0, -1, or None for all.

        Returns:
            The output, whose `hidden` `sample` and `call` take.
        """

    def sample(self, outputs: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        """Returns the state with the next token of each active row and, if the host runs the steps, the rows
        that continue.
        """

    def call(self, function: Any, *args: Any, takes_hidden: bool = False) -> Any:
        """Runs `function(*args)` of a jitted function without layers. Outputs of `forward` become logits,
        unless the function takes `loop.Hidden` too, which they are within a trace.
        """

    def repeat(self, first: int, end: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Runs `carry = body(i, carry)` for i from `first` to `end` - 1."""

    def reorder_tail(self, cache: KVCache, index_B: Any, first: Any, count: int) -> KVCache:
        """Runs `kv_cache.reorder_tail`."""


def without_model_layers(model: RunnableModel) -> tuple[Params, ModelConfig]:
    """Returns the model with the parameters before and after the layers only."""
    params, config, _ = model
    return {**params, "layers": ((),) * config.num_hidden_layers}, config


def decode_compiler_options() -> dict[str, Any] | None:
    """Returns XLA's options for decode programs on this machine. None: its defaults."""
    options = plugin("compiler", "options")
    return None if options is None else options()


def prefill_chunk_size(cache: KVCache) -> int:
    """Returns the number of tokens of a row in a prefill chunk: `device_chunk_size`, or fewer if the cache
    does not allow so large a chunk.
    """
    return min(device_chunk_size(cache.length_B), cache.most_at_once)


def device_chunk_size(length_B: Any) -> int:
    """Returns tokens of a row in a prefill chunk, for the device, if it is known. length_B: an array of the
    rows.
    """
    of_device = None if is_traced(length_B) else plugin("device", "chunk of all rows")
    of_all_rows = of_device(length_B) if of_device else _CHUNK
    rows = length_B.shape[0]  # it may be symbolic
    of_row = of_all_rows // next_power_of_two(rows) if isinstance(rows, int) else _CHUNK
    return max(_CHUNK, of_row)


def bucket(size: int) -> int:
    """Returns the smallest power of two that is at least `size`, and at least 16: for lengths."""
    return max(_MIN_BUCKET, next_power_of_two(size))


def next_power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`: for numbers of rows."""
    return 1 << (size - 1).bit_length()
