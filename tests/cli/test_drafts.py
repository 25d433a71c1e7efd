"""The flag `--draft` of commands: the names, heads and models that it takes, and the statistics of drafts."""

import dataclasses
import json
import re
from types import SimpleNamespace

import draft_cases
import jax
import pytest
from tiny import ASK

import xinfer_jax as xj
from xinfer_jax.batch.line_request import LineDefaults
from xinfer_jax.batch.run_settings import run_settings
from xinfer_jax.checkpoint.loading import LoadStats
from xinfer_jax.cli import process_group, startup
from xinfer_jax.cli.answer_flags import PARSER, engine_options
from xinfer_jax.draft_heads.draft import place_draft
from xinfer_jax.serve.command import PARSER as SERVE

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The directory of a head, of a model in float16."""
    draft = draft_cases.draft_case("dspark").draft
    path = tmp_path_factory.mktemp("draft") / "head"
    xj.save_draft(draft, path)
    return path


def test_an_engine_gets_names_and_heads(head, good):
    model = draft_cases.draft_case("dspark").model
    for name, found in ((None, None), ("none", None), ("lookup", "lookup"), ("mtp", "mtp")):
        assert startup.engine_draft(name, model) == found
    half = xj.Model(jax.tree.map(lambda x: x.astype("float16"), model.params), model.config)
    draft = startup.engine_draft(str(head), half)
    assert isinstance(draft, xj.Draft) and draft.params["final_norm"].dtype == "float16"
    with pytest.raises(xj.InputError, match=r"--draft='.*' has no draft head, .*: give lookup"):
        startup.engine_draft(str(good), model)
    with pytest.raises(xj.InputError, match="draft '/no/such' does not exist"):
        startup.engine_draft("/no/such", model)


def test_flags_of_an_engine_keep_the_name():
    SERVE.parse(["serve", "--draft=some/head", "--draft_tokens=2"])
    assert engine_options(SERVE.values).draft == "some/head"
    SERVE.parse(["serve", "--draft=none"])
    assert engine_options(SERVE.values).draft is None
    SERVE.parse(["serve"])
    assert engine_options(SERVE.values).draft is None


def test_processes_compare_the_files_of_heads(head, good):
    def compared(draft):
        PARSER.parse(["xinfer-jax", f"--model={good}", f"--draft={draft}"])
        return process_group.shared_settings(PARSER)

    assert "config.json of --draft" in compared(head)
    for name in ("lookup", "mtp"):
        same = compared(name)
        assert same["--draft"] == name and not any(key.endswith("of --draft") for key in same)


def test_a_resumed_run_has_the_same_head():
    """Settings name a head by its numbers, and never have its arrays."""
    model, draft = draft_cases.draft_case("dspark")
    other = dataclasses.replace(draft, params=jax.tree.map(lambda x: 2 * x, draft.params))
    mtp = draft_cases.draft_case("mtp").model
    defaults = LineDefaults(xj.GenerateOptions(), 0, False, None, False, True)

    def recorded(model, draft):
        options = xj.EngineOptions(draft=draft, capacity=64)
        return run_settings(model, defaults, options, None, False)["engine.draft"]

    assert recorded(model, None) is None and recorded(model, "lookup") == "lookup"
    assert re.fullmatch("dflash [0-9a-f]{64}", recorded(model, draft))
    assert recorded(model, draft) != recorded(model, other)
    assert re.fullmatch("mtp [0-9a-f]{64}", recorded(mtp, "mtp"))


def test_a_head_is_placed_once():
    model, draft = draft_cases.draft_case("eagle3")
    assert place_draft(draft, model.params) is draft  # both are where the program runs
    mesh = jax.make_mesh((1,), ("model",))
    params = jax.device_put(model.params, xj.params.shardings(model.config, mesh))
    placed = place_draft(draft, params)
    assert placed.params["final_norm"].sharding.mesh.shape == {"model": 1}
    assert place_draft(draft, params).params is placed.params
    committed = jax.device_put(model.params, jax.devices()[0])
    assert place_draft(draft, committed).params["final_norm"].committed


def test_statistics_have_accepted_tokens_by_place():
    from xinfer_jax.cli.answer import _format_stats, _json_stats

    stats = xj.types.GenerateStats(1, 5, 10, 10)
    stats.passes, stats.accepted, stats.acceptance = [9], [[8, 8, 7]], [23 / 27]
    model: object = SimpleNamespace(load_stats=LoadStats(0.1, 10, "float32"))
    assert "draft: 85% of its tokens accepted, 9 passes (8, 8, 7 by place)" in _format_stats(
        model, stats, "stop", False
    )
    found = json.loads(json.dumps(_json_stats(model, stats, {})))
    assert found["accepted"] == [[8, 8, 7]] and found["passes"] == [9]


@pytest.mark.full
def test_the_bundled_head_answers(command, tmp_path):
    code, out, err = command(ASK, "--draft=mtp", "--prompt=What is the capital of France?")
    assert (code, out) == (0, "The capital of France is Paris.\n")
    assert re.search(r"\ndraft: \d+% of its tokens accepted, \d passes \(\d, \d, \d by place\)\n", err)
    code, out, err = command(ASK, "--draft=mtp", f"--model={tmp_path}")
    assert code == 2 and err.count("\n") == 1


@pytest.mark.soak
def test_an_engine_smaller_than_a_page_has_a_head():
    """A prefill chunk has more places than a row."""
    model, draft = draft_cases.draft_case("mtp")
    options = xj.GenerateOptions(max_tokens=8, eos_token_ids=())
    want = xj.generate(model.params, model.config, [[5, 6, 7]], options)
    with xj.Engine(model, draft=draft, rows=1, capacity=28) as engine:
        request = engine.submit([5, 6, 7], options, prompt_logprobs=0)
        assert request.result().tokens == want.tokens and len(request.prompt_logprobs) == 2
