"""From prompts to answers: the functional API, `generate` and `stream`, beam search, and scores of given
tokens. A call goes from `generate` to `BatchGenerator`, an executor, and programs of the model.

In the order to read: `simple` is generation in plain Python. `entrypoints` has `generate`, `streaming` has
`stream`, `options` their options and output, `validation` the checks of their arguments. `batch_generator`
has the rows of one call, `batch_arrays` the arrays that it makes of lists, `batch_matchers` the rows'
grammars; `state` is `DecodeState`, all that belongs to a row but its keys and values; `output_checks`, with
`no_token_left`, finds errors that are known only after sampling. `executor` says what an executor does, and
rounds up the sizes of arrays; `loop` is the traced one, which makes one program of the whole model;
`executor_choice` chooses one. `strategies` says what a decoding strategy is, and has the plain one;
`speculation` (with `drafting`) and `beam_steps` are the others, all written over an executor. `functional`
has `prefill`, `decode_step` and `decode_loop`, `rollouts` rows for training, `beams` `beam_search`, `scoring`
`score` (with `scores` and `score_masks`).

- All that differs between rows (settings, keys, limits, EOS ids) is an array of the state. So a row that
  joins or ends changes no program. Rows and lengths are rounded up to powers of two; padding rows have ended.
- The loop ends after sampling, not after a forward pass whose logits nobody needs. So the last token is not
  in the cache.
- The arguments of a call decide which executor decodes, not what is compiled: the same call gives the same
  bits, warm or cold. On one CPU the other one (`layerwise`) prefills, streams and decodes short calls.
- Invalid arguments raise on the host, before tracing. What is known only later raises where the host reads
  the tokens. In a caller's jit, tokens that do not fit are dropped and flagged.
- The `n` answers of a prompt share its prefill, not its memory: the cache is copied for each.
"""
