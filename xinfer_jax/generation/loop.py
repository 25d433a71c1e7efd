"""The traced executor: the whole model as one program, which takes prompts to tokens by any strategy.

tokens_BT ─ PREFILL ─► logits_BV ─ _SAMPLE ─► state ─ DECODE, the loop: append K/V → attend → sample

On one CPU `LayerwiseExecutor` takes its place: the host calls programs of a few layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache.kv_cache import KVCache, reorder, reorder_tail
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..model.decoder import hidden_states, run_model, unembed
from ..ops.operation import match_varying_axes, over_any_mesh, run, without_gradient
from ..weights.params import Params, activation_dtype
from .executor import (
    PaddedTokens,
    ParamsAndConfig,
    Run,
    bucket,
    decode_compiler_options,
    inline,
    prefill_chunk_size,
    run_program,
)
from .state import DecodeState, sample_and_append
from .strategies import Carry, Strategy


@over_any_mesh
def prefill_chunks(  # noqa: PLR0913
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    num_tokens_B: jax.Array,
    cache: KVCache,
    run_config: RunConfig,
    chunk: int,
    inputs_BTD: jax.Array | None = None,
    return_routes: bool = False,
    taps: Any = None,
) -> tuple[Any, ...]:
    """Logits [B, V] after each row's last token, and the cache with the tokens appended; and the routes if
    they are asked for. A forward pass takes `chunk` tokens of each row. Chunks that are all padding are
    skipped. A row without tokens stays as it is.
    """
    B, T = tokens_BT.shape

    def run_chunk(tokens_BT, num_tokens_B, cache, previous_BD, inputs_BTD):
        """The last hidden state of each row in the chunk; the previous one where the chunk is all padding."""
        how = dict(inputs_BTD=inputs_BTD, return_routes=return_routes, taps=taps, impl=run_config.impl)
        hidden_BTD, *others = hidden_states(params, config, tokens_BT, cache, num_tokens_B, **how)
        others = others[: 1 + return_routes]
        last_BD = last_hidden(hidden_BTD, num_tokens_B)
        return jnp.where((num_tokens_B > 0)[:, None], last_BD, previous_BD), *others

    none_BD = jnp.zeros((B, config.hidden_size), activation_dtype(params))
    if isinstance(T, int) and T <= chunk:  # else it may be symbolic
        last_BD, *others = run_chunk(tokens_BT, num_tokens_B, cache, none_BD, inputs_BTD)
        return unembed(params, config, last_BD), *others
    padding = (0, 0), (0, -(-T // chunk) * chunk - T)
    padded = jax.tree.map(lambda x: jnp.pad(x, (*padding, (0, 0))[: x.ndim]), (tokens_BT, inputs_BTD))

    def body(i, carry):
        last_BD, cache, *routes = carry
        tokens, inputs = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * chunk, chunk, 1), padded)
        count_B = jnp.clip(num_tokens_B - i * chunk, 0, chunk)
        last_BD, cache, *used = run_chunk(tokens, count_B, cache, last_BD, inputs)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=i * chunk, axis=1)
        return last_BD, cache, *map(put, routes, used)

    chunks = -(-jnp.max(num_tokens_B) // chunk)
    routes = []
    if return_routes:
        from ..model.routes import free_routes  # optional: routes

        routes = [free_routes(config, padded[0].shape)]
    carry = match_varying_axes(
        (none_BD, cache, *routes), params, tokens_BT, num_tokens_B, cache, inputs_BTD, taps
    )
    carry = lax.fori_loop(0, chunks, body, carry)
    carry = without_gradient(carry, f"prefill in chunks of {chunk}", "give forward the cache")
    last_BD, cache, *routes = carry
    return unembed(params, config, last_BD), cache, *(x[:, :T] for x in routes)


def prefill_uncached(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: jax.Array, run_config: RunConfig
) -> jax.Array:
    """Logits [B, V] after each row's last token, without a cache."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT, None, num_tokens_B, impl=run_config.impl)
    return unembed(params, config, last_hidden(hidden_BTD, num_tokens_B))


def hidden_uncached(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: jax.Array, run_config: RunConfig
) -> jax.Array:
    """Hidden states [B, T, D] of whole rows, without a cache."""
    return hidden_states(params, config, tokens_BT, None, num_tokens_B, impl=run_config.impl)[0]


def last_hidden(hidden_BTD: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """[B, D]: the hidden state of each row's last token; of the first one in a row without tokens."""
    return jnp.take_along_axis(hidden_BTD, jnp.maximum(num_tokens_B - 1, 0)[:, None, None], 1)[:, 0]


class Hidden(NamedTuple):
    """Hidden states of a forward pass within a trace, and the model, whose head makes logits of them."""

    model: ParamsAndConfig
    hidden: jax.Array  # [B, D] or [B, T, D]
    routes: jax.Array | None = None  # [B, T, L, U], where the inputs had them


def to_logits(x: Any) -> Any:
    """The logits of `Hidden`; anything else stays."""
    return unembed(*x.model, x.hidden) if isinstance(x, Hidden) else x


class TracedExecutor:
    """The `Executor` that makes one program of each of its calls. Within such a program the steps of a
    strategy use one whose `run` is `inline`.
    """

    name = "whole"
    about = "the model is one program, with its loop on the device"

    def __init__(self, run_config: RunConfig, run: Run = run_program, greedy: bool = False, taps: Any = None):
        """taps: of prompts; those of steps are among a strategy's constants."""
        self.run_config = run_config
        self.run = run
        self._taps = taps

    @staticmethod
    def prefill_width(longest: int, rows: int) -> int:
        return bucket(longest)

    def prefill(
        self, model: ParamsAndConfig, tokens: PaddedTokens, cache: KVCache | None, chunk: int = 0
    ) -> Any:
        if cache is None:
            return self.run(_PREFILL_UNCACHED, *model, *tokens, self.run_config), None
        how = self.run_config, prefill_chunk_size(cache), None, False, self._taps
        return self.run(PREFILL.donating, *model, *tokens, cache, *how)

    def hidden(self, model: ParamsAndConfig, tokens: PaddedTokens) -> jax.Array:
        return self.run(_HIDDEN_UNCACHED, *model, *tokens, self.run_config)

    def logits(self, model: ParamsAndConfig, outputs: Any) -> Any:
        return outputs

    def decode(self, strategy: Strategy, constants: tuple, carry: Carry, steps: int) -> Carry:
        return self.run(DECODE, strategy, constants, carry, np.int32(steps), self.run_config)

    def search(self, strategy: Any, constants: tuple, logits: Any, cache: KVCache, steps: int) -> Any:
        return self.run(_SEARCH, strategy, constants, logits, cache, self.run_config)

    def reorder(self, cache: KVCache, index_R: Any) -> KVCache:
        return self.run(REORDER, cache, index_R)

    def forward(
        self, model: ParamsAndConfig, make_inputs: Callable, args: tuple, cache: KVCache, position: int | None
    ) -> tuple[Hidden, KVCache]:
        inputs, cache = make_inputs(cache, *args)
        hidden_BTD, cache, routes, _ = run_model(*model, inputs, cache, self.run_config)
        return Hidden(model, hidden_BTD if position is None else hidden_BTD[:, position], routes), cache

    def sample(self, outputs: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        return self.run(_SAMPLE, outputs, state, self.run_config), None

    def call(self, function: Any, *args: Any, takes_hidden: bool = False) -> Any:
        return self.run(function, *(args if takes_hidden else map(to_logits, args)))

    repeat = staticmethod(lax.fori_loop)
    reorder_tail = staticmethod(reorder_tail)


def decode(strategy: Strategy, constants: tuple, carry: Carry, steps: Any, run_config: RunConfig) -> Carry:
    """The carry after so many steps (int32) of a strategy, or fewer where all rows end. steps: None: no
    limit.
    """
    executor = TracedExecutor(run_config, inline)
    return loop_until_done(
        lambda *carry: strategy.step(executor, constants, carry)[0],
        lambda *carry: strategy.continues(constants, carry),
        steps,
        *match_varying_axes(carry, carry, constants),
    )


def loop_until_done(step: Callable, continues: Callable, steps: Any, *carry: Any) -> Carry:
    """`carry = step(*carry)` while `continues(*carry)`, at most so many times (int32); steps: None: no
    limit.
    """
    if steps is None:
        return lax.while_loop(lambda carry: continues(*carry), lambda carry: step(*carry), carry)
    _, *carry_after = lax.while_loop(
        lambda counted: (counted[0] < steps) & continues(*counted[1:]),
        lambda counted: (counted[0] + 1, *step(*counted[1:])),
        (jnp.int32(0), *carry),
    )
    return tuple(carry_after)


def search(
    strategy: Any, constants: tuple, logits_BV: jax.Array, cache: KVCache, run_config: RunConfig
) -> Any:
    """The results of a strategy that runs to its end."""
    carry, _ = strategy.init(TracedExecutor(run_config, inline), constants, logits_BV, cache)
    return strategy.results(decode(strategy, constants, carry, None, run_config))


def sample(outputs: Any, state: DecodeState, run_config: RunConfig) -> DecodeState:
    """`sample_and_append` of logits [B, V], or of `Hidden`."""
    if not isinstance(outputs, Hidden):
        return sample_and_append(outputs, state, run_config)
    params, config = outputs.model

    def plain(params: Params, hidden_BD: jax.Array, state: DecodeState) -> DecodeState:
        return sample_and_append(unembed(params, config, hidden_BD), state, run_config)

    operands = dict(params=params, hidden_BD=outputs.hidden, state=state)
    return run("sample_from_hidden", plain, run_config, static=dict(config=config), **operands)


class JitVariants(NamedTuple):
    """A function jitted twice: `keeping` leaves its arguments as they are; `donating` reuses the memory of
    those that it replaces.
    """

    keeping: Any
    donating: Any


def jit_variants(function: Any, *static: str) -> JitVariants:
    """`donating` reuses the memory of the argument `cache`."""
    jit = partial(jax.jit, static_argnames=static)
    return JitVariants(jit(function), jit(function, donate_argnames="cache"))


PREFILL = jit_variants(prefill_chunks, "config", "run_config", "chunk", "return_routes")
# With options it cannot be called in a caller's jit.
DECODE = jax.jit(
    decode,
    static_argnames=("strategy", "run_config"),
    donate_argnames="carry",
    compiler_options=decode_compiler_options(),
)
REORDER = jax.jit(reorder)
_PREFILL_UNCACHED = jax.jit(prefill_uncached, static_argnames=("config", "run_config"))
_HIDDEN_UNCACHED = jax.jit(hidden_uncached, static_argnames=("config", "run_config"))
_SAMPLE = jax.jit(sample, static_argnames="run_config")
_SEARCH = jax.jit(search, static_argnames=("strategy", "run_config"))
