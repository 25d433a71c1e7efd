"""The KV cache: keys and values of the tokens of a sequence.

This is the only package that maps positions to slots. Attention asks a layer for blocks of keys with their
positions. Prefixes are truncated and padded here.

Reading order (the core ends with `kv_cache`):

- `layer_cache` has the protocol of the cache of one layer, and `stored_kv` has the protocol of a cache dtype.
- `contiguous` and `ring` append to the cache of a layer, and get a block of it.
- `kv_cache` is `KVCache`: a cache for each layer that has its own, and the length of each row.
- `quantized_kv`, `gear` and `float8_kv` are cache dtypes. `side_by_side` stores keys and values in one array.
- `latent_kv` stores the vectors of latent attention, which are keys and values at once.
- `truncation` lets rows go back to fewer tokens.
- `page_size` and `paged` are pages of a pool that rows share.
- `fingerprint` is a hash that identifies the model of a cache.
- `prefix` is a cache that later calls reuse, and `draft_prefix` is its part for a draft head.
- `prefix_files` is the file of a prefix, and `prefix_tensors` has the tensors in it.

Decisions:

- The layout is [B, K, S, H]: the keys of one row and head are one matrix. So nothing is transposed, and a
  block of keys is contiguous, as a kernel's bulk copy needs it. In a process with TPUs keys and values of
  float and int8 caches are side by side, [B, K, S, 2H], so that they fill lanes of 128. Latents are padded
  to lanes there.
- Padding is never written. Tokens beyond the capacity are dropped and flagged (`overflow_B`), so only the
  real part of a padded prompt has to fit.
- A layer with a sliding window has a ring of the window and 511 more slots, if that is shorter than the
  capacity: a call of 512 tokens is written before it attends, and `truncate` can go back by the same number
  of tokens.
- A prefix for a draft head keeps the features of all its tokens, because a prompt may share any part of it,
  and the next token needs the features of the token before. These are X numbers a token, for most heads D.
- Quantized keys are stored without the model's bias, which is added when a block is read. So a large bias
  costs no precision. The bias stays in keys that a norm follows, or whose RoPE frequencies may still change.
"""
