"""How likely given texts are: what a body asks for, and what is shown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.loading import Model
from ..checks import token_ids
from ..errors import InputError, shown
from ..sampling.logprobs import TokenLogprobs
from ..text import encode_prompt
from .responses import finite

_FIELDS = {"prompt", "completions", "text", "add_special_tokens"}


def read_texts(model: Model, body: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Of each text the ids that stand before it, and all: of {"prompt", "completions"} each completion
    behind the prompt, encoded together and cut where the prompt alone ends (spaces at its end belong to the
    completion, as lm-eval has it), which may be empty; of {"text"} the one.

    Raises:
        InputError: another body, or one with nothing to score.
    """
    body = {name: value for name, value in body.items() if value is not None}
    if {*body} - _FIELDS or ("text" in body) == ("prompt" in body or "completions" in body):
        raise InputError('a line to score has "prompt" and "completions", or "text"')
    if "text" not in body:
        return _pairs(model, body)
    if len(ids := _ids(model, body["text"], body)) < 2:
        raise InputError(f"there is nothing to score in a text of {len(ids)} token: give a longer one")
    return [([], ids)]


def shown_scores(body: Mapping[str, Any], noted: Sequence[Sequence[TokenLogprobs]]) -> dict[str, Any]:
    """The sum of each text's log-probabilities, its tokens, and whether each was the likeliest; of a
    completion without tokens 0, 0 and true.
    """
    scores = [
        dict(
            logprob=finite(math.fsum(t.logprob for t in tokens)), tokens=len(tokens),
            greedy=all(t.id == t.top[0][0] for t in tokens),
        )
        for tokens in noted
    ]  # fmt: skip
    return scores[0] if body.get("text") is not None else dict(completions=scores)


def _pairs(model: Model, body: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    prompt = body.get("prompt")
    completions = body.get("completions")
    if not isinstance(completions, list) or not completions:
        raise InputError(f"completions must be a list that is not empty, got {shown(completions)}")
    if isinstance(prompt, list) and prompt:
        context = _ids(model, prompt, body)
        return [(context, context + _ids(model, one, body)) for one in completions]
    if not isinstance(prompt, str) or not all(isinstance(one, str) for one in completions):
        raise InputError("prompt and completions are all texts, or all lists of ids; no prompt is empty")
    context = _ids(model, prompt.rstrip() or prompt, body)
    cut = len(context)
    behind = [_ids(model, prompt + one, body)[cut:] if one else [] for one in completions]
    return [(context, context + ids) for ids in behind]


def _ids(model: Model, text: Any, body: Mapping[str, Any]) -> list[int]:
    if isinstance(text, list):
        return token_ids("a list", text, model.config.vocab_size)
    if not isinstance(text, str):
        raise InputError(f"what is scored is a text or a list of token ids, got {shown(text)}")
    special = body.get("add_special_tokens", True) is True
    return encode_prompt(model, text, raw=True, add_special_tokens=special)
