"""Nemotron-H and Nemotron-3: each layer is one mixer or one feed-forward, after one norm.

A mixer is Mamba-2, or attention without RoPE and biases. A feed-forward is an MLP without a gate, or a
mixture of experts without gates, which may be latent. As in transformers, `attention_bias`,
`residual_in_fp32`, `time_step_limit` and `expand` have no effect, and neither has `time_step_min` (see
`mixers.mamba2`). Draft heads (`mtp.*`) are not read.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from ..errors import InputError, format_value
from ..feed_forward.ungated_experts import UngatedExpertsSpec
from ..mixers.mamba2 import Mamba2Spec
from .family import BACKBONE, Family, Joined, Names
from .grouped_experts import DEFAULTS, read_grouped_experts, write_router_and_sizes
from .layer_fields import FULL
from .mamba_fields import mamba2_names, read_mixer, write_mixer
from .values import get_boolean, get_integer, get_number, reject_setting

_MAMBA = "linear_attention"
_EXPERTS = "moe"
_MLP = "mlp"
_TYPES = (_MAMBA, FULL, _EXPERTS, _MLP)
_OLDER_TYPES = dict(mamba=_MAMBA, attention=FULL)
_LETTERS = {"M": _MAMBA, "*": FULL, "E": _EXPERTS, "-": _MLP}
_OLDER_NAMES = dict(
    mamba_n_groups="n_groups",
    mamba_d_conv="conv_kernel",
    mamba_conv_bias="use_conv_bias",
    layer_types="layers_block_type",
    num_local_experts="n_routed_experts",
)
_ACTIVATIONS = ("relu2", "silu", "gelu_pytorch_tanh")
# The fields of config.json with the numbers of the mixer, by the fields of `Mamba2Spec`.
_MIXER = dict(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    n_groups="n_groups",
    state_size="ssm_state_size",
    conv_kernel="conv_kernel",
    bias="use_bias",
    conv_bias="use_conv_bias",
)


def complete_nemotron_h(hf: Mapping) -> dict[str, Any]:
    """Returns config.json with the names of today and the number of layers, which it may lack."""
    hf = {**hf, **{name: hf[older] for older, name in _OLDER_NAMES.items() if hf.get(older) is not None}}
    types = _layer_types(hf)
    layers = len(types) if hf.get("num_hidden_layers") is None else get_integer(hf, "num_hidden_layers")
    if layers != len(types):
        raise InputError(
            f"config.json: num_hidden_layers is {layers}, and layers_block_type or hybrid_override_pattern"
            f" has {len(types)} layers: make them equal"
        )
    return hf | dict(layers_block_type=types, num_hidden_layers=layers)


def _layer_types(hf: Mapping) -> list[str]:
    """Returns the type of each layer, by `layers_block_type` or the letters of `hybrid_override_pattern`."""
    types = hf.get("layers_block_type")
    if types is not None:
        if not isinstance(types, list | tuple) or not types:
            raise InputError(f"layers_block_type must list the types of layers, got {format_value(types)}")
        types = [_OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
        if other := [kind for kind in types if kind not in _TYPES]:
            raise InputError(
                f"layer type {format_value(other[0])} is not supported: use one of {', '.join(_TYPES)}"
            )
        return types
    pattern = hf.get("hybrid_override_pattern")
    if pattern is None:
        return [_MAMBA, _EXPERTS, FULL, _MLP]  # the default of transformers
    if not isinstance(pattern, str) or not pattern:
        raise InputError(
            "hybrid_override_pattern must be a text with a letter for each layer, got"
            f" {format_value(pattern)}"
        )
    if other := [letter for letter in pattern if letter not in _LETTERS]:
        raise InputError(
            f"hybrid_override_pattern has the letter {format_value(other[0])}: use M (Mamba-2), *"
            " (attention), E (experts) and - (MLP)"
        )
    return [_LETTERS[letter] for letter in pattern]


def read_nemotron_h(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, "sliding_window")
    reject_setting(hf, "tie_word_embeddings")  # transformers loads a head of its own then too
    activation = hf["mlp_hidden_act"]
    if activation not in _ACTIVATIONS:
        raise InputError(
            f"mlp_hidden_act {format_value(activation)} is not supported: use one of"
            f" {', '.join(_ACTIVATIONS)}"
        )
    types = hf["layers_block_type"]
    makers = {
        _MAMBA: lambda: LayerSpec((read_mixer(hf, _MIXER, activation="mamba_hidden_act"),), None),
        FULL: lambda: LayerSpec((AttentionSpec(uses_rope=False),), None),
        _EXPERTS: lambda: LayerSpec((), _read_experts(hf)),
        _MLP: lambda: LayerSpec((), MlpSpec(bias=get_boolean(hf, "mlp_bias"), gated=False)),
    }
    of_type = {kind: makers[kind]() for kind in dict.fromkeys(types)}  # it may lack the numbers of others
    return dict(
        layers=tuple(of_type[kind] for kind in types),
        rope=RopeConfig(),
        hidden_act=activation,
        norm_offset=0.0,  # norms multiply in float32
        rms_norm_eps=get_number(hf, "layer_norm_epsilon", (1e-30, 1)),
    )


def _read_experts(hf: Mapping) -> UngatedExpertsSpec:
    if hf["n_shared_experts"] != 1:
        raise InputError(
            f"n_shared_experts {format_value(hf['n_shared_experts'])} is not supported: only 1 is, of the"
            " width moe_shared_expert_intermediate_size"
        )
    experts = read_grouped_experts({**hf, "n_shared_experts": 0})
    own: dict[str, Any] = dict(
        shared_intermediate_size=get_integer(hf, "moe_shared_expert_intermediate_size"),
        shared_gated=False,
        shared_bias=get_boolean(hf, "mlp_bias"),
        latent_size=0 if hf["moe_latent_size"] is None else get_integer(hf, "moe_latent_size"),
    )
    return UngatedExpertsSpec(**vars(experts) | own)


def write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    types = [_type_of(layer) for layer in config.layers]
    settings: dict[str, Any] = dict(
        layers_block_type=types,
        mlp_hidden_act=config.hidden_act,
        layer_norm_epsilon=config.rms_norm_eps,
        num_nextn_predict_layers=0,
        rope_parameters=None,
    )
    mixers = (layer.mixer_of(Mamba2Spec.kind) for layer in config.layers)
    if mixer := next(filter(None, mixers), None):
        settings |= write_mixer(mixer, _MIXER)
    experts: Any = config.experts
    if experts is None:
        return settings
    settings["mlp_bias"] = experts.shared_bias
    return (
        settings
        | write_router_and_sizes(experts)
        | dict(
            moe_shared_expert_intermediate_size=experts.shared_intermediate_size,
            moe_latent_size=experts.latent_size or None,
            n_shared_experts=1,
        )
    )


def _type_of(layer: LayerSpec) -> str:
    """Returns the type of a layer in config.json."""
    if layer.mixers:
        return FULL if layer.attention else _MAMBA
    return _EXPERTS if layer.experts else _MLP


_MATRICES = ("up", "down")
_LEAVES = dict(attn_norm="norm.weight", mlp_norm="norm.weight", router="mixer.gate")
_LEAVES |= {f"latent_{end}": f"mixer.fc{i}_latent_proj" for i, end in ((1, "in"), (2, "out"))}
_LEAVES |= {"router.correction_bias": "mixer.gate.e_score_correction_bias"}
for _leaf in _MATRICES:
    _LEAVES |= {
        _leaf: f"mixer.{_leaf}_proj",
        f"experts.{_leaf}": f"mixer.experts.{{}}.{_leaf}_proj",
        f"shared.{_leaf}": f"mixer.shared_experts.{_leaf}_proj",
    }
# The names of transformers 5.
_STACKED = tuple(
    Joined(f"mixer.experts.{leaf}_proj", (f"experts.{leaf}",), stacked=True, is_published=False)
    for leaf in _MATRICES
)
_ATTENTION = Names({leaf: f"mixer.{leaf}_proj" for leaf in "qkvo"})
FAMILY = Family(
    DEFAULTS
    | dict(
        vocab_size=131072,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=21504,
        max_position_embeddings=4096,
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        mamba_hidden_act="silu",
        ssm_state_size=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        n_routed_experts=8,
        n_shared_experts=1,
        moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688,
        moe_latent_size=None,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    read_nemotron_h,
    "NemotronHForCausalLM",
    write_nemotron_h,
    Names(_LEAVES, _STACKED),
    {AttentionSpec.kind: _ATTENTION, Mamba2Spec.kind: mamba2_names("mixer")},
    prefixes=BACKBONE,
    module_prefixes={"model.embed_tokens.": "model.embeddings.", "model.norm.": "model.norm_f."},
    complete=complete_nemotron_h,
)
