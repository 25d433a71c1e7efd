"""The Triton attention kernels against their reference, in Pallas's interpreter: contiguous caches, pages and
rings, float and quantized keys, windows, soft caps, sinks and a bias of keys.
"""

import copy
from functools import partial

import jax
import numpy as np
import pytest
from attention_cases import BF16, F32, assert_near, attention_case
from quick import full_except

from xinfer_jax.kernels_pallas import reference, triton

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def run(f, *args, **options):
    return jax.jit(partial(f, **options))(*args)


PREFILL = {
    "offset-ragged-f32": (F32, 37, 4, 4, 100, 16, (60, 0, 3, 0), (97, 37, 4, 0)),
    "one-token-row-window": (F32, 5, 8, 2, 150, 64, (140, 0, 70), (145, 1, 75), dict(window=33)),
    "group-7-width-80-window-cap": (
        *(F32, 11, 14, 2, 60, 80, (40, 2, 0), (51, 9, 11)),
        dict(window=9, soft_cap=2.0),
    ),
    "wide-heads-bf16": (BF16, 20, 2, 1, 40, 256, (0,), (20,), dict(soft_cap=3.0)),
    "width-512-bf16": (BF16, 20, 2, 1, 64, 512, (30, 0), (50, 7), dict(window=17)),
    "pages-sink": (F32, 100, 4, 2, 0, 16, (0, 64), (100, 120), dict(pages=3, sink=True)),
    "pages-int8-bias": (F32, 40, 4, 2, 0, 32, (64, 30), (104, 33), dict(pages=2, bits=8, pairs=12)),
    "ring": (F32, 70, 4, 2, 128, 16, (250, 0, 126), (320, 70, 196), dict(ring=True, window=50)),
    "latents": (F32, 40, 5, 1, 128, 48, (60, 0, 3), (97, 37, 4), dict(rank=40)),
    "first-key-pages": (F32, 40, 4, 2, 0, 16, (64, 0), (104, 33), dict(pages=2, first_key=1)),
}


@pytest.mark.parametrize("name", full_except(["pages-sink"], PREFILL))
def test_prefill_attention(name):
    *shape, start, length, options = (*PREFILL[name], {})[:9]
    args, options = attention_case(*shape, start, length, **options)
    got = run(triton.prefill_attention, *args, **options, interpret=True)
    assert_near(got, run(reference.prefill_attention, *args, **options))


DECODE = {
    "ragged-f32": (F32, 1, 4, 4, 300, 64, (299, 0, 0, 128), (300, 1, 0, 129)),
    "group-7-width-80-window-cap": (
        *(F32, 1, 14, 2, 100, 80, (99, 32), (100, 33)),
        dict(window=20, soft_cap=2.0),
    ),
    "width-320-int8": (F32, 3, 4, 2, 128, 320, (90, 0), (93, 2), dict(bits=8)),
    "width-512-pages-sink": (BF16, 1, 8, 2, 0, 512, (150, 0, -1), (151, 1, 0), dict(pages=3, sink=True)),
    "one-split": (F32, 1, 2, 1, 70, 64, (69, 64), (70, 65), dict(splits=1)),
    "length-beyond-the-cache": (F32, 1, 2, 1, 64, 64, (63, 65, 69), (64, 66, 70), dict(window=40)),
    "group-7-bf16": (BF16, 1, 7, 1, 200, 128, (199, 63), (200, 64)),
    "pages-sink": (F32, 1, 4, 2, 0, 64, (150, 0, 64, -1), (151, 1, 65, 0), dict(pages=4, sink=True)),
    "pages-17-queries-window-bf16": (
        *(BF16, 17, 7, 1, 0, 64, (150, 0, 64), (167, 10, 81)),
        dict(pages=3, sink=True, window=20),
    ),
    "ring": (F32, 2, 4, 2, 128, 16, (250, 3, 126), (252, 5, 128), dict(ring=True, window=50)),
    "int8-bias": (F32, 3, 4, 2, 100, 32, (90, 0), (93, 2), dict(bits=8, pairs=16)),
    "pages-int4-bias-sink": (
        *(F32, 3, 4, 2, 0, 32, (150, 0), (153, 2)),
        dict(bits=4, pages=3, pairs=12, sink=True),
    ),
    "pages-int4-width-80-bf16": (BF16, 1, 14, 2, 0, 80, (150, 0), (151, 1), dict(bits=4, pages=3)),
    "latents-20-heads-bf16": (BF16, 1, 20, 1, 300, 576, (299, 0, -1), (300, 1, 0), dict(rank=512)),
    "latents-odd-widths-one-split": (F32, 1, 3, 1, 64, 36, (60, 0), (61, 1), dict(rank=28, splits=1)),
    "latents-drafts-pages": (F32, 3, 8, 2, 0, 96, (150, 0), (153, 2), dict(rank=64, pages=3)),
    "first-key": (F32, 3, 4, 2, 100, 32, (90, 0), (93, 3), dict(first_key=1)),
    "first-key-latents-window": (F32, 3, 8, 2, 64, 96, (6, 0), (9, 2), dict(rank=64, window=8, first_key=2)),
}


@pytest.mark.parametrize("name", full_except(["pages-int4-bias-sink"], DECODE))
def test_decode_attention(name):
    *shape, start, length, options = copy.deepcopy((*DECODE[name], {})[:9])
    splits = {"splits": options["splits"]} if "splits" in options else {}
    args, options = attention_case(
        *shape, start, length, **{k: v for k, v in options.items() if k != "splits"}
    )
    got = run(triton.decode_attention, *args, **options, **splits, interpret=True)
    assert_near(got, run(reference.decode_attention, *args, **options))


@pytest.mark.full
def test_a_query_that_sees_no_key_gives_zeros():
    args, options = attention_case(F32, 3, 2, 1, 40, 16, (0, 30, 37), (0, 20, 40), window=5)
    for kernel in (triton.prefill_attention, partial(triton.decode_attention, splits=2)):
        got = np.asarray(run(kernel, *args, **options, interpret=True))
        assert (got[:2] == 0).all() and (np.abs(got[2]).max(-1) > 0).all()
