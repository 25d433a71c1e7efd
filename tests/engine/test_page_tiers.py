"""Pages of the prefix cache in host memory and in files: the same bits, and what is not a page is a miss."""

import dataclasses
import errno
import os
import threading
import time

import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.engine import page_files
from xinfer_jax.engine.page_files import PageFiles
from xinfer_jax.engine.row import Row
from xinfer_jax.engine.shape import page_settings

pytestmark = pytest.mark.oldest

SHAPE = dict(rows=3, capacity=512, chunk=128, pages=20)
SAMPLED = xj.GenerateOptions(
    max_tokens=3, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=(), logprobs=1
)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow_model()  # as in test_engine.py: the same programs


@pytest.fixture(scope="module")
def prompts(model):
    """Twice as many pages as the device has."""
    rng = np.random.default_rng(0)
    return [rng.integers(5, model.config.vocab_size, 400).tolist() for _ in range(6)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    engine = xj.Engine(model, **SHAPE)
    answers = ask(engine, prompts)
    assert engine.stats.hits == engine.stats.host_hits == 0  # evicted before they are asked for again
    return answers


def ask(engine, prompts):
    """The bits of each answer."""
    outs = [engine.submit(ids, SAMPLED, key=jax.random.key(1)).result() for ids in prompts]
    return [(out.tokens, out.logprobs) for out in outs]


def unknown_pages(core, ids):
    """Hashes of the pages of a prompt that are in no file."""
    row = Row(ids, 3, salt=core.tiers.salt(b""))
    core.scheduler.prefixes.find(row)
    return [page_hash for page_hash in row.page_hashes if page_hash not in core.scheduler.host.files]


def files_of(directory):
    return sorted(path for path in directory.iterdir() if path.suffix == ".page")


def write_all(engine):
    """Waits until the saved pages are written."""
    tiers = engine.core.tiers
    end = time.monotonic() + 120
    while (tiers._unwritten or tiers._files.num_writing) and time.monotonic() < end:
        tiers.step()


def test_pages_come_back_from_host_memory(model, prompts, expected):
    engine = xj.Engine(model, **SHAPE, host_pages=60)
    assert ask(engine, prompts) == expected and engine.stats.hits == 0
    assert ask(engine, prompts) == expected
    stats = engine.stats
    assert stats.hits == stats.host_hits == 6 * 384 and stats.file_hits == 0 and stats.host_pages >= 30
    requests = [engine.submit(ids, SAMPLED, key=jax.random.key(1)) for ids in prompts * 2]
    assert [(r.result().tokens, r.result().logprobs) for r in requests] == expected * 2
    assert engine.stats.pages_used == 0
    engine.update(jax.tree.map(lambda x: x * 0.9, model.params))
    before = engine.stats.hits
    assert ask(engine, prompts[:1]) != expected[:1]
    assert engine.stats.hits == before


@pytest.mark.full
def test_pages_in_float8(prompts, tmp_path):
    """The tokens of `generate`; from host memory and from files the same bits."""
    model = xj.load_model()  # its tokens are far from ties
    shape = SHAPE | dict(cache_dtype="float8_e4m3fn", host_pages=40, page_directory=tmp_path / "pages")
    with xj.Engine(model, **shape) as engine:
        expected = ask(engine, prompts)
        assert ask(engine, prompts[:3]) == expected[:3]
        assert engine.stats.host_hits == 3 * 384
    config = model.config
    vectors = 2 * config.num_hidden_layers * config.num_key_value_heads
    assert engine.core.shape.page_bytes == 64 * vectors * (config.head_dim + 2)
    options = dataclasses.replace(SAMPLED, cache_dtype="float8_e4m3fn")
    alone = xj.generate(model.params, model.config, prompts[:1], options, key=jax.random.key(1)[None])
    assert alone.tokens == expected[0][0]
    with xj.Engine(model, **shape) as again:
        assert ask(again, prompts) == expected
        assert again.stats.file_hits == 6 * 384


def test_a_later_run_finds_pages_in_files(model, prompts, expected, tmp_path, caplog):
    shape = SHAPE | dict(host_pages=40, page_directory=tmp_path / "pages")
    with xj.Engine(model, **shape) as engine:
        assert ask(engine, prompts) == expected
    files = files_of(tmp_path / "pages")
    assert len(files) == 36 and (tmp_path / "pages").stat().st_mode & 0o777 == 0o700

    with xj.Engine(model, **shape) as again:
        assert ask(again, prompts) == expected
    stats = again.stats
    assert stats.file_hits == stats.hits == 6 * 384 and stats.prefill_tokens == 6 * 16

    core = xj.Engine(model, **shape).core
    assert not unknown_pages(core, prompts[0])
    for other in (dict(cache_dtype="int8"), dict(capacity=256), dict(impl="xla")):
        core.tiers.identify(
            page_settings(model.params, model.config, dataclasses.replace(core.shape, **other))
        )
        assert len(unknown_pages(core, prompts[0])) == 6
    caplog.clear()

    bad = files_of(tmp_path / "pages")
    for path in bad[::3]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    for path in bad[1::3]:
        os.truncate(path, path.stat().st_size // 2)
    foreign = bad[2].read_bytes()
    for path in bad[2::3]:
        path.write_bytes(foreign)
    bad[2].unlink()
    with xj.Engine(model, **shape) as last:
        assert ask(last, prompts) == expected
        assert last.stats.hits == 0
    assert caplog.text.count("page directory") == 1


@pytest.mark.full
def test_a_slow_file_delays_its_row_only(model, prompts, expected, tmp_path, monkeypatch):
    shape = SHAPE | dict(host_pages=40, page_directory=tmp_path / "pages")
    engine = xj.Engine(model, **shape)
    ask(engine, prompts)
    write_all(engine)
    released = threading.Event()
    read = PageFiles._read

    def wait_and_read(self, *args):
        released.wait(120)
        return read(self, *args)

    monkeypatch.setattr(PageFiles, "_read", wait_and_read)
    monkeypatch.setattr("xinfer_jax.engine.page_tiers._FIRST_WAIT_SECONDS", 0.3)
    with xj.Engine(model, **shape) as slow:
        waits = slow.submit(prompts[0], SAMPLED, key=jax.random.key(1))
        other = slow.submit([5] * 9, SAMPLED, key=jax.random.key(1))
        other.result()
        assert "first" not in waits.times and slow.stats.waiting == 1
        out = waits.result()
        assert (out.tokens, out.logprobs) == expected[0] and slow.stats.hits == 0
        cancelled = slow.submit(prompts[1], SAMPLED, key=jax.random.key(1))
        cancelled.cancel()
        cancelled.result()
        released.set()
    while slow.core.tiers._files.num_writing or not slow.core.tiers._files.finished.empty():
        slow.core.tiers.step()


@pytest.fixture
def files(tmp_path):
    files = PageFiles(tmp_path / "pages", 3500)
    files.identify(model="a")
    return files


def page(value):
    return np.full(1000, value, np.uint8)


def finish(files, count=1):
    for _ in range(count):
        files.finished.get(timeout=120)()


def write(files, *names):
    for name in names:
        files.write(name, page(name[0]), lambda: None)
        finish(files)


def read(files, *names):
    """Each page's first number, of the pages that were read."""
    pages = [page(0) for _ in names]
    counts = []
    files.read(names, pages, counts.append)
    finish(files)
    return [int(page[0]) for page in pages[: counts[0]] if (page == page[0]).all()]


def test_the_least_recently_used_files_are_deleted(files, tmp_path):
    write(files, b"a", b"b", b"c")
    assert read(files, b"a", b"c") == [97, 99]
    write(files, b"d")
    assert [name in files for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert read(files, b"a", b"b", b"d") == [97]
    again = PageFiles(tmp_path / "pages", 3500)
    again.identify(model="b")
    assert b"a" not in again and again.salt(b"x") == files.salt(b"x") != files.salt(b"y")
    again.identify(model="a")
    assert read(again, b"c", b"d") == [99, 100]
    again.discard(b"c")
    assert b"c" not in again
    again.write(b"e", page(101), lambda: None)  # after the file was deleted
    finish(again)
    assert len(files_of(tmp_path / "pages")) == 3
    again.write(b"f", page(102), lambda: None)
    again.discard(b"f")  # its numbers are not finite, and it may still be being written
    finish(again)
    write(again, b"g")
    assert b"f" not in again and b"g" in again


def test_an_interrupted_or_failed_write_leaves_no_page(files, tmp_path, monkeypatch, caplog):
    old = tmp_path / "pages" / ".tmp"
    old.write_bytes(b"half a page")
    os.utime(old, (1, 1))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(page_files.os, "replace", full)
        write(files, b"a")
        assert not files.can_write
        files._paused_until = 0.0
        write(files, b"b")
    assert caplog.text.count("No space left") == 1
    assert b"a" not in files and {path.name for path in (tmp_path / "pages").iterdir()} == {".tmp", "secret"}
    assert PageFiles(tmp_path / "pages", 3500) and not old.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(host_pages=-1), "host_pages must be a whole number"),
        (dict(host_pages=9, prefix_cache=False), "prefix_cache"),
        (dict(page_directory="x"), "needs host_pages"),
        (dict(page_directory=5, host_pages=9), "must be a path"),
        (dict(host_pages=2**40), r"host pages \(.*\) \+ weights and pages \(.*\) need"),
        (dict(host_pages=9, page_directory="open"), "mode 0700"),
    ],
)
def test_wrong_arguments_are_rejected_by_name(model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(model, **SHAPE | arguments)
