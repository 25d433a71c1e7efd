"""OpenAI request and response bodies, for prompt files and for the server.

Reading order:

- `other_servers` has fields of other servers. `fields` lists the known fields and reads them by type.
- `sampling_fields`, `grammar_fields`, `tool_fields`, `routed_experts` and `prompts` read the fields of one
  topic each.
- `bodies` parses a whole body, and `responses` builds the response.
- `responses_request` turns a body of /v1/responses into a body of a chat. `responses_output` makes the items
  of its output.
- `score_body` parses and answers bodies that score given texts.
- `embedding_body` and `rerank_body` parse the bodies of /v1/embeddings, /rerank and /score.

Decisions about fields:

- A sampling field means the same as in `SamplingConfig`. This includes the additional fields of vLLM and
  llama.cpp. The exception is `dry_sequence_breakers`: here they are strings, by default llama.cpp's. Each
  string stands for all tokens whose text contains it.
- A field that is known but not served is an error that names the field, unless its value asks for nothing. No
  known field that would change the answer is ignored. null counts as absent.
- A field of vLLM, SGLang, llama.cpp's server, TGI, LM Studio or OpenAI that would change the answer is an
  error that names this server's way. So is a field whose name has a word such as grammar, stop or penalty.
- One field constrains an answer: `response_format` (llama.cpp's forms too), `structured_outputs`, `guided_*`,
  or a `tool_choice` that requires calls. JSON is compact: vLLM's `disable_any_whitespace` is always on.
  `strict: false` constrains too. The `strict` of a tool does nothing with tool_choice "auto".
- Harmony knows the efforts low, medium and high. Any other effort becomes the next of these. `verbosity` has
  no effect. `seed: -1` means no seed. With `echo` and `max_tokens: 0` a prompt may have all tokens of the
  context.

Decisions about answers:

- Stop strings of a chat count in the content only: not in the reasoning, nor in Harmony's headers and calls,
  unless `stop_in_reasoning` is true. No stop string counts within the first min_tokens tokens (as in vLLM).
- Log-probabilities are the ones before any logits processor. A token's own value is the identical float that
  stands among the most likely tokens, and the token that ends an answer has its entry: lm-eval needs both.
  JSON has no infinity, so -9999.0 stands for it.
"""
