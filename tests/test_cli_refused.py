"""What the command line refuses: one line on standard error, exit code 2; and what interrupts it."""

import io
import json
import re
import sys

import pytest
import tiny
from tiny import ASK

from xinfer_jax import cli, generation


def refusal(result: tuple[int, str, str]) -> str:
    """The one line on standard error of a refused call."""
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("xinfer-jax: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err
    return err


BAD_FLAGS = {
    # name: (arguments, what the line says)
    "temperature-negative": (["--temperature=-0.1"], "temperature must be 0 .* got -0.1"),
    "temperature-nan": (["--temperature=nan"], "temperature must be .* got nan"),
    "temperature-inf": (["--temperature=inf"], "temperature must be .* got inf"),
    "temperature-text": (["--temperature=hot"], "--temperature=hot"),
    "top-p-zero": (["--top_p=0"], "top_p must be above 0 .* got 0"),
    "top-p-above-one": (["--top_p=1.5"], "top_p must be .* got 1.5"),
    "top-p-nan": (["--top_p=nan"], "top_p must be .* got nan"),
    "top-k-negative": (["--top_k=-1"], "top_k must be .* got -1"),
    "top-k-too-large": ([f"--top_k={2**31}"], "top_k must be .* got 2147483648"),
    "top-k-fraction": (["--top_k=1.5"], "--top_k=1.5"),
    "penalty-zero": (["--repetition_penalty=0"], "repetition_penalty must be above 0"),
    "max-tokens-zero": (["--max_tokens=0"], "--max_tokens must be at least 1, got 0"),
    "max-tokens-negative": (["--max_tokens=-5"], "--max_tokens must be at least 1, got -5"),
    "max-tokens-text": (["--max_tokens=abc"], "--max_tokens=abc"),
    "max-tokens-without-value": (["--max_tokens"], "max_tokens"),
    "seed-text": (["--seed=x"], "--seed=x"),
    "seed-negative": (["--seed=-1"], "--seed=-1"),
    "seed-too-large": ([f"--seed={2**70}"], "--seed="),
    "raw-text": (["--raw=maybe"], "--raw=maybe"),
    "output-xml": (["--output=xml"], "--output must be text or json, got 'xml'"),
    "unknown-flag": (["--max_token=5"], "Unknown command line flag 'max_token'.*--help"),
    "unknown-short-flag": (["-x"], "Unknown command line flag 'x'"),
    "positional": (["Really?"], "unexpected argument 'Really\\?': give the prompt with --prompt"),
    "flagfile-absent": (["--flagfile=/no/such/file"], "/no/such/file"),
    "no-beams": (["--num_beams=0"], "--num_beams=0"),
    "early-stopping-unknown": (
        ["--num_beams=2", "--early_stopping=soon"],
        "early_stopping=soon.*true.false.never",
    ),
    "beams-and-a-draft": (["--num_beams=2", "--draft=lookup"], "--draft does not go with --num_beams=2"),
    "beams-and-a-stop": (["--num_beams=2", "--stop=x"], "--stop does not go with --num_beams=2"),
    "beams-without-cache": (["--num_beams=2", "--nouse_cache"], "--use_cache does not go with --num_beams=2"),
    "length-penalty-alone": (["--length_penalty=2"], "--length_penalty does not go with --num_beams=1"),
    "impl-unknown": (
        ["--impl=fast"],
        "impl must be None or one of mosaic, triton, xla, interpret, got 'fast'",
    ),
    "empty-prompt": (["--prompt="], "the prompt is empty"),
    "blank-prompt": (["--prompt= \n\t"], "the prompt is empty"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_refused_before_a_model_is_loaded(command, monkeypatch, name):
    args, message = BAD_FLAGS[name]
    monkeypatch.setattr(cli, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert re.search(message, refusal(command(ASK, *args)))


@pytest.mark.parametrize("stdin", ["", "\n \n"], ids=["empty", "blank"])
def test_empty_standard_input(command, good, stdin):
    assert "the prompt is empty" in refusal(command(f"--model={good}", stdin=stdin))


def test_standard_input_that_is_closed_or_no_text(capsys, monkeypatch, good):
    for stdin in (None, io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as caught:
            cli.main(["xinfer-jax", "--compilation_cache=", f"--model={good}"])
        assert ("the prompt is empty" if stdin is None else "standard input is not utf-8 text") in refusal(
            (caught.value.code, *capsys.readouterr())
        )


def _remove(name):
    return lambda path: (path / name).unlink()


def cut(name):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-10])


def _config(**changes):
    return lambda path: tiny.write_json(
        path / "config.json", json.loads((path / "config.json").read_text()) | changes
    )


def _generation(**settings):
    return lambda path: tiny.write_json(path / "generation_config.json", settings)


BAD_CHECKPOINTS = {
    # name: (what happens to a good one, what the line says)
    "no-config": (_remove("config.json"), "holds no config.json"),
    "config-cut": (cut("config.json"), "config.json is not readable JSON"),
    "unknown-model-type": (_config(model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "quantized": (_config(quantization_config=dict(quant_method="fp8")), "'fp8' is not supported"),
    "wrong-shapes": (_config(intermediate_size=49), "has shape .* the config asks for"),
    "weights-cut": (cut("model.safetensors"), "model.safetensors is truncated"),
    "no-weights": (_remove("model.safetensors"), "holds neither model.safetensors nor"),
    "absent-shard": (
        lambda path: (
            _remove("model.safetensors")(path),
            tiny.write_json(
                path / "model.safetensors.index.json",
                {"weight_map": {tiny.EMBED: "model-00001-of-00002.safetensors"}},
            ),
        ),
        "absent: model-00001-of-00002.safetensors",
    ),
    "no-tokenizer": (_remove("tokenizer.json"), "no tokenizer.json"),
    "tokenizer-cut": (cut("tokenizer.json"), "no readable tokenizer"),
    "template-broken": (
        lambda path: tiny.write_json(
            path / "tokenizer_config.json", {"chat_template": "{{ raise_exception('not\nso') }}"}
        ),
        "chat template .* not so",
    ),
    "generation-config-cut": (
        lambda path: (path / "generation_config.json").write_text("{"),
        "generation_config.json is not readable JSON",
    ),
    "generation-config-beams": (_generation(num_beams=4), "num_beams=4"),
    "generation-config-temperature": (
        _generation(do_sample=True, temperature="hot"),
        "temperature must be .* got 'hot'",
    ),
    "context-too-short": (_config(max_position_embeddings=32), "exceeds the model's context limit 32"),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint(command, tmp_path, name):
    spoil, message = BAD_CHECKPOINTS[name]
    spoil(tiny.write(tmp_path, generation_config={}))
    assert re.search(message, refusal(command(f"--model={tmp_path}", ASK)))


@pytest.mark.parametrize("name", ["/no/such/directory", "nowhere", ""])
def test_no_checkpoint(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(command(f"--model={name}", ASK))


def test_empty_directory(command, tmp_path):
    assert f"{tmp_path} holds no config.json" in refusal(command(f"--model={tmp_path}", ASK))


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["--prompt=" + "x" * 300, "--max_tokens=1"],
            r"prompt of 3\d\d tokens \+ max_new_tokens 1 exceeds the model's context limit 256",
        ),
        (["--prompt=x", "--max_tokens=256"], "max_new_tokens 256 exceeds the model's context limit 256"),
        (["--prompt=a\udcffb"], "only valid Unicode text"),
        (["--prompt=x", "--raw", "--system=y"], "raw .* system message"),
        (
            ["--prompt=x", "--dtype=int8"],
            "dtype 'int8' is not supported: use one of float32, bfloat16, float16",
        ),
        (["--prompt=x", "--dtype="], "dtype '' is not supported"),
    ],
    ids=[
        "prompt-over-context",
        "tokens-over-context",
        "half-a-surrogate",
        "raw-with-system",
        "dtype",
        "empty-dtype",
    ],
)
def test_refused_before_anything_is_traced(command, good, monkeypatch, args, message):
    for name in ("init_cache", "prefill"):
        monkeypatch.setattr(generation, name, lambda *_, **__: pytest.fail("the model ran"))
    assert re.search(message, refusal(command(f"--model={good}", *args)))


def test_token_outside_the_vocabulary(command, tmp_path):
    hf = tiny.CONFIG | dict(vocab_size=200)
    tiny.write(tmp_path, hf)
    assert "outside the vocabulary of 200" in refusal(command(f"--model={tmp_path}", ASK))


def test_interrupt(command, good, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_model", interrupted)
    assert command(f"--model={good}", "--prompt=x") == (130, "", "")


# --- help ---------------------------------------------------------------------------------------------------
