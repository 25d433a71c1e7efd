"""Mamba-2: every layer is one mixer with a state, after one norm. There is no attention and no MLP."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..mixers.mamba2 import Mamba2Spec
from .family import BACKBONE, Family, Names
from .mamba_fields import check_inner_width, mamba2_names, read_mixer, write_mixer
from .values import get_number

_CONTEXT = 2**20  # tokens; its config has no limit, and its memory does not grow
# The fields of config.json with the numbers of the mixer, by the fields of `Mamba2Spec`.
_FIELDS = {name: name for name in ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")} | dict(
    bias="use_bias", conv_bias="use_conv_bias"
)


def read_mamba2(hf: Mapping, layers: int) -> dict[str, Any]:
    mixer = read_mixer(hf, _FIELDS)
    check_inner_width(hf, mixer, "expand")
    return dict(
        layers=(LayerSpec((mixer,), None),) * layers,
        rms_norm_eps=get_number(hf, "layer_norm_epsilon", (1e-30, 1)),
    )


def write_mamba2(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].mixer_of(Mamba2Spec.kind)
    expand = mixer.num_heads * mixer.head_dim // config.hidden_size
    return write_mixer(mixer, _FIELDS) | dict(expand=expand, layer_norm_epsilon=config.rms_norm_eps)


_SIZES = dict(num_heads=128, head_dim=64, n_groups=8, state_size=128, conv_kernel=4, expand=2)
# Numbers of attention and MLPs, which no layer has.
_UNUSED = dict(num_attention_heads=1, intermediate_size=1, max_position_embeddings=_CONTEXT)
FAMILY = Family(
    _SIZES
    | _UNUSED
    | dict(vocab_size=32768, hidden_size=4096, num_hidden_layers=64, tie_word_embeddings=False)
    | dict(layer_norm_epsilon=1e-5, rms_norm_eps=1e-5, use_bias=False, use_conv_bias=True),
    read_mamba2,
    "Mamba2ForCausalLM",
    write_mamba2,
    Names(dict(attn_norm="norm.weight")),
    {Mamba2Spec.kind: mamba2_names("mixer")},
    prefixes=BACKBONE,
    module_prefixes=BACKBONE,
)
