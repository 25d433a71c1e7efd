"""Simulates how many requests stay within their limits, over the rate at which they arrive: the library's own
scheduler against a clock of given step times.

    python scripts/simulate.py --times=FILE --ttft=0.25 --tpot=0.1 --rates=1,2,4,8
    python scripts/simulate.py --times=FILE --prefill_engines=2 --decode_engines=1 --ttft=0.25 --tpot=0.1
    python scripts/simulate.py --model=qwen2.5-7b --devices=2xa100 --ttft=0.25 --tpot=0.1 --rates=1,2,4,8

--times is a JSON file of step times (their form: scripts/goodput/README.md). With --model they are computed
from bytes and FLOP at the rates of data sheets, each engine on the --devices; only that imports jax. Prints a
table, and a JSON object as the last line.
"""

from launcher import InputError, start

# isort: split
import json
import math

import numpy as np
from absl import flags
from goodput.simulator import Deployment, EngineSizes, simulate
from goodput.step_times import read_step_times
from goodput.workload import Lengths, attainment, draw_workload

from xinfer_jax.engine.pages import num_pages_for, usable_capacity

TIMES = flags.DEFINE_string("times", None, "JSON file of step times.")
MODEL = flags.DEFINE_string(
    "model", None, "Instead of --times: a built-in shape, or a directory with config.json."
)
DEVICES = flags.DEFINE_string("devices", "1xa100", "With --model: the devices of each engine, COUNTxKIND.")
ENGINES = flags.DEFINE_integer("engines", 1, "Engines that prefill and decode.", lower_bound=1)
PREFILL = flags.DEFINE_integer("prefill_engines", 0, "Two sides: engines that prefill.", lower_bound=0)
DECODE = flags.DEFINE_integer("decode_engines", 0, "Two sides: engines that decode.", lower_bound=0)
ROWS = flags.DEFINE_integer("rows", 8, "Slots of each engine.", lower_bound=1)
CAPACITY = flags.DEFINE_integer("capacity", 4096, "Tokens of a row.", lower_bound=2)
PAGES = flags.DEFINE_integer("pages", None, "Pages of each engine; default: as many as all rows can fill.", 2)
CHUNK = flags.DEFINE_integer("chunk", 256, "Tokens of a prefill chunk.", lower_bound=64)
RATES = flags.DEFINE_list("rates", ["1", "2", "4", "8"], "Requests per second.")
LENGTHS = flags.DEFINE_string(
    "lengths",
    "chat",
    "Tokens of prompts and answers: chat (or lognormal), code, summarization: lognormal with the means of"
    " DistServe's data sets; lognormal:P,A,SP,SA: means, and standard deviations of logarithms; or a file"
    " with two whole numbers in each line.",
)
TTFT = flags.DEFINE_float("ttft", None, "Limit of the seconds to the first token.")
TPOT = flags.DEFINE_float("tpot", None, "Limit of the seconds per later token.")
REQUESTS = flags.DEFINE_integer("requests", 300, "Requests of a simulation.", lower_bound=1)
BURSTINESS = flags.DEFINE_float(
    "burstiness", 1.0, "Coefficient of variation of the gaps between arrivals (gamma); 1: Poisson."
)
SEED = flags.DEFINE_integer("workload_seed", 0, "Seed of lengths and arrivals.", lower_bound=0)


def main(argv: list[str]) -> None:
    rates = positive_numbers(RATES, RATES.value)
    deployment = deployment_from_flags()
    for flag in (TTFT, TPOT, BURSTINESS):
        if flag.value is None:
            raise InputError(f"--{flag.name}=SECONDS is needed")
        positive_numbers(flag, [flag.value])
    most = usable_capacity(deployment.sizes.capacity, deployment.sizes.pages)
    workload = draw_workload(LENGTHS.value, REQUESTS.value, most, BURSTINESS.value, SEED.value)
    results = [result_at(deployment, *workload, rate) for rate in rates]
    print_table(results)
    engines = [deployment.prefill, deployment.decode] if deployment.prefill else deployment.engines
    print(json.dumps(dict(engines=engines, ttft=TTFT.value, tpot=TPOT.value, results=results)))


def positive_numbers(flag: flags.FlagHolder, values: list) -> list[float]:
    """The numbers that a flag has."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(x) and x > 0 for x in numbers):
        raise InputError(f"--{flag.name}={','.join(map(str, values))}: give numbers above 0, as in 1,2,4")
    return numbers


def deployment_from_flags() -> Deployment:
    """The engines that the flags ask for."""
    if bool(PREFILL.value) != bool(DECODE.value):
        raise InputError("--prefill_engines and --decode_engines need each other: give both, or neither")
    if (TIMES.value is None) == (MODEL.value is None):
        raise InputError("give --times=FILE or --model=NAME: where the step times come from")
    if CHUNK.value % 64:
        raise InputError(f"--chunk must be a multiple of 64, got {CHUNK.value}")
    pages = PAGES.value or ROWS.value * num_pages_for(CAPACITY.value) + 1
    sizes = EngineSizes(ROWS.value, pages, CAPACITY.value, CHUNK.value)
    if TIMES.value:
        times = read_step_times(TIMES.value)
    else:
        from goodput.device_times import times_of_shape  # it imports jax

        computed = times_of_shape(MODEL.value, DEVICES.value, sizes)
        times = dict.fromkeys(("engine", "prefill", "decode"), computed)
    if not PREFILL.value:
        return Deployment(sizes, times["engine"], ENGINES.value)
    return Deployment(sizes, times["prefill"], 0, PREFILL.value, DECODE.value, times["decode"])


def result_at(deployment: Deployment, unit_arrivals: np.ndarray, lengths: list[Lengths], rate: float) -> dict:
    """Attainment, and medians and 90th percentiles of the times in seconds, at this rate."""
    requests = simulate(deployment, unit_arrivals / rate, lengths)
    times = [(request.ttft, request.tpot) for request in requests]
    fractions = attainment(times, TTFT.value, TPOT.value)
    result = dict(rate=rate, attainment=fractions.both, ttft=fractions.ttft, tpot=fractions.tpot)
    for name, seconds in zip(("ttft_seconds", "tpot_seconds"), np.transpose(times), strict=True):
        result[name] = np.quantile(seconds, (0.5, 0.9)).tolist()
    return result


def print_table(results: list[dict]) -> None:
    print(
        "requests/s  within both limits   of TTFT   of TPOT   TTFT, s: median    90%  TPOT, ms: median    90%"
    )
    for result in results:
        ttft = result["ttft_seconds"]
        tpot = result["tpot_seconds"]
        print(
            f"{result['rate']:10.3g}{result['attainment']:20.1%}{result['ttft']:10.1%}{result['tpot']:10.1%}"
            f"{ttft[0]:18.3f}{ttft[1]:7.3f}{1e3 * tpot[0]:18.1f}{1e3 * tpot[1]:7.1f}"
        )


if __name__ == "__main__":
    start(main)
