"""Answers that reach a parser in parts, and what it says of them."""

from collections.abc import Sequence

import xinfer_jax as xj


def pushed(parser: xj.tools.AnswerParser, parts: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns content, reasoning, and the names and arguments of the complete calls, from the deltas.

    The beginning of what turns out to be no call may have been sent as one: its text follows as content.

    Args:
        parser: made with `new_id=str`, so that the id of a call is its index.
        parts: of one answer.
    """
    deltas = [parser.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    begun: list[list[str]] = []
    for delta in deltas:
        assert len({call.index for call in delta.tool_calls}) == len(delta.tool_calls)
        for call in delta.tool_calls:
            if call.index == len(begun):
                assert call.id == str(call.index) and call.name
                begun.append([call.name, ""])
            else:
                assert call.id is None and call.name is None and call.arguments
            begun[call.index][1] += call.arguments
    complete = [call[1:] for call in parser._calls.calls]
    assert complete == [tuple(begun[int(own)]) for own, _, _ in parser._calls.calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), complete
