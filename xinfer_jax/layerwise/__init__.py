"""Execution on one CPU, layer by layer, and compiling ahead of time. The core does not import it:
`plugins.py` names it.

In the order to read: `precompile` compiles the programs of a call in threads, which a dry run on shapes
finds; `layer_programs` are the programs, and which layers a program has; `layerwise_executor` calls them.

- On a CPU, compiling the whole model takes longer than most answers. So embedding, one program per kind of
  layer, head and sampling are called from the host, with donated keys and values. Decode programs have up to
  five layers.
- The layerwise executor cuts a prompt into equal chunks, so one width is compiled before the first token.
- Greedy rows without processors have a program of their own, which compiles in a tenth of the sampler's time.
  What follows sampling (log-probabilities, end of a row) is one program for both.
- The temporary memory of a program counts twice, because malloc may return it to the system after each one.
- There is no list of programs: equal calls do one dry run, and the look-up takes 0.3 ms.
"""
