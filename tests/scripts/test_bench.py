"""`xinfer-jax bench` and scripts/bench_pairs.py on tiny models: their fields, figures that must agree with
each other, and bad flags.
"""

import json
import re
from functools import partial
from pathlib import Path

import jax
import pytest
import run_script
import tiny
from paths import ROOT

import xinfer_jax as xj
from xinfer_jax.estimates.model_shapes import hf_config
from xinfer_jax.estimates.model_work import bytes_per_pass, decode_work, prefill_work
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.full, pytest.mark.oldest]

bench = partial(run_script.command, "bench")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config")
    tiny.write_json(path / "config.json", tiny.CONFIG)
    return path


def is_spread(value: dict, least: float = 0.0) -> bool:
    return (
        value.keys() == {"median", "min", "max"} and least < value["min"] <= value["median"] <= value["max"]
    )


def test_bench_figures_agree_with_each_other(directory):
    """A prompt that is too long is skipped."""
    done = bench(f"--config={directory}", "--prompt_lengths=8,300", "--new_tokens=6", "--batch_sizes=3",
                 "--repeats=1", "--probe_mib=8", "--requests=5", "--rows=2", "--sampled")  # fmt: skip
    assert done.returncode == 0 and re.fullmatch("2 rows of .*\n", done.stderr)  # the sizes of the engine
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["jax"] == jax.__version__ and "cores" in results["device"] and results["date"]
    assert results["command"].startswith(f"xinfer-jax bench --config={directory} --prompt_lengths=8,300")
    assert results["weight_bytes"] == results["weight_bytes_per_pass"]
    assert all(is_spread(results["limits"][kind]) for kind in ("read", "float32", "bfloat16"))
    row, too_long = results["rows"]
    assert "context limit 256" in too_long["skipped"] and "skipped: prompt of 300" in done.stdout
    assert row["ttft_s"]["median"] >= row["prefill"]["seconds"]["median"]
    assert row["prefill_tok_s"]["median"] == pytest.approx(24 / row["prefill"]["seconds"]["median"])
    assert row["decode_tok_s"]["median"] == pytest.approx(3 / row["tpot_s"]["median"])
    assert results["weight_bytes"] < row["floor_bytes"] < row["peak_bytes"]
    for phase in ("prefill", "decode"):
        assert is_spread(row[phase]["of_limit"]) and row[phase]["bound"] in ("memory", "compute")
    engine = results["engine"]
    assert (engine["requests"], engine["prompt_tokens"], engine["new_tokens"]) == (5, 40, 30)  # none of 300
    assert engine["new_tok_s"] == pytest.approx(30 / engine["seconds"])
    assert 0 < engine["ttft_s"]["p50"] <= engine["ttft_s"]["p99"] < engine["seconds"]
    table = next(line for line in done.stdout.splitlines() if line.startswith("   3      8"))
    assert f"{row['peak_bytes'] / 2**20:.0f}" in table


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--prompt_lengths=8,x"], "prompt_lengths"),
        (["--new_tokens=1"], "new_tokens"),
        (["--repeats=0"], "repeats"),
        (["--rows=0"], "rows"),
        (["--nonsense"], "nonsense"),
        (["--config=no-such-shape"], "no-such-shape"),
        (["--config=tiny", "--model=x"], "leave out one"),
        (["--dtype=float8"], "dtype"),
        (["--quantize=int3"], "quantize"),
        (["--batch_sizes="], "batch_sizes"),
        (["extra"], "extra"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_flags_of_bench(flags, word):
    assert_rejected(bench(*flags), word)


def assert_rejected(done, word: str, program: str = "xinfer-jax bench") -> None:
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: ") and word in line


def test_pairs_of_calls(directory):
    """The test compares this checkout with itself. The process of a commit is started in the same way."""
    bench_pairs = run_script.functions("bench_pairs")
    with bench_pairs.start_process(ROOT, directory / "config.json", "int8") as process:
        for call in (bench_pairs.CALLS[0], bench_pairs.CALLS[-1]):
            assert 0 < bench_pairs.ask(process, call) < 100
        process.stdin.close()
    assert process.returncode == 0


def test_flops_and_bytes_of_a_known_model():
    """Qwen2.5-0.5B by hand: 494,032,768 weights, 357,826,560 of them in the matrices of the layers."""
    config = from_hf(hf_config("qwen2.5-0.5b"))
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), "float32"))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 494_032_768
    head = 2 * 151936 * 896
    layers = 2 * 357_826_560
    work = prefill_work(config, 1000, [26, 10])
    assert (work.bytes, work.flop) == (
        1000,
        layers * 36 + 4 * 896 * 24 * (26 * 27 // 2 + 10 * 11 // 2) + 2 * head,
    )
    # Three steps, which see 27, 28, 29 and 11, 12, 13 keys.
    work = decode_work(config, 1000, 4, [26, 10], new_tokens=4)
    assert work.bytes == 1000 + 24 * 2 * 128 * 4 * (28 + 12)
    assert work.flop == 2 * (layers + head) + 4 * 896 * 24 * (28 + 12)


def test_a_sliding_window_bounds_the_bytes_of_a_step():
    config = from_hf(dict(tiny.CONFIG, use_sliding_window=True, sliding_window=16, max_window_layers=1))
    assert config.layer_windows == (None, 16)
    work = decode_work(config, 0, 4, [100], new_tokens=2)
    assert work.bytes == 2 * 2 * 8 * 4 * (101 + 16)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_counts_once(tied):
    config = from_hf(dict(tiny.CONFIG, tie_word_embeddings=tied))
    params = xj.init_params(config, jax.random.key(0), "float32")
    matrix = params["embed"]["weight"].nbytes
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert bytes_per_pass(params) == everything - (0 if tied else matrix)
