"""Feed-forwards: the parts of a layer that work on one token at a time.

Read the files in this order: `feed_forward` (the protocol), `mlp` (the MLP), `routers` (what chooses
experts), `mixture` (the mixture of experts), `experts` (its computation: a router chooses a few gated MLPs
for each token). `mlp_and_mixture` has both side by side, `attention_and_mlp` has attention and an MLP side by
side: a mixer. `grouped_topk` is a router of another kind, `xielu_mlp` an MLP with another activation.

- With few tokens only the chosen experts are read. With many tokens each expert is read once, and its output
  is used at the tokens that chose it.
"""
