"""Arguments of attention kernels: contiguous caches, pages and rings, float and quantized keys."""

import jax.numpy as jnp
import numpy as np

from xinfer_jax.kernels_pallas import KeyBias, Latents
from xinfer_jax.kernels_pallas.key_layouts import quantize

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAGE = 64


def paged(draws, length, pages):
    """A block table with shuffled pages, 0 past the row's end, and the pages that a row uses."""
    pool = 1 + len(length) * pages
    table_BP = draws.permutation(np.arange(1, pool)).reshape(len(length), pages).astype(np.int32)
    for row, tokens in zip(table_BP, length, strict=True):
        row[-(-tokens // PAGE) :] = 0
    return table_BP, np.isin(np.arange(pool), table_BP[table_BP > 0])


def attention_case(  # noqa: PLR0913
    dtype, T, N, K, S, H, start, length, bits=None, pages=0, sink=False, pairs=0, rank=0, **options
):
    """Arguments and options of an attention kernel. Keys that no query may see are NaN. rank: of `Latents`,
    in place of keys and values.
    """
    draws = np.random.RandomState(N * H + T)
    B = len(length)
    rows, slots = (1 + B * pages, PAGE) if pages else (B, S)
    q_BTNH = draws.standard_normal((B, T, N, H)).astype(dtype)
    keys = [draws.standard_normal((rows, K, slots, H)).astype(np.float32) for _ in "kv"]
    options |= {"scale": H**-0.5}
    if pages:
        options["table_BP"], used = paged(draws, length, pages)
    for x in keys if bits is None else ():
        if pages:
            x[~used] = np.nan
        for b in range(B) if not pages and not options.get("ring") else ():
            x[b, :, length[b] :] = np.nan
    k, v = (jnp.asarray(x, dtype) if bits is None else quantize(jnp.asarray(x), bits) for x in keys)
    if sink:
        options["sink_N"] = 2 * draws.standard_normal(N).astype(np.float32)
    if pairs:
        parts = (K, PAGE, H), (max(length) // PAGE + 1, pairs), (max(length) // PAGE + 1, pairs)
        options["key_bias"] = KeyBias(*(jnp.asarray(draws.standard_normal(part), F32) for part in parts))
    k, v = (Latents(k, rank), None) if rank else (k, v)
    return (q_BTNH, k, v, np.array(start, np.int32), np.array(length, np.int32)), options


def assert_near(got, want):
    """Compares arrays. In 16 bits, differences are relative to the norm of each row, except for rows that
    almost cancel.
    """
    assert got.shape == want.shape
    limit = 1e-5 if got.dtype == F32 else 2e-2
    got, want = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (got, want))
    whole = np.linalg.norm(want) / np.sqrt(len(want))
    size = whole if limit == 1e-5 else np.maximum(np.linalg.norm(want, axis=-1), whole / 10)
    assert (np.linalg.norm(got - want, axis=-1) <= limit * size).all()
