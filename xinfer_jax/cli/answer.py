"""The work of `xinfer-jax` after its flags: loads the model, generates, prints the answer and statistics."""

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import jax

from ..adapters.adapted_params import with_adapter
from ..adapters.peft_files import load_adapter
from ..api.sampling_fields import ids_of_texts
from ..backends.cpu import product_table
from ..backends.kernel_report import kernels_used
from ..checkpoint.loading import Checkpoint, Model
from ..errors import InputError
from ..generation.beams import BeamSearchPlan, BeamSettings, beam_search
from ..generation.executor_choice import executor_class
from ..generation.options import GenerateOptions, default_capacity
from ..grammar.grammars import Grammar, choice, json_schema, regex
from ..kernels_pallas import Selection
from ..memory_plan import format_mib
from ..processes.control_channel import open_control_channel
from ..sampling.logprobs import TokenLogprobs
from ..sampling.random_keys import key_from_seed
from ..sampling.sampling_config import SamplingConfig
from ..sampling.settings import SETTINGS
from ..stats import GenerateStats
from ..text import TokenText, alternatives_text, encode_prompt, stream_text_from_ids
from .process import seconds_since_start
from .startup import (
    chunks_with_status,
    compile_status,
    join_processes,
    load_and_compile,
    open_draft,
    open_model,
    use_compilation_cache,
)
from .terminal import status, write

Flags = Any  # `FlagParser.values` of answer_flags.py: flags.NAME
Key = jax.Array | None
Result = tuple[dict[str, Any], GenerateStats]  # the fields of the JSON output, and statistics


def answer_prompt(flags: Flags, prompt: str | None) -> int:
    """Prints the answer to a prompt. Returns the exit code. prompt: None: process 0 has the prompt."""
    use_compilation_cache("xinfer-jax", flags.compilation_cache)
    join_processes()
    prompt = open_control_channel().broadcast(prompt) if jax.process_count() > 1 else prompt
    assert prompt is not None
    checkpoints = [with_adapter_files(open_model(flags.model, flags), flags.adapter)]
    model = checkpoints[0].model  # of shapes only, for compilation
    draft, of_draft = open_draft(flags, model)
    checkpoints += of_draft
    sampling = sampling_from_flags(flags, model)
    options = GenerateOptions(
        max_tokens=flags.max_tokens, sampling=sampling, use_cache=flags.use_cache, impl=flags.impl,
        stop_strings=tuple(flags.stop), logprobs=flags.logprobs,
        draft=draft, draft_tokens=flags.draft_tokens, cache_dtype=flags.cache_dtype,
        grammar=grammar_from_flags(flags),
    )  # fmt: skip
    escape = flags.escape_control_tokens
    ids = encode_prompt(model, prompt, system=flags.system, raw=flags.raw, escape_control_tokens=escape)
    capacity = default_capacity(model.config, len(ids), flags.max_tokens)
    used = kernels_used(model.params, model.config, flags.impl, 1, flags.cache_dtype, capacity)
    if flags.verbose:
        for choice in dict.fromkeys(used.values()):
            kernels = ", ".join(kernel for kernel in used if used[kernel] == choice)
            status.log(f"{choice.impl} ({choice.reason}): {kernels}")
        executor = executor_class(model.params)
        status.log(f"{executor.name}: {executor.about}")
        if jax.default_backend() == "cpu":
            status.log(product_table.describe_cpu())
        for opened in checkpoints:
            if skipped := opened.model.load_stats.skipped:
                status.log(f"{opened.model.name}: tensors that are not read: {', '.join(skipped)}")
    key = key_from_seed(flags.seed) if sampling.temperature > 0 else None
    mode = _Beams if flags.num_beams > 1 else _Stream
    model, *drafts = load_and_compile(mode(flags, model, ids, options, key).prepare, *checkpoints)
    if drafts:
        options = dataclasses.replace(options, draft=drafts[0])
    result, stats = mode(flags, model, ids, options, key).run()
    if flags.output == "json":  # ASCII only, whatever the locale
        write(f"{json.dumps(result | {'stats': _json_stats(model, stats, used)})}\n")
    else:
        status.log(*_format_stats(model, stats, result.get("finish_reason"), flags.verbose))
    if jax.process_index():
        threading.Event().wait()  # process 0 may still write; its end ends this process
    return 0


def with_adapter_files(checkpoint: Checkpoint, path: str | None) -> Checkpoint:
    """Returns the checkpoint with the adapter at a path. None: without one."""
    if path is None:
        return checkpoint
    model = checkpoint.model
    adapter = load_adapter(model.config, path, base=model.name)
    return checkpoint.with_params(lambda params: with_adapter(params, adapter))


def sampling_from_flags(flags: Flags, model: Model) -> SamplingConfig:
    """Returns `Model.sampling_config` with the flags that are set. --nogeneration_config leaves out the
    file.
    """
    if not flags.generation_config:
        model = dataclasses.replace(model, generation_config={})
    values = {s.name: flags[s.field].value for s in SETTINGS.values() if s.field in flags}
    given = {name: value for name, value in values.items() if value not in (None, [])}
    ids = ids_of_texts(given, model.sampling_config(), model.tokenizer, model.config.vocab_size)
    given |= {name: array.tolist() for name, array in ids.items()}
    return model.sampling_config(**given)


def grammar_from_flags(flags: Flags) -> Grammar | None:
    """Returns the grammar that the flags ask for."""
    if flags.json_schema is not None:
        path = Path(flags.json_schema)
        try:
            return json_schema(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--json_schema={path} cannot be read: {error}") from error
    if flags.regex is not None:
        return regex(flags.regex)
    return choice(flags.choice) if flags.choice else None


class _Stream:
    """An answer that is printed while it is generated."""

    def __init__(self, flags: Flags, model: Model, ids: list[int], options: GenerateOptions, key: Key):
        self._as_text = flags.output == "text"
        self._model = model
        self._ids = ids
        self._answer = stream_text_from_ids(model, ids, options, key=key)
        self.prepare = self._answer.prepare

    def run(self) -> Result:
        """Prints the answer, then the probabilities of its tokens if asked for. Prints nothing with JSON
        output.
        """
        text = ""
        for chunk in chunks_with_status(self._answer):
            text += chunk
            if self._as_text:
                write(chunk)
        out = self._answer.output
        result = dict(text=text, tokens=out.tokens[0], prompt_tokens=len(self._ids))
        result["finish_reason"] = out.finish_reason[0]
        result["stop_reason"] = out.stop_reason[0]
        logprobs = []
        if out.alternatives is not None:
            texts = alternatives_text(self._model, out)
            result["logprobs"] = logprobs = list(map(_token, out.alternatives[0], texts))
        if self._as_text:
            write("\n")
            for token in logprobs:
                candidates = ((t["text"], 100 * math.exp(t["logprob"])) for t in (token, *token["top"]))
                status.log(" ".join(f"{word!r} {percent:.1f}%" for word, percent in candidates))
        return result, out.stats


def _token(t: TokenLogprobs, texts: list[TokenText]) -> dict[str, Any]:
    """Returns the JSON fields of a token and its most likely alternatives."""
    top = [dict(id=i, text=s.text, logprob=p) for (i, p), s in zip(t.top, texts[1:], strict=True)]
    processed = t.processed_logprob
    return dict(id=t.id, text=texts[0].text, logprob=t.logprob, processed_logprob=processed, top=top)


class _Beams:
    """The best sequences of a beam search."""

    def __init__(self, flags: Flags, model: Model, ids: list[int], options: GenerateOptions, key: Key):
        stopping = {"true": True, "false": False}.get(flags.early_stopping, flags.early_stopping)
        self._flags = flags
        self._model = model
        self._ids = ids
        beams: dict[str, Any] = dict(
            num_beams=flags.num_beams, length_penalty=flags.length_penalty, early_stopping=stopping
        )
        names = "max_tokens", "sampling", "impl", "cache_dtype"
        own: dict[str, Any] = {name: getattr(options, name) for name in names}
        self._arguments = beams | own | dict(key=key)
        call = ids, BeamSettings(**beams), GenerateOptions(**own), key
        self.prepare = BeamSearchPlan(model.params, model.config, *call).prepare

    def run(self) -> Result:
        """Prints the best sequence. Prints nothing with JSON output, which has all sequences."""
        with compile_status("searching", self.prepare):
            out = beam_search(self._model.params, self._model.config, self._ids, **self._arguments)
        (found,) = out.sequences
        (scores,) = out.scores
        if not found:
            raise InputError("no beam can be continued under these settings: loosen them")
        tokenizer: Any = self._model.tokenizer  # not None: it encoded the prompt
        scored = zip(found, scores, strict=True)
        sequences = [dict(text=tokenizer.decode(s), tokens=s, score=score) for s, score in scored]
        if self._flags.output == "text":
            write(f"{sequences[0]['text']}\n")
            status.log(f"Best of {len(sequences)} sequences, score {sequences[0]['score']:.3f}")
        return dict(sequences=sequences, prompt_tokens=len(self._ids)), out.stats


def _format_stats(model: Model, s: GenerateStats, reason: str | None, verbose: bool) -> list[str]:
    """Returns statistics as lines of text."""
    load = model.load_stats
    weights, cache, peak = map(format_mib, (load.weight_bytes, s.cache_bytes, s.peak_bytes))
    prefill_ms, ttft_ms, tpot_ms = (1e3 * t for t in (s.prefill_seconds, s.ttft_seconds, s.tpot_seconds))
    prefill = f"{s.prompt_tokens} tok in {prefill_ms:.0f} ms ({s.prefill_tokens_per_second:.0f} tok/s)"
    decode = f"{s.decode_tokens} tok in {s.decode_seconds:.2f} s ({s.decode_tokens_per_second:.1f} tok/s)"
    total = seconds_since_start()  # of the command, with its start-up
    latency = f"TTFT {ttft_ms:.0f} ms | TPOT {tpot_ms:.1f} ms | total {total:.2f} s"
    lines = [
        f"Loaded in {load.seconds:.1f} s ({weights} weights, {load.dtype}, {jax.default_backend()})",
        f"Prompt tokens: {s.prompt_tokens} (KV cache {cache})",
        f"compile: {s.compile_seconds:.2f} s",
        f"prefill: {prefill} | decode: {decode}" + (f" [{reason}]" if reason else ""),
        f"{latency} | peak memory {peak}",
    ]
    if s.acceptance is not None and s.passes is not None and s.accepted is not None:
        by_place = ", ".join(map(str, s.accepted[0]))
        accepted = f"{100 * s.acceptance[0]:.0f}% of its tokens accepted"
        lines.append(f"draft: {accepted}, {s.passes[0]} passes ({by_place} by place)")
    if verbose:
        lines.append(f"planned memory: {s.memory}")
    return lines


def _json_stats(model: Model, s: GenerateStats, used: dict[str, Selection]) -> dict[str, Any]:
    """Returns statistics as JSON fields."""
    rates = ("decode_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "tpot_seconds")
    load = model.load_stats
    loaded = dict(load_seconds=load.seconds, dtype=load.dtype, backend=jax.default_backend())
    measured = dataclasses.asdict(s) | {name: getattr(s, name) for name in rates}
    return loaded | measured | {"kernels": {kernel: choice.impl for kernel, choice in used.items()}}
