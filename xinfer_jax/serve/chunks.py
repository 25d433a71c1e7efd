"""The chunks of a streamed response, each with the new part of an answer."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ..api.bodies import ParsedBody
from ..api.responses import (
    TokenTextDecoder,
    answer_detokenizer,
    answer_parser,
    chat_finish_reason,
    echo_entries,
    format_logprobs,
    prompt_text,
    usage_counts,
)
from ..engine.answers import Answer
from ..engine.requests import Request, request_updates
from ..tokenization.tokenizer import Tokenizer
from ..tool_calls.answer_parser import AnswerDelta, reasoning_fields
from .http_responses import APIError
from .json_encoding import distinct

_QUIET_SECONDS = 5.0  # after which a comment keeps the connection open, for the client and for proxies
_SLICE = 64  # tokens of a chunk at most, so that formatting it takes a bounded time


class ChoiceStream:
    """One choice of a streamed response: formats the new part of one answer."""

    def __init__(self, index: int, answer: Answer, parsed: ParsedBody, tokenizer: Tokenizer):
        self._index = index
        self.answer = answer
        self._parsed = parsed
        self._tokenizer = tokenizer
        self._detokenizer = answer_detokenizer(tokenizer, parsed)
        self._parser = answer_parser(parsed, index)
        self._texts = TokenTextDecoder(tokenizer, parsed.request_options.skip_special_tokens)
        self._num_tokens = 0  # sent so far
        self._num_logprobs = 0  # sent so far, with those of an echoed prompt
        self._echo: list[Any] | None = None  # the entries of these; None: nothing is sent yet
        self.ended = False

    @property
    def has_update(self) -> bool:
        """Returns True if `next_choice` may return something. This check is much faster."""
        answer = self.answer
        return not self.ended and (answer.ended_by is not None or answer.num_text_ids > self._num_tokens)

    @property
    def num_sampled(self) -> int:
        """The tokens of the usage so far: tokens that were sent and, at the end, the EOS too."""
        if not self._parsed.max_tokens:
            return 0
        return len(self.answer.logprobs) if self.ended else self._num_tokens

    def next_choice(self) -> tuple[dict[str, Any] | None, bool]:
        """Returns the choice of the next chunk, or None if nothing is new, and True if there is more
        already.
        """
        answer = self.answer
        request = answer.request
        parsed = self._parsed
        # Read before the tokens: the engine's thread may append tokens, then end the answer.
        over = answer.ended_by is not None
        most = answer.num_text_ids
        new = answer.tokens[self._num_tokens : min(self._num_tokens + _SLICE, most)]
        self._num_tokens += len(new)
        sent_all = over and self._num_tokens >= most
        new = new if parsed.max_tokens else []
        text = ""
        if self._echo is None:
            self._echo = echo_entries(request.ids, request.prompt_logprobs) if parsed.echo else []
            if parsed.echo:
                text = prompt_text(
                    self._tokenizer, request.ids, new, parsed.request_options.skip_special_tokens
                )
        entries, no_more_entries = self._next_entries(self._echo, over)
        self.ended = ended = sent_all and no_more_entries
        text += "".join(map(self._detokenizer.push, new))
        if ended:
            text += self._detokenizer.finish()
        more = not ended and (len(new) == _SLICE or over or not no_more_entries)
        if not (text or ended or entries or (new and parsed.return_token_ids)):
            return None, more
        choice = self._format(text, new, entries, ended)
        is_empty = choice.get("delta") == {} and not (ended or entries or parsed.return_token_ids)
        return None if is_empty else choice, more

    def _next_entries(self, echo: list[Any], over: bool) -> tuple[list[Any], bool]:
        """Returns the next entries with log-probabilities, and True if no more are known."""
        if self._parsed.logprobs is None:
            return [], True
        of_answer = self.answer.alternatives if self._parsed.max_tokens else []
        known = len(echo) + (len(of_answer) if over else min(self._num_tokens, len(of_answer)))
        begin = self._num_logprobs
        end = self._num_logprobs = min(known, begin + _SLICE)
        first = max(0, begin - len(echo))
        return [*echo[begin:end], *of_answer[first : max(0, end - len(echo))]], end == known

    def _format(self, text: str, new: list[int], entries: list[Any], ended: bool) -> dict[str, Any]:
        reason = (self.answer.finish_reason or "") if self._parsed.max_tokens else "length"
        choice: dict[str, Any] = dict(index=self._index)
        choice["finish_reason"] = reason if ended else None
        if self._parsed.kind == "chat":
            delta = self._parser.push(text, ended)
            reasoning = delta.reasoning if self._parsed.include_reasoning else ""
            choice["delta"] = _delta_fields(dataclasses.replace(delta, reasoning=reasoning))
            if ended:
                choice["finish_reason"] = chat_finish_reason(choice["finish_reason"], self._parser)
        else:
            choice["text"] = text
        if self._parsed.logprobs is not None:
            choice["logprobs"] = format_logprobs(self._texts, self._parsed, entries)
        if self._parsed.return_token_ids:
            is_last = ended and self._parsed.max_tokens
            choice["token_ids"] = new + (self.answer.tokens[self._num_tokens :] if is_last else [])
        if ended:
            choice["weight_versions"] = distinct(self.answer.token_versions)
        return choice


def _delta_fields(delta: AnswerDelta) -> dict[str, Any]:
    """Returns the fields of a chunk's delta that are not empty."""
    fields: dict[str, Any] = reasoning_fields(delta.reasoning) if delta.reasoning else {}
    if delta.content:
        fields["content"] = delta.content
    for call in delta.tool_calls:
        found: dict[str, Any] = dict(index=call.index, function=dict(arguments=call.arguments))
        if call.id is not None:
            found = dict(id=call.id, type="function") | found
            found["function"]["name"] = call.name
        fields.setdefault("tool_calls", []).append(found)
    return fields


async def stream_chunks(
    parsed: ParsedBody,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    usage: Callable[[], dict[str, Any]] | None,
    head: dict[str, Any],
    continuous_usage: bool = False,
) -> AsyncIterator[dict[str, Any] | None]:
    """Yields the chunks of a stream, and None whenever nothing is new for a while.

    Args:
        requests: the engine request of each prompt.
        usage: called at the end, for a last chunk with the usage. None: no such chunk.
        head: id, created, model, seed.
        continuous_usage: each chunk has the usage so far: all tokens that were sent.
    """
    chat = parsed.kind == "chat"
    head = dict(head, object="chat.completion.chunk" if chat else "text_completion")
    answers = [answer for request in requests for answer in request.answers]
    streams = [ChoiceStream(i, answer, parsed, tokenizer) for i, answer in enumerate(answers)]
    async for choice, num_tokens in _choices(streams, requests, chat):
        chunk = None if choice is None else dict(head, choices=[choice])
        if chunk is not None and continuous_usage:
            chunk["usage"] = usage_counts(sum(map(len, parsed.prompts)), num_tokens)
        yield chunk
    if usage is not None:
        yield dict(head, choices=[], usage=usage())


async def _choices(
    streams: list[ChoiceStream], requests: Sequence[Request], chat: bool
) -> AsyncIterator[tuple[dict[str, Any] | None, int]]:
    """Yields the choices of the chunks, each with the number of tokens that have been sent."""
    for index in range(len(streams) if chat else 0):
        yield dict(index=index, finish_reason=None, delta=dict(role="assistant", content="")), 0
    num_tokens = 0
    async for updated in request_updates(requests, _QUIET_SECONDS):
        if not updated:
            yield None, num_tokens
        for stream in [stream for stream in streams if stream.has_update]:
            more = True
            while more:
                check_answer(stream.answer)
                num_tokens -= stream.num_sampled
                choice, more = stream.next_choice()
                num_tokens += stream.num_sampled
                if choice:
                    yield choice, num_tokens
                    await asyncio.sleep(0)  # lets other tasks run: there may be a thousand answers
        streams = [stream for stream in streams if not stream.ended]
        if not streams:
            return


def check_answer(answer: Answer) -> None:
    """Raises the error that ended an answer. Raises APIError if the deadline passed before it had a token."""
    answer.request.raise_error()
    if answer.ended_by == "deadline" and not answer.logprobs:
        raise APIError(503, "the server's deadline passed before the answer had a token: try again later")
