"""`generate_file`: a file of prompts in, a file of answers out."""

import logging
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, TypedDict, Unpack

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from ..cache.fingerprint import fingerprint
from ..checkpoint.loading import Model
from ..checks import check_integer
from ..engine.engine import LocalEngine
from ..engine.engine_options import EngineOptions, EngineSettings
from ..engine.engines import Engine
from ..engine.held_adapters import with_adapters_read
from ..errors import InputError, format_value
from ..generation.options import GenerateOptions
from ..stats import release_free_memory
from .input_lines import Line, open_input, read_lines
from .line_request import LineDefaults, LineRequest, default_model_names
from .resumable_output import ResumableOutput, check_output, matches_record, progress_file, shard_file
from .run_settings import run_settings

_LOGGER = logging.getLogger(__name__)

_QUEUED_LINES = 16  # parsed lines that wait to be submitted
_SYNC_SECONDS = 1.0  # between two syncs of the output
_LOG_SECONDS = 60.0  # between two progress lines, where standard error is no terminal


class BatchReport(TypedDict):
    """Counts, rates and times of a call of `generate_file`.

    Attributes:
        answered: the number of lines of this call with an answer.
        errors: the number of lines of this call with an error.
        finished_before: the number of lines that earlier calls finished.
        errors_before: the number of lines with an error that earlier calls finished.
        stopped: True if `stop` was set before the end of the file.
        seconds: the time from the start of the engine to the last answer.
        lines_per_second: the rate of lines with an answer or an error.
        prefill_tokens: the number of prompt tokens that were computed.
        generated_tokens: the number of tokens in answers.
        prefill_tokens_per_second: the rate of the prompt tokens that were computed.
        generated_tokens_per_second: the rate of the tokens in answers.
        hits: the fraction of prompt tokens that the prefix cache had.
        preemptions: how often a row was preempted.
        finish_reasons: the number of answers with each finish_reason.
        ttft_seconds: the percentiles of the time to the first token, in seconds (see `EngineStats`).
        tpot_seconds: the percentiles of the time per token after the first one, in seconds.
    """

    answered: int
    errors: int
    finished_before: int
    errors_before: int
    stopped: bool
    seconds: float
    lines_per_second: float
    prefill_tokens: int
    generated_tokens: int
    prefill_tokens_per_second: float
    generated_tokens_per_second: float
    hits: float
    preemptions: int
    finish_reasons: dict[str, int]
    ttft_seconds: list[float] | None
    tpot_seconds: list[float] | None


def check_files(input: str | Path, output: str | Path) -> None:
    """Raises InputError if the input cannot be read, the output cannot be written, or both are one file."""
    check_output(output)
    for path in (Path(output), progress_file(output)):
        if str(input) != "-" and path.exists() and Path(input).exists() and path.samefile(input):
            raise InputError(f"{path} is the input too: give another output")
    if str(input) != "-":
        if Path(input).is_fifo():  # a line that is read here would be lost
            raise InputError(f"{input} can be read only once: give it as standard input, --input=-")
        next(read_lines(input), None)


def check_report(report: str | Path, input: str | Path, output: str | Path) -> None:
    """Raises InputError if a report would overwrite, by whatever name, the input, the output, a shard of it,
    or one of their progress files.
    """
    path = Path(report)
    folder = Path(output).absolute().parent
    name = re.escape(Path(output).name)
    output_names = re.compile(rf"{name}(\.\d+-of-\d+)?(\.progress)?")
    files = [Path(input), *(file for file in folder.iterdir() if output_names.fullmatch(file.name))]
    real = path.resolve()
    is_new = real.parent == folder.resolve() and output_names.fullmatch(real.name)
    if is_new or path.exists() and any(file.exists() and path.samefile(file) for file in files):
        raise InputError(f"--report={report} is the input or the output, or a file beside it: give another")


def generate_file(  # noqa: PLR0913  a public function
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
    starting: AbstractContextManager[object] | None = None,
    **engine: Unpack[EngineSettings],
) -> BatchReport:
    """Answers every line of a file, and appends each answer to an output file when it is finished.

    If a run is killed, call the function again with the same arguments. It resumes, and the output ends with
    the same lines.

    Args:
        model: a model from `load_model`.
        input: the input file. A line is {"prompt": …}, {"messages": …}, or a line of the OpenAI batch API. A
            file that ends in .gz is decompressed.
        output: the output file. The file OUTPUT.progress next to it records the finished lines.
        options: defaults for the options that a line does not give. If `options.sampling` is None, the
            defaults are the settings of the model's generation_config.json.
        seed: the seed of lines without a seed. Such a line gets key(seed), into which four numbers are folded
            in turn: the first four uint32, little-endian, of the sha256 of its custom_id or number.
        raw: True encodes the prompt of a line without the chat template.
        system: a system message that is put before the prompt of a line. None adds none.
        score: True scores given texts. A line is then {"prompt": …, "completions": […]} or {"text": …}, and
            its answer has log-probabilities. An empty completion has the log-probability 0, with 0 tokens.
        in_order: True writes the answers in the order of their lines.
        model_names: names that a line may give as its `model`. Another name is an error of that line. None
            allows the name from which the model was loaded, the last part of this name, and the model_type.
        shard: a pair (i, n). The call answers only lines i + 1, i + 1 + n, …, and writes to OUTPUT.i-of-n.
            None answers all lines.
        stop: an event. When you set it, no more lines start, and running ones have `grace` seconds to end.
        grace: the time, in seconds, for running lines after `stop`.
        progress: True shows a bar on standard error if it is a terminal. Otherwise it logs a line a minute,
            at level INFO.
        escape_control_tokens: True encodes control tokens that a line spells as ordinary text (see
            `encode_prompt`). It has an effect on lines with messages, or with a prompt that is not raw.
        starting: a context manager that is entered while the engine starts and compiles programs.
        engine: fields of `EngineOptions`, for example `rows=16`.

    Returns:
        A `BatchReport` with counts, rates and times of this call, which the command writes to --report.

    Raises:
        InputError: a file or an argument is invalid, or the disk is full. Finished lines stay in the output.
    """
    if not isinstance(model, Model):
        raise InputError("model must be what load_model gives")
    i, n = shard or (0, 1)
    n = check_integer("the number of shards", n, 1)
    i = check_integer("the shard", i, 0, n - 1)
    check_output(output)
    output = shard_file(output, i, n) if shard else Path(output)
    check_files(input, output)
    engine_options = with_adapters_read(model, EngineOptions(**engine))
    names = model_names or default_model_names(model)
    if taken := sorted({*names} & {*(engine_options.adapters or ())}):
        raise InputError(f"the adapter {format_value(taken[0])} has the name of the model: give it another")
    defaults = LineDefaults.make(model, options, seed, raw, system, score, escape_control_tokens)
    output_file = ResumableOutput(output, run_settings(model, defaults, engine_options, shard, in_order))
    try:
        with starting or nullcontext():
            made = Engine(model, engine_options)
        with closing(made):
            defaults.check(made)
            total = _count_lines(input) // n if progress and str(input) != "-" else None
            run = _BatchRun(made, defaults, output_file, in_order, progress, total, names)
            with run.bar:
                lines = _unfinished_lines(read_lines(input), output_file.finished, i, n)
                run.answer(lines, stop or threading.Event(), grace)
    finally:
        output_file.close()
    return run.report()


def follow_file(model: Model, **engine: Unpack[EngineSettings]) -> None:
    """Takes part in `generate_file`. Every process except process 0 calls it, with the same model and engine,
    while process 0 runs `generate_file`.
    """
    fingerprint(model.params, model.config)  # a collective computation: all processes must take part
    LocalEngine(model, **engine).follow()


def _unfinished_lines(lines: Iterator[Line], finished: np.ndarray, i: int, n: int) -> Iterator[Line]:
    """Yields the unfinished lines of shard i of n. Raises InputError if a finished line has changed."""
    at = 0
    for line in lines:
        if at < len(finished) and (was := finished["number"][at]) <= line.number:
            if not matches_record(finished[at], line.number, line.digest):
                raise InputError(f"line {was} is not what it was when it was answered: give the same")
            at += 1
        elif (line.number - 1) % n == i:
            yield line
    if at < len(finished):
        raise InputError(f"line {finished['number'][at]} was answered, and is not there any more")


class _BatchRun:
    """Submits lines to an engine, a bounded number at a time, and writes the answers."""

    def __init__(
        self, engine: Engine, defaults: LineDefaults, output: ResumableOutput, in_order: bool,
        progress: bool, total: int | None, names: Sequence[str],
    ):  # fmt: skip
        self._names = names
        self._errors_before = int(output.finished["failed"].sum())
        self._engine = engine
        self._defaults = defaults
        self._output = output
        self._in_order = in_order
        self._counts = Counter[str]()
        self._reasons = Counter[str]()
        self._start = self._last_sync = self._last_log = time.monotonic()
        self._stopped = False
        self._finished_before = len(output.finished)
        self._progress = progress
        self._total = total
        terminal = progress and sys.stderr is not None and sys.stderr.isatty()
        self.bar = tqdm(unit=" lines", disable=not terminal, initial=self._finished_before, total=total)

    def answer(self, lines: Iterator[Line], stop: threading.Event, grace: float) -> None:
        """Answers the lines. After `stop` is set, only lines that end within `grace` seconds are answered."""
        pending = dict[int, LineRequest]()
        deadline = math.inf
        max_pending = max(64, 4 * self._engine.rows)
        more = True
        queue = Queue[Any](_QUEUED_LINES)
        over = threading.Event()
        threading.Thread(target=_put_lines, args=(lines, queue, over), daemon=True).start()
        try:
            while (more or pending) and time.monotonic() < deadline:
                if stop.is_set() and not self._stopped:
                    self._stopped = True
                    more = False
                    deadline = time.monotonic() + grace
                    self._drop_waiting(pending)
                while more and len(pending) < max_pending and not stop.is_set():
                    try:  # if lines come slowly, the engine continues with those that it has
                        line = queue.get(timeout=0 if pending else 0.1)
                    except Empty:
                        break
                    if isinstance(line, BaseException):
                        raise line
                    if more := line is not None:
                        pending[line.number] = LineRequest(line, self._engine, self._defaults, self._names)
                self._engine.step()
                self._write_ended(pending)
                self._sync_and_log()
        finally:
            over.set()

    def _drop_waiting(self, pending: dict[int, LineRequest]) -> None:
        """Cancels lines that have not started. With `in_order` it also cancels every line after the first of
        them.
        """
        waiting = [number for number, request in pending.items() if not (request.started or request.ended)]
        if self._in_order and waiting:
            waiting = [number for number in pending if number >= waiting[0]]
        for number in waiting:
            pending.pop(number).cancel()

    def _write_ended(self, pending: dict[int, LineRequest]) -> None:
        for number, request in list(pending.items()):
            if request.ended:
                del pending[number]
                answer = request.output_line()  # sets request.error where the answer is an error
                self._output.add(number, request.line.digest, answer, bool(request.error))
                self._counts["errors" if request.error else "answered"] += 1
                self._reasons.update(request.reasons)
                self.bar.update()
            elif self._in_order:
                break

    def _sync_and_log(self) -> None:
        now = time.monotonic()
        if now > self._last_sync + _SYNC_SECONDS:
            self._output.sync()
            release_free_memory()  # the allocator keeps what millions of lines have freed
            self._last_sync = now
            if not self.bar.disable:
                self.bar.set_postfix_str(self._rates())
        if self._progress and self.bar.disable and now > self._last_log + _LOG_SECONDS:
            done = self._finished_before + self._counts.total()
            rate = self.report()["lines_per_second"]
            of_total = ""
            if self._total and rate:
                minutes = max(0, self._total - done) / rate / 60
                of_total = f" of {self._total}, {minutes:.0f} minutes left"
            _LOGGER.info("%d lines%s: %s", done, of_total, self._rates())
            self._last_log = now

    def _rates(self) -> str:
        r = self.report()
        return (
            f"prefill {r['prefill_tokens_per_second']:.0f} tok/s,"
            f" decode {r['generated_tokens_per_second']:.0f} tok/s,"
            f" {100 * r['hits']:.0f}% of prompt tokens cached"
        )

    def report(self) -> BatchReport:
        """Counts, rates and times of this run so far."""
        stats = self._engine.stats
        seconds = max(1e-9, time.monotonic() - self._start)
        return BatchReport(
            answered=self._counts["answered"], errors=self._counts["errors"],
            finished_before=self._finished_before, errors_before=self._errors_before,
            stopped=self._stopped, seconds=seconds, lines_per_second=self._counts.total() / seconds,
            prefill_tokens_per_second=stats.prefill_tokens / seconds,
            generated_tokens_per_second=stats.generated_tokens / seconds,
            prefill_tokens=stats.prefill_tokens, generated_tokens=stats.generated_tokens,
            hits=stats.hits / max(1, stats.hits + stats.prefill_tokens), preemptions=stats.preemptions,
            finish_reasons=dict(self._reasons), ttft_seconds=stats.ttft_seconds,
            tpot_seconds=stats.tpot_seconds,
        )  # fmt: skip


def _put_lines(lines: Iterator[Line], queue: Queue[Any], over: threading.Event) -> None:
    """Puts lines into a queue, then None, or the exception that ended them."""

    def items() -> Iterator[Line | BaseException | None]:
        try:
            yield from lines
            yield None
        except Exception as error:
            yield error

    for item in items():
        is_put = False
        while not is_put:
            if over.is_set():
                return
            with suppress(Full):
                queue.put(item, timeout=0.5)
                is_put = True


def _count_lines(path: str | Path) -> int:
    with open_input(path) as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))
