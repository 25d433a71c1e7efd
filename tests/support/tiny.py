"""Writes small checkpoint directories in Hugging Face layout: random weights, a byte-level BPE tokenizer."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

import xinfer_jax as xj
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf

CONFIG = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=288, hidden_size=32,
    intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=256,
    rms_norm_eps=1e-6, rope_theta=1e4,
    tie_word_embeddings=True, torch_dtype="float32", eos_token_id=271,
)  # fmt: skip
TOKENIZER_CONFIG = dict(
    tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>", add_bos_token=False
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last ids of the tokenizer
ENDOFTEXT, IM_START, IM_END = range(269, 272)
UNTIED = CONFIG | dict(tie_word_embeddings=False)
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

_MERGES = ["t h", "th e", "i n", "e r", "a n", "Ġ the", "Ġ a", "o n", "an d", "Ġ s", "l l", "in g", "Ġ and"]


def tensors(hf: Mapping[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random float32 weights by checkpoint name."""
    random = np.random.RandomState(seed)
    specs = jax.tree.leaves(file_specs(from_hf(hf)))
    return {
        spec.hf_name: (
            (random.standard_normal(spec.shape) / np.sqrt(spec.shape[-1])).astype(np.float32)
            + spec.hf_name.endswith("norm.weight")
        )
        for spec in specs
    }


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of 272 ids: 256 bytes, a few merges and three special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in _MERGES]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [tuple(m.split(" ")) for m in _MERGES])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_weights(path: Path, weights: Mapping[str, np.ndarray], shards: int = 1) -> None:
    """Writes model.safetensors, or that many shards and their index."""
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        part = dict(list(weights.items())[i::shards])
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    write_json(path / "model.safetensors.index.json", index)


def write(
    path: Path,
    hf: Mapping[str, Any] = CONFIG,
    *,
    dtype: str = "float32",
    shards: int = 1,
    weights: Mapping[str, np.ndarray] | None = None,
    with_tokenizer: bool = True,
    tokenizer_config: Mapping[str, Any] | None = TOKENIZER_CONFIG,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint and returns its directory.

    Args:
        path: the directory. Made if it does not exist.
        hf: contents of config.json.
        dtype: of the stored weights.
        shards: 1: model.safetensors. more: that many files and an index.
        weights: instead of `tensors(hf)`. Stored as they are.
        with_tokenizer: whether tokenizer.json and tokenizer_config.json are written.
        tokenizer_config, generation_config: contents of those files. None: no file.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", hf)
    if weights is None:
        weights = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors(hf).items()}
    write_weights(path, weights, shards)
    if with_tokenizer:
        tokenizer().save(str(path / "tokenizer.json"))
        if tokenizer_config is not None:
            write_json(path / "tokenizer_config.json", tokenizer_config)
    if generation_config is not None:
        write_json(path / "generation_config.json", generation_config)
    return path


def shallow_model(layers: int = 1, **options: Any) -> xj.Model:
    """Returns the bundled model with only its first layers, whose programs compile in a fraction of the time.

    Its answers make no sense.
    """
    model = xj.load_model(**options)
    config = dataclasses.replace(model.config, num_hidden_layers=layers)
    params = model.params | {"layers": model.params["layers"][:layers]}
    return dataclasses.replace(model, params=params, config=config)


def answering_model(answer: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns config and weights of a model that answers every prompt with `answer` and <|im_end|>, if the
    prompt ends with a newline, as in ChatML.

    Its layers add zero, and its output matrix maps each token to the next one, so no token may occur twice in
    the answer.
    """
    hf = CONFIG | dict(
        num_hidden_layers=1,
        hidden_size=CONFIG["vocab_size"],
        head_dim=8,
        intermediate_size=16,
        tie_word_embeddings=False,
    )
    weights = {name: np.zeros_like(tensor) for name, tensor in tensors(hf).items()}
    weights |= {
        name: np.ones_like(tensor) for name, tensor in weights.items() if name.endswith("norm.weight")
    }
    weights[EMBED] = np.eye(hf["vocab_size"], dtype=np.float32)
    ids = tokenizer().encode("\n" + answer).ids + [IM_END]
    assert len(ids) == len(set(ids)), "a token occurs twice"
    weights[HEAD][ids[1:], ids[:-1]] = 1
    return hf, weights


QUESTION = "Is that really the case?"
ASK = f"--prompt={QUESTION}"
ANSWER = "Yes, 你🚀!"
ANSWER_IDS = tokenizer().encode(ANSWER).ids


def load_error(path, **options) -> str:
    """Returns the message of `load_model`'s InputError: one line."""
    with pytest.raises(xj.InputError) as caught:
        xj.load_model(path, **options)
    assert len(str(caught.value).strip().splitlines()) == 1
    return str(caught.value)


def assert_same_shapes(opened) -> None:
    """Asserts that an opened checkpoint has the shapes of the parameters that reading returns."""
    structs = opened.model
    model = opened.read()
    assert jax.tree.structure(structs.params) == jax.tree.structure(model.params)
    for struct, leaf in zip(jax.tree.leaves(structs.params), jax.tree.leaves(model.params), strict=True):
        assert isinstance(struct, jax.ShapeDtypeStruct) and isinstance(leaf, jax.Array)
        assert jax.typeof(leaf) == jax.core.ShapedArray(struct.shape, struct.dtype, struct.weak_type)
    assert repr(structs) == repr(model)
