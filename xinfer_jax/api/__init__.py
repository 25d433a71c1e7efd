"""The OpenAI API's bodies, as files and servers carry them.

In the order to read: `bodies` says what a request asks for, `responses` what an answer shows; `scoring` is
both for how likely given texts are.

- Fields that samplers share, and vLLM's further ones, mean what they mean in `SamplingConfig`; what is known
  and not served is refused by its name, unless it asks for nothing. null is as good as absent.
- Log-probabilities are those before any processor. A token's own number is the one that stands among the
  likeliest, the identical float, and the token that ends an answer has its entry: lm-eval counts on both.
- JSON has no infinity: -9999.0 stands in its place.
"""
