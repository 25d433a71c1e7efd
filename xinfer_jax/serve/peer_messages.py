"""Messages between the front process and the processes that prefill or decode: requests with an `Answer` go
to a process, and events with its `Progress` come back.
"""

import dataclasses
import time
from typing import Any

from ..engine.answers import Answer, Progress
from ..engine.submission import requests_of
from ..grammar.pool import GrammarPool
from ..processes.codec import register_class
from ..sampling.logprobs import TokenLogprobs

REQUESTS = {"submit", "send", "receive", "release", "forget", "drop"}  # methods of `EngineEndpoint`
EVENTS = {"progress", "pull", "pages", "arrived", "invalid"}  # methods of `Dispatcher`


def _encode_answer(answer: Answer) -> list[Any]:
    """Returns the data from which a process makes the same answer, with its tokens so far."""
    request = answer.request
    call = request.call
    left = request.deadline - time.monotonic()
    deadline = None if left == float("inf") else max(left, 0.001)
    asked = dataclasses.replace(request.request_options, deadline=deadline, received=None)
    options = dataclasses.replace(call.options, impl=None)
    # This process has the log-probabilities of the prompt. One that prefills it again sends all of them.
    progress = answer.progress(prompt_start=len(request.prompt_logprobs))
    return [answer.number, request.ids, options, call.key, asked, progress]


def answer_from_message(fields: list[Any], engine: Any, grammars: GrammarPool) -> Answer:
    """Returns the answer of these fields, of a request to this engine. Raises InputError if it cannot answer
    the request.
    """
    number, ids, options, key, asked, progress = fields
    if options.grammar is not None:
        options = dataclasses.replace(options, grammar=grammars.prepare(asked.client, options.grammar))
    (request,) = requests_of(engine, [ids], options, [key], asked)
    answer: Answer = request.answers[number]
    answer.apply(progress)
    return answer


def _decode_logprobs(data: list[Any]) -> TokenLogprobs:
    token, logprob, processed, *tops = data
    return TokenLogprobs(token, logprob, processed, *([(i, x) for i, x in top] for top in tops))


register_class(Answer, _encode_answer, list)
register_class(Progress, list, lambda data: Progress(*data))
register_class(TokenLogprobs, list, _decode_logprobs)
