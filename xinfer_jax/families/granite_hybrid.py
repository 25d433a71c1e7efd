"""Granite 4 (`granitemoehybrid`): layers of Mamba-2 or of attention, which may have no RoPE, with Granite's
factors. Each layer has experts and an MLP that all tokens use, or this MLP alone.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.mamba2 import Mamba2Spec
from .family import Family, Joined, Names
from .granite import DEFAULTS, read_factors, write_granite
from .granite_moe import GRANITE_EXPERTS, GRANITE_JOINED, GRANITE_SHARED
from .layer_fields import attention_bias, read_experts
from .mamba_fields import mamba2_names
from .mamba_hybrids import (
    MAMBA,
    MAMBA_DEFAULTS,
    mamba_types,
    read_mamba,
    read_mamba_types,
    write_mamba,
)
from .values import get_count, get_integer, get_number

_POSITIONS = (None, "nope", "rope")  # the first two are equal


def read_granite_hybrid(hf: Mapping, layers: int) -> dict[str, Any]:
    positions = hf["position_embedding_type"]
    if positions not in _POSITIONS:
        raise InputError(
            f"position_embedding_type {format_value(positions)} is not supported: only 'rope', 'nope' and"
            " null are"
        )
    scale = get_number(hf, "attention_multiplier")
    attention = AttentionSpec(**attention_bias(hf), uses_rope=positions == "rope", attention_multiplier=scale)
    types = read_mamba_types(hf, layers) or [MAMBA] * layers
    mixers = {kind: read_mamba(hf) if kind == MAMBA else attention for kind in types}
    fed = _feed_forward(hf)
    return read_factors(hf) | dict(layers=tuple(LayerSpec((mixers[kind],), fed) for kind in types))


def _feed_forward(hf: Mapping) -> FeedForwardSpec:
    """Returns the experts with an MLP that all tokens use, or if there are no experts this MLP."""
    width = get_integer(hf, "shared_intermediate_size")
    if not get_count(hf, "num_local_experts"):
        return MlpSpec(width)
    sized = {**hf, "moe_intermediate_size": hf["intermediate_size"]}
    return read_experts(sized, shared_intermediate_size=width, shared_gated=False)


def write_granite_hybrid(config: ModelConfig) -> dict[str, Any]:
    attention = next(filter(None, (layer.attention for layer in config.layers)), None)
    settings = (
        write_mamba(config)
        | write_granite(config)
        | dict(
            layer_types=mamba_types(config),
            position_embedding_type="rope" if attention is not None and attention.uses_rope else "nope",
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
        )
    )
    spec: Any = config.layers[0].feed_forward
    width = spec.shared_intermediate_size if config.experts else spec.intermediate_size
    return settings | dict(shared_intermediate_size=width)


# If no layer has experts, the shared MLP is the only one.
_MLP = {leaf: GRANITE_SHARED[f"shared.{leaf}"] for leaf in ("gate", "up", "down")}
FAMILY = Family(
    DEFAULTS
    | MAMBA_DEFAULTS
    | dict(
        position_embedding_type=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=1024,
    ),
    read_granite_hybrid,
    "GraniteMoeHybridForCausalLM",
    write_granite_hybrid,
    Names(
        GRANITE_EXPERTS | GRANITE_SHARED | _MLP,
        (*GRANITE_JOINED, Joined("shared_mlp.input_linear", ("gate", "up"))),
    ),
    {Mamba2Spec.kind: mamba2_names("mamba")},
)
