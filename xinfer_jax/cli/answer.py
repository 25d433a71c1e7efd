"""What `xinfer-jax` does once its flags are read: loads, generates, prints the answer and what it cost."""

import dataclasses
import json
from typing import Any

import jax

from kernels_pallas import Selection

from ..checkpoint.loading import Model
from ..errors import InputError
from ..generation.beams import beam_search
from ..generation.kernels import kernels_used
from ..generation.options import GenerateOptions, GenerateOutput, chosen_capacity
from ..sampling.settings import SamplingConfig
from ..stats import GenerateStats
from ..text import alternatives_text, encode_prompt, stream_answer
from .startup import from_the_first, keep_compiled_programs, load
from .terminal import status, write

Flags = Any  # the values that cli.py defines: flags.NAME


def answer(flags: Flags, prompt: str) -> int:
    """Prints the answer to a prompt; the exit code."""
    keep_compiled_programs("xinfer-jax", flags.compilation_cache)
    model = load(flags.model, flags.dtype, flags.quantize)
    draft = flags.draft
    if draft not in (None, "lookup"):
        draft = load(draft, flags.dtype, flags.quantize)
    sampling = _sampling(flags, model)
    options = GenerateOptions(
        flags.max_tokens, sampling, use_cache=flags.use_cache, impl=flags.impl,
        stop_strings=tuple(flags.stop), logprobs=flags.logprobs,
        draft=draft, draft_tokens=flags.draft_tokens, cache_dtype=flags.cache_dtype,
    )  # fmt: skip
    ids = encode_prompt(model, prompt, system=flags.system, raw=flags.raw)
    capacity = chosen_capacity(model.config, len(ids), flags.max_tokens)
    used = kernels_used(
        model.params, model.config, options.impl, kv_dtype=options.cache_dtype, capacity=capacity
    )
    if flags.verbose:
        for choice in dict.fromkeys(used.values()):
            served = ", ".join(kernel for kernel in used if used[kernel] == choice)
            status.say(f"{choice[0]} ({choice[1]}): {served}")
    # Two programs less to compile.
    key = jax.random.key(flags.seed) if sampling.temperature > 0 else None
    if flags.num_beams > 1:
        _beams(flags, model, ids, options, key, used)
    else:
        _stream(flags, model, ids, options, key, used)
    return 0


def _sampling(flags: Flags, model: Model) -> SamplingConfig:
    """The checkpoint's defaults, overruled by flags."""
    names = {f.name: f.name for f in dataclasses.fields(SamplingConfig) if f.name in flags}
    names["min_new_tokens"] = "min_tokens"
    given = {field: flags[name].value for field, name in names.items() if flags[name].value is not None}
    defaults = SamplingConfig.from_hf(model.generation_config if flags.generation_config else {})
    return dataclasses.replace(defaults, **given).validate()


def _stream(
    flags: Flags, model: Model, ids: list[int], options: GenerateOptions, key: jax.Array | None, used: dict
) -> None:
    """Prints the answer as it comes, or at its end as JSON."""
    answer, text = stream_answer(model, ids, options, key=key), ""
    for piece in from_the_first(answer):
        text += piece
        if flags.output == "text":
            write(piece)
    out = answer.output
    if flags.output == "text":
        write("\n")
        status.say(*_alternatives(model, out), *_report(model, out.stats, f" [{out.finish_reason[0]}]"))
    else:
        _write_json(_json(model, out, text) | {"stats": _stats(model, out.stats, used)})


def _beams(
    flags: Flags, model: Model, ids: list[int], options: GenerateOptions, key: jax.Array | None, used: dict
) -> None:
    """Prints the best sequence, or all of them as JSON."""
    with status("compiling and searching"):
        out = beam_search(
            model.params, model.config, ids, num_beams=flags.num_beams, length_penalty=flags.length_penalty,
            early_stopping={"true": True, "false": False}.get(flags.early_stopping, flags.early_stopping),
            key=key,
            max_new_tokens=options.max_new_tokens, sampling=options.sampling,
            impl=options.impl, cache_dtype=options.cache_dtype,
        )  # fmt: skip
    if not out.sequences:
        raise InputError("no beam can be continued under these settings: loosen them")
    tokenizer: Any = model.tokenizer  # which has encoded the prompt
    sequences: Any = out.sequences  # of the one prompt
    found = [
        dict(text=tokenizer.decode(s), tokens=s, score=score)
        for s, score in zip(sequences, out.scores, strict=True)
    ]
    if flags.output == "json":
        answer = {"sequences": found, "prompt_tokens": len(ids)}
        _write_json(answer | {"stats": _stats(model, out.stats, used)})
    else:
        write(f"{found[0]['text']}\n")
        status.say(f"Best of {len(found)} sequences, score {found[0]['score']:.3f}")
        status.say(*_report(model, out.stats))


def _alternatives(model: Model, out: GenerateOutput) -> list[str]:
    """A line per token: how probable it was, and what else was likely."""
    if out.alternatives is None:
        return []
    return [
        " ".join(f"{t.text!r} {100 * t.probability:.1f}%" for t in token)
        for token in alternatives_text(model, out)
    ]


def _report(model: Model, s: GenerateStats, reason: str = "") -> list[str]:
    load = model.load_stats
    prefill = (
        f"prefill: {s.prompt_tokens} tok in {1e3 * s.prefill_seconds:.0f} ms"
        f" ({s.prefill_tokens_per_second:.0f} tok/s)"
    )
    decode = (
        f"decode: {s.decode_tokens} tok in {s.decode_seconds:.2f} s ({s.decode_tokens_per_second:.1f} tok/s)"
    )
    latency = (
        f"TTFT {1e3 * s.ttft_seconds:.0f} ms | TPOT {1e3 * s.tpot_seconds:.1f} ms | total"
        f" {s.total_seconds:.2f} s"
    )
    drafted = (
        []
        if s.acceptance is None or s.passes is None
        else [f"draft: {100 * s.acceptance[0]:.0f}% of its guesses were right, {s.passes[0]} passes"]
    )
    return [
        (
            f"Loaded in {load.seconds:.1f} s ({_mib(load.weight_bytes)} weights, {load.dtype},"
            f" {jax.default_backend()})"
        ),
        f"Prompt tokens: {s.prompt_tokens} (KV cache {_mib(s.cache_bytes)})",
        f"compile: {s.compile_seconds:.2f} s",
        f"{prefill} | {decode}{reason}",
        f"{latency} | peak memory {_mib(s.peak_bytes)}",
        *drafted,
    ]


def _json(model: Model, out: GenerateOutput, text: str) -> dict[str, Any]:
    answer = {
        "text": text,
        "tokens": out.tokens[0],
        "prompt_tokens": out.stats.prompt_tokens,
        "finish_reason": out.finish_reason[0],
    }
    if out.alternatives is not None:
        answer["logprobs"] = [
            {
                "id": t.id,
                "text": texts[0].text,
                "logprob": t.logprob,
                "processed_logprob": t.processed_logprob,
            }
            | {
                "top": [
                    {"id": i, "text": text.text, "logprob": p}
                    for (i, p), text in zip(t.top, texts[1:], strict=True)
                ]
            }
            for t, texts in zip(out.alternatives[0], alternatives_text(model, out), strict=True)
        ]
    return answer


def _stats(model: Model, s: GenerateStats, used: dict[str, Selection]) -> dict[str, Any]:
    rates = ("decode_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "tpot_seconds")
    stats = {
        "load_seconds": model.load_stats.seconds,
        "dtype": model.load_stats.dtype,
        "backend": jax.default_backend(),
    }
    stats |= dataclasses.asdict(s) | {name: getattr(s, name) for name in rates}
    return stats | {"kernels": {kernel: impl for kernel, (impl, _) in used.items()}}


def _write_json(value: dict[str, Any]) -> None:
    write(f"{json.dumps(value)}\n")  # ASCII only, whatever the locale


def _mib(count: int) -> str:
    mib = count / 2**20
    return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB"
