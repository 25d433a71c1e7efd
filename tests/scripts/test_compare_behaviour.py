"""The comparison of behaviour of two commits (scripts/compare_behaviour.py)."""

import copy
import dataclasses
import json

import jax
import parity_cases
import pytest
import run_script
import tiny
from behaviour import programs, public_api, recording, records
from bench.commit_checkout import write_random_checkpoint

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

CASE = "qwen3-5-tied"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The records of one case, twice: of a folder each."""

    def record(name):
        folder = tmp_path_factory.mktemp(name) / "parity" / CASE
        write_random_checkpoint(folder, parity_cases.CASES[CASE].hf)
        return records.case_records(folder, xj.load_model(folder, dtype="float32"))

    return [json.loads(json.dumps(record(name))) for name in ("before", "after")]


@pytest.fixture
def report():
    return run_script.functions("compare_behaviour").report


def test_a_case_is_recorded_equally_twice(found, report, capsys):
    before, after = ({f"{CASE}: {name}": x for name, x in side.items()} for side in found)
    assert report(before, after) == 0
    assert capsys.readouterr().out == f"equal: {len(before)} records\n" and len(before) > 130


def test_calls_end_as_they_do_for_this_model(found):
    got = found[0]
    assert got["forward"] == ["float32[2,8,96]"]
    assert got["generate lookup"] == "begins" and got["beam_search plain"] == "begins"
    for name, error in (
        ("generate itself as draft model", "a draft model is not supported"),
        ("engine routed_experts", "routed_experts are of mixtures of experts"),
        ("attention_weights", "layer 0 has no softmax attention"),
    ):
        assert got[name].startswith(f"InputError: {error}"), name
    assert got["engine plain"]["page_bytes"] > 0 and got["init_cache 2 rows of 48, int8"]["bytes"] > 0
    assert "['embed']['weight']" in got["params float32"]
    assert {"config.json", "model.safetensors"} <= got["save int8"].keys()
    assert "adapter_config.json" in got["save_adapter"]
    errors = {x.split(":")[0] for x in got.values() if isinstance(x, str)}
    assert errors == {"begins", "InputError", "ContextLengthError", "ValueError"}, "ValueError: of one device"


@pytest.mark.parametrize(
    "name, part", [("save int8", "config.json"), ("engine plain", "pages"), ("params int4", "['final_norm']")]
)
def test_a_difference_is_printed_with_both_values(found, report, capsys, name, part):
    before = {f"{CASE}: {x}": value for x, value in found[0].items()}
    after = copy.deepcopy(before)
    after[f"{CASE}: {name}"][part] = "changed"
    assert report(before, after) == 1
    out = capsys.readouterr().out
    assert f"{CASE}: {name} / {part}" in out and '  + "changed"\n' in out
    assert out.endswith(f"1 of {len(before)} records differ\n")


def test_a_case_that_the_base_does_not_load_is_new(report, capsys):
    before = {"api: names": [], "lfm2: load": "InputError: an unknown model_type"}
    assert report(before, {"api: names": [], "lfm2: forward": ["float32[2,8,96]"]}) == 0
    assert capsys.readouterr().out == "new, not compared: lfm2\nequal: 1 records\n"
    assert report({"api: names": []} | {"lfm2: forward": []}, before) == 2


def test_signatures_do_not_say_where_a_thing_is_defined():
    assert public_api.signature_of(xj.KVCache.repeat_rows) == "(self, n: int) -> 'KVCache'"
    members = public_api.members_of(xj.KVCache)
    assert members["capacity"] == "property(self) -> int" and {"layers", "k"} <= members.keys()

    @dataclasses.dataclass
    class Pair:
        cache: xj.KVCache

        def first(self, number: int = 3) -> xj.KVCache: ...

    described = public_api.described(Pair)
    assert described["signature"] == "(cache: KVCache) -> None"
    assert described["members"]["first"] == "(self, number: int = 3) -> KVCache"
    assert {"api: names", "api: Engine", "api: load_model"} <= public_api.api_records().keys()


def test_errors_do_not_say_where_files_are():
    def fail():
        raise xj.InputError("/tmp/abc/wide/llama: xinfer_jax.cache.kv_cache.KVCache at 0x7f00 is wrong")

    assert recording.attempt(fail) == "InputError: wide/llama: KVCache is wrong"


def test_costs_are_those_of_the_compiled_program(tmp_path):
    model = xj.load_model(tiny.write(tmp_path))
    (found,) = programs.programs_of(programs.calls(model)["decode_step"])
    bytes_of_params = sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert bytes_of_params < found["arguments"] < 2 * bytes_of_params
    assert found["flops"] > bytes_of_params // 4 and found["instructions"] > 100
