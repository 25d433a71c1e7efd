"""`LayerwiseExecutor`: programs of one or a few layers, which the host calls, on a CPU.

tokens_BT ─ EMBED ─ LAYERS, several times ─► x_BTD ─ LAST, HEAD ─► logits_B1V ─ APPEND ─► state ─ EMBED
─ LAYERS, several times, the last with the head ─► logits_B1V ─ APPEND ─► …
Before APPEND, MOST_LIKELY or SAMPLE chooses the tokens.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..cache.kv_cache import KVCache, without_layers
from ..cache.stored_kv import quantized_dtype
from ..config.run_config import RunConfig
from ..generation.executor import (
    PaddedTokens,
    Run,
    RunnableModel,
    bucket,
    next_power_of_two,
    prefill_chunk_size,
    run_program,
    without_model_layers,
)
from ..generation.loop import REORDER
from ..generation.state import DecodeState
from ..generation.strategies import Carry, Strategy, goes_on
from ..model.decoder import Inputs, ModelOutput
from ..model.decoder_layer import LayerGroup, all_layers
from ..model.extras import Extras
from ..model.routes import free_routes_of_layers
from ..sharding import concrete_mesh_of
from ..weights.params import Params, activation_dtype
from .layer_programs import (
    APPEND,
    EMBED,
    HEAD,
    LAST,
    LAYERS,
    MOST_LIKELY,
    NORM,
    RECORD,
    RECORD_ROUTES,
    REORDER_LAYER,
    REORDER_TAIL,
    SAMPLE,
    LayersCall,
    layer_groups,
)

# Layers of a decode program, at most. The 24 layers of the 0.5B shape in int8 take 1.13 times as long as the
# loop with one layer per program at 8 rows (1.07 at one row), and 1.03 with four or eight (1.04). Eight take
# twice as long to compile.
_DECODE_LAYERS = 5
# Bytes of logits from which on the last group has a program of its own: in a common one the others write
# zeros in their place, which took a sixth of a step of 64 rows at the 0.5B shape.
_LARGE_LOGITS = 2**24
# The system allocates buffers beyond 32 MiB anew for each program: in int8, chunks of 512 tokens took 1.5
# times as long as one program of all layers; chunks of 256 tokens do not. A prompt of several chunks is cut
# into equal ones: 300 tokens are two chunks of 160.
_CHUNK = 256  # tokens of all rows in a prefill chunk
_STEP = 32  # tokens of all rows: the size of a chunk is a multiple
_MIN_CHUNK = 16  # tokens of one row, for both


class LayerwiseExecutor:
    """The `Executor` that calls programs of one or a few layers from the host: the number of compiled
    programs does not grow with the layers. Outputs of `prefill` are hidden states [B, 1, D] before the last
    norm. Outputs of `forward` are logits [B, T, V].
    """

    host_steps = True
    name = "layer by layer"
    about = "programs for one or a few layers, called from the host"

    def __init__(self, run_config: RunConfig, run: Run = run_program, greedy: bool = False):
        self.run_config = run_config
        self.run = run
        self._greedy = greedy

    @staticmethod
    def prefill_width(longest: int, rows: int) -> int:
        """Returns tokens of a row per forward pass. One width serves the whole prompt, so that few programs
        are compiled, and padding is little.
        """
        batch = next_power_of_two(rows)
        most = max(_MIN_CHUNK, _CHUNK // batch)
        step = max(_MIN_CHUNK, _STEP // batch)
        chunks = max(1, -(-longest // most))
        return min(bucket(longest), -(-longest // (chunks * step)) * step)

    def prefill(
        self, model: RunnableModel, tokens: PaddedTokens, cache: KVCache | None, chunk: int = 0
    ) -> ModelOutput[Any]:
        tokens_BT, num_tokens_B = tokens
        B, T = tokens_BT.shape
        longest = int(num_tokens_B.max())
        chunk = _required_chunk(cache) or chunk or self.prefill_width(longest, B)
        chunk = T if cache is None else min(T, prefill_chunk_size(cache), chunk)
        padded_BT = np.pad(tokens_BT, ((0, 0), (0, -T % chunk)))
        last_B1D: Any = np.zeros((B, 1, model.config.hidden_size), activation_dtype(model.params))
        for first in range(0, longest, chunk):
            num_B = np.clip(num_tokens_B - first, 0, chunk)
            inputs = padded_BT[:, first : first + chunk], num_B
            x_BTD, cache = self._run_model(model, _prompt_chunk, inputs, cache, prefills=True)
            last_B1D = self.run(LAST, x_BTD, num_B, last_B1D)
        return ModelOutput(last_B1D, cache)

    def hidden(
        self, model: RunnableModel, tokens: PaddedTokens, cache: KVCache | None = None
    ) -> ModelOutput[Any]:
        x_BTD, cache = self._run_model(model, _prompt_chunk, tokens, cache, prefills=True)
        return ModelOutput(self.run(NORM, *without_model_layers(model), x_BTD), cache)

    def logits(self, model: RunnableModel, outputs: Any) -> jax.Array:
        """Returns float32 [B, 1, V]."""
        return self.run(HEAD, *without_model_layers(model), outputs)

    def reorder(self, cache: KVCache, index_R: Any) -> KVCache:
        layers = tuple(self.run(REORDER_LAYER, layer, index_R) for layer in cache.layers)
        return dataclasses.replace(self.run(REORDER, without_layers(cache), index_R), layers=layers)

    def decode(
        self, strategy: Strategy, constants: tuple, carry: Carry, steps: int, watched_B: Any = None
    ) -> Carry:
        flags = [np.bool_(True)]
        for _ in range(steps):
            # Of the step before the last, if possible: the device never waits for the host.
            if len(flags) > strategy.steps_ahead and not _goes_on(flags.pop(0), watched_B):
                break
            carry, active_B = strategy.step(self, constants, carry)
            flags.append(active_B)
        return carry

    def run_steps(self, function: Callable, static: Any, donated: Any, args: Any) -> Any:
        return function(self, static, donated, args)

    def search(self, strategy: Any, constants: tuple, logits: Any, cache: KVCache, steps: int) -> Any:
        carry, continues = strategy.init(self, constants, logits, cache)
        del cache  # the strategy has copied it: its memory is freed before the steps
        steps = steps - 1 if _goes_on(continues) else 0
        return strategy.results(self.decode(strategy, constants, carry, steps))

    def forward(
        self, model: RunnableModel, make_inputs: Callable, args: tuple, cache: KVCache, position: int | None
    ) -> ModelOutput[Any]:
        return ModelOutput(*self._run_model(model, make_inputs, args, cache, prefills=False))

    def sample(self, outputs: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        taken_BV = None
        alternatives = state.alternatives
        if self._greedy:
            token_B = self.run(MOST_LIKELY, outputs, self.run_config)
        else:
            is_taken = alternatives is not None
            token_B, taken_BV = self.run(SAMPLE, outputs, state, self.run_config, is_taken)
        state = dataclasses.replace(state, alternatives=None)
        if alternatives is not None:
            args = outputs, taken_BV, token_B, state
            parts = [self.run(RECORD, part, *args) for part in alternatives.parts]
            alternatives = dataclasses.replace(
                parts[-1], processed_logprobs_BT=parts[0].processed_logprobs_BT
            )
        state, active_B = self.run(APPEND, outputs, token_B, state)
        return dataclasses.replace(state, alternatives=alternatives), active_B

    def call(self, function: Any, *args: Any, takes_hidden: bool = False) -> Any:
        return self.run(function, *args)

    def repeat(self, first: int, end: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        for i in range(first, end):
            carry = body(np.int32(i), carry)
        return carry

    def reorder_tail(self, cache: KVCache, index_B: Any, first: Any, count: int) -> KVCache:
        layers = tuple(self.run(REORDER_TAIL, keys, index_B, first, count) for keys in cache.layers)
        return dataclasses.replace(cache, layers=layers)

    def _run_model(
        self, model: RunnableModel, make_inputs: Callable, args: tuple, cache: KVCache | None, prefills: bool
    ) -> tuple[Any, KVCache | None]:
        """Returns the logits [B, T, V] or, if it prefills, the hidden states [B, T, D] after the last layer.
        Also returns the cache with the inputs appended.
        """
        params, config, extras = model
        outer = without_model_layers(model)
        lengths = None if cache is None else without_layers(cache)
        capacity = None if cache is None else cache.capacity
        caches: list = [None] * len(config.cached_mixers) if cache is None else list(cache.layers)
        embed_args = make_inputs, args, lengths, capacity
        x_BTD, positions, inputs, lengths = self.run(EMBED, *outer, _of_outer(extras), *embed_args)
        if routed_experts := cache and cache.routed_experts:
            free = free_routes_of_layers(config, x_BTD.shape[:2])
            inputs = tuple(x._replace(route_BTU=y) for x, y in zip(inputs, free, strict=True))
        experts: list[Any] = []
        logits_BTV = None
        head = None if prefills else outer[0]
        layers = all_layers(config)
        for part in layer_groups(config, 1 if prefills else _DECODE_LAYERS):
            is_last: Any = np.bool_(part.stop >= config.num_hidden_layers)
            if 4 * math.prod(x_BTD.shape[:2]) * config.vocab_size > _LARGE_LOGITS:
                head = outer[0] if is_last and not prefills else None
                is_last = None
            group, used = _own_caches(layers.part(part))
            call = LayersCall(positions, inputs[part], extras.of_layers(part))
            x_BTD, logits_BTV, new, group_experts = self.run(
                LAYERS, params["layers"][part], head, is_last, group, x_BTD, call,
                tuple(caches[i] for i in used), self.run_config,
            )  # fmt: skip
            for i, layer in zip(used, new, strict=True):
                caches[i] = layer
            experts += group_experts
        if routed_experts:
            routed_experts = self.run(RECORD_ROUTES, routed_experts, experts, positions)
        if cache is not None:
            cache = dataclasses.replace(lengths, layers=tuple(caches), routed_experts=routed_experts)
        return x_BTD if prefills else logits_BTV, cache


def _of_outer(extras: Extras) -> Extras:
    """Returns the extras that the parts before the layers take: adapters."""
    outer = {name: extras.adapters[name] for name in extras.adapters if name != "layers"}
    return Extras(adapters=outer, adapter_B=extras.adapter_B if outer else None)


def _own_caches(group: LayerGroup) -> tuple[LayerGroup, list[int]]:
    """Returns the group with indices among the caches that it uses, so that equal groups share a program, and
    the indices of these caches.
    """
    used = sorted({cache for of_layer in group.caches for cache in of_layer})
    own = tuple(tuple(map(used.index, of_layer)) for of_layer in group.caches)
    return group._replace(caches=own), used


def layerwise_executor(params: Params) -> type[LayerwiseExecutor] | None:
    """Returns `LayerwiseExecutor` if the parameters are on one CPU, on which compiling takes most of the time
    to the first answer. Otherwise it returns None. The parameters may be shapes.
    """
    leaf = params["final_norm"]
    if concrete_mesh_of(leaf) is not None:
        return None
    if sharding := getattr(leaf, "sharding", None):
        platforms = [device.platform for device in sharding.device_set]
    else:
        platforms = [jax.default_backend()]
    return LayerwiseExecutor if platforms == ["cpu"] else None


def _goes_on(active_B: Any, watched_B: Any = None) -> bool:
    """Returns `goes_on` of an array on the device, or True in a dry run."""
    return isinstance(active_B, jax.ShapeDtypeStruct) or bool(goes_on(np.asarray(active_B), watched_B))


def _prompt_chunk(lengths, tokens_BT, num_tokens_B):
    """Returns the inputs of `EMBED` for these tokens."""
    return Inputs(tokens_BT, num_tokens_B), lengths


def _required_chunk(cache: KVCache | None) -> int | None:
    """Returns the least tokens of a prefill chunk that the cache's dtype demands. None: any number. If
    something is computed from a row's first chunk, a fixed size makes it independent of other rows.
    """
    found = None if cache is None else quantized_dtype(cache.dtype)
    return None if found is None else found.chunk
