"""`xinfer-jax plan`: bytes compared with arrays and known models."""

import dataclasses
import math
import re
import tempfile
from functools import partial
from pathlib import Path

import jax
import pytest
import run_script
from mesh_cases import FAMILIES, mesh_of, write_checkpoint
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.cache.paged import empty_pools
from xinfer_jax.cli import plan_flags
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.engine.shape import engine_shape
from xinfer_jax.estimates import plan_estimates as estimates
from xinfer_jax.estimates.model_shapes import hf_config
from xinfer_jax.families.draft_heads import mtp_spec
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.params import param_specs, tree_bytes
from xinfer_jax.weights.quantization import METHODS

pytestmark = pytest.mark.oldest

ANY_MODEL = ("float32", "bfloat16", *METHODS)  # formats that any model may have

plan = partial(run_script.command, "plan")


def plan_job(config, weights="bfloat16", cache_dtype="bfloat16", rows=4, context=100, chunk=64):
    return estimates.EngineLoad(config, weights, cache_dtype, rows, context, chunk)


@pytest.mark.parametrize("weights", ANY_MODEL)
@pytest.mark.parametrize(
    "changes", [{}, dict(tie_word_embeddings=False, hidden_size=96)], ids=["tied", "not"]
)
def test_bytes_are_those_of_the_arrays(weights, changes):
    config = from_hf(QWEN | changes)
    quantize = weights if weights.startswith("int") else None
    dtype = "float32" if weights == "float32" else "bfloat16"
    params = xj.init_params(config, jax.random.key(0), dtype, quantize)
    assert estimates.mesh_plan(plan_job(config, weights), 1).parts["weights"] == tree_bytes(params)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_pages_are_those_of_an_engine(kind):
    job = plan_job(from_hf(QWEN), cache_dtype=kind)
    pools = jax.eval_shape(lambda: empty_pools(job.config, 4 * 2 + 1, job.kv))  # 100 tokens: two pages
    pages = [estimates.mesh_plan(job, n).parts["pages"] for n in (1, 2, 4)]
    size = tree_bytes(pools)
    assert pages == [size, size // 2, size // 2]  # 2 key heads


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_draft_head_adds_its_weights_and_pages(weights):
    """The bytes are those of an engine with the head."""
    config = from_hf(QWEN)
    config = dataclasses.replace(config, draft_head=mtp_spec(config))
    params = xj.init_params(config, jax.random.key(0), weights)
    options = EngineOptions(draft="mtp", rows=4, capacity=100, pages=9, chunk=64, cache_dtype=weights)
    shape = engine_shape(xj.Model(params, config), options)
    parts = shape.memory_plan(params, config).parts
    planned = estimates.mesh_plan(plan_job(config, weights, weights), 1).parts
    assert parts["draft"] == tree_bytes(params["draft_head"]) > 0
    assert planned["weights"] == parts["weights"] + parts["draft"] == tree_bytes(params)
    assert planned["pages"] == parts["pages"] == 9 * shape.page_bytes


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648), ("llama3.1-70b", 70_553_706_496),
        ("qwen3-235b-a22b", 235_093_634_560), ("qwen3-8b", 8_190_735_360), ("gemma2-9b", 9_241_705_984),
        ("phi4-14b", 14_659_507_200), ("mixtral-8x7b", 46_702_792_704), ("smollm3-3b", 3_075_098_624),
        ("glm4.5-air", 106_852_251_264), ("qwen3-next-80b-a3b", 79_674_391_296),
        ("seed-oss-36b", 36_151_104_512), ("lfm2-1.2b", 1_170_340_608),
        ("granite4-h-small", 32_207_337_984),
    ],
)  # fmt: skip
def test_bytes_of_known_models(name, numbers):
    config = from_hf(hf_config(name))
    assert estimates.num_weights(config) == numbers
    whole, half = (estimates.mesh_plan(plan_job(config), n).parts["weights"] for n in (1, 2))
    routers = sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)) if spec.dtype)
    assert whole == 2 * numbers + 2 * routers  # which are float32
    assert numbers < half < 1.002 * numbers  # norms and routers are on both


def test_bytes_of_experts_in_mxfp4():
    """Half a byte and a byte for each 32 of a number of experts, two of others."""
    config = from_hf(hf_config("gpt-oss-20b"))
    experts = 24 * 32 * 3 * 2880 * 2880
    assert estimates.num_weights(config) == 20_914_757_184
    found = estimates.mesh_plan(plan_job(config, "mxfp4"), 1).parts["weights"]
    assert found == experts * 17 // 32 + 2 * (20_914_757_184 - experts)


def test_smallest_mesh():
    """72.7 billion weights in bfloat16 are 135.4 GiB, 8 rows of 32,768 tokens 80, temporaries 1.1."""
    job = plan_job(from_hf(hf_config("qwen2.5-72b")), rows=8, context=32768)
    # GiB: 8 key heads, repeated above.
    fits = {217: 1, 109: 2, 108: 4, 56: 4, 54: 8, 20: 16, 13: 64, 12: None}
    assert {gib: estimates.smallest_mesh(job, gib * 2**30) for gib in fits} == fits


def test_plan_prints_bytes():
    done = plan("--model=qwen2.5-72b", "--devices=8xh200", "--context=32768", "--rows=8")
    assert done.returncode in (None, 0), done.stderr
    lines = done.stdout.splitlines()
    assert "72.71 billion weights in bfloat16; 8 rows of 32,768 tokens, 4,097 pages" in lines[0]
    (line,) = (line for line in lines if line.startswith("model=4 "))
    assert line.split()[1:] == ["33.9", "20.0", "1.1", "50.0", "28"]  # GiB, and rows
    assert "The smallest mesh on which it fits: model=4, 2 such engines on 8 devices" in lines


def test_plan_of_latent_attention():
    """DeepSeek-V3 has 576 numbers of a token in each of 61 layers."""
    lines = plan("--model=deepseek-v3", "--devices=16xh200").stdout.splitlines()
    assert lines[0].endswith("513 pages in bfloat16 (70,272 bytes a token)")
    assert lines[-1] == "The smallest mesh on which it fits: model=16"


def test_formats_of_the_flag_are_those_of_the_estimates():
    flag = plan_flags.PARSER.values["weights"].parser
    assert all(flag.parse(weights) == weights for weights in estimates.WEIGHTS)
    with pytest.raises(ValueError, match=f"give {', '.join(estimates.WEIGHTS[:-1])} or fp8"):
        flag.parse("int3")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--devices=8xh900"], "--devices takes 1 to 128 of b200, h200, .*got '8xh900'"),
        (["--model=gpt-5"], "'gpt-5' is neither a built-in shape"),
        (["--context=40000"], "context must be a whole number from 2 to 32768, got 40000"),
    ],
)
def test_bad_flags_of_plan_exit_with_one_line(flags, message):
    done = plan(*flags)
    assert done.returncode == 2, done
    assert re.fullmatch(f"xinfer-jax plan: .*{message}.*\n", done.stderr)


def main():
    """Compares, on virtual devices, planned bytes with those of arrays."""
    for weights in ANY_MODEL:
        quantize, dtype = (weights, "bfloat16") if weights in METHODS else (None, weights)
        with tempfile.TemporaryDirectory() as folder:
            hf = FAMILIES["qwen2"] | dict(vocab_size=97)  # which neither number of devices divides
            path = write_checkpoint(Path(folder), hf)
            for n in (2, 8):  # of 4 key heads
                params = xj.load_model(path, dtype, quantize, mesh=mesh_of(n)).params
                own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
                planned = estimates.mesh_plan(plan_job(from_hf(hf), weights), n).parts["weights"]
                assert planned == own, (weights, n, planned, own)


@pytest.mark.full
def test_bytes_are_those_of_the_arrays_over_a_mesh():
    run_script.run_on_devices(8, Path(__file__))


if __name__ == "__main__":
    main()
