"""Loading checkpoints: layouts, types, tied matrices, shapes known before the weights, and memory."""

import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf
from xinfer_jax.formats.mxfp4_format import Mxfp4Format

pytestmark = pytest.mark.oldest

LLAMA = tiny.UNTIED | dict(model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=1)
Q1 = "model.layers.1.self_attn.q_proj.weight"


# --- layouts and types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3], ids=["one-file", "shards"])
@pytest.mark.parametrize("stored", tiny.DTYPES)
@pytest.mark.parametrize("target", tiny.DTYPES)
def test_every_stored_dtype_loads_as_every_dtype(checkpoint, stored, target, shards):
    model = xj.load_model(checkpoint(hf=tiny.UNTIED, dtype=stored, shards=shards), dtype=target)
    expected = {
        name: w.astype(tiny.DTYPES[stored]).astype(tiny.DTYPES[target])
        for name, w in tiny.tensors(tiny.UNTIED).items()
    }
    specs = file_specs(model.config)
    assert jax.tree.structure(model.params) == jax.tree.structure(specs)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(model.params), strict=True):
        assert isinstance(leaf, jax.Array) and leaf.dtype == tiny.DTYPES[target]
        np.testing.assert_array_equal(np.asarray(leaf), expected.pop(spec.hf_name), err_msg=spec.hf_name)
    assert not expected
    assert model.load_stats.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert model.load_stats.dtype == target and model.load_stats.seconds > 0


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, np.dtype("float16")], ids=["default", "jnp", "numpy"])
def test_dtype_may_be_none_or_a_numpy_type(checkpoint, dtype):
    expected = jnp.float32 if dtype is None and jax.default_backend() == "cpu" else dtype or jnp.bfloat16
    assert xj.load_model(checkpoint(), dtype=dtype).params["embed"]["weight"].dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", jnp.int32], ids=str)
def test_other_dtypes_are_rejected(checkpoint, dtype):
    assert "is not supported: use one of float32, bfloat16, float16" in tiny.load_error(
        checkpoint(), dtype=dtype
    )


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_weights_do_not_depend_on_the_files_after_loading(tmp_path, dtype):
    """No array may still refer to the file, also if stored and target type are equal."""
    tiny.write(tmp_path, dtype=dtype)
    model = xj.load_model(tmp_path, dtype=dtype)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    np.testing.assert_array_equal(
        np.asarray(model.params["layers"][1]["q"]["weight"]), tiny.tensors()[Q1].astype(tiny.DTYPES[dtype])
    )


def test_a_tilde_in_the_path_is_expanded(checkpoint, monkeypatch):
    path = checkpoint()
    monkeypatch.setenv("HOME", str(path.parent))
    assert xj.load_model(f"~/{path.name}").config.vocab_size == tiny.CONFIG["vocab_size"]


def test_old_rotary_tables_are_ignored(tmp_path):
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tiny.write(tmp_path, LLAMA, weights=tiny.tensors(LLAMA) | tables)
    model = xj.load_model(tmp_path)
    assert len(model.params["layers"]) == 1 and model.load_stats.skipped == ("*rotary_emb.inv_freq (1)",)


def test_tensors_that_no_family_has_are_skipped_with_a_line(tmp_path, caplog):
    ones = np.ones(1, np.float32)
    scales = [f"model.layers.{i}.self_attn.{kind}_scale" for i in (0, 1) for kind in "kv"]
    others = dict.fromkeys(
        (*scales, "v_head.summary.weight", "model.layers.0.self_attn.k_proj.output_scale"), ones
    )
    tiny.write(tmp_path, weights=tiny.tensors() | others)
    model = xj.load_model(tmp_path, dtype="float32")
    assert caplog.messages == [
        f"{tmp_path}: tensors that are not read, since no model has them:"
        " model.layers.*.self_attn.k_proj.output_scale (1), model.layers.*.self_attn.k_scale (2),"
        " model.layers.*.self_attn.v_scale (2) and 1 more"
    ]
    np.testing.assert_array_equal(model.params["layers"][1]["q"]["weight"], tiny.tensors()[Q1])
    for name in (f"{Q1}_scale", "model.layers.0.self_attn.q_proj.lora_A.weight", "lm_head.bias"):
        tiny.write(tmp_path, weights=tiny.tensors() | others | {name: ones})
        assert tiny.load_error(tmp_path).endswith(f"do not fit config.json: unexpected {name}")


def test_without_tokenizer_and_generation_config(checkpoint):
    model = xj.load_model(checkpoint(with_tokenizer=False))
    assert model.tokenizer is None and model.generation_config == {}
    with pytest.raises(xj.InputError, match="no tokenizer"):
        xj.generate_text(model, "hello")


# --- tied embeddings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [tiny.EMBED, tiny.HEAD])
def test_tied_matrix_under_either_name(tmp_path, name):
    weights = tiny.tensors()
    weights[name] = weights.pop(tiny.EMBED)
    model = xj.load_model(tiny.write(tmp_path, weights=weights, with_tokenizer=False))
    assert "lm_head" not in model.params
    np.testing.assert_array_equal(np.asarray(model.params["embed"]["weight"]), tiny.tensors()[tiny.EMBED])


@pytest.mark.parametrize("shards", [1, 2], ids=["one-file", "shards"])
def test_tied_matrix_under_both_names(tmp_path, shards):
    weights = tiny.tensors()
    tiny.write(tmp_path / "same", weights=weights | {tiny.HEAD: weights[tiny.EMBED].copy()}, shards=shards)
    np.testing.assert_array_equal(
        np.asarray(xj.load_model(tmp_path / "same").params["embed"]["weight"]), weights[tiny.EMBED]
    )
    other = weights[tiny.EMBED].copy()
    other[-1, -1] += 1
    tiny.write(tmp_path / "differs", weights=weights | {tiny.HEAD: other}, shards=shards)
    message = tiny.load_error(tmp_path / "differs")
    assert (
        "lm_head.weight differs from model.embed_tokens.weight: set tie_word_embeddings to false" in message
    )
    tiny.write_json(tmp_path / "differs" / "config.json", tiny.UNTIED)  # the remedy
    model = xj.load_model(tmp_path / "differs")
    np.testing.assert_array_equal(model.params["lm_head"]["weight"], other)


def test_an_untied_model_needs_lm_head(tmp_path):
    tiny.write(tmp_path, tiny.UNTIED, weights=tiny.tensors(tiny.CONFIG))
    assert "missing lm_head.weight" in tiny.load_error(tmp_path)


# --- shapes before weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hf", [tiny.CONFIG, tiny.UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_an_opened_checkpoint_has_the_shapes_of_the_weights(checkpoint, hf, dtype, quantize):
    tiny.assert_same_shapes(open_checkpoint(checkpoint(hf=hf), dtype, quantize))


def test_opening_reads_no_weights(tmp_path):
    """Reading fails where the files have changed since opening."""
    path = tiny.write(tmp_path)
    file = path / "model.safetensors"
    opened = open_checkpoint(path, quantize="int8")
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(xj.InputError, match="has become shorter"):
        opened.read()
    file.unlink()
    with pytest.raises(xj.InputError, match="cannot be read"):
        opened.read()
    file.write_bytes(whole)
    model = opened.read()
    assert model.load_stats.weight_bytes == opened.model.load_stats.weight_bytes
    assert model.load_stats.seconds > opened.model.load_stats.seconds > 0


# --- memory -------------------------------------------------------------------------------------------------

LARGE = dict(
    model_type="qwen2", vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5,
    num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e4,
    tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = LARGE | dict(
    model_type="qwen3_5_moe_text", num_hidden_layers=4, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=512, shared_expert_intermediate_size=0, head_dim=64, linear_num_value_heads=16,
)  # fmt: skip
MXFP4 = LARGE | dict(
    model_type="gpt_oss", intermediate_size=1024, num_hidden_layers=4, num_local_experts=8, head_dim=64,
    quantization_config=dict(quant_method="mxfp4"),
)  # fmt: skip
LOAD = """
import sys
import xinfer_jax as xj
large, small, dtype, *quantize = sys.argv[1:]
xj.load_model(small, dtype, *quantize)  # starts the backend, which counts as the interpreter
print("ready", flush=True)
sys.stdin.readline()
model = xj.load_model(large, dtype, *quantize)
print(model.load_stats.weight_bytes, flush=True)
sys.stdin.readline()
"""


def _write_large(path, hf):
    """About 200 MB of bfloat16 in two shards. Experts are stacked, or about 50 MB in MXFP4."""
    random = np.random.default_rng(0)
    specs = jax.tree.leaves(file_specs(from_hf(hf)))
    stacked = {spec.fused_name for spec in specs}
    shapes = {}
    for name, shape in (item for spec in specs for item in spec.tensor_shapes(stacked).items()):
        is_packed = "quantization_config" in hf and len(shape) == 3
        packed = Mxfp4Format().tensor_specs(name, shape, {}) if is_packed else {name: (shape, None)}
        shapes |= {stored: x for stored, (x, _) in packed.items()}

    def bits(name, shape):
        if name.endswith(("_blocks", "_scales")):
            return random.integers(0, 255, shape, np.uint8)
        # Finite: the exponent is not all ones.
        return (random.integers(0, 2**16, shape, np.uint16) & 0xBDFF).view(ml_dtypes.bfloat16)

    weights = {name: bits(name, shape) for name, shape in shapes.items()}
    return tiny.write(path, hf, weights=weights, shards=2, with_tokenizer=False)


def _resident(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="VmRSS is Linux's")
@pytest.mark.parametrize(
    "hf, how, least",
    [
        (LARGE, ["float32"], 360e6),
        (LARGE, ["bfloat16"], 180e6),
        (EXPERTS, ["float32", "int4"], 60e6),
        (MXFP4, ["bfloat16"], 90e6),
    ],
    ids=["float32", "bfloat16", "experts-int4", "mxfp4"],
)
def test_peak_memory_of_loading_is_that_of_the_weights(checkpoint, tmp_path, hf, how, least):
    """Peak of resident memory, above that of an interpreter that has loaded a tiny model."""
    child = subprocess.Popen(
        [sys.executable, "-c", LOAD, _write_large(tmp_path, hf), checkpoint(), *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    peak = 0
    done = threading.Event()

    def sample():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident(child.pid))
            time.sleep(0.001)

    try:
        assert child.stdout.readline() == "ready\n"
        before = _resident(child.pid)
        sampler = threading.Thread(target=sample)
        sampler.start()
        child.stdin.write("\n")
        child.stdin.flush()
        reply = child.stdout.readline()
        done.set()
        sampler.join()
    finally:
        done.set()
        child.kill()
        child.wait()
    weights = int(reply)
    assert weights > least
    print(
        f"{how}: weights {weights / 2**20:.0f} MiB, peak {(peak - before) / 2**20:.0f} MiB above the"
        " interpreter"
    )
    # The lower bound shows that the sampler saw the peak; a busy system may reclaim some interpreter memory.
    assert 0.9 * weights < peak - before <= weights + 40 * 2**20
