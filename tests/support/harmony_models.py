"""gpt-oss's chat template and control tokens, and a small checkpoint that answers in Harmony."""

from pathlib import Path

import numpy as np
import tiny
import tokenizers

from xinfer_jax.tool_calls.harmony import CONTROL_TOKENS

# After the template that is published with gpt-oss, from memory: without built-in tools, and with JSON for
# the types of parameters. Messages, channels and conditions of errors are as there.
_SYSTEM = """
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" }}
{{- "Knowledge cutoff: 2024-06\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{%- if reasoning_effort is not defined %}
    {%- set reasoning_effort = "medium" %}
{%- endif %}
{{- "Reasoning: " + reasoning_effort + "\\n\\n" }}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- if tools -%}
    {{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif -%}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer_message %}
        {{- "# Instructions\\n\\n" + developer_message + "\\n\\n" }}
    {%- endif %}
    {%- if tools %}
        {{- "# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n" }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: " }}
            {{- tool.parameters | tojson }}
            {{- ") => any;\\n\\n" }}
        {%- endfor %}
        {{- "} // namespace functions" }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}"""
_MESSAGES = """
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("You have passed a message containing <|channel|> tags.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future_final_message = namespace(found=false) %}
            {%- for future_message in loop_messages[loop.index:] %}
                {%- if future_message.role == 'assistant' and "tool_calls" not in future_message %}
                    {%- set future_final_message.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking with tool calls!") }}
            {%- elif message.content and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- elif message.thinking and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name }}
            {{- "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments | tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous tool call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""
TEMPLATE = _SYSTEM + _MESSAGES
_AGAIN = ["<|end|>", "<|start|>", "assistant", "<|channel|>"]
# The tokens of two answers, after a prompt that ends with "assistant". Only those of _REPEATED occur twice.
CALL = [
    "<|channel|>", "analysis", "<|message|>", "I must ", "add.", *_AGAIN, "commentary", "<|message|>",
    "I look.", *_AGAIN, "commentary to=functions.", "add ", "<|constrain|>", "json", "<|message|>",
    '{"a": ', '1, "b"', ": 2}", "<|call|>",
]  # fmt: skip
FINAL = [
    "<|channel|>", "analysis", "<|message|>", "It is 3.", *_AGAIN, "final", "<|message|>", "3 <|chan",
    "nel|>sure<|mess", "age|>!", "<|return|>",
]  # fmt: skip
FIRST_OF_FINAL = FINAL[3]  # a logit bias on it of a few units chooses that answer
_REPEATED = {*CONTROL_TOKENS, "assistant", "analysis", "commentary", "final"}
_WINDOW = 7  # tokens: from the last text of a message to the first of the next one


def tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer of `tiny` with Harmony's control tokens, and the parts of the two answers."""
    backend = tiny.tokenizer()
    backend.add_special_tokens(list(CONTROL_TOKENS))
    parts = dict.fromkeys(part for part in (*CALL, *FINAL) if part not in CONTROL_TOKENS)
    backend.add_tokens([tokenizers.AddedToken(part, normalized=False) for part in parts])
    return backend


def write_checkpoint(path: Path) -> Path:
    """Writes a checkpoint that answers every prompt with CALL, or with FINAL, and returns its directory.

    Its attention passes on which of the unrepeated tokens are among the last seven. The output matrix maps
    the current token and the latest of these to the next token.
    """
    backend = tokenizer()
    vocab_size = backend.get_vocab_size()
    steps = [*_steps(CALL, 0.2), *_steps(FINAL, 0.1)]
    keys = list(dict.fromkeys(key for _, _, key, _ in steps if key))
    size = 8 * -(-(vocab_size + len(keys)) // 8)
    hf = tiny.CONFIG | dict(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=_WINDOW,
        num_hidden_layers=1, vocab_size=vocab_size, hidden_size=size, head_dim=8, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=16, tie_word_embeddings=False, max_position_embeddings=2048,
    )  # fmt: skip
    assert len(keys) <= 8
    weights = {name: np.zeros_like(tensor) for name, tensor in tiny.tensors(hf).items()}
    weights |= {
        name: np.ones_like(tensor) for name, tensor in weights.items() if name.endswith("norm.weight")
    }
    weights[tiny.EMBED] = np.eye(vocab_size, size, dtype=np.float32)
    layer = "model.layers.0.self_attn."
    for i, key in enumerate(keys):
        weights[f"{layer}v_proj.weight"][i, backend.token_to_id(key)] = _WINDOW / np.sqrt(size)
        weights[f"{layer}o_proj.weight"][vocab_size + i, i] = 1
    head = weights[tiny.HEAD]
    for current, following, key, more in steps:
        row = head[backend.token_to_id(following)]
        row[backend.token_to_id(current)] = max(row[backend.token_to_id(current)], 10 + more)
        if key:
            row[vocab_size + keys.index(key)] = 1
    tiny.write(
        path, hf, weights=weights, tokenizer_config=tiny.TOKENIZER_CONFIG | dict(chat_template=TEMPLATE)
    )
    backend.save(str(path / "tokenizer.json"))
    return path


def _steps(answer: list[str], bonus: float) -> list[tuple[str, str, str | None, float]]:
    """Current token, next token, the latest unrepeated token if the current one is repeated, and a bonus
    where there is no such token yet.
    """
    found = []
    key = None
    for current, following in zip(["assistant", *answer[:-1]], answer, strict=True):
        is_repeated = current in _REPEATED
        key = key if is_repeated else current
        found.append((current, following, key if is_repeated else None, 0 if key else bonus))
    return found
