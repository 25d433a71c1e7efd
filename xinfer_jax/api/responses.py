"""What a response shows of finished requests, in the OpenAI API's words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..checkpoint.tokenizer import Tokenizer
from ..generation.options import GenerateOutput
from ..sampling.logprobs import TokenLogprobs
from ..text import Said
from .bodies import Asked
from .token_texts import TokenTexts, prompt_text

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "deadline": "length"}
THINK = "<think>"
THOUGHT = "</think>"
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
    chat = asked.kind == "chat"
    choices = list[dict[str, Any]]()
    for prompt, out, of_prompt in zip(asked.prompts, outs, noted, strict=True):
        for j, (tokens, reason) in enumerate(zip(out.tokens, out.finish_reason, strict=True)):
            chosen = out.alternatives[j] if out.alternatives is not None else []
            if not asked.max_tokens:
                tokens = []
                chosen = []
                reason = "length"
            text = answer_text(tokenizer, tokens, asked) if tokenizer else None
            choice: dict[str, Any] = dict(index=len(choices), finish_reason=REASONS.get(reason, reason))
            if chat:
                thoughts, said = split_thoughts(text or "", opened)
                found = dict(content=said) | ({} if thoughts is None else dict(reasoning_content=thoughts))
                choice["message"] = dict(role="assistant", **found)
            else:
                special = asked.skip_special_tokens
                before = prompt_text(tokenizer, prompt, tokens, special) if asked.echo else ""
                choice["text"] = text if text is None and not before else before + (text or "")
            if asked.logprobs is not None and tokenizer:
                known = [*echoed(prompt, of_prompt), *chosen] if asked.echo else chosen
                texts = TokenTexts(tokenizer, asked.skip_special_tokens)
                choice["logprobs"] = shown_logprobs(texts, asked, known)
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


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int], asked: Asked) -> str:
    """An answer's text, up to the first stop string, or up to its end."""
    said = said_of(tokenizer, asked)
    return "".join(map(said.push, tokens)) + said.finish()


def said_of(tokenizer: Tokenizer, asked: Asked) -> Said:
    """The text of one answer, to be given its tokens."""
    return Said(tokenizer, asked.options.stop_strings, asked.include_stop, asked.skip_special_tokens)


def shown_logprobs(texts: TokenTexts, asked: Asked, known: Sequence[Any]) -> dict[str, Any]:
    """The log-probabilities of an answer's next tokens, in the form of chat or completions. texts: of the
    answer, which takes them.
    """
    if asked.kind == "chat":
        return _chat_logprobs(texts, known, asked.logprobs or 0)
    return _completion_logprobs(texts, known, asked.logprobs or 0)


def split_thoughts(text: str, opened: bool) -> tuple[str | None, str | None]:
    """What a whole answer thinks between <think> and </think>, and what it says; None: nothing."""
    begun = text if opened else text.lstrip()
    if not opened and not begun.startswith(THINK):
        return None, text
    thoughts, mark, said = (begun if opened else begun[len(THINK) :]).partition(THOUGHT)
    return thoughts.removeprefix("\n"), said.lstrip("\n") if mark else None


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return logprob if math.isfinite(logprob) else _LEAST


def echoed(prompt: Sequence[int], noted: Sequence[TokenLogprobs]) -> list[TokenLogprobs | int]:
    """The prompt's tokens; of the first the model says nothing."""
    return [prompt[0], *noted]


def _completion_logprobs(texts: TokenTexts, known: Sequence[TokenLogprobs | int], top: int) -> dict[str, Any]:
    """Each token's own number is among those of the likeliest; of two ids with one text the larger stands."""
    shown = []
    values = list[float | None]()
    likeliest = list[dict[str, float] | None]()
    offsets = []
    for t in known:
        own, pairs = (t, []) if isinstance(t, int) else (t.id, _with_own(t, top))
        ids = [own, *(token for token, _ in pairs[1:])]
        words = [texts.text(token) for token in ids]
        if len({*words}) < len(words):  # where a text begins, a word with its blank and without
            words = [texts.tokenizer.token_text(token) for token in ids]
        best: dict[str, float] = {}
        for word, (_, logprob) in zip(words, pairs, strict=False):
            best[word] = max(best.get(word, _LEAST), finite(logprob))
        shown.append(words[0])
        values.append(None if isinstance(t, int) else finite(t.logprob))
        likeliest.append(None if isinstance(t, int) else best)
        offsets.append(texts.push(own))
    return dict(tokens=shown, token_logprobs=values, top_logprobs=likeliest, text_offset=offsets)


def _with_own(t: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The token itself with its own number, and the likeliest."""
    return [(t.id, t.logprob), *((token, logprob) for token, logprob in t.top[:top] if token != t.id)]


def _chat_logprobs(texts: TokenTexts, known: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = texts.text(token)
        found = texts.tokenizer.token_bytes(token) if "\ufffd" in text else text.encode()
        return dict(token=text, bytes=None if found is None else list(found), logprob=finite(logprob))

    content = []
    for t in known:
        best = [entry(i, t.logprob if i == t.id else p) for i, p in t.top[:top]]
        content.append(entry(t.id, t.logprob) | dict(top_logprobs=best))
        texts.push(t.id)
    return dict(content=content)
