"""Calls of tools: `xj.tools`. Use it if a model may call functions and you run them yourself.

- `AnswerParser` splits an answer into reasoning, content and calls, while it is generated (`AnswerDelta`,
  `ToolCallDelta`) or at its end.
- `parse_tool_calls` splits a whole text, and returns a `ParsedAnswer` with its `ToolCall` objects.
- `tool_grammar` returns a grammar with which the model must call one of your tools.

For example::

    ids = xj.encode_prompt(model, "What is the weather in Paris?", tools=tools)
    answer = model.tokenizer.decode(xj.generate(model.params, model.config, [ids]).tokens[0])
    for call in xj.tools.parse_tool_calls(answer, tools).tool_calls:
        print(call.name, call.arguments)

The code is in `tool_calls/` and `tokenization/`, and `tool_calls/README.md` has more examples.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
