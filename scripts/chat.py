"""Talk to a model: the cache is kept from turn to turn, so each turn reads only what is new.

    python scripts/chat.py --model=Qwen/Qwen2.5-0.5B-Instruct --quantize=int8

Ctrl-C stops an answer, an empty line or /exit ends the talk; /reset forgets it, /stats switches figures on
and off.
"""

import dataclasses
import signal
import sys

import jax
from absl import app, flags, logging
from one_line import parse, refuse

import xinfer_jax as xj
from xinfer_jax.text import encode_prompt, with_eos

MODEL = flags.DEFINE_string("model", None, "Checkpoint: a directory or a hub name. Default: the bundled one.")
DTYPE = flags.DEFINE_string(
    "dtype", None, "float32, bfloat16 or float16. Default: float32 on CPU, bfloat16 elsewhere."
)
QUANTIZE = flags.DEFINE_string("quantize", None, "int8 or int4.")
SYSTEM = flags.DEFINE_string("system", None, "System message.")
CAPACITY = flags.DEFINE_integer(
    "capacity", None, "Tokens that the talk may reach. Default: 4096, or the model's limit.", lower_bound=2
)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Most tokens of an answer.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "0: always the most likely token. Default: the checkpoint's."
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=0)
STATS = flags.DEFINE_boolean("stats", False, "Print what each answer cost.")


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        talk()
    except xj.InputError as error:
        refuse(error)


def talk() -> None:
    model = xj.load_model(MODEL.value, dtype=DTYPE.value, quantize=QUANTIZE.value)
    sampling = xj.SamplingConfig.from_hf(model.generation_config)
    if TEMPERATURE.value is not None:
        sampling = dataclasses.replace(sampling, temperature=TEMPERATURE.value)
    capacity = min(CAPACITY.value or 4096, model.config.context_length)
    if capacity <= MAX_TOKENS.value:
        raise xj.InputError(
            f"--max_tokens={MAX_TOKENS.value} leaves no room for a question in a capacity of {capacity}:"
            " lower it"
        )
    options = with_eos(
        model, xj.GenerateOptions(MAX_TOKENS.value, sampling.validate(), capacity=capacity, keep_prefix=True)
    )
    system = [] if SYSTEM.value is None else [{"role": "system", "content": SYSTEM.value}]
    turns, prefix, figures, key = [], None, STATS.value, jax.random.key(SEED.value)
    while said := ask():
        if said == "/exit":
            break
        if said == "/stats":
            figures = not figures
        elif said == "/reset":
            turns, prefix = [], None
        elif said.startswith("/"):
            print(f"{said}: there are /exit, /reset and /stats")
        else:
            kept = fitting(
                model, system, [*turns, {"role": "user", "content": said}], capacity - MAX_TOKENS.value
            )
            if kept is None:
                print(f"[too long: a question and its answer have {capacity} tokens of room; see --capacity]")
                continue
            if left_out := (len(turns) + 1 - len(kept)) // 2:
                print(
                    f"[{left_out} of the earliest exchanges no longer fit in {capacity} tokens and are"
                    " forgotten]"
                )
            key, now = jax.random.split(key)
            text, out = answer(model, system + kept, dataclasses.replace(options, prefix=prefix), now)
            turns, prefix = [*kept, {"role": "assistant", "content": text}], out.prefix
            if figures:
                s = out.stats
                read = (
                    f"{s.prompt_tokens - s.reused_tokens} of {s.prompt_tokens} tokens read in"
                    f" {1e3 * s.prefill_seconds:.0f} ms"
                )
                print(
                    f"[{read}, {s.generated_tokens} written at {s.decode_tokens_per_second:.1f} tok/s,"
                    f" {out.finish_reason[0]}]"
                )


def ask() -> str:
    """What is said next; nothing at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def fitting(model: xj.Model, system: list[dict], turns: list[dict], most: int) -> list[dict] | None:
    """The turns without as many of the earliest exchanges as it takes to have `most` tokens; None: the last
    alone is longer.
    """
    for first in range(0, len(turns), 2):
        if len(encode_prompt(model, system + turns[first:])) <= most:
            return turns[first:]
    return None


def answer(
    model: xj.Model, messages: list[dict], options: xj.GenerateOptions, key: jax.Array
) -> tuple[str, xj.GenerateOutput]:
    """Prints the answer as it comes; Ctrl-C ends it, and what was said until then counts."""
    interrupted = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    pieces, text = xj.stream_text(model, messages, options, key=key), ""
    try:
        while True:
            piece = pieces.send(True if interrupted and text else None)
            print(piece, end="", flush=True)
            text += piece
    except StopIteration as stop:
        print(flush=True)
        return text, stop.value
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
