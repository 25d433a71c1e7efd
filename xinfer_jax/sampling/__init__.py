"""Turns logits into a token, in three stages that `sampler.choose_tokens` combines:

- `process_logits`: biases, penalties and masks, which also apply to greedy rows.
- `warp_logits`: temperature, top-k, top-p, min-p, typical-p, XTC.
- `draw_tokens`: one token by the row's key.

`generation` appends the token.

Reading order:

- `processors` are functions logits_BV -> logits_BV, as transformers defines them. `other_processors` has the
  processors of settings that few calls use.
- `settings` has an entry for each setting.
- `sampling_config` is `SamplingConfig` (`typed_settings` is for type checkers). `generation_config` reads its
  defaults from a checkpoint.
- `batched_settings` makes arrays with one setting per row. `used_settings` names the settings in use.
- `biases` makes arrays of lists: one bias of biases, allowed and forbidden ids, and forbidden sequences.
- `context` is the state of the processors.
- `random_keys` makes PRNG keys and noise.
- `sampler` has the three stages. `xtc_dry` plugs two of llama.cpp's samplers into them.
- `logprobs` records log-probabilities, alternatives and the masks of `support`.
- `caller_processors` has callers' functions, in `Context.callers`.

Decisions:

- Settings are arrays with one number per row, in one of two tree structures: plain (temperature, top-k,
  top-p, repetition penalty), or all settings. With all settings, `lax.cond` skips the settings that no row
  uses. So one program serves a mixed batch, and another setting of the same structure compiles nothing.
  `vmap` turns a `cond` into both of its branches, and the plain structure has few of them.
- If top-k leaves few tokens, only the most likely tokens are sampled from and get noise. If this is not
  possible for one row (ties with the last token, or no top-k), the whole vocabulary of all rows gets noise.
  That is slower, and the other rows keep their tokens.
- The key of a draw is fold_in(fold_in(row key, position), purpose). It depends neither on the slot nor on the
  batch. Gumbel noise is computed here from random bits, so every jax version draws the same noise.
- If all rows are greedy without processors, the token is the argmax, and nothing else is computed for it.
- Returned log-probabilities are the model's, before any processor, as `score` returns them.
"""
