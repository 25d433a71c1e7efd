"""Tools and reasoning: the functions that a request may call, and an answer's text taken apart. It is pure
text, without a model.

Reading order:

- `tool_call_form` describes a form in which models write calls. Each of `hermes_call`, `llama_call`,
  `qwen3_coder_call`, `gemma_call`, `glm_call` and `harmony` has one form.
- The parsers of the forms share `call_parser`, `json_values`, `parameter_types`, `json_call` (with
  `json_scanner`) and `tagged_call`. Their grammars share `call_grammar`.
- `tool_call_parser` finds the calls in a text.
- `reasoning` splits an answer at <think>, and `harmony` splits it at control tokens.
- `answer_parser` puts the parsers together.
- `tool_messages` checks the tools of a request and prepares earlier calls for a chat template.

Decisions:

- A whole text and the same text in any parts give the same calls and the same content. So there is one
  parser, whose time is linear in any text. Whatever a model writes, the result is calls whose arguments are
  JSON, or text: `tests/tool_calls/test_mutated_calls.py` tries it.
- Arguments are returned while they are generated, as the model wrote them. If a call turns out to be none, it
  is text again: all of it is content, though a stream has sent its beginning as a call by then.
- A call is checked as JSON, and its function must be one of the tools. Its arguments are not checked against
  their schema. Grammars do that (tool_choice "required", or a function).
- The end of an answer may stand for the mark after the last call. Parts that models often leave out or add
  are repaired: the module of each form lists them. Nothing else is repaired.
"""
