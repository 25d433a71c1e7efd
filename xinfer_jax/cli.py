"""The command line that `xinfer-jax`, `python -m xinfer_jax` and scripts/generate.py share."""

import dataclasses
import io
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from kernels_pallas import Selection

from .attention import check_impl
from .beam import beam_search
from .errors import InputError, one_line
from .generation import kernels_used
from .loading import Model, load_model
from .options import GenerateOptions, GenerateOutput
from .quantization import check_method
from .sampling import SamplingConfig
from .text import alternatives_text, encode_prompt, stream_text, with_eos

_FLAGS = flags.FlagValues()  # our own, so that importing this module adds nothing to a caller's flags


def _flag(define, name, default, help_text, *args, **kwargs):
    return define(name, default, help_text, *args, flag_values=_FLAGS, **kwargs)


MODEL = _flag(
    flags.DEFINE_string,
    "model",
    None,
    "Checkpoint: a directory, or a Hugging Face hub name owner/name. Default: the bundled one.",
)
PROMPT = _flag(flags.DEFINE_string, "prompt", None, "What to say to the model. Default: standard input.")
SYSTEM = _flag(flags.DEFINE_string, "system", None, "System message.")
RAW = _flag(flags.DEFINE_boolean, "raw", False, "Continue the prompt as it is, without the chat template.")
MAX_TOKENS = _flag(flags.DEFINE_integer, "max_tokens", 128, "Most tokens to generate.")
TEMPERATURE = _flag(
    flags.DEFINE_float, "temperature", None, "0: always the most likely token. Default: the checkpoint's."
)
TOP_K = _flag(
    flags.DEFINE_integer,
    "top_k",
    None,
    "Sample among the k most likely tokens; 0: all. Default: the checkpoint's.",
)
TOP_P = _flag(
    flags.DEFINE_float,
    "top_p",
    None,
    "Sample among the most likely tokens that reach this probability; 1: all. Default: the checkpoint's.",
)
PENALTY = _flag(
    flags.DEFINE_float,
    "repetition_penalty",
    None,
    "Above 1: repeats become less likely; 1: off. Default: the checkpoint's.",
)
MIN_P = _flag(
    flags.DEFINE_float,
    "min_p",
    None,
    "Sample among tokens at least this many times as likely as the likeliest; 0: all.",
)
TYPICAL_P = _flag(
    flags.DEFINE_float,
    "typical_p",
    None,
    "Sample among tokens of typical surprise that reach this probability; 1: all.",
)
PRESENCE = _flag(
    flags.DEFINE_float,
    "presence_penalty",
    None,
    "Taken off the logits of tokens that the answer already holds; 0: off.",
)
FREQUENCY = _flag(
    flags.DEFINE_float, "frequency_penalty", None, "The same, as often as the answer holds them; 0: off."
)
NGRAM = _flag(
    flags.DEFINE_integer, "no_repeat_ngram_size", None, "No sequence of so many tokens occurs twice; 0: off."
)
MIN_TOKENS = _flag(flags.DEFINE_integer, "min_tokens", None, "The answer does not end before so many tokens.")
STOP = _flag(
    flags.DEFINE_multi_string, "stop", [], "The answer ends before this text; may be given several times."
)
LOGPROBS = _flag(
    flags.DEFINE_integer,
    "logprobs",
    0,
    "Say how probable each token was, and so many of the likeliest beside it.",
)
DRAFT = _flag(
    flags.DEFINE_string,
    "draft",
    None,
    "Guess tokens ahead: a checkpoint with the same vocabulary, or lookup (what followed before).",
)
DRAFT_TOKENS = _flag(flags.DEFINE_integer, "draft_tokens", 3, "Guesses for each pass of the model.")
BEAMS = _flag(
    flags.DEFINE_integer,
    "num_beams",
    1,
    "Beam search: continuations followed side by side; 1: none.",
    lower_bound=1,
)
LENGTH_PENALTY = _flag(
    flags.DEFINE_float,
    "length_penalty",
    1.0,
    "With beams: the exponent of the length that scores are divided by.",
)
EARLY_STOPPING = _flag(
    flags.DEFINE_enum, "early_stopping", "false", ["true", "false", "never"],
    "With beams, when to stop: at num_beams ended sequences; when the best beam is no better than they are; "
    "when it never can be.",
)  # fmt: skip
DEFAULTS = _flag(
    flags.DEFINE_boolean,
    "generation_config",
    True,
    "Take the checkpoint's defaults from generation_config.json.",
)
SEED = _flag(flags.DEFINE_integer, "seed", 0, "Seed of the sampling.", lower_bound=0, upper_bound=2**32 - 1)
DTYPE = _flag(
    flags.DEFINE_string,
    "dtype",
    None,
    "float32, bfloat16 or float16. Default: float32 on CPU, bfloat16 on GPU and TPU.",
)
QUANTIZE = _flag(
    flags.DEFINE_string, "quantize", None, "int8 or int4: weights in fewer bytes. Default: as --dtype says."
)
IMPL = _flag(
    flags.DEFINE_string,
    "impl",
    None,
    "Attention and argmax: mosaic, triton or xla. Default: what suits the device.",
)
VERBOSE = _flag(
    flags.DEFINE_boolean,
    "verbose",
    False,
    "Say on standard error which implementation serves which kernel, and why.",
)
OUTPUT = _flag(
    flags.DEFINE_string,
    "output",
    "text",
    "text: stream the answer, statistics on standard error; json: one object with everything.",
)
USE_CACHE = _flag(
    flags.DEFINE_boolean,
    "use_cache",
    True,
    "Keep keys and values; false: recompute all of them for every token, to compare.",
)
CACHE_DTYPE = _flag(
    flags.DEFINE_string,
    "cache_dtype",
    None,
    "Keys and values in int8, int4, gear, or a float type. Default: what suits.",
)
CACHE_DIR = _flag(
    flags.DEFINE_string,
    "compilation_cache",
    None,
    "Directory that keeps compiled programs between runs; empty: none. Default: the user's cache directory.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0, or 2 with one line on standard error where the input is at
    fault.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is shown as ?
        sys.stdout.reconfigure(errors="replace")
    warnings.showwarning = _warn
    try:
        sys.exit(_run(list(sys.argv if argv is None else argv)))
    except InputError as error:
        sys.exit(_fail(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever reads us has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, MemoryError) as error:  # an unreadable file, a full disk, weights larger than memory
        sys.exit(_fail(f"{type(error).__name__}: {error}"))


def _run(argv: list[str]) -> int:
    if {"--help", "-help", "-h", "--h"} & set(argv[1:]):
        print(_help(), flush=True)
        return 0
    for name in _FLAGS:
        _FLAGS[name].unparse()  # forgets an earlier call in this process
    try:
        rest = _FLAGS(argv)[1:]
    except flags.Error as error:
        raise InputError(f"{str(error).splitlines()[0]} (see --help)") from error
    if rest:
        raise InputError(f"unexpected argument {rest[0]!r}: give the prompt with --prompt")
    if OUTPUT.value not in ("text", "json"):
        raise InputError(f"--output must be text or json, got {OUTPUT.value!r}")
    if MAX_TOKENS.value < 1:
        raise InputError(f"--max_tokens must be at least 1, got {MAX_TOKENS.value}")
    for flag in (LENGTH_PENALTY, EARLY_STOPPING) if BEAMS.value == 1 else (STOP, LOGPROBS, DRAFT, USE_CACHE):
        if flag.value != flag.default:
            raise InputError(
                f"--{flag.name} does not go with --num_beams={BEAMS.value}: leave one of them out"
            )
    _sampling({})  # what flags alone can get wrong is said before a model is loaded
    check_impl(IMPL.value)
    check_method(QUANTIZE.value)
    prompt = _standard_input() if PROMPT.value is None else PROMPT.value
    if not prompt.strip():
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    _keep_compiled_programs()
    model = load_model(MODEL.value, dtype=DTYPE.value, quantize=QUANTIZE.value)
    sampling = _sampling(model.generation_config if DEFAULTS.value else {})
    draft = (
        DRAFT.value
        if DRAFT.value in (None, "lookup")
        else load_model(DRAFT.value, dtype=DTYPE.value, quantize=QUANTIZE.value)
    )
    options = GenerateOptions(
        MAX_TOKENS.value, sampling, use_cache=USE_CACHE.value, impl=IMPL.value,
        stop_strings=tuple(STOP.value), logprobs=LOGPROBS.value,
        draft=draft, draft_tokens=DRAFT_TOKENS.value, cache_dtype=CACHE_DTYPE.value,
    )  # fmt: skip
    used = kernels_used(model.params, model.config, options.impl, kv_dtype=options.cache_dtype)
    if VERBOSE.value:
        for impl, reason in dict.fromkeys(used.values()):
            print(
                f"{impl} ({reason}):"
                f" {', '.join(kernel for kernel in used if used[kernel] == (impl, reason))}",
                file=sys.stderr,
            )
    # Two programs less to compile.
    key = jax.random.key(SEED.value) if options.sampling.temperature > 0 else None
    if BEAMS.value > 1:
        return _beam_search(model, prompt, options, key)
    pieces = stream_text(model, prompt, options, key=key, system=SYSTEM.value, raw=RAW.value)
    text = []
    while True:
        try:
            text.append(next(pieces))
        except StopIteration as stop:
            out = stop.value
            break
        if OUTPUT.value == "text":
            print(text[-1], end="", flush=True)
    if OUTPUT.value == "text":
        print(flush=True)
        print("\n".join(_alternatives(model, out) + _report(model, out)), file=sys.stderr)
    else:
        # ASCII only, whatever the locale.
        print(json.dumps(_json(model, out, "".join(text), used)), flush=True)
    return 0


def _beam_search(model: Model, prompt: str, options: GenerateOptions, key: jax.Array | None) -> int:
    """Prints the best sequence, or all of them as JSON."""
    ids, options = encode_prompt(model, prompt, system=SYSTEM.value, raw=RAW.value), with_eos(model, options)
    out = beam_search(
        model.params, model.config, ids, num_beams=BEAMS.value, length_penalty=LENGTH_PENALTY.value,
        early_stopping={"true": True, "false": False}.get(EARLY_STOPPING.value, EARLY_STOPPING.value),
        key=key,
        max_new_tokens=options.max_new_tokens, eos_token_ids=options.eos_token_ids, sampling=options.sampling,
        impl=options.impl, cache_dtype=options.cache_dtype,
    )  # fmt: skip
    found = [
        dict(text=model.tokenizer.decode(s), tokens=s, score=score)
        for s, score in zip(out.sequences, out.scores, strict=True)
    ]
    if OUTPUT.value == "json":
        print(json.dumps({"sequences": found, "prompt_tokens": len(ids)}), flush=True)
    elif found:
        print(found[0]["text"], flush=True)
        print(f"Best of {len(found)} sequences, score {found[0]['score']:.3f}", file=sys.stderr)
    return 0 if found else _fail("no beam can be continued under these settings: loosen them")


def _help() -> str:
    lines = [
        "Text in, text out with a Hugging Face checkpoint.",
        "",
        "usage: xinfer-jax --prompt TEXT [flags]",
    ]
    lines += [
        'example: xinfer-jax --prompt "What is the capital of France?" --temperature 0.7 --seed 1',
        "",
        "flags:",
    ]
    for name in _FLAGS:
        flag = _FLAGS[name]
        option = f"--[no]{name}" if flag.boolean else f"--{name}"
        default = "" if flag.default is None else f" Default: {str(flag.default).lower()}."
        lines += textwrap.wrap(
            flag.help + default, 110, initial_indent=f"  {option:<26}", subsequent_indent=" " * 28
        )
    return "\n".join(lines)


def _standard_input() -> str:
    try:
        return sys.stdin.read().rstrip("\n") if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}"
        ) from error


def _sampling(generation_config: dict) -> SamplingConfig:
    """The checkpoint's defaults, overruled by flags."""
    flagged = dict(
        temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value,
        repetition_penalty=PENALTY.value, min_p=MIN_P.value,
        typical_p=TYPICAL_P.value, presence_penalty=PRESENCE.value, frequency_penalty=FREQUENCY.value,
        no_repeat_ngram_size=NGRAM.value, min_new_tokens=MIN_TOKENS.value,
    )  # fmt: skip
    defaults = SamplingConfig.from_hf(generation_config)
    return dataclasses.replace(defaults, **{k: v for k, v in flagged.items() if v is not None}).validate()


def _keep_compiled_programs() -> None:
    directory = CACHE_DIR.value
    if directory is None:
        user = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "xinfer_jax")
        directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or user
    if directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _alternatives(model: Model, out: GenerateOutput) -> list[str]:
    """A line per token: how probable it was, and what else was likely."""
    if out.alternatives is None:
        return []
    return [
        " ".join(f"{t.text!r} {100 * t.probability:.1f}%" for t in token)
        for token in alternatives_text(model, out)
    ]


def _report(model: Model, out: GenerateOutput) -> list[str]:
    load, s = model.load_stats, out.stats
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
        if s.acceptance is None
        else [f"draft: {100 * s.acceptance[0]:.0f}% of its guesses were right, {s.passes[0]} passes"]
    )
    return [
        (
            f"Loaded in {load.seconds:.1f} s ({_mib(load.weight_bytes)} weights, {load.dtype},"
            f" {jax.default_backend()})"
        ),
        f"Prompt tokens: {s.prompt_tokens} (KV cache {_mib(s.cache_bytes)})",
        f"compile: {s.compile_seconds:.2f} s",
        f"{prefill} | {decode} [{out.finish_reason[0]}]",
        f"{latency} | peak memory {_mib(s.peak_bytes)}",
        *drafted,
    ]


def _json(model: Model, out: GenerateOutput, text: str, used: dict[str, Selection]) -> dict:
    s = out.stats
    rates = ("decode_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "tpot_seconds")
    stats = {
        "load_seconds": model.load_stats.seconds,
        "dtype": model.load_stats.dtype,
        "backend": jax.default_backend(),
    }
    stats |= dataclasses.asdict(s) | {name: getattr(s, name) for name in rates}
    stats["kernels"] = {kernel: impl for kernel, (impl, _) in used.items()}
    answer = {
        "text": text,
        "tokens": out.tokens[0],
        "prompt_tokens": s.prompt_tokens,
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
    return answer | {"stats": stats}


def _mib(count: int) -> str:
    mib = count / 2**20
    return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB"


def _warn(message: Warning | str, *_: Any) -> None:
    print(f"xinfer-jax: {one_line(message)}", file=sys.stderr)


def _fail(message: str) -> int:
    print(f"xinfer-jax: {' '.join(message.split())}", file=sys.stderr)
    return 2
