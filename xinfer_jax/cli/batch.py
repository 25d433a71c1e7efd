"""The work of `xinfer-jax-batch` after its flags: loads the model, answers the file, prints statistics."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..batch.resumable_output import merge_shards
from ..batch.run_batch import BatchReport, check_files, check_report, follow_file, generate_file
from ..errors import InputError
from ..generation.options import GenerateOptions
from .answer import grammar_from_flags, sampling_from_flags
from .answer_flags import engine_options
from .process import SignalEvent, capture_signals, uncaptured
from .startup import check_devices, engine_draft, join_processes, open_model, use_compilation_cache
from .terminal import status


def answer_file(command: str, flags: Any, shard: tuple[int, int] | None) -> int:
    """Answers a file of prompts. Returns the exit code, 1 if a line of the output is an error. command: the
    name of the command, for log lines.
    """
    use_compilation_cache(command, flags.compilation_cache)
    engine = {**vars(engine_options(flags))}
    process = join_processes()
    check_devices(flags)
    if process:
        checkpoint = open_model(flags.model, flags)
        engine["draft"] = engine_draft(engine["draft"], checkpoint.model)
        follow_file(checkpoint.read(), **engine)
        return 0
    check_files(flags.input, flags.output)
    if flags.report:
        check_report(flags.report, flags.input, flags.output)
    checkpoint = open_model(flags.model, flags)
    engine["draft"] = engine_draft(engine["draft"], checkpoint.model)
    with status("loading the model"):
        model = checkpoint.read()
    if model.tokenizer and not model.tokenizer.chat_template and not (flags.raw or flags.score):
        status.log(f"{command}: this checkpoint has no chat template: prompts are continued as they are")
    options = GenerateOptions(
        max_tokens=flags.max_tokens, sampling=sampling_from_flags(flags, model),
        stop_strings=tuple(flags.stop), grammar=grammar_from_flags(flags),
    )  # fmt: skip
    with capture_signals() as stop:
        report = generate_file(
            model, flags.input, flags.output, options, seed=flags.seed, raw=flags.raw, system=flags.system,
            score=flags.score, in_order=flags.in_order, shard=shard, stop=stop, grace=flags.grace,
            starting=_engine_starts(stop),
            escape_control_tokens=flags.escape_control_tokens,
            model_names=(flags.served_model_name,) if flags.served_model_name else None, **engine,
        )  # fmt: skip
    status.log(*_format_report(report))
    if flags.report:
        try:
            with open(flags.report, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(report)}\n")
        except OSError as error:
            raise InputError(f"--report={flags.report} cannot be written: {error.strerror}") from error
    if report["stopped"]:
        return 128 + stop.number
    return 1 if report["errors"] + report["errors_before"] else 0


@contextmanager
def _engine_starts(stop: SignalEvent) -> Iterator[None]:
    """Says that programs are compiled. Ctrl-C ends the command at once, since no line has begun."""
    work = "compiling the programs of the engine"
    if not (sys.stderr and sys.stderr.isatty()):
        status.log(work)
    with status(work), uncaptured(stop):
        yield


def merge_outputs(flags: Any) -> int:
    """Merges the outputs of shards. Returns the exit code."""
    lines, failed = merge_shards(flags.input, flags.output, flags.merge)
    errors = f", {failed} of them errors" if failed else ""
    status.log(f"{flags.output}: {lines} lines of {flags.merge} shards{errors}")
    return int(failed > 0)


def _format_report(r: BatchReport) -> list[str]:
    """Returns a report as lines of text."""
    before = f", {r['finished_before']} were there before" if r["finished_before"] else ""
    lines = [
        f"{r['answered']} lines answered, {r['errors']} errors{before}, in {r['seconds']:.1f} s",
        f"prefill: {r['prefill_tokens']} tok ({r['prefill_tokens_per_second']:.0f} tok/s),"
        f" {100 * r['hits']:.0f}% of prompts from cached pages | decode: {r['generated_tokens']} tok"
        f" ({r['generated_tokens_per_second']:.1f} tok/s)",
    ]
    for name, times in (("TTFT", r["ttft_seconds"]), ("TPOT", r["tpot_seconds"])):
        if times:
            median, p90, p99 = (f"{1e3 * t:.0f}" for t in times)
            lines.append(f"{name} {median} ms, 90th percentile {p90}, 99th {p99}")
    if r["finish_reasons"]:
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(r["finish_reasons"].items()))
        lines.append(f"answers ended by: {ends}")
    if failed := r["errors"] + r["errors_before"]:
        lines.append(f"{failed} lines of the output have an error in place of an answer")
    if r["stopped"]:
        lines.append("stopped early: run the same command again to continue")
    return lines
