"""Keys and values of the tokens that a model has read. The only room that knows which slot holds which
position: attention asks a layer for blocks of keys with their positions, prefixes are cut and padded here.

In the order to read: `quantized` is keys and values in 8 or 4 bits; `kinds` the few kinds of a layer's cache,
contiguous and ring, each with the same operations (append at positions, give a block, say what is remembered
once a row is cut, reorder); `paged` one more, pages of a pool that rows share; `kv_cache` is `KVCache`, a
layer's kind beside the next, and how much of each row is filled; `fingerprint` says which model a cache is
of; `prefix` is a cache that outlives its call, `prefix_files` keeps it in a file.

- Layout [B, K, S, H]: the keys of one row and head are one matrix, with nothing to transpose, and a block of
  64 keys is one run of memory (16 KiB at width 128 in 16 bits), which is what a decode kernel's bulk copy
  wants; [B, S, K, H] would give it 64 pieces of 256 bytes. S is a multiple of 8 for the same copies.
- Right padding only. A write that would leave the array is moved back by `dynamic_update_slice`; the data are
  moved along, so each token keeps its slot, padding is never written, and what lies past the capacity is
  dropped and flagged (`overflow_B`): only the real prompt has to fit. A single token of ragged rows is one
  scatter with `mode="drop"` (1-3 µs a layer on CPU, 4-15 µs as a slice by row).
- A layer with a sliding window keeps a ring where that is shorter: its window and a slack of 512 slots, so
  that a call of 512 tokens is written before it attends and overwrites nothing that its first query sees. The
  slack is also how far `truncate` goes back. No kernel reads a ring.
- Rounded keys are kept without their bias, if the model adds one: turned by its position it is added when a
  block is read, so its size costs no bits. Whoever reads keys hands it in (`Contiguous.added`); a key's norm
  behind the bias, or longrope whose factors are not fixed, leaves it where it was. Dynamic rope rotates as
  the default below its original maximum, which no cache exceeds.
- GEAR's directions are those of a row's first 256 tokens, or of its first call where that has fewer. No
  prefill chunk of a longer prompt is shorter, so they depend on the row alone. Directions of the first half
  of a conversation leave 3% more error in its second half than its own.
- A prefix belongs to one model. `fingerprint` hashes the settings and 64 numbers of every leaf, so any matrix
  that is scaled or trained on is noticed, for 5-10 ms of a 0.5B shape. With longrope it has the factors it
  was read by; a call that needs the others reads the prompt anew. A file is not trusted: all it says is
  checked against the model, and every tensor's shape and type, before it is read.
"""
