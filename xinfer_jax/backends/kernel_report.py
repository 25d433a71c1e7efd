"""`kernels_used`: which implementation serves each kernel of a call, for `--verbose` and benchmarks."""

from typing import Any

import jax
import numpy as np

from .. import kernels_pallas
from ..annotations import Dtype
from ..cache.kv_cache import empty_layers
from ..cache.stored_kv import resolve_cache_dtype
from ..config.model_config import ModelConfig
from ..generation.options import GenerateOptions, default_capacity
from ..model.decoder import lm_head
from ..modes import in_default_modes
from ..old_names import renamed_arguments
from ..ops.forms import named
from ..ops.operation import check_impl
from ..plugins import load
from ..weights.params import Params, activation_dtype, cache_dtype as default_cache_dtype
from ..weights.quantized_weight import is_quantized
from .kernels.expert_kernels import select_experts
from .kernels.head import select_head_kernel
from .kernels.product_kernels import Operands, select_product


@renamed_arguments(kv_dtype="cache_dtype")
@in_default_modes
def kernels_used(
    params: Params,
    config: ModelConfig,
    impl: str | None = None,
    rows: int = 1,
    cache_dtype: Dtype | None = None,
    capacity: int | None = None,
) -> dict[str, kernels_pallas.Selection]:
    """Returns the implementation of each kernel in a call of `generate`, and the reason for it.

    Use it to check that your model gets the kernels that you expect on this machine. The keys of the result
    are kernels:

    - `lm_head_argmax` serves greedy rows. If the vocabulary matrix is int8, `int8_head_argmax` does. Sampled
      rows use logits instead.
    - `product` is the product of the matrices "o" in a decode step. Kernels of products take no float32 on
      GPUs.
    - `gated_experts` is present if the model has experts. On TPUs their router has a kernel if the product
      has one.
    - `delta_step`, `delta_prefill` and `delta_drafts` (for calls with draft tokens) are present if the model
      has linear attention. `mamba_step` and `mamba_prefill` are present if it has Mamba-2.

    Layers may differ, for example in the width of heads. The reason then says how many layers have another
    implementation, and why.

    If the model was loaded with its draft head, the kernels of the head's layer are present too, for example
    `draft_head_decode_attention`. Heads with files of their own are not in the report.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        impl: the implementation that the call asks for (see `GenerateOptions`).
        rows: the number of prompts in the call.
        cache_dtype: the dtype of keys and values (see `GenerateOptions`).
        capacity: the most tokens that a row of the KV cache can hold. None takes the capacity of a call with
            a short prompt and the default number of new tokens.

    Returns:
        A dict from names of kernels to a `Selection`.

    Raises:
        InputError: the `impl` does not serve this model, or this machine lacks it.
    """
    check_impl(impl)
    capacity = capacity or default_capacity(config, 1, GenerateOptions.max_tokens)
    dtype = activation_dtype(params)
    leaf = lm_head(params)
    dtype_of_cache = resolve_cache_dtype(cache_dtype or default_cache_dtype(params))
    caches = jax.eval_shape(lambda: empty_layers(config, rows, capacity, dtype_of_cache))
    used = {
        kernel: _of_layers([load("kernel selector", kernel)(kernel, impl, *each) for each in operands])
        for kernel, operands in _mixer_operands(params, config, rows, dtype, caches).items()
    }
    if config.draft_head is not None:
        used |= _of_draft_head(params["draft_head"], config, impl, rows, (dtype, dtype_of_cache, capacity))
    logits = jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32)
    used["argmax"] = named("argmax", impl, logits)
    if outputs := [layer["o"] for layer in params["layers"] if "o" in layer]:
        of_rows = [jax.ShapeDtypeStruct((rows, leaf["weight"].shape[-1]), dtype) for leaf in outputs]
        operands = [Operands(x, [leaf]) for x, leaf in zip(of_rows, outputs, strict=True)]
        used["product"] = _of_layers([select_product(impl, each, None) for each in operands])
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), dtype)
    head = select_head_kernel(impl, hidden, leaf["weight"])
    if head is not None and "bias" not in leaf:
        used["int8_head_argmax" if is_quantized(leaf["weight"]) else "lm_head_argmax"] = head
    if experts := next((layer["experts"] for layer in params["layers"] if "experts" in layer), None):
        used["gated_experts"] = select_experts(impl, hidden, experts)
    return used


def _of_draft_head(
    params: Params, config: ModelConfig, impl: str | None, rows: int, sizes: tuple[Any, Any, int]
) -> dict[str, kernels_pallas.Selection]:
    """Returns the selections of the layers of the draft head in a model's files. sizes: the dtypes of
    activations and of the cache, and the capacity.
    """
    spec: Any = config.draft_head
    own = load("draft head", spec.kind).of_model(config).config
    dtype, dtype_of_cache, capacity = sizes
    caches = jax.eval_shape(lambda: empty_layers(own, rows, capacity, dtype_of_cache))
    return {
        f"draft_head_{kernel}": _of_layers(
            [load("kernel selector", kernel)(kernel, impl, *each) for each in operands]
        )
        for kernel, operands in _mixer_operands(params, own, rows, dtype, caches).items()
    }


def _mixer_operands(
    params: Params, config: ModelConfig, rows: int, dtype: Any, caches: tuple[Any, ...]
) -> dict[str, list[tuple[Any, ...]]]:
    """Returns, for each kernel, the operands of each mixer that the kernel may serve."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for index, layer in enumerate(params["layers"]):
        for mixer, cache in zip(config.mixers(index), config.caches_of_layers[index], strict=True):
            for kernel, operands in mixer.kernels(layer, rows, dtype, caches[cache]).items():
                found.setdefault(kernel, []).append(operands)
    return found


def _of_layers(selections: list[kernels_pallas.Selection]) -> kernels_pallas.Selection:
    """Returns the selection of the layers that a kernel serves. The reason mentions other layers."""
    common = next((s for s in selections if s.impl != "xla"), selections[0])
    reasons = [common.reason]
    for impl in dict.fromkeys(s.impl for s in selections if s.impl != common.impl):
        others = [s for s in selections if s.impl == impl]
        reasons.append(f"{len(others)} of {len(selections)} layers by {impl}: {others[0].reason}")
    return common._replace(reason="; ".join(reasons))
