"""Runs the processes of bench_start.py: `python peer_startup.py JOB`, JOB as JSON.

Ours is the command `xinfer-jax`, or with a `way` in the job a call in Python. The modules of the command are
only changed to record phases. It prints its usual output, and then the report as the last line of standard
error. Calls in Python and the other engines, those of peer_engines.py, have the answer on the last line of
standard output. A phase is reported as the seconds in which any of its work was running, its first start, its
last end, and the number of times. All times are seconds since the parent started the process.
"""

import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from peer_engines import ENGINES, Engine, PeakMemory, main, our_format

_PHASE_OF_EVENT = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",  # lowering
    "/jax/core/compile/backend_compile_duration": "compiling",  # includes fetching
    "/jax/compilation_cache/cache_retrieval_time_sec": "fetching",
}


class Phases:
    """Records when the phases of a process ran."""

    def __init__(self, started: float):
        """started: `time.monotonic()` when the parent started the process."""
        self._started = started
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, phase: str, seconds: float | None = None, at: float | None = None) -> None:
        """Records work that took `seconds` (None: all since the start) and ended `at` (None: now)."""
        end = (time.monotonic() if at is None else at) - self._started
        self._spans[phase].append((0.0 if seconds is None else end - seconds, end))

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Records all further calls of a function, in any thread."""
        function = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            start = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                self.add(phase, time.monotonic() - start)

        setattr(owner, name, watched)

    def summary(self) -> dict[str, list[float]]:
        """For each phase: seconds, first start, last end, count."""
        return {
            phase: [_union_seconds(spans), min(spans)[0], max(last for _, last in spans), len(spans)]
            for phase, spans in self._spans.items()
        }


def _union_seconds(spans: list[tuple[float, float]]) -> float:
    """Length of the union of the spans: threads compile in parallel, and a trace contains inner traces."""
    total = end = 0.0
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class AfterImport(MetaPathFinder):
    """Calls a function with a module right after its first import."""

    def __init__(self, name: str, callback: Callable[[Any], None]):
        self._name = name
        self._callback = callback
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_call_back(module: Any) -> None:
            run(module)
            self._callback(module)

        spec.loader.exec_module = run_and_call_back
        return spec


def record_compiling(phases: Phases) -> None:
    """Records what jax traces, compiles and fetches from now on."""
    import jax

    def record_event(event: str, seconds: float, **_: Any) -> None:
        if event in _PHASE_OF_EVENT:
            phases.add(_PHASE_OF_EVENT[event], seconds)

    jax.monitoring.register_event_duration_secs_listener(record_event)


def call(job: dict) -> dict:
    """Measures the first call in Python, of the job's `way`: stream, generate or engine."""
    watch = PeakMemory()
    phases = Phases(job["started"])
    import jax

    import xinfer_jax as xj

    jax.config.update("jax_compilation_cache_dir", job["compiled"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    phases.add("imports")
    record_compiling(phases)
    start = time.monotonic()
    model = xj.load_model(job["folder"], **our_format(job["precision"]))
    jax.block_until_ready(model.params)
    phases.add("reading", time.monotonic() - start)
    options = xj.GenerateOptions(job["new_tokens"])
    times: list[float] = []
    ready = None
    if job["way"] == "generate":
        xj.generate(model.params, model.config, [job["prompt"]], options)
        times.append(time.monotonic())
    else:
        ids: Any = xj.stream(model.params, model.config, [job["prompt"]], options)
        if job["way"] == "engine":
            engine = xj.Engine(model).__enter__()
            ready = time.monotonic() - job["started"]
            ids = engine.submit(job["prompt"], options)
        times += [time.monotonic() for _ in ids]
    anon_mib, hwm_mib = watch.peaks()
    spans = phases.summary()
    first_s, last_s = (at - job["started"] for at in (times[0], times[-1]))
    spans["decoding"] = [last_s - first_s, first_s, last_s, 1]
    programs, fetched = (spans.get(phase, [0] * 4)[3] for phase in ("compiling", "fetching"))
    answer = dict(phases=spans, first_s=first_s, last_s=last_s, anon_mib=anon_mib, hwm_mib=hwm_mib)
    answer |= dict(programs=programs, fetched=fetched)
    return answer if ready is None else answer | {"ready_s": ready}


def command(job: dict) -> None:
    """Runs the command with the job's flags and reports its phases."""
    watch = PeakMemory()
    phases = Phases(job["started"])
    costs = {}

    def record_phases(answer: Any) -> None:
        import jax

        from xinfer_jax.checkpoint.loading import Checkpoint
        from xinfer_jax.generation.batch_generator import BatchGenerator

        phases.add("imports")
        record_compiling(phases)
        phases.watch(answer, "open_model", "opening")
        phases.watch(Checkpoint, "read", "reading")
        output = BatchGenerator.output
        work = answer.answer_prompt

        def output_with_costs(*args: Any) -> Any:
            out = output(*args)
            costs.update(vars(out.stats), version=jax.__version__)
            return out

        def answer_with_report(*args: Any) -> int:
            code = work(*args)
            anon_mib, hwm_mib = watch.peaks()
            report = dict(phases=phases.summary(), costs=costs, anon_mib=anon_mib, hwm_mib=hwm_mib)
            print(f"\n{json.dumps(report)}", file=sys.stderr, flush=True)
            return code

        BatchGenerator.output = output_with_costs
        answer.answer_prompt = answer_with_report

    AfterImport("xinfer_jax.cli.answer", record_phases)
    sys.argv = ["xinfer-jax", *job["flags"]]
    from xinfer_jax.__main__ import main as xinfer_jax

    xinfer_jax()


def peer(engine: Engine, job: dict, watch: PeakMemory) -> dict:
    """Measures one call, the first of its process."""
    phases = Phases(job["started"])
    phases.add("imports")
    start = time.monotonic()
    generate = engine.load(job)
    phases.add("reading", time.monotonic() - start)
    start = time.monotonic()
    first_s, (tokens,) = generate([job["prompt"]], job["new_tokens"])
    last_s = time.monotonic() - start
    phases.add("prompt", first_s, start + first_s)
    phases.add("decoding", last_s - first_s, start + last_s)
    if len(tokens) != job["new_tokens"]:
        raise RuntimeError(f"asked for {job['new_tokens']} tokens, got {len(tokens)}")
    anon_mib, hwm_mib = watch.peaks()
    spans = phases.summary()
    ends = {f"{token}_s": spans[phase][2] for token, phase in (("first", "prompt"), ("last", "decoding"))}
    return dict(phases=spans, **ends, new_tokens=len(tokens), anon_mib=anon_mib, hwm_mib=hwm_mib)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    if job["engine"] == "ours" and "way" in job:
        answer = json.dumps(call(job))
        print(f"\n{answer}", flush=True)
        os._exit(0)  # without the programs that the engine still compiles
    if job["engine"] == "ours":
        command(job)
    answer = json.dumps(main(job, ENGINES, peer))
    print(f"\n{answer}", flush=True)
