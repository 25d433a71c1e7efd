"""Falcon-H1: every layer has Mamba-2 and attention side by side, then an MLP. Their inputs and outputs have
factors, also embeddings and logits.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..feed_forward.scaled_mlp import ScaledMlpSpec
from ..mixers.mamba2 import Mamba2Spec
from ..mixers.scaled_attention import ScaledAttentionSpec
from .bamba import LEAVES
from .family import Family, Names
from .layer_fields import attention_bias
from .mamba_fields import mamba2_names
from .mamba_hybrids import MAMBA_DEFAULTS, read_mamba, write_mamba
from .values import get_boolean, get_number, get_numbers

_ATTENTION = {f"{part}_multiplier": f"attention_{part}_multiplier" for part in ("in", "out")} | dict(
    key_multiplier="key_multiplier"
)
_MAMBA = {f"{part}_multiplier": f"ssm_{part}_multiplier" for part in ("in", "out")}
_MLP = ("gate_multiplier", "down_multiplier")
_EXPAND = 2  # of all published models, whose width does not follow from it


def read_falcon_h1(hf: Mapping, layers: int) -> dict[str, Any]:
    bias = get_boolean(hf, "mamba_proj_bias")
    if get_boolean(hf, "projectors_bias") != bias:
        raise InputError(
            f"projectors_bias {not bias} is not supported with mamba_proj_bias {bias}: both matrices of"
            " Mamba-2 have biases, or none has"
        )
    order = "before_gate" if get_boolean(hf, "mamba_norm_before_gate") else "after_gate"
    mamba = read_mamba(
        hf,
        norm=order if get_boolean(hf, "mamba_rms_norm") else None,
        multipliers=_factors(hf, "ssm_multipliers", 5),
        **{field: get_number(hf, name) for field, name in _MAMBA.items()},
    )
    factors: dict[str, Any] = {field: get_number(hf, name) for field, name in _ATTENTION.items()}
    attention = ScaledAttentionSpec(**attention_bias(hf), **factors)
    of_mlp: dict[str, Any] = dict(zip(_MLP, _factors(hf, "mlp_multipliers", 2), strict=True))
    mlp = ScaledMlpSpec(bias=get_boolean(hf, "mlp_bias"), **of_mlp)
    return dict(
        embed_scale=get_number(hf, "embedding_multiplier"),
        logits_scaling=1 / get_number(hf, "lm_head_multiplier"),
        layers=(LayerSpec((mamba, attention), mlp),) * layers,
    )


def _factors(hf: Mapping, name: str, count: int) -> tuple[float, ...]:
    """Returns the factors of that name. They are 1 if config.json has none."""
    if hf.get(name) is None:
        return (1.0,) * count
    factors = get_numbers(hf, name)
    if len(factors) != count:
        raise InputError(f"config.json: {name} must have {count} numbers, got {format_value(hf[name])}")
    return factors


def write_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    mamba = layer.mixer_of(Mamba2Spec.kind)
    attention = layer.mixer_of(ScaledAttentionSpec.kind)
    settings = write_mamba(config) | {name: getattr(mamba, field) for field, name in _MAMBA.items()}
    settings |= {name: getattr(attention, field) for field, name in _ATTENTION.items()}
    return settings | dict(
        mamba_d_ssm=mamba.num_heads * mamba.head_dim,
        mamba_expand=_EXPAND,
        mamba_rms_norm=mamba.norm is not None,
        mamba_norm_before_gate=mamba.norm != "after_gate",
        projectors_bias=mamba.bias,
        ssm_multipliers=list(mamba.multipliers),
        mlp_multipliers=[getattr(layer.mlp, field) for field in _MLP],
        embedding_multiplier=config.embed_scale,
        lm_head_multiplier=1 / config.logits_scaling,
    )


FAMILY = Family(
    dict(
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        mamba_d_ssm=1024,
        mamba_norm_before_gate=True,
        mamba_rms_norm=False,
        projectors_bias=False,
        lm_head_multiplier=1.0,
        embedding_multiplier=1.0,
        **MAMBA_DEFAULTS,
    )
    | dict.fromkeys((*_ATTENTION.values(), *_MAMBA.values()), 1.0),
    read_falcon_h1,
    "FalconH1ForCausalLM",
    write_falcon_h1,
    Names(LEAVES),
    {Mamba2Spec.kind: mamba2_names("mamba")},
)
