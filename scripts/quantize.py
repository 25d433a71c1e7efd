"""Writes a checkpoint with its matrices in int8 or int4, and says what was lost.

    python scripts/quantize.py --output=DIR    # the bundled model, int4, by AWQ
    python scripts/quantize.py --model=DIR --output=DIR --quantize=int8 --method=rtn --eval=TEXT.txt
    python scripts/quantize.py --output=DIR --quantize=int8 --activations=int8 --method=rtn --eval=sampled

`--model=DIR` of any command opens what was written. --calibration and --eval take a file of UTF-8 text, lines
<|endoftext|> between its documents, or one of two words: `capitals`, conversations of train_tiny_data.py, the
bundled model's kind, or `sampled`, what the model itself writes at temperature 1. For evaluation they are
made with another seed, and what was calibrated on is left out. The last line is one JSON object. Exit code 2:
bad input, one line on standard error.
"""

from one_line import start

# isort: split
import dataclasses
import json
import random
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import train_tiny_data as data
from absl import flags

import xinfer_jax as xj
from xinfer_jax.checkpoint.files import checkpoint_dir, read_json
from xinfer_jax.checkpoint.loading import BUNDLED
from xinfer_jax.checkpoint.own_format import save_checkpoint
from xinfer_jax.compress import awq
from xinfer_jax.compress.outliers import with_outliers
from xinfer_jax.weights.params import tree_bytes
from xinfer_jax.weights.quantized import GROUP as GROUP_SIZE, check_activations, is_quantized
from xinfer_jax.weights.rotation import rotated_params

MODEL = flags.DEFINE_string(
    "model", None, "Checkpoint: a directory, or a hub name owner/name. Default: the bundled one."
)
OUTPUT = flags.DEFINE_string("output", None, "Directory to write to. Default: none, only report.")
QUANTIZE = flags.DEFINE_string("quantize", "int4", "int8 or int4.")
GROUP = flags.DEFINE_integer(
    "group",
    None,
    f"Inputs that share a scale, even. Default: int8: all of an output, int4: {GROUP_SIZE}; in small matrices"
    " 8 and 32.",
)
METHOD = flags.DEFINE_string(
    "method",
    "awq",
    "rtn: round to nearest. awq: scaled by activations (Lin et al. 2023), then as --compensate says.",
)
COMPENSATE = flags.DEFINE_boolean(
    "compensate", True, "With awq: refit and round so that errors make up for each other; false: nearest."
)
ACTIVATIONS = flags.DEFINE_enum(
    "activations", None, ["int8"], "With --quantize=int8: what matrices are multiplied by is rounded too."
)
ROTATE = flags.DEFINE_boolean(
    "rotate",
    None,
    "Rotations (QuaRot, Ashkboos et al. 2024) against outliers, in place of AWQ's scales. Default: with"
    " --activations.",
)
OUTLIERS = flags.DEFINE_float(
    "outliers", 1.0, "Make the model's outliers first: a few channels times so much, the function unchanged."
)
CALIBRATION = flags.DEFINE_string(
    "calibration",
    None,
    "For awq: a text file, capitals or sampled. Default: capitals for the bundled model, sampled for others.",
)
CALIBRATION_TOKENS = flags.DEFINE_integer(
    "calibration_tokens", 16384, "Most tokens of it that are used.", lower_bound=1
)
EVAL = flags.DEFINE_string(
    "eval",
    None,
    "Report perplexity and top-1 agreement with float32 on this: a text file, capitals or sampled.",
)
EVAL_SEED = flags.DEFINE_integer(
    "eval_seed", 12, "What capitals and sampled are made from for --eval. 11: calibration's.", lower_bound=12
)
SCORE = flags.DEFINE_string(
    "score",
    "all",
    "Tokens that --eval looks at: all, or answers: what the assistant writes in ChatML or the like.",
)
CONTEXT = flags.DEFINE_integer(
    "context", 512, "Documents are cut into pieces of this many tokens.", lower_bound=2
)
_SEPARATOR = "<|endoftext|>"
_ROWS = 16  # pieces that are scored at a time


def main(argv: list[str]) -> None:
    print(json.dumps(run()))


def check_flags() -> None:
    """Raises InputError unless they go together."""
    for flag, known in ((METHOD, ("rtn", "awq")), (SCORE, ("all", "answers")), (QUANTIZE, ("int8", "int4"))):
        if flag.value not in known:
            raise xj.InputError(f"--{flag.name}={flag.value} is not known: use {' or '.join(known)}")
    if GROUP.value is not None and (GROUP.value < 2 or GROUP.value % 2):
        raise xj.InputError(f"--group={GROUP.value}: give an even number of inputs")
    check_activations(ACTIVATIONS.value, QUANTIZE.value, GROUP.value)
    if turns_weights() and METHOD.value == "awq" and not COMPENSATE.value:
        raise xj.InputError("--nocompensate leaves scales, which rotations make useless: give --method=rtn")


def run() -> dict:
    check_flags()
    path = BUNDLED if MODEL.value is None else checkpoint_dir(MODEL.value)
    model = xj.load_model(path, dtype="float32")
    if any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized))):
        raise xj.InputError(f"{path} is quantized already: give the unquantized checkpoint")
    calibrated = documents(model, calibration_source(), seed=11) if METHOD.value == "awq" else []
    unseen = (
        [text for text in documents(model, EVAL.value, EVAL_SEED.value) if text not in calibrated]
        if EVAL.value
        else []
    )
    if EVAL.value and not unseen:
        raise xj.InputError(f"--eval={EVAL.value} holds no text, or only what was calibrated on")
    flags_said = (MODEL, OUTPUT, QUANTIZE, GROUP, METHOD, ACTIVATIONS, ROTATE, OUTLIERS)
    report = {flag.name: flag.value for flag in flags_said}
    if OUTLIERS.value != 1:
        model = dataclasses.replace(model, params=with_outliers(model.params, model.config, OUTLIERS.value))
    start = time.perf_counter()
    made, calibration_report = quantized(model, calibrated)
    report |= calibration_report | {"rotate": made.config.rotated}
    report["seconds"] = round(time.perf_counter() - start, 1)
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) / 2**20
    report |= {
        "mib_float32": tree_bytes(model.params) / 2**20,
        "mib_read": stored,
        "mib": tree_bytes(made.params) / 2**20,
    }
    print(
        f"weights: {stored:.2f} MiB on disk, {report['mib_float32']:.2f} in float32 -> {report['mib']:.2f}"
        f" MiB in {report['seconds']} s"
    )
    if EVAL.value:
        report |= loss(model, made, unseen)
    if OUTPUT.value:
        save_checkpoint(
            OUTPUT.value,
            path,
            made.params,
            read_json(Path(path) / "config.json"),
            rotated=made.config.rotated,
        )
        print(f"wrote {OUTPUT.value}")
    return report


def quantized(model: xj.Model, calibrated: list[str]) -> tuple[xj.Model, dict]:
    """The model as flags say, and what it was calibrated on."""
    if turns_weights():
        params, config = rotated_params(model.params, model.config)
        model = dataclasses.replace(model, params=params, config=config)
    how = QUANTIZE.value, GROUP.value, ACTIVATIONS.value
    if METHOD.value == "rtn":
        return dataclasses.replace(model, params=awq.rounded_params(model.params, *how)), {}
    rows = pieces(model, calibrated, most=CALIBRATION_TOKENS.value)
    report = {
        "calibration": calibration_source(),
        "calibration_tokens": sum(map(len, rows)),
        "compensate": COMPENSATE.value,
    }
    print(f"calibrating on {report['calibration_tokens']} tokens of {report['calibration']}", flush=True)
    calibrated_on = model.params, model.config, rows
    params = (
        awq.awq_params(*calibrated_on, *how)
        if COMPENSATE.value
        else awq.rounded_params(awq.scaled_params(*calibrated_on, *how[:2]), *how)
    )
    return dataclasses.replace(model, params=params), report


def turns_weights() -> bool:
    return bool(ACTIVATIONS.value) if ROTATE.value is None else ROTATE.value


def calibration_source() -> str:
    """Text of another kind than the model's own does harm: stories calibrated on capitals lose more than by
    rounding to nearest.
    """
    return CALIBRATION.value or ("capitals" if MODEL.value is None else "sampled")


def documents(model: xj.Model, source: str, seed: int) -> list[str]:
    """Texts of a file, or made on the spot."""
    if model.tokenizer is None:
        raise xj.InputError(
            "the checkpoint has no tokenizer.json, so no text can be read for it: use --method=rtn, without"
            " --eval"
        )
    if source == "capitals":
        made = zip(range(200 if seed == 11 else 1000), data.conversations(random.Random(seed)), strict=False)
        return [
            model.tokenizer.apply_chat_template(messages, add_generation_prompt=False) for _, messages in made
        ]
    if source == "sampled":
        start = model.tokenizer.encode("") or list(model.tokenizer.eos_token_ids[:1])
        length = min(CONTEXT.value, model.config.context_length) - len(start)
        options = xj.GenerateOptions(
            length, xj.SamplingConfig(temperature=1.0), eos_token_ids=(*start, *model.tokenizer.eos_token_ids)
        )
        out = xj.generate(
            model.params,
            model.config,
            [start] * (32 if seed == 11 else 96),
            options,
            key=jax.random.key(seed),
        )
        return [model.tokenizer.decode(ids) for ids in out.tokens]
    text = Path(source).expanduser().read_text(encoding="utf-8")
    return [
        part for part in re.split(rf"^{re.escape(_SEPARATOR)}\n", text, flags=re.MULTILINE) if part.strip()
    ]


def pieces(model: xj.Model, texts: list[str], most: int | None = None) -> list[list[int]]:
    """Token ids, each document from its start, in pieces of the context; those of a single token say
    nothing.
    """
    context = min(CONTEXT.value, model.config.context_length)
    documents = map(model.tokenizer.encode, texts)
    rows = [
        ids[at : at + context] for ids in documents for at in range(0, len(ids), context) if len(ids) - at > 1
    ]
    ends = np.cumsum([len(row) for row in rows])
    return rows if most is None else rows[: max(1, int(np.searchsorted(ends, most, "right")))]


def loss(model: xj.Model, made: xj.Model, texts: list[str]) -> dict:
    """Perplexity before and after, and how often the likeliest token is the same."""
    rows = pieces(model, texts)
    scored = [
        answers(model.tokenizer, row) if SCORE.value == "answers" else np.arange(len(row)) > 0 for row in rows
    ]
    if not any(mask.any() for mask in scored):
        raise xj.InputError(
            f"--score=answers, but --eval={EVAL.value} holds no answer behind the chat template's prompt"
        )
    (exact, best), (rounded, chosen) = (
        scores(some.params, some.config, rows, scored) for some in (model, made)
    )
    before = np.exp(-exact.mean())
    after = np.exp(-rounded.mean())
    same = (best == chosen).mean()
    error = np.sqrt(same * (1 - same) / len(best))
    print(
        f"on {len(exact)} tokens of {EVAL.value} ({SCORE.value}): perplexity {before:.4f} -> {after:.4f} "
        f"({after / before - 1:+.2%}), top-1 agreement {same:.2%} ± {error:.2%}"
    )
    return {"eval": EVAL.value, "score": SCORE.value, "eval_tokens": len(exact),
            "perplexity_float32": float(before),
            "perplexity": float(after), "perplexity_change": float(after / before - 1),
            "top1_agreement": float(same),
            "top1_standard_error": float(error)}  # fmt: skip


def answers(tokenizer: xj.Tokenizer, ids: list[int]) -> np.ndarray:
    """Which tokens the assistant writes, end of turn included."""
    said = [{"role": "user", "content": "Hello"}]
    ask, without = (tokenizer.apply_chat_template(said, add_generation_prompt=asks) for asks in (True, False))
    opening = tokenizer.encode(ask.removeprefix(without), add_special_tokens=False)
    written = np.zeros(len(ids), bool)
    inside = False
    for i, token in enumerate(ids):
        written[i] = inside
        inside = (inside and token not in tokenizer.eos_token_ids) or ids[
            i + 1 - len(opening) : i + 1
        ] == opening
    return written


@partial(jax.jit, static_argnums=1)
def _log_probabilities(params: dict, config: xj.ModelConfig, tokens_BT: jax.Array, length_B: jax.Array):
    logits_BTV = xj.forward(params, config, tokens_BT, num_tokens_B=length_B)[0][:, :-1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), tokens_BT[:, 1:, None], 2)[
        ..., 0
    ], logits_BTV.argmax(-1)


def scores(
    params: dict, config: xj.ModelConfig, rows: list[list[int]], scored: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each scored token, and the likeliest one in its place."""
    parts = []
    for at in range(0, len(rows), _ROWS):
        batch = rows[at : at + _ROWS]
        tokens_BT = np.zeros((_ROWS, -(-max(map(len, rows)) // 8) * 8), np.int32)  # one shape, one program
        for row, ids in zip(tokens_BT, batch, strict=False):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in batch] + [1] * (_ROWS - len(batch)), np.int32)
        found = jax.device_get(_log_probabilities(params, config, tokens_BT, lengths))
        parts += [
            [kind[i, : len(mask) - 1][mask[1:]] for kind in found]
            for i, mask in enumerate(scored[at : at + _ROWS])
        ]
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


if __name__ == "__main__":
    start(main)
