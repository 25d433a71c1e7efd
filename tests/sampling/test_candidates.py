"""Sampling from the candidates alone: the kept tokens against sorting in NumPy, and what runs on GPUs against
what runs on CPUs.
"""

import contextlib

import gpu_forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from quick import full_except
from small_models import build

import xinfer_jax as xj
from xinfer_jax.backends.cpu import cpu_sampler
from xinfer_jax.backends.gpu import gpu_sampler
from xinfer_jax.backends.gpu.reductions import logsumexp_in_one_pass
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.ops.largest import largest_k
from xinfer_jax.sampling import processors, sampler
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.context import init_context
from xinfer_jax.sampling.settings import NUMBERS

pytestmark = pytest.mark.oldest

V = 5000  # more than a GPU sorts in one kernel
SETTINGS = [
    xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8), xj.SamplingConfig(temperature=1.5, top_k=64),
    xj.SamplingConfig(temperature=1.0, top_k=65), xj.SamplingConfig(temperature=0.9, top_k=0, top_p=0.9),
    xj.SamplingConfig(), xj.SamplingConfig(temperature=1.0, top_k=66, top_p=0.7),
    xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8, repetition_penalty=1.3),
    xj.SamplingConfig(temperature=1.0),
]  # fmt: skip
ALL_SETTINGS = [
    xj.SamplingConfig(temperature=1.0, top_k=40, min_p=0.02), xj.SamplingConfig(temperature=1.0, top_k=40,
    typical_p=0.7), *SETTINGS, xj.SamplingConfig(temperature=1.0, top_k=20, logit_bias={3: 9.0, 7: -np.inf}),
]  # fmt: skip
RARE = [
    xj.SamplingConfig(temperature=1.0, top_k=20, presence_penalty=1.0), xj.SamplingConfig(temperature=1.0,
    top_k=20, bad_words_ids=[[3], [1, 2]]), xj.SamplingConfig(temperature=1.0, top_k=0, typical_p=0.7),
    xj.SamplingConfig(temperature=1.0, top_k=20, min_tokens=3),
]  # fmt: skip


def random_logits(rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Draws logits of normal distribution. Row 1 has few finite logits, row 2 has ties everywhere, and row 3
    has many largest ones.
    """
    logits = np.random.RandomState(seed).standard_normal((rows, size)).astype(np.float32) * 4
    logits[1:2, 5:] = -np.inf
    logits[2:3] = np.round(logits[2:3])
    logits[3:4] = np.minimum(logits[3:4], 0)
    return logits


def context_of(settings, rows: int, size: int):
    seen = np.random.RandomState(5).random_sample((rows, size)) < 0.3
    eos = np.full((rows, 1), 4, np.int32)
    return init_context(
        settings, np.full(rows, 3, np.int32), eos, seen, np.tile(np.int32([1, 2, 1, 0]), (rows, 1))
    )


def kept_by_sorting(logits: np.ndarray, weight: np.ndarray, least: float) -> np.ndarray:
    """The fewest largest logits whose weights sum to at least `least`, and their ties, by sorting."""
    order = np.argsort(-logits, kind="stable")
    enough = np.flatnonzero(np.cumsum(weight[order].astype(np.float64)) >= least)
    return logits >= (logits[order[enough[0]]] if len(enough) else -np.inf)


@pytest.fixture(params=["cpu", "gpu"])
def forms(request):
    """The forms that the test runs: of CPUs or GPUs."""
    with gpu_forms.selected() if request.param == "gpu" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("size", full_except([65], [1, 65, 1000]))
def test_kept_logits_equal_those_of_sorting(forms, size):
    """Few logits are compared with each other, the thresholds of more are searched."""
    logits = random_logits(6, size, size)
    probability = np.asarray(jax.nn.softmax(logits, -1))
    top_k, top_p = (jax.jit(lambda *args, f=f: f(*args)) for f in (processors.top_k, processors.top_p))
    for k in (1, 2, 64, 65, 66, 1000):
        want = [kept_by_sorting(row, np.ones(size), k) for row in logits]
        np.testing.assert_array_equal(top_k(logits, jnp.full(6, k)), np.where(want, logits, -np.inf))
    for p in (0.0, 1e-6, 0.3, 0.8, 0.999, 1.0):
        least = np.inf if p == 1 else np.float32(p)
        want = [kept_by_sorting(*rows, least) for rows in zip(logits, probability, strict=True)]
        kept = top_p(logits, jnp.full(6, p, jnp.float32))
        np.testing.assert_array_equal(kept, np.where(want, logits, -np.inf))
    k, p = jnp.array([0, 1, 20, 50, 0, 300]), jnp.array([1.0, 0.5, 0.8, 1.0, 0.3, 0.99], jnp.float32)
    both = jax.jit(lambda *args: processors.top_k_top_p(*args))(logits, k, p)  # in one loop
    np.testing.assert_array_equal(both, top_p(top_k(logits, k), p))


def test_typical_tokens_equal_those_of_sorting(forms):
    for size in (65, 300):
        logits = random_logits(4, size)
        probability = np.asarray(jax.nn.softmax(logits.astype(np.float64), -1))
        information = -np.log(np.maximum(probability, 1e-30))
        entropy = np.sum(probability * information, -1, keepdims=True)
        key = -np.abs(information - entropy).astype(np.float32)
        kept = np.isfinite(jax.jit(lambda *args: processors.typical_p(*args))(logits, jnp.full(4, 0.7)))
        for i in (0, 2, 3):
            np.testing.assert_array_equal(kept[i], kept_by_sorting(key[i], probability[i], np.float32(0.7)))


@pytest.mark.full
@pytest.mark.parametrize("size, count", [(4096, 300), (4097, 1), (9973, 65)])
def test_largest_of_groups_equal_top_k(size, count):
    """Their order is equal too: the lowest index of equal numbers is first."""
    logits = jnp.asarray(random_logits(5, size))
    with gpu_forms.selected():
        got = largest_k(logits, count)
    for one, other in zip(got, jax.lax.top_k(logits, count), strict=True):
        np.testing.assert_array_equal(one, other)


def test_logsumexp_in_one_pass():
    logits = random_logits(6, 1000)
    logits[3] = -np.inf
    logits[4, 7] = np.inf
    logits[5, 7] = np.nan
    got = logsumexp_in_one_pass(jnp.asarray(logits))
    np.testing.assert_allclose(got, jax.nn.logsumexp(logits, -1), rtol=1e-6)


@pytest.mark.full
def test_forward_mode_derivative_passes_a_decode_loop(forms):
    """The derivatives of the first token's log-probability with respect to the logits are the probabilities.
    jax traces the forms of all devices to differentiate one of them.
    """
    params, config = build("qwen2")
    logits_BV = jnp.asarray(random_logits(2, config.vocab_size))
    settings = xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8)

    def decoded(logits_BV):
        cache = xj.init_cache(config, 2, 8)
        eos_ids = np.zeros(1, np.int32)
        result = xj.decode_loop(params, config, logits_BV, cache, jax.random.key(0), settings, eos_ids, 2)
        return result.logprobs_BT[:, 0], result.tokens_BT[:, 0]

    direction_BV = jnp.asarray(np.random.RandomState(1).standard_normal(logits_BV.shape), jnp.float32)
    _, got_B, token_B = jax.jvp(decoded, (logits_BV,), (direction_BV,), has_aux=True)
    probability_BV = jax.nn.softmax(logits_BV, -1)
    want_B = direction_BV[np.arange(2), token_B] - (probability_BV * direction_BV).sum(-1)
    np.testing.assert_allclose(got_B, want_B, rtol=1e-4, atol=1e-5)


def sampled(rows: list, logits: np.ndarray, on_gpu: bool, impl: str = "xla"):
    """Tokens, log-probabilities and the logits that they were sampled from. impl: of GPUs' pass over the
    logits.
    """
    settings = settings_per_row(rows, len(rows), logits.shape[1])
    keys = jax.random.split(jax.random.key(2), len(rows))
    context = context_of(settings, len(rows), logits.shape[1])
    with gpu_forms.selected() if on_gpu else contextlib.nullcontext():
        return jax.jit(lambda *args: sampler.sample_tokens(*args, run_config=RunConfig(impl)))(
            jnp.asarray(logits), keys, settings, context
        )


@pytest.mark.full
@pytest.mark.parametrize("rows", [SETTINGS, ALL_SETTINGS + RARE], ids=len)
def test_one_branch_equals_branches(rows):
    """Rows that are sampled from candidates, from the vocabulary, and greedy; infinite logits. No NaN: the
    maximum of a CPU may lose it.
    """
    logits = random_logits(len(rows), V)
    logits[-2:, 3] = np.inf, -np.inf
    got, want = (sampled(rows, logits, on_gpu) for on_gpu in (True, False))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[2], want[2])


@pytest.mark.full
def test_one_pass_of_a_kernel_equals_the_passes_of_xla():
    """The kernel runs in the interpreter. There are rows with and without a bias and a repetition penalty,
    greedy rows, and infinite logits.
    """
    rows = [*ALL_SETTINGS[:3], *ALL_SETTINGS[-3:]]
    logits = random_logits(len(rows), V)
    logits[-3, 3] = np.inf
    got, want = (sampled(rows, logits, True, impl) for impl in ("interpret", "xla"))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[2], want[2])


@pytest.mark.full
def test_rows_in_groups_equal_all_rows(monkeypatch):
    """The last of the groups repeats a row of the one before."""
    rows = ALL_SETTINGS + RARE
    logits = random_logits(len(rows), V)
    want = sampled(rows, logits, True)
    monkeypatch.setattr(gpu_sampler, "_GROUP", 4)
    assert len(rows) % 4
    for one, other in zip(sampled(rows, logits, True), want, strict=True):
        np.testing.assert_array_equal(one, other)
    want = sampled(rows, logits, False)
    monkeypatch.setattr(cpu_sampler, "LEAST", V)
    monkeypatch.setattr(cpu_sampler, "_ROWS", 4)
    for one, other in zip(sampled(rows, logits, False), want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_other_processor_leaves_the_common_branch():
    """The rule holds for a new processor too: otherwise `_choose_in_one_branch` would skip the processor."""
    always = {"min_p", "typical_p", "xtc_probability", "xtc_threshold"}  # of the candidates
    always |= {"dry_base", "dry_allowed_length", "dry_penalty_last_n"}  # nothing alone
    names = [setting.name for setting in NUMBERS if not setting.plain and setting.name not in always]
    values = {name: 1 for name in names} | {"bad_words_ids": [[3]]}
    for name, value in values.items():
        rows = settings_per_row([xj.SamplingConfig(), xj.SamplingConfig(**{name: value})], 2, 70)
        uses = gpu_sampler.uses_other_processors(rows, context_of(rows, 2, 70))
        np.testing.assert_array_equal(uses, [False, True], name)
    context = context_of(rows, 2, 70)
    context.allowed_bits[0, 0, 2] = 0
    np.testing.assert_array_equal(gpu_sampler.uses_other_processors(rows, context), [True, True])


@pytest.mark.full
def test_one_branch_draws_the_same_alone_and_beside_others():
    """The other rows take the common branch, or do not take it."""
    rows = [*ALL_SETTINGS[:4], xj.SamplingConfig(temperature=1.0, top_k=20, logit_bias={3: 9.0})]
    logits = random_logits(len(rows) + 1, V)
    beside_others = [sampled([*rows, other], logits, True)[0] for other in (rows[0], RARE[0], RARE[2])]
    for token_B in beside_others[1:]:
        np.testing.assert_array_equal(token_B[:-1], beside_others[0][:-1])
    settings = settings_per_row(rows, len(rows), V, all_settings=True)
    context = context_of(settings, len(rows), V)
    keys = jax.random.split(jax.random.key(2), len(rows) + 1)[: len(rows)]
    with gpu_forms.selected():
        alone = jax.jit(lambda *args: sampler.choose_tokens(*args)[0])
        for i in range(len(rows)):
            of_row = jax.tree.map(lambda x, i=i: x[i : i + 1], (logits[:-1], keys, settings, context))
            assert alone(*of_row)[0] == beside_others[0][i]


def test_many_rows_of_a_device_trace_inside_shard_map():
    """More rows than a group, whose loops must start as arrays that vary over the mesh."""
    params, config = build("qwen2")
    mesh = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("rows")

    def tokens(logits_BV, key_B):
        cache = xj.init_cache(config, len(logits_BV), 16)
        settings = xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8)
        eos_ids = np.zeros(1, np.int32)
        return xj.decode_loop(params, config, logits_BV, cache, key_B, settings, eos_ids, 4).tokens_BT

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 40))
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(tokens, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
        traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((40, config.vocab_size), jnp.float32), keys)
    assert traced.out_info.shape == (40, 4)
