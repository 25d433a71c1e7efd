"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, and in its order and values.

llama.cpp's converters change some tensors:

- Rows of queries and keys of llama alternate between the halves of a head.
- Norms are stored as 1 + w, and decays as -exp(A_log).
- Decays, D and norms of Mamba-2 are stored as matrices.
- Value heads of linear attention are stored by turns of key heads.
- The two parts of `kv_b_proj` (latent attention) are stored by head as two tensors, and keys have their
  inputs first. Older files have one tensor.
- A matrix, for example an NVFP4 matrix, may have a factor, `.scale`, of all its numbers or of the numbers of
  each expert.
"""

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

import jax
import numpy as np

from ..config.layer_spec import AttentionSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_names, format_value
from ..families.family import Joined, Names
from ..families.layer_fields import shared_kv_layers
from ..families.naming import FileSpec, file_specs, specs_by_names
from ..formats.gguf_file import GgufFile, GgufTensor
from ..formats.tensors import TransposedMatrix
from ..mixers.gated_delta import GatedDeltaSpec
from ..mixers.latent_attention import LatentAttentionSpec
from ..mixers.mamba2 import Mamba2Spec
from ..mixers.short_conv import ShortConvSpec
from ..tokenization.tokenizer import Tokenizer

_MLP = ("gate", "up", "down")
_NAMES = dict(
    embed="token_embd", final_norm="output_norm.weight", lm_head="output",
    layer_embed="per_layer_token_embd", layer_proj="per_layer_model_proj",
    layer_input_norm="per_layer_proj_norm.weight", attn_norm="attn_norm.weight", mlp_norm="ffn_norm.weight",
    attn_post_norm="post_attention_norm.weight", mlp_post_norm="post_ffw_norm.weight",
    q="attn_q", k="attn_k", v="attn_v", o="attn_output", attn_gate="attn_q.gate", sinks="attn_sinks.weight",
    q_norm="attn_q_norm.weight", k_norm="attn_k_norm.weight", router="ffn_gate_inp",
    **{leaf: f"ffn_{leaf}" for leaf in _MLP},
    **{f"experts.{leaf}": f"ffn_{leaf}_exps" for leaf in _MLP},
    **{f"shared.{leaf}": f"ffn_{leaf}_shexp" for leaf in _MLP}, shared_gate="ffn_gate_inp_shexp",
    **{"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
    mlp_out_norm="post_ffw_norm_1.weight", experts_norm="pre_ffw_norm_2.weight",
    experts_out_norm="post_ffw_norm_2.weight", input_gate="inp_gate", input_proj="proj",
    input_norm="post_norm.weight", layer_scalar="layer_output_scale.weight",
    q_a="attn_q_a", q_a_norm="attn_q_a_norm.weight", q_b="attn_q_b", kv_a="attn_kv_a_mqa",
    kv_a_norm="attn_kv_a_norm.weight", k_up="attn_k_b", v_up="attn_v_b",
    latent_in="ffn_latent_down", latent_out="ffn_latent_up",
    **{"router.correction_bias": "exp_probs_b.bias"},
)  # fmt: skip
_GATE_UP = Joined("ffn_gate_up_exps.weight", ("experts.gate", "experts.up"), stacked=True)
_ATTENTION = Names(joined=(Joined("attn_q", ("q", "attn_gate"), groups="num_attention_heads"),))
_DELTA = Names(
    dict(z="attn_gate", a="ssm_alpha", b="ssm_beta", A_log="ssm_a", dt_bias="ssm_dt.bias", o="ssm_out",
        gated_norm="ssm_norm.weight", **{f"conv_{leaf}": f"ssm_conv1d.{leaf}" for leaf in "qkv"}),
    (Joined("attn_qkv", ("q", "k", "v")), Joined("ssm_conv1d.weight", ("conv_q", "conv_k", "conv_v"))),
)  # fmt: skip
_LATENT = Names(joined=(Joined("attn_kv_b", ("k_up", "v_up"), groups="num_attention_heads"),))
_MAMBA2 = Names(
    dict(
        A_log="ssm_a",
        D="ssm_d",
        dt_bias="ssm_dt.bias",
        gated_norm="ssm_norm.weight",
        ssm_o="ssm_out",
        **{f"ssm_{part}": f"ssm_in.{part}" for part in ("z", "x", "b", "c", "dt")},
        **{f"conv_{part}": f"ssm_conv1d.{part}" for part in "xbc"},
        **{f"conv_{part}_bias": f"ssm_conv1d.{part}.bias" for part in "xbc"},
    ),
    (
        Joined("ssm_in", ("ssm_z", "ssm_x", "ssm_b", "ssm_c", "ssm_dt")),
        Joined("ssm_conv1d.weight", ("conv_x", "conv_b", "conv_c")),
        Joined("ssm_conv1d.bias", ("conv_x_bias", "conv_b_bias", "conv_c_bias")),
    ),
)
_SHORT_CONV = Names(
    dict(
        conv_taps="shortconv.conv.weight",
        conv_bias="shortconv.conv.bias",
        conv_o="shortconv.out_proj",
        **{f"conv_{part}": f"shortconv.in_proj.{part}" for part in "bcx"},
    ),
    (Joined("shortconv.in_proj", ("conv_b", "conv_c", "conv_x")),),
)
_MATRICES = ("ssm_a", "ssm_d", "ssm_norm.weight")  # of Mamba-2: vectors in a checkpoint
_MIXER_NAMES = {
    AttentionSpec.kind: _ATTENTION,
    Mamba2Spec.kind: _MAMBA2,
    ShortConvSpec.kind: _SHORT_CONV,
    GatedDeltaSpec.kind: _DELTA,
    LatentAttentionSpec.kind: _LATENT,
}
_POST_NORM = dict(mlp_norm="post_attention_norm.weight")  # where layers have no norm after the attention
_OWN_NAMES = dict.fromkeys(("qwen35", "qwen35moe", "gpt-oss", "glm4moe"), _POST_NORM)
_OWN_NAMES |= dict.fromkeys(("nemotron_h", "nemotron_h_moe"), dict(mlp_norm="attn_norm.weight"))
_OWN_NAMES |= dict.fromkeys(("lfm2", "lfm2moe"), dict(final_norm="token_embd_norm.weight"))
_OWN_NAMES["falcon-h1"] = dict(mlp_norm="ffn_norm")
# Rows of queries and keys alternate between the halves of a head.
_IN_PAIRS = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
_KEYS = ".attn_k_b.weight"  # of latent attention
_VALUES = ".attn_v_b.weight"
_FREQS = "rope_freqs.weight"  # the config has it
_HEAD = "cls.output.weight"
_LEAST_COSINE = 0.9  # of two rows that differ by the rounding of few bits


@dataclasses.dataclass(frozen=True)
class InterleavedExperts:
    """Experts' tensors in the form of gpt-oss's checkpoints: outputs last, with the outputs of several leaves
    by turns.
    """

    parts: Mapping[int, GgufTensor]  # [experts, outputs, inputs] or, of biases, [experts, outputs]
    step: int  # from an output of a part to its next
    type = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        (experts, outputs, *inputs) = next(iter(self.parts.values())).shape
        return experts, *inputs, outputs * self.step

    def transposed(self, first: int, step: int) -> list[GgufTensor]:
        """Returns each expert's matrix of a part. Biases are returned together."""
        part = self.parts[first]
        return _experts(part) if len(part.shape) > 2 else [part]


@dataclasses.dataclass(frozen=True)
class KeysAndValues:
    """The matrix `kv_b_proj` of a checkpoint, from a file that stores its two parts apart."""

    keys: GgufTensor  # [heads, C, P]: inputs first
    values: GgufTensor  # [heads, V, C]
    type = "F32"

    @property
    def shape(self) -> tuple[int, int]:
        (heads, inputs, outputs) = self.keys.shape
        return heads * (outputs + self.values.shape[1]), inputs

    def view(self, first_row: int, shape: tuple[int, ...]) -> Any:
        """Returns the keys or the values of a head."""
        (_, inputs, outputs) = self.keys.shape
        (head, row) = divmod(first_row, outputs + self.values.shape[1])
        if row:
            return self.values.view(head * shape[0], shape)
        return TransposedMatrix(self.keys.view(head * inputs, (inputs, outputs)), 0, 1)


def gguf_tensors(file: GgufFile, arch: str, config: ModelConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the tensors of all leaves by their Hugging Face names, and patterns with counts of the tensors
    that are not read. Raises InputError, which names all tensors at fault.
    """
    names = Names(_NAMES | _OWN_NAMES.get(arch, {}), (_GATE_UP,))
    own_specs = specs_by_names(config, names, _MIXER_NAMES, "blk")
    expected: dict[str, tuple[int, ...]] = {}
    for own in jax.tree.leaves(own_specs):
        expected |= _shapes_in_file(config, own.tensor_shapes(file.tensors))
    file = file._replace(tensors=file.tensors | _states_as_vectors(file, config))
    (stored, scales) = _with_scales(file, expected)
    skipped = _check_tensors(file, arch, config, expected, scales)
    found: dict[str, Any] = {}
    for spec, own in zip(jax.tree.leaves(file_specs(config)), jax.tree.leaves(own_specs), strict=True):
        tensor = _in_own_order(config, arch, own, _joined(own.tensor_parts(stored), own.shape))
        if spec.interleaved:
            others = getattr(found.get(spec.fused_name), "parts", {})
            parts = {**others, spec.first_row: tensor}
            found[str(spec.fused_name)] = InterleavedExperts(parts, spec.interleaved)
        elif own.hf_name.endswith((_KEYS, _VALUES)) and own.hf_name in expected:
            keys = own.hf_name.replace(_VALUES, _KEYS)
            both = KeysAndValues(stored[keys], stored[keys.replace(_KEYS, _VALUES)])
            found[str(spec.fused_name)] = both
        elif "{}" in spec.hf_name:
            found |= {spec.hf_name.format(i): expert for i, expert in enumerate(_experts(tensor))}
        elif spec.fused_name == spec.hf_name:  # with an axis of size 1
            shape = spec.tensor_shapes({spec.hf_name})[spec.hf_name]
            found[spec.hf_name] = dataclasses.replace(tensor, shape=shape)
        else:
            found[spec.hf_name] = tensor
    return found, skipped


def _states_as_vectors(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """Returns the matrices of float numbers that Mamba-2 has as vectors."""
    layers = [i for i, layer in enumerate(config.layers) if layer.mixer_of(Mamba2Spec.kind)]
    names = {f"blk.{i}.{name}" for i in layers for name in _MATRICES} & file.tensors.keys()
    found = {}
    for name in names:
        tensor = file.tensors[name]
        if len(tensor.shape) == 2 and tensor.block[0] == 1:
            size = tensor.shape[0] * tensor.shape[1]
            found[name] = dataclasses.replace(tensor, shape=(size,), width=1, rows=range(size))
    return found


def _shapes_in_file(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors. Keys and values of latent attention have an axis of heads."""
    heads = config.num_attention_heads
    found = dict(shapes)
    for name in shapes:
        if name.endswith(_KEYS):
            (rows, inputs) = shapes[name]
            found[name] = (heads, inputs, rows // heads)
        elif name.endswith(_VALUES):
            (rows, inputs) = shapes[name]
            found[name] = (heads, rows // heads, inputs)
    return found


def _check_tensors(
    file: GgufFile, arch: str, config: ModelConfig, expected: Mapping[str, tuple[int, ...]], scales: set[str]
) -> tuple[str, ...]:
    stored = file.tensors
    layers = range(config.num_hidden_layers)
    shared = shared_kv_layers(config)
    unused = {f"blk.{i}.{name}.weight" for i in shared for name in ("attn_k", "attn_v", "attn_k_norm")}
    own = tuple(f"blk.{i}." for i in layers)
    drafts = {name for name in stored if name.startswith("blk.") and not name.startswith(own)}
    faults = [f"missing {name} {list(expected[name])}" for name in expected.keys() - stored.keys()]
    unused |= {name for name in stored if name.endswith(".input_scale")} | scales  # of activations
    unused |= {_FREQS} if arch in ("llama", "gemma4") else set()
    unused |= {name for name in stored if name.endswith((_KEYS, _VALUES))}  # in files with both forms
    unused |= {_HEAD} if arch.startswith("qwen3") else set()  # `check_reranker`
    unknown = stored.keys() - expected.keys() - unused - drafts
    faults += [f"unexpected {name}" for name in unknown]
    faults += [
        f"{name} has shape {list(stored[name].shape)}, the metadata ask for {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if faults:
        what = format_names(sorted(faults), 2)
        raise InputError(f"{file.path}: the tensors do not fit the metadata: {what}")
    counts = Counter(".".join([*name.split(".")[:2], "*"]) for name in drafts)
    return tuple(f"{name} ({count})" for name, count in sorted(counts.items()))


def check_reranker(file: GgufFile, labels: Any, tokenizer: Tokenizer | None) -> None:
    """Checks the head of a reranker, which has the rows of the model's own head for "yes" and "no": `rerank`
    takes them there. Raises InputError if it is another classifier.
    """
    head = file.tensors.get(_HEAD)
    if head is None and labels is None:
        return
    what = f"{file.path} is a classifier of {format_value(labels)}"
    remedy = "only rerankers with the labels yes and no are read: load its Hugging Face checkpoint"
    own = file.tensors.get("output.weight", file.tensors["token_embd.weight"])
    if head is None or labels != ["yes", "no"] or tokenizer is None or head.shape != (2, own.shape[1]):
        raise InputError(f"{what}: {remedy}")
    for row, word in zip(head[:].astype(np.float32), labels, strict=True):
        ids = tokenizer.encode(word, False)
        wanted = own[ids[0] : ids[0] + 1][0].astype(np.float32) if len(ids) == 1 else np.zeros_like(row)
        lengths = np.linalg.norm(row) * np.linalg.norm(wanted)
        if not row @ wanted > _LEAST_COSINE * lengths:
            raise InputError(f"{what}, and its head has no row of the token {word!r}: {remedy}")


def _with_scales(file: GgufFile, expected: Container[str]) -> tuple[dict[str, GgufTensor], set[str]]:
    """Returns the tensors, with matrices multiplied by their factors, and the names of the factors."""
    stored = dict(file.tensors)
    used = set()
    for name, scale in file.tensors.items():
        matrix = f"{name.removesuffix('.scale')}.weight"
        if not name.endswith(".scale") or matrix not in stored or name in expected:
            continue
        tensor = stored[matrix]
        parts = tensor.shape[0] if len(tensor.shape) > 2 else 1
        if scale.shape not in ((1,), (parts,)):
            raise InputError(
                f"{file.path}: {name} has shape {list(scale.shape)}, its matrix has {parts} parts"
            )
        factors = np.broadcast_to(scale.array().astype(np.float32), parts)
        factors = np.repeat(factors, len(tensor.rows) // parts)
        stored[matrix] = dataclasses.replace(tensor, factors=factors)
        used.add(name)
    return stored, used


def _experts(tensor: GgufTensor) -> list[GgufTensor]:
    (experts, outputs, inputs) = tensor.shape
    return [tensor.view(i * outputs, (outputs, inputs)) for i in range(experts)]


def _joined(parts: list[GgufTensor], shape: tuple[int, ...]) -> GgufTensor:
    """Returns a leaf of parts of one tensor."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([np.asarray(part.rows, np.int32) for part in parts])
    return dataclasses.replace(parts[0], rows=rows, shape=shape)


def _in_own_order(config: ModelConfig, arch: str, spec: FileSpec, tensor: GgufTensor) -> GgufTensor:
    """Returns a leaf with the rows, columns and values of a Hugging Face checkpoint."""
    leaf = spec.name.split(".")[2] if spec.name.startswith("layers.") else ""
    delta = config.layers[int(spec.name.split(".")[1])].mixer_of(GatedDeltaSpec.kind) if leaf else None
    if arch in _IN_PAIRS and leaf in ("q", "k"):
        heads = config.num_attention_heads if leaf == "q" else config.num_key_value_heads
        return _with_rows(tensor, np.arange(len(tensor.rows)).reshape(heads, -1, 2).swapaxes(1, 2))
    if spec.init == "norm" and config.norm_offset:
        return dataclasses.replace(tensor, convert=lambda x: x - 1)
    if delta:
        size = tensor.width if leaf == "o" else len(tensor.rows)
        turns = (delta.num_value_heads // delta.num_key_heads, delta.num_key_heads)
        if leaf in ("v", "z", "a", "b", "conv_v", "A_log", "dt_bias", "o") and turns[0] > 1:
            order = np.arange(size).reshape(*turns, -1).swapaxes(0, 1)
            if leaf == "o":
                return dataclasses.replace(tensor, columns=order.reshape(-1))
            tensor = _with_rows(tensor, order)
    return dataclasses.replace(tensor, convert=_log_of_minus) if leaf == "A_log" else tensor


def _with_rows(tensor: GgufTensor, order: np.ndarray) -> GgufTensor:
    return dataclasses.replace(tensor, rows=np.asarray(tensor.rows, np.int32)[order.reshape(-1)])


def _log_of_minus(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.log(-x)
