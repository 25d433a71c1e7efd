"""Feed-forwards: the parts of a layer that work on one token at a time.

Reading order:

- `feed_forward` is the protocol.
- `mlp` is the MLP.
- `routers` choose experts.
- `mixture` is the mixture of experts, and `experts` is its computation: a router chooses a few gated MLPs for
  each token.
- `mlp_and_mixture` has both side by side.
- `ungated_experts` is a mixture of MLPs without gates, which may be latent.
- `grouped_topk` is a router of another kind. `xielu_mlp` is an MLP with another activation, and `scaled_mlp`
  is an MLP with factors.
- `attention_and_mlp` is a mixer: attention and an MLP side by side.

Decision: if there are few tokens, only the chosen experts are read. If there are many tokens, each expert is
read once, and its output is used at the tokens that chose it.
"""
