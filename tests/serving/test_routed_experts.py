"""`return_routed_experts` of bodies: the experts of each token in the response, as vLLM encodes them."""

import base64
import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import routed_engines
import tiny

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import serving

import xinfer_jax as xj
from xinfer_jax.api.bodies import ParsedBody, parse_request_body
from xinfer_jax.api.fields import BodyError
from xinfer_jax.api.responses import response_choices
from xinfer_jax.serve.admission import count_tokens
from xinfer_jax.stats import GenerateStats

pytestmark = pytest.mark.newest
SHAPE = dict(rows=2, capacity=128, pages=8, chunk=64)


@pytest.fixture(scope="module")
def mixture() -> xj.Model:
    """A mixture of experts in one of its two layers, with a tokenizer of more tokens."""
    tokenizer = tiny.shallow_model().tokenizer
    return dataclasses.replace(routed_engines.build(routed_engines.NAMES[0]), tokenizer=tokenizer)


def parse(model: xj.Model, kind: str = "completion", **body) -> ParsedBody:
    return parse_request_body(
        model, kind, dict(prompt=[5, 6, 7], max_tokens=2) | body, xj.GenerateOptions(max_tokens=9), 90
    )


def decode(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def test_encoded_experts_begin_at_the_first_token_asked_for(mixture):
    routes_TLU = np.arange(10, dtype=np.int32).reshape(5, 1, 2)
    routes_TLU[-1] = -1
    nothing_TLU = np.full_like(routes_TLU, -1)
    for start in (0, 2):
        parsed = parse(mixture, return_routed_experts=True, routed_experts_prompt_start=start)
        assert parsed.request_options.return_routed_experts
        out = xj.types.GenerateOutput(
            [[1, 2]], [[0.0, 0.0]], ["stop"], [None], GenerateStats(1, 3, 0, 0), routed_experts=[routes_TLU]
        )
        ((choice, _),) = response_choices(parsed, [out], [[]], mixture.tokenizer)
        found = decode(choice["routed_experts"])
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, routes_TLU[start:-1])
        out.routed_experts = [nothing_TLU]
        ((choice, _),) = response_choices(parsed, [out], [[]], mixture.tokenizer)
        assert choice["routed_experts"] is None
    plain = parse(mixture)
    assert not plain.request_options.return_routed_experts
    ((choice, _),) = response_choices(plain, [out], [[]], mixture.tokenizer)
    assert "routed_experts" not in choice


def test_experts_count_as_tokens_of_the_response(mixture):
    """8 numbers of 4 bytes a token, in base64: 11 bytes of each. 5 tokens have 55, which count as one."""
    parsed = parse(mixture)
    asked = parse(mixture, return_routed_experts=True)
    assert asked.routed_experts_bytes == 11 and parsed.routed_experts_bytes == 0
    assert count_tokens(asked) == count_tokens(parsed) + 1
    long = dataclasses.replace(asked, prompts=[[5] * 60], options=dataclasses.replace(asked.options, n=3))
    assert count_tokens(long) == 60 + 6 + -(-(180 + 6) * 11 // 100)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (dict(return_routed_experts=1), "return_routed_experts"),
        (dict(return_routed_experts=True, routed_experts_prompt_start=3), "routed_experts_prompt_start"),
        (dict(return_routed_experts=True, routed_experts_prompt_start=-1), "routed_experts_prompt_start"),
        (dict(return_routed_experts=True, routed_experts_start_len=1), "routed_experts_start_len"),
    ],
)
def test_invalid_fields_of_experts_are_rejected(mixture, body, param):
    with pytest.raises(BodyError) as caught:
        parse(mixture, **body)
    assert caught.value.param == param


def test_a_dense_model_has_no_experts():
    with pytest.raises(BodyError, match="no mixture of experts"):
        parse(tiny.shallow_model(), return_routed_experts=True)


@pytest.mark.full
def test_responses_and_batch_lines_have_the_experts_of_the_engine(mixture, tmp_path):
    body = dict(prompt=[5, 6, 7, 8], max_tokens=6, seed=3, temperature=1.0, ignore_eos=True, n=2)
    asked = dict(body, return_routed_experts=True)
    with serving.run_server(mixture, engine=xj.EngineOptions(**SHAPE, routed_experts=True)) as server:
        options = xj.GenerateOptions(
            max_tokens=6, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=(), n=2
        )
        key = jax.random.key(3)
        wanted = server.engine.submit(body["prompt"], options, key=key, return_routed_experts=True).result()
        whole = server.ask("completion", **asked)
        for choice, routed_experts in zip(whole["choices"], wanted.routed_experts, strict=True):
            found = decode(choice["routed_experts"])
            assert found.shape == (9, 1, 2) and (found >= 0).all()
            np.testing.assert_array_equal(found, routed_experts[:-1])
        last = server.ask("completion", **asked, routed_experts_prompt_start=3)["choices"][1]
        np.testing.assert_array_equal(decode(last["routed_experts"]), wanted.routed_experts[1][3:-1])
        assert "routed_experts" not in server.ask("completion", **body)["choices"][0]
        status, error, _ = server.call("POST", "/v1/completions", dict(asked, stream=True))
        assert status == 400 and "cannot be streamed" in error["error"]["message"]
    with serving.run_server(mixture, engine=xj.EngineOptions(**SHAPE)) as server:
        status, error, _ = server.call("POST", "/v1/completions", asked)
        assert status == 400 and error["error"]["param"] == "return_routed_experts"
        assert "--routed_experts" in error["error"]["message"]
    (tmp_path / "in.jsonl").write_text(json.dumps(asked) + "\n")
    files = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    xj.generate_file(
        mixture, *files, xj.GenerateOptions(max_tokens=9), progress=False, **SHAPE, routed_experts=True
    )
    line = json.loads(files[1].read_text())
    assert [one["routed_experts"] for one in line["choices"]] == [
        one["routed_experts"] for one in whole["choices"]
    ]
