"""Measures, for bench_engine.py, how many requests an engine answers within limits of TTFT and TPOT, and the
times of its device calls; then simulates the same requests with these times.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from goodput_search import Workload, simulated_attainment
from simulated_engine import EngineSizes
from simulator import Deployment
from step_times import StepTimes, seconds_at
from workload import Lengths, attainment

import xinfer_jax as xj


class Record(NamedTuple):
    """A device call: when it began (time.monotonic), its seconds, and the tokens or pages they depend on."""

    began: float
    seconds: float
    number: float


class TimedCore:
    """Records how long the device calls of an engine take; it waits for the results of each.

    Attributes:
        role: of the engine: "engine", "prefill" or "decode".
        records: of "chunk", "page", "first", "decode" (its seconds are those of a step), "call" (of all its
            steps), "send", "place", and "step" of the engine.
    """

    def __init__(self, engine: xj.Engine):
        self.role = engine.role or "engine"
        self.records: dict[str, list[Record]] = defaultdict(list)
        self._core: Any = engine._core
        self._device = self._core.device
        self._core.device = self
        self._core.step = self._timed(self._core.step, lambda *args: ("step", 0))
        if self.role == "prefill":
            self._core.send = self._timed(self._core.send, lambda row, *args: ("send", len(row.pages)))
        if self.role == "decode":
            self._core._arrive = self._timed(
                self._core._arrive, lambda answer, *args: ("place", len(answer.row.pages))
            )
        self.prefill = self._timed(
            self._device.prefill,
            lambda slot, pages, ids, start, is_full, *more: ("chunk" if is_full else "page", start),
        )
        self.sample_first = self._timed(self._device.sample_first, lambda *args: ("first", 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def decode(self, *args: Any) -> Any:
        """As of `Device`."""
        tokens = sum(row.num_computed for _, row in self._core.scheduler.running)
        began = time.monotonic()
        out = jax.block_until_ready(self._device.decode(*args))
        seconds = time.monotonic() - began
        steps = max(1, int(np.max(out.passes_B)))
        self.records["decode"].append(Record(began, seconds / steps, tokens + np.sum(out.count_B) / 2))
        self.records["call"].append(Record(began, seconds, steps))
        return out

    def _timed(self, call: Callable[..., Any], name_and_number: Callable[..., tuple[str, float]]) -> Any:
        def timed(*args: Any) -> Any:
            name, number = name_and_number(*args)
            began = time.monotonic()
            out = jax.block_until_ready(call(*args))
            self.records[name].append(Record(began, time.monotonic() - began, number))
            return out

        return timed


def fitted_times(cores: Sequence[TimedCore], began: float = 0.0) -> StepTimes:
    """Times of the engines of one side, from their records: means, as lines over the tokens.

    Args:
        began: when a measurement began, whose slowdown is wanted too; 0: none.
    """
    records: dict[str, list[Record]] = defaultdict(list)
    for core in cores:
        for name, values in core.records.items():
            records[name] += values
    device = sum(record.seconds for name in ("page", "chunk", "first", "call") for record in records[name])
    host = max(0.0, sum(record.seconds for record in records["step"]) - device)
    calls = len(records["call"])
    rows = len(records["first"])
    lines = {name: _line(records[name]) for name in ("chunk", "page", "decode") if records[name]}
    nothing = [[1e-9, 0.0]]  # the other side does it
    lines = {"page": nothing, "decode": nothing, "chunk": lines.get("page", nothing)} | lines
    return StepTimes(
        **lines,
        first=_mean(records["first"]) + (0 if calls or not rows else host / rows),
        call=host / calls if calls else 0.0,
        send=_mean(records["send"]) / max(1.0, _mean_number(records["send"])),
        place=_mean(records["place"]) / max(1.0, _mean_number(records["place"])),
        slowdown=_slowdown(records, lines, began) if began else (),
    )


def _slowdown(
    records: dict[str, list[Record]], lines: dict[str, list[list[float]]], began: float
) -> list[float]:
    """For each second, how much longer device calls took than by the lines."""
    measured: dict[int, float] = defaultdict(float)
    expected: dict[int, float] = defaultdict(float)
    for name, of in lines.items():
        for record in records[name]:
            second = int(record.began - began)
            measured[second] += record.seconds
            expected[second] += seconds_at(of, record.number)
    return [
        measured[second] / expected[second] if expected[second] else 1.0
        for second in range(1 + max(measured, default=0))
    ]


def _line(records: Sequence[Record]) -> list[list[float]]:
    """The least squares line through these, or their mean where a line would fall."""
    tokens = [record.number for record in records]
    seconds = [record.seconds for record in records]
    if np.ptp(tokens) > 0:
        more, first = np.polyfit(tokens, seconds, 1)
        if more > 0 and first > 0:
            return [[float(first), float(more)]]
    return [[float(np.mean(seconds)), 0.0]]


def _mean(records: Sequence[Record]) -> float:
    return float(np.mean([record.seconds for record in records])) if records else 0.0


def _mean_number(records: Sequence[Record]) -> float:
    return float(np.mean([record.number for record in records])) if records else 0.0


def run_requests(
    engine: Any, vocab_size: int, lengths: Sequence[Lengths], arrivals: Sequence[float], seed: int
) -> list[tuple[float, float]]:
    """Submits random prompts at these times. Returns (TTFT, TPOT) of each, from the scheduled arrival on."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, prompt).tolist() for prompt, _ in lengths]
    began = time.monotonic() + 0.05
    requests = []
    for ids, (_, answer), arrival in zip(prompts, lengths, arrivals, strict=True):
        time.sleep(max(0.0, began + arrival - time.monotonic()))
        options = xj.GenerateOptions(answer, eos_token_ids=())
        requests.append(engine.submit(ids, options, received=began + arrival))
    times = []
    for request, (_, answer) in zip(requests, lengths, strict=True):
        request.result()
        first = request.times["first"]
        ended = request.times["ended"]
        times.append((first - request.submitted, (ended - first) / max(1, answer - 1)))
    return times


def measured_throughput(engine: Any, vocab_size: int, workload: Workload) -> float:
    """Requests per second if all come at once."""
    began = time.monotonic()
    run_requests(engine, vocab_size, workload.lengths, [0.0] * len(workload.lengths), 1)
    return len(workload.lengths) / (time.monotonic() - began)


def with_default_limits(workload: Workload, times: StepTimes, chunk: int) -> Workload:
    """The workload; limits that are not given are five times the prefill of an average prompt, and three
    times a decode step.
    """
    prompt = np.mean([prompt for prompt, _ in workload.lengths])
    prefill = prompt / chunk * times.chunk[0][0] + times.page[0][0]
    step = times.decode[0][0]
    return dataclasses.replace(workload, ttft=workload.ttft or 5 * prefill, tpot=workload.tpot or 3 * step)


def measure_rate(
    engine: Any, cores: Sequence[TimedCore], workload: Workload, rate: float, seed: int
) -> dict[str, Any]:
    """Attainment at this rate, measured and simulated with the times of the same run."""
    for core in cores:
        core.records.clear()
    began = time.monotonic()
    arrivals = workload.unit_arrivals / rate
    vocab_size = engine.model.config.vocab_size
    times = run_requests(engine, vocab_size, workload.lengths, arrivals, seed)
    measured = attainment(times, workload.ttft, workload.tpot)
    sides = {
        role: fitted_times([c for c in cores if c.role == role], began) for role in {c.role for c in cores}
    }
    simulated = simulated_attainment(deployment_of(engine, cores, sides), workload, rate)
    return dict(
        rate=rate,
        measured=vars(measured),
        simulated=vars(simulated),
        points=100 * (simulated.both - measured.both),
        step_times={role: dataclasses.asdict(of) for role, of in sides.items()},
    )


def deployment_of(engine: Any, cores: Sequence[TimedCore], sides: dict[str, StepTimes]) -> Deployment:
    """The engines as the simulator has them."""
    one = engine.engines[0]
    sizes = EngineSizes(one.rows, one.pages, one.capacity, one.chunk)
    if "engine" in sides:
        return Deployment(sizes, sides["engine"], len(cores))
    counts = [sum(core.role == role for core in cores) for role in ("prefill", "decode")]
    return Deployment(sizes, sides["prefill"], 0, *counts, sizes, sides["decode"])
