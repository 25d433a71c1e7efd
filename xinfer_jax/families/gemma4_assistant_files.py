"""Files of Gemma 4's assistants ("gemma4_assistant" and "gemma4_unified_assistant" in transformers)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..draft_heads.gemma4_assistant import Gemma4Assistant
from ..errors import InputError, format_value
from .draft_files import DraftFiles
from .family import Names
from .gemma4 import FAMILY
from .reading import from_hf
from .values import get_boolean, get_integer, get_integer_at_most, get_object
from .writing import to_hf

_UNIFIED = "gemma4_unified_text"
_DEFAULTS: dict[str, Any] = dict(
    use_ordered_embeddings=False, num_centroids=2048, centroid_intermediate_top_k=32
)
_BACKBONE_SIZES = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}  # the defaults of transformers
_LM_HEAD = "lm_head."  # a copy of the embedding
_NAMES = Names(
    {**FAMILY.names.leaves}
    | dict(pre_projection="pre_projection", post_projection="post_projection")
    | dict(centroids="masked_embedding.centroids", token_ordering="masked_embedding.token_ordering")
)


def read_assistant(hf: Mapping[str, Any], tensors: Mapping[str, Any]) -> Gemma4Assistant:
    """Returns the assistant, without a target, of a config.json."""
    model_type: Any = hf.get("model_type")
    if model_type not in _BACKBONE_SIZES:
        raise InputError(
            f"model_type {format_value(model_type)} of an assistant is not supported: use one of"
            f" {', '.join(_BACKBONE_SIZES)}"
        )
    settings = _DEFAULTS | dict(backbone_hidden_size=_BACKBONE_SIZES[model_type])
    settings |= {name: x for name, x in hf.items() if x is not None}
    text = {"model_type": model_type.replace("assistant", "text"), **get_object(hf, "text_config")}
    # All layers use keys of the target. The reader of models demands keys for them.
    text |= dict(num_kv_shared_layers=0, architectures=None, final_logit_softcapping=None)
    config = _shared(from_hf(text), True)
    centroids = chosen = 0
    if get_boolean(settings, "use_ordered_embeddings"):
        centroids = get_integer(settings, "num_centroids")
        chosen = get_integer_at_most(settings, "centroid_intermediate_top_k", centroids)
        if config.vocab_size % centroids:
            raise InputError(
                f"config.json: num_centroids {centroids} must divide vocab_size {config.vocab_size}"
            )
    size = get_integer(settings, "backbone_hidden_size")
    return Gemma4Assistant(
        config, target_hidden_size=size, num_centroids=centroids, num_chosen_centroids=chosen
    )


def _shared(config: ModelConfig, shares_kv: bool) -> ModelConfig:
    layers = tuple(layer.with_mixer(shares_kv=shares_kv) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def write_assistant(head: Gemma4Assistant) -> dict[str, Any]:
    """Returns the inverse of `read_assistant`."""
    config = head.config
    unified = "Unified" if config.model_type == _UNIFIED else ""
    text = to_hf(_shared(config, False)) | dict(num_kv_shared_layers=config.num_hidden_layers)
    text |= dict(vocab_size_per_layer_input=0, architectures=None)
    settings = dict(
        architectures=[f"Gemma4{unified}AssistantForCausalLM"],
        model_type="gemma4_unified_assistant" if unified else "gemma4_assistant",
        text_config=text,
        backbone_hidden_size=head.target_hidden_size,
        use_ordered_embeddings=head.num_centroids > 0,
        tie_word_embeddings=True,
    )
    centroids = dict(num_centroids=head.num_centroids, centroid_intermediate_top_k=head.num_chosen_centroids)
    return settings | (centroids if head.num_centroids else {})


ASSISTANT_FILES = DraftFiles(
    read_assistant, write_assistant, _NAMES, "model.layers.{}.", rename=str, skipped=(_LM_HEAD,)
)
