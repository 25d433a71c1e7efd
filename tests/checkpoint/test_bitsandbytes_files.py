"""Files of bitsandbytes: equal to the weights that its formulas, in NumPy, make of them."""

import json

import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from quick import full_except
from scaled_checkpoints import BF16, assert_equal, checkpoint, convert, equal_model, float_tensors, write

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.quantized_weight import is_quantized

HF = tiny.UNTIED | dict(hidden_size=48, intermediate_size=66, num_hidden_layers=1, head_dim=12)
Q0 = "model.layers.0.self_attn.q_proj"
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / 12
MAPS = dict(nf4=NF4, fp4=np.concatenate([_FP4, -_FP4]))
DTYPES = dict(float32=np.float32, float16=np.float16, bfloat16=BF16)
LLM_INT8 = dict(quant_method="bitsandbytes", load_in_8bit=True, load_in_4bit=False, llm_int8_threshold=6.0)


def settings(kind="nf4"):
    return dict(
        quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type=kind,
        bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head"],
    )  # fmt: skip


def four_bits(kind="nf4", block=64, nested=False, dtype="bfloat16", storage=np.uint8):
    """Encodes matrices as `quantize_4bit` does, and decodes them as `dequantize_4bit`."""

    def encode(name, x):
        flat = np.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
        absmax = np.abs(flat).max(1)
        state = dict(quant_type=kind, blocksize=block, dtype=dtype, shape=list(x.shape))
        parts = dict(absmax=absmax, quant_map=MAPS[kind])
        if nested:
            (offset, code) = (absmax.mean(), np.linspace(-1, 1, 256).astype(np.float32) ** 3)
            outer = np.abs(np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)).max(1)
            whole = np.repeat(outer, 256)[: len(absmax)]
            index = np.abs((absmax - offset)[:, None] / whole[:, None] - code).argmin(1).astype(np.uint8)
            absmax = code[index] * whole + np.float32(offset)
            parts |= dict(absmax=index, nested_absmax=outer, nested_quant_map=code)
            state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=float(offset))
        levels = np.abs((flat / absmax[:, None])[..., None] - MAPS[kind]).argmin(-1)
        equal = (MAPS[kind][levels] * absmax[:, None]).reshape(-1)[: x.size].reshape(x.shape)
        levels = np.pad(levels.reshape(-1)[: x.size], (0, x.size % 2)).astype(np.uint8)
        packed = (levels[::2] << 4 | levels[1::2]).view(storage)[:, None]
        parts[f"quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        stored = {name: packed} | {f"{name}.{field}": array for field, array in parts.items()}
        return stored, equal.astype(DTYPES[dtype]).astype(np.float32)

    return encode


def int8(name, x):
    """Quantizes as `int8_vectorwise_quant` and `int8_vectorwise_dequant` do."""
    scale = np.abs(x).max(1)
    numbers = np.round(x * (127 / scale[:, None])).astype(np.int8)
    module = name.removesuffix("weight")
    stored = {name: numbers, f"{module}SCB": scale, f"{module}weight_format": np.array(0, np.uint8)}
    return stored, numbers * scale[:, None] * np.float32(1 / 127)


@pytest.mark.parametrize(
    "how",
    [
        dict(nested=True),
        dict(kind="fp4", dtype="float16"),
        dict(block=128, nested=True, dtype="float32", storage=BF16),
    ],
    ids=["nf4-nested", "fp4", "nf4-in-bfloat16"],
)
def test_four_bits_become_floats(tmp_path, how):
    """Rows of 48 and 66 numbers: blocks of 64 and 128 cross them."""
    path, equal = checkpoint(tmp_path / "a", HF, settings(how.get("kind", "nf4")), four_bits(**how))
    opened = open_checkpoint(path, dtype="float32")
    tiny.assert_same_shapes(opened)
    assert_equal(opened.read(), equal_model(tmp_path / "b", HF, equal))
    leaf = xj.load_model(path).params["layers"][0]["q"]["weight"]
    assert leaf.dtype == jnp.bfloat16
    assert is_quantized(xj.load_model(path, quantize="int4").params["layers"][0]["q"]["weight"])


def test_odd_rows_begin_within_a_byte(tmp_path):
    hf = HF | dict(intermediate_size=63)
    path, equal = checkpoint(tmp_path / "a", hf, settings(), four_bits(nested=True))
    assert_equal(xj.load_model(path, "float32"), equal_model(tmp_path / "b", hf, equal))


@pytest.mark.parametrize("name", full_except(["phi3-defaults"], ["moe-defaults", "gemma4-experts"]))
def test_four_bits_of_fused_matrices_and_mixtures(tmp_path, name):
    """Experts are apart, as transformers 4 wrote them. Those of one tensor stay floats."""
    hf = cases.CASES[name].hf
    encode = four_bits(nested=True)
    (stored, equal) = convert(
        float_tensors(hf, name == "phi3-defaults"),
        lambda name, x: encode(name, x) if x.ndim == 2 else ({name: x}, x),
    )
    path = write(tmp_path / "a", hf | dict(quantization_config=settings()), stored)
    assert_equal(xj.load_model(path, "float32"), equal_model(tmp_path / "b", hf, equal))


def test_int8_stays_as_it_is(tmp_path):
    path, equal = checkpoint(tmp_path / "a", HF, LLM_INT8, int8)
    opened = open_checkpoint(path, dtype="float32")
    tiny.assert_same_shapes(opened)
    model = opened.read()
    assert isinstance(model.params["layers"][0]["q"]["weight"], GroupedWeight)
    assert_equal(model, equal_model(tmp_path / "b", HF, equal), 2**-22)
    assert_equal(
        xj.load_model(path, "float32", dequantize=True), equal_model(tmp_path / "c", HF, equal), 2**-22
    )
    with pytest.raises(xj.InputError, match="cannot be written in the format bitsandbytes"):
        xj.save_model(model.params, model.config, tmp_path / "d")


def test_settings_without_a_method(tmp_path):
    """The settings are written as versions of transformers before 4.34 wrote them."""
    old = {name: x for name, x in settings().items() if name != "quant_method"}
    path, equal = checkpoint(tmp_path / "a", HF, old, four_bits())
    assert_equal(xj.load_model(path, "float32"), equal_model(tmp_path / "b", HF, equal))


STATE = f"{Q0}.weight.quant_state.bitsandbytes__nf4"


def blob(**changed):
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=[48, 48])
    return np.frombuffer(json.dumps(state | changed).encode(), np.uint8)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({STATE: None}, f"{STATE} is missing"),
        ({STATE: np.frombuffer(b"[" * 4000, np.uint8)}, "does not describe the matrix"),
        ({STATE: np.zeros(5000, np.uint8)}, r"does not describe the matrix: ValueError: U8 \[5000\]"),
        ({STATE: blob(blocksize=65)}, "does not describe the matrix: ValueError: blocksize 65"),
        ({STATE: blob(shape=[48, 24])}, r"shape \[48, 24\] and not \[48, 48\]"),
        ({STATE: blob(dtype="int8")}, "does not describe the matrix: KeyError: 'int8'"),
        ({f"{Q0}.weight": np.zeros((9, 1), np.uint8)}, r"q_proj.weight has shape \[9, 1\], .* \[1152, 1\]"),
        ({f"{Q0}.weight.absmax": np.zeros(3, np.float32)}, r"absmax has shape \[3\], .* \[36\]"),
        ({f"{Q0}.weight.absmax": np.full(36, np.nan, np.float32)}, "its scales hold NaN or inf"),
        ({f"{Q0}.weight.quant_map": None}, "missing .*quant_map"),
        ({f"{Q0}.weight.quant_map": np.full(16, np.inf, np.float32)}, "quant_map holds NaN or inf"),
    ],
)  # fmt: skip
def test_four_bits_that_are_wrong(tmp_path, changed, message):
    path, _ = checkpoint(tmp_path, HF, settings(), four_bits(), **changed)
    with pytest.raises(xj.InputError, match=message) as error:
        xj.load_model(path, "float32")
    assert "\n" not in str(error.value)


def test_int8_in_another_layout(tmp_path):
    changed = {f"{Q0}.weight_format": np.array(2, np.uint8)}
    path, _ = checkpoint(tmp_path, HF, LLM_INT8, int8, **changed)
    with pytest.raises(xj.InputError, match="q_proj.weight_format is another layout than rows"):
        xj.load_model(path, "float32")
