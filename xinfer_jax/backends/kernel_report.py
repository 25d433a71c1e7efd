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
    """Returns which implementation serves each kernel in a `generate` call, and why.

    `lm_head_argmax` serves greedy rows, or `int8_head_argmax` where the vocabulary matrix is int8; sampled
    rows take logits. `product` is that of the matrices "o" in a decode step: kernels of products take no
    float32 on GPUs. Layers may differ, in the width of heads for example: the reason says how many have
    another implementation, and why. `gated_experts` is there for models with experts (on TPUs their router
    has a kernel where the product has), `delta_step`, `delta_prefill` and `delta_drafts` (calls with draft
    tokens) for those with linear attention.

    Args:
        params, config: the model.
        impl: as in `GenerateOptions`.
        rows: prompts in the call.
        cache_dtype: `GenerateOptions.cache_dtype`.
        capacity: `GenerateOptions.capacity`; None: what `generate` chooses for a short prompt and its default
            number of new tokens. `default_capacity` computes it for others.

    Raises:
        InputError: the impl does not serve this model, or this machine lacks it.
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
