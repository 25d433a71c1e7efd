"""From prompts to answers: the functional API, `generate` and `stream`, beam search, and scores of given
tokens.

The way of a call: `generate` → `BatchGenerator` → a runner → programs of the model. In the order to read:

- `entrypoints`: `generate` and `stream`. `options`: their options and output. `validation`: the checks of
  their arguments.
- `batch_generator`: the rows of one call. `batch_arrays`: the arrays that it makes of lists, in the sizes of
  `buckets`. `batch_matchers`: the rows' grammars. `state`: `DecodeState`, all that belongs to a row but its
  keys and values. `output_checks`: errors that are known only after sampling.
- `strategies`: what a decoding strategy is, and the plain one. `speculation` and `beam_steps` are the others;
  `drafting`: what a call with draft tokens has.
- `runners`: the whole model as one program, which runs any strategy; `layerwise/` has the other runner.
  `loop`: the traced functions of the whole model. `executor`: runs programs, or compiles them ahead.
- `functional`: `prefill`, `decode_step`, `decode_loop`. `beams`: `beam_search`. `scoring`: `score`.
  `kernels`: `kernels_used`.

Decisions:

- All that differs between rows (settings, keys, limits, EOS ids) is an array of the state. So a row that
  joins or ends changes no program. Keys and values are shared pools, apart from the state.
- Rows and lengths are rounded up to powers of two. Padding rows have ended; they cost their share of a step.
- The loop ends after sampling, not after a forward pass whose logits nobody needs. So the last token is not
  in the cache.
- On one CPU the layerwise runner prefills. `stream`, the commands, beam search and an engine always decode
  with it. `generate` decodes in one loop on the device if rows x new tokens exceed 256. A caller's jit, a GPU
  and several devices always use the whole-model runner. Tokens of the two runners agree; the last bits of
  log-probabilities may differ. So the arguments of a call decide, not what is compiled: the same call gives
  the same bits, warm or cold.
- The bound of 256 lies below 512 tokens of one row, where warm calls must lose nothing to the loop. Cold,
  the loop wins its compile time back only after thousands of tokens: a step of the layerwise runner takes
  1.04 times as long (0.5B's shape in int8, 1 and 8 rows), or 0.3 ms more (the bundled model).
- Plain decoding takes a step before it knows whether the rows of the step before go on, so the device does
  not wait for the host. A step of rows that have all ended changes nothing.
- A strategy is written once, in terms of the `Operations` that both runners have, so its operations are as
  large as the programs of the layerwise runner. Two things are not shared. Prefill is a loop over chunks in a
  program, or on the host, and returns logits or hidden states: the layerwise runner needs no second head
  program for it. And the engine's speculative step truncates ended rows to 0 tokens, where this package keeps
  them for the prefix cache.
- The runner of the whole model compiles plain decoding with `compiler_options`, and the other strategies
  without: they were measured like that.
- Prefill takes chunks, and skips chunks of padding. Large chunks suit a GPU: 512 queries fill 56 of an H200's
  132 multiprocessors for the 0.5B shape. The layerwise runner cuts a prompt into equal chunks: 300 tokens are
  two of 160, not 256 and 64. The second way is as fast, but compiles a second width before the first token. A
  prompt compiles one width, and there are nine.
- Invalid arguments raise on the host, before tracing. What is known only later (log-probabilities that are
  not finite, settings that leave no token, a full cache) raises where the host reads the tokens. In a
  caller's jit, tokens that do not fit are dropped and flagged.
- The `n` answers of a prompt share its prefill, not its memory: the cache is copied for each.
- Speculation samples the model's own token and compares it with the draft token. It does not accept with a
  probability, so the tokens are those of plain decoding, with every logits processor. A draft model that
  samples with the same noise agrees about as often as acceptance sampling would accept.
"""
