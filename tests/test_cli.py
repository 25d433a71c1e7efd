"""The command line: what it prints and where, and its exit codes."""

import importlib
import io
import json
import re
import sys
from pathlib import Path

import jax
import pytest
import tiny
from tiny import ANSWER, ANSWER_IDS, QUESTION

import xinfer_jax as xj
from xinfer_jax import cli
from xinfer_jax.text import encode_prompt

ROOT = Path(__file__).parents[1]
ASK = f"--prompt={QUESTION}"
STATISTICS = (
    r"Loaded in \d+\.\d s \(\d[\d.]* MiB weights, float32, cpu\)",
    r"Prompt tokens: \d+ \(KV cache \d[\d.]* MiB\)",
    r"compile: \d+\.\d\d s",
    r"prefill: \d+ tok in \d+ ms \(\d+ tok/s\) \| decode: \d+ tok in \d+\.\d\d s \(\d+\.\d tok/s\) \[(eos|length)\]",
    r"TTFT \d+ ms \| TPOT \d+\.\d ms \| total \d+\.\d\d s \| peak memory \d+ MiB",
)
HOT = dict(do_sample=True, temperature=1000.0, top_k=0)  # all tokens about equally likely


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command line in this process: (exit code, standard output, standard error).

    Prompts of 33 to 64 ids, answers of at most 16: one program for all, as compiling takes seconds.
    """

    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            cli.main(["xinfer-jax", "--compilation_cache=", "--max_tokens=16", *args])
        return (caught.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def ask(command, good):
    """The JSON object that the good checkpoint gives."""

    def run(*args: str, model: Path = good) -> dict:
        code, out, err = command(f"--model={model}", ASK, "--output=json", *args)
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


# --- output -----------------------------------------------------------------------------------------------------------


def test_text_mode(command, good):
    code, out, err = command(f"--model={good}", ASK)
    assert code == 0 and out == ANSWER + "\n"
    lines = err.splitlines()
    assert len(lines) == len(STATISTICS)
    for line, pattern in zip(lines, STATISTICS, strict=True):
        assert re.fullmatch(pattern, line), line
    assert lines[3].endswith("[eos]") and f"decode: {len(ANSWER_IDS)} tok" in lines[3]


def test_text_mode_streams_whole_characters(command, good, monkeypatch):
    written = []

    class Terminal(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

        def flush(self):
            if written[-1] is not None:
                written.append(None)

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert command(f"--model={good}", ASK)[0] == 0
    pieces = "".join("|" if piece is None else piece for piece in written).split("|")
    assert pieces[:4] == ["Y", "e", "s", ","] and "你" in pieces and "🚀" in pieces  # each flushed by itself
    assert "".join(pieces) == ANSWER + "\n"


def test_json_mode(command, good):
    code, out, err = command(f"--model={good}", ASK, "--output=json")
    assert (code, err) == (0, "") and out.endswith("}\n") and out.count("\n") == 1
    answer = json.loads(out)
    assert set(answer) == {"text", "tokens", "prompt_tokens", "finish_reason", "stats"}
    assert (answer["text"], answer["tokens"], answer["finish_reason"]) == (ANSWER, ANSWER_IDS, "eos")
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_tokens"] == len(tiny.tokenizer().encode(prompt).ids)
    stats = answer["stats"]
    assert (stats["generated_tokens"], stats["decode_tokens"]) == (len(ANSWER_IDS) + 1, len(ANSWER_IDS))
    assert (stats["dtype"], stats["backend"], stats["rows"]) == ("float32", "cpu", 1)
    for name in (
        "load_seconds", "weight_bytes", "cache_bytes", "prefill_seconds", "ttft_seconds", "decode_seconds", "total_seconds", "peak_bytes",
        "prefill_tokens_per_second", "decode_tokens_per_second", "tpot_seconds",
    ):  # fmt: skip
        assert stats[name] > 0, name
    assert stats["compile_seconds"] >= 0


def test_max_tokens_ends_the_answer(ask):
    answer = ask("--max_tokens=3")
    assert (answer["tokens"], answer["text"], answer["finish_reason"]) == (ANSWER_IDS[:3], "Yes", "length")


def test_half_a_character_at_the_end_is_still_printed(command, good):
    code, out, _ = command(f"--model={good}", ASK, "--max_tokens=7")
    assert code == 0 and out == "Yes, \ufffd\n"


def test_prompt_from_standard_input(command, good):
    assert command(f"--model={good}", stdin=QUESTION + "\n")[:2] == (0, ANSWER + "\n")
    answer = command(f"--model={good}", "--output=json", stdin=QUESTION + "\n\n")[1]
    assert json.loads(answer)["prompt_tokens"] == json.loads(command(f"--model={good}", "--output=json", ASK)[1])["prompt_tokens"]


def test_system_and_raw(ask):
    plain, system = ask()["prompt_tokens"], ask("--system=Be brief.")["prompt_tokens"]
    assert system == plain + len(tiny.tokenizer().encode("<|im_start|>system\nBe brief.<|im_end|>\n").ids)
    raw = ask("--raw", f"--prompt={QUESTION * 2}")
    assert raw["prompt_tokens"] == len(tiny.tokenizer().encode(QUESTION * 2).ids)


def test_without_cache_it_says_the_same(ask):
    answer = ask("--nouse_cache")
    assert answer["tokens"] == ANSWER_IDS and answer["stats"]["cache_bytes"] == 0


def test_beams(command, ask, good):
    """As the library finds them, with the checkpoint's EOS ids; text is the best one."""
    flags = ("--num_beams=3", "--length_penalty=0.5", "--early_stopping=never", "--min_tokens=2")
    answer, model = ask(*flags), xj.load_model(good)
    options = dict(num_beams=3, length_penalty=0.5, early_stopping="never", max_new_tokens=16, sampling=xj.SamplingConfig(min_new_tokens=2))
    eos = [i for i in model.tokenizer.eos_token_ids if i < model.config.vocab_size]
    wanted = xj.beam_search(model.params, model.config, encode_prompt(model, QUESTION), eos_token_ids=eos, **options)
    assert [row["tokens"] for row in answer["sequences"]] == wanted.sequences and answer["sequences"][0]["text"] == ANSWER
    assert [row["score"] for row in answer["sequences"]] == wanted.scores and answer["prompt_tokens"] > 32
    assert command(f"--model={good}", ASK, *flags) == (0, ANSWER + "\n", f"Best of 3 sequences, score {wanted.scores[0]:.3f}\n")


def test_verbose_says_which_kernels_run(command, good, ask):
    code, out, err = command(f"--model={good}", ASK, "--verbose", "--impl=xla")
    kernels = "prefill_attention, decode_attention, argmax, lm_head_argmax"
    assert (code, out, err.splitlines()[0]) == (0, ANSWER + "\n", f"xla (asked for by name): {kernels}")
    assert ask("--impl=xla")["stats"]["kernels"] == dict.fromkeys(kernels.split(", "), "xla")


def test_dtype(command, good, monkeypatch):
    loaded = []

    def load_model(*args, **options):
        loaded.append(xj.load_model(*args, **options))
        raise xj.InputError("that will do: generating would compile another program")

    monkeypatch.setattr(cli, "load_model", load_model)
    for dtype in ("bfloat16", "float16", "float32"):
        command(f"--model={good}", ASK, f"--dtype={dtype}")
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.pop().params)} == {dtype}


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_the_seed_decides(ask):
    hot = ["--temperature=1000"]
    first, again, other = ask(*hot, "--seed=1"), ask(*hot, "--seed=1"), ask(*hot, "--seed=2")
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["text"] == again["text"]
    assert ask(*hot)["tokens"] == ask(*hot, "--seed=0")["tokens"] != first["tokens"]


def test_top_k_and_top_p_narrow_the_choice(ask):
    for narrow in ("--top_k=1", "--top_p=0.001"):
        assert ask("--temperature=10", narrow)["tokens"] == ANSWER_IDS


def test_repetition_penalty(ask):
    """The template's "user" holds the second and third letter of the answer: a great penalty leaves them no likelier than others."""
    assert ask("--temperature=1")["tokens"] == ANSWER_IDS
    assert ask("--temperature=1", "--repetition_penalty=1e6")["tokens"] != ANSWER_IDS


def test_generation_config_gives_the_defaults_and_flags_overrule_it(ask, tmp_path, good):
    hf, weights = tiny.answering(ANSWER)
    hot = tiny.write(tmp_path, hf, weights=weights, generation_config=HOT | dict(eos_token_id=[tiny.IM_END]))
    sampled = ask(model=hot)["tokens"]
    assert sampled == ask("--temperature=1000")["tokens"] != ANSWER_IDS
    assert ask("--temperature=0", model=hot)["tokens"] == ANSWER_IDS
    assert ask("--nogeneration_config", model=hot)["tokens"] == ANSWER_IDS


def test_a_second_call_starts_from_the_defaults(command, ask, good):
    ask("--temperature=1000", "--seed=3", "--max_tokens=2", "--repetition_penalty=2", "--system=x")
    assert command(f"--model={good}", stdin=QUESTION)[:2] == (0, ANSWER + "\n")
    code, _, err = command("--output=xml", "--prompt=x")
    assert code == 2 and "xml" in err
    assert command(f"--model={good}", ASK)[:2] == (0, ANSWER + "\n")


# --- bad input --------------------------------------------------------------------------------------------------------


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
    "early-stopping-unknown": (["--num_beams=2", "--early_stopping=soon"], "early_stopping=soon.*true.false.never"),
    "beams-and-a-draft": (["--num_beams=2", "--draft=lookup"], "--draft does not go with --num_beams=2"),
    "beams-and-a-stop": (["--num_beams=2", "--stop=x"], "--stop does not go with --num_beams=2"),
    "beams-without-cache": (["--num_beams=2", "--nouse_cache"], "--use_cache does not go with --num_beams=2"),
    "length-penalty-alone": (["--length_penalty=2"], "--length_penalty does not go with --num_beams=1"),
    "impl-unknown": (["--impl=fast"], "impl must be None or one of mosaic, triton, xla, interpret, got 'fast'"),
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
    return lambda path: tiny.write_json(path / "config.json", json.loads((path / "config.json").read_text()) | changes)


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
            tiny.write_json(path / "model.safetensors.index.json", {"weight_map": {tiny.EMBED: "model-00001-of-00002.safetensors"}}),
        ),
        "absent: model-00001-of-00002.safetensors",
    ),
    "no-tokenizer": (_remove("tokenizer.json"), "no tokenizer.json"),
    "tokenizer-cut": (cut("tokenizer.json"), "no readable tokenizer"),
    "template-broken": (
        lambda path: tiny.write_json(path / "tokenizer_config.json", {"chat_template": "{{ raise_exception('not\nso') }}"}),
        "chat template .* not so",
    ),
    "generation-config-cut": (
        lambda path: (path / "generation_config.json").write_text("{"),
        "generation_config.json is not readable JSON",
    ),
    "generation-config-beams": (_generation(num_beams=4), "num_beams=4"),
    "generation-config-temperature": (_generation(do_sample=True, temperature="hot"), "temperature must be .* got 'hot'"),
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
        (["--prompt=" + "x" * 300, "--max_tokens=1"], r"prompt of 3\d\d tokens \+ max_new_tokens 1 exceeds the model's context limit 256"),
        (["--prompt=x", "--max_tokens=256"], "max_new_tokens 256 exceeds the model's context limit 256"),
        (["--prompt=a\udcffb"], "only valid Unicode text"),
        (["--prompt=x", "--raw", "--system=y"], "raw .* system message"),
        (["--prompt=x", "--dtype=int8"], "dtype 'int8' is not supported: use one of float32, bfloat16, float16"),
        (["--prompt=x", "--dtype="], "dtype '' is not supported"),
    ],
    ids=["prompt-over-context", "tokens-over-context", "half-a-surrogate", "raw-with-system", "dtype", "empty-dtype"],
)
def test_refused_before_anything_is_traced(command, good, monkeypatch, args, message):
    generate = importlib.import_module("xinfer_jax.generate")
    for name in ("init_cache", "prefill"):
        monkeypatch.setattr(generate, name, lambda *_, **__: pytest.fail("the model ran"))
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


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h", "-help"])
def test_help(command, flag):
    code, out, err = command("--max_tokens=abc", flag)
    assert (code, err) == (0, "") and out.startswith("Text in, text out") and "example: " in out
    for name in (
        "model", "prompt", "system", "[no]raw", "max_tokens", "temperature", "top_k", "top_p", "seed", "dtype", "output",
        "repetition_penalty", "[no]generation_config", "[no]use_cache", "compilation_cache",
    ):  # fmt: skip
        assert re.search(rf"^  --{re.escape(name)} +\S", out, re.M), name
    assert re.search(r"--max_tokens .*Default: 128\.", out)
    assert "flagfile" not in out and "undefok" not in out and max(map(len, out.splitlines())) <= 120
