"""Response templates: how a checkpoint says that a model writes its answers."""

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
BRACKETS = dict(
    start_anchor="<|assistant|>",
    fields=dict(
        reasoning_content=dict(open="[THINK]", close="[/THINK]"),
        tool_calls=dict(
            open_pattern=r"\s*\[CALL\](?P<name>\w+)",
            close=["[/CALL]", "[/CALL]\n"],
            content="json",
            repeats=True,
            transform=CALL,
        ),
        content=dict(close_pattern=r"\s*(?:</s>|<\|end\|>)"),
    ),
)
XML = dict(
    start_anchor_pattern=r"<\|assistant\|>\n?",
    fields=dict(
        thinking=dict(open="<t>", close="</t>"),
        tool_calls=dict(
            open_pattern=r"\s*<f=(?P<name>[^>\n]+)>",
            close="</f>",
            content="xml-inline",
            content_args=dict(tag_pattern=r"<p=(?P<key>\w+)>\s*(?P<value>.*?)\s*</p>"),
            transform=CALL,
        ),
        content={},
    ),
)
PYTHON = dict(
    start_anchor="<|assistant|>",
    fields=dict(
        tool_calls=dict(open="<|calls|>", close="<|/calls|>", content="python-call-list"),
        content=dict(close="</s>"),
    ),
)
GEMMA = dict(
    start_anchor="<|turn>model\n",
    fields=dict(
        tool_calls=dict(
            open_pattern=r"<\|tool_call>call:(?P<name>\w+)",
            close="<tool_call|>",
            content="json",
            content_args=dict(unquoted_keys=True, string_delims=[['<|"|>', '<|"|>']]),
            transform=CALL,
        ),
        content={},
    ),
)
LINES = dict(
    start_anchor="<|assistant|>",
    fields=dict(
        tool_calls=dict(
            open="<call>",
            close="</call>",
            content="kv-lines",
            transform=CALL["function"] | {"name": "{content.tool}"},
        ),
        content={},
    ),
)
BY_NAME = dict(brackets=BRACKETS, xml=XML, python=PYTHON, gemma_template=GEMMA, lines=LINES)
