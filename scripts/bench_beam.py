"""Compares beam search with other engines: one random checkpoint, each engine in its own process, all engines
in every round.

    python scripts/bench_beam.py --rounds=3 --python=peers=/path/to/venv/bin/python

The engines, flags and checkpoint are those of bench_peers.py. The measured time is that of whole calls, from
token ids to token ids, including prefill. The first call of each process, which compiles, is reported
separately. Ratios are taken within a round.
"""

from launcher import start

# isort: split
import json

import bench_peers as peers
from absl import flags
from bench_peers import BATCHES, CONFIG, LENGTHS, NEW, THREADS, median, numbers
from peer_beam_search import BEAM_ENGINES

from xinfer_jax.errors import InputError

BEAMS = flags.DEFINE_integer("num_beams", 4, "Number of beams per prompt.", lower_bound=2)
CALLS = flags.DEFINE_integer(
    "calls", 3, "Measured calls of each process and case; their median is reported.", lower_bound=1
)
for flag, default in (
    (LENGTHS, ["26"]),
    (BATCHES, ["1"]),
    (NEW, 32),
    (peers.WANTED, [f"{name}:float32" for name in BEAM_ENGINES]),
):
    flags.set_default(flag, default)


def main(argv: list[str]) -> None:
    wanted = peers.engines()
    pythons = peers.interpreters()
    if other := [name for name in wanted if name.split(":")[0] not in BEAM_ENGINES]:
        raise InputError(
            f"engine {other[0]!r} has no beam search here: choose among {', '.join(BEAM_ENGINES)}"
        )
    cases = [(length, rows) for length in numbers(LENGTHS) for rows in numbers(BATCHES)]
    hf = peers.shape()
    workdir = peers.checkpoint(hf)
    about = {
        "config": CONFIG.value,
        "cpu": peers.cpu_name(),
        "threads": THREADS,
        "num_beams": BEAMS.value,
        "new_tokens": NEW.value,
    }
    print(
        f"{CONFIG.value}, random weights; {BEAMS.value} beams, {NEW.value} new tokens; {THREADS} threads of"
        f" {peers.cpu_name()}"
    )
    job = {
        "program": "peer_beam_search.py",
        "checkpoint": str(workdir / "checkpoint"),
        "vocab_size": hf["vocab_size"],
        "cases": cases,
    }
    job |= {
        "threads": THREADS,
        "num_beams": BEAMS.value,
        "new_tokens": NEW.value,
        "seed": peers.SEED.value,
        "calls": CALLS.value,
    }
    results, problems = peers.rounds(job, wanted, pythons, workdir)
    print(
        json.dumps(
            peers.round_floats(about | {"engines": report(results, wanted, cases), "problems": problems})
        )
    )


def report(
    results: dict[str, list[dict]], wanted: dict[str, str], cases: list[tuple[int, int]]
) -> dict[str, dict]:
    """Prints the medians over the rounds and how many times faster we are; returns both."""
    keys = [f"{length} x{rows}" for length, rows in cases]
    summary = {}
    lines = []
    for name, rounds in results.items():
        ours = results.get(f"ours:{wanted[name]}") or []
        if rounds:
            medians = {
                key: median([r[key] for r in rounds])
                for key in (*keys, "warmup_s", "anon_mib", "resident_mib")
                if rounds[0].get(key)
            }
            ratio = {
                key: median([b[key] / a[key] for a, b in zip(ours, rounds, strict=False)]) for key in keys
            }
            summary[name] = {
                "median": medians,
                "ours_is_faster": ratio,
                "version": rounds[0]["version"],
                "rounds": rounds,
            }
            speeds = [
                cell
                for key, (_, rows) in zip(keys, cases, strict=True)
                for cell in (rows * NEW.value / medians[key], ratio[key])
            ]
            same = bool(ours) and ours[0]["tokens"] == rounds[0]["tokens"]
            lines.append(
                [
                    name,
                    *speeds,
                    *(medians.get(key) for key in ("warmup_s", "anon_mib")),
                    rounds[0]["score"],
                    same,
                ]
            )
    heads = [head for key in keys for head in (f"tok/s {key}", "ours ÷ peer")]
    print(
        "Medians: tokens of the best sequences per second, by prompt length x prompts; seconds of the first"
        " call; anonymous MiB; best score"
    )
    peers.print_table(["engine", *heads, "first call", "MiB", "score", "same as ours"], lines, digits=2)
    return summary


if __name__ == "__main__":
    start(main)
