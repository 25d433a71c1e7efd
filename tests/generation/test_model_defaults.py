"""One rule for generation_config.json: functions of a `Model` follow it, functions of parameters do not. The
same prompt has the same answer from Python, from an engine, from a file, from the server and from a command.
"""

import asyncio
import json
import shutil

import jax
import pytest
import tiny
from paths import ROOT
from serving import run_server

import xinfer_jax as xj
from xinfer_jax.api.bodies import parse_request_body
from xinfer_jax.sampling.random_keys import key_from_seed

pytestmark = pytest.mark.oldest

FILE = dict(do_sample=True, temperature=0.7, top_k=40, top_p=0.95, repetition_penalty=1.2)
SETTINGS = xj.SamplingConfig(temperature=0.7, top_k=40, top_p=0.95, repetition_penalty=1.2)
MESSAGES = [{"role": "user", "content": "Zebra banana piano 12 + 7?"}]
PROMPT = MESSAGES[0]["content"]
LENGTH = 16  # of the fixture `command`
GREEDY = xj.GenerateOptions(max_tokens=LENGTH, sampling=xj.SamplingConfig())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Returns the bundled checkpoint, with a generation_config.json that samples."""
    folder = tmp_path_factory.mktemp("sampled") / "model"
    shutil.copytree(ROOT / "xinfer_jax/assets", folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | FILE), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(path):
    return xj.load_model(path)


@pytest.fixture(scope="module")
def text(model):
    """Returns the answer that all must give."""
    text = xj.generate_text(model, PROMPT, xj.GenerateOptions(max_tokens=LENGTH))
    assert text != xj.generate_text(model, PROMPT, GREEDY)
    return text


def test_a_command_gives_the_text_of_python(command, path, model, text):
    assert command(f"--model={path}", f"--prompt={PROMPT}")[:2] == (0, f"{text}\n")
    greedy = xj.generate_text(model, PROMPT, GREEDY)
    assert command(f"--model={path}", f"--prompt={PROMPT}", "--nogeneration_config")[1] == f"{greedy}\n"
    other = model.sampling_config(temperature=1.1)
    sampled = xj.generate_text(
        model, PROMPT, xj.GenerateOptions(max_tokens=LENGTH, sampling=other), key=jax.random.key(3)
    )
    flags = "--temperature=1.1", "--seed=3"
    assert command(f"--model={path}", f"--prompt={PROMPT}", *flags)[1] == f"{sampled}\n"


def test_text_functions_agree(model, text):
    options = xj.GenerateOptions(max_tokens=LENGTH)
    assert "".join(xj.stream_text(model, PROMPT, options)) == text
    assert xj.generate_text(model, [PROMPT], options) == [text]
    assert xj.generate_text(model, PROMPT, xj.GenerateOptions(max_tokens=LENGTH, sampling=SETTINGS)) == text
    assert xj.generate_text(model, PROMPT, options, key=jax.random.key(0)) == text
    until = xj.GenerateOptions(max_tokens=LENGTH, stop_strings=("\0",))
    assert xj.generate_text(model, PROMPT, until) == text


def test_an_engine_agrees(model, text):
    ids = xj.encode_prompt(model, PROMPT)
    options = xj.GenerateOptions(max_tokens=LENGTH)
    with xj.Engine(model, rows=2, capacity=128) as engine:
        (first,) = engine.submit(MESSAGES, options).result().tokens
        assert model.tokenizer.decode(first) == text
        two = engine.generate([PROMPT, ids], options)
        keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
        assert two[0].tokens == [first]
        per_prompt = xj.generate(
            model.params,
            model.config,
            [ids],
            xj.GenerateOptions(max_tokens=LENGTH, sampling=SETTINGS),
            key=jax.numpy.stack(keys[1:]),
        )
        assert two[1].tokens == per_prompt.tokens  # prompt i of a call uses fold_in(key(0), i)
        assert engine.submit(ids, GREEDY).result().tokens == greedy_tokens(model, ids)
        sampled = asyncio.run(engine.sample(ids, options, seed=7))
        again = engine.submit(
            ids, xj.GenerateOptions(max_tokens=LENGTH, sampling=SETTINGS), key=key_from_seed(7)
        ).result()
        assert sampled.tokens_T.tolist() == again.tokens[0]
        drawn = asyncio.run(engine.sample(ids, options)).seed
        assert drawn != asyncio.run(engine.sample(ids, options)).seed  # `sample` draws a seed, as documented


def greedy_tokens(model, ids):
    return xj.generate(model.params, model.config, [ids], xj.GenerateOptions(max_tokens=LENGTH)).tokens


def test_files_agree(model, path, text, tmp_path):
    lines = [dict(prompt=PROMPT, seed=0), dict(prompt=PROMPT, temperature=0, repetition_penalty=1, top_k=0)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    engine = dict(rows=2, capacity=128)
    xj.generate_file(
        model,
        tmp_path / "in.jsonl",
        tmp_path / "out",
        xj.GenerateOptions(max_tokens=LENGTH),
        progress=False,
        **engine,
    )
    answers = {a["id"]: a["text"] for a in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert answers == {1: text, 2: xj.generate_text(model, PROMPT, GREEDY)}
    dataset = xj.DatasetGenerator(str(path), xj.GenerateOptions(max_tokens=LENGTH), **engine)
    dataset(dict(prompt=[PROMPT]))
    assert dataset._defaults.options.sampling == SETTINGS


def test_fields_of_a_body_replace_single_settings(model):
    body = dict(messages=MESSAGES, top_k=5)
    parsed = parse_request_body(model, "chat", body, xj.GenerateOptions(max_tokens=4), 100)
    assert parsed.options.sampling == model.sampling_config(top_k=5)


@pytest.mark.full
def test_the_server_agrees(model, text):
    with run_server(model) as server:
        body = server.ask("chat", messages=MESSAGES, seed=0, max_tokens=LENGTH)
        assert body["choices"][0]["message"]["content"] == text
        greedy = dict(temperature=0, repetition_penalty=1)
        body = server.ask("chat", messages=MESSAGES, max_tokens=LENGTH, **greedy)
        assert body["choices"][0]["message"]["content"] == xj.generate_text(model, PROMPT, GREEDY)


def test_functions_of_parameters_are_greedy(model):
    ids = xj.encode_prompt(model, PROMPT)
    expected = xj.generate(model.params, model.config, [ids], GREEDY).tokens
    assert greedy_tokens(model, ids) == expected
    stream = xj.stream(model.params, model.config, [ids], xj.GenerateOptions(max_tokens=LENGTH))
    assert [token for (token,) in stream if token is not None] == expected[0]
    with pytest.raises(xj.InputError, match="sampling needs a PRNG key"):
        xj.generate(
            model.params, model.config, [ids], xj.GenerateOptions(max_tokens=LENGTH, sampling=SETTINGS)
        )


def test_sampling_config_of_a_model(model):
    assert model.sampling_config() == SETTINGS
    assert model.sampling_config(top_k=0, min_p=0.1) == xj.SamplingConfig(
        temperature=0.7, top_k=0, top_p=0.95, repetition_penalty=1.2, min_p=0.1
    )
    assert xj.load_model().sampling_config() == xj.SamplingConfig()
    with pytest.raises(xj.InputError, match="'temprature' is no sampling setting: give temperature, top_k"):
        model.sampling_config(temprature=1)
    with pytest.raises(xj.InputError, match="top_p must be above 0 and at most 1"):
        model.sampling_config(top_p=2)


def test_a_file_that_is_not_supported_can_be_left_out(tmp_path):
    model = xj.load_model(tiny.write(tmp_path, generation_config=dict(num_beams=4)))
    with pytest.raises(xj.InputError, match="asks for num_beams=4, .* give sampling=SamplingConfig"):
        xj.generate_text(model, "a", raw=True)
    with pytest.raises(xj.InputError, match="asks for num_beams=4"):
        xj.stream_text(model, "a", raw=True)
    assert isinstance(
        xj.generate_text(
            model, "a", xj.GenerateOptions(max_tokens=1, sampling=xj.SamplingConfig()), raw=True
        ),
        str,
    )


@pytest.mark.full
def test_several_engines_agree(model, text):
    with xj.Engine(model, data_parallel=1, rows=2, capacity=128) as engines:
        (tokens,) = engines.submit(MESSAGES, xj.GenerateOptions(max_tokens=LENGTH)).result().tokens
    assert model.tokenizer.decode(tokens) == text
