"""What `xinfer-jax-batch` does once its flags are read: loads, answers the file, says what it did."""

import json
from typing import Any

from ..batch.ledger import merge_shards
from ..batch.run import check_files, check_report, follow_file, generate_file
from ..errors import InputError
from ..generation.options import GenerateOptions
from .answer import sampling_of
from .process import told_first
from .startup import check_devices, join_processes, keep_compiled_programs, open_model
from .terminal import status


def batch(flags: Any, shard: tuple[int, int] | None) -> int:
    """Answers a file; the exit code: 1 where a line of the output is an error."""
    keep_compiled_programs("xinfer-jax-batch", flags.compilation_cache)
    shape: dict[str, Any] = dict(
        rows=flags.rows, capacity=flags.capacity, pages=flags.pages, cache_dtype=flags.cache_dtype,
        impl=flags.impl, draft=None if flags.draft == "none" else flags.draft,
    )  # fmt: skip
    process = join_processes()
    check_devices(flags)
    if process:
        follow_file(open_model(flags.model, flags).read(), **shape)
        return 0
    check_files(flags.input, flags.output)
    if flags.report:
        check_report(flags.report, flags.input, flags.output)
    checkpoint = open_model(flags.model, flags)
    with status("loading the model"):
        model = checkpoint.read()
    if model.tokenizer and not model.tokenizer.chat_template and not (flags.raw or flags.score):
        status.say(
            "xinfer-jax-batch: this checkpoint has no chat template: prompts are continued as they are"
        )
    options = GenerateOptions(
        flags.max_tokens, sampling_of(flags, model), stop_strings=tuple(flags.stop)
    )  # fmt: skip
    with told_first() as stop:
        report = generate_file(
            model, flags.input, flags.output, options, seed=flags.seed, raw=flags.raw, system=flags.system,
            score=flags.score, in_order=flags.in_order, shard=shard, stop=stop, grace=flags.grace,
            data_parallel=flags.data_parallel, escape_control_tokens=flags.escape_control_tokens,
            model_names=(flags.served_model_name,) if flags.served_model_name else None, **shape,
        )  # fmt: skip
    status.say(*_said(report))
    if flags.report:
        try:
            with open(flags.report, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(report)}\n")
        except OSError as error:
            raise InputError(f"--report={flags.report} cannot be written: {error.strerror}") from error
    if report["stopped"]:
        return 128 + stop.number
    return 1 if report["errors"] + report["errors_before"] else 0


def merge(flags: Any) -> int:
    """Joins shards; the exit code."""
    lines, failed = merge_shards(flags.input, flags.output, flags.merge)
    errors = f", {failed} of them errors" if failed else ""
    status.say(f"{flags.output}: {lines} lines of {flags.merge} shards{errors}")
    return int(failed > 0)


def _said(r: dict[str, Any]) -> list[str]:
    """A report, line by line."""
    before = f", {r['finished_before']} were there before" if r["finished_before"] else ""
    lines = [
        f"{r['answered']} lines answered, {r['errors']} errors{before}, in {r['seconds']:.1f} s",
        f"read {r['read_tokens']} tok ({r['read_tokens_per_second']:.0f} tok/s), {100 * r['hits']:.0f}% of"
        f" prompts from pages | wrote {r['chosen_tokens']} tok ({r['chosen_tokens_per_second']:.1f} tok/s)",
    ]
    for name in ("ttft", "tpot"):
        if times := r[f"{name}_seconds"]:
            half, tenth, last = (f"{1e3 * t:.0f}" for t in times)
            lines.append(f"{name.upper()} {half} ms, 90th percentile {tenth}, 99th {last}")
    if r["finish_reasons"]:
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(r["finish_reasons"].items()))
        lines.append(f"answers ended by: {ends}")
    if failed := r["errors"] + r["errors_before"]:
        lines.append(f"{failed} lines of the output have an error in place of an answer")
    return lines + ["stopped early: the same command goes on from here"] * r["stopped"]
