"""Prompts to answers. Three verbs: `read` (prompts into the cache), `admit` (a row's numbers into a slot of
the state; no keys move), `advance` (the one loop; each row ends by its own limit). `generate`, `stream` and
`decode_loop` read and advance, since their rows start together; speculation advances by guesses that it
checks; rows that join others are admitted.

In the order to read: `state` is `DecodeState`, all that belongs to a row, rows in front, with `note`, which
writes a token down, and `admit`; `loop` has `read` and `advance`; `doors` the jitted `prefill`, `decode_step`
and `decode_loop`, arrays in, arrays out; `speculation` checks several guesses in one pass; `options` is what
a call is asked for and gives back, with its checks; `faults` what shows only once tokens are chosen;
`batches` makes arrays of lists, in sizes that few programs serve; `programs` runs a program, or compiles it
ahead; `roads` are the two ways through the model; `rows` what goes along them; `run` is a call under way;
`streaming` has `generate` and `stream`, which are a run in two rhythms; `kernels` says which implementation
serves what; `beam_steps` and `beams` are beam search; `scoring` is `score`.

- Whatever differs between rows (settings, keys, limits, ids that end them) is an array in the state, so rows
  that come and go change no program. Keys and values are shared pools and stand apart.
- Rows and lengths are rounded up to powers of two: a padding row has ended, and costs its share of a step.
- The loop ends with a choice, not with a pass that nobody needs: the last token chosen is not in the cache.
- On a CPU the compiler took longer than most answers, and longer for each layer. So there prompts are read
  layer by layer: embedding, one program for each kind of layer, the head, and what chooses a token, called
  from the host with keys and values donated; tokens are decoded by programs of up to eight layers. `stream`,
  the commands and beam search decode so too, always: the same call gives the same bits, warm or cold.
  `generate` decodes in one loop on the device, which is faster and what RL and evaluations run for hours; so
  does everything in a caller's jit, on a GPU, or on several devices. The same functions of `loop` and
  `speculation` stand on both roads: tokens agree, last bits may not.
- The programs of a call are compiled side by side before it sets out: it is rehearsed on shapes (`Ahead`),
  so there is no second list of what it will run. Once for each kind of call; looking that up takes 0.3 ms.
- Long prompts are read in chunks, without those that are all padding: a long bucket costs no more than the
  prompt. The chunk depends on the road, and may on the device: 512 queries fill 56 of an H200's 132
  multiprocessors for the 0.5B shape. A ring's slack is another number, in `cache`. Layer by layer the chunks
  of a prompt are equal: 300 tokens are two of 160, not one of 256 and one of 64, which would be as fast but a
  second width to compile before the first token. A prompt compiles one, and there are nine.
- Bad input is refused on the host before any tracing. What shows later (log-probabilities that are not
  finite, settings that leave no token, a cache outgrown) raises where the host looks at tokens anyway; in a
  caller's jit what does not fit is dropped and flagged.
- `n` answers share the prompt's pass, not its memory: its cache is copied for each.
- Speculation draws the model's own token and compares, instead of accepting with a probability: the tokens
  are those of plain decoding, with every processor, and a draft that draws with the same noise agrees about
  as often as acceptance sampling would allow.
"""
