"""Mixers: the parts of a layer that read other tokens.

Read the files in this order:

- `mixer` is the protocol: parameters, forward pass, cache, axes of a mesh, kernels, unsupported features.
- `softmax_attention` is the mixer with keys and values, `attention` its causal attention by blocks, and
  `rope_append` its RoPE and append to the cache.
- `rope_scaling` has RoPE for longer contexts, `rope_orders` interleaved pairs and norms after RoPE,
  `key_bias` the bias of keys in a quantized cache.
- `gated_delta` is Gated DeltaNet, with its forward pass in `linear_attention` and its state in `recurrent`.
- `short_conv` is LFM2's convolution.
- Mixers with a state share `state_cache` (draft slots, how far rows go back) and `convolution`.

Rules of the package:

- A mixer is a class with a line in `plugins.TABLE`. Config, parameters, caches, engines, families and meshes
  ask it, so none of them names a kind.
- Without a cache the loops of attention have static bounds, so `forward` and `score` have reverse-mode
  gradients. With a cache they run over the visible blocks only, so cost follows the length, not the capacity.
- Linear attention computes one token by the recurrence, more by the WY form in blocks of 64 tokens, each of
  which needs the state before it. Draft tokens leave the state as it was: the next call applies those that
  were accepted, so nothing is undone, and no state is kept for each token.
"""
