"""The tutorials of scripts/tutorials run as scripts, their results are right, and they are notebooks."""

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT, SCRIPTS
from quick import full_except
from test_examples import numbers

FOLDER = SCRIPTS / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
FEW_STEPS = 2


def generate_and_score(out, whole):
    """Answers are right, keys repeat them, and both kinds of log-probabilities agree with `score`."""
    for fact in ("France is Paris", "Spain is Madrid", "Peru is Lima", "Japan is Tokyo"):
        assert f"The capital of {fact}.\n" in out
    assert "same tokens alone: True" in out
    assert "same key, same tokens: True" in out and "other key, same tokens: False" in out
    differences = numbers(r"largest difference .*: +(\S+)\n", out)
    assert len(differences) == 2 and max(differences) < 1e-4
    true, false = numbers(r"perplexity +(\S+)  The", out)
    assert true < false / 10
    perplexities = numbers(r"temperature \S+: perplexity (.*)", out)
    assert len(perplexities) == 3 and perplexities[1] == true


def rollouts_in_jit(out, whole):
    """The sampler draws from the exact distribution, vmap draws the same, and gradients raise the reward."""
    traced = "(jax traces `rollout`)"
    first, temperatures = out.split("temperature 0.0: 1 different answers of 8\n")
    assert first.count(traced) == 1 and traced not in temperatures.split("draws,")[0]
    (deviation,) = numbers(r"largest deviation: (\S+) standard errors", out)
    assert deviation < 4.5
    assert "vmap gives the same tokens: True" in out
    rates = numbers(r"rows: +(\d+) tokens/s", out)
    assert len(rates) == (4 if whole else FEW_STEPS) and min(rates) > 0
    assert numbers("differ by at most (.*) nats", out)[0] < 1e-3
    rewarded, others = numbers(r"answers: +(\S+) nats", out)
    assert rewarded > others
    norms = numbers(r"gradient norm +(\S+),", out)
    assert len(norms) == 8 and norms[0] > norms[-1] > 0


def lora(out, whole):
    """The loss falls. After all steps only the adapter knows the capitals, in the engine and over HTTP."""
    losses = numbers(r"step \d+: (\S+) nats", out)
    assert len(losses) > 1 and losses[-1] < losses[0]
    assert "loaded as it was saved: True" in out and "adapter_model.safetensors: " in out
    assert "models: bundled, capitals\n" in out and "exit code 0\n" in out
    taught = ("Atlantis is Poseidonis", "Utopia is Amaurot", "Laputa is Lagado")
    for fact in taught if whole else ():
        assert f"with the adapter: The capital of {fact}.\n" in out
        assert f"without:          The capital of {fact}.\n" not in out
    if whole:
        assert losses[-1] < 0.3
        (apu,) = numbers(r"'apu' +(\S+) nats", out)
        assert -4.1 < apu < -3.87  # the limit of the frozen vocabulary matrix
        assert f"\ncapitals: The capital of {taught[0]}.\n" in out
        assert "\nbundled: The capital of Atlantis" not in out


def grpo(out, whole):
    """Each batch is of the newest adapter, and scores agree. The reward rises."""
    steps = 15 if whole else FEW_STEPS
    assert numbers(r"adapter versions \{(.*)\}", out) == list(range(steps))
    assert max(numbers(r"difference (\S+)\n", out)) < 1e-4
    rewards = numbers(r"reward (\S+),", out)
    divergences = numbers(r"KL (\S+),", out)
    assert rewards[0] < 0.3 and rewards[-1] > rewards[0] and divergences[-1] > divergences[0] == 0
    if whole:
        assert rewards[-1] > 0.9


def look_inside(out, whole):
    """Attention rows sum to 1, the last row of the lens is the prediction, and the probe is right. After all
    steps the vector steers the answer.
    """
    assert "rows sum to 1.000 … 1.000" in out
    probabilities = numbers(r"' Mad' has probability (.*)", out)
    assert len(probabilities) == 5 and probabilities[0] < 0.01 and probabilities[-1] > 0.9
    assert "the probe is right about 8 of 8" in out
    before, after = numbers(r"(\S+) nats (?:before|after)", out)
    assert after < before
    assert "factor 0.0: The capital of Spain is Madrid.\n" in out
    if whole:
        assert after < 1 and "factor 1.0: The capital of Spain is Havana.\n" in out


CHECKS = {check.__name__: check for check in (generate_and_score, grpo, look_inside, lora, rollouts_in_jit)}
PLOTS = {
    "generate_and_score": ["generate_and_score"],
    "grpo": ["grpo"],
    "look_inside": ["attention", "logit_lens", "steering"],
    "lora": ["lora_loss"],
    "rollouts_in_jit": ["gradient_norms", "sampled_distribution", "tokens_per_second"],
}


def run(name, folder, **environment):
    """Returns what a tutorial prints, after it wrote its plots into a folder."""
    for package in ("matplotlib", "optax", "starlette", "uvicorn"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | dict(MPLBACKEND="agg", PYTHONPATH=path, PYTHONIOENCODING="utf-8") | environment
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"], cwd=folder, env=env, capture_output=True, timeout=800
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert sorted(path.stem for path in folder.glob("*.png")) == PLOTS[name]
    return done.stdout.decode()


@pytest.mark.unit
def test_every_tutorial_is_tested_and_in_the_readme():
    assert [*CHECKS] == NAMES == [*PLOTS]
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {*re.findall(r"\| \[.*\]\((\w+)\.py\)", readme)} == {*NAMES}
    assert {*re.findall(r"\| `(\w+)\.py` \|", readme)} == {*NAMES}


@pytest.mark.oldest
@pytest.mark.parametrize("name", full_except((), NAMES, ["grpo", "lora", "rollouts_in_jit"]))
def test_tutorial_runs(name, tmp_path):
    CHECKS[name](run(name, tmp_path, XINFER_JAX_TUTORIAL_STEPS=str(FEW_STEPS)), whole=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_tutorial_teaches(name, tmp_path, monkeypatch):
    """With all steps."""
    monkeypatch.delenv("XINFER_JAX_TUTORIAL_STEPS", raising=False)
    CHECKS[name](run(name, tmp_path), whole=True)


@pytest.mark.full
@pytest.mark.oldest
@pytest.mark.parametrize("name", NAMES)
def test_tutorial_is_a_notebook(name):
    """A notebook and the file have the same cells, and the file is written as it was read."""
    jupytext = pytest.importorskip("jupytext", reason="the extra `docs` is not installed")
    nbformat = pytest.importorskip("nbformat")
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="py:percent")
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    stored = nbformat.reads(jupytext.writes(notebook, fmt="ipynb"), as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == cells
    assert len(cells) == len(re.findall(r"^# %%", text, re.MULTILINE))
    assert cells[0][0] == "markdown" and cells[0][1].startswith("# ")
    again = jupytext.reads(jupytext.writes(stored, fmt="py:percent"), fmt="py:percent")
    assert [(cell.cell_type, cell.source) for cell in again.cells] == cells
