"""Quantization that runs the model on a calibration text; `xinfer-jax quantize` is the command. Rounding to
nearest, without a text, is in `weights.quantization`.

In the order to read: `gptq` quantizes a matrix on the device, to nearest or by GPTQ, which compensates its
own errors; `awq` scales up input channels with large activations (AWQ), folds the scales into the matrices
and norms before, and quantizes the model layer by layer; it also makes a model that is hard to quantize.

- In int4 the vocabulary's matrix stays int8, as in other 4-bit formats: its errors are in every logit.
- A layer is fitted to the actual outputs of the quantized layers before it.
- Scales are folded into norms and neighbouring matrices, so a compressed model is an ordinary one: no program
  knows of AWQ. Models whose norms or experts cannot take them (OLMo 3, Gemma, experts) are rejected.
- Perplexity of the bundled checkpoint in int4: +4.3% rounded to nearest, +0.4% by AWQ and GPTQ.
"""
