"""What a model asks of each device of a mesh `model=n`: bytes by formula, times that nothing is faster than,
and temporaries of its programs, compiled for GPUs that need not be here.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from bench_limits import bytes_per_pass, decode_work, experts_asked, prefill_work
from cards import Card
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xinfer_jax.cache.kv_cache import KVCache, cache_bytes
from xinfer_jax.cache.paged import PAGE, Paged, empty_pools
from xinfer_jax.cache.quantized import KV_BITS, cache_specs, vector_bytes
from xinfer_jax.checkpoint.spread import cut_of, whole_form, with_heads_for
from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.model.decoder import hidden_states, layer_kinds, unembed
from xinfer_jax.model.greedy import argmax
from xinfer_jax.sharding import MODEL, SAME
from xinfer_jax.weights.layout import checked_mesh
from xinfer_jax.weights.params import Params, ParamSpec, check_quantize, param_specs, tree_bytes
from xinfer_jax.weights.quantized import METHODS, group_for, quantized_form

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
    names = ["num_attention_heads", "num_experts"]
    if False in (config.layer_experts or (False,)):
        names.append("intermediate_size")
    bad = [name for name in names if getattr(config, name) % n]
    if config.num_key_value_heads % n and n % config.num_key_value_heads:
        bad.append("num_key_value_heads")
    return ", ".join(f"{name} {getattr(config, name)}" for name in bad)


def meshes(job: Job) -> list[int]:
    """Numbers of devices that divide the model."""
    return [n for n in range(1, MOST_DEVICES + 1) if not undivided(job, n)]


@functools.lru_cache
def own_weights(job: Job, n: int) -> Params:
    """Shapes and types of what each of n devices has of the parameters, as `load_model` makes them."""
    quantize = job.weights if job.weights in METHODS else None
    check_quantize(job.config, quantize)

    def form(spec: ParamSpec) -> Any:
        cut = cut_of(spec, job.config, n)
        shape = cut.spec(spec).shape
        if not quantize or len(shape) == 1:
            return jax.ShapeDtypeStruct(shape, job.dtype)
        group = group_for(spec.shape, spec.hf_name, quantize, n if cut.axis == 1 else 1)
        return quantized_form(shape, spec.hf_name, quantize, group)

    return jax.tree.map(form, param_specs(job.config))


def widened(job: Job, n: int) -> int:
    """Bytes that each device writes and reads again in a pass: on a GPU XLA makes bfloat16 of int4 in memory
    before a product, of int8 within it.
    """
    leaves = jax.tree.leaves(own_weights(job, n))
    return sum(2 * 2 * 2 * x.size for x in leaves if x.dtype == jnp.uint8 and x.ndim == 3)  # two in a byte


def count(config: ModelConfig) -> int:
    """Numbers that the weights are."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))


# --- what a device holds and moves --------------------------------------------------------------------------


def held(job: Job, n: int, card: Card | None = None) -> Held:
    """By each of n devices; temporaries where a card is given to compile them for."""
    page = cache_bytes(with_heads_for(job.config, n), 1, PAGE, job.kv) // n
    return Held(
        tree_bytes(own_weights(job, n)),
        page * job.pages,
        page * job.pages_of_a_row,
        card and temporaries(job, n, card),
    )


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
    config = job.config
    layers = job.config.num_hidden_layers
    form = jax.ShapeDtypeStruct
    found = [(2 * layers + 1, form((tokens, config.hidden_size), job.dtype))]
    if config.qk_norm_joint:
        found.append((layers, form((tokens, 2), jnp.float32)))
    return found


# --- times that nothing is faster than ----------------------------------------------------------------------


def decoding(job: Job, n: int, card: Card) -> Least:
    """A token of every row."""
    flop = decode_work(job.config, 0, 0, [job.context - 1] * job.rows, 1).flop
    moved = _weights_moved(job, n, job.rows) + job.rows * _seen(job, n, job.context)
    return _least(job, n, card, 1, job.rows, moved, flop)


def reading(job: Job, n: int, card: Card) -> Least:
    """A prompt as long as a row, by chunks."""
    flop = prefill_work(job.config, 0, [job.context]).flop
    ends = range(job.chunk, job.context + job.chunk, job.chunk)
    moved = sum(_weights_moved(job, n, job.chunk) + _seen(job, n, min(end, job.context)) for end in ends)
    return _least(job, n, card, len(ends), job.context, moved, flop)


def _least(job: Job, n: int, card: Card, passes: int, tokens: int, moved: float, flop: float) -> Least:
    reduced = all_reduces(job, tokens)
    sent = 2 * (n - 1) / n * sum(count * tree_bytes(x) for count, x in reduced)  # by each in a ring
    waited = passes * sum(count for count, _ in reduced) * card.round_us / 1e6 if n > 1 else 0
    rate = card.float32_tflops if job.weights == "float32" else card.tflops
    return Least(moved / card.memory_gbs / 1e9, flop / n / rate / 1e12, sent / card.link_gbs / 1e9 + waited)


@functools.lru_cache
def _weights_moved(job: Job, n: int, tokens: int) -> float:
    """Bytes that each device reads in a pass over so many tokens, and writes where it widens them."""
    params = own_weights(job, n)
    experts = tree_bytes([layer.get("experts", ()) for layer in params["layers"]])
    asked = bytes_per_pass(params) - (1 - experts_asked(job.config, tokens)) * experts
    return asked + widened(job, n)


def _seen(job: Job, n: int, length: int) -> int:
    """Bytes of the keys and values that a row of that length looks at, on each device."""
    config = with_heads_for(job.config, n)
    slots = sum(min(window or length, length) for window in config.layer_windows)
    return 2 * config.num_key_value_heads // n * slots * vector_bytes(config.head_dim, job.kv)


# --- temporaries --------------------------------------------------------------------------------------------


@functools.lru_cache
def temporaries(job: Job, n: int, card: Card) -> int:
    """Bytes that the engine's programs need beside what they are given, the greater of decoding's and
    reading's: with three layers of each kind and the head (XLA begins a matrix of the next ones ahead), and
    what two more of each add taken for all others.

    Raises:
        RuntimeError: jax's CUDA plug-in is not here, or no ptxas.
    """
    mesh = checked_mesh(card.mesh(n, MODEL))
    most = 0
    others = max(0, job.config.num_hidden_layers // shortened(job, 1).config.num_hidden_layers - 3)
    for shape in ((job.rows, 1), (1, job.chunk)):
        three, five = (temporary(shortened(job, times), mesh, *shape) for times in (3, 5))
        most = max(most, three + max(five - three, 0) * others // 2)
    return most


def temporary(job: Job, mesh: Mesh, rows: int, tokens: int) -> int:
    """Bytes of one program, which stays out of the compilation cache: no process could load it."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        with jax.default_device(mesh.devices.flat[0]), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return lowered(job, mesh, rows, tokens).compile().memory_analysis().temp_size_in_bytes
    finally:
        jax.config.update(name, before)


def shortened(job: Job, times: int) -> Job:
    """With so many layers of each kind."""
    kinds = list(
        zip(layer_kinds(job.config), job.config.layer_experts or layer_kinds(job.config), strict=True)
    )
    layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)] * times
    changes: dict[str, Any] = dict(num_hidden_layers=len(layers))
    for name in ("layer_windows", "layer_rope", "layer_experts"):
        changes[name] = tuple(getattr(job.config, name)[i] for i in layers if getattr(job.config, name))
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **changes))


def lowered(job: Job, mesh: Mesh, rows: int, tokens: int) -> Any:
    """A program of passes over so many tokens of so many rows, for the devices of a mesh."""
    config = with_heads_for(job.config, mesh.size)

    def laid(x: jax.ShapeDtypeStruct, place: PartitionSpec = SAME) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, place))

    over = functools.partial(whole_form, mesh=mesh, devices=mesh.size)
    weights = jax.tree.map(over, param_specs(job.config), own_weights(job, mesh.size))
    pools = jax.eval_shape(lambda: empty_pools(config, job.pages, job.kv))
    pools = jax.tree.map(laid, pools, cache_specs(pools, mesh))
    shapes = (rows, tokens), (rows, job.pages_of_a_row), (rows,)
    small = (laid(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes)
    return jax.jit(_steps, static_argnums=0, donate_argnums=2).lower(config, weights, pools, *small)


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
