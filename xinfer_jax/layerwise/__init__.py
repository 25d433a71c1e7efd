"""Execution on one CPU, layer by layer, and ahead-of-time compilation. The core does not import it:
`plugins.py` names it.

Reading order:

- `precompile` finds the programs of a call by a dry run on shapes, and compiles them in threads.
- `layer_programs` are the programs, and the choice of the layers in a program.
- `layerwise_executor` calls the programs.

Decisions:

- On a CPU, compiling the whole model takes longer than most answers. So embedding, one program per kind of
  layer, head and sampling are called from the host, with donated keys and values. Decode programs have up to
  five layers.
- The layerwise executor cuts a prompt into equal chunks, so one width is compiled before the first token.
- Greedy rows without processors have their own program, which compiles in a tenth of the sampler's time. The
  steps after sampling (log-probabilities, end of a row) are one program for both.
- The temporary memory of a program counts twice, because malloc may return it to the system after each one.
- There is no list of programs: equal calls do one dry run, and the look-up takes 0.3 ms.
"""
