"""Bodies that score given texts: parsed, and answered with log-probabilities."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.loading import Model
from ..checks import check_token_ids
from ..errors import InputError, format_value
from ..sampling.logprobs import TokenLogprobs
from ..text import encode_prompt
from .responses import json_logprob

_FIELDS = {"prompt", "completions", "text", "add_special_tokens"}


def parse_score_body(model: Model, body: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Returns for each text the ids of its context, which are not scored, and the ids of context and text.

    - {"prompt", "completions"} has a text for each completion. It is encoded together with the prompt, and
      split at the end of the prompt alone. Spaces at the prompt's end belong to the completion, as in
      lm-eval, and a completion may be empty.
    - {"text"} is one text without context.
    """
    body = {name: value for name, value in body.items() if value is not None}
    if {*body} - _FIELDS or ("text" in body) == ("prompt" in body or "completions" in body):
        raise InputError('a line to score has "prompt" and "completions", or "text"')
    if "text" not in body:
        return _encode_completions(model, body)
    ids = _encode(model, body["text"], body)
    if len(ids) < 2:
        raise InputError(f"there is nothing to score in a text of {len(ids)} token: give a longer one")
    return [([], ids)]


def format_scores(body: Mapping[str, Any], logprobs: Sequence[Sequence[TokenLogprobs]]) -> dict[str, Any]:
    """Returns the answer: each text's summed log-probability, its tokens, and, for each token, True if it was
    the most likely.

    A completion without tokens has 0, 0 and true.
    """
    scores = []
    for tokens in logprobs:
        total = json_logprob(math.fsum(t.logprob for t in tokens))
        greedy = all(t.id == t.top[0][0] for t in tokens)
        scores.append(dict(logprob=total, tokens=len(tokens), greedy=greedy))
    return scores[0] if body.get("text") is not None else dict(completions=scores)


def _encode_completions(model: Model, body: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    prompt = body.get("prompt")
    completions = body.get("completions")
    if not isinstance(completions, list) or not completions:
        raise InputError(f"completions must be a list that is not empty, got {format_value(completions)}")
    if isinstance(prompt, list) and prompt:
        context = _encode(model, prompt, body)
        return [(context, context + _encode(model, one, body)) for one in completions]
    if not isinstance(prompt, str) or not all(isinstance(one, str) for one in completions):
        raise InputError("prompt and completions must be all texts or all lists of ids; no prompt is empty")
    context = _encode(model, prompt.rstrip() or prompt, body)
    start = len(context)
    of_completions = [_encode(model, prompt + one, body)[start:] if one else [] for one in completions]
    return [(context, context + ids) for ids in of_completions]


def _encode(model: Model, text: Any, body: Mapping[str, Any]) -> list[int]:
    if isinstance(text, list):
        return check_token_ids("a list", text, model.config.vocab_size)
    if not isinstance(text, str):
        raise InputError(f"only a text or a list of token ids can be scored, got {format_value(text)}")
    special = body.get("add_special_tokens", True) is True
    return encode_prompt(model, text, raw=True, add_special_tokens=special)
