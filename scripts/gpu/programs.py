"""The library's own programs, as `generate` and an engine call them, lowered for GPUs and TPUs that this
machine need not have.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xinfer_jax import kernels_pallas
from xinfer_jax.cache.kv_cache import KVCache, empty_layers
from xinfer_jax.cache.paged import PAGE_SIZE
from xinfer_jax.cache.stored_kv import cache_dtype_of
from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.engine.engine_device import Device, NewRow
from xinfer_jax.engine.pages import num_pages_for
from xinfer_jax.engine.shape import EngineShape
from xinfer_jax.estimates.card_specs import Card, Tpu
from xinfer_jax.families.draft_heads import mtp_spec
from xinfer_jax.generation.batch_arrays import initial_state, pad_prompts, prompt_of_row
from xinfer_jax.generation.drafting import with_draft_slots
from xinfer_jax.generation.executor import RunnableModel
from xinfer_jax.generation.head_prefill import bound_head
from xinfer_jax.generation.loop import TracedExecutor
from xinfer_jax.generation.options import GenerateOptions
from xinfer_jax.generation.proposers import FunctionProposer, HeadProposer, prompt_lookup
from xinfer_jax.generation.speculation import SpeculationState, Speculative
from xinfer_jax.generation.state import DecodeState, UnreadFeatures
from xinfer_jax.generation.strategies import Plain
from xinfer_jax.generation.validation import ValidatedCall, validate_call
from xinfer_jax.model.extras import NO_EXTRAS
from xinfer_jax.sampling.sampling_config import SamplingConfig
from xinfer_jax.sharding import REPLICATED
from xinfer_jax.weights.params import activation_dtype

PROGRAMS = ("prefill", "decode", "sampled", "verify", "mtp", "engine_prefill", "engine_decode")
LOOPS = ("decode", "sampled", "verify", "mtp", "engine_decode")  # one iteration of which is a step
DRAFTING = ("verify", "mtp")
SAMPLED = SamplingConfig(temperature=0.8, top_k=20, top_p=0.8)
CHUNK = 256  # tokens of an engine's prefill


@dataclasses.dataclass(frozen=True)
class ProgramJob:
    """A program's model and sizes."""

    config: ModelConfig
    params: Any  # shapes
    kv: Any  # dtype of keys and values, or a name in the table of cache dtypes
    rows: int
    capacity: int  # tokens that a row can hold
    length: int  # valid tokens of each row after the step, or tokens of the prompt
    chunk: int = CHUNK
    draft_tokens: int = 7  # of each row in a step of `DRAFTING`

    def with_head(self) -> "ProgramJob":
        """Returns the job of the model with a head for multi-token prediction, of shapes without weights."""
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, draft_head=mtp_spec(self.config))
        )

    @property
    def cache_dtype(self) -> str:
        """The name of the dtype of keys and values."""
        return cache_dtype_of(self.kv).name


class Call(NamedTuple):
    """A jitted function and its arguments. Arguments that are not known before the call are shapes."""

    program: Any
    args: tuple[Any, ...]


class _CallFound(Exception):
    def __init__(self, call: Call):
        self.call = call


def _stop(program: Any, *args: Any) -> Any:
    """Serves as the `run` of an executor: it raises the first call instead of running it."""
    raise _CallFound(Call(program, args))


def find_call(job: ProgramJob, program: str) -> Call:
    """Returns the call of one of `PROGRAMS`."""
    try:
        _run(job, program)
    except _CallFound as found:
        return found.call
    raise AssertionError(f"{program} calls no program")


def _run(job: ProgramJob, program: str) -> None:
    if program.startswith("engine"):
        device = engine_device(job)
        pages = [*range(1, num_pages_for(job.capacity) + 1)]
        if program == "engine_prefill":
            start = max(0, job.length - job.chunk) // PAGE_SIZE * PAGE_SIZE
            device.prefill(0, pages, [0] * job.chunk, start, job.capacity, True)
        used = num_pages_for(job.length)
        tables = {row: [1 + row * len(pages) + p for p in range(used)] for row in range(job.rows)}
        device.decode(tables, 1, False, True, {})
    call = _generate_call(job, program)
    executor = TracedExecutor(RunConfig(), _stop)
    if program == "prefill":
        tokens = pad_prompts(call.prompts, call.capacity, call.prompt_rows)
        executor.prefill(RunnableModel(job.params, call.config), tokens, _cache(job, 0))
    state = _after_first_token(initial_state(call, prompt_of_row(call)))
    cache = _cache(job, job.length - 1)
    if program not in DRAFTING:
        executor.decode(Plain(call.config), (job.params, NO_EXTRAS), (state, cache), np.int32(1))
    count = call.num_draft_tokens
    proposer: Any = FunctionProposer(prompt_lookup)
    own = None
    head_cache = None
    if program == "mtp":
        head, own = bound_head("mtp", job.params, call.config, count)
        proposer = HeadProposer(head)
        head_cache = _cache(dataclasses.replace(job, config=head.config), job.length - 1)
        state = dataclasses.replace(state, unread=_unread(job))
    cache = jax.eval_shape(functools.partial(with_draft_slots, tokens=1 + count), cache)
    drafts = SpeculationState.of_rows(call.rows, count, head_cache)
    strategy = Speculative(call.config, proposer, count)
    executor.decode(strategy, (job.params, NO_EXTRAS, own), (state, cache, drafts), np.int32(1))


def _unread(job: ProgramJob) -> UnreadFeatures:
    """Returns the features of a head that has read all tokens but the last one."""
    shape = job.rows, 1 + job.draft_tokens, job.config.hidden_size
    features_BTX: Any = jax.ShapeDtypeStruct(shape, activation_dtype(job.params))
    return UnreadFeatures(features_BTX, np.ones(job.rows, np.int32))


def _generate_call(job: ProgramJob, program: str) -> ValidatedCall:
    prompt = [0] * (job.length if program == "prefill" else job.length - 1)
    options = GenerateOptions(
        max_tokens=job.capacity - len(prompt),
        sampling=SAMPLED if program == "sampled" else SamplingConfig(),
        eos_token_ids=(),
        capacity=job.capacity,
        cache_dtype=job.cache_dtype,
        draft=dict(verify="lookup", mtp="mtp").get(program),
        draft_tokens=job.draft_tokens,
    )
    keys = jax.random.wrap_key_data(np.zeros((job.rows, 2), np.uint32), impl="threefry2x32")
    return validate_call(job.params, job.config, [prompt] * job.rows, options, keys)


def _cache(job: ProgramJob, length: int) -> KVCache:
    layers = jax.eval_shape(lambda: empty_layers(job.config, job.rows, job.capacity, job.kv))
    length_B: Any = np.full(job.rows, length, np.int32)
    has_limits = any(layer.limits for layer in layers)
    overflow_B: Any = np.zeros(job.rows, bool)
    return KVCache(layers, length_B, overflow_B, length_B if has_limits else None)


def engine_device(job: ProgramJob) -> Device:
    """Returns an engine's device whose rows have all sampled their first token. Its pools are shapes."""
    pages = job.rows * num_pages_for(job.capacity) + 1
    sizes = dict(rows=job.rows, capacity=job.capacity, pages=pages, chunk=job.chunk, cache_dtype=job.kv)
    shape = EngineShape(**sizes)
    device = Device(job.params, job.config, shape, _stop, dry_run=True)
    call = _generate_call(dataclasses.replace(job, rows=1), "decode")
    row = device.new_rows([NewRow(call)])
    device.rows = _after_first_token(jax.tree.map(lambda x: _repeat(x, job.rows), row))
    return device


def _repeat(x_1: Any, rows: int) -> Any:
    index_B = np.zeros(rows, np.int32)
    return x_1[index_B] if isinstance(x_1, jax.Array) else np.asarray(x_1)[index_B]


def _after_first_token(state: DecodeState) -> DecodeState:
    context = state.context
    position_B: Any = np.asarray(context.position_B) + 1
    ones_B: Any = np.ones_like(position_B)
    context = dataclasses.replace(context, position_B=position_B, num_generated_B=ones_B)
    return dataclasses.replace(state, context=context)


def layer_period(config: ModelConfig) -> int:
    """Returns the number of layers after which the kinds of layers repeat."""
    kinds = config.layers
    return next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))


@contextlib.contextmanager
def target_card(card: Card | Tpu, mesh: Mesh) -> Iterator[None]:
    """Inside, programs are traced and compiled as on such a GPU or TPU. No program is written to the
    compilation cache: no process could load it.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        with (
            kernels_pallas.assume_device(card.capability, card.name, card.platform),
            jax.default_device(mesh.devices.flat[0]),  # for Mosaic
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),  # for Triton
        ):
            yield
    finally:
        jax.config.update(name, before)


def to_shapes(tree: Any, mesh: Mesh) -> Any:
    """Returns the arrays of a tree as shapes on the devices of a mesh. Other leaves stay."""

    def shape(x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, REPLICATED)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)
