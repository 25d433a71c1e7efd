"""The tables of the server's routes, and of the fields of their bodies."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from xinfer_jax.api import embedding_body, fields, other_servers, rerank_body, responses_request
from xinfer_jax.sampling.settings import SETTINGS

from .markdown import code, table

KINDS = dict(completion="`/v1/completions`", chat="`/v1/chat/completions`", plain="lines of `batch`")
# The fields of bodies that ask for answers, without the sampling settings, which have a table of their own.
MEANINGS = {
    "model": "The name of the model, or of an adapter.",
    "messages": "The conversation: objects with `role` and `content`.",
    "prompt": "A text or token ids. `/v1/completions` also takes a list of several prompts.",
    "stream": "If true, the answer is sent in events while it is generated.",
    "stream_options": "An object: `include_usage` and `continuous_usage_stats` add the usage to the events.",
    "max_tokens": "The most tokens of an answer. The default of a completion is 16, of others"
    " `--max_tokens`.",
    "max_completion_tokens": "The same as `max_tokens`, with priority over it.",
    "n": "The number of answers to each prompt, 1 to 128.",
    "best_of": "The number of answers that are generated, of which the `n` most likely ones are returned.",
    "stop": "A text, or a list of texts, before which an answer ends.",
    "stop_token_ids": "Token ids that end an answer, next to the EOS ids.",
    "ignore_eos": "If true, an EOS token does not end an answer.",
    "stop_in_reasoning": "If true, stop strings also end the reasoning. The default is the flag of this"
    " name.",
    "include_stop_str_in_output": "If true, the text includes the stop string that ended it.",
    "seed": "The seed of the random draws. The same request with the same seed has the same answer.",
    "logprobs": "In a chat true or false. In a completion and in a line of `batch` the number of"
    " alternatives, 0 to 20.",
    "top_logprobs": "The number of alternatives to each token of a chat, 0 to 20. It needs `logprobs: true`.",
    "echo": "If true, the answer begins with the prompt. With `logprobs` this gives the log-probabilities"
    " of the prompt.",
    "return_token_ids": "If true, the response has the token ids of the prompt and the answer.",
    "return_routed_experts": "If true, the response says which experts its tokens used. It needs"
    " `--routed_experts`.",
    "routed_experts_prompt_start": "The number of tokens of the prompt whose experts are left out.",
    "response_format": "The form of the answer: `text`, `json_object` or `json_schema` (OpenAI).",
    "structured_outputs": "The form of the answer: an object with `json`, `regex`, `choice` or `grammar`"
    " (vLLM).",
    "guided_json": "An older name of `structured_outputs.json`.",
    "guided_regex": "An older name of `structured_outputs.regex`.",
    "guided_choice": "An older name of `structured_outputs.choice`.",
    "guided_grammar": "An older name of `structured_outputs.grammar`.",
    "tools": "The functions that the answer may call.",
    "tool_choice": "`none`, `auto`, `required`, or one function.",
    "parallel_tool_calls": "If false, only the first call of an answer is returned.",
    "reasoning_effort": f"One of {', '.join(fields._EFFORTS)}. It goes to the chat template.",
    "include_reasoning": "If false, the response leaves out the reasoning.",
    "chat_template_kwargs": "Variables of the chat template, such as `enable_thinking`.",
    "add_generation_prompt": "If false, the prompt does not end with the beginning of an answer.",
    "continue_final_message": "If true, the answer continues the last message.",
    "add_special_tokens": "If false, a text gets no special tokens, such as BOS.",
    "skip_special_tokens": "If false, the text of an answer shows its special tokens.",
    "truncate_prompt_tokens": "The number of tokens that a longer prompt keeps. -1: all that fit.",
    "truncation_side": "The side on which a prompt loses tokens: `left` or `right`.",
    "cache_salt": "A text. Only requests with equal salts share pages of the prefix cache.",
    "priority": "A whole number. Requests with lower numbers go first.",
    "raw": "If true, the prompt is continued as it is, without the chat template.",
    "system": "The system message of a prompt.",
}  # fmt: skip
_SENT = {"stream", "stream_options"}  # fields of the response's form, which are read first
SAMPLING = {setting.field for setting in SETTINGS.values() if setting.in_bodies}
ROUTES = {
    "/v1/chat/completions": "The answer to a conversation.",
    "/v1/completions": "The continuation of prompts.",
    "/v1/responses": "The same as a chat, in the form of OpenAI's Responses API.",
    "/v1/embeddings": "A vector for each text.",
    "/rerank": "The documents that answer a query best (also `/v1/rerank` and `/v2/rerank`).",
    "/score": "How well each document answers a query (also `/v1/score`).",
    "/v1/models": "The names of the model and of its adapters.",
    "/v1/models/{name:path}": "The description of one model.",
    "/tokenize": "The token ids of a text or of a conversation.",
    "/detokenize": "The text of token ids.",
    "/tokenizer_info": "The special tokens and the chat template.",
    "/v1/load_lora_adapter": "Adds an adapter, or replaces it.",
    "/v1/unload_lora_adapter": "Removes an adapter.",
    "/pause": "Pauses the engine.",
    "/resume": "Ends a pause.",
    "/is_paused": "Says whether the engine is paused.",
    "/weight_info": "Says which version the weights have.",
    "/update_weights": "Replaces the weights by those of a directory.",
    "/health": "200 if the server can answer, else 503 with the reason.",
    "/metrics": "Metrics for Prometheus.",
    "/version": "The version of this library.",
    "/": "A chat page.",
}  # fmt: skip
_ALIASES = ("/v1/rerank", "/v2/rerank", "/v1/score")
# The fields of /v1/responses that the server translates.
RESPONSES = {
    "input": "A text, or a list of items: `message`, `reasoning`, `function_call` and"
    " `function_call_output`.",
    "instructions": "The system message, which comes first.",
    "max_output_tokens": "The most tokens of the answer.",
    "text": "An object: `format` is the form of the answer (`text`, `json_object` or `json_schema`)."
    " `verbosity` has no effect.",
    "reasoning": "An object: `effort` goes to the chat template. `summary` and `generate_summary` have no"
    " effect.",
    "include": f"A list of `{responses_request.LOGPROBS}` and `{responses_request.ENCRYPTED}`.",
    "tools": "The functions that the answer may call. Tools of other types get 400.",
    "tool_choice": "`none`, `auto`, `required`, or `{\"type\": \"function\", \"name\": …}`.",
}  # fmt: skip


def endpoints() -> list[str]:
    """Returns the routes of the server."""
    from xinfer_jax.serve.service import ADMIN_PATHS

    rows = []
    for path, methods in served_routes().items():
        if path not in _ALIASES:
            key = "admin" if path in ADMIN_PATHS else "none" if path in _open_paths() else "client"
            method = "POST" if "POST" in methods else "GET"
            rows.append([code(path.replace(":path", "")), method, key, ROUTES[path]])
    return table(
        ["path", "method", "key", "response"], sorted(rows, key=lambda row: [*ROUTES].index(_path(row)))
    )


def _path(row: Sequence[str]) -> str:
    return row[0].strip("`").replace("{name}", "{name:path}")


def _open_paths() -> set[str]:
    from xinfer_jax.serve.app import _OPEN_PATHS

    return _OPEN_PATHS


def served_routes() -> dict[str, set[str]]:
    """Returns the methods of each path of a server."""
    from xinfer_jax.serve.app import make_server

    def ignore(*_: Any, **__: Any) -> None:
        """Stands for the methods of a service."""

    limits = dict(max_connections=2, max_connections_per_address=1, trusted_proxies=(), stall_seconds=1.0)
    settings = SimpleNamespace(
        host="127.0.0.1", origins=(), grace=1, max_body_bytes=2**22, adapter_dir=None, weight_dir=None,
        has_own_engines=True, **limits,
    )  # fmt: skip
    service: Any = SimpleNamespace(
        settings=settings, log=ignore, create_completion=ignore, error_response=ignore
    )
    app: Any = make_server(service).config.app
    return {route.path: set(route.methods) for route in app.routes}


def answers() -> list[str]:
    """Returns the fields of bodies that ask for answers.

    Raises:
        AssertionError: a field has no meaning here, or the server does not know it.
    """
    known = {kind: fields._SERVED | fields._OF_KIND[kind] | fields._REASONING for kind in KINDS}
    known |= {kind: known[kind] | _SENT for kind in ("completion", "chat")}
    names = set.union(*known.values()) - SAMPLING
    assert names == {*MEANINGS}, names ^ {*MEANINGS}
    rows = []
    for name, meaning in MEANINGS.items():
        has = ["yes" if name in known[kind] else "—" for kind in KINDS]
        if name in fields._REASONING:
            has[[*KINDS].index("completion")] = "no effect"
        rows.append([code(name), *has, meaning])
    return table(["field", *KINDS.values(), "meaning"], rows)


def without_effect() -> list[str]:
    """Returns the fields that are accepted and change no answer."""
    own = "the OpenAI API and vLLM", sorted(fields._WITHOUT_EFFECT)
    others = "other servers", sorted(other_servers._WITHOUT_EFFECT)
    rows = [[source, ", ".join(map(code, names))] for source, names in (own, others)]
    return table(["field of", "names"], rows)


def not_served() -> list[str]:
    """Returns the fields of the OpenAI API and of vLLM that are known, and are errors."""
    ways = fields._WAYS
    rows = [
        [code(name), _values(values), f"{ways.get(name, 'leave it out')}"]
        for name, values in sorted(fields._NOT_SERVED.items())
        if name not in _SENT  # `stream`: bodies that are sent to a server may ask for it
    ]
    return table(["field", "accepted value", "instead"], rows)


def of_penalties() -> list[str]:
    """Returns the fields that are errors next to a penalty, and each penalty with its neutral value."""
    fields = ", ".join(map(code, sorted(other_servers._OF_PENALTIES)))
    penalties = ", ".join(f"{code(name)} ({off}: off)" for name, off in other_servers._PENALTIES.items())
    return table(["fields", "400 next to"], [[fields, penalties]])


def of_other_servers() -> list[str]:
    """Returns the fields of other servers that are errors, by the remedy."""
    rows = [
        [way, ", ".join(code(name) for name in sorted(names))]
        for way, names in other_servers._INSTEAD.items()
    ]
    return table(["instead", "fields"], sorted(rows))


def responses() -> list[str]:
    """Returns the fields of /v1/responses that chats do not have, or have in another form."""
    module = responses_request
    rows = [[code(name), meaning] for name, meaning in RESPONSES.items()]
    rows += [[code(name), "No effect."] for name in module._WITHOUT_EFFECT]
    for name, (values, way) in module._NOT_SERVED.items():
        accepted = f", except {_values(values)}" if values else ""
        rows.append([code(name), f"400{accepted}: {way}."])
    return table(["field", "meaning"], rows)


def other_endpoints() -> list[str]:
    """Returns the fields of all other bodies."""
    from xinfer_jax.serve import adapter_endpoints, rollout_endpoints, text_endpoints

    rows: list[tuple[str, Iterable[str]]] = [
        ("/v1/embeddings", embedding_body.EMBEDDING_FIELDS),
        ("/rerank", rerank_body.RERANK_FIELDS),
        ("/score", rerank_body.SCORE_FIELDS),
        ("/tokenize", text_endpoints._TOKENIZE_FIELDS | {"tools"}),
        ("/detokenize", {"model", "tokens"}),
        ("/v1/load_lora_adapter", adapter_endpoints._FIELDS),
        ("/v1/unload_lora_adapter", adapter_endpoints._FIELDS),
        ("/update_weights", [f"update_info.{name}" for name in rollout_endpoints._UPDATE_FIELDS]),
    ]
    return table(["path", "fields"], [[code(path), ", ".join(map(code, sorted(of)))] for path, of in rows])


def _values(values: Sequence[Any]) -> str:
    """Returns the values that a field may have although it is not served, as JSON."""
    import json

    return ", ".join(code(json.dumps(value)) for value in values) or "none"
