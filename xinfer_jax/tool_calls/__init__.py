"""Tools and reasoning: what a request may call, and an answer's text taken apart. Pure text, without a model.

In the order to read: a `tool_call_form` is all that is known of a form in which models write calls, and each
of `hermes_call`, `llama_call`, `qwen3_coder_call`, `gemma_call`, `glm_call` and `harmony` has one. Their
parsers share `call_parser`, `json_values`, `parameter_types`, `json_call` (with `json_scanner`) and
`tagged_call`, and their grammars share `call_grammar`. `tool_call_parser` finds the calls in a text.
`reasoning` splits an answer at <think>, and `harmony` at control tokens. `answer_parser` puts the parsers
together. `tool_messages` checks the tools of a request and prepares earlier calls for a chat template.

- A whole text and the same text in any parts give the same calls and the same content. So there is one
  parser, whose time is linear in any text. Whatever a model writes, the result is calls whose arguments are
  JSON, or text: `tests/tool_calls/test_mutated_calls.py` tries it.
- Arguments are returned while they are generated, as the model wrote them. What turns out to be no call is
  text again: all of it is content, though a stream has sent its beginning as a call by then.
- A call is checked as JSON, its function must be one of the tools, but its arguments are not checked against
  their schema. Grammars do that (tool_choice "required", or a function).
- The end of an answer may stand for the mark after the last call. What models often leave out or add is
  repaired: the module of each form says it. Nothing else is.
"""
