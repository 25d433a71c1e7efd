"""Trees of other libraries as this one's, and back, by the names of Hugging Face: states of tunix (flax.nnx)
for Qwen3 and Gemma 3, and a Qwen3 of MaxText whose layers are scanned. The layouts follow the mappings that
these libraries publish. A conversion only moves numbers, so its transpose is its inverse.

    python scripts/examples/trees_of_others.py
"""

from checkout import start

# isort: split
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj

_HF = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
)  # fmt: skip
V, D, F, L, N, K, H, _ = _HF.values()
QWEN3 = dict(_HF, model_type="qwen3", tie_word_embeddings=False)
GEMMA3 = dict(_HF, model_type="gemma3_text", sliding_window=16, query_pre_attn_scalar=8)
_LAYER_NORMS = dict(input_layernorm="input_layernorm", post_attention_layernorm="post_attention_layernorm")
_GEMMA_NORMS = dict(
    input_layernorm="pre_attention_norm", post_attention_layernorm="post_attention_norm",
    pre_feedforward_layernorm="pre_ffw_norm", post_feedforward_layernorm="post_ffw_norm",
)  # fmt: skip
_MAXTEXT_MLP = dict(gate="wi_0", up="wi_1", down="wo")
_MAXTEXT_NORMS = dict(
    input_layernorm="pre_self_attention_layer_norm", post_attention_layernorm="post_self_attention_layer_norm"
)


def _inputs_first(x: jax.Array, config: xj.ModelConfig) -> jax.Array:
    """Returns a projection [inputs, heads, H] as [outputs, inputs]."""
    return x.reshape(config.hidden_size, -1).T


def _heads_first(x: jax.Array) -> jax.Array:
    """Returns a projection [heads, inputs, H] as [outputs, inputs]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1])


def from_tunix_qwen3(state: dict, config: xj.ModelConfig) -> dict:
    """Returns the parameters of the `to_pure_dict` of an nnx state, in which heads are separate and inputs
    are first.
    """
    tensors = {
        "model.embed_tokens.weight": state["embedder"]["input_embedding"],
        "model.norm.weight": state["final_norm"]["w"],
        "lm_head.weight": state["lm_head"]["w"].T,
    }
    for i, layer in state["layers"].items():
        attention = layer["attn"]
        own = {f"self_attn.{x}_proj": _inputs_first(attention[f"{x}_proj"]["w"], config) for x in "qkv"}
        own |= {"self_attn.o_proj": attention["o_proj"]["w"].reshape(-1, config.hidden_size).T}
        own |= {f"self_attn.{x}_norm": attention[f"{x}_norm"]["w"] for x in "qk"}
        own |= {f"mlp.{x}_proj": layer["mlp"][f"{x}_proj"]["kernel"].T for x in ("gate", "up", "down")}
        own |= {name: layer[theirs]["w"] for name, theirs in _LAYER_NORMS.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": x for name, x in own.items()}
    return xj.params.params_from_tensors(config, tensors)


def from_tunix_gemma3(state: dict, config: xj.ModelConfig) -> dict:
    """Returns the parameters of a tree in which heads are first, and keys and values are in one array. Norms
    are as in the files, without their offset of 1.
    """
    tensors = {
        "model.embed_tokens.weight": state["embedder"]["input_embedding"],
        "model.norm.weight": state["final_norm"]["scale"],
    }
    for i, layer in state["layers"].items():
        attention = layer["attn"]
        (k, v) = attention["kv_einsum"]["w"]
        projections = dict(q=attention["q_einsum"]["w"], k=k, v=v)
        own = {f"self_attn.{x}_proj": _heads_first(w) for x, w in projections.items()}
        own |= {"self_attn.o_proj": attention["attn_vec_einsum"]["w"].reshape(-1, config.hidden_size).T}
        own |= {f"self_attn.{x[0]}_norm": attention[f"_{x}_norm"]["scale"] for x in ("query", "key")}
        own |= {f"mlp.{x}_proj": layer["mlp"][f"{x}_proj"]["kernel"].T for x in ("gate", "up", "down")}
        own |= {name: layer[theirs]["scale"] for name, theirs in _GEMMA_NORMS.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": x for name, x in own.items()}
    return xj.params.params_from_tensors(config, tensors)


def from_maxtext_qwen3(tree: dict, config: xj.ModelConfig) -> dict:
    """Returns layers stacked along axis 1, inputs first."""
    decoder = tree["decoder"]
    tensors = {
        "model.embed_tokens.weight": tree["token_embedder"]["embedding"],
        "model.norm.weight": decoder["decoder_norm"]["scale"],
        "lm_head.weight": decoder["logits_dense"]["kernel"].T,
    }
    for i in range(config.num_hidden_layers):
        layer = jax.tree.map(lambda x, i=i: x[:, i], decoder["layers"])
        attention = layer["self_attention"]
        kernels = {x[0]: attention[x]["kernel"] for x in ("query", "key", "value")}
        own = {f"self_attn.{x}_proj": _inputs_first(kernel, config) for x, kernel in kernels.items()}
        own |= {"self_attn.o_proj": attention["out"]["kernel"].reshape(-1, config.hidden_size).T}
        own |= {f"self_attn.{x[0]}_norm": attention[f"{x}_norm"]["scale"] for x in ("query", "key")}
        own |= {f"mlp.{x}_proj": layer["mlp"][y]["kernel"].T for x, y in _MAXTEXT_MLP.items()}
        own |= {name: layer[theirs]["scale"] for name, theirs in _MAXTEXT_NORMS.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": x for name, x in own.items()}
    return xj.params.params_from_tensors(config, tensors)


def tunix_qwen3() -> dict:
    """Returns shapes of such a state."""
    layer = dict(
        attn={f"{x}_proj": dict(w=(D, heads, H)) for x, heads in dict(q=N, k=K, v=K).items()}
        | dict(o_proj=dict(w=(N, H, D)), q_norm=dict(w=(H,)), k_norm=dict(w=(H,))),
        mlp=dict(gate_proj=dict(kernel=(D, F)), up_proj=dict(kernel=(D, F)), down_proj=dict(kernel=(F, D))),
        **{norm: dict(w=(D,)) for norm in _LAYER_NORMS.values()},
    )
    embedder = dict(input_embedding=(V, D))
    ends = dict(embedder=embedder, final_norm=dict(w=(D,)), lm_head=dict(w=(D, V)))
    return ends | dict(layers=dict.fromkeys(range(L), layer))


def tunix_gemma3() -> dict:
    """Returns shapes of such a state."""
    layer = dict(
        attn=dict(
            q_einsum=dict(w=(N, D, H)), kv_einsum=dict(w=(2, K, D, H)), attn_vec_einsum=dict(w=(N, H, D)),
            _query_norm=dict(scale=(H,)), _key_norm=dict(scale=(H,)),
        ),
        mlp=dict(gate_proj=dict(kernel=(D, F)), up_proj=dict(kernel=(D, F)), down_proj=dict(kernel=(F, D))),
        **{norm: dict(scale=(D,)) for norm in _GEMMA_NORMS.values()},
    )  # fmt: skip
    embedder = dict(input_embedding=(V, D))
    return dict(embedder=embedder, final_norm=dict(scale=(D,)), layers=dict.fromkeys(range(L), layer))


def maxtext_qwen3() -> dict:
    """Returns shapes of such a tree."""
    attention = {x: dict(kernel=(D, L, heads, H)) for x, heads in dict(query=N, key=K, value=K).items()}
    attention |= dict(out=dict(kernel=(N, L, H, D)))
    attention |= {f"{x}_norm": dict(scale=(H, L)) for x in ("query", "key")}
    mlp = dict(wi_0=dict(kernel=(D, L, F)), wi_1=dict(kernel=(D, L, F)), wo=dict(kernel=(F, L, D)))
    norms = {norm: dict(scale=(D, L)) for norm in _MAXTEXT_NORMS.values()}
    decoder = dict(layers=dict(self_attention=attention, mlp=mlp, **norms), decoder_norm=dict(scale=(D,)))
    decoder["logits_dense"] = dict(kernel=(D, V))
    return dict(token_embedder=dict(embedding=(V, D)), decoder=decoder)


def main(argv: list[str]) -> None:
    for convert, shapes, hf in (
        (from_tunix_qwen3, tunix_qwen3(), QWEN3),
        (from_tunix_gemma3, tunix_gemma3(), GEMMA3),
        (from_maxtext_qwen3, maxtext_qwen3(), QWEN3),
    ):
        config = xj.ModelConfig.from_hf(hf)
        theirs = jax.tree.map(_draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
        to_ours = jax.jit(partial(convert, config=config))
        params = to_ours(theirs)
        (logits_BTV, _) = xj.forward(params, config, jnp.array([[1, 2, 3]]))
        (back,) = jax.linear_transpose(to_ours, theirs)(params)
        same = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, theirs))
        print(f"{convert.__name__}: logits {logits_BTV.shape}, and back the same: {same}")


def _draw(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32)


if __name__ == "__main__":
    start(main)
