"""The traced executor: the whole model as one program, which takes prompts to tokens by any strategy.

tokens_BT ─ PREFILL ─► logits_BV ─ _SAMPLE ─► state ─ DECODE, the loop: append K/V → attend → sample

On one CPU `LayerwiseExecutor` takes its place: the host calls programs of a few layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..cache.kv_cache import KVCache, reorder, reorder_tail
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..model.decoder import Inputs, ModelOutput, apply_model, head_logits
from ..model.extras import NO_EXTRAS, Extras
from ..ops.operation import Call, chosen_form, match_varying_axes, over_any_mesh, without_gradient
from ..weights.params import Params, activation_dtype
from .executor import (
    PaddedTokens,
    Run,
    RunnableModel,
    bucket,
    decode_compiler_options,
    inline,
    prefill_chunk_size,
    run_program,
)
from .state import DecodeState, sample_and_append
from .strategies import Carry, Strategy, goes_on


@over_any_mesh
def prefill_chunks(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    extras: Extras,
    cache: KVCache,
    chunk: int,
    run_config: RunConfig,
) -> ModelOutput[Any]:
    """Prefills in chunks, and returns the output of the model for each row's last token. Its `hidden` are
    logits [B, V]. A forward pass takes `chunk` tokens of each row. Chunks that are all padding are skipped. A
    row without tokens stays as it is.
    """
    num_tokens_B = inputs.num_tokens_B
    B, T = inputs.tokens_BT.shape

    def run_chunk(inputs: Inputs, cache: KVCache, previous_BD: jax.Array) -> ModelOutput[Any]:
        """Returns the last hidden state of each row in the chunk, or the previous one if the chunk is all
        padding.
        """
        out = apply_model(params, config, inputs, cache, extras, run_config)
        last_BD = last_hidden(out.hidden, inputs.num_tokens_B)
        has_tokens_B1 = (inputs.num_tokens_B > 0)[:, None]
        return ModelOutput(jnp.where(has_tokens_B1, last_BD, previous_BD), out.cache)

    none_BD = jnp.zeros((B, config.hidden_size), activation_dtype(params))
    if isinstance(T, int) and T <= chunk:  # else it may be symbolic
        out = run_chunk(inputs, cache, none_BD)
        return out._replace(hidden=head_logits(params, config, out.hidden))
    padding = (0, 0), (0, -(-T // chunk) * chunk - T)
    of_tokens = inputs._replace(num_tokens_B=None)
    padded = jax.tree.map(lambda x: jnp.pad(x, (*padding, (0, 0))[: x.ndim]), of_tokens)

    def body(i: jax.Array, carry: ModelOutput[Any]) -> ModelOutput[Any]:
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * chunk, chunk, 1), padded)
        part = part._replace(num_tokens_B=jnp.clip(num_tokens_B - i * chunk, 0, chunk))
        return run_chunk(part, carry.cache, carry.hidden)

    chunks = -(-jnp.max(num_tokens_B) // chunk)
    carry = ModelOutput(none_BD, cache)
    carry = match_varying_axes(carry, params, inputs, cache, extras)
    carry = lax.fori_loop(0, chunks, body, carry)
    out = without_gradient(carry, f"prefill in chunks of {chunk}", "give forward the cache")
    return out._replace(hidden=head_logits(params, config, out.hidden))


@over_any_mesh
def prefill_uncached(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: jax.Array, run_config: RunConfig
) -> jax.Array:
    """Returns logits [B, V] after each row's last token, without a cache."""
    out = hidden_of_tokens(params, config, Inputs(tokens_BT, num_tokens_B), NO_EXTRAS, None, run_config)
    return head_logits(params, config, last_hidden(out.hidden, num_tokens_B))


@over_any_mesh
def hidden_of_tokens(params, config, inputs, extras, cache, run_config) -> ModelOutput[Any]:
    """Returns the output of the model for each token. Without a cache the inputs are whole rows."""
    return apply_model(params, config, inputs, cache, extras, run_config)


def last_hidden(hidden_BTD: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """Returns, [B, D], the hidden state of each row's last token, or of the first token in a row without
    tokens.
    """
    return jnp.take_along_axis(hidden_BTD, jnp.maximum(num_tokens_B - 1, 0)[:, None, None], 1)[:, 0]


class Hidden(NamedTuple):
    """Hidden states of a forward pass within a trace, and the model, whose head makes logits of them."""

    params: Params
    config: ModelConfig
    states: jax.Array  # [B, D] or [B, T, D]


def to_logits(x: Any) -> Any:
    """Returns the logits of `Hidden`. Anything else stays."""
    return head_logits(*x) if isinstance(x, Hidden) else x


class TracedExecutor:
    """The `Executor` that makes one program of each of its calls. Within such a program the steps of a
    strategy use one whose `run` is `inline`.
    """

    host_steps = False
    name = "whole"
    about = "the model is one program, with its loop on the device"

    def __init__(self, run_config: RunConfig, run: Run = run_program, greedy: bool = False):
        self.run_config = run_config
        self.run = run

    @staticmethod
    def prefill_width(longest: int, rows: int) -> int:
        return bucket(longest)

    def prefill(
        self, model: RunnableModel, tokens: PaddedTokens, cache: KVCache | None, chunk: int = 0
    ) -> ModelOutput[Any]:
        params, config, extras = model
        if cache is None:
            return ModelOutput(self.run(_PREFILL_UNCACHED, params, config, *tokens, self.run_config))
        static = prefill_chunk_size(cache), self.run_config
        return self.run(PREFILL.donating, params, config, Inputs(*tokens), extras, cache, *static)

    def hidden(
        self, model: RunnableModel, tokens: PaddedTokens, cache: KVCache | None = None
    ) -> ModelOutput[Any]:
        params, config, extras = model
        return self.run(_HIDDEN, params, config, Inputs(*tokens), extras, cache, self.run_config)

    def logits(self, model: RunnableModel, outputs: Any) -> Any:
        return outputs

    def decode(
        self, strategy: Strategy, constants: tuple, carry: Carry, steps: Any, watched_B: Any = None
    ) -> Carry:
        return self.run(DECODE, strategy, constants, carry, steps, self.run_config, watched_B)

    def search(self, strategy: Any, constants: tuple, logits: Any, cache: KVCache, steps: int) -> Any:
        return self.run(_SEARCH, strategy, constants, logits, cache, self.run_config)

    def run_steps(self, function: Callable, static: Any, donated: Any, args: Any) -> Any:
        return self.run(_STEPS, function, static, donated, args, self.run_config)

    def reorder(self, cache: KVCache, index_R: Any) -> KVCache:
        return self.run(REORDER, cache, index_R)

    def forward(
        self, model: RunnableModel, make_inputs: Callable, args: tuple, cache: KVCache, position: int | None
    ) -> ModelOutput[Any]:
        params, config, extras = model
        inputs, cache = make_inputs(cache, *args)
        out = apply_model(params, config, inputs, cache, extras, self.run_config)
        states = out.hidden if position is None else out.hidden[:, position]
        return out._replace(hidden=Hidden(params, config, states))

    def sample(self, outputs: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        return self.run(_SAMPLE, outputs, state, self.run_config), None

    def call(self, function: Any, *args: Any, takes_hidden: bool = False) -> Any:
        return self.run(function, *(args if takes_hidden else map(to_logits, args)))

    repeat = staticmethod(lax.fori_loop)
    reorder_tail = staticmethod(reorder_tail)


def decode(
    strategy: Strategy,
    constants: tuple,
    carry: Carry,
    steps: Any,
    run_config: RunConfig,
    watched_B: Any = None,
) -> Carry:
    """Returns the carry after this number of steps (int32) of a strategy, or fewer if it ends. steps: None:
    no limit. watched_B: see `goes_on`.
    """
    step = partial(strategy.step, TracedExecutor(run_config, inline), constants)

    def continues(carry: Carry) -> jax.Array:
        return goes_on(strategy.active(constants, carry), watched_B)

    carry = match_varying_axes(carry, carry, constants)
    if steps is None:
        return lax.while_loop(continues, lambda carry: step(carry)[0], carry)
    counted = lax.while_loop(
        lambda counted: (counted[0] < steps) & continues(counted[1]),
        lambda counted: (counted[0] + 1, step(counted[1])[0]),
        (jnp.int32(0), carry),
    )
    return counted[1]


def search(
    strategy: Any, constants: tuple, logits_BV: jax.Array, cache: KVCache, run_config: RunConfig
) -> Any:
    """Returns the results of a strategy that runs to its end."""
    carry, _ = strategy.init(TracedExecutor(run_config, inline), constants, logits_BV, cache)
    return strategy.results(decode(strategy, constants, carry, None, run_config))


def run_steps(function: Callable, static: Any, donated: Any, args: Any, run_config: RunConfig) -> Any:
    """Runs `function(executor, static, donated, args)`, within a trace."""
    return function(TracedExecutor(run_config, inline), static, donated, args)


def sample(outputs: Any, state: DecodeState, run_config: RunConfig) -> DecodeState:
    """Runs `sample_and_append` of logits [B, V], or of `Hidden`."""
    if not isinstance(outputs, Hidden):
        return sample_and_append(outputs, state, run_config)
    params, config, hidden_BD = outputs

    plain = partial(_sample_hidden, config=config, run_config=run_config)
    operands = dict(params=params, hidden_BD=hidden_BD, state=state)
    form = chosen_form("sample_from_hidden", Call(plain, operands, dict(config=config), run_config))
    return (form or plain)(**operands)


def _sample_hidden(params, hidden_BD, state, config, run_config) -> DecodeState:
    return sample_and_append(head_logits(params, config, hidden_BD), state, run_config)


class JitVariants(NamedTuple):
    """A function jitted twice. `keeping` leaves its arguments as they are. `donating` reuses the memory of
    the arguments that it replaces.
    """

    keeping: Any
    donating: Any


def jit_variants(function: Any, *static: str) -> JitVariants:
    """Returns the function jitted twice. `donating` reuses the memory of the argument `cache`."""
    jit = partial(jax.jit, static_argnames=static)
    return JitVariants(jit(function), jit(function, donate_argnames="cache"))


PREFILL = jit_variants(prefill_chunks, "config", "run_config", "chunk")
# With options it cannot be called in a caller's jit.
DECODE = jax.jit(
    decode,
    static_argnames=("strategy", "run_config"),
    donate_argnames="carry",
    compiler_options=decode_compiler_options(),
)
_STEPS = jax.jit(
    run_steps,
    static_argnames=("function", "static", "run_config"),
    donate_argnames="donated",
    compiler_options=decode_compiler_options(),
)
REORDER = jax.jit(reorder)
_PREFILL_UNCACHED = jax.jit(prefill_uncached, static_argnames=("config", "run_config"))
_HIDDEN = jax.jit(hidden_of_tokens, static_argnames=("config", "run_config"), donate_argnames="cache")
_SAMPLE = jax.jit(sample, static_argnames="run_config")
_SEARCH = jax.jit(search, static_argnames=("strategy", "run_config"))
