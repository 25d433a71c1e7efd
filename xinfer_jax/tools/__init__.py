"""Calls of tools: `xj.tools`. Use it if a model may call functions and you run them yourself.

- `AnswerParser` splits an answer into reasoning, content and calls, while it is generated (`AnswerDelta`,
  `ToolCallDelta`) or at its end.
- `parse_tool_calls` does so for a whole text and returns a `ParsedAnswer` with `ToolCall`s.
- `tool_grammar` returns a grammar that makes the model call one of your tools.

The code is in `tool_calls/` and `tokenization/`; `tool_calls/README.md` has examples.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
