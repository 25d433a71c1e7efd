"""Batch inference: every form of line, killed and resumed runs, shards, scores."""

import contextlib
import copy
import dataclasses
import errno
import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from paths import ROOT
from random_adapters import random_adapter
from soak import batch_lines

import xinfer_jax as xj
from xinfer_jax.backends.cpu import cpu_features
from xinfer_jax.batch import input_lines, resumable_output, run_batch, run_settings

pytestmark = pytest.mark.oldest

SHAPE = dict(rows=4, capacity=256, chunk=128, pages=40, progress=False)
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow_model()


def file_of(folder: Path, *rows, name="in.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else f"{json.dumps(row)}\n" for row in rows))
    return path


def answered(model, folder, *rows, **more):
    """(answers by id, report) for these lines."""
    report = xj.generate_file(model, file_of(folder, *rows), folder / "out", **SHAPE | more)
    found = [json.loads(row) for row in (folder / "out").read_text().splitlines()]
    return {row.get("custom_id", row["id"]): row for row in found}, report


def key_of(seed: int, identity) -> jax.Array:
    key = jax.random.key(seed)
    for at in range(0, 16, 4):
        word = hashlib.sha256(str(identity).encode()).digest()[at : at + 4]
        key = jax.random.fold_in(key, int.from_bytes(word, "little"))
    return key


@pytest.mark.full
def test_every_form_of_line_equals_generate(model, tmp_path):
    chat = [dict(role="user", content=QUESTION)]
    ids = [5, 6, 7]
    api = dict(method="POST", body=dict(model="qwen2", max_tokens=5, temperature=0.9, seed=3))
    found, report = answered(
        model,
        tmp_path,
        dict(prompt=QUESTION),
        dict(messages=[dict(role="user", content=[dict(type="text", text=QUESTION)])]),
        "\n",
        dict(prompt=ids, temperature=0.9, max_tokens=6, custom_id="mine"),
        dict(api, custom_id="chat", url="/v1/chat/completions", body=dict(api["body"], messages=chat)),
        dict(api, custom_id="two", url="/v1/completions", body=dict(api["body"], prompt=["Hi", ids], n=2)),
        dict(prompt="Hi", raw=True, max_tokens=2, n=2, logprobs=0, return_token_ids=True),
        seed=9,
    )
    assert report["answered"] == 6 and report["errors"] == 0 and not report["stopped"]
    assert found[1]["text"] == found[2]["text"] == xj.generate_text(model, QUESTION)
    assert found[1]["usage"]["prompt_tokens"] == 26

    def text(ids, count, key, j=0, n=1):
        options = xj.GenerateOptions(max_tokens=count, sampling=xj.SamplingConfig(temperature=0.9), n=n)
        return model.tokenizer.decode(
            xj.generate(model.params, model.config, [ids], options, key=key).tokens[j]
        )

    assert found["mine"]["text"] == text(ids, 6, key_of(9, "mine"))
    body = found["chat"]["response"]["body"]
    assert (body["created"], body["model"], body["object"]) == (0, "qwen2", "chat.completion")
    key = jax.random.key(3)
    assert body["choices"][0]["message"]["content"] == text(xj.encode_prompt(model, QUESTION), 5, key)
    choices = found["two"]["response"]["body"]["choices"]
    assert choices[0]["text"] == text(xj.encode_prompt(model, "Hi", raw=True), 5, key)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[1]["text"] == text(xj.encode_prompt(model, "Hi", raw=True), 5, key, 1, 2)
    assert choices[2]["text"] == text(ids, 5, jax.random.fold_in(key, 1), 0, 2)
    both = found[7]["choices"]
    assert [len(choice["token_ids"]) for choice in both] == [2, 2]
    assert [len(row) for row in both[0]["logprobs"]["top_logprobs"]] == [1, 1]


@pytest.mark.full
def test_lines_name_adapters(model, tmp_path):
    adapter = random_adapter(model.config, 0, 2)
    xj.lora.save_adapter(adapter, model.config, tmp_path / "adapter")
    api = dict(method="POST", url="/v1/completions", body=dict(model="a", max_tokens=5, prompt=[5, 6, 7]))
    rows = [
        dict(prompt=[5, 6, 7], max_tokens=5, adapter="a"), dict(prompt=[5, 6, 7], max_tokens=5),
        dict(api, custom_id="api"), dict(prompt=[5], adapter="b"), dict(prompt=[5], adapter=3),
    ]  # fmt: skip
    how = dict(adapters=dict(a=tmp_path / "adapter"))
    found, report = answered(model, tmp_path, *rows, **how)
    wanted = xj.generate(
        xj.lora.with_adapter(model.params, adapter),
        model.config,
        [[5, 6, 7]],
        xj.GenerateOptions(max_tokens=5),
    )
    assert found[1]["text"] == model.tokenizer.decode(wanted.tokens[0]) != found[2]["text"]
    assert found[1]["adapter"] == "a" and "adapter" not in found[2]
    body = found["api"]["response"]["body"]
    assert body["model"] == "a" and body["choices"][0]["text"] == found[1]["text"]
    assert "no adapter is called 'b': the engine has a" in found[4]["error"] and "3" in found[5]["error"]
    assert answered(model, tmp_path, *rows, **how)[1]["finished_before"] == 5
    with pytest.raises(xj.InputError, match="'a' has the name of the model"):
        answered(model, tmp_path, *rows, **how, model_names=["a"])
    with pytest.raises(xj.InputError, match=r"engine.adapters.a"):
        answered(model, tmp_path, *rows, adapters=dict(a=random_adapter(model.config, 1, 2)))
    (tmp_path / "scores").mkdir()
    scores, _ = answered(
        model, tmp_path / "scores", dict(text=[5, 6, 7]), dict(text=[5, 6, 7], adapter="a"), score=True, **how
    )
    assert scores[1]["logprob"] != scores[2]["logprob"]


INVALID = [
    ("{bad\n", "property name"),
    ("[1]\n", "must hold a JSON object"),
    ('{"prompt": NaN}\n', "NaN is not a JSON number"),
    ('{"prompt": "a", "custom_id": "\\ud800"}\n', "surrogates not allowed"),
    ("[" * 20000 + "\n", "recursion"),
    ("{}\n", "must have a prompt or messages"),
    (dict(prompt=""), "the prompt is empty"),
    (dict(prompt=[10**9]), "outside the vocabulary"),
    (dict(messages=[dict(role="user", content=[dict(type="image_url")])]), "text parts"),
    (dict(prompt="a", max_tokens=0), "max_tokens must be a whole number from 1"),
    (dict(prompt="a" * 9000), "exceeds the limit of"),
    (dict(prompt="a", top_p=7), "top_p must be"),
    (dict(prompt="a", banana=1), "banana is not a field"),
    (dict(prompt="a", echo=True), "echo does not belong to a plain request"),
    (dict(prompt="a", logit_bias={"9" * 5000: 1}), "logit_bias maps token ids"),
    (dict(messages=[dict(role="user", content="a")], raw=True), "raw takes a text"),
    (dict(prompt="a", model="\ud800"), "model must be a text"),
    (dict(prompt="a", tools=[{}]), "tools does not belong to a plain request"),
    (dict(prompt="a", custom_id=5), "custom_id must be a text"),
    (dict(url="/v1/completions", body=dict(prompt="a")), "must have a custom_id"),
    (dict(custom_id="b21", url="/v1/embeddings", body={}), "must be POST and one of"),
    (dict(custom_id="b22", url="/v1/completions", body=[]), "body must be an object"),
    (dict(custom_id="b23", url="/v1/completions", body=dict(prompt="a", stream=True)), "stream is not"),
]


def test_invalid_lines_get_the_reason(model, tmp_path):
    found, report = answered(model, tmp_path, *(row for row, _ in INVALID), dict(prompt="Hi", max_tokens=1))
    assert report["errors"] == len(INVALID) and found.pop(len(INVALID) + 1)["text"]
    for number, (_, why) in enumerate(INVALID, 1):
        one = found[number] if number in found else found[f"b{number}"]
        error = one["error"]["message"] if "response" in one else one["error"]
        assert error.startswith(f"line {number}: ") and why in error


def test_chat_templates_get_the_fields_of_the_line(model, tmp_path):
    template = "{{ messages | length }}{{ messages[0].content }}{{ mood }}"
    other = copy.copy(model.tokenizer)
    other.chat_template = template
    model = dataclasses.replace(model, tokenizer=other)
    ask = dict(max_tokens=1, return_token_ids=True)
    variables = dict(mood="x", self=1)
    messages = [dict(role="user", content="Hi")]
    rows = [dict(ask, prompt="Hi"), dict(ask, messages=messages), dict(ask, prompt="Hi", system="Be")]
    found, _ = answered(model, tmp_path, *(dict(row, chat_template_kwargs=variables) for row in rows))
    sizes = [len(other.encode(text, False)) for text in ("1Hix", "1Hix", "2Bex")]
    assert [found[i]["usage"]["prompt_tokens"] for i in (1, 2, 3)] == sizes
    (tmp_path / "system").mkdir()
    found, _ = answered(model, tmp_path / "system", *rows[:2], system="Be kind")  # of lines with a prompt
    sizes = [len(other.encode(text, False)) for text in ("2Be kind", "1Hi")]
    assert [found[i]["usage"]["prompt_tokens"] for i in (1, 2)] == sizes


def test_repeated_custom_ids_long_lines_and_invalid_utf8(model, tmp_path, monkeypatch):
    monkeypatch.setattr(input_lines, "_MAX_LINE_BYTES", 200)
    row = dict(prompt="Hi", max_tokens=1, custom_id="a")
    long = f'{{"prompt": "{"x" * 900}"}}'
    rows = row, row, f"{long}\n", dict(prompt="Hi", max_tokens=1), long[:300]
    found, _ = answered(model, tmp_path, *rows, in_order=True)
    assert "has come before" in found["a"]["error"]
    assert all("more than 200 bytes" in found[i]["error"] for i in (3, 5))
    assert found[4]["finish_reason"] == "length"
    data = b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt": "b"}'
    (tmp_path / "odd").write_bytes(data)
    first, second, third = input_lines.read_lines(tmp_path / "odd")
    assert (first.body, third.body) == (dict(prompt="a"), dict(prompt="b")) and "utf-8" in second.error


def mixed(folder: Path, count: int = 40) -> Path:
    return batch_lines.write_lines(folder / "mixed.jsonl", batch_lines.mixed_lines(random.Random(3), count))


@pytest.fixture(scope="module")
def ordered(model, tmp_path_factory) -> list[bytes]:
    """The output lines for `mixed` of an undisturbed run, in the order of the input."""
    folder = tmp_path_factory.mktemp("whole")
    xj.generate_file(model, mixed(folder), folder / "out", seed=7, in_order=True, **SHAPE)
    return (folder / "out").read_bytes().splitlines()


@pytest.fixture(scope="module")
def whole(ordered) -> list[bytes]:
    return sorted(ordered)


class Killed(BaseException):
    pass


@pytest.mark.full
@pytest.mark.parametrize("where, in_order", [("add", True), ("sync", False), ("between", True)])
def test_killed_runs_end_with_the_same_bytes(model, tmp_path, monkeypatch, ordered, where, in_order):
    rng = random.Random(where)
    calls = itertools.count(1)
    monkeypatch.setattr(run_batch, "_SYNC_SECONDS", 0.05)
    real_add = resumable_output.ResumableOutput.add
    real_sync = resumable_output.ResumableOutput.sync
    dies: list[int] = []

    def add(self, number, digest, line, failed):
        if next(calls) in dies and where != "sync":
            os.write(self._file, line[: len(line) // 2] if where == "add" else line)
            raise Killed
        real_add(self, number, digest, line, failed)

    def sync(self):
        if sys.exc_info()[0] is Killed or (where == "sync" and dies and next(calls) % 4 == 0):
            self._pending = []
            if sys.exc_info()[0] is not Killed:
                raise Killed
        real_sync(self)

    monkeypatch.setattr(resumable_output.ResumableOutput, "add", add)
    monkeypatch.setattr(resumable_output.ResumableOutput, "sync", sync)
    again = dict(seed=7, in_order=in_order, **SHAPE)
    for _ in range(3):
        dies[:] = [next(calls) + rng.randint(1, 15)]
        try:
            xj.generate_file(model, mixed(tmp_path), tmp_path / "out", **again)
        except Killed:
            pass
    dies.clear()
    report = xj.generate_file(model, mixed(tmp_path), tmp_path / "out", **again)
    assert report["finished_before"] + report["answered"] + report["errors"] == 40
    rows = (tmp_path / "out").read_bytes().splitlines()
    assert rows == ordered if in_order else sorted(rows) == sorted(ordered)
    assert xj.generate_file(model, mixed(tmp_path), tmp_path / "out", **again)["finished_before"] == 40


@pytest.mark.full
def test_another_run_is_rejected_and_changes_no_file(model, tmp_path):
    rows = [dict(prompt="Hi", max_tokens=1), dict(prompt="Hello", max_tokens=1)]
    answered(model, tmp_path, *rows)
    files = [tmp_path / name for name in ("out", "out.progress")]
    before = [path.read_bytes() for path in files]
    other = xj.Model(jax.tree.map(lambda x: x + 0.01, model.params), *list(vars(model).values())[1:])
    options = xj.GenerateOptions(sampling=xj.SamplingConfig(temperature=0.5))
    for more, name in [
        (dict(seed=1), "seed 0, here 1"),
        (dict(options=options), "options.sampling.temperature 0.0, here 0.5"),
        (dict(capacity=128), "engine.capacity 256, here 128"),
        (dict(in_order=True), "in_order"),
    ]:
        with pytest.raises(xj.InputError, match=name):
            answered(model, tmp_path, *rows, **more)
    with pytest.raises(xj.InputError, match="begun with model"):
        answered(other, tmp_path, *rows)
    with pytest.raises(xj.InputError, match="line 2 is not what it was"):
        answered(model, tmp_path, rows[0], dict(prompt="Bye", max_tokens=1))
    with pytest.raises(xj.InputError, match="line 2 was answered, and is not there"):
        answered(model, tmp_path, rows[0])
    with pytest.raises(xj.InputError, match="line 1 is not what it was"):
        answered(model, tmp_path, "\n", rows[1])
    for file in files:
        with contextlib.ExitStack() as held:
            resumable_output._open_locked(file, held)
            with pytest.raises(xj.InputError, match="another process writes to"):
                answered(model, tmp_path, *rows)
    assert [path.read_bytes() for path in files] == before
    files[1].unlink()
    with pytest.raises(xj.InputError, match="does not say which run"):
        answered(model, tmp_path, *rows)
    assert files[0].read_bytes() == before[0]
    for path, data in zip(files, (b"", b"somebody's\nnotes"), strict=True):
        path.write_bytes(data)
    with pytest.raises(xj.InputError, match="does not say which run"):
        answered(model, tmp_path, *rows)
    assert files[1].read_bytes() == data


def test_progress_file_of_another_format_is_rejected(model, tmp_path):
    row = dict(prompt="Hi", max_tokens=1)
    progress = tmp_path / "out.progress"
    answered(model, tmp_path, row)
    head, _, rest = progress.read_bytes().partition(b"\n")
    settings = json.loads(head)
    assert settings.pop("format") == 2
    progress.write_bytes(json.dumps(settings).encode() + b"\n" + rest)
    with pytest.raises(xj.InputError, match="out.progress has format 1, .* and this one has 2: give another"):
        answered(model, tmp_path, row)


@pytest.mark.full
def test_run_resumes_on_another_version_or_cpu_with_a_warning(model, tmp_path, monkeypatch, caplog):
    row = dict(prompt="Hi", max_tokens=1)
    answered(model, tmp_path, row)
    for change, message in (
        ((cpu_features, "numerics_features", lambda: ["avx2"]), "cpu .*, here 'avx2'"),
        ((run_settings, "__version__", "0.0"), "xinfer_jax .*here '0.0'"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            answered(model, tmp_path, row)
        assert re.search(message, caplog.text)


def test_settings_are_synced_before_the_first_line(model, tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def sync(file):
        synced.append((os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size))
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    resumable_output.ResumableOutput(tmp_path / "out", dict(model="m")).close()
    size = (tmp_path / "out.progress").stat().st_size
    assert synced[0] == (str(tmp_path / "out.progress"), size) and synced[1][0] == str(tmp_path)


def test_digest_set_finds_earlier_digests():
    known = input_lines._DigestSet()
    drawn = [bytes([i % 7, 0, *i.to_bytes(4, "big"), *[0] * 10]) for i in range(70_000)]  # many end in zeros
    assert not any(map(known.add, drawn)) and known._sorted.nbytes == 16 * len(known._sorted) == 2**20
    assert all(map(known.add, drawn[::500]))


@pytest.mark.full
def test_records_survive_a_full_disk_and_broken_ones_are_truncated(model, tmp_path, monkeypatch, whole):
    file = mixed(tmp_path)
    out = tmp_path / "out"
    real = os.write
    names = tmp_path / "out", tmp_path / "out.progress"

    def torn(to, data):
        if len(data) % 33 == 0 and not bytes(data).endswith(b"\n"):  # only half of a record fits
            if not tears:
                tears.append(real(to, bytes(data)[:10]))
                return 10
            tears.append(0)
            if len(tears) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(to, data)

    tears: list[int] = []
    monkeypatch.setattr(os, "write", torn)
    monkeypatch.setattr(run_batch, "_SYNC_SECONDS", 0.0)
    with pytest.raises(xj.InputError, match="out.progress cannot be written: No space left"):
        xj.generate_file(model, file, out, seed=7, **SHAPE)
    monkeypatch.setattr(os, "write", real)
    xj.generate_file(model, file, out, seed=7, **SHAPE)
    assert sorted(out.read_bytes().splitlines()) == whole
    kept = names[1].read_bytes()
    names[1].write_bytes(kept[:-66] + bytes(66))  # blocks that the file system allocated and did not fill
    assert xj.generate_file(model, file, out, seed=7, **SHAPE)["finished_before"] == 38
    assert sorted(out.read_bytes().splitlines()) == whole
    synced = itertools.count()
    monkeypatch.setattr(os, "fsync", lambda _: broken_disk() if next(synced) > 1 else None)
    out.unlink()
    with pytest.raises(xj.InputError, match="out cannot be written: Input/output error"):
        xj.generate_file(model, file, out, seed=7, **SHAPE)


def broken_disk():
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.full
def test_merged_shards_equal_the_whole_output(model, tmp_path, ordered, monkeypatch):
    file = mixed(tmp_path)
    for i in range(3):
        xj.generate_file(model, file, tmp_path / "out", seed=7, shard=(i, 3), **SHAPE)
        if i < 2:
            with pytest.raises(xj.InputError, match="-of-3"):
                resumable_output.merge_shards(file, tmp_path / "out", 3)
    assert not (tmp_path / "out").exists()
    rows = file.read_bytes().splitlines()
    second = tmp_path / "out.1-of-3"
    with pytest.raises(xj.InputError, match="39 lines are in"):
        short = file_of(tmp_path, *(f"{row.decode()}\n" for row in rows[:-1]), name="short")
        resumable_output.merge_shards(short, tmp_path / "out", 3)
    kept = second.read_bytes()
    second.write_bytes(kept[:-5])
    with pytest.raises(xj.InputError, match="is not finished in .*1-of-3"):
        resumable_output.merge_shards(file, tmp_path / "out", 3)
    second.write_bytes(kept)
    (part := tmp_path / "out.part").write_text("mine")
    with contextlib.ExitStack() as held:
        resumable_output._open_locked(second, held)
        with pytest.raises(xj.InputError, match="1-of-3 is being written: wait"):
            resumable_output.merge_shards(file, tmp_path / "out", 3)
    for name, why in (("out.gz", "without .gz"), ("-", "output - would be standard output")):
        with pytest.raises(xj.InputError, match=why):
            resumable_output.merge_shards(file, name if name == "-" else tmp_path / name, 3)
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), real(file))
    )
    lines, error_lines = resumable_output.merge_shards(file, tmp_path / "out", 3)
    assert (lines, error_lines) == (40, 12)
    assert (tmp_path / "out").read_bytes().splitlines() == ordered
    assert len(synced) == 2 and synced[0].endswith(".part") and synced[1] == str(tmp_path)
    assert part.read_text() == "mine" and [*tmp_path.glob("out*.part")] == [part]
    with pytest.raises(xj.InputError, match="exists already"):
        resumable_output.merge_shards(file, tmp_path / "out", 3)


@pytest.mark.full
def test_gzip_and_standard_input(model, tmp_path, monkeypatch, whole):
    data = mixed(tmp_path).read_bytes()
    (tmp_path / "in.gz").write_bytes(gzip.compress(data))
    xj.generate_file(model, tmp_path / "in.gz", tmp_path / "out", seed=7, **SHAPE)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    xj.generate_file(model, "-", tmp_path / "piped", seed=7, **SHAPE)
    assert all(sorted((tmp_path / n).read_bytes().splitlines()) == whole for n in ("out", "piped"))
    (tmp_path / "torn.gz").write_bytes(gzip.compress(data)[:-30])
    with pytest.raises(xj.InputError, match="is not a complete gzip file"):
        xj.generate_file(model, tmp_path / "torn.gz", tmp_path / "torn", seed=7, **SHAPE)
    (tmp_path / "unnamed").write_bytes(gzip.compress(data))
    with pytest.raises(xj.InputError, match="is compressed by gzip: give a file whose name ends in .gz"):
        xj.generate_file(model, tmp_path / "unnamed", tmp_path / "torn", seed=7, **SHAPE)


def test_slow_input_lines_are_answered_when_they_arrive(model, tmp_path, monkeypatch):
    reads, writes = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(reads))
    running = threading.Thread(target=xj.generate_file, args=(model, "-", tmp_path / "out"), kwargs=SHAPE)
    running.start()
    for count in (1, 2):
        os.write(writes, b'{"prompt": "Hi", "max_tokens": 1}\n')
        end = time.monotonic() + 120
        while not (tmp_path / "out").exists() or (tmp_path / "out").read_bytes().count(b"\n") < count:
            assert time.monotonic() < end
            time.sleep(0.01)
    os.close(writes)
    running.join(120)
    assert not running.is_alive()


@pytest.mark.full
def test_stopped_run_finishes_running_lines_and_resumes(model, tmp_path, monkeypatch):
    stop = threading.Event()
    seen = []
    rows = [dict(prompt=f"Say {i}", max_tokens=30, ignore_eos=True, raw=True) for i in range(200)]

    def read(file):
        for line in read_lines(file):
            seen.append(line.number)
            yield line

    read_lines = input_lines.read_lines
    monkeypatch.setattr(run_batch, "read_lines", read)
    real = resumable_output.ResumableOutput.add
    monkeypatch.setattr(resumable_output.ResumableOutput, "add", lambda *args: (stop.set(), real(*args)))
    found, report = answered(model, tmp_path, *rows, stop=stop)
    assert report["stopped"] and 1 <= len(found) <= 2 * SHAPE["rows"]
    assert len(seen) <= 64 + run_batch._QUEUED_LINES + SHAPE["rows"]  # the most lines in memory
    assert answered(model, tmp_path, *rows)[1]["finished_before"] == len(found)
    (tmp_path / "late").mkdir()
    stop.clear()
    found, report = answered(model, tmp_path / "late", *rows, stop=stop, grace=0)
    assert report["stopped"] and len(found) < 200


def test_stopped_run_in_order_leaves_no_gap(model, tmp_path, monkeypatch):
    rows = [dict(prompt=f"Say {i}", max_tokens=30, ignore_eos=True, raw=True) for i in range(20)] + ["[]\n"]
    stop = threading.Event()
    real = resumable_output.ResumableOutput.add
    monkeypatch.setattr(resumable_output.ResumableOutput, "add", lambda *args: (stop.set(), real(*args)))
    first, report = answered(model, tmp_path, *rows, stop=stop, in_order=True)
    assert report["stopped"] and [*first] == list(range(1, len(first) + 1))
    assert [*answered(model, tmp_path, *rows, in_order=True)[0]] == list(range(1, 22))


@pytest.mark.full
def test_scores_equal_score(model, tmp_path):
    prompt = "The capital of France is the town of light, and it is the town of"
    choices = [" Paris.", " Rome", "x"]
    long = prompt + prompt + prompt + prompt  # longer than a page
    ids = [model.tokenizer.encode(long + choice) for choice in choices]
    found, report = answered(
        model, tmp_path,
        dict(prompt=long, completions=choices),
        dict(text=long + choices[0]),
        dict(prompt=[5, 6], completions=[[7], [8, 9]]),
        dict(prompt=f"{long} ", completions=["Paris."]),
        dict(prompt="a"), dict(text="a", prompt="b"), dict(prompt="a", completions=[]), dict(text=3),
        dict(prompt="a", completions=["b", 3]), dict(text="a" * 9000),
        dict(prompt=[], completions=[[7, 8]]),
        dict(prompt=long, completions=["", *choices, ""]), dict(prompt=[5, 6], completions=[[]]),
        score=True,
    )  # fmt: skip
    begin = len(model.tokenizer.encode(long))
    wanted = xj.score_completions(
        model.params, model.config, [i[:begin] for i in ids], [i[begin:] for i in ids]
    )
    for row, one in zip(wanted, found[1]["completions"], strict=True):
        assert one["tokens"] == len(row) and abs(one["logprob"] - sum(row)) < 1e-4
    (first,) = xj.score_completions(model.params, model.config, [ids[0][:1]], [ids[0][1:]])
    assert found[2]["tokens"] == len(ids[0]) - 1 and abs(found[2]["logprob"] - sum(first)) < 1e-3
    likeliest = np.argmax(xj.forward(model.params, model.config, np.array([ids[0]]))[0][0], -1)
    greedy = bool((np.asarray(likeliest)[begin - 1 : -1] == ids[0][begin:]).all())
    assert found[1]["completions"][0]["greedy"] is greedy
    assert [one["tokens"] for one in found[3]["completions"]] == [1, 2]
    assert found[4]["completions"][0]["logprob"] == pytest.approx(
        found[1]["completions"][0]["logprob"], abs=1e-4
    )
    empty = dict(logprob=0.0, tokens=0, greedy=True)
    assert found[12]["completions"] == [empty, *found[1]["completions"], empty]
    assert found[13]["completions"] == [empty]
    assert report["errors"] == 7 and all("error" in found[i] for i in range(5, 12))
    assert report["hits"] > 0.3  # completions of one prompt share its pages


@pytest.mark.full
def test_dataset_generator_answers_batches_of_columns(tmp_path):
    options = xj.GenerateOptions(max_tokens=8, sampling=xj.SamplingConfig(temperature=0.9))
    made = xj.DatasetGenerator(options=options, seed=4, rows=3, capacity=128, pages=20)
    prompts = np.array([QUESTION, "Hi", "", "Say one", "Say two"], dtype=object)
    whole = made(dict(prompt=prompts, extra=np.arange(5)))
    again = pickle.loads(pickle.dumps(made))
    parts = [again(dict(prompt=prompts[at : at + 2])) for at in (0, 2, 4)]
    assert [text for part in parts for text in part["text"]] == whole["text"].tolist()
    assert whole["extra"].tolist() == [0, 1, 2, 3, 4] and "empty" in whole["error"][2]
    assert whole["error"][0] == "" and whole["completion_tokens"][2] == 0
    named = made(dict(messages=[[dict(role="user", content=QUESTION)]], custom_id=["a"]))
    row = dict(messages=[dict(role="user", content=QUESTION)], custom_id="a")
    found, _ = answered(xj.load_model(), tmp_path, row, options=options, seed=4)
    assert named["text"].tolist() == [found["a"]["text"]]
    with pytest.raises(xj.InputError, match="needs the column"):
        made(dict(text=prompts))
    with pytest.raises(xj.InputError, match="one answer"):
        xj.DatasetGenerator(options=xj.GenerateOptions(n=2), rows=2, capacity=128)(dict(prompt=prompts))
    # Nested columns and columns of numbers as Arrow has them. An error is the same in any batch.
    part = np.array([dict(type="text", text=QUESTION)], dtype=object)
    nested = np.empty(2, object)
    nested[:] = [np.array([dict(role="user", content=part)], dtype=object), None]
    both = again(dict(messages=nested, custom_id=["a", "b"]))
    assert (
        both["text"][0] == named["text"][0] and both["error"][1] == again(dict(messages=[None]))["error"][0]
    )
    assert "list of token ids" in again(dict(prompt=np.arange(2)))["error"][0]
    draws = made(dict(prompt=["Say one", "Hi", "Say one", "Say one"]))["text"].tolist()
    assert draws[0] == whole["text"][3] and len({draws[0], *draws[2:]}) > 1
    assert made(dict(prompt=["Say one"] * 3))["text"].tolist() == [draws[0], *draws[2:]]
    none = again(dict(prompt=[]))
    assert none["text"].dtype == object and none["prompt_tokens"].dtype == np.int64


@pytest.mark.full
def test_command_resumes_after_sigkill_and_sigterm(tmp_path, whole):
    flags = ["--rows=4", "--capacity=256", "--pages=40", "--seed=7", "--nogeneration_config"]
    command = [sys.executable, "scripts/batch.py", f"--input={mixed(tmp_path, 160)}", *flags]

    def start(name):
        given = [*command, f"--output={tmp_path / name}"]
        return subprocess.Popen(given, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def begun(process, name, more):
        """Waits until it has written so many bytes, and returns their number."""
        path = tmp_path / name
        end = time.monotonic() + 120
        size = path.stat().st_size if path.exists() else 0
        while process.poll() is None and time.monotonic() < end:
            if path.exists() and path.stat().st_size > size + more:
                return
            time.sleep(0.01)

    process = start("killed")  # scripts/soak_batch.py kills often
    begun(process, "killed", 9000)
    process.kill()
    process.communicate()
    process = start("killed")
    begun(process, "killed", 3000)
    process.send_signal(signal.SIGSTOP)  # otherwise it might finish before the second one checks
    second = start("killed")
    assert "another process writes to" in second.communicate()[1] and second.returncode == 2
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate()[1]
    if process.returncode:
        assert process.returncode == 128 + signal.SIGTERM
        assert "stopped early: run the same command again to continue" in stderr
    for name in ("killed", "whole"):
        process = start(name)
        stderr = process.communicate()[1]
        assert "lines answered" in stderr and re.search(r"\d+ lines of the output have an error", stderr)
        assert process.returncode == 1
    rows = [sorted((tmp_path / name).read_bytes().splitlines()) for name in ("killed", "whole")]
    assert rows[0] == rows[1] and len(rows[0]) == 160


@pytest.mark.parametrize(
    "flags, why",
    [
        (["--output=OUT"], "--input is missing"),
        (["--input=IN"], "--output is missing"),
        (["--input=NONE", "--output=OUT"], "NONE cannot be read: No such file"),
        (["--input=DIR", "--output=OUT"], "cannot be read: Is a directory"),
        (["--input=IN", "--output=DIR"], "cannot be written: give a file"),
        (["--input=IN", "--output=NONE/OUT"], "cannot be written: give a file"),
        (["--input=IN", "--output=IN"], "is the input too"),
        (["--input=IN", "--output=OUT", "--shard=2/2"], "must be i/n"),
        (["--input=IN", "--output=OUT", "--merge=2", "--shard=0/2"], "leave out --shard"),
        (["--input=IN", "--output=OUT", "--merge=2"], "OUT.0-of-2 cannot be read"),
        (["--input=IN", "--output=OUT", "--merge=2", "--report=R"], "leave out --report"),
        (["--input=IN", "--output=-"], "output - would be standard output"),
        (["--input=IN", "--output=OUT", "--model=NONE"], "NONE"),
        (["--input=TORN.gz", "--output=OUT"], "is not a complete gzip file"),
        (["--input=PIPE", "--output=OUT"], "can be read only once"),
        (["--input=IN", "--output=PIPE"], "cannot be written: give a file"),
        (["--input=IN", "--output=OUT.gz"], "give a name without .gz"),
        *(
            (["--input=IN", "--output=OUT", f"--report={name}"], "is the input or the output")
            for name in ("IN", "OUT.progress", "OUT.1-of-2.progress", "HARD", "SOFT")
        ),
    ],
)
def test_bad_flags_of_batch(tmp_path, monkeypatch, capsys, flags, why):
    from xinfer_jax.cli import batch_flags

    monkeypatch.chdir(tmp_path)
    Path("DIR").mkdir()
    os.mkfifo("PIPE")
    file_of(tmp_path, dict(prompt="Hi"), name="IN")
    Path("TORN.gz").write_bytes(b"no gzip")
    Path("OUT.1-of-2").write_bytes(b"of a shard")
    os.link("OUT.1-of-2", "HARD")
    os.symlink("OUT.0-of-2.progress", "SOFT")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        batch_flags.main(["xinfer-jax-batch", "--compilation_cache=", *flags])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and lines[-1].startswith("xinfer-jax-batch: ") and why in lines[-1]
    assert all(path.read_bytes() == data for path, data in before.items())
