"""From logits to a token: `process_logits` (biases, penalties and masks, which also apply to greedy rows),
`warp_logits` (temperature, top-k, top-p, min-p, typical-p, XTC) and `draw_tokens` (one token by the row's
key), which `sampler.choose_tokens` combines. `generation` appends the token.

In the order to read: `processors` are functions logits_BV -> logits_BV, as transformers defines them, and
`other_processors` those of settings that few calls use; `settings` has an entry for each setting;
`sampling_config` is `SamplingConfig` (`typed_settings` for type checkers), and `generation_config` reads its
defaults; `batched_settings` makes arrays with one setting per row, `used_settings` names those in use, and
`biases` makes arrays of lists: one bias of biases, allowed and forbidden ids, and forbidden sequences;
`context` is the processors' state; `random_keys` makes PRNG keys and noise; `sampler` has the stages;
`xtc_dry` plugs two of llama.cpp's samplers into them; `logprobs` records log-probabilities, alternatives and
the masks of `support`; `caller_processors` has callers' functions, in `Context.callers`.

- Settings are arrays with one number per row, in one of two tree structures: plain (temperature, top-k,
  top-p, repetition penalty), or all settings, where `lax.cond` skips what no row uses. So one program serves
  a mixed batch, and another setting of the same structure compiles nothing. `vmap` turns a `cond` into both
  of its branches; the plain structure has few.
- Where top-k leaves few tokens, only the most likely ones are sampled from and get noise. Where this is not
  possible for one row (ties with the last token, no top-k), the whole vocabulary of all rows gets noise:
  slower, and the other rows keep their tokens.
- The key of a draw is fold_in(fold_in(row key, position), purpose). It depends neither on the slot nor on the
  batch. Gumbel noise is computed here from random bits, so every jax version draws the same.
- Where all rows are greedy without processors, the token is the argmax: nothing else is computed for it.
- Returned log-probabilities are the model's, before any processor, as `score` returns them.
"""
