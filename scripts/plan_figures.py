"""What a model asks of each device of a mesh `model=n`: bytes by formula, times that nothing is faster than,
and temporaries of its programs, compiled for GPUs that need not be here.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from bench_limits import bytes_per_pass, decode_work, experts_asked, prefill_work
from cards import Card
from jax.sharding import NamedSharding, PartitionSpec

from xinfer_jax.cache.kv_cache import KVCache, cache_bytes
from xinfer_jax.cache.paged import PAGE, Paged, empty_pools
from xinfer_jax.cache.quantized import KV_BITS, vector_bytes
from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.model.decoder import hidden_states, layer_kinds, unembed
from xinfer_jax.model.greedy import argmax
from xinfer_jax.weights.params import Params, check_quantize, param_specs, tree_bytes
from xinfer_jax.weights.quantized import METHODS, GroupedWeight, is_quantized, quantized_form

WEIGHTS = ("float32", "bfloat16", *METHODS)
MOST_DEVICES = 128


@dataclasses.dataclass(frozen=True)
class Job:
    """A model on an engine whose rows are full."""

    config: ModelConfig
    weights: str  # of WEIGHTS
    cache_dtype: str
    rows: int
    context: int  # tokens of each row
    chunk: int  # tokens of a prompt that are read at a time

    @property
    def dtype(self) -> Any:
        """Of activations."""
        return jnp.float32 if self.weights == "float32" else jnp.bfloat16

    def rate(self, card: Card) -> float:
        """FLOP/s of its products."""
        return 1e12 * (card.float32_tflops if self.weights == "float32" else card.tflops)

    @property
    def kv(self) -> Any:
        """Of keys and values: a float type, or a name in `KV_BITS`."""
        return self.cache_dtype if self.cache_dtype in KV_BITS else jnp.dtype(self.cache_dtype)

    @property
    def pages_of_a_row(self) -> int:
        return -(-self.context // PAGE)

    @property
    def pages(self) -> int:
        """With the one that nobody reads."""
        return self.rows * self.pages_of_a_row + 1


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on each device of a mesh."""

    weights: int
    pages: int
    row: int  # the pages of one
    temporaries: int | None  # None: not known

    @property
    def together(self) -> int:
        return self.weights + self.pages + (self.temporaries or 0)


@dataclasses.dataclass(frozen=True)
class Least:
    """Seconds of a pass that nothing is faster than: memory and arithmetic side by side, then the links."""

    memory: float
    compute: float
    links: float

    @property
    def together(self) -> float:
        return max(self.memory, self.compute) + self.links


# --- how a model is divided ---------------------------------------------------------------------------------


def undivided(job: Job, n: int) -> str:
    """What n devices do not divide, by name; "": they do."""
    config = job.config
    sizes = dict(num_attention_heads=config.num_attention_heads, vocab_size=config.vocab_size)
    if config.num_experts:
        sizes["num_experts"] = config.num_experts
    if not all(config.layer_experts) or not config.layer_experts:
        sizes["intermediate_size"] = config.intermediate_size
    bad = [f"{name} {size}" for name, size in sizes.items() if size % n]
    if config.num_key_value_heads % n and n % config.num_key_value_heads:
        bad.append(f"num_key_value_heads {config.num_key_value_heads}")
    return ", ".join(bad)


def meshes(job: Job) -> list[int]:
    """Numbers of devices that divide the model."""
    return [n for n in range(1, MOST_DEVICES + 1) if not undivided(job, n)]


def part(config: ModelConfig, n: int) -> ModelConfig:
    """What one of n devices has; key heads are repeated where there are fewer than devices."""
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size // n,
        intermediate_size=config.intermediate_size // n,
        num_attention_heads=config.num_attention_heads // n,
        num_key_value_heads=max(1, config.num_key_value_heads // n),
        num_experts=config.num_experts // n,
    )


def forms(config: ModelConfig, weights: str, dtype: Any) -> Params:
    """Shapes and types of the parameters as `load_model` makes them."""
    quantize = weights if weights in METHODS else None
    check_quantize(config, quantize)

    def form(spec: Any) -> Any:
        if quantize and len(spec.shape) > 1:
            return quantized_form(spec.shape, spec.hf_name, quantize)
        return jax.ShapeDtypeStruct(spec.shape, dtype)

    return jax.tree.map(form, param_specs(config))


def widened(job: Job, n: int) -> int:
    """Bytes that each device writes and reads again in a pass, as a GPU's products want bfloat16: XLA widens
    int8 with a scale per output within them, groups before.
    """
    params = forms(part(job.config, n), job.weights, job.dtype)
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return sum(4 * math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, GroupedWeight))


def count(config: ModelConfig) -> int:
    """Numbers that the weights are."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))


# --- what a device holds and moves --------------------------------------------------------------------------


def held(job: Job, n: int, card: Card | None = None) -> Held:
    """By each of n devices; temporaries where a card is given to compile them for."""
    config = part(job.config, n)
    page = cache_bytes(config, 1, PAGE, job.kv)
    weights = tree_bytes(forms(config, job.weights, job.dtype))
    return Held(weights, page * job.pages, page * job.pages_of_a_row, card and temporaries(job, n, card))


def smallest(job: Job, room: float, card: Card | None = None) -> int | None:
    """The least number of devices that hold it where each has that many bytes; None: no number does."""
    for n in meshes(job):
        if held(job, n).together <= room and (not card or held(job, n, card).together <= room):
            return n
    return None


def all_reduces(job: Job, tokens: int) -> list[tuple[int, jax.ShapeDtypeStruct]]:
    """How many of which array a pass over so many tokens takes, but for those of the size of a batch behind
    the layers.
    """
    config, layers, form = job.config, job.config.num_hidden_layers, jax.ShapeDtypeStruct
    found = [(2 * layers + 1, form((tokens, config.hidden_size), job.dtype))]
    if config.qk_norm_joint:
        found.append((layers, form((tokens, 2), jnp.float32)))
    return found


def sent(job: Job, n: int, tokens: int) -> float:
    """Bytes that each of n devices in a ring sends for them."""
    return 2 * (n - 1) / n * sum(count * tree_bytes(x) for count, x in all_reduces(job, tokens))


# --- times that nothing is faster than ----------------------------------------------------------------------


def decoding(job: Job, n: int, card: Card, round_seconds: float) -> Least:
    """A token of every row."""
    flop = decode_work(job.config, 0, 0, [job.context - 1] * job.rows, 1).flop
    keys = job.rows * _seen(job, n, job.context)
    return _least(job, n, card, round_seconds, _weights_moved(job, n, job.rows) + keys, flop, job.rows)


def reading(job: Job, n: int, card: Card, round_seconds: float) -> Least:
    """A prompt as long as a row, by chunks."""
    chunks = -(-job.context // job.chunk)
    keys = sum(_seen(job, n, min((i + 1) * job.chunk, job.context)) for i in range(chunks))
    moved = chunks * _weights_moved(job, n, job.chunk) + keys
    flop = prefill_work(job.config, 0, [job.context]).flop
    return _least(job, n, card, round_seconds * chunks, moved, flop, job.context)


def _least(job: Job, n: int, card: Card, round_seconds: float, moved: float, flop: float, tokens: int):
    rounds = sum(count for count, _ in all_reduces(job, tokens)) * round_seconds if n > 1 else 0
    links = sent(job, n, tokens) / card.link_gbs / 1e9 + rounds
    return Least(moved / card.memory_gbs / 1e9, flop / n / job.rate(card), links)


def _weights_moved(job: Job, n: int, tokens: int) -> float:
    """Bytes that each device reads in a pass over so many tokens, and writes where it widens them."""
    params = forms(part(job.config, n), job.weights, job.dtype)
    experts = tree_bytes([layer.get("experts", ()) for layer in params["layers"]])
    asked = bytes_per_pass(params) - (1 - experts_asked(job.config, tokens)) * experts
    return asked + widened(job, n)


def _seen(job: Job, n: int, length: int) -> int:
    """Bytes of the keys and values that a row of that length looks at, on each device."""
    config = part(job.config, n)
    slots = sum(min(window or length, length) for window in config.layer_windows)
    return 2 * config.num_key_value_heads * slots * vector_bytes(config.head_dim, job.kv)


# --- temporaries --------------------------------------------------------------------------------------------


@functools.lru_cache
def temporaries(job: Job, n: int, card: Card) -> int:
    """Bytes that the engine's programs need beside what they are given, the greater of decoding's and
    reading's: with one layer of each kind and the head, and what a second one adds taken for every other.

    Raises:
        RuntimeError: jax's CUDA plug-in is not here, or no ptxas.
    """
    kinds = len(_kinds(job.config))
    pairs = zip(*(_compiled(_shortened(job, times), n, card) for times in (1, 2)), strict=True)
    return max(a + max(b - a, 0) * (job.config.num_hidden_layers - kinds) // kinds for a, b in pairs)


def _kinds(config: ModelConfig) -> tuple[int, ...]:
    """The first layer of each kind."""
    kinds = list(zip(layer_kinds(config), config.layer_experts or layer_kinds(config), strict=True))
    return tuple(dict.fromkeys(map(kinds.index, kinds)))


def _shortened(job: Job, times: int) -> Job:
    layers = _kinds(job.config) * times
    changes: dict[str, Any] = dict(num_hidden_layers=len(layers))
    for name in ("layer_windows", "layer_rope", "layer_experts"):
        of_layer = getattr(job.config, name)
        changes[name] = tuple(of_layer[i] for i in layers) if of_layer else ()
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **changes))


def _compiled(job: Job, n: int, card: Card) -> list[int]:
    """Bytes of temporaries: of decoding, and of reading a piece of a prompt."""
    config, mesh, shape = part(job.config, n), card.mesh(), jax.ShapeDtypeStruct
    everywhere, found = NamedSharding(mesh, PartitionSpec()), []
    params = forms(config, job.weights, job.dtype)
    pools = jax.eval_shape(lambda: empty_pools(config, job.pages, job.kv))
    for rows, tokens in ((job.rows, 1), (1, job.chunk)):
        table = shape((rows, job.pages_of_a_row), jnp.int32)
        args = params, pools, shape((rows, tokens), jnp.int32), table, shape((rows,), jnp.int32)
        args = jax.tree.map(lambda x: shape(x.shape, x.dtype, sharding=everywhere), args)
        with compiling_for(mesh):
            program = jax.jit(_steps, static_argnums=0, donate_argnums=2).lower(config, *args).compile()
        found.append(program.memory_analysis().temp_size_in_bytes)
    return found


@contextlib.contextmanager
def compiling_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Devices that are not here: what is compiled for them stays out of the cache, where no process could load
    it.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        with jax.default_device(mesh.devices.flat[0]), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        jax.config.update(name, before)


def _steps(config: ModelConfig, params, pools, tokens_BT, table_BP, length_B):
    """Some passes, each over what the one before chose: keys and values, and the last choice."""
    capacity = table_BP.shape[1] * PAGE

    def step(state):
        token_BT, length_B, pools = state
        pairs = zip(pools, config.layer_windows, strict=True)
        layers = tuple(Paged(k, v, window, capacity, table_BP) for (k, v), window in pairs)
        cache = KVCache(layers, length_B, jnp.zeros(len(length_B), bool), None)
        hidden_BTD, cache = hidden_states(params, config, token_BT, cache)
        chosen_B = argmax(unembed(params, config, hidden_BTD[:, -1]))
        token_BT = jnp.broadcast_to(chosen_B[:, None], token_BT.shape)
        return token_BT, cache.length_B, tuple((layer.k, layer.v) for layer in cache.layers)

    return jax.lax.while_loop(lambda state: jnp.any(state[1] < capacity), step, (tokens_BT, length_B, pools))
