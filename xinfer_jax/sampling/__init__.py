"""From logits to a token. One vocabulary: `process` (biases, penalties and masks, which hold for greedy rows
too), `warp` (temperature, top-k, top-p and the like), `draw` (one token by the row's key); `choose` is the
three. `note`, in `generation`, writes the token down. With alternatives noted or not it is the same road.

In the order to read: `processors` are functions logits_BV -> logits_BV, as transformers defines them;
`biases` makes one bias of what is said about single tokens, and rows of sequences that must not occur;
`generation_config` reads a checkpoint's defaults; `settings` is `SamplingConfig`; `context` is what
processors look at, with `start`, `advance` and `reorder`; `choice` is the vocabulary above, and keys;
`logprobs` what is noted beside each token.

- Settings are arrays with one number per row, in one of two tree structures: plain (temperature, top-k,
  top-p, repetition penalty), and all, in which `lax.cond` skips what no row asks for (but a bias of zeros).
  So one program serves a mixed batch, and another setting of the same structure compiles nothing. `vmap`
  turns a `cond` into both of its branches: over the plain structure there are few.
- Where top-k leaves 64 tokens or fewer a draw looks at the 65 likeliest alone, noise included, which is a
  twentieth of the work. Where one row cannot (ties at the edge, no top-k) all rows look at all: slower, the
  same tokens.
- Thresholds are found by bisection over a float's bits, not by sorting: exact, 2 ms against 45 ms for 151,936
  logits on 2 cores. Tokens that tie at the threshold are all kept (transformers keeps ties at top-k, not at
  top-p). Top-k and top-p share one search loop, since compiling it takes long.
- A draw's key is fold_in(fold_in(row key, position), purpose), and nothing else enters: neither slot nor
  batch. Gumbel noise is written out from random bits, so every jax version draws the same; a test holds
  recorded bits.
- All-greedy batches take the argmax and nothing else.
- Log-probabilities returned are the model's, before any processor, as `score` gives them.
"""
