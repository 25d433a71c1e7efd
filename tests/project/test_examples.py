"""The programs of scripts/examples run and print what they demonstrate."""

import inspect
import re
import subprocess
import sys

import pytest
import run_script
from paths import ROOT, SCRIPTS
from quick import full_except

pytestmark = [pytest.mark.full, pytest.mark.oldest]

NAMES = sorted(path.stem for path in (SCRIPTS / "examples").glob("*.py"))
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


def call_functions(out):
    assert out == ("capital({'country': 'Spain'}) = \"Madrid\"\npopulation({'city': 'Madrid'}) = 3300000\n")


def grpo(out):
    """The reward rises, and log-probabilities of rollout and training agree."""
    rewards = numbers("reward (.*?),", out)
    assert len(rewards) == 3 and rewards[2] > rewards[0]
    assert len(apart := numbers("apart (.*)", out)) == 3 and max(apart) < 1e-4
    assert "on {'data': 1, 'model': 1}: 'Once upon a time," in out


def grpo_engine(out):
    """Tokens of the first batch are of the weights that train, some of the next ones of those before."""
    (calls, stale) = numbers("calls (.*?),", out), numbers(r"earlier weights (\d+)%", out)
    assert len(calls) == 3 and 0 <= min(calls) and max(calls) <= 3
    assert stale[0] == 0 and max(stale[1:]) > 0


def guidance(out):
    """The answers go from one prompt's answer to another's, two models agree, and a bias forbids a city."""
    found = re.findall(r"^(.*): \['(.*)', '(.*)'\]$", out, re.M)
    answers = {name: (one, other) for name, one, other in found}
    assert answers["scale 0.0"] == (" Havana.",) * 2
    assert answers["scale 1.0"] == answers["scale 2.0"] == (" Madrid.",) * 2
    assert len(set(answers["drawn"])) == 1
    assert answers["contrastive"] == (" Madrid.", " Havana.")
    assert answers["another city"][0] != " Madrid." and answers["another city"][1] == " Havana."


def logits_processors(out):
    """Only the watermarked answer is far from chance."""
    scores = dict(re.findall(r"^(.*?): .*\(watermark: (.*)\)$", out, re.M))
    assert len(scores) == 7 and float(scores.pop("watermark")) > 4
    assert all(abs(float(score)) < 3 for score in scores.values())


def own_family(out):
    assert "model.layers.0.ffn.expand.weight\n" in out and ".gate_proj" not in out
    assert len(re.findall(r"tokens:((?: \d+){8})$", out.strip())) == 1


def reuse_a_prefix(out):
    assert "prefilled 26 tokens: 'The capital of France is Paris.'" in out
    assert "prefilled 7 of 26 tokens: 'The capital of Japan is Tokyo.'" in out


def sft(out):
    """It learns each of the packed texts, and nothing of its neighbours."""
    assert out.startswith("4 texts in 2 rows")
    losses = numbers("(.*) nats", re.sub(r"step \d+:", "", out))
    assert len(losses) == 2 and losses[1] < losses[0]
    for learned in (
        "Atlantis is Poseidonis.",
        "Utopia is Amaurot.",
        "Laputa is Lagado.",
        "Narnia is Paravel.",
    ):
        assert f"The capital of {learned}\n" in out


def soft_prompt(out):
    losses = numbers("(.*) nats", re.sub(r"step \d+:", "", out))
    assert len(losses) == 10 and losses[-1] < losses[0] - 1


def speculative_decoding(out):
    assert out.startswith("the same tokens: True\npasses: 31, and ")
    (passes,) = numbers(r"and (\d+) with", out)
    assert passes < 31


def stop_a_stream(out):
    assert out == "The capital of\nabort after 3 tokens\n"


def trees_of_others(out):
    assert out.count("logits (1, 3, 64), and back the same: True\n") == 3


def tunix_rollout(out):
    """Methods and arguments are those that google-tunix 0.1.7 calls."""
    worker = run_script.functions("examples/tunix_rollout").EngineRollout
    for method, arguments in dict(
        generate=["prompts", "rollout_config", "kwargs"], update_params=["params", "filter_types"],
        get_per_token_logps=["prompt_tokens", "completion_tokens"], pad_id=[], eos_id=[], model=[],
    ).items():  # fmt: skip
        assert [*inspect.signature(getattr(worker, method)).parameters] == ["self", *arguments]
    assert {"rollout_actor", "tokenizer", "mesh", "rollout_config"} <= {*inspect.signature(worker).parameters}
    assert "The capital of Spain is Madrid.\n" in out and numbers("apart by (.*)", out)[0] < 1e-5
    (after, before) = numbers(r"(-\d+\.\d+)", out)
    assert after != before


def tunix_sampler(out):
    """Methods and arguments are those of tunix's protocol `Sampler`, and fields those of its responses."""
    sampler = run_script.functions("examples/tunix_sampler").EngineSampler
    for method, arguments in dict(
        initialize=[], start=[], stop=[], pause=[], resume=[], get_mesh=[], sample=["sampling_requests"],
        get_target_state=[], get_weight_sync_metadata=[], bind_weight_sync=["sync_request"],
        pre_weight_sync=["sync_request"], weight_sync=["sync_request"], post_weight_sync=["sync_request"],
        abort_weight_sync=["sync_request"], get_transfer_status=["req_id"], get_load_info=[],
        migrate_kv_cache=["source_server_id", "target_server_id", "token_ids"],
    ).items():  # fmt: skip
        found = inspect.signature(getattr(sampler, method)).parameters
        assert [name for name in found if name != "kwargs"] == ["self", *arguments], method
        is_async = method not in ("initialize", "get_target_state")
        assert inspect.iscoroutinefunction(getattr(sampler, method)) == is_async
    assert "r0: ' Madrid.', stop\n" in out and "r2: prompt 0 must be a non-empty list" in out
    assert numbers("apart by (.*)", out)[0] < 1e-5
    assert "version 7, of each token: [7" in out and "running: 0\n" in out


CHECKS = {
    check.__name__: check
    for check in (
        beams, best_of_n, call_functions, grpo, grpo_engine, guidance, logits_processors, own_family,
        reuse_a_prefix, sft, soft_prompt, speculative_decoding, stop_a_stream, trees_of_others,
        tunix_rollout, tunix_sampler,
    )
}  # fmt: skip


def test_every_example_is_tested_and_in_the_readme():
    assert [*CHECKS] == NAMES
    readme = (ROOT / "scripts/examples/README.md").read_text(encoding="utf-8")
    assert re.findall(r"\| `(\w+)\.py` \|", readme) == NAMES


# The tutorial on GRPO takes most of the path of grpo_engine.
@pytest.mark.parametrize("name", full_except((), CHECKS, soak=["grpo_engine", "guidance", "sft"]))
def test_example_runs(name):
    if name == "call_functions":
        pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    if name in ("grpo", "grpo_engine", "sft"):
        pytest.importorskip("orbax.checkpoint", reason="the extra `train` is not installed")
    smaller = ("--samples=4", "--tokens=16") if name == "grpo" else ()
    ran = run_script.run(f"examples/{name}", *smaller)
    lines_of_engines = re.sub(".* ready in .*\n", "", ran.stderr)
    assert (ran.returncode, lines_of_engines) == (0, "")
    CHECKS[name](ran.stdout)


def test_an_example_names_the_extra_that_it_needs():
    code = (
        "import runpy, sys; sys.modules['optax'] = None\n"
        "sys.path.insert(0, 'scripts/examples'); runpy.run_path('scripts/examples/sft.py')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    message = "optax is not installed: run pip install '.[train]' in the checkout"
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
