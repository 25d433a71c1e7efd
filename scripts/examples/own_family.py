"""Your own model family, without a fork: `xj.register` adds it to the registry of families.

Parrot is like Llama, with norms of each head of queries and keys, with an MLP without a gate, and with other
names of tensors. Mixers, feed-forwards, routers, cache dtypes and forms of tool calls are added in this way
too: `xinfer_jax/plugins.py` has the registries, and an entry has the form of the entries there.

    python scripts/examples/own_family.py
"""

from checkout import start

# isort: split
import jax
import numpy as np

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from xinfer_jax.families.family import Family, Names


def read_parrot(hf, layers):
    """Returns the fields of `ModelConfig` that config.json names in another way."""
    layer = LayerSpec((AttentionSpec(qk_norm="head"),), MlpSpec(gated=False))
    return dict(layers=(layer,) * layers, hidden_act="relu2")


PARROT = Family(
    defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=512, tie_word_embeddings=True),
    read=read_parrot,
    architecture="ParrotForCausalLM",
    names=Names(dict(up="ffn.expand", down="ffn.contract")),  # the other tensors have Llama's names
)

CONFIG = dict(
    model_type="parrot", vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="relu2",
)  # fmt: skip


def main(argv: list[str]) -> None:
    xj.register("family", "parrot", PARROT)
    config = xj.ModelConfig.from_hf(CONFIG)
    params = xj.init_params(config, jax.random.key(0), "float32")
    tensors = xj.params.params_to_tensors(params, config)
    print(*(name for name in tensors if ".0." in name), sep="\n")

    # Everything works with it: gradients, quantized weights, engines, files.
    tokens_BT = np.array([[3, 1, 4, 1, 5, 9, 2, 6]], np.int32)
    gradient = jax.grad(lambda params: -xj.score(params, config, tokens_BT).logprobs_BT.mean())(params)
    print("norm of the gradient:", float(np.linalg.norm(gradient["layers"][0]["up"]["weight"])))
    options = xj.GenerateOptions(max_tokens=8, eos_token_ids=())
    answer = xj.generate(params, config, tokens_BT, options)
    print("tokens:", *answer.tokens[0])
    again = xj.params.params_from_tensors(config, {name: np.asarray(x) for name, x in tensors.items()})
    assert xj.generate(again, config, tokens_BT, options).tokens == answer.tokens


if __name__ == "__main__":
    start(main)
