"""The processes of bench_start.py: `python bench_start_runners.py JOB`, JOB as JSON.

Ours is the command `xinfer-jax`, in whose modules nothing is changed but that phases are noted; it writes
what it writes, and then the report as the last line of standard error. Other engines are those of
bench_peer_runners.py, the answer on the last line of standard output. A phase is the seconds in which
anything of it was under way, from when to when, and how often; all times are seconds since the process was
asked for.
"""

import importlib.util
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from bench_peer_runners import ENGINES, Engine, PeakMemory, main

_OF_JAX = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",  # which is lowering
    "/jax/core/compile/backend_compile_duration": "compiling",  # fetching included
    "/jax/compilation_cache/cache_retrieval_time_sec": "fetching",
}


class Phases:
    """What was done when."""

    def __init__(self, started: float):
        """started: `time.monotonic()` of the process that asked."""
        self._started = started
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def ended(self, phase: str, seconds: float | None = None, at: float | None = None) -> None:
        """Something of this phase ended (now); it took so long, or all the time there was."""
        end = (time.monotonic() if at is None else at) - self._started
        self._spans[phase].append((0.0 if seconds is None else end - seconds, end))

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """From now on a function is noted, in whatever thread it runs."""
        function = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            start = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                self.ended(phase, time.monotonic() - start)

        setattr(owner, name, watched)

    def found(self) -> dict[str, list[float]]:
        """Of each phase: seconds, from, to, how often."""
        return {
            phase: [_covered(spans), min(spans)[0], max(last for _, last in spans), len(spans)]
            for phase, spans in self._spans.items()
        }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union: threads compile side by side, and a trace holds those of inner functions."""
    total = end = 0.0
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Behind(MetaPathFinder):
    """Calls a function with a module as soon as it is imported, whoever imports it."""

    def __init__(self, name: str, then: Callable[[Any], None]):
        self._name = name
        self._then = then
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_tell(module: Any) -> None:
            run(module)
            self._then(module)

        spec.loader.exec_module = run_and_tell
        return spec


def command(job: dict) -> None:
    """The command with the job's flags."""
    watch = PeakMemory()
    phases = Phases(job["started"])
    costs = {}

    def listen(answer: Any) -> None:
        import jax

        from xinfer_jax.checkpoint.loading import Checkpoint
        from xinfer_jax.generation.run import Run

        phases.ended("imports")
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, seconds, **_: phases.ended(_OF_JAX[event], seconds) if event in _OF_JAX else None
        )
        phases.watch(answer, "open_model", "opening")
        phases.watch(Checkpoint, "read", "reading")
        output = Run.output
        work = answer.answer

        def kept(*args: Any) -> Any:
            out = output(*args)
            costs.update(vars(out.stats), version=jax.__version__)
            return out

        def reported(*args: Any) -> int:
            code = work(*args)
            anon_mib, hwm_mib = watch.peaks()
            report = dict(phases=phases.found(), costs=costs, anon_mib=anon_mib, hwm_mib=hwm_mib)
            print(f"\n{json.dumps(report)}", file=sys.stderr, flush=True)
            return code

        Run.output = kept
        answer.answer = reported

    Behind("xinfer_jax.cli.answer", listen)
    sys.argv = ["xinfer-jax", *job["flags"]]
    from xinfer_jax.__main__ import main as xinfer_jax

    xinfer_jax()


def peer(engine: Engine, job: dict, watch: PeakMemory) -> dict:
    """One call, the first of its process."""
    phases = Phases(job["started"])
    phases.ended("imports")
    start = time.monotonic()
    generate = engine.load(job)
    phases.ended("reading", time.monotonic() - start)
    start = time.monotonic()
    first_s, (tokens,) = generate([job["prompt"]], job["new_tokens"])
    last_s = time.monotonic() - start
    phases.ended("prompt", first_s, start + first_s)
    phases.ended("decoding", last_s - first_s, start + last_s)
    if len(tokens) != job["new_tokens"]:
        raise RuntimeError(f"asked for {job['new_tokens']} tokens, got {len(tokens)}")
    anon_mib, hwm_mib = watch.peaks()
    found = phases.found()
    ends = {f"{token}_s": found[phase][2] for token, phase in (("first", "prompt"), ("last", "decoding"))}
    return dict(phases=found, **ends, new_tokens=len(tokens), anon_mib=anon_mib, hwm_mib=hwm_mib)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    if asked["engine"] == "ours":
        command(asked)
    answer = json.dumps(main(asked, ENGINES, peer))
    print(f"\n{answer}", flush=True)
