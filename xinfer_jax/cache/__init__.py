"""The KV cache: keys and values of the tokens of a sequence. The only package that maps positions to slots:
attention asks a layer for blocks of keys with their positions, and prefixes are truncated and padded here.

Read the files in this order: `layer_cache` (the protocol of the cache of one layer), `stored_kv` (the
protocol of a cache dtype), `contiguous` and `ring` (append, get a block), `kv_cache` (`KVCache`: a cache for
each layer that has its own, and the length of each row): so much is the core. `plugins.TABLE` names what
plugs in: `quantized_kv`, `gear` and `float8_kv` (cache dtypes), `side_by_side` (keys and values in one
array), `recurrent` (the state of a linear-attention layer). Then `page_size` and `paged` (pages of a pool
that rows share), `fingerprint` (a hash that identifies the model of a cache), `prefix` (a cache that later
calls reuse), `prefix_files` (its file).

- Layout [B, K, S, H]: the keys of one row and head are one matrix, so nothing is transposed, and a block of
  64 keys is contiguous (16 KiB at width 128 in 16 bits), as a decode kernel's bulk copy needs it. The layout
  [B, S, K, H] would split it into 64 parts of 256 bytes. S is a multiple of 8 for the same copies.
- In a process with TPUs float and int8 caches have keys and values side by side, [B, K, S, 2H]: the last axis
  fills lanes of 128, so keys of width 64 alone would take twice their memory, and XLA would choose other
  layouts for them, which it would copy in every step. Compiled for v6e, a decode step and the loop around it
  copy no cache. S is a multiple of 128 there, as kernels copy slots. The other cache dtypes keep
  two arrays: no kernel for TPUs reads them, but XLA's operations do, with copies. Only `side_by_side` knows
  the form. Files of prefixes have two arrays on every device.
- Right padding only. `dynamic_update_slice` moves a write that would leave the array back to its end; the
  data are shifted by the same amount, so each token keeps its slot. Padding is never written. Tokens beyond
  the capacity are dropped and flagged (`overflow_B`), so only the real part of a padded prompt has to fit. A
  single token per row is one scatter with `mode="drop"`: 1-3 µs a layer on CPU, 4-15 µs as a slice per row.
- A layer with a sliding window uses a ring buffer where that is shorter: the window and 512 more slots. So a
  call of 512 tokens is written before it attends, and overwrites nothing that its first query sees.
  `truncate` can go back by the same 512 tokens.
- If the model adds a bias to keys, quantized keys are stored without it. The RoPE-rotated bias is added when
  a block is read (`Contiguous.key_bias_fn`), so a large bias costs no precision. The bias stays in the keys
  where a norm follows it, or where the RoPE frequencies may still change (longrope whose factors are not
  fixed). Dynamic RoPE rotates like the default one below its original maximum, which no cache exceeds.
- GEAR's directions come from a row's first 256 tokens, or from its first call where that has fewer. No
  prefill chunk of a longer prompt is shorter than 256, so the directions depend on the row alone. Directions
  from the first half of a conversation leave 3% more error in its second half than directions of its own.
- A recurrent state is float32 whatever the dtype of keys and values: 48 MiB a row for the 9B shape, as much
  as the bfloat16 keys and values of 1,536 tokens. It exists after the last token only: `truncate` goes back
  to 0 tokens, or raises, and a prefix is reused whole or not at all. A row that begins at position 0 has a
  state of zeros whatever the arrays hold, so a slot needs no reset.
- A prefix belongs to one model. `fingerprint` hashes the config and 64 numbers of every parameter array, so a
  matrix that was scaled or trained is detected, in 5-10 ms for a 0.5B model. A prefix of a longrope model
  stores the factors that rotated its keys; a call that needs other factors prefills the prompt again. A file
  is not trusted: its metadata, and the shape and type of every tensor, are checked before they are read.
"""
