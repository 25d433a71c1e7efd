"""Functions that a model may call: their descriptions in the prompt, the calls in its answer, their results.

The bundled checkpoint was not trained to call functions: here it gets a chat template with tools, and
grammars make its answers calls of one function each, with valid arguments. A checkpoint whose template uses
tools decides by itself: name it (Qwen/Qwen2.5-0.5B-Instruct, or a directory).

    pip install '.[grammar]'
    python scripts/examples/call_functions.py [CHECKPOINT]
"""

from checkout import start

# isort: split
import json

import xinfer_jax as xj

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "How many people live in the capital of Spain?"


def capital(country: str) -> str:
    return dict(France="Paris", Italy="Rome", Spain="Madrid")[country]


def population(city: str) -> int:
    return dict(Paris=2_100_000, Rome=2_800_000, Madrid=3_300_000)[city]


def tool(function, description: str, **parameters) -> dict:
    schema = dict(type="object", properties=parameters, required=[*parameters])
    return dict(
        type="function", function=dict(name=function.__name__, description=description, parameters=schema)
    )


FUNCTIONS = {function.__name__: function for function in (capital, population)}
TOOLS = [
    tool(capital, "The capital of a country.", country=dict(enum=["France", "Italy", "Spain"])),
    tool(population, "How many people live in a city.", city=dict(enum=["Paris", "Rome", "Madrid"])),
]


def main(argv: list[str]) -> None:
    model = xj.load_model(*argv[1:2])
    grammars = [None] * 4  # of as many answers at most
    if len(argv) < 2:
        model.tokenizer.chat_template = TEMPLATE
        grammars = [xj.tools.tool_grammar(TOOLS, model.tokenizer, name=name) for name in FUNCTIONS]
    messages = [dict(role="user", content=QUESTION)]
    for grammar in grammars:
        ids = xj.encode_prompt(model, messages, tools=TOOLS)
        out = xj.generate(
            model.params, model.config, [ids], xj.GenerateOptions(max_tokens=100, grammar=grammar)
        )
        answer = xj.tools.parse_tool_calls(model.tokenizer.decode(out.tokens[0]), TOOLS)
        messages.append(answer.to_message())
        if not answer.tool_calls:
            print(answer.content)
            break
        for call in answer.tool_calls:
            result = json.dumps(FUNCTIONS[call.name](**call.arguments))
            print(f"{call.name}({call.arguments}) = {result}")
            messages.append(dict(role="tool", tool_call_id=call.id, content=result))


if __name__ == "__main__":
    start(main)
