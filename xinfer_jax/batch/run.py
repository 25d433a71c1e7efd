"""`generate_file`: a file of prompts in, a file of answers out."""

import dataclasses
import inspect
import json
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

import jax
import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from .. import __version__
from ..cache.fingerprint import fingerprint
from ..checkpoint.loading import Model
from ..checks import whole
from ..engine.engine import Engine
from ..engine.engines import AnyEngine, engine_of
from ..engine.scheduler import PAGE
from ..errors import InputError
from ..generation.options import GenerateOptions
from ..sharding import MODEL, lies_over
from ..stats import give_back_memory
from ..weights import processor
from .ledger import Ledger, check_output, is_of, progress_file, shard_file
from .lines import Line, hash_of, opened, plain, read_lines
from .work import Defaults, Work, names_of

_READ_AHEAD = 16  # lines beyond those that the engine has
_SETTLE_SECONDS = 1.0
_SAY_SECONDS = 60.0  # between two records of what is finished; between two lines of it


def check_files(input: str | Path, output: str | Path) -> None:
    """Raises InputError where one cannot be read, or the other is the same or no file."""
    check_output(output)
    for path in (Path(output), progress_file(output)):
        if str(input) != "-" and path.exists() and Path(input).exists() and path.samefile(input):
            raise InputError(f"{path} is the input too: give another output")
    if str(input) != "-":
        if Path(input).is_fifo():  # what is looked at here would be gone
            raise InputError(f"{input} can be read only once: give it as standard input, --input=-")
        next(read_lines(input), None)


def check_report(report: str | Path, input: str | Path, output: str | Path) -> None:
    """Raises InputError where a report would overwrite the input, the output, what a shard of it has, or a
    record of what is finished, by whatever name.
    """
    path = Path(report)
    folder = Path(output).absolute().parent
    name = re.escape(Path(output).name)
    belongs = re.compile(rf"{name}(\.\d+-of-\d+)?(\.progress)?")
    files = [Path(input), *(file for file in folder.iterdir() if belongs.fullmatch(file.name))]
    real = path.resolve()
    if (
        real.parent == folder.resolve()
        and belongs.fullmatch(real.name)
        or any(real == file.resolve() or _same(path, file) for file in files)
    ):
        raise InputError(f"--report={report} is the input or the output, or a file beside it: give another")


def _same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def generate_file(  # noqa: PLR0913  a door
    model: Model,
    input: str | Path,
    output: str | Path,
    options: GenerateOptions | None = None,
    *,
    seed: int = 0,
    raw: bool = False,
    system: str | None = None,
    score: bool = False,
    in_order: bool = False,
    model_names: Sequence[str] | None = None,
    shard: tuple[int, int] | None = None,
    stop: threading.Event | None = None,
    grace: float = 30.0,
    progress: bool = True,
    escape_control_tokens: bool = True,
    **shape: Any,
) -> dict[str, Any]:
    """Answers every line of a file, and appends each answer to another as it is finished. Broken off and
    called again with the same arguments it goes on, and ends with the same lines.

    Args:
        model: from `load_model`.
        input: a line is {"prompt": …}, {"messages": …}, or one of the OpenAI batch API; .gz is unpacked.
        output: beside it OUTPUT.progress records what is finished.
        options: where a line says nothing else.
        seed: a line without one draws with key(seed), into which four numbers are folded in turn: the first
            four uint32, little-endian, of the sha256 of its custom_id or number.
        raw, system: as in `encode_prompt`, for lines with a prompt.
        score: lines are {"prompt": …, "completions": […]} or {"text": …}: how likely they are. An empty
            completion has the log-probability 0, of no tokens.
        in_order: answers stand in the order of their lines.
        model_names: what a line may give as its `model`; another one is an error of that line. None: where
            the model was loaded from, the last part of that, or its model_type.
        shard: (i, n): only lines i + 1, i + 1 + n, … into OUTPUT.i-of-n.
        stop: once it is set no line is begun, and what runs has `grace` seconds to end.
        progress: show it on standard error.
        escape_control_tokens: as in `encode_prompt`, for lines with messages or a prompt that is not raw.
        shape: further arguments of `Engine`; with data_parallel there are so many of them.

    Returns:
        Counts, rates and times of this call, as the command's --report has them; `errors_before`: lines with
        an error among those that earlier calls finished.

    Raises:
        InputError: files or arguments at fault, or the disk is full; what is finished stays.
    """
    if not isinstance(model, Model):
        raise InputError("model must be what load_model gives")
    i, n = shard or (0, 1)
    n = whole("the number of shards", n, 1)
    i = whole("the shard", i, 0, n - 1)
    check_output(output)
    output = shard_file(output, i, n) if shard else Path(output)
    check_files(input, output)
    defaults = Defaults.of(model, options, seed, raw, system, score, escape_control_tokens)
    ledger = Ledger(output, _settings(model, defaults, shape, shard, in_order))
    try:
        with closing(engine_of(model, **shape)) as engine:
            defaults.check(engine)
            total = _count(input) // n if progress and str(input) != "-" else None
            run = _Run(engine, defaults, ledger, in_order, progress, total, model_names or names_of(model))
            with run.bar:
                run.lines(_own(read_lines(input), ledger.finished, i, n), stop or threading.Event(), grace)
    finally:
        ledger.close()
    return run.report()


def follow_file(model: Model, **shape: Any) -> None:
    """What processes beside process 0 do while that runs `generate_file`, with the same model and shape."""
    fingerprint(model.params, model.config)  # which takes all of them
    Engine(model, **shape).follow()


def _settings(model: Model, defaults: Defaults, shape: Any, shard: Any, in_order: bool) -> dict[str, Any]:
    """What answers depend on; of pages only whether a row has room: they decide where keys lie."""
    default = {name: p.default for name, p in inspect.signature(Engine).parameters.items()}
    engine = {name: shape.get(name, default[name]) for name in default if name not in ("model", "pages")}
    most = whole("capacity", engine["capacity"] or min(4096, model.config.context_length), 2)
    engine["room"] = min(most, (whole("pages", shape.get("pages") or 1 + most, 2) - 1) * PAGE)
    tokenizer = model.tokenizer
    text = f"{tokenizer.backend.to_str()}{tokenizer.chat_template}" if tokenizer else ""
    settings = dict(
        model=fingerprint(model.params, model.config), tokenizer=hash_of(text.encode()), engine=engine,
        shard=shard, in_order=in_order, machine=_machine(),
        mesh=mesh.shape[MODEL] if (mesh := lies_over(model.params)) else 1, **dataclasses.asdict(defaults),
    )  # fmt: skip
    return dict(_flat("", json.loads(json.dumps(settings, default=plain))))


def _machine() -> dict[str, Any]:
    """What the last bits depend on beside the settings; a run may go on where it differs."""
    device = jax.devices()[0]
    features = " ".join(processor.features()) if device.platform == "cpu" else None
    return dict(xinfer_jax=__version__, jax=jax.__version__, device=device.device_kind, cpu=features)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Objects in objects as one, of names like options.sampling.top_k."""
    if isinstance(value, dict) and value:
        for inner, one in value.items():
            yield from _flat(f"{name}.{inner}".lstrip("."), one)
    else:
        yield name, value


def _own(lines: Iterator[Line], finished: np.ndarray, i: int, n: int) -> Iterator[Line]:
    """Lines of this shard that are not finished; one that is must be what it was."""
    at = 0
    for line in lines:
        if at < len(finished) and (was := finished["number"][at]) <= line.number:
            if not is_of(finished[at], line.number, line.digest):
                raise InputError(f"line {was} is not what it was when it was answered: give the same")
            at += 1
        elif (line.number - 1) % n == i:
            yield line
    if at < len(finished):
        raise InputError(f"line {finished['number'][at]} was answered, and is not there any more")


class _Run:
    """Keeps an engine busy with lines, a bounded number ahead."""

    def __init__(  # noqa: PLR0913
        self, engine: AnyEngine, defaults: Defaults, ledger: Ledger, in_order: bool, says: bool, total: Any,
        names: Sequence[str],
    ):  # fmt: skip
        self._names = names
        self._failed_before = int(ledger.finished["failed"].sum())
        self._engine = engine
        self._defaults = defaults
        self._ledger = ledger
        self._in_order = in_order
        self._counts = Counter[str]()
        self._reasons = Counter[str]()
        self._began = self._settled = self._said = time.monotonic()
        self._stopped = False
        self._before = len(ledger.finished)
        self._says = says
        self._total = total
        terminal = says and sys.stderr is not None and sys.stderr.isatty()
        self.bar = tqdm(unit=" lines", disable=not terminal, initial=self._before, total=total)

    def lines(self, lines: Iterator[Line], stop: threading.Event, grace: float) -> None:
        """Answers them; stopped early, those that end within the time of grace."""
        ahead = dict[int, Work]()
        end = math.inf
        most = max(64, 4 * self._engine.rows)
        more = True
        queue = Queue[Any](_READ_AHEAD)
        over = threading.Event()
        threading.Thread(target=_feed, args=(lines, queue, over), daemon=True).start()
        try:
            while (more or ahead) and time.monotonic() < end:
                if stop.is_set() and not self._stopped:
                    self._stopped = True
                    more = False
                    end = time.monotonic() + grace
                    self._drop_waiting(ahead)
                while more and len(ahead) < most and not stop.is_set():
                    try:  # where lines are slow, what there is has its turn
                        line = queue.get(timeout=0 if ahead else 0.1)
                    except Empty:
                        break
                    more = self._take(line, ahead)
                self._engine.step()
                self._write_ended(ahead)
                self._tell()
        finally:
            over.set()

    def _take(self, line: Any, ahead: dict[int, Work]) -> bool:
        """Begins a line; whether more may come."""
        if isinstance(line, BaseException):
            raise line
        if line is not None:
            ahead[line.number] = Work(line, self._engine, self._defaults, self._names)
        return line is not None

    def _drop_waiting(self, ahead: dict[int, Work]) -> None:
        """Lets go of lines that were not begun, and in order of all behind the first of them."""
        waiting = [number for number, work in ahead.items() if not (work.begun or work.ended)]
        if self._in_order and waiting:
            waiting = [number for number in ahead if number >= waiting[0]]
        for number in waiting:
            ahead.pop(number).cancel()

    def _write_ended(self, ahead: dict[int, Work]) -> None:
        for number, work in list(ahead.items()):
            if work.ended:
                self._write(ahead.pop(number))
            elif self._in_order:
                break

    def _write(self, work: Work) -> None:
        answer = work.answer()  # which may find an error
        self._ledger.add(work.line.number, work.line.digest, answer, bool(work.error))
        self._counts["errors" if work.error else "answered"] += 1
        self._reasons.update(work.reasons)
        self.bar.update()

    def _tell(self) -> None:
        now = time.monotonic()
        if now > self._settled + _SETTLE_SECONDS:
            self._ledger.settle()
            give_back_memory()  # what millions of lines leave behind
            self._settled = now
            if not self.bar.disable:
                self.bar.set_postfix_str(self._rates())
        if self._says and self.bar.disable and now > self._said + _SAY_SECONDS:
            done = self._before + self._counts.total()
            rate = self.report()["lines_per_second"]
            of = ""
            if self._total and rate:
                of = f" of {self._total}, {max(0, self._total - done) / rate / 60:.0f} minutes left"
            print(f"{done} lines{of}: {self._rates()}", file=sys.stderr, flush=True)
            self._said = now

    def _rates(self) -> str:
        r = self.report()
        return (
            f"{r['read_tokens_per_second']:.0f} tok/s read, {r['chosen_tokens_per_second']:.0f} written,"
            f" {100 * r['hits']:.0f}% of prompts from pages"
        )

    def report(self) -> dict[str, Any]:
        """What this run did so far."""
        stats = self._engine.stats
        seconds = max(1e-9, time.monotonic() - self._began)
        counts = {name: self._counts[name] for name in ("answered", "errors")}
        rates = {f"{k}_per_second": getattr(stats, k) / seconds for k in ("read_tokens", "chosen_tokens")}
        return dict(
            **counts, finished_before=self._before, errors_before=self._failed_before,
            stopped=self._stopped, seconds=seconds, lines_per_second=self._counts.total() / seconds, **rates,
            read_tokens=stats.read_tokens, chosen_tokens=stats.chosen_tokens,
            hits=stats.hits / max(1, stats.hits + stats.read_tokens), preemptions=stats.preemptions,
            finish_reasons=dict(self._reasons), ttft_seconds=stats.ttft_seconds,
            tpot_seconds=stats.tpot_seconds,
        )  # fmt: skip


def _feed(lines: Iterator[Line], queue: Queue[Any], over: threading.Event) -> None:
    """Puts lines into a queue, and behind the last None, or what broke them off."""
    last: BaseException | None = None

    def put(item: Any) -> None:
        while not over.is_set():
            with suppress(Full):
                return queue.put(item, timeout=0.5)

    try:
        for line in lines:
            put(line)
            if over.is_set():
                return
    except BaseException as error:
        last = error
    put(last)


def _count(path: str | Path) -> int:
    """Lines of a file."""
    with opened(path) as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))
