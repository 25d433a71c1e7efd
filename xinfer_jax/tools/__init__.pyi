from ..tokenization.tool_choice import tool_grammar as tool_grammar
from ..tool_calls.answer_parser import (
    AnswerDelta as AnswerDelta,
    AnswerParser as AnswerParser,
    ParsedAnswer as ParsedAnswer,
    ToolCall as ToolCall,
    parse_tool_calls as parse_tool_calls,
)
from ..tool_calls.tool_call_parser import ToolCallDelta as ToolCallDelta
