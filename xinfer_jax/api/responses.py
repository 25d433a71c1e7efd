"""Builds the OpenAI API's response from finished requests."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..generation.options import GenerateOutput
from ..sampling.logprobs import TokenLogprobs
from ..sampling.sampling_config import min_tokens_of_row
from ..tokenization.answer_detokenizer import AnswerDetokenizer
from ..tokenization.detokenizer import IncrementalDetokenizer
from ..tokenization.template_splitter import TemplateSplitter
from ..tokenization.tokenizer import Tokenizer
from ..tool_calls.answer_parser import AnswerParser
from ..tool_calls.tool_messages import parameter_schemas
from .bodies import ParsedBody
from .routed_experts import encode_routed_experts

_LOWEST = -9999.0  # stands for minus infinity, which JSON lacks


class TokenTextDecoder:
    """Decodes the tokens of one answer one by one, and finds the place at which each begins in the answer's
    text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        """Makes a decoder. skip_special_tokens: True: the answer's text leaves special tokens out. `text`
        returns their texts all the same.
        """
        self.tokenizer = tokenizer
        self._offset = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)

    def text(self, token: int) -> str:
        """Returns the text of a token as the next one of the answer. A part of a character is U+FFFD.

        At the start of the text it has no leading space, which SentencePiece puts before the first word.
        """
        if self._offset:
            return self.tokenizer.token_text(token)
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def push(self, token: int) -> int:
        """Appends the next token, and returns the offset at which its text begins."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token))
        return offset


def prompt_text(
    tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool
) -> str:
    """Returns the text of an echoed prompt, with the space before the answer's tokens, whose own text lacks
    it.
    """
    if tokenizer is None:
        return ""
    text = tokenizer.decode(prompt, skip_special_tokens)
    if not text or not tokens:
        return text
    first = tokenizer.decode(tokens[:1], skip_special_tokens)
    after_others = tokenizer.token_text(tokens[0])
    space = after_others.removesuffix(first) if after_others.endswith(first) else ""
    return text + (space if space.isspace() else "")


def response_body(
    parsed: ParsedBody,
    outs: Sequence[GenerateOutput],
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]],
    tokenizer: Tokenizer | None,
    **head: Any,
) -> dict[str, Any]:
    """Returns the body of a whole response. It takes the arguments of `response_choices`. head: id, created,
    model.
    """
    choices = []
    for choice, entries in response_choices(parsed, outs, prompt_logprobs, tokenizer):
        if parsed.logprobs is not None and tokenizer:
            texts = TokenTextDecoder(tokenizer, parsed.request_options.skip_special_tokens)
            choice["logprobs"] = format_logprobs(texts, parsed, entries)
        choices.append(choice)
    rows = (row for out in outs for row in out.logprobs)
    return dict(head, object=response_object(parsed), choices=choices, usage=usage(parsed, rows))


def response_object(parsed: ParsedBody) -> str:
    """Returns the value of `object` in a whole response."""
    return "chat.completion" if parsed.kind == "chat" else "text_completion"


def response_choices(
    parsed: ParsedBody,
    outs: Sequence[GenerateOutput],
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]],
    tokenizer: Tokenizer | None,
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Yields each choice without its log-probabilities, and the entries of `format_logprobs` for these.

    Args:
        parsed: the request's body.
        outs: the output of each prompt.
        prompt_logprobs: log-probabilities of each prompt's tokens except the first, if the prompt is echoed.
        tokenizer: the tokenizer. None: the checkpoint has none, and answers are token ids.
    """
    index = 0
    for prompt, out, of_prompt in zip(parsed.prompts, outs, prompt_logprobs, strict=True):
        for j, (tokens, reason) in enumerate(zip(out.tokens, out.finish_reason, strict=True)):
            of_answer = out.alternatives[j] if out.alternatives is not None else []
            if not parsed.max_tokens:
                tokens = []
                of_answer = []
                reason = "length"
            with_text = out.text_ids(j) if tokens else []
            text = answer_text(tokenizer, with_text, parsed) if tokenizer else None
            choice: dict[str, Any] = dict(index=index, finish_reason=reason)
            if parsed.kind == "chat":
                parser = answer_parser(parsed, index)
                answer = parser.parse(text or "")
                reasoning = answer.reasoning if parsed.include_reasoning else None
                choice["message"] = dataclasses.replace(answer, reasoning=reasoning).to_message()
                choice["finish_reason"] = chat_finish_reason(reason, parser)
            else:
                special = parsed.request_options.skip_special_tokens
                before = prompt_text(tokenizer, prompt, with_text, special) if parsed.echo else ""
                choice["text"] = text if text is None and not before else before + (text or "")
            if parsed.return_token_ids or not tokenizer:
                choice["token_ids"] = tokens
            if parsed.routed_experts_start is not None and out.routed_experts is not None:
                choice["routed_experts"] = encode_routed_experts(
                    out.routed_experts[j], parsed.routed_experts_start
                )
            yield choice, [*echo_entries(prompt, of_prompt), *of_answer] if parsed.echo else of_answer
            index += 1


def usage(parsed: ParsedBody, rows: Iterable[Sequence[float]]) -> dict[str, Any]:
    """Counts the tokens of prompts and answers, EOS included. rows: the log-probabilities of each answer."""
    prompt_tokens = sum(map(len, parsed.prompts))
    return usage_counts(prompt_tokens, sum(map(len, rows)) if parsed.max_tokens else 0)


def usage_counts(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Returns the counts of `usage`."""
    total = prompt_tokens + new_tokens
    return dict(prompt_tokens=prompt_tokens, completion_tokens=new_tokens, total_tokens=total)


def draft_details(drafted: int, accepted: int) -> dict[str, int]:
    """Returns the counts of draft tokens in `completion_tokens_details`, in OpenAI's names."""
    return dict(accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted)


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int], parsed: ParsedBody) -> str:
    """Returns the text of an answer up to its end or its first stop string."""
    detokenizer = answer_detokenizer(tokenizer, parsed)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()


def answer_parser(parsed: ParsedBody, index: int) -> AnswerParser:
    """Returns a new parser for the answer of a chat. index: the index of its choice."""
    tools = parsed.tools

    def new_id(call: int) -> str:
        return f"{parsed.call_prefix}_{index}_{call}"

    most_calls = tools.most_calls if tools else None
    splitter = None
    if parsed.template is not None:
        parameters = parameter_schemas(tools.tools) if tools else {}
        splitter = TemplateSplitter(*parsed.template, parameters, most_calls, new_id)
    return AnswerParser(
        [tools.format] if tools and tools.format else [],
        tools.tools if tools else None,
        in_reasoning=parsed.in_reasoning,
        most_calls=most_calls,
        new_id=new_id,
        harmony_header=parsed.harmony_header,
        splitter=splitter,
    )


def chat_finish_reason(reason: str, parser: AnswerParser) -> str:
    """Returns the finish reason in a chat, in which an answer that stopped may have calls. parser: the
    parser, which has read the whole answer.
    """
    return "tool_calls" if reason == "stop" and parser.has_calls else reason


def answer_detokenizer(tokenizer: Tokenizer, parsed: ParsedBody) -> AnswerDetokenizer:
    """Returns a new detokenizer for one answer."""
    return AnswerDetokenizer(
        tokenizer,
        parsed.options.stop_strings,
        parsed.include_stop,
        parsed.request_options.skip_special_tokens and parsed.template is None,
        parsed.harmony_header is not None,
        min_tokens_of_row(parsed.options.sampling),
        parsed.request_options.content_after,
    )


def format_logprobs(texts: TokenTextDecoder, parsed: ParsedBody, entries: Sequence[Any]) -> dict[str, Any]:
    """Returns log-probabilities in the form of chat or of completions. entries: the entries of the next
    tokens, which are pushed to `texts`: `TokenLogprobs`, or an id without log-probabilities.
    """
    form = _chat_logprobs if parsed.kind == "chat" else _completion_logprobs
    return form(texts, entries, parsed.logprobs or 0)


def json_logprob(logprob: float) -> float:
    """Returns the value, or -9999.0 for infinity and NaN, which JSON lacks."""
    return logprob if math.isfinite(logprob) else _LOWEST


def echo_entries(
    prompt: Sequence[int], prompt_logprobs: Sequence[TokenLogprobs]
) -> list[TokenLogprobs | int]:
    """Returns the entries of an echoed prompt. Its first token has no log-probabilities: its entry is the
    id.
    """
    return [prompt[0], *prompt_logprobs]


def _completion_logprobs(
    texts: TokenTextDecoder, entries: Sequence[TokenLogprobs | int], top: int
) -> dict[str, Any]:
    """Returns the form of completions. The token itself is among the top ones. Of two ids with one text, the
    more likely one is returned.
    """
    tokens = []
    logprobs = list[float | None]()
    top_logprobs = list[dict[str, float] | None]()
    offsets = []
    for t in entries:
        own, pairs = (t, []) if isinstance(t, int) else (t.id, _with_own(t, top))
        ids = [own, *(token for token, _ in pairs[1:])]
        words = [texts.text(token) for token in ids]
        if len({*words}) < len(words):  # at the start of a text, a word with and without its leading space
            words = [texts.tokenizer.token_text(token) for token in ids]
        best: dict[str, float] = {}
        for word, (_, logprob) in zip(words, pairs, strict=False):
            best[word] = max(best.get(word, _LOWEST), json_logprob(logprob))
        tokens.append(words[0])
        logprobs.append(None if isinstance(t, int) else json_logprob(t.logprob))
        top_logprobs.append(None if isinstance(t, int) else best)
        offsets.append(texts.push(own))
    return dict(tokens=tokens, token_logprobs=logprobs, top_logprobs=top_logprobs, text_offset=offsets)


def _with_own(t: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """Returns the token itself with its own value, then the others of its `top` most likely ones."""
    return [(t.id, t.logprob), *((token, logprob) for token, logprob in t.top[:top] if token != t.id)]


def _chat_logprobs(texts: TokenTextDecoder, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = texts.text(token)
        found = texts.tokenizer.token_bytes(token) if "\ufffd" in text else text.encode()
        return dict(token=text, bytes=None if found is None else list(found), logprob=json_logprob(logprob))

    content = []
    for t in entries:
        best = [entry(i, t.logprob if i == t.id else p) for i, p in t.top[:top]]
        content.append(entry(t.id, t.logprob) | dict(top_logprobs=best))
        texts.push(t.id)
    return dict(content=content)
