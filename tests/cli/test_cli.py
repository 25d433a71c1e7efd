"""The command line: what it prints and where, and its exit codes."""

import importlib
import io
import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import tiny
from random_adapters import random_adapter
from safetensors.numpy import load_file, save_file
from tiny import ANSWER, ANSWER_IDS, ASK, QUESTION

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.cli import answer_flags, startup
from xinfer_jax.cli.commands import COMMANDS
from xinfer_jax.text import encode_prompt

pytestmark = pytest.mark.oldest

STATISTICS = (
    r"Loaded in \d+\.\d s \(\d[\d.]* MiB weights, float32, cpu\)",
    r"Prompt tokens: \d+ \(KV cache \d[\d.]* MiB\)",
    r"compile: \d+\.\d\d s",
    (
        r"prefill: \d+ tok in \d+ ms \(\d+ tok/s\) \| decode: \d+ tok in \d+\.\d\d s \(\d+\.\d tok/s\)"
        r" \[(stop|length)\]"
    ),
    r"TTFT \d+ ms \| TPOT \d+\.\d ms \| total \d+\.\d\d s \| peak memory \d+ MiB",
)
HOT = dict(do_sample=True, temperature=1000.0, top_k=0)  # all tokens about equally likely


# --- output -------------------------------------------------------------------------------------------------


def test_text_output(command, good):
    code, out, err = command(f"--model={good}", ASK)
    assert code == 0 and out == ANSWER + "\n"
    lines = err.splitlines()
    assert len(lines) == len(STATISTICS)
    for line, pattern in zip(lines, STATISTICS, strict=True):
        assert re.fullmatch(pattern, line), line
    assert lines[3].endswith("[stop]") and f"decode: {len(ANSWER_IDS)} tok" in lines[3]


def test_text_output_streams_whole_characters(command, good, monkeypatch):
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


def test_json_output(command, good):
    code, out, err = command(f"--model={good}", ASK, "--output=json")
    assert (code, err) == (0, "") and out.endswith("}\n") and out.count("\n") == 1
    answer = json.loads(out)
    assert set(answer) == {"text", "tokens", "prompt_tokens", "finish_reason", "stop_reason", "stats"}
    assert (answer["text"], answer["tokens"], answer["finish_reason"]) == (
        ANSWER,
        [*ANSWER_IDS, tiny.IM_END],
        "stop",
    )
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_tokens"] == len(tiny.tokenizer().encode(prompt).ids)
    stats = answer["stats"]
    assert (stats["generated_tokens"], stats["decode_tokens"]) == (len(ANSWER_IDS) + 1, len(ANSWER_IDS))
    assert (stats["dtype"], stats["backend"], stats["rows"]) == ("float32", "cpu", 1)
    for name in (
        "load_seconds", "weight_bytes", "cache_bytes", "prefill_seconds", "ttft_seconds", "decode_seconds",
        "total_seconds", "peak_bytes",
        "prefill_tokens_per_second", "decode_tokens_per_second", "tpot_seconds",
    ):  # fmt: skip
        assert stats[name] > 0, name
    assert stats["compile_seconds"] >= 0


def test_max_tokens_ends_the_answer(ask):
    """Half a character at the end is still printed."""
    for count, text in ((3, "Yes"), (7, "Yes, \ufffd")):
        answer = ask(f"--max_tokens={count}")
        found = answer["tokens"], answer["text"], answer["finish_reason"]
        assert found == (ANSWER_IDS[:count], text, "length")


def test_the_prompt_may_come_from_standard_input(command, ask, good):
    answer = json.loads(command(f"--model={good}", "--output=json", stdin=QUESTION + "\n\n")[1])
    assert (answer["text"], answer["prompt_tokens"]) == (ANSWER, ask()["prompt_tokens"])


def test_system_and_raw_flags(ask):
    plain = ask()["prompt_tokens"]
    system = ask("--system=Be brief.")["prompt_tokens"]
    assert system == plain + len(tiny.tokenizer().encode("<|im_start|>system\nBe brief.<|im_end|>\n").ids)
    raw = ask("--raw", f"--prompt={QUESTION * 2}")
    assert raw["prompt_tokens"] == len(tiny.tokenizer().encode(QUESTION * 2).ids)


@pytest.mark.full
def test_beam_search_flags(command, ask, good):
    """The same sequences as from the library, with the checkpoint's EOS ids. Text output has the best one."""
    flags = ("--num_beams=3", "--length_penalty=0.5", "--early_stopping=never", "--min_tokens=2")
    answer = ask(*flags)
    model = xj.load_model(good)
    options = dict(num_beams=3, length_penalty=0.5, early_stopping="never", max_tokens=16)
    options |= dict(sampling=xj.SamplingConfig(min_tokens=2))
    wanted = xj.beam_search(model.params, model.config, encode_prompt(model, QUESTION), **options)
    found = answer["sequences"]
    assert [row["tokens"] for row in found] == wanted.sequences[0] and found[0]["text"] == ANSWER
    assert [row["score"] for row in found] == wanted.scores[0] and answer["prompt_tokens"] > 32
    code, out, err = command(f"--model={good}", ASK, *flags)
    best, *costs = err.splitlines()
    assert (code, out, best) == (0, f"{ANSWER}\n", f"Best of 3 sequences, score {wanted.scores[0][0]:.3f}")
    assert answer["stats"]["generated_tokens"] > 0 and answer["stats"]["dtype"] == "float32"
    for line, pattern in zip(costs, STATISTICS, strict=True):
        assert re.fullmatch(pattern.removesuffix(r" \[(stop|length)\]"), line), line


def test_a_compilation_cache_that_is_not_a_directory_is_one_line(command, good, tmp_path):
    """One warning, and the answer is right."""
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").touch()
    try:
        code, out, err = command(f"--model={good}", ASK, f"--compilation_cache={tmp_path / 'file'}")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (code, out) == (0, ANSWER + "\n") and len(err.splitlines()) == 1 + len(STATISTICS)
    assert re.match("xinfer-jax: compilation cache .*file cannot be used .* going on without it\n", err)


def test_verbose_prints_the_kernels_and_what_is_not_read(command, good, ask, tmp_path):
    path = shutil.copytree(good, tmp_path / "sees")
    others = dict.fromkeys(("model.visual.a", "model.visual.b", "mtp.c"), np.ones(1, np.float32))
    save_file(load_file(path / "model.safetensors") | others, path / "model.safetensors")
    code, out, err = command(f"--model={path}", ASK, "--verbose", "--impl=xla")
    kernels = "prefill_attention, decode_attention, argmax, product, lm_head_argmax"
    assert (code, out, err.splitlines()[0]) == (0, ANSWER + "\n", f"xla (requested by name): {kernels}")
    assert err.splitlines()[1].startswith("layer by layer: ")
    assert re.fullmatch(r"planned memory: weights \(.* MiB\) \+ cache \(.* MiB\) \+ .*", err.splitlines()[-1])
    assert err.count(f"{path}: tensors that are not read: model.visual.* (2), mtp.* (1)\n") == 1
    assert "not read" not in command(f"--model={path}", ASK, "--impl=xla")[2]
    assert ask("--impl=xla")["stats"]["kernels"] == dict.fromkeys(kernels.split(", "), "xla")


def test_an_adapter_changes_the_answer(command, ask, good, tmp_path):
    config = xj.load_model(good).config
    xj.lora.save_adapter(random_adapter(config, 0, 2), config, tmp_path / "a")
    assert ask(f"--adapter={tmp_path / 'a'}", "--max_tokens=4")["tokens"] != ask("--max_tokens=4")["tokens"]
    code, _, err = command(f"--model={good}", ASK, f"--adapter={tmp_path}")
    assert code == 2 and "holds no adapter_config.json" in err


def test_dtype_flag_sets_the_weights_dtype(command, good, monkeypatch):
    loaded = []

    def opened(*args, **options):
        loaded.append(open_checkpoint(*args, **options).model)
        raise xj.InputError("that will do: generating would compile another program")

    monkeypatch.setattr(startup, "open_checkpoint", opened)
    for dtype in ("bfloat16", "float16", "float32"):
        command(f"--model={good}", ASK, f"--dtype={dtype}")
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.pop().params)} == {dtype}


# --- sampling -----------------------------------------------------------------------------------------------


def test_sampled_tokens_depend_on_the_seed(ask):
    hot = ["--temperature=1000"]
    first = ask(*hot, "--seed=1")
    again = ask(*hot, "--seed=1")
    other = ask(*hot, "--seed=2")
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["text"] == again["text"]
    assert ask(*hot)["tokens"] == ask(*hot, "--seed=0")["tokens"] != first["tokens"]


def test_flags_override_generation_config(ask, tmp_path, good):
    hf, weights = tiny.answering_model(ANSWER)
    hot = tiny.write(tmp_path, hf, weights=weights, generation_config=HOT | dict(eos_token_id=[tiny.IM_END]))
    sampled = ask(model=hot)["tokens"]
    assert sampled == ask("--temperature=1000")["tokens"] != [*ANSWER_IDS, tiny.IM_END]
    assert ask("--temperature=0", model=hot)["tokens"] == [*ANSWER_IDS, tiny.IM_END]
    assert ask("--nogeneration_config", model=hot)["tokens"] == [*ANSWER_IDS, tiny.IM_END]


def test_names_of_flags_may_have_dashes():
    """The values stay as they are."""
    answer_flags.PARSER.parse(
        ["x", "--prompt", "--max-tokens", "--max-tokens=3", "--no-use-cache", "-top-k", "5", "--stop=a-b",
         "--nogeneration-config", "--repetition-penalty", "1.5", "--regex", "--no-x"]
    )  # fmt: skip
    values = answer_flags.PARSER.values
    found = (values.prompt, values.max_tokens, values.use_cache, values.top_k, values.stop)
    assert found == ("--max-tokens", 3, False, 5, ["a-b"])
    assert (values.generation_config, values.repetition_penalty, values.regex) == (False, 1.5, "--no-x")


def test_a_second_call_resets_flags_to_their_defaults(command, ask, good):
    ask("--temperature=1000", "--seed=3", "--max_tokens=2", "--repetition_penalty=2", "--system=x")
    assert command(f"--model={good}", stdin=QUESTION)[:2] == (0, ANSWER + "\n")
    code, _, err = command("--output=xml", "--prompt=x")
    assert code == 2 and "xml" in err
    assert command(f"--model={good}", ASK)[:2] == (0, ANSWER + "\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(command, flag):
    code, out, err = command("--max_tokens=abc", flag)
    assert (code, err) == (0, "") and out.startswith("Text in, text out") and "example: " in out
    assert re.search(r"--max_tokens .*Default: 128\.", out)
    assert "flagfile" not in out and "undefok" not in out and max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_each_flag_apart_from_its_text(name, capsys):
    program = importlib.import_module(f"xinfer_jax.{COMMANDS[name].module}").PARSER
    with pytest.raises(SystemExit):
        program.parse([program.name, "--help"])
    out = capsys.readouterr().out
    assert f"\nusage: {program.name} " in out and f"\nexample: {program.name} " in out
    assert max(map(len, out.splitlines())) <= 120
    for name in program.values:
        option = f"--[no]{name}" if program.values[name].boolean else f"--{name}"
        assert re.search(rf"^  {re.escape(option)}(  +\S|\n {{28}}\S)", out, re.M), option
