"""Feed-forwards: the parts of a layer that work on one token at a time.

`experts` is the mixture of experts: a router chooses a few gated MLPs for each token. The MLP itself is in
`weights/layers.py`, since an expert is one too.

- With few tokens only the chosen experts are read. With many tokens each expert is read once, and its output
  is used at the tokens that chose it.
"""
