"""Turns prompts into answers: the functional API, `generate` and `stream`, beam search, and scores of given
tokens. A call goes from `generate` to `BatchGenerator`, then to an executor and the programs of the model.

Reading order:

- `simple` is generation in plain Python.
- `entrypoints` has `generate`, `streaming` has `stream`, `options` has their options and output, and
  `validation` checks their arguments.
- `batch_generator` has the rows of one call, `batch_arrays` makes arrays of lists, and `batch_matchers` has
  the grammars of the rows.
- `state` has `DecodeState`: all that belongs to a row except its keys and values.
- `output_checks`, with `no_token_left`, finds errors that are known only after sampling.
- `executor` defines an executor, and rounds up the sizes of arrays. `loop` has the traced executor, which
  makes one program of the whole model. `executor_choice` chooses an executor.
- `strategies` defines a decoding strategy, and has the plain one. `speculation` and `beam_steps` are the
  other strategies. All are written over an executor.
- `proposers` are the sources of draft tokens: functions, draft models and draft heads. `draft_sources` checks
  the argument `draft`, `drafting` has the proposer of a call, and `head_prefill` lets a draft head read the
  prompts.
- `functional` has `prefill`, `decode_step` and `decode_loop`, and `draft_state` has `prefill_with_draft`.
- `rollouts` makes rows for training, `beams` has `beam_search`, and `scoring` has `score` (with `scores` and
  `score_masks`).

Decisions:

- All that differs between rows (settings, keys, limits, EOS ids) is an array of the state. So a row that
  joins or ends changes no program. Rows and lengths are rounded up to powers of two. Padding rows have ended.
- The loop ends after sampling, not after a forward pass whose logits nobody needs. So the last token is not
  in the cache.
- The arguments of a call decide which executor decodes. What is compiled already does not: the same call
  gives the same bits, warm or cold. On one CPU the layerwise executor (`layerwise`) prefills, streams and
  decodes short calls.
- Invalid arguments raise on the host, before tracing. Errors that are known only later are raised when the
  host reads the tokens. In a caller's jit, tokens that do not fit are dropped and flagged.
- The `n` answers of a prompt share its prefill, not its memory: the cache is copied for each answer.
"""
