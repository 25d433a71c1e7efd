"""What `xinfer-jax` does once its flags are read: loads, generates, prints the answer and what it cost."""

import dataclasses
import json
import math
import threading
from typing import Any

import jax

from kernels_pallas import Selection

from ..brief import mib
from ..checkpoint.loading import Model
from ..engine.lockstep import calls
from ..errors import InputError
from ..generation.beams import beam_search, planned
from ..generation.kernels import kernels_used
from ..generation.options import GenerateOptions, chosen_capacity
from ..generation.rows import road
from ..sampling.choice import seeded
from ..sampling.logprobs import TokenLogprobs
from ..sampling.settings import SamplingConfig
from ..stats import GenerateStats
from ..text import TokenText, alternatives_text, encode_prompt, stream_answer
from ..weights import processor
from .startup import (
    from_the_first,
    join_processes,
    keep_compiled_programs,
    open_model,
    read_and_compile,
    waiting,
)
from .terminal import status, write

Flags = Any  # `Program.values` of answer_flags.py: flags.NAME
Key = jax.Array | None
Found = tuple[dict[str, Any], GenerateStats]  # what JSON says of an answer, and what it cost


def answer(flags: Flags, prompt: str | None) -> int:
    """Prints the answer to a prompt; the exit code. None: the prompt that process 0 has."""
    keep_compiled_programs("xinfer-jax", flags.compilation_cache)
    join_processes()
    prompt = calls().same(prompt) if jax.process_count() > 1 else prompt
    assert prompt is not None
    checkpoints = [open_model(flags.model, flags)]
    draft = flags.draft
    if draft not in (None, "lookup"):
        checkpoints.append(open_model(draft, flags))
        draft = checkpoints[1].model
    model = checkpoints[0].model  # of shapes, which say what to compile
    sampling = sampling_of(flags, model)
    options = GenerateOptions(
        flags.max_tokens, sampling, use_cache=flags.use_cache, impl=flags.impl,
        stop_strings=tuple(flags.stop), logprobs=flags.logprobs,
        draft=draft, draft_tokens=flags.draft_tokens, cache_dtype=flags.cache_dtype,
    )  # fmt: skip
    escape = flags.escape_control_tokens
    ids = encode_prompt(model, prompt, system=flags.system, raw=flags.raw, escape_control_tokens=escape)
    capacity = chosen_capacity(model.config, len(ids), flags.max_tokens)
    used = kernels_used(model.params, model.config, flags.impl, 1, flags.cache_dtype, capacity)
    if flags.verbose:
        for choice in dict.fromkeys(used.values()):
            served = ", ".join(kernel for kernel in used if used[kernel] == choice)
            status.say(f"{choice.impl} ({choice.reason}): {served}")
        status.say(f"{road(model.params).name}: {road(model.params).about}")
        if jax.default_backend() == "cpu":
            status.say(processor.about())
    key = seeded(flags.seed) if sampling.temperature > 0 else None
    way = _Beams if flags.num_beams > 1 else _Stream
    model, *drafts = read_and_compile(way(flags, model, ids, options, key).prepare, *checkpoints)
    if drafts:
        options = dataclasses.replace(options, draft=drafts[0])
    found, stats = way(flags, model, ids, options, key).found()
    if flags.output == "json":  # ASCII only, whatever the locale
        write(f"{json.dumps(found | {'stats': _stats(model, stats, used)})}\n")
    else:
        status.say(*_report(model, stats, found.get("finish_reason")))
    if jax.process_index():
        threading.Event().wait()  # for the end of process 0, which may still write, and ends this one
    return 0


def sampling_of(flags: Flags, model: Model) -> SamplingConfig:
    """The checkpoint's defaults, overruled by flags."""
    names = {f.name: f.name for f in dataclasses.fields(SamplingConfig) if f.name in flags}
    names["min_new_tokens"] = "min_tokens"
    given = {field: flags[name].value for field, name in names.items() if flags[name].value is not None}
    defaults = SamplingConfig.from_hf(model.generation_config if flags.generation_config else {})
    return dataclasses.replace(defaults, **given).validate()


class _Stream:
    """An answer that is printed as it comes."""

    def __init__(self, flags: Flags, model: Model, ids: list[int], options: GenerateOptions, key: Key):
        self._flags = flags
        self._model = model
        self._ids = ids
        self._answer = stream_answer(model, ids, options, key=key)
        self.prepare = self._answer.prepare

    def found(self) -> Found:
        """Prints it, then how probable its tokens were, unless JSON is asked for."""
        text = ""
        as_text = self._flags.output == "text"
        for piece in from_the_first(self._answer):
            text += piece
            if as_text:
                write(piece)
        out = self._answer.output
        prompt_tokens = len(self._ids)
        found = dict(
            text=text, tokens=out.tokens[0], prompt_tokens=prompt_tokens, finish_reason=out.finish_reason[0]
        )
        noted = []
        if out.alternatives is not None:
            texts = alternatives_text(self._model, out)
            found["logprobs"] = noted = list(map(_token, out.alternatives[0], texts))
        if as_text:
            write("\n")
            for token in noted:
                likely = ((t["text"], 100 * math.exp(t["logprob"])) for t in (token, *token["top"]))
                status.say(" ".join(f"{word!r} {percent:.1f}%" for word, percent in likely))
        return found, out.stats


def _token(t: TokenLogprobs, texts: list[TokenText]) -> dict[str, Any]:
    """A token and what else was likely, as JSON says it."""
    top = [dict(id=i, text=s.text, logprob=p) for (i, p), s in zip(t.top, texts[1:], strict=True)]
    processed = t.processed_logprob
    return dict(id=t.id, text=texts[0].text, logprob=t.logprob, processed_logprob=processed, top=top)


class _Beams:
    """The best sequences of a search."""

    def __init__(self, flags: Flags, model: Model, ids: list[int], options: GenerateOptions, key: Key):
        stopping = {"true": True, "false": False}.get(flags.early_stopping, flags.early_stopping)
        self._flags = flags
        self._model = model
        self._ids = ids
        self._asked: dict[str, Any] = dict(
            num_beams=flags.num_beams, length_penalty=flags.length_penalty, early_stopping=stopping,
            key=key, max_new_tokens=options.max_new_tokens, sampling=options.sampling,
            impl=options.impl, cache_dtype=options.cache_dtype,
        )  # fmt: skip
        self.prepare = planned(model.params, model.config, ids, **self._asked).prepare

    def found(self) -> Found:
        """Prints the best sequence, unless JSON is asked for: then it has all of them."""
        with waiting("searching", self.prepare):
            out = beam_search(self._model.params, self._model.config, self._ids, **self._asked)
        if not out.sequences:
            raise InputError("no beam can be continued under these settings: loosen them")
        tokenizer: Any = self._model.tokenizer  # which has encoded the prompt
        scored = zip(out.sequences, out.scores, strict=True)
        sequences = [dict(text=tokenizer.decode(s), tokens=s, score=score) for s, score in scored]
        if self._flags.output == "text":
            write(f"{sequences[0]['text']}\n")
            status.say(f"Best of {len(sequences)} sequences, score {sequences[0]['score']:.3f}")
        return dict(sequences=sequences, prompt_tokens=len(self._ids)), out.stats


def _report(model: Model, s: GenerateStats, reason: str | None) -> list[str]:
    """What it cost, line by line."""
    load = model.load_stats
    weights, cache, peak = map(mib, (load.weight_bytes, s.cache_bytes, s.peak_bytes))
    prefill_ms, ttft_ms, tpot_ms = (1e3 * t for t in (s.prefill_seconds, s.ttft_seconds, s.tpot_seconds))
    read = f"{s.prompt_tokens} tok in {prefill_ms:.0f} ms ({s.prefill_tokens_per_second:.0f} tok/s)"
    new = f"{s.decode_tokens} tok in {s.decode_seconds:.2f} s ({s.decode_tokens_per_second:.1f} tok/s)"
    latency = f"TTFT {ttft_ms:.0f} ms | TPOT {tpot_ms:.1f} ms | total {s.total_seconds:.2f} s"
    lines = [
        f"Loaded in {load.seconds:.1f} s ({weights} weights, {load.dtype}, {jax.default_backend()})",
        f"Prompt tokens: {s.prompt_tokens} (KV cache {cache})",
        f"compile: {s.compile_seconds:.2f} s",
        f"prefill: {read} | decode: {new}" + (f" [{reason}]" if reason else ""),
        f"{latency} | peak memory {peak}",
    ]
    if s.acceptance is not None and s.passes is not None:
        right = 100 * s.acceptance[0]
        lines.append(f"draft: {right:.0f}% of its guesses were right, {s.passes[0]} passes")
    return lines


def _stats(model: Model, s: GenerateStats, used: dict[str, Selection]) -> dict[str, Any]:
    """The same for JSON."""
    rates = ("decode_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "tpot_seconds")
    load = model.load_stats
    loaded = dict(load_seconds=load.seconds, dtype=load.dtype, backend=jax.default_backend())
    measured = dataclasses.asdict(s) | {name: getattr(s, name) for name in rates}
    return loaded | measured | {"kernels": {kernel: choice.impl for kernel, choice in used.items()}}
