"""Files of DFlash heads (z-lab) and of DSpark heads (DeepSpec). Their layers are Qwen3's.

Published files have several forms of config.json. z-lab's have `dflash_config`, DeepSpec's have the settings
at the top, and files of vLLM's speculators have the layers in `transformer_layer_config`.
"""

from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..draft_heads.dflash import DFlash
from ..errors import InputError, format_value
from .draft_files import DraftFiles
from .family import Names
from .reading import from_hf
from .rope_settings import write_rope
from .values import get_boolean, get_count, get_integer, get_number, get_object
from .writing import to_hf

_MARKOV = "markov_head.markov_"
_NAMES = Names(
    dict(embed="embed_tokens", fc="fc", hidden_norm="hidden_norm.weight", final_norm="norm.weight", d2t="d2t")
    | dict(markov_in=f"{_MARKOV}w1", markov_out=f"{_MARKOV}w2")
)
# Settings of the target that some programs copy into the config of a head, whose RoPE rotates whole heads.
_ROPE_OF_TARGET = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def read_dflash(hf: Mapping[str, Any], tensors: Mapping[str, Any]) -> DFlash:
    """Returns the head, without a target, of a config.json and the names of tensors."""
    layers = get_object(hf, "transformer_layer_config")
    is_speculators = bool(layers)
    own = {**hf, **get_object(hf, "dflash_config")}  # settings of the head are in one of both
    config = _layer_config({**hf, **layers})
    own.setdefault("block_size", 16)
    if is_speculators and own.get("target_layer_ids") is None:
        # Here a layer is named by its input: id j is the output of layer j - 1.
        own["target_layer_ids"] = [i - 1 for i in _layer_ids(own, "aux_hidden_state_layer_ids")]
    if own.get("markov_head_type") not in (None, "vanilla"):
        raise InputError(
            f"markov_head_type {format_value(own['markov_head_type'])} is not supported: only vanilla is"
        )
    if own.get("rope_is_neox_style") is False:
        raise InputError("rope_is_neox_style false is not supported: use a head that rotates halves of heads")
    if own.get("fc_layernorm") or own.get("fc_norm"):
        raise InputError("fc_layernorm is not supported: use a DFlash head without norms before fc")
    rank = get_count(own, "markov_rank") if own.get("markov_rank") is not None else 0
    d2t = tensors.get("d2t")
    if d2t is not None and "lm_head.weight" not in tensors:
        raise InputError("the draft head has d2t for fewer tokens, and no lm_head for them: fetch it again")
    cap = own.get("final_logit_softcapping")
    return DFlash(
        config,
        block_size=get_integer(own, "block_size"),
        mask_token_id=get_count({"mask_token_id": None, **own}, "mask_token_id"),
        target_layer_ids=tuple(_layer_ids(own, "target_layer_ids")),
        samples_anchor=_samples_anchor(own, hf, rank),
        markov_rank=rank,
        is_causal=_is_causal(own),
        draft_vocab_size=None if d2t is None else d2t.shape[0],
        has_embed="embed_tokens.weight" in tensors,
        has_lm_head="lm_head.weight" in tensors,
        embed_scale=get_number({"input_embedding_scale": 1.0, **own}, "input_embedding_scale"),
        output_multiplier=get_number({"output_multiplier": 1.0, **own}, "output_multiplier"),
        final_logit_softcapping=None if not cap else get_number(own, "final_logit_softcapping"),
    )


def _layer_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of the layers."""
    hf = dict(hf) | dict(model_type="qwen3", architectures=None, is_causal=True, tie_word_embeddings=False)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(hf.get(name), Mapping):
            hf[name] = {key: x for key, x in hf[name].items() if key not in _ROPE_OF_TARGET}
    hf.pop("partial_rotary_factor", None)
    return from_hf({name: x for name, x in hf.items() if name not in ("text_config", "vision_config")})


def _layer_ids(hf: Mapping[str, Any], name: str) -> list[int]:
    ids = hf.get(name)
    if not isinstance(ids, list | tuple) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise InputError(f"config.json: {name} must list layers of the target, got {format_value(ids)}")
    return list(ids)


def _samples_anchor(own: Mapping[str, Any], hf: Mapping[str, Any], rank: int) -> bool:
    """Returns True if the output at the last token is a draft token too. In DSpark's files it is, unless
    SpecForge wrote them. In z-lab's files it is not.
    """
    if own.get("sample_from_anchor") is not None:
        return get_boolean(own, "sample_from_anchor")
    is_z_lab = [*(hf.get("architectures") or ()), ""][0] == "DFlashDraftModel"
    if is_z_lab and rank:
        raise InputError(
            "config.json: DFlashDraftModel with a markov_rank does not say whether the output at the last"
            " token is a draft token: set sample_from_anchor to true if it is, or to false"
        )
    return not is_z_lab and own.get("projector_type") is None


def _is_causal(own: Mapping[str, Any]) -> bool | None:
    for name in ("is_causal", "causal"):
        if own.get(name) is not None:
            return get_boolean(own, name)
    return False if own.get("sliding_window_non_causal") is True else None


def write_dflash(head: DFlash) -> dict[str, Any]:
    """Returns the inverse of `read_dflash`."""
    settings = to_hf(head.config) | dict(
        architectures=["Qwen3DSparkModel" if head.markov_rank else "DFlashDraftModel"],
        rope_parameters=write_rope(head.config.rope),
        block_size=head.block_size,
        mask_token_id=head.mask_token_id,
        target_layer_ids=list(head.target_layer_ids),
        sample_from_anchor=head.samples_anchor,
        markov_rank=head.markov_rank,
        input_embedding_scale=head.embed_scale,
        output_multiplier=head.output_multiplier,
        final_logit_softcapping=head.final_logit_softcapping,
        enable_confidence_head=False,
    )
    ids = dict(mask_token_id=head.mask_token_id, target_layer_ids=list(head.target_layer_ids))
    causal = {} if head.is_causal is None else dict(is_causal=head.is_causal)
    cut = {} if head.draft_vocab_size is None else dict(draft_vocab_size=head.draft_vocab_size)
    return settings | causal | cut | dict(dflash_config=ids)


DFLASH_FILES = DraftFiles(read_dflash, write_dflash, _NAMES)
