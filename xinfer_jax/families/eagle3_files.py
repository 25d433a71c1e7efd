"""Files of EAGLE-3 heads. Published files have several forms of config.json:

- Files for SGLang and vLLM have all settings at the top ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM").
- Files of vLLM's speculators have the layer in `transformer_layer_config` ("Eagle3Speculator",
  "Eagle3DraftModel").

Each form names the layers of the target in its own way (`_layer_ids`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..draft_heads.eagle3 import NUM_TAPS, Eagle3
from ..errors import InputError, format_value
from .draft_files import DraftFiles, without_model
from .family import Names
from .reading import from_hf
from .rope_settings import read_rope, write_rope
from .values import get_boolean, get_integer, get_integer_at_most, get_object
from .writing import to_hf

_IDS = "eagle_aux_hidden_state_layer_ids"
# The settings of LlamaConfig in transformers, which speculators leaves out if they are these.
_LLAMA: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
)
_MROPE = ("mrope_section", "mrope_interleaved")  # of the target: for text all three positions are equal
_NAMES = Names(
    dict(fc="fc", hidden_norm="hidden_norm.weight", final_norm="norm.weight", embed="embed_tokens", d2t="d2t")
    | dict(feature_norm="input_norm.weight")
    | {f"feature_norms.{i}": f"fc_norm.{i}.weight" for i in range(16)}
)


def read_eagle3(hf: Mapping[str, Any], tensors: Mapping[str, Any]) -> Eagle3:
    """Returns the head, without a target, of a config.json and the names of tensors."""
    of_layer = get_object(hf, "transformer_layer_config")
    if get_object(hf, "eagle_config").get("use_aux_hidden_state", True) is not True:
        raise InputError(
            "eagle_config.use_aux_hidden_state false is not supported: use an EAGLE-3 head that gets the"
            " outputs of layers"
        )
    if of_layer.get("model_type", "") == "llama":
        of_layer = _LLAMA | {name: x for name, x in of_layer.items() if x is not None}
    config = _layer_config(of_layer or hf, tensors)
    has_lm_head = "lm_head.weight" in tensors
    settings = dict(target_hidden_size=config.hidden_size, draft_vocab_size=config.vocab_size)
    settings |= dict(norm_before_residual=bool(of_layer), norm_before_fc=False, fc_norm=False)
    settings |= dict(norm_output=False) | {name: x for name, x in hf.items() if x is not None}
    size = get_integer_at_most(settings, "draft_vocab_size", config.vocab_size)
    if size < config.vocab_size and not {"d2t", "lm_head.weight"} <= {*tensors}:
        raise InputError(
            f"draft_vocab_size {size} of {config.vocab_size} tokens needs the tensors d2t and lm_head.weight:"
            " fetch the draft head again"
        )
    is_joint = get_boolean(settings, "norm_before_fc") or "input_norm.weight" in tensors
    each = "each" if get_boolean(settings, "fc_norm") else None
    return Eagle3(
        config,
        target_hidden_size=get_integer(settings, "target_hidden_size"),
        layer_ids=_layer_ids(hf),
        draft_vocab_size=size if has_lm_head else None,
        has_offsets="d2t" in tensors,
        has_embed="embed_tokens.weight" in tensors,
        norm_before_residual=get_boolean(settings, "norm_before_residual"),
        feature_norm="joint" if is_joint else each,
        recycles_norm=get_boolean(settings, "norm_output"),
    )


def _layer_config(hf: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of the layers. The tensors tell if these have biases, and norms of queries and
    keys.
    """
    attention = "layers.0.self_attn."
    model_type = "qwen3" if f"{attention}q_norm.weight" in tensors else "llama"
    hf = _without(hf, "text_config", "vision_config", *_MROPE)
    hf |= dict(model_type=model_type, architectures=None, attention_bias=False, tie_word_embeddings=False)
    whole = from_hf(_without(hf, "partial_rotary_factor"))
    return _with_biases(
        dataclasses.replace(whole, rope=read_rope(hf, partial=True)),
        qkv_bias=f"{attention}q_proj.bias" in tensors,
        o_bias=f"{attention}o_proj.bias" in tensors,
    )


def _without(hf: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns settings without these names, at the top and in objects below it."""
    kept = {name: x for name, x in hf.items() if name not in names}
    return {name: _without(x, *names) if isinstance(x, Mapping) else x for name, x in kept.items()}


def _with_biases(config: ModelConfig, **biases: bool) -> ModelConfig:
    return dataclasses.replace(config, layers=tuple(layer.with_mixer(**biases) for layer in config.layers))


def _layer_ids(hf: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the layers of the target whose outputs the head gets. None: config.json names none.

    At the top, as in vLLM, id j is the input of layer j, which is the output of layer j - 1. In SGLang's
    `eagle_config`, and in AngelSlim's `aux_hidden_states_layer_ids`, id j is the output of layer j.
    """
    of_sglang = get_object(hf, "eagle_config").get(_IDS)
    for ids, offset in (
        (hf.get(_IDS) or hf.get("aux_hidden_state_layer_ids"), -1),
        (of_sglang or hf.get("aux_hidden_states_layer_ids"), 0),
    ):
        if not ids:
            continue
        if not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 0 for i in ids):
            raise InputError(
                f"config.json: {_IDS} must list {NUM_TAPS} layers of the target, got {format_value(ids)}"
            )
        return tuple(i + offset for i in ids)
    return None


def write_eagle3(head: Eagle3) -> dict[str, Any]:
    """Returns the inverse of `read_eagle3`, in the form that vLLM reads."""
    spec: Any = head.config.mixer_specs[0]
    config = _with_biases(head.config, qkv_bias=False, o_bias=False)
    rope = dataclasses.replace(config.rope, partial_rotary_factor=1.0)
    settings = to_hf(dataclasses.replace(config, rope=rope)) | dict(
        architectures=["Eagle3LlamaForCausalLM"],
        rope_parameters=write_rope(config.rope),
        attention_bias=spec.qkv_bias,
        target_hidden_size=head.target_hidden_size,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.feature_norm == "joint",
        fc_norm=head.feature_norm == "each",
        norm_output=head.recycles_norm,
    )
    if head.draft_vocab_size is not None:
        settings["draft_vocab_size"] = head.draft_vocab_size
    if head.layer_ids is not None:
        settings[_IDS] = [layer + 1 for layer in head.layer_ids]
    return settings


def _rename(name: str) -> str:
    return without_model(name).replace("midlayer.", "layers.0.")


EAGLE3_FILES = DraftFiles(
    read_eagle3, write_eagle3, _NAMES, rename=_rename, skipped=("t2d", "rotary_emb.", "verifier_")
)
