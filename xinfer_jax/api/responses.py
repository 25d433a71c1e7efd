"""What a response shows of finished requests, in the OpenAI API's words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..checkpoint.tokenizer import Tokenizer
from ..generation.options import GenerateOutput
from ..sampling.logprobs import TokenLogprobs
from ..text import Said
from .bodies import Asked

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "deadline": "length"}
_THINK, _THOUGHT = "<think>", "</think>"
_LEAST = -9999.0  # in place of minus infinity, which JSON lacks


def response(
    asked: Asked,
    outs: Sequence[GenerateOutput],
    noted: Sequence[Sequence[TokenLogprobs]],
    tokenizer: Tokenizer | None,
    opened: bool = False,
    **head: Any,
) -> dict[str, Any]:
    """The whole body.

    Args:
        asked: what was asked for.
        outs: of each prompt.
        noted: what the model says of each prompt's tokens but the first, where they are echoed.
        tokenizer: None: a checkpoint without one, whose answers are ids.
        opened: the chat template has begun a thought for the answer.
        head: id, created, model.
    """
    chat, choices = asked.kind == "chat", list[dict[str, Any]]()
    for prompt, out, of_prompt in zip(asked.prompts, outs, noted, strict=True):
        for j, (tokens, reason) in enumerate(zip(out.tokens, out.finish_reason, strict=True)):
            chosen = out.alternatives[j] if out.alternatives is not None else []
            if not asked.max_tokens:
                tokens, chosen, reason = [], [], "length"
            text = answer_text(tokenizer, tokens, asked.options.stop_strings) if tokenizer else None
            choice: dict[str, Any] = dict(index=len(choices), finish_reason=REASONS.get(reason, reason))
            if chat:
                thoughts, said = split_thoughts(text or "", opened)
                found = dict(content=said) | ({} if thoughts is None else dict(reasoning_content=thoughts))
                choice["message"] = dict(role="assistant", **found)
            else:
                choice["text"] = prompt_text(tokenizer, prompt) + (text or "") if asked.echo else text
            if asked.logprobs is not None and tokenizer:
                known = [*echoed(prompt, of_prompt), *chosen] if asked.echo else chosen
                choice["logprobs"] = shown_logprobs(tokenizer, asked, known)
            if asked.token_ids or not tokenizer:
                choice["token_ids"] = tokens
            choices.append(choice)
    kind = "chat.completion" if chat else "text_completion"
    return dict(
        head, object=kind, choices=choices, usage=usage(asked, (row for out in outs for row in out.logprobs))
    )


def usage(asked: Asked, rows: Iterable[Sequence[float]]) -> dict[str, Any]:
    """Tokens read and chosen, the one that ends an answer too. rows: the log-probabilities of each answer."""
    read = sum(map(len, asked.prompts))
    chosen = sum(map(len, rows)) if asked.max_tokens else 0
    return dict(prompt_tokens=read, completion_tokens=chosen, total_tokens=read + chosen)


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> str:
    """An answer's text, up to the first stop string."""
    said = Said(tokenizer, stops)
    return "".join(map(said.push, tokens)) + said.finish()


def shown_logprobs(tokenizer: Tokenizer, asked: Asked, known: Sequence[Any], at: int = 0) -> dict[str, Any]:
    """The log-probabilities of some tokens, in the form of chat or completions. at: where the texts begin."""
    if asked.kind == "chat":
        return _chat_logprobs(tokenizer, known, asked.logprobs or 0)
    return _completion_logprobs(tokenizer, known, asked.logprobs or 0, at)


def split_thoughts(text: str, opened: bool, ended: bool = True) -> tuple[str | None, str | None]:
    """What an answer thinks between <think> and </think>, and what it says; None: not, or not yet. Of an
    answer that goes on what may be the beginning of a mark is held back.
    """
    begun = text if opened else text.lstrip()
    if not opened and not begun.startswith(_THINK):
        return (None, text) if ended or not _THINK.startswith(begun) else (None, None)
    thoughts, mark, said = (begun if opened else begun[len(_THINK) :]).partition(_THOUGHT)
    if not mark and not ended:
        held = next((n for n in range(len(_THOUGHT) - 1, 0, -1) if thoughts.endswith(_THOUGHT[:n])), 0)
        thoughts = thoughts[: len(thoughts) - held]
    return thoughts.removeprefix("\n"), said.lstrip("\n") if mark else None


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return logprob if math.isfinite(logprob) else _LEAST


def prompt_text(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> str:
    return tokenizer.decode(prompt) if tokenizer else ""


def echoed(prompt: Sequence[int], noted: Sequence[TokenLogprobs]) -> list[TokenLogprobs | int]:
    """The prompt's tokens; of the first the model says nothing."""
    return [prompt[0], *noted]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone; a part of a character is U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False)


def _completion_logprobs(
    tokenizer: Tokenizer, known: Sequence[TokenLogprobs | int], top: int, at: int
) -> dict[str, Any]:
    """Each token's own number is among those of the likeliest; of two ids with one text the larger stands."""
    texts, values, likeliest, offsets = [], list[float | None](), list[dict[str, float] | None](), []
    for t in known:
        text = token_text(tokenizer, t if isinstance(t, int) else t.id)
        texts.append(text)
        offsets.append(at)
        at += len(text)
        if isinstance(t, int):
            values.append(None)
            likeliest.append(None)
            continue
        values.append(finite(t.logprob))
        best: dict[str, float] = {}
        for token, logprob in _with_own(t, top):
            word = text if token == t.id else token_text(tokenizer, token)
            best[word] = max(best.get(word, _LEAST), finite(logprob))
        likeliest.append(best)
    return dict(tokens=texts, token_logprobs=values, top_logprobs=likeliest, text_offset=offsets)


def _with_own(t: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The likeliest, and the token itself with its own number."""
    return [(t.id, t.logprob), *((token, logprob) for token, logprob in t.top[:top] if token != t.id)]


def _chat_logprobs(tokenizer: Tokenizer, known: Sequence[Any], top: int) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        whole = None if "\ufffd" in text else list(text.encode())
        return dict(token=text, bytes=whole, logprob=finite(logprob))

    tokens = [
        entry(t.id, t.logprob)
        | dict(top_logprobs=[entry(i, t.logprob if i == t.id else p) for i, p in t.top[:top]])
        for t in known
    ]
    return dict(content=tokens)
