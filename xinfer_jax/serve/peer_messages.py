"""What the front process and the processes that prefill or decode tell each other: requests with an `Answer`
go to a process, and events with its `Progress` come back.
"""

import dataclasses
import time
from typing import Any

from ..engine.endpoint import Progress
from ..engine.requests import Answer, Switch
from ..engine.submission import TextOptions, make_request
from ..grammar.pool import GrammarPool
from ..processes.codec import register
from ..sampling.logprobs import TokenLogprobs

REQUESTS = {"submit", "send", "receive", "release", "forget", "drop"}  # methods of `EngineEndpoint`
EVENTS = {"progress", "pull", "pages", "arrived", "invalid"}  # methods of `Dispatcher`
_ROW_FIELDS = ("priority", "answer_group", "client", "logprobs_from", "share_answers", "hits")


def _encode_answer(answer: Answer) -> dict[str, Any]:
    """Returns what a process needs to make the same answer, with what has been sampled of it."""
    request = answer.request
    call = request.call
    row = answer.row
    adapter = request.adapter.name if request.adapter else None
    options = dataclasses.replace(call.options, stop_strings=tuple(request.stop_strings), impl=None)
    left = request.deadline - time.monotonic()
    return dict(
        ids=list(request.ids), options=options, key=call.key, number=request.number, live=request.live,
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
    """Returns the answer of these fields, of a request to this engine. Raises InputError if it cannot answer
    the request.
    """
    options = fields["options"]
    row_fields = fields["row"]
    if options.grammar is not None:
        grammar = grammars.prepare(row_fields["client"], options.grammar)
        options = dataclasses.replace(options, grammar=grammar)
    what = fields["ids"], options, fields["key"], fields["number"]
    request = make_request(engine, *what, TextOptions(**fields["text"]), fields["adapter"])
    request.live = fields["live"]
    request.num_prompt_logprobs = fields["prompt_logprobs"]
    request.processed_logprobs = fields["processed_logprobs"]
    if fields["seconds"] is not None:
        request.deadline = request.submitted + fields["seconds"]
    answer = request.answers[fields["answer"]]
    answer.row = dataclasses.replace(answer.row, salt=bytes.fromhex(fields["salt"]), **row_fields)
    (answer.sampled, answer.logprobs, answer.processed, answer.alternatives) = fields["sampled"]
    answer.switches = [Switch(*switch) for switch in fields["switches"]]
    return answer


def _decode_logprobs(data: list[Any]) -> TokenLogprobs:
    token, logprob, processed, *tops = data
    return TokenLogprobs(token, logprob, processed, *([(i, x) for i, x in top] for top in tops))


register(Answer, _encode_answer, dict)
register(Progress, list, lambda data: Progress(*data))
register(TokenLogprobs, list, _decode_logprobs)
