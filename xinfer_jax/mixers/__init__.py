"""Mixers: the parts of a layer that read other tokens.

Reading order:

- `mixer` is the protocol: parameters, forward pass, cache, axes of a mesh, kernels, unsupported features.
- `softmax_attention` is the mixer with keys and values. `attention` is its causal attention by blocks, and
  `rope_append` is its RoPE and its append to the cache.
- `rope_scaling` has RoPE for longer contexts. `rope_orders` has interleaved pairs, and norms after RoPE.
- `key_bias` has the bias of keys in a quantized cache.
- `scaled_attention` is softmax attention with factors, as in Falcon-H1. `head_gated_attention` has a gate for
  each head, as in LFM3.
- `latent_attention` is multi-head latent attention (MLA), whose cache has one vector of each token.
- `gated_delta` is Gated DeltaNet, with its forward pass in `linear_attention` and its state in `recurrent`.
- `mamba2` is Mamba-2, whose state is in `recurrent` too.
- `short_conv` is LFM2's convolution.
- Mixers with a state share `state_cache` (draft slots, and the number of tokens that rows can go back),
  `convolution`, and `blocks` of tokens with a decay.

Decisions:

- A mixer is a class with a line in `plugins.TABLE`. Config, parameters, caches, engines, families and meshes
  ask it, so none of them names a kind.
- Without a cache the loops of attention have static bounds, so `forward` and `score` have reverse-mode
  gradients. With a cache the loops run over the visible blocks only, so cost follows the length, not the
  capacity.
- Linear attention and Mamba-2 compute one token by the recurrence, and more tokens by the WY form or SSD in
  blocks of 64 tokens, each of which needs the state before it.
- Draft tokens leave such a state as it was: the next call applies the draft tokens that were
  accepted. So nothing is undone, and no state is kept for each token.
"""
