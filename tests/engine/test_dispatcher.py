"""Which endpoint prefills a prompt and decodes its answer, and what happens to both where one fails."""

from types import SimpleNamespace

import pytest

import xinfer_jax as xj
from xinfer_jax.engine.answers import Answer, Progress
from xinfer_jax.engine.dispatcher import Dispatcher
from xinfer_jax.engine.endpoint import PREFILLED
from xinfer_jax.engine.row import Row

pytestmark = [pytest.mark.unit, pytest.mark.oldest]


class Fake(SimpleNamespace):
    """A request."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def fail(self, error):
        self.error = error


class Endpoint:
    """Records its calls, as (name, ticket)."""

    def __init__(self, role: str, pages: int = 10):
        self.role = role
        self.pages = pages
        self.error = None
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, args[0]))


class Case:
    def __init__(self, *endpoints: Endpoint):
        self.dispatcher = Dispatcher(lambda requests: None, lambda: None)
        self.dispatcher.endpoints += endpoints

    def submit(self, tokens: int, answers: int = 1) -> Fake:
        options = SimpleNamespace(stop_strings=())
        call = SimpleNamespace(options=options, new_matcher=lambda prompt: None)
        request = Fake(prompt_logprobs=[], times={}, error=None, call=call)
        request.answers = [Answer(request, Row(range(tokens), 100), j) for j in range(answers)]
        self.dispatcher.add(request.answers)
        return request

    def prefilled(self, ticket: int) -> None:
        self.dispatcher.progress(ticket, Progress(0, [7], [-1.0], (), (), 1, PREFILLED))

    def fail(self, endpoint: Endpoint) -> None:
        endpoint.error = xj.InputError("it has failed")
        self.dispatcher.step(lambda: True)


def test_a_row_goes_to_the_endpoint_with_most_free_pages_and_its_source_frees_it():
    prefill, small, large = Endpoint("prefill"), Endpoint("decode", 3), Endpoint("decode", 9)
    case = Case(prefill, small, large)
    request = case.submit(70)
    case.prefilled(1)
    assert large.calls == [("submit", 2)] and not small.calls
    case.dispatcher.pull(2, None)
    case.dispatcher.pages(2, "contents")
    case.dispatcher.arrived(2)
    assert prefill.calls == [("submit", 1), ("send", 1), ("release", 1)]
    case.dispatcher.progress(2, Progress(1, [8, 9], [-1.0, -1.0], (), (), 2, "eos"))
    (answer,) = request.answers
    assert (answer.sampled, answer.tokens, answer.finish_reason) == ([7, 8, 9], [7, 8], "eos")
    assert large.calls[1:] == [("receive", 2), ("drop", 2)] and prefill.calls[3:] == [("drop", 1)]
    case.dispatcher.progress(2, Progress(3, [5], [-1.0]))  # too late
    assert answer.sampled == [7, 8, 9]
    assert [case.dispatcher.step(lambda: True) for _ in range(2)] == [True, False]


def test_prompts_of_a_failed_endpoint_go_to_another():
    first, second, decode = Endpoint("prefill"), Endpoint("prefill"), Endpoint("decode")
    case = Case(first, second, decode)
    requests = [case.submit(70) for _ in range(3)]  # 1 and 3 go to the first
    case.prefilled(1)  # 4: its pages have not arrived
    case.fail(first)
    assert second.calls == [("submit", 2), ("submit", 5), ("submit", 6)]
    assert decode.calls == [("submit", 4), ("drop", 4)]
    case.prefilled(5)
    (answer,) = requests[0].answers
    assert answer.sampled == [7] and not any(request.error for request in requests)  # not twice
    case.fail(second)
    assert [str(request.error) for request in requests] == 3 * ["it has failed"]
    assert str(case.submit(5).error) == "it has failed"


@pytest.mark.parametrize("arrived", [False, True])
def test_rows_of_a_failed_endpoint_fail_once_their_pages_have_left_the_source(arrived):
    prefill, first, second = Endpoint("prefill"), Endpoint("decode"), Endpoint("decode", 5)
    case = Case(prefill, first, second)
    request = case.submit(70, answers=2)
    case.prefilled(1)
    if arrived:
        case.dispatcher.arrived(3)
    case.fail(first)
    if arrived:
        assert str(request.error) == "it has failed" and ("drop", 2) in prefill.calls and not second.calls
        assert [answer.finish_reason for answer in request.answers] == ["error", "error"]
    else:
        assert request.error is None and second.calls == [("submit", 4)]


def test_cancelled_answers_are_dropped_everywhere():
    prefill, decode = Endpoint("prefill"), Endpoint("decode")
    case = Case(prefill, decode)
    request = case.submit(70, answers=2)
    case.prefilled(1)
    case.dispatcher.abort([request], "cancelled")
    assert [answer.finish_reason for answer in request.answers] == ["cancelled", "cancelled"]
    assert prefill.calls[2:] == [("drop", 1), ("drop", 2)] and decode.calls == [("submit", 3), ("drop", 3)]
