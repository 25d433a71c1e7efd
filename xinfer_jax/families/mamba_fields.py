"""Fields and names of Mamba-2 mixers, which several families share."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value
from ..mixers.mamba2 import Mamba2Spec
from .family import Joined, Names
from .values import get_boolean, get_integer


def read_mixer(
    hf: Mapping, fields: Mapping[str, str], *, activation: str = "hidden_act", **settings: Any
) -> Mamba2Spec:
    """Returns the mixer that config.json describes. Raises InputError if its numbers do not fit together.

    Args:
        hf: config.json with the defaults of its family.
        fields: the names of its fields, by the fields of `Mamba2Spec`.
        activation: the name of the field with the activation of the convolution, which is silu.
        settings: other fields of `Mamba2Spec`.
    """
    if hf[activation] not in ("silu", "swish"):
        raise InputError(f"{activation} {format_value(hf[activation])} is not supported: Mamba-2's is 'silu'")
    flags = ("bias", "conv_bias")
    numbers: dict[str, Any] = {
        field: get_integer(hf, name) for field, name in fields.items() if field not in flags
    }
    settings = {field: get_boolean(hf, fields[field]) for field in flags} | settings
    (heads, groups, kernel) = (numbers[name] for name in ("num_heads", "n_groups", "conv_kernel"))
    if heads % groups:
        raise InputError(
            f"config.json: {fields['num_heads']} {heads} is not a multiple of {fields['n_groups']} {groups}"
        )
    if kernel < 2:
        raise InputError(f"config.json: {fields['conv_kernel']} must be at least 2, got {kernel}")
    return Mamba2Spec(**numbers, **{"norm_groups": groups} | settings)


def check_inner_width(hf: Mapping, mixer: Mamba2Spec, expand: str) -> None:
    """Raises InputError unless the heads are as wide as `expand` times hidden_size."""
    width = get_integer(hf, expand) * get_integer(hf, "hidden_size")
    if width != mixer.num_heads * mixer.head_dim:
        raise InputError(
            f"config.json: {expand} {format_value(hf[expand])} makes {width} inner features, and"
            f" {mixer.num_heads} heads of {mixer.head_dim} have {mixer.num_heads * mixer.head_dim}"
        )


def write_mixer(mixer: Mamba2Spec, fields: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields that `read_mixer` reads."""
    return {name: getattr(mixer, field) for field, name in fields.items()}


def mamba2_names(module: str) -> Names:
    """Returns the names of the tensors of the mixer. module: the name of its module in a layer."""
    projections = {f"ssm_{part}": f"{module}.{part}_proj" for part in ("z", "x", "b", "c", "dt")}
    taps = ("conv_x", "conv_b", "conv_c")
    biases = tuple(f"{name}_bias" for name in taps)
    leaves = {name: f"{module}.{name}" for name in (*taps, *biases, "A_log", "dt_bias", "D")}
    leaves |= projections | dict(gated_norm=f"{module}.norm.weight", ssm_o=f"{module}.out_proj")
    joined = (
        Joined(f"{module}.in_proj", tuple(projections)),
        Joined(f"{module}.conv1d.weight", taps, axes_of_leaves=(0, None, 1)),
        Joined(f"{module}.conv1d.bias", biases),
    )
    return Names(leaves, joined)
