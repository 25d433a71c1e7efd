"""Fields `mamba_*` of config.json, which Bamba, Falcon-H1 and Granite 4 share, and the types of their layers.

Layers have the type "mamba" or "attention" in published files. transformers 5 writes "linear_attention" and
"full_attention".
"""

from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..mixers.mamba2 import Mamba2Spec
from .layer_fields import FULL, read_layer_types
from .mamba_fields import read_mixer, write_mixer
from .values import get_integer

MAMBA = "mamba"
ATTENTION = "attention"
_PUBLISHED_TYPES = {"linear_attention": MAMBA, FULL: ATTENTION}
_FIELDS = dict(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
    n_groups="mamba_n_groups",
    state_size="mamba_d_state",
    conv_kernel="mamba_d_conv",
    bias="mamba_proj_bias",
    conv_bias="mamba_conv_bias",
)
MAMBA_DEFAULTS = dict(
    mamba_n_heads=128,
    mamba_d_head="auto",
    mamba_n_groups=1,
    mamba_d_state=256,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_proj_bias=False,
    mamba_conv_bias=True,
)


def read_mamba(hf: Mapping, **settings: Any) -> Mamba2Spec:
    """Returns the mixer of config.json. Its heads together are as wide as `mamba_d_ssm`, or if there is none
    `mamba_expand` times `hidden_size`.

    Args:
        hf: config.json with the defaults of its family.
        settings: other fields of `Mamba2Spec`.
    """
    if hf.get("mamba_d_ssm") is None:
        width = get_integer(hf, "mamba_expand") * get_integer(hf, "hidden_size")
        name = "mamba_expand * hidden_size"
    else:
        width = get_integer(hf, "mamba_d_ssm")
        name = "mamba_d_ssm"
    heads = get_integer(hf, "mamba_n_heads")
    if hf["mamba_d_head"] == "auto":
        hf = {**hf, "mamba_d_head": width // heads or 1}
    mixer = read_mixer(hf, _FIELDS, **settings)
    if heads * mixer.head_dim != width:
        raise InputError(
            f"config.json: mamba_n_heads {heads} heads of mamba_d_head {mixer.head_dim} have"
            f" {heads * mixer.head_dim} features, and {name} is {width}: the numbers must be equal"
        )
    return mixer


def write_mamba(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `read_mamba`, with `mamba_expand`."""
    mixer = next(filter(None, (layer.mixer_of(Mamba2Spec.kind) for layer in config.layers)), None)
    if mixer is None:
        return dict(mamba_n_heads=1)  # transformers checks it in models without these layers too
    expand = mixer.num_heads * mixer.head_dim // config.hidden_size
    return write_mixer(mixer, _FIELDS) | dict(mamba_expand=expand)


def read_mamba_types(hf: Mapping, layers: int) -> list[str] | None:
    """Returns the type of each layer, `MAMBA` or `ATTENTION`, by `layer_types` or `layers_block_type`. None:
    config.json has neither.
    """
    types = hf.get("layers_block_type") if hf.get("layer_types") is None else hf["layer_types"]
    if isinstance(types, list | tuple):
        types = [_PUBLISHED_TYPES.get(x, x) if isinstance(x, str) else x for x in types]
    return read_layer_types({"layer_types": types}, layers, (MAMBA, ATTENTION))


def mamba_types(config: ModelConfig) -> list[str]:
    """Returns the type of each layer."""
    return [MAMBA if layer.mixer_of(Mamba2Spec.kind) else ATTENTION for layer in config.layers]
