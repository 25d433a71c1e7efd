"""The KV cache: keys and values of the tokens of a sequence. The only package that maps positions to slots:
attention asks a layer for blocks of keys with their positions, and prefixes are truncated and padded here.

Read the files in this order. The core ends with `kv_cache`.

- `layer_cache` has the protocol of the cache of one layer, `stored_kv` the protocol of a cache dtype.
- `contiguous` and `ring` append to the cache of a layer, and get a block of it.
- `kv_cache` is `KVCache`: a cache for each layer that has its own, and the length of each row.
- `quantized_kv`, `gear` and `float8_kv` are cache dtypes; `side_by_side` stores keys and values in one array.
- `truncation` lets rows go back to fewer tokens.
- `page_size` and `paged` are pages of a pool that rows share.
- `fingerprint` is a hash that identifies the model of a cache.
- `prefix` is a cache that later calls reuse, `prefix_files` its file.

Rules of the package:

- The layout is [B, K, S, H]: the keys of one row and head are one matrix, so nothing is transposed, and a
  block of keys is contiguous, as a kernel's bulk copy needs it. In a process with TPUs keys and values of
  float and int8 caches are side by side, [B, K, S, 2H], so that they fill lanes of 128.
- Padding is never written. Tokens beyond the capacity are dropped and flagged (`overflow_B`), so only the
  real part of a padded prompt has to fit.
- A layer with a sliding window has a ring of the window and 511 more slots, where that is shorter: a call of
  512 tokens is written before it attends, and `truncate` can go back by as many.
- Quantized keys are stored without the model's bias, which is added when a block is read, so a large bias
  costs no precision. It stays in keys that a norm follows, or whose RoPE frequencies may still change.
"""
