"""The OpenAI API's bodies, as files and servers carry them.

In the order to read: `fields` says which fields are known and reads them by their types, `sampling_fields`
and `prompts` what they say of tokens and of prompts; `bodies` is all that a request asks for; `token_texts`
gives texts of single tokens, `responses` what an answer shows; `scoring` is both for how likely given texts
are.

- Fields that samplers share, and vLLM's further ones, mean what they mean in `SamplingConfig`; what is known
  and not served is refused by its name, unless it asks for nothing; no known field that would change the
  answer is passed over. null is as good as absent.
- `truncate_prompt_tokens: -1` keeps as many tokens as leave room for max_tokens. A message's `content: null`
  beside tool_calls is an empty text, and their arguments reach the template as objects, as in vLLM.
- Log-probabilities are those before any processor. A token's own number is the one that stands among the
  likeliest, the identical float, and the token that ends an answer has its entry: lm-eval counts on both.
- JSON has no infinity: -9999.0 stands in its place.
"""
