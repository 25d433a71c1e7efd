"""The programs that `LayerwiseExecutor` calls, and which layers a program has."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..cache.kv_cache import increase_length
from ..config.model_config import ModelConfig
from ..config.run_config import DEFAULT
from ..generation.executor import decode_compiler_options
from ..generation.loop import last_hidden
from ..generation.state import append_token, record_token
from ..mixers.mixer import Positions
from ..model.decoder import embed_inputs, head_logits, last_norm
from ..model.decoder_layer import LayerInputs, layer_kinds, run_layers
from ..model.extras import Extras
from ..model.routes import routes_used
from ..ops.largest import argmax
from ..sampling.sampler import choose_tokens, token_logprobs

_LONGEST_PERIOD = 8  # layers


class LayersCall(NamedTuple):
    """The arguments of `run_layers` for the layers of a group, in addition to hidden states and caches."""

    positions: Positions
    inputs: tuple[LayerInputs, ...]
    extras: Extras


@functools.lru_cache(maxsize=64)
def layer_groups(config: ModelConfig, most: int) -> tuple[slice, ...]:
    """Returns the layers of each program, at most `most`. A group is whole periods of the kinds of layers, if
    a period has at most eight layers. It may be larger for one period, unless `most` is 1. All groups have
    the same size if possible, so that few programs are compiled.
    """
    L = config.num_hidden_layers
    kinds = layer_kinds(config)
    period = next(p for p in range(1, L + 1) if all(kinds[i] == kinds[i % p] for i in range(L)))
    sizes = range(period, most + 1, period)
    largest = max(sizes, default=period if most > 1 and period <= _LONGEST_PERIOD else most)
    size = max((size for size in sizes if L % size == 0 and 2 * size >= largest), default=largest)
    return tuple(slice(first, first + size) for first in range(0, L, size))


def _embed(params, config, extras, make_inputs, args, lengths, capacity):
    """Returns the inputs of the first layer, made from `make_inputs(lengths, *args)`, and the lengths of the
    cache after these tokens.
    """
    inputs, lengths = make_inputs(lengths, *args)
    params = extras.adapted(params)
    x_BTD, positions, of_layers = embed_inputs(params, config, inputs, extras, lengths, DEFAULT)
    if lengths is not None:
        lengths = increase_length(lengths, inputs.num_tokens_B, capacity)
    return x_BTD, positions, of_layers, lengths


def _last(x_BTD, num_tokens_B, previous_B1D):
    """Returns, [B, 1, D], the hidden state of each row's last token, or the previous one if a row has
    none.
    """
    return jnp.where(
        (num_tokens_B > 0)[:, None, None], last_hidden(x_BTD, num_tokens_B)[:, None], previous_B1D
    )


def _head(params, config, x_BTD):
    return head_logits(params, config, last_norm(params, config, x_BTD))


def _layers(layers, head, is_last, group, x_BTD, call, caches, run_config):
    """Runs a group of layers. The last group also applies the head. In a separate program the head took 2 ms
    more per token. All groups of a size share one program: `is_last` is traced. is_last: None: it is the
    last. call: a `LayersCall`.
    """
    out = run_layers(layers, group, x_BTD, *call, caches, run_config)
    x_BTD, caches, experts = out
    config = group.config
    if head is None:
        return x_BTD, None, caches, experts
    if is_last is None:
        return x_BTD, _head(head, config, x_BTD), caches, experts

    def no_logits():
        return jnp.zeros((*x_BTD.shape[:2], config.vocab_size), jnp.float32)

    logits_BTV = lax.cond(is_last, lambda: _head(head, config, x_BTD), no_logits)
    return x_BTD, logits_BTV, caches, experts


def _record_routes(pages, experts, positions):
    """Returns `RoutePages` with the experts [B T, U] that layers used."""
    return pages.record(routes_used(experts, positions), positions.start_B, positions.num_tokens_B)


def _most_likely(logits_B1V, run_config):
    return argmax(logits_B1V[:, 0], run_config)


def _sample(logits_B1V, state, run_config, taken):
    """Returns a token of each row and, if they are `taken`, the logits [B, V] that it was sampled from."""
    rows = state.key_B, state.sampling_B, state.context
    token_B, _, sampled_from = choose_tokens(logits_B1V[:, 0], *rows, run_config)
    return token_B, sampled_from() if taken else None


def _record(alternatives, logits_B1V, taken_BV, token_B, state):
    """Returns `record_token` of a state without alternatives. taken_BV: None: the logits."""
    state = dataclasses.replace(state, alternatives=alternatives)
    logits_BV = logits_B1V[:, 0]
    taken_BV = logits_BV if taken_BV is None else taken_BV
    return record_token(logits_BV, lambda: taken_BV, token_B, state).alternatives


def _append(logits_B1V, token_B, state):
    """Returns the state with the token of each active row, and the rows that continue. Greedy and sampled
    tokens share this program, so a log-probability has the same bits next to any other rows.
    """
    state = append_token(state, token_B, token_logprobs(logits_B1V[:, 0], token_B))
    return state, state.active_B


def _reorder_layer(keys, index_B):
    return keys.reorder(index_B)


def _reorder_tail(keys, index_B, first, count):
    return keys.reorder_tail(index_B, first, count)


EMBED = jax.jit(_embed, static_argnames=("config", "make_inputs", "capacity"))
LAYERS = jax.jit(
    _layers,
    static_argnames=("group", "run_config"),
    donate_argnames=("x_BTD", "caches"),
    compiler_options=decode_compiler_options(),
)
RECORD_ROUTES = jax.jit(_record_routes, donate_argnames="pages")
LAST = jax.jit(_last)
NORM = jax.jit(last_norm, static_argnames="config")
HEAD = jax.jit(_head, static_argnames="config", compiler_options=decode_compiler_options())
MOST_LIKELY = jax.jit(_most_likely, static_argnames="run_config")
SAMPLE = jax.jit(_sample, static_argnames=("run_config", "taken"))
RECORD = jax.jit(_record, donate_argnames="alternatives")
APPEND = jax.jit(_append, donate_argnames="state")
REORDER_LAYER = jax.jit(_reorder_layer)
REORDER_TAIL = jax.jit(_reorder_tail, static_argnums=3, donate_argnums=0)
