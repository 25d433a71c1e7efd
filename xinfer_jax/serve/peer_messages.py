"""What the front process and the processes that prefill or decode tell each other about answers."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from ..cli.channel import Channel
from ..engine.endpoint import Progress
from ..engine.messages import decode_message, encode_message
from ..engine.requests import Answer, Switch
from ..engine.submission import TextOptions, make_request
from ..errors import InputError, format_message
from ..grammar.pool import GrammarPool
from ..sampling.logprobs import TokenLogprobs

_ROW_FIELDS = ("priority", "answer_group", "client", "logprobs_from", "share_answers", "hits")


def send_message(channel: Channel, name: str, *args: Any) -> None:
    """Sends a named message with arguments that `engine.messages` can encode."""
    channel.send(message=encode_message([name, *args]).decode())


def received_message(message: dict[str, Any]) -> list[Any]:
    """The name and arguments of what `send_message` sent, of the dict that a channel received."""
    return decode_message(message["message"].encode())


def answer_to_message(answer: Answer) -> dict[str, Any]:
    """What a process needs to make the same answer, with what has been sampled of it."""
    request = answer.request
    call = request.call
    row = answer.row
    adapter = request.adapter.name if request.adapter else None
    options = dataclasses.replace(call.options, stop_strings=tuple(request.stop_strings), impl=None)
    left = request.deadline - time.monotonic()
    return dict(
        ids=list(request.ids), options=options, key=call.key, live=request.live,
        text=dict(
            skip_special_tokens=request.skip_special_tokens, content_after=request.content_after
        ),
        adapter=adapter,
        prompt_logprobs=request.num_prompt_logprobs, processed_logprobs=request.processed_logprobs,
        seconds=None if left == float("inf") else max(left, 0.001), answer=answer.number,
        row={name: getattr(row, name) for name in _ROW_FIELDS}, salt=row.salt.hex(),
        sampled=[answer.sampled, answer.logprobs, answer.processed, answer.alternatives],
        switches=answer.switches,
    )  # fmt: skip


def answer_from_message(fields: dict[str, Any], engine: Any, grammars: GrammarPool) -> Answer:
    """The answer, of a request to this engine; InputError where it cannot answer it."""
    options = fields["options"]
    row_fields = fields["row"]
    if options.grammar is not None:
        grammar = grammars.prepare(row_fields["client"], options.grammar)
        options = dataclasses.replace(options, grammar=grammar)
    what = fields["ids"], options, fields["key"], 0
    request = make_request(engine, *what, TextOptions(**fields["text"]), fields["adapter"])
    request.live = fields["live"]
    request.num_prompt_logprobs = fields["prompt_logprobs"]
    request.processed_logprobs = fields["processed_logprobs"]
    if fields["seconds"] is not None:
        request.deadline = request.submitted + fields["seconds"]
    answer = request.answers[fields["answer"]]
    answer.row = dataclasses.replace(answer.row, salt=bytes.fromhex(fields["salt"]), **row_fields)
    (answer.sampled, answer.logprobs, answer.processed, alternatives) = fields["sampled"]
    answer.alternatives = _logprobs(alternatives)
    answer.switches = [Switch(*switch) for switch in fields["switches"]]
    return answer


def progress_to_message(new: Progress) -> list[Any]:
    """The fields of `Progress`; an error as text."""
    error = new.error and (format_message(new.error) or type(new.error).__name__)
    return [*new._replace(error=None)[:-1], error]


def progress_from_message(fields: Sequence[Any]) -> Progress:
    """What another process has sent."""
    new = Progress(*fields)
    error = None if new.error is None else InputError(str(new.error))
    of_prompt = _logprobs(new.prompt_logprobs)
    return new._replace(alternatives=_logprobs(new.alternatives), prompt_logprobs=of_prompt, error=error)


def _logprobs(each: Sequence[Any]) -> list[TokenLogprobs]:
    found = []
    for token, logprob, processed, *tops in each:
        pairs = [[(i, x) for i, x in alternatives] for alternatives in tops]
        found.append(TokenLogprobs(token, logprob, processed, *pairs))
    return found
