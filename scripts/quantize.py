"""Writes a checkpoint with its matrices quantized to int8 or int4, and reports the loss of quality.

    python scripts/quantize.py --output=DIR    # the bundled model, int4, by AWQ
    python scripts/quantize.py --model=DIR --output=DIR --quantize=int8 --method=rtn --eval=TEXT.txt
    python scripts/quantize.py --output=DIR --quantize=int8 --activations=int8 --method=rtn --eval=sampled
    python scripts/quantize.py --model=DIR --output=DIR --format=compressed-tensors    # for transformers too

`--model=DIR` of any command opens the result. --calibration and --eval take a file of UTF-8 text, with lines
<|endoftext|> between its documents, or one of two words: `capitals`, conversations of train/tiny_data.py like
those of the bundled model, or `sampled`, texts that the model itself samples at temperature 1. For evaluation
they are made with another seed, and calibration texts are left out. The last line is one JSON object. Exit
code 2: bad input, reported in one line on standard error.
"""

from launcher import start

# isort: split
import dataclasses
import itertools
import json
import random
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from train import tiny_data

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import BUNDLED
from xinfer_jax.compress import awq
from xinfer_jax.families.conversion import specs_and_leaves
from xinfer_jax.formats.compressed_tensors_packing import w4a16_settings
from xinfer_jax.formats.files import checkpoint_dir
from xinfer_jax.weights.grouped_weight import GROUP as GROUP_SIZE
from xinfer_jax.weights.params import tree_bytes
from xinfer_jax.weights.quantization import check_activations, quantize_symmetric
from xinfer_jax.weights.quantized_weight import is_quantized

W4A16 = "compressed-tensors"
MODEL = flags.DEFINE_string(
    "model", None, "Checkpoint: a directory, or a name owner/name on the hub. Default: the bundled model."
)
OUTPUT = flags.DEFINE_string("output", None, "Directory to write to. Default: only report.")
QUANTIZE = flags.DEFINE_enum("quantize", "int4", ["int8", "int4"], "Format of the weights.")
GROUP = flags.DEFINE_integer(
    "group",
    None,
    f"Number of inputs that share a scale, even. Default: int8: all inputs of an output, int4: {GROUP_SIZE};"
    " small matrices: 8 and 32.",
)
FORMAT = flags.DEFINE_enum(
    "format",
    "xinfer_jax",
    ["xinfer_jax", W4A16],
    "xinfer_jax: files that only this library reads. compressed-tensors: W4A16 files, also for transformers;"
    " for --quantize=int4, rounded to nearest around 0, also after awq's scales; the vocabulary stays float.",
)
METHOD = flags.DEFINE_enum(
    "method",
    "awq",
    ["rtn", "awq"],
    "rtn: round to nearest. awq: scale by activations (Lin et al. 2023), refit, and round so that errors"
    " compensate each other.",
)
ACTIVATIONS = flags.DEFINE_enum(
    "activations",
    None,
    ["int8"],
    "Also quantize the inputs of matmuls; --quantize=int8 then has no --group. Inputs are rotated in blocks"
    " (QuaRot, Ashkboos et al. 2024) against outliers, instead of AWQ's scales.",
)
CALIBRATION = flags.DEFINE_string(
    "calibration",
    None,
    "Texts for awq: a text file, capitals or sampled. Default: capitals for the bundled model, else sampled.",
)
EVAL = flags.DEFINE_string(
    "eval", None, "Report perplexity and top-1 agreement with float32 on a text file, capitals or sampled."
)
_SEPARATOR = "<|endoftext|>"
_CONTEXT = 512  # tokens of the chunks of documents, at most
_ROWS = 16  # chunks that are scored in a batch
_CALIBRATION_TOKENS = 16384  # at most
_CALIBRATION_SEED = 11
_EVAL_SEED = 12


def check_flags() -> None:
    """Raises InputError for values or combinations that are not allowed."""
    if GROUP.value is not None and (GROUP.value < 2 or GROUP.value % 2):
        raise xj.InputError(f"--group={GROUP.value}: give an even number of inputs")
    check_activations(ACTIVATIONS.value, QUANTIZE.value, GROUP.value)
    if FORMAT.value == W4A16 and (QUANTIZE.value != "int4" or ACTIVATIONS.value):
        raise xj.InputError("--format=compressed-tensors is for --quantize=int4 without --activations")


def main(argv: list[str]) -> None:
    check_flags()
    path = BUNDLED if MODEL.value is None else checkpoint_dir(MODEL.value)
    model = xj.load_model(path, dtype="float32")
    if any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized))):
        raise xj.InputError(f"{path} is quantized already: give the unquantized checkpoint")
    calibration = documents(model, calibration_source(), _CALIBRATION_SEED) if METHOD.value == "awq" else []
    eval_texts = documents(model, EVAL.value, _EVAL_SEED) if EVAL.value else []
    eval_texts = [text for text in eval_texts if text not in calibration]
    if EVAL.value and not eval_texts:
        raise xj.InputError(f"--eval={EVAL.value} has no text besides the calibration texts")
    reported = (MODEL, OUTPUT, QUANTIZE, GROUP, METHOD, ACTIVATIONS)
    report = {flag.name: flag.value for flag in reported}
    start = time.perf_counter()
    quantized, calibration_report = quantize(model, calibration)
    report |= calibration_report
    report["seconds"] = round(time.perf_counter() - start, 1)
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) / 2**20
    sizes = (tree_bytes(of.params) / 2**20 for of in (model, quantized))
    report |= dict(zip(("mib_float32", "mib"), sizes, strict=True)) | {"mib_read": stored}
    print(
        f"weights: {stored:.2f} MiB on disk, {report['mib_float32']:.2f} in float32 -> {report['mib']:.2f}"
        f" MiB in {report['seconds']} s"
    )
    if EVAL.value:
        report |= quality_loss(model, quantized, eval_texts)
    if OUTPUT.value:
        xj.save_model(quantized.params, quantized.config, OUTPUT.value, tokenizer=model.tokenizer)
        print(f"wrote {OUTPUT.value}")
    print(json.dumps(report))


def quantize(model: xj.Model, calibration: list[str]) -> tuple[xj.Model, dict]:
    """The model quantized as the flags say, and a report on the calibration."""
    method = QUANTIZE.value, GROUP.value, ACTIVATIONS.value
    if METHOD.value == "rtn" and FORMAT.value == W4A16:
        return quantize_w4a16(model), {}
    if METHOD.value == "rtn":
        return dataclasses.replace(model, params=awq.quantized_params(model.params, *method)), {}
    rows = chunks(model, calibration, max_tokens=_CALIBRATION_TOKENS)
    report = {
        "calibration": calibration_source(),
        "calibration_tokens": sum(map(len, rows)),
    }
    print(f"calibrating on {report['calibration_tokens']} tokens of {report['calibration']}", flush=True)
    inputs = model.params, model.config, rows
    if FORMAT.value == W4A16:
        scaled = awq.scaled_params(*inputs, *method[:2])
        return quantize_w4a16(dataclasses.replace(model, params=scaled)), report
    return dataclasses.replace(model, params=awq.awq_params(*inputs, *method)), report


def quantize_w4a16(model: xj.Model) -> xj.Model:
    """The model with matrices of its layers in symmetric int4, to be written by compressed-tensors' rules."""
    (specs, leaves) = specs_and_leaves(model.params, model.config)
    for i, spec in enumerate(specs):
        if spec.is_quantizable and spec.name.startswith("layers."):
            leaves[i] = jax.tree.map(jnp.asarray, quantize_symmetric(np.asarray(leaves[i]), GROUP.value))
    int4 = {spec.hf_name: leaf for spec, leaf in zip(specs, leaves, strict=True) if is_quantized(leaf)}
    config = dataclasses.replace(model.config, quantization_config=w4a16_settings(int4))
    params = jax.tree.unflatten(jax.tree.structure(model.params), leaves)
    return dataclasses.replace(model, params=params, config=config)


def calibration_source() -> str:
    """The source of calibration texts. Texts unlike the model's own do harm: a model of stories that is
    calibrated on capitals loses more than by rounding to nearest.
    """
    return CALIBRATION.value or ("capitals" if MODEL.value is None else "sampled")


def documents(model: xj.Model, source: str, seed: int) -> list[str]:
    """The texts of a file, or generated texts."""
    if model.tokenizer is None:
        raise xj.InputError(
            "the checkpoint has no tokenizer.json, which texts need: use --method=rtn, without --eval"
        )
    if source == "capitals":
        count = 200 if seed == _CALIBRATION_SEED else 1000
        talks = itertools.islice(tiny_data.conversations(random.Random(seed)), count)
        return [model.tokenizer.apply_chat_template(talk, add_generation_prompt=False) for talk in talks]
    if source == "sampled":
        start = model.tokenizer.encode("") or list(model.tokenizer.eos_token_ids[:1])
        length = min(_CONTEXT, model.config.context_length) - len(start)
        ends = (*start, *model.tokenizer.eos_token_ids)
        options = xj.GenerateOptions(
            max_tokens=length, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=ends
        )
        prompts = [start] * (32 if seed == _CALIBRATION_SEED else 96)
        out = xj.generate(model.params, model.config, prompts, options, key=jax.random.key(seed))
        return [model.tokenizer.decode(ids) for ids in out.tokens]
    text = Path(source).expanduser().read_text(encoding="utf-8")
    parts = re.split(rf"^{re.escape(_SEPARATOR)}\n", text, flags=re.MULTILINE)
    return [part for part in parts if part.strip()]


def chunks(model: xj.Model, texts: list[str], max_tokens: int | None = None) -> list[list[int]]:
    """Token ids of the documents, in chunks of the context. Chunks of a single token are left out, because
    they cannot be scored.
    """
    context = min(_CONTEXT, model.config.context_length)
    documents = map(model.tokenizer.encode, texts)
    rows = [
        ids[at : at + context] for ids in documents for at in range(0, len(ids), context) if len(ids) - at > 1
    ]
    ends = np.cumsum([len(row) for row in rows])
    return rows if max_tokens is None else rows[: max(1, int(np.searchsorted(ends, max_tokens, "right")))]


def quality_loss(model: xj.Model, quantized: xj.Model, texts: list[str]) -> dict:
    """Perplexity before and after, and how often the most likely token is the same."""
    rows = chunks(model, texts)
    (exact, exact_best), (logprobs, best) = (scores(of, rows) for of in (model, quantized))
    before = np.exp(-exact.mean())
    after = np.exp(-logprobs.mean())
    same = (exact_best == best).mean()
    error = np.sqrt(same * (1 - same) / len(best))
    print(
        f"on {len(exact)} tokens of {EVAL.value}: perplexity {before:.4f} -> {after:.4f} "
        f"({after / before - 1:+.2%}), top-1 agreement {same:.2%} ± {error:.2%}"
    )
    figures = dict(perplexity_float32=before, perplexity=after, perplexity_change=after / before - 1)
    figures |= dict(top1_agreement=same, top1_standard_error=error)
    return dict(eval=EVAL.value, eval_tokens=len(exact)) | {name: float(x) for name, x in figures.items()}


@partial(jax.jit, static_argnums=1)
def _log_probabilities(params: dict, config: xj.ModelConfig, tokens_BT: jax.Array, length_B: jax.Array):
    logits_BTV = xj.forward(params, config, tokens_BT, num_tokens_B=length_B)[0][:, :-1]
    logprobs_BTV = jax.nn.log_softmax(logits_BTV)
    own_BT1 = jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], 2)
    return own_BT1[..., 0], logits_BTV.argmax(-1)


def scores(model: xj.Model, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each token but the first of a row, and the most likely token at its position."""
    parts = []
    width = -(-max(map(len, rows)) // 8) * 8
    for at in range(0, len(rows), _ROWS):  # one shape for one program
        tokens_BT = np.zeros((_ROWS, width), np.int32)
        length_B = np.ones(_ROWS, np.int32)
        for i, ids in enumerate(rows[at : at + _ROWS]):
            tokens_BT[i, : len(ids)] = ids
            length_B[i] = len(ids)
        results = jax.device_get(_log_probabilities(model.params, model.config, tokens_BT, length_B))
        parts += [[kind[i, : n - 1] for kind in results] for i, n in enumerate(length_B)]
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


if __name__ == "__main__":
    start(main)
