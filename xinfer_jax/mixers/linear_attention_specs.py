"""The specs of a linear-attention layer's parameters (Gated DeltaNet)."""

from typing import Any

from ..config.model_config import ModelConfig
from ..weights.param_specs import Params, dense, tensor


def linear_attention_specs(config: ModelConfig) -> Params:
    """Returns them by name, without those of norms around the layer."""
    spec: Any = config.linear_attention
    d = (config.hidden_size, "embed")
    n = (spec.num_value_heads, "linear_heads")
    keys = (spec.num_key_heads * spec.key_head_dim, "linear_heads")
    values = (spec.num_value_heads * spec.value_head_dim, "linear_heads")
    tree: Params = {name: dense(size, d) for name, size in dict(q=keys, k=keys, v=values, z=values).items()}
    tree |= {name: dense(n, d, stays_float=True) for name in ("a", "b")}
    for name, channels in dict(q=keys, k=keys, v=values).items():
        tree[f"conv_{name}"] = tensor(channels, (spec.conv_kernel_dim, None), stays_float=True)
    tree |= dict(A_log=tensor(n, init="log_decay"), dt_bias=tensor(n, init="ones"))
    tree |= dict(gated_norm=tensor((spec.value_head_dim, None), init="ones"), o=dense(d, values))
    return tree
