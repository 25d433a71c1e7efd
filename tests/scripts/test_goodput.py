"""scripts/simulate.py and its simulator: cases computed by hand, a queue of known mean, bad input."""

import json
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import run_script
from goodput.simulator import Deployment, EngineSizes, simulate
from goodput.step_times import StepTimes
from goodput.workload import attainment, draw_arrivals, draw_lengths, draw_workload
from paths import ROOT

pytestmark = pytest.mark.oldest

run = partial(run_script.run, "simulate")
SIZES = EngineSizes(rows=8, pages=600, capacity=4096, chunk=256)
TIMES = StepTimes(
    chunk=[[1.0, 0]], page=[[0.25, 0]], decode=[[0.1, 0]], first=0.05, call=0.02, move=0.02, move_call=0.1,
    send=0.01, place=0.004,
)  # fmt: skip
TWO_SIDES = Deployment(SIZES, TIMES, engines=0, prefill=1, decode=1)
REQUESTS = dict(arrivals=[0.0, 0.5], lengths=[(300, 5), (300, 1)])


def test_one_engine_by_hand():
    """The first prompt: a chunk, then a page of 44 tokens. The second comes during the chunk: its chunk is in
    the step of that page, and delays four decode steps.
    """
    first, second = simulate(Deployment(SIZES, TIMES), **REQUESTS)
    assert [first.first, first.ended] == pytest.approx([1.3, 1.3 + 1.0 + 0.42])
    assert second.first == second.ended == pytest.approx(2.72 + 0.3)
    assert (second.ttft, second.tpot) == pytest.approx((2.52, 0))


def test_two_sides_by_hand():
    """The pages of the first row are sent after the step with the second's chunk: 5 pages in 0.05 s, on the
    way 0.2 s, placed in 0.02 s.
    """
    first, second = simulate(TWO_SIDES, **REQUESTS)
    assert [first.first, first.ended] == pytest.approx([1.3, 2.3 + 0.05 + 0.2 + 0.02 + 0.42])
    assert second.first == pytest.approx(2.35 + 0.3)


def test_all_rows_end_when_pages_are_few():
    """Rows are preempted, and prefilled rows wait for pages of the decode engine."""
    few = SIZES._replace(pages=12)
    lengths = draw_lengths("lognormal:250,120,0.4,0.3", 30, 11 * 64, np.random.default_rng(0))
    for deployment in (Deployment(few, TIMES), Deployment(few, TIMES, 0, 2, 1)):
        requests = simulate(deployment, np.arange(30) / 5, lengths)
        assert all(r.arrival < r.first <= r.ended < np.inf for r in requests)


def test_the_mean_wait_is_that_of_a_queue_with_one_server():
    """M/D/1: prompts of one page, of which each takes D; at a load of 0.7 they wait 0.7 D / (2 x 0.3)."""
    times = StepTimes(chunk=[[1, 0]], page=[[0.01, 0]], decode=[[1, 0]])
    arrivals = draw_arrivals(8000, 1.0, np.random.default_rng(1)) / 70
    requests = simulate(Deployment(SIZES, times), arrivals, [(64, 1)] * 8000)
    wait = np.mean([request.ttft for request in requests]) - 0.01
    assert wait == pytest.approx(0.7 * 0.01 / 0.6, rel=0.1)


def test_gaps_have_the_coefficient_of_variation():
    for cv in (0.5, 1, 3):
        gaps = np.diff(draw_arrivals(20000, cv, np.random.default_rng(0)))
        assert (gaps.mean(), gaps.std()) == pytest.approx((1, cv), rel=0.1)


def test_lengths_have_their_means_and_fit():
    lengths = np.array(draw_lengths("lognormal:400,100,0.8,0.5", 20000, 10**6, np.random.default_rng(0)))
    assert lengths.mean(0) == pytest.approx([400, 100], rel=0.03)
    chat, same = (draw_lengths(kind, 9, 4096, np.random.default_rng(1)) for kind in ("chat", "lognormal"))
    assert chat == same
    cut = np.array(draw_lengths("summarization", 500, 1000, np.random.default_rng(0)))
    assert cut.min() >= 1 and cut.sum(1).max() <= 1000


def test_a_simulation_repeats_and_its_attainment_counts_both_limits():
    workload = draw_workload("lognormal:200,20,0.5,0.5", 100, 4096, 1.0, seed=2)
    first, second = (simulate(TWO_SIDES, *workload) for _ in range(2))
    assert first == second
    assert attainment([(1, 1), (3, 1), (1, 3), (3, 3)], 2, 2).both == 0.25


def times_file(tmp_path, **changes):
    path = tmp_path / "times.json"
    path.write_text(json.dumps(dict(chunk=[[1.0, 0]], page=[[0.25, 0]], decode=[[0.1, 0]]) | changes))
    return f"--times={path}"


def test_simulate_prints_a_table_and_imports_no_jax(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300 5\n100, 20\n")
    command = [
        sys.executable, "-X", "importtime", "scripts/simulate.py", times_file(tmp_path),
        f"--lengths={lengths}", "--ttft=2", "--tpot=1", "--rates=1e-4,1", "--requests=20",
        "--prefill_engines=1", "--decode_engines=1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "xinfer_jax.engine.scheduler" in done.stderr and not re.search(r"\| +jax$", done.stderr, re.M)
    *table, last = done.stdout.splitlines()
    results = json.loads(last)["results"]
    assert len(table) == 3 and [result["rate"] for result in results] == [1e-4, 1]
    assert results[0]["attainment"] == 1 > results[1]["attainment"]


LIMITS = ["--ttft=2", "--tpot=1"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ttft=2"], "--tpot=SECONDS is needed"),
        ([*LIMITS, "--rates=1,x"], "--rates=1,x: give numbers above 0"),
        ([*LIMITS, "--prefill_engines=1"], "need each other"),
        ([*LIMITS, "--burstiness=0"], "--burstiness=0.0: give numbers above 0"),
        ([*LIMITS, "--chunk=100"], "--chunk must be a multiple of 64"),
        (
            [*LIMITS, "--lengths=nowhere"],
            "'nowhere' are neither chat, code, summarization nor a readable file",
        ),
        ([*LIMITS, "--lengths=lognormal:1,2"], "give lognormal:P,A,SP,SA"),
        ([*LIMITS, "--model=llama3.1-8b"], "give --times=FILE or --model=NAME"),
    ],
)
def test_bad_flags_of_simulate_exit_with_one_line(flags, message, tmp_path):
    done = run(times_file(tmp_path), *flags)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(f"simulate: .*({message}).*\n", done.stderr)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(decode=[[0, 1]]), "engine.decode is not a time"),
        (dict(page=0.25), "engine.page is not a time"),
        (dict(first=-1), "engine.first is not a time"),
        (dict(speed=1), "engine needs chunk, page and decode"),
    ],
)
def test_bad_step_times_exit_with_one_line(changes, message, tmp_path):
    done = run(times_file(tmp_path, **changes), *LIMITS)
    assert done.returncode == 2 and re.fullmatch(f"simulate: .*{message}.*\n", done.stderr)


def test_computed_times_are_the_lower_bounds_of_plan():
    """The lines of a decode step and of chunks, at their ends, beside `plan_estimates`."""
    from bench.model_shapes import hf_config
    from goodput.device_times import computed_times
    from goodput.step_times import seconds_at
    from gpu import plan_estimates as estimates
    from gpu.card_specs import CARDS

    from xinfer_jax.families.reading import from_hf

    job = estimates.Job(from_hf(hf_config("qwen2.5-7b")), "bfloat16", "bfloat16", 16, 3072, 256)
    times = computed_times(job, 2, CARDS["h200"], move_gbs=10)
    limits = estimates.decode_limits(job, 2, CARDS["h200"])
    assert seconds_at(times.decode, 16 * 3072) == pytest.approx(limits.total, rel=1e-6)
    chunks = sum(seconds_at(times.chunk, start) for start in range(0, 3072, 256))
    limits = estimates.prefill_limits(job, 2, CARDS["h200"])
    assert chunks == pytest.approx(limits.total, rel=0.02)
    assert times.move == pytest.approx(2 * 28 * 4 * 128 * 2 * 64 / 10e9)  # K and V of 28 layers
