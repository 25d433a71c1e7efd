"""Heads for multi-token prediction (MTP) in the files of models: names of tensors, and fields of config.json.

There are two styles of names. Qwen3-Next and Qwen3.5 have `mtp.*`. DeepSeek-V3 and GLM have one more layer
after the last layer of the model. Families without published heads have the names of Qwen, so heads that you
train for them can be saved.

Heads of other styles, and heads with several layers, are not read.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..draft_heads.mtp import MtpSpec
from ..errors import InputError, format_value
from ..plugins import load

LOAD_WITHOUT_HEAD = "load the model without draft_head"  # the remedy of errors


@dataclasses.dataclass(frozen=True)
class MtpNames:
    """The places of a head in the files. The prefixes may have "{}" for the number of layers of the model."""

    prefix: str  # of the head's own tensors
    layer_prefix: str  # of the tensors of its layer
    leaves: Mapping[str, str]  # names of the head's leaves, without the prefix
    field: str  # of config.json: the number of its layers
    # Modules with copies of the model's embeddings and output matrix, without the prefix. They are not read.
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")

    def starts_of_copies(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the beginnings of the names of tensors that are copies of tensors of the model."""
        prefix = self.prefix.format(config.num_hidden_layers)
        return tuple(f"{prefix}{name}." for name in self.copies)


QWEN_MTP = MtpNames(
    "mtp.",
    "mtp.layers.0.",
    dict(
        proj="fc",
        embed_norm="pre_fc_norm_embedding.weight",
        hidden_norm="pre_fc_norm_hidden.weight",
        final_norm="norm.weight",
    ),
    "mtp_num_hidden_layers",
)
DEEPSEEK_MTP = MtpNames(
    "model.layers.{}.",
    "model.layers.{}.",
    dict(
        proj="eh_proj",
        embed_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        final_norm="shared_head.norm.weight",
    ),
    "num_nextn_predict_layers",
)


def mtp_spec(config: ModelConfig) -> MtpSpec:
    """Returns the spec of the head in the files of a model. Its layer has the attention of the model's last
    layer without a window, and experts if some layer of the model has experts.

    Raises:
        InputError: the model has no layer with attention, or its layers have embeddings of their own.
    """
    if config.hidden_size_per_layer_input:
        raise InputError(
            f"model_type {config.model_type!r} has embeddings of each layer, with which draft heads are not"
            f" supported: {LOAD_WITHOUT_HEAD}"
        )
    attending = [layer for i, layer in enumerate(config.layers) if _attends(config, i)]
    if not attending:
        raise InputError(
            f"the model has no layer with attention, which its draft head needs: {LOAD_WITHOUT_HEAD}"
        )
    full = [layer for layer in attending if not any(getattr(mixer, "window", None) for mixer in layer.mixers)]
    layer = (full or attending)[-1]
    sparse = [layer for layer in config.layers if layer.experts]
    if sparse:
        layer = dataclasses.replace(layer, feed_forward=sparse[-1].feed_forward)
    return MtpSpec(layer)


def _attends(config: ModelConfig, layer: int) -> bool:
    """Returns True if each mixer of a layer has keys of its own."""
    mixers = config.mixers(layer)
    return bool(mixers) and all(
        mixer.has_keys and not getattr(mixer.spec, "shares_kv", False) for mixer in mixers
    )


def with_draft_head(config: ModelConfig, hf: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """Returns the config of a model with the head in its files.

    Args:
        config: the config of the model.
        hf: config.json.
        names: the names of the tensors, as the text model alone would have them.

    Raises:
        InputError: the files have no head, or a head that is not supported.
    """
    own = names_of_head(config)
    layers = hf.get(own.field)
    first_layer = own.layer_prefix.format(config.num_hidden_layers)
    next_layer = _layer_after(own, config)
    if type(layers) is int and layers > 1 or any(name.startswith(next_layer) for name in names):
        raise InputError(
            f"a draft head with several layers is not supported, and config.json has {own.field}"
            f" {format_value(layers)}: {LOAD_WITHOUT_HEAD}"
        )
    if hf.get("mtp_use_dedicated_embeddings"):
        raise InputError(
            f"mtp_use_dedicated_embeddings {format_value(hf['mtp_use_dedicated_embeddings'])} is not"
            f" supported: {LOAD_WITHOUT_HEAD}"
        )
    proj = own.prefix.format(config.num_hidden_layers) + own.leaves["proj"]
    if not any(name.startswith(f"{proj}.") for name in names):
        others = sorted(name for name in names if "mtp" in name and not name.startswith(first_layer))
        if others:
            raise InputError(
                f"a draft head with the tensor {others[0]} is not supported: {LOAD_WITHOUT_HEAD}"
            )
        raise InputError(
            f"the files have no draft head, which has the tensor {proj}.weight: {LOAD_WITHOUT_HEAD}"
        )
    return dataclasses.replace(config, draft_head=mtp_spec(config))


def _layer_after(own: MtpNames, config: ModelConfig) -> str:
    """Returns the beginning of the names of a second layer of the head."""
    if own.layer_prefix == own.prefix:
        return own.layer_prefix.format(config.num_hidden_layers + 1)
    return own.layer_prefix.replace(".0.", ".1.")


def names_of_head(config: ModelConfig) -> MtpNames:
    """Returns the names of a model's head."""
    return load("family", config.model_type).draft_head


def write_draft_head(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings of the head in config.json. They are empty if the model has no head."""
    return {} if config.draft_head is None else {names_of_head(config).field: 1}
