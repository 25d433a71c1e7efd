"""Programs that run a model on a text to make smaller weights of it; `scripts/quantize.py` is the command.
What rounds to nearest, without a text, is `weights.quantized`.

In the order to read: `outliers` makes a model that is hard to round, to measure with; `rounding` rounds a
matrix to nearest on the device, or so that it makes up for its own errors (GPTQ's way); `awq` scales up the
input channels that carry much before they are rounded (AWQ), folds the scales into whatever feeds the matrix,
and goes through the model layer by layer.

- In int4 the vocabulary matrix stays int8, as in other 4-bit formats: an error there is in every logit.
- A layer is fitted to what the rounded layers before it really put out, not to what they should have.
- Scales are folded into norms and neighbouring matrices, so a compressed model is an ordinary one: no program
  knows of AWQ. Models whose norms or experts cannot take them (OLMo 3, Gemma, experts) are refused.
- Perplexity of the bundled checkpoint in int4: +4.3% rounded to nearest, +1.8% so (WORKSPACE.md has more).
"""
