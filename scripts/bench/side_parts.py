"""The parts of bench_engine.py that compare one engine with two sides: goodput and disturbance."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from engine_disturbance import create_engine, measure_disturbance, ratios
from engine_goodput import TimedCore, fitted_times, measure_rate, measured_throughput, with_default_limits
from goodput_flags import Flag, WorkloadFlags, define_workload_flags, positive_numbers

import xinfer_jax as xj

SIDE_PARTS = ("goodput", "disturbance")
_FORMS: dict[str, dict] = {"one engine": {}, "two sides": dict(prefill_devices=[0], decode_devices=[1])}


class SideFlags(NamedTuple):
    """The flags of `define_flags`."""

    workload: WorkloadFlags
    loads: Flag
    times_out: Flag
    seconds: Flag

    def check(self) -> None:
        """Raises an `InputError` for a value that no part takes."""
        positive_numbers(self.loads)


def define_flags(requests: Flag) -> SideFlags:
    """Defines the flags of these parts. requests: the flag of the number of requests."""
    return SideFlags(
        define_workload_flags(requests),
        flags.DEFINE_list(
            "loads", ["0.3", "0.5", "0.7", "0.9", "1.1"],
            "Rates of part goodput, as fractions of the throughput of one engine.",
        ),
        flags.DEFINE_string("times_out", None, "File for the step times of part goodput, as JSON."),
        flags.DEFINE_float("seconds", 5.0, "Seconds of part disturbance, with and without prompts.", 0.1),
    )  # fmt: skip


def goodput(model: xj.Model, rows: int, capacity: int | None, given: SideFlags) -> Iterator[dict[str, Any]]:
    """Attainment at each rate, measured and simulated: first of one engine, then of two sides."""
    times = {}
    loads = positive_numbers(given.loads)
    for name, devices in _FORMS.items():
        shape = dict(rows=rows, capacity=capacity, prefix_cache=False, warm_up=True)
        with xj.Engine(model, **shape, **devices) as engine:
            cores = [TimedCore(each) for each in engine.engines]
            if not devices:
                workload = given.workload.workload(engine.room, limits_needed=False)
                throughput = measured_throughput(engine, model.config.vocab_size, workload)
                workload = with_default_limits(workload, fitted_times(cores), engine.chunk)
            for number, load in enumerate(loads):
                result = measure_rate(engine, cores, workload, load * throughput, number)
                times |= {role: of | dict(slowdown=()) for role, of in result["step_times"].items()}
                about = dict(form=name, load=load, ttft=workload.ttft, tpot=workload.tpot)
                yield about | dict(requests=len(workload.lengths), devices=len(cores)) | result
    if given.times_out.value:
        Path(given.times_out.value).write_text(json.dumps(times), encoding="utf-8")


def disturbance(rounds: int, given: SideFlags) -> Iterator[dict[str, Any]]:
    """Medians of the rounds, of one engine, of two sides, and of two processes."""
    for name, devices in _FORMS.items():
        with create_engine(**devices) as engine:
            each = [measure_disturbance(engine, given.seconds.value, number) for number in range(rounds)]
        yield _with_medians(name, each)
    program = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, str(program), str(rounds), str(given.seconds.value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    yield _with_medians("two processes", json.loads(done.stdout))


def _with_medians(form: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    found = [ratios(result) for result in rounds]
    medians = {f"{key}_ratio": float(np.median([of[key] for of in found])) for key in found[0]}
    return dict(form=form, rounds=rounds) | medians
