"""The work of `xinfer-jax quantize` after its flags: quantizes a checkpoint, measures the loss, writes it."""

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.loading import Model, load_model
from ..checkpoint.saving import save_model
from ..compress import awq
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..families.conversion import specs_and_leaves
from ..formats.compressed_tensors_packing import w4a16_settings
from ..formats.hub import HubOptions, checkpoint_path
from ..generation.entrypoints import generate
from ..generation.options import GenerateOptions
from ..model.decoder import forward
from ..sampling.sampling_config import SamplingConfig
from ..weights.params import tree_bytes
from ..weights.quantization import quantize_symmetric
from ..weights.quantized_weight import is_quantized
from .terminal import status, write

_W4A16 = "compressed-tensors"  # --format
_CONTEXT = 512  # tokens of the chunks of documents, at most
_ROWS = 16  # chunks that are scored in a batch
_CALIBRATION_TOKENS = 16384  # at most
_CALIBRATION_SEED = 11
_EVAL_SEED = 12
_CALIBRATION_TEXTS = 32  # that the model samples
_EVAL_TEXTS = 96


def quantize_checkpoint(flags: Any, calibration: list[str] | None, eval: list[str] | None) -> int:
    """Quantizes a checkpoint as the flags say. Returns the exit code. calibration, eval: documents of files.
    None: the model samples them if flags ask for them.
    """
    path = checkpoint_path(flags.model, hub=HubOptions(flags.revision))
    with status("loading the model"):
        model = load_model(path, dtype="float32")
    if any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized))):
        raise InputError(f"{path} is quantized already: give the unquantized checkpoint")
    if model.tokenizer is None and (flags.method == "awq" or flags.eval):
        raise InputError(
            "the checkpoint has no tokenizer.json, which texts need: use --method=rtn, without --eval"
        )
    if flags.method == "awq" and calibration is None:
        calibration = _sampled_texts(model, _CALIBRATION_TEXTS, _CALIBRATION_SEED)
    if flags.eval and eval is None:
        eval = _sampled_texts(model, _EVAL_TEXTS, _EVAL_SEED)
    eval = [text for text in eval or () if text not in (calibration or ())]
    if flags.eval and not eval:
        raise InputError(f"--eval={flags.eval} has no text except the calibration texts: give another file")
    names = ("model", "output", "quantize", "group", "method", "activations")
    report: dict[str, Any] = {name: flags[name].value for name in names}
    start = time.perf_counter()
    quantized, calibration_report = _quantize(flags, model, calibration or [])
    report |= calibration_report
    report["seconds"] = round(time.perf_counter() - start, 1)
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) / 2**20
    report["mib_float32"] = tree_bytes(model.params) / 2**20
    report["mib"] = tree_bytes(quantized.params) / 2**20
    report["mib_read"] = stored
    write(
        f"weights: {stored:.2f} MiB on disk, {report['mib_float32']:.2f} in float32 -> {report['mib']:.2f}"
        f" MiB in {report['seconds']} s\n"
    )
    if flags.eval:
        report |= _quality_loss(model, quantized, eval, flags.eval)
    if flags.output:
        save_model(quantized.params, quantized.config, flags.output, tokenizer=model.tokenizer)
        write(f"wrote {flags.output}\n")
    write(f"{json.dumps(report)}\n")
    return 0


def _quantize(flags: Any, model: Model, calibration: list[str]) -> tuple[Model, dict[str, Any]]:
    """Returns the model quantized as the flags say, and a report on the calibration."""
    method = flags.quantize, flags.group, flags.activations
    if flags.method == "rtn" and flags.format == _W4A16:
        return _quantize_w4a16(model, flags.group), {}
    if flags.method == "rtn":
        return dataclasses.replace(model, params=awq.quantized_params(model.params, *method)), {}
    rows = _chunks(model, calibration, max_tokens=_CALIBRATION_TOKENS)
    report = dict(calibration=flags.calibration, calibration_tokens=sum(map(len, rows)))
    write(f"calibrating on {report['calibration_tokens']} tokens of {flags.calibration}\n")
    inputs = model.params, model.config, rows
    with status("calibrating"):
        if flags.format == _W4A16:
            scaled = awq.scaled_params(*inputs, *method[:2])
            return _quantize_w4a16(dataclasses.replace(model, params=scaled), flags.group), report
        return dataclasses.replace(model, params=awq.awq_params(*inputs, *method)), report


def _quantize_w4a16(model: Model, group: int | None) -> Model:
    """Returns the model with matrices of its layers in symmetric int4, to be written by compressed-tensors'
    rules.
    """
    (specs, leaves) = specs_and_leaves(model.params, model.config)
    for i, spec in enumerate(specs):
        if spec.is_quantizable and spec.name.startswith("layers."):
            leaves[i] = jax.tree.map(jnp.asarray, quantize_symmetric(np.asarray(leaves[i]), group))
    int4 = {spec.hf_name: leaf for spec, leaf in zip(specs, leaves, strict=True) if is_quantized(leaf)}
    config = dataclasses.replace(model.config, quantization_config=w4a16_settings(int4))
    params = jax.tree.unflatten(jax.tree.structure(model.params), leaves)
    return dataclasses.replace(model, params=params, config=config)


def _sampled_texts(model: Model, count: int, seed: int) -> list[str]:
    """Returns texts that the model samples at temperature 1. Texts unlike a model's own do harm: a model of
    stories that is calibrated on conversations loses more than by rounding to nearest.
    """
    assert model.tokenizer is not None
    start = model.tokenizer.encode("") or list(model.tokenizer.eos_token_ids[:1])
    length = min(_CONTEXT, model.config.context_length) - len(start)
    ends = (*start, *model.tokenizer.eos_token_ids)
    options = GenerateOptions(max_tokens=length, sampling=SamplingConfig(temperature=1.0), eos_token_ids=ends)
    with status(f"sampling {count} texts"):
        out = generate(model.params, model.config, [start] * count, options, key=jax.random.key(seed))
    return [model.tokenizer.decode(out.text_ids(row)) for row in range(count)]


def _chunks(model: Model, texts: list[str], max_tokens: int | None = None) -> list[list[int]]:
    """Returns token ids of the documents, in chunks of the context. Chunks of a single token are left out,
    because they cannot be scored.
    """
    assert model.tokenizer is not None
    context = min(_CONTEXT, model.config.context_length)
    documents = map(model.tokenizer.encode, texts)
    rows = [
        ids[at : at + context] for ids in documents for at in range(0, len(ids), context) if len(ids) - at > 1
    ]
    ends = np.cumsum([len(row) for row in rows])
    return rows if max_tokens is None else rows[: max(1, int(np.searchsorted(ends, max_tokens, "right")))]


def _quality_loss(model: Model, quantized: Model, texts: list[str], source: str) -> dict[str, Any]:
    """Returns the perplexity before and after, and the fraction of tokens at which the most likely token is
    the same. source: the source of the texts.
    """
    rows = _chunks(model, texts)
    with status("scoring the texts"):
        (exact, exact_best), (logprobs, best) = (_scores(each, rows) for each in (model, quantized))
    before = np.exp(-exact.mean())
    after = np.exp(-logprobs.mean())
    same = (exact_best == best).mean()
    error = np.sqrt(same * (1 - same) / len(best))
    write(
        f"on {len(exact)} tokens of {source}: perplexity {before:.4f} -> {after:.4f} "
        f"({after / before - 1:+.2%}), top-1 agreement {same:.2%} ± {error:.2%}\n"
    )
    figures = dict(perplexity_float32=before, perplexity=after, perplexity_change=after / before - 1)
    figures |= dict(top1_agreement=same, top1_standard_error=error)
    return dict(eval=source, eval_tokens=len(exact)) | {name: float(x) for name, x in figures.items()}


@partial(jax.jit, static_argnums=1)
def _log_probabilities(params: Any, config: ModelConfig, tokens_BT: jax.Array, length_B: jax.Array) -> Any:
    logits_BTV = forward(params, config, tokens_BT, num_tokens_B=length_B)[0][:, :-1]
    logprobs_BTV = jax.nn.log_softmax(logits_BTV)
    own_BT1 = jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], 2)
    return own_BT1[..., 0], logits_BTV.argmax(-1)


def _scores(model: Model, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probability of each token except the first of a row, and the most likely token at its
    position.
    """
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
    logprobs, best = map(np.concatenate, zip(*parts, strict=True))
    return logprobs, best
