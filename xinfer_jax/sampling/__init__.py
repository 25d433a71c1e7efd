"""From logits to a token.

Three stages, which `sampler.sample_tokens` combines: `process_logits` (biases, penalties and masks, which
also apply to greedy rows), `warp_logits` (temperature, top-k, top-p, min-p, typical-p) and `draw_tokens` (one
token by the row's key). `generation` appends the token.

In the order to read: `reductions` are sums over the vocabulary for GPUs; `processors` are functions logits_BV
-> logits_BV, as transformers defines them; `biases` makes one bias of biases, allowed and forbidden ids, and
arrays of forbidden sequences; `sampling_config` is `SamplingConfig` and reads generation_config.json;
`batched_settings` makes arrays with one setting per row;
`context` is the processors' state; `random_keys` makes PRNG keys and noise; `sampler` has the stages;
`logprobs` records log-probabilities and alternatives.

A new processor needs four files: its function in `processors`, its place among the stages in `sampler` (and
in `_uses_other_processors`), its field and one entry of `NUMBER_SETTINGS` in `sampling_config`, and its flag
in `cli/answer_flags.py`. Row arrays, the check of generation_config.json, the HTTP field and the value of the
flag follow from the entry.

- Settings are arrays with one number per row, in one of two tree structures: plain (temperature, top-k,
  top-p, repetition penalty), or all settings, where `lax.cond` skips what no row uses (except a bias of
  zeros). So one program serves a mixed batch, and another setting of the same structure compiles nothing.
  `vmap` turns a `cond` into both of its branches; the plain structure has few.
- Where top-k leaves 64 tokens or fewer, only the 65 most likely tokens are sampled from and get noise: a
  twentieth of the work. Where this is not possible for one row (ties with the last token, no top-k), the
  whole vocabulary of all rows gets noise: slower, and the other rows keep their tokens.
- Thresholds of the vocabulary are found by bisection over a float's bits, not by sorting: exact, 2 ms instead
  of 45 ms for 151,936 logits on 2 cores. Tokens that tie with the threshold are all kept (transformers keeps
  ties at top-k, not at top-p). Top-k and top-p share one search loop, since compiling it takes long. The
  candidates need no search: each is compared with the 64 others.
- On an NVIDIA GPU the host waits for the predicate of each branch, and `lax.top_k` of more than 16 sorts the
  vocabulary in 28 kernels. So `lax.platform_dependent` selects another order there: the candidates of all
  rows first (two sorts of about 3,100 numbers), and one branch, for everything that they do not serve. The
  tokens are the same, except where a sum of probabilities is within rounding of top-p. Compiled for H200, 1
  or 64 rows: 15 launches and one predicate, with all settings 17. A kernel reads the logits once, for the
  candidates and the log-probability. It reads the tokens seen only of rows with a repetition penalty, and the
  bias, which is as large as the logits, only of rows that have one (`Context.biased_B`). Without a kernel
  (few logits, a mesh) XLA reads the logits twice, and all of the others. Without top-k a threshold takes 8
  passes over the logits' order and weights (two reads each) in 4 launches each. Rows beyond 16 are processed
  and sampled there in groups of 16: 64 rows take 75 MiB of temporaries instead of 153, but as many times the
  launches. The logits that a token was sampled from are computed again where they are recorded. The
  positions of draft tokens are rows there, all sampled at the same time, without that kernel.
- The key of a draw is fold_in(fold_in(row key, position), purpose). It depends neither on the slot nor on the
  batch. Gumbel noise is computed here from random bits, so every jax version draws the same; a test has
  recorded bits.
- All-greedy batches take the argmax and nothing else, but on GPUs the first candidate.
- Returned log-probabilities are the model's, before any processor, as `score` returns them.
"""
