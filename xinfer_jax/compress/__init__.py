"""Quantization that runs the model on a calibration text. `xinfer-jax quantize` is the command. Rounding to
nearest, without a text, is in `weights.quantization`.

Reading order:

- `gptq` quantizes a matrix on the device, by rounding to nearest or by GPTQ, which compensates its own
  errors.
- `awq` scales up input channels with large activations (AWQ), folds the scales into the matrices and norms
  before, and quantizes the model layer by layer. It also makes a model that is hard to quantize.

Decisions:

- In int4 the vocabulary's matrix stays int8: its errors are in every logit. Other 4-bit formats do the same.
- A layer is fitted to the actual outputs of the quantized layers before it.
- Scales are folded into norms and neighbouring matrices, so a compressed model is an ordinary one: no program
  knows of AWQ. Models whose norms or experts cannot take the scales (OLMo 3, Gemma, experts) are rejected.
- The perplexity of the bundled checkpoint in int4 rises by 4.3% if it is rounded to nearest, and by 0.4% by
  AWQ and GPTQ.
"""
