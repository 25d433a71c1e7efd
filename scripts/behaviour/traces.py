"""Writes traces of engines as JSON: a process that scripts/compare_behaviour.py starts for each checkout.

A trace is a fixed list of requests to an engine without a thread. After each step it has the rows that
changed (state, slot, computed tokens, pages), and the statistics. At its end it has the answers, with floats
in hexadecimal. Time is a counter that advances after each step: traces do not depend on the speed of a
machine.
"""

import contextlib
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from soak.engine_requests import draw, processors_and_taps, random_model

import xinfer_jax as xj

STEP_SECONDS = 0.05  # that the clock advances after a step
SAMPLED = xj.SamplingConfig(temperature=1.0)
# Of `EngineStats`: what depends on the schedule alone.
STATS = "waiting", "pages_used", "pages_cached", "preemptions", "hits", "host_hits", "prefill_tokens"


@contextlib.contextmanager
def counted_time() -> Iterator[Callable[[float], None]]:
    """Inside, all clocks of the library stand still, except that the function that it gives advances them."""
    now = [1000.0]
    clocks = time.monotonic, time.perf_counter
    time.monotonic = time.perf_counter = lambda: now[0]
    try:
        yield lambda seconds: now.append(now.pop() + seconds)
    finally:
        time.monotonic, time.perf_counter = clocks


def plain(value: Any) -> Any:
    """Returns a value as JSON has it, with floats in hexadecimal."""
    if isinstance(value, float | np.floating):
        return float(value).hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


def row_of(answer: Any) -> str:
    """Returns the scheduler's decisions for an answer. It reads attributes that have no public name."""
    row = answer.row
    return f"{row.state}, slot {row.slot}, {row.num_computed} computed, {len(row.pages)} pages"


class Trace:
    """Requests to an engine that takes one step at a time.

    Args:
        advance: the function of `counted_time`.
    """

    def __init__(self, model: xj.Model, advance: Callable[[float], None], **settings: Any):
        self.engine = xj.Engine(model, **settings, warm_up=True)
        self.requests: list[xj.types.Request] = []
        self.steps: list[dict[str, Any]] = []
        self._advance = advance
        self._rows: dict[str, str] = {}

    def submit(self, ids: Any, options: xj.GenerateOptions, **how: Any) -> xj.types.Request:
        """Submits a request, and waits for the first masks of its grammar."""
        self.requests.append(self.engine.submit(ids, options, **how))
        if options.grammar is not None:
            self.engine.pause()
            self.engine.step()
            time.sleep(0.3)
            self.engine.resume()
        return self.requests[-1]

    def step(self, count: int = 1) -> None:
        """Takes steps, and records each."""
        for _ in range(count):
            self.engine.step()
            if any(request.call.options.grammar for request in self.requests if not request.ended):
                time.sleep(0.05)  # for the masks of the next tokens
            self._advance(STEP_SECONDS)
            each = enumerate(self.requests)
            rows = {f"{i}.{j}": row_of(x) for i, request in each for j, x in enumerate(request.answers)}
            changed = {name: row for name, row in rows.items() if row != self._rows.get(name)}
            stats = {name: getattr(self.engine.stats, name) for name in STATS}
            slots = [row and row.arrival for row in self.engine.core.scheduler.slots]
            self.steps.append(dict(rows=changed, slots=slots, stats=stats))
            self._rows = rows

    def finish(self) -> dict[str, Any]:
        """Takes steps until all requests have ended. Returns the record."""
        while not all(request.ended for request in self.requests):
            self.step()
        self.engine.close()
        names = (
            "tokens",
            "finish_reason",
            "token_versions",
            "adapter_versions",
            "logprobs",
            "processed_logprobs",
        )
        record = {f"step {i}": step for i, step in enumerate(self.steps)}
        for i, request in enumerate(self.requests):
            answers = [
                {name: plain(getattr(answer, name)) for name in (*names, "alternatives", "routed_experts")}
                for answer in request.answers
            ]
            prompt = plain(request.prompt_logprobs)
            record[f"request {i}"] = dict(answers=answers, prompt_logprobs=prompt, error=str(request.error))
        return record


def random_requests(trace: Trace, count: int, shape: dict, longest: int) -> None:
    """Submits random requests, one or two before each step: `draw` draws them. Three have their
    `share_answers`, and then their answer as a prompt.
    """
    rng = random.Random(5)
    drawn = draw(rng, trace.engine.model.config.vocab_size, count, longest, shape)
    for one in drawn:
        options = dataclasses.replace(one.options, max_tokens=min(40, one.options.max_tokens))
        request = trace.submit(one.ids, options, key=one.key, processed_logprobs=True, **one.more)
        trace.step(rng.choice((0, 1, 1)))
        if one.cancel:
            request.cancel()
    for client in "abc":
        ids = drawn[0].ids[:10] + [7] * 70
        first = trace.submit(
            ids, xj.GenerateOptions(max_tokens=60, eos_token_ids=()), client=client, share_answers=True
        )
        trace.step(12)
        trace.submit(ids + first.answers[0].tokens, xj.GenerateOptions(max_tokens=4), share_answers=True)


def scheduled(family: str, advance: Callable[[float], None], **settings: Any) -> dict[str, Any]:
    """Runs random requests with few pages: rows are preempted, swapped and share pages."""
    shape = dict(rows=4, capacity=384, pages=9, chunk=128, time_slice=0.2)
    trace = Trace(random_model(family, None), advance, **shape | settings)
    random_requests(trace, 30, shape, 200)
    return trace.finish()


def held(advance: Callable[[float], None]) -> dict[str, Any]:
    """Runs requests with adapters, processors, vectors and grammars, with updates of adapters and weights
    between steps.
    """
    model = xj.load_model()
    adapters = [xj.lora.init_adapter(model.config, jax.random.key(i), 4) for i in range(3)]
    a, b, c = (jax.tree.map(lambda x: x + 0.05, adapter) for adapter in adapters)
    own = processors_and_taps(model.config)
    shape = dict(rows=3, capacity=256, pages=12, chunk=64, time_slice=0.2, max_adapters=4, max_rank=4)
    trace = Trace(model, advance, **shape, **own, adapters=dict(a=a, b=b))
    grammars = None, xj.grammar.regex("[a-z ]{5,60}"), xj.grammar.lark('start: (/[a-z ]+/ | "(" start ")")+')
    callers = None, dict(less=0.5), dict(noise=0.5, less=0.2)
    names = itertools.cycle((None, "a", "b"))
    changes: list[Callable[[], None]] = [
        lambda mode=mode, i=i: trace.engine.update(  # type: ignore[misc]
            jax.tree.map(lambda x: np.asarray(x) * (1 - i / 20), model.params), mode=mode
        )
        for i, mode in enumerate(("continue", "recompute", "wait", "abort"))
    ]
    changes.insert(1, lambda: trace.engine.update_adapter("a", c))
    changes.insert(2, lambda: trace.engine.update_adapter("b", a, mode="recompute"))
    changes.insert(3, lambda: trace.engine.remove_adapter("b"))
    for i, change in enumerate(changes):
        for grammar, processors in itertools.product(grammars, callers[i % 2 : i % 2 + 2]):
            options = xj.GenerateOptions(
                max_tokens=24, sampling=SAMPLED, grammar=grammar, processors=processors, logprobs=i % 3,
                taps=dict(up=0.1 * i) if i % 2 else None,
            )  # fmt: skip
            how = dict(adapter=next(names), key=jax.random.key(i), client=str(i % 2))
            trace.submit("Once upon a time " * (1 + i), options, **how)
        trace.step(4)
        change()
        if "b" not in trace.engine.adapters:
            trace.step()
            trace.engine.add_adapter("b", b)
    return trace.finish()


def lookup(advance: Callable[[float], None]) -> dict[str, Any]:
    """Runs speculative decoding by lookup, with a grammar, an update of weights, and rows that are
    preempted.
    """
    model = xj.load_model()
    shape = dict(rows=3, capacity=256, pages=6, chunk=64, time_slice=0.2, draft="lookup", draft_tokens=2)
    trace = Trace(model, advance, **shape)
    for i in range(9):
        sampling = SAMPLED if i % 2 else xj.SamplingConfig()
        grammar = xj.grammar.regex("(ab|cd)+ [a-z ]{90,99}") if i % 3 == 2 else None
        eos_token_ids = None if grammar else ()
        options = xj.GenerateOptions(
            max_tokens=120, sampling=sampling, grammar=grammar, eos_token_ids=eos_token_ids
        )
        prompt = "Count: 1 2 3 4 5 1 2 3 4 5 1 2 3 " * (1 + i % 3)
        trace.submit(prompt, options, client=str(i % 4), key=jax.random.key(i))
        trace.step(i % 2)
        if i == 6:
            trace.engine.update(jax.tree.map(lambda x: np.asarray(x) * 0.95, model.params))
    return trace.finish()


TRACES: dict[str, Callable[[Callable[[float], None]], dict[str, Any]]] = {
    "few pages": lambda advance: scheduled("qwen2", advance),
    "host pages": lambda advance: scheduled("gemma3", advance, host_pages=20, time_slice=0),
    "int8 cache, routes": lambda advance: scheduled(
        "qwen3_moe", advance, routed_experts=True, cache_dtype="int8"
    ),
    "recurrent states": lambda advance: scheduled("qwen3_5", advance),
    "held": held,
    "lookup": lookup,
}


def main(out: str, _: str) -> None:
    assert Path.cwd() in Path(xj.__file__).parents, "another checkout is imported"
    records = {}
    with counted_time() as advance:
        for name, trace in TRACES.items():
            records |= {f"trace {name}: {what}": part for what, part in trace(advance).items()}
    Path(out).write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
