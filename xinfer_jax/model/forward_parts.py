"""The parts of `forward` as public functions: `embed_tokens`, `hidden_states` and `final_norm`."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import Remat
from ..checks import check_range
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..old_names import renamed_arguments
from ..ops.operation import over_any_mesh
from ..weights.params import AnyArray, Params, check_params
from .decoder import checked_hidden, embed_ids, last_norm, run_model
from .taps import Taps, check_none_reads

if TYPE_CHECKING:
    from .decoder import MaybeCache


@renamed_arguments(routes="routed_experts")
def hidden_states(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    cache: "MaybeCache" = None,  # type: ignore[assignment]
    num_tokens_B: AnyArray | None = None,
    *,
    inputs_BTD: AnyArray | None = None,
    segment_ids_BT: AnyArray | None = None,
    positions_BT: AnyArray | None = None,
    routed_experts: AnyArray | None = None,
    taps: Taps | None = None,
    remat: Remat = None,
    impl: str | None = None,
) -> "tuple[jax.Array, MaybeCache]":
    """Returns the hidden states after the final norm, [B, T, D], and the KV cache with the tokens appended.

    It is `forward` without the last step, `unembed`.

    Args:
        params: the parameter tree of the model.
        config: the config of the model. It is static.
        tokens_BT: int32 token ids (see `forward`).
        cache: the KV cache with the tokens before these (see `forward`). None: there are no tokens before.
        num_tokens_B: int32 [B]: the number of real tokens in each row. None: all T tokens.
        inputs_BTD: inputs of the first layer, in place of embeddings (see `run_model`). None embeds the
            tokens.
        segment_ids_BT: ids of segments, for several texts in a row (see `run_model`). None: a row is one
            text.
        positions_BT: the positions of the tokens for RoPE (see `run_model`). None counts from 0 in each
            segment.
        routed_experts: the experts that each token uses (see `run_model`). None: the router chooses them.
        taps: edits of the residual stream (see `run_model`). No tap may read.
        remat: the values of a layer that the backward pass stores (see `run_model`).
        impl: the implementation of the operations (see `forward`). None chooses the best one for the device.

    Raises:
        InputError: `run_model` would raise it, or a tap reads.
    """
    if taps is not None:
        check_none_reads(taps, config, "hidden_states")
    out = run_model(
        params, config, tokens_BT, cache, num_tokens_B, inputs_BTD=inputs_BTD, segment_ids_BT=segment_ids_BT,
        positions_BT=positions_BT, routed_experts=routed_experts, taps=taps, remat=remat, impl=impl,
    )  # fmt: skip
    return out.hidden, out.cache


@over_any_mesh
def final_norm(params: Params, config: ModelConfig, hidden: AnyArray) -> jax.Array:
    """Returns the final norm of the output of the last layer, [..., D], as `unembed` takes it.

    For example, apply it to the hidden states that a tap of the last layer reads. `hidden_states` returns
    them with the norm applied.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        hidden: hidden states before the final norm.

    Raises:
        InputError: `hidden` is not an array, or has another width.
    """
    check_params(params, config, stacked=True)
    return last_norm(params, config, checked_hidden(hidden, config))


@over_any_mesh
def embed_tokens(params: Params, config: ModelConfig, tokens: AnyArray) -> jax.Array:
    """Returns the embeddings that the first layer gets: [..., D] in the dtype of the activations.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        tokens: int32 token ids [...].

    Raises:
        InputError: `tokens` is not an integer array. Outside a trace it is also raised for an id beyond the
            vocabulary.
    """
    check_params(params, config, stacked=True)
    if not isinstance(tokens, jax.Array | np.ndarray) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(f"tokens must be an array of ids, got {format_value(tokens)}")
    check_range("token id", tokens, 0, config.vocab_size - 1)
    return embed_ids(params, config, jnp.asarray(tokens))
