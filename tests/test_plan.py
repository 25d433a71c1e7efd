"""scripts/plan.py: bytes against arrays and known models, collectives against compiled text, refusals."""

import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import programs
import pytest
from mesh_cases import FAMILIES, collectives, mesh_of, written
from test_identities import QWEN

import xinfer_jax as xj
from xinfer_jax.cache.paged import empty_pools
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.weights.layout import checked_mesh
from xinfer_jax.weights.params import tree_bytes
from xinfer_jax.weights.quantized import METHODS

plan = partial(programs.run, "plan", "--notemporaries")

import plan_figures as figures  # noqa: E402  scripts/ is on the path
from bench_shapes import hf_config  # noqa: E402
from cards import CARDS  # noqa: E402


def job(config, weights="bfloat16", cache_dtype="bfloat16", rows=4, context=100, chunk=64):
    return figures.Job(config, weights, cache_dtype, rows, context, chunk)


@pytest.mark.parametrize("weights", figures.WEIGHTS)
@pytest.mark.parametrize(
    "changes", [{}, dict(tie_word_embeddings=False, hidden_size=96)], ids=["tied", "not"]
)
def test_bytes_are_those_of_the_arrays(weights, changes):
    config = from_hf(QWEN | changes)
    quantize = weights if weights.startswith("int") else None
    dtype = "float32" if weights == "float32" else "bfloat16"
    params = xj.init_params(config, jax.random.key(0), dtype, quantize)
    assert figures.held(job(config, weights), 1).weights == tree_bytes(params)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_pages_are_those_of_an_engine(kind):
    asked = job(from_hf(QWEN), cache_dtype=kind)
    pools = jax.eval_shape(lambda: empty_pools(asked.config, 4 * 2 + 1, asked.kv))  # 100 tokens: two pages
    assert figures.held(asked, 1).pages == tree_bytes(pools)
    assert (
        figures.held(asked, 2).pages == figures.held(asked, 4).pages == tree_bytes(pools) // 2
    )  # 2 key heads


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648), ("llama3.1-70b", 70_553_706_496),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)  # fmt: skip
def test_known_models(name, numbers):
    config = from_hf(hf_config(name))
    assert figures.count(config) == numbers
    assert figures.held(job(config), 1).weights == 2 * numbers
    half = figures.held(job(config), 2).weights
    assert numbers < half < 1.001 * numbers  # norms are on both


def test_smallest_mesh():
    """72.7 billion weights in bfloat16 are 135.4 GiB, 8 rows of 32,768 tokens 80."""
    asked = job(from_hf(hf_config("qwen2.5-72b")), rows=8, context=32768)
    fits = {
        216: 1,
        108: 2,
        107: 4,
        54: 4,
        53: 8,
        20: 16,
        13: 64,
        12: None,
    }  # GiB: 8 key heads, repeated above
    assert {gib: figures.smallest(asked, gib * 2**30) for gib in fits} == fits


@pytest.mark.slow
def test_temporaries_of_int4():
    """Where int4 is widened, layer after layer: not all of them ahead."""
    asked = figures.shortened(job(from_hf(hf_config("qwen2.5-72b")), "int4", rows=64, context=4096), 4)
    try:
        mesh = checked_mesh(CARDS["h200"].mesh(8, "model"))
    except RuntimeError as error:
        pytest.skip(f"jax's CUDA plug-in is not installed: {error}")
    one_layer = figures.widened(asked, 8) / 2 / 4
    assert 0 < figures.temporary(asked, mesh, 64, 1) < one_layer


def test_what_it_prints():
    done = plan("--model=qwen2.5-72b", "--devices=8xh200", "--context=32768", "--rows=8", "--mesh=model=4")
    assert done.returncode in (None, 0), done.stderr
    lines = done.stdout.splitlines()
    assert "72.71 billion weights in bfloat16; 8 rows of 32,768 tokens, 4,097 pages" in lines[0]
    (line,) = (line for line in lines if line.startswith("model=4 "))
    assert line.split()[1:] == ["33.9", "20.0", "51.1", "28"]  # GiB, and rows
    assert "The smallest mesh that holds it: model=4, 2 such engines on 8 devices" in lines
    assert "all-reduces: 161 a pass of [tokens, 8192] bfloat16, 2.52 MiB a token" in lines


@pytest.mark.parametrize(
    "given, said",
    [
        (["--devices=8xh900"], "--devices takes 1 to 128 of b200, h200, .*got '8xh900'"),
        (["--devices=8xh200"], "model=8 does not divide num_attention_heads 14 .*: choose --mesh=model=2"),
        (["--devices=8xh200", "--mesh=data=2"], "--mesh takes model=N, N from 1 to the 8 .*got 'data=2'"),
        (["--model=gpt-5"], "'gpt-5' is neither a built-in shape"),
        (["--model=qwen3-235b-a22b", "--weights=int4"], "experts stay float numbers"),
        (["--context=40000"], "context must be a whole number from 2 to 32768, got 40000"),
    ],
)
def test_refused(given, said):
    done = plan(*given)
    assert done.returncode == 2, done
    assert re.fullmatch(f"plan: .*{said}.*\n", done.stderr)


def all_reduced(asked, n, rows, tokens):
    """How many of which bytes, in the text of a program for n devices."""
    compiled = figures.lowered(asked, checked_mesh(mesh_of(n)), rows, tokens).compile()
    found = Counter()
    for kind, times in collectives(compiled).items():
        for dims in re.findall(r"f32\[([\d,]+)\]", kind):
            size = 4 * math.prod(map(int, dims.split(",")))
            assert kind.startswith("all-reduce") or size <= 4 * rows * n, kind
            found[size] += times * kind.startswith("all-reduce")
    return +found


def main():
    """On virtual devices: all-reduces by formula and in compiled text, weights by formula and loaded."""
    for family in ("qwen2", "olmo3", "qwen3_moe"):
        asked = job(from_hf(FAMILIES[family]), "float32", "float32")
        for rows, tokens in ((4, 1), (1, 64)):
            wanted = {tree_bytes(x): times for times, x in figures.all_reduces(asked, rows * tokens)}
            assert (found := all_reduced(asked, 4, rows, tokens)) == wanted, (family, found, wanted)
    for weights in figures.WEIGHTS:
        quantize, dtype = (weights, "bfloat16") if weights in METHODS else (None, weights)
        with tempfile.TemporaryDirectory() as folder:
            hf = FAMILIES["qwen2"] | dict(vocab_size=97)  # which neither number of devices divides
            path = written(Path(folder), hf)
            for n in (2, 8):  # of 4 key heads
                params = xj.load_model(path, dtype, quantize, mesh=mesh_of(n)).params
                own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
                planned = figures.held(job(from_hf(hf), weights), n).weights
                assert planned == own, (weights, n, planned, own)


@pytest.mark.slow
def test_on_virtual_devices():
    command = [sys.executable, Path(__file__)]
    done = subprocess.run(command, env=programs.on_devices(8), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    main()
