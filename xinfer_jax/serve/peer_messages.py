"""What the front process and the processes that prefill or decode tell each other about answers."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from ..cli.channel import Channel
from ..engine.answers import Answer, Progress
from ..engine.messages import decode_message, encode_message
from ..engine.submission import make_requests
from ..errors import InputError, format_message
from ..grammar.pool import GrammarPool
from ..sampling.logprobs import TokenLogprobs


def send_message(channel: Channel, name: str, *args: Any) -> None:
    """Sends a named message with arguments that `engine.messages` can encode."""
    channel.send(message=encode_message([name, *args]).decode())


def received_message(message: dict[str, Any]) -> list[Any]:
    """The name and arguments of what `send_message` sent, of the dict that a channel received."""
    return decode_message(message["message"].encode())


def answer_to_message(answer: Answer) -> list[Any]:
    """What a process needs to make the same answer, with what has been sampled of it."""
    request = answer.request
    call = request.call
    left = request.deadline - time.monotonic()
    deadline = None if left == float("inf") else max(left, 0.001)
    asked = dataclasses.replace(request.request_options, deadline=deadline, received=None)
    options = dataclasses.replace(call.options, impl=None)
    return [answer.number, request.ids, options, call.key, asked, progress_to_message(answer.progress())]


def answer_from_message(fields: Sequence[Any], engine: Any, grammars: GrammarPool) -> Answer:
    """The answer, of a request to this engine; InputError where it cannot answer it."""
    number, ids, options, key, asked, progress = fields
    if options.grammar is not None:
        options = dataclasses.replace(options, grammar=grammars.prepare(asked.client, options.grammar))
    (request,) = make_requests(engine, [ids], options, [key], asked)
    answer: Answer = request.answers[number]
    answer.apply(progress_from_message(progress))
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
