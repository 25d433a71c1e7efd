"""The programs of scripts/examples run, and print what they are there to show."""

import re
from pathlib import Path

import programs
import pytest
import test_meshes

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "scripts" / "examples").glob("*.py"))
NAMES.remove("checkout")


def numbers(pattern, out):
    return [float(number) for number in re.findall(pattern, out)]


def beams(out):
    search, sampling = out.split("beam sampling:")
    assert "Madrid" not in out and "The capital of" in out
    for part in (search, sampling):
        scores = numbers(r"(-\d\.\d{3}) ", part)
        assert len(scores) == 4 and scores == sorted(scores, reverse=True)


def best_of_n(out):
    assert len(numbers("(-.*) nats", out)) == 8 and "best: The capital of Spain is Madrid.\n" in out


def guess_ahead(out):
    assert out.startswith("the same tokens: True\npasses: 31, and ")
    (passes,) = numbers(r"and (\d+) with", out)
    assert passes < 31


def log_probabilities(out):
    assert len(numbers(r"(\d\.\d{3})  of", out)) == 9  # tokens, EOS among them
    assert "'<|im_end|>' 1.000  of '<|im_end|>' 1.000, " in out


def many_draws(out):
    assert "temperature 0.0: ' Madrid.'" in out and "the same tokens: True" in out


def reinforce(out):
    assert len(apart := numbers("apart by (.*)", out)) == 3 and max(apart) < 1e-4


def reinforce_on_a_mesh(out):
    """On eight devices as on one."""
    example = ROOT / "scripts" / "examples" / "reinforce_on_a_mesh.py"
    over = test_meshes.on_devices(8, example)
    rewards = numbers("reward (.*?),", out)
    assert len(rewards) == 3 and rewards == numbers("reward (.*?),", over) and "'data': 4, 'model': 2" in over


def reuse_a_prefix(out):
    assert "read 26 tokens: 'The capital of France is Paris.'" in out
    assert "read 7 of 26 tokens: 'The capital of Japan is Tokyo.'" in out


def soft_prompt(out):
    losses = numbers("(.*) nats", re.sub(r"step \d+:", "", out))
    assert len(losses) == 10 and losses[-1] < losses[0] - 1


def stop_a_stream(out):
    assert out == "The capital of\nstop after 3 tokens\n"


CHECKS = {
    check.__name__: check
    for check in (
        beams, best_of_n, guess_ahead, log_probabilities, many_draws, reinforce, reinforce_on_a_mesh,
        reuse_a_prefix, soft_prompt, stop_a_stream,
    )
}  # fmt: skip


def test_every_example_is_here():
    assert [*CHECKS] == NAMES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\| `(\w+)\.py` \|", readme) == NAMES


@pytest.mark.parametrize("name", CHECKS)
def test_example_runs(name):
    ran = programs.run(f"examples/{name}")
    assert (ran.returncode, ran.stderr) == (0, "")
    CHECKS[name](ran.stdout)
