"""Simulates engines of one kind, or of two sides; without jax.

arrivals ─► one engine, or a prefill engine ─ pages ─► a decode engine
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from goodput.simulated_engine import Clock, EngineSizes, SimulatedDecode, SimulatedEngine, SimulatedPrefill
from goodput.step_times import StepTimes
from goodput.workload import Lengths, SimulatedRequest
from xinfer_jax.engine.row import Row


class Deployment(NamedTuple):
    """Engines: of one kind, which prefill and decode, or of two sides. Sizes and times are those of each.

    Attributes:
        engines: that do both; 0: there are two sides.
        prefill, decode: engines of each side.
    """

    sizes: EngineSizes
    times: StepTimes
    engines: int = 1
    prefill: int = 0
    decode: int = 0
    decode_times: StepTimes | None = None


def simulate(
    deployment: Deployment, arrivals: Sequence[float], lengths: Sequence[Lengths]
) -> list[SimulatedRequest]:
    """Requests with their times.

    Args:
        arrivals: seconds.
        lengths: of each request.
    """
    clock = Clock()
    requests = [
        SimulatedRequest(float(time), prompt, answer)
        for time, (prompt, answer) in zip(arrivals, lengths, strict=True)
    ]
    route = _router(clock, deployment)
    for request in requests:
        clock.at(request.arrival, lambda request=request: route(request))
    clock.run()
    return requests


def _router(clock: Clock, deployment: Deployment) -> Callable[[SimulatedRequest], Any]:
    """Creates the engines. Returns what gives an arriving request to one of them."""
    sizes, times, count = deployment[:3]
    if count:
        engines = [SimulatedEngine(clock, sizes, times) for _ in range(count)]
        return lambda request: min(engines, key=lambda engine: len(engine.requests)).submit(request)
    decode_times = deployment.decode_times or times
    decode = [SimulatedDecode(clock, sizes, decode_times) for _ in range(deployment.decode)]
    prefill = [SimulatedPrefill(clock, sizes, times) for _ in range(deployment.prefill)]
    for engine in prefill:
        engine.on_prefilled = lambda source, row, request: _move(source, row, decode, request)
    return lambda request: min(prefill, key=lambda engine: engine.queued_tokens).submit(request)


def _move(
    source: SimulatedPrefill, row: Row, engines: list[SimulatedDecode], request: SimulatedRequest
) -> None:
    """Gives a prefilled row to the engine that has the most free pages."""
    target = max(engines, key=lambda engine: engine.free_pages)

    def pull(arrive: Callable[[], None]) -> None:
        def deliver() -> None:
            arrive()
            source.call_soon(lambda: source.release(row))

        source.call_soon(lambda: source.send(row, target, deliver))

    target.receive(row.ids, request, pull)
