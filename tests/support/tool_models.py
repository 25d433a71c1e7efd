"""Templates that use tools in the form of several families, and a checkpoint that answers with calls."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import response_templates
import tiny
import tokenizers

from xinfer_jax.tool_calls.gemma_call import GEMMA_TOKENS

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALL"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_LLAMA = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
_JSON = "<tool_call>\n" + _LLAMA.replace("parameters", "arguments") + "\n</tool_call>"
_XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for name, value in c.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
# Gemma 4's marks, with values as JSON but for texts.
_GEMMA = (
    "<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for name, value in c.function.arguments | dictsort %}"
    "{{ ',' if not loop.first }}{{ name }}:"
    '{% if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value | tojson }}{% endif %}'
    "{% endfor %}{{ '}' }}<tool_call|>"
)
# GLM 4.5 writes each tag on a line of its own, and GLM 4.7 all of them on one.
_GLM = (
    "<tool_call>{{ c.function.name }}\n{% for name, value in c.function.arguments | items %}"
    "<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
_FORMS = dict(hermes=_JSON, llama3_json=_LLAMA, qwen3_coder=_XML, gemma4=_GEMMA, glm45=_GLM)
TEMPLATES = {name: _TOOLS + _TURNS.replace("CALL", call) for name, call in _FORMS.items()}
GLM_ON_ONE_LINE = _TOOLS + _TURNS.replace("CALL", _GLM.replace("\n", ""))
_DIGIT = dict(type="integer", minimum=0, maximum=9)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool whose parameters are all required."""
    parameters = dict(type="object", properties=properties, required=[*properties])
    return dict(type="function", function=dict(name=name, description=name, parameters=parameters))


TOOLS = [tool("add", a=_DIGIT, b=_DIGIT), tool("weather", city=dict(enum=["Oslo", "Paris"]))]
# The tokens of the answer; none occurs twice.
PARTS = [
    "<think>", "why", "</think>", "I look.", "<tool_call>", '\n{"name": ', '"add", "arg', 'uments": {"a',
    '": 1, "b', '": 2}', "}\n</tool_call>", '\n<tool_call>{"name": "weather", ',
    '"arguments": {"city": "Oslo"}}', "</tool_call>",
]  # fmt: skip


# Answers in Gemma 4's form, whose marks are special tokens, and in one that a response template describes.
BRACKETS = dict(
    chat_template=_TOOLS + _TURNS.replace("CALL", "[CALL]{{ c.function.name }}"),
    response_template=response_templates.BRACKETS | dict(start_anchor="<|im_start|>assistant\n"),
)


def write_calling_checkpoint(path: Path, parts: list[str] = PARTS, **settings: Any) -> Path:
    """Writes a checkpoint that answers every prompt with parts, each one token, and returns its directory."""
    hf, weights = tiny.answering_model("")
    template = tiny.TOKENIZER_CONFIG | dict(chat_template=TEMPLATES["hermes"]) | settings
    tiny.write(path, hf | dict(max_position_embeddings=1024), tokenizer_config=template)
    backend = tiny.tokenizer()
    tokens = [tokenizers.AddedToken(x, normalized=False, special=x in GEMMA_TOKENS) for x in parts]
    backend.add_tokens(tokens)
    backend.save(str(path / "tokenizer.json"))
    ids = [*backend.encode("\n").ids, *(backend.token_to_id(part) for part in parts), tiny.IM_END]
    weights[tiny.HEAD] = np.zeros_like(weights[tiny.HEAD])
    weights[tiny.HEAD][ids[1:], ids[:-1]] = 1
    tiny.write_weights(path, weights)
    return path


def arguments(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in the API's form."""
    return call["function"]["name"], json.loads(call["function"]["arguments"])
