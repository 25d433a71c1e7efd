"""Runs llama.cpp for bench_peers.py: converts a checkpoint to GGUF, loads it and generates.

The file has only weights and no vocabulary: input and output are token ids.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

_ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
}


def convert(checkpoint: Path, converted: Path, precision: str, threads: int) -> None:
    """Writes the checkpoint as converted/model.gguf. llama.cpp itself quantizes to Q8_0 and Q4_0; it stores a
    tied vocabulary matrix in more than 4 bits.
    """
    converted.mkdir(parents=True)
    file = converted / "model.gguf"
    plain = converted / "bf16.gguf"
    if precision in ("F32", "BF16"):
        write_gguf(checkpoint, file, precision)
        return
    write_gguf(checkpoint, plain, "BF16")
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = threads
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{precision}")
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(file).encode(), options):
        raise RuntimeError(f"llama_model_quantize to {precision} failed")
    plain.unlink()


def _next_ids(ctx: object, batch: object, rows: list[list[int]], position: int, vocab_size: int) -> list[int]:
    """Appends each row's ids at `position` and returns the most likely next id of each row."""
    cells = [
        (token, position + t, row, t == len(ids) - 1)
        for row, ids in enumerate(rows)
        for t, token in enumerate(ids)
    ]
    batch.n_tokens = len(cells)
    for i, (token, at, row, last) in enumerate(cells):
        batch.token[i] = token
        batch.pos[i] = at
        batch.n_seq_id[i] = 1
        batch.logits[i] = last
        batch.seq_id[i][0] = row
    if llama_cpp.llama_decode(ctx, batch):
        raise RuntimeError("llama_decode failed")
    logits = (llama_cpp.llama_get_logits_ith(ctx, i) for i, cell in enumerate(cells) if cell[3])
    return [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in logits]


def load(job: dict) -> Callable[[list[list[int]], int], tuple[float, list[list[int]]]]:
    """Loads the model and returns its `generate` function; see peer_engines.py."""
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(Path(job["converted"], "model.gguf")).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError("llama_model_load_from_file returned nothing")
    # A context serves calls of one shape. The log callback must live as long as the process.
    state = {"shape": None, "context": None, "quiet": quiet}

    def context(rows: int, length: int, new: int) -> object:
        if state["shape"] != (rows, length, new):
            if state["context"]:
                llama_cpp.llama_free(state["context"])
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = rows * -(-(length + new) // 256) * 256
            options.n_seq_max = rows
            options.n_batch = max(512, rows * length)
            options.n_threads = options.n_threads_batch = job["threads"]
            state.update(shape=(rows, length, new), context=llama_cpp.llama_init_from_model(model, options))
            if not state["context"]:
                raise RuntimeError("llama_init_from_model returned nothing")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(state["context"]), True)
        return state["context"]

    def generate(prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        rows = len(prompts)
        length = len(prompts[0])
        ctx = context(rows, length, new)
        start = time.perf_counter()
        batch = llama_cpp.llama_batch_init(rows * length, 0, 1)
        size = job["vocab_size"]
        chosen = [_next_ids(ctx, batch, prompts, 0, size)]
        first_s = time.perf_counter() - start
        for i in range(new - 1):
            chosen.append(_next_ids(ctx, batch, [[token] for token in chosen[-1]], length + i, size))
        llama_cpp.llama_batch_free(batch)
        return first_s, [list(row) for row in zip(*chosen, strict=True)]

    return generate


def write_gguf(checkpoint: Path, file: Path, precision: str) -> None:
    """Converts a directory of config.json and bfloat16 model.safetensors.

    Args:
        checkpoint: the directory.
        file: where to write.
        precision: F32 or BF16, of the matrices; vectors are F32.

    Raises:
        ValueError: the model type or rope type is not supported.
    """
    hf = json.loads((checkpoint / "config.json").read_text())
    arch = _ARCHITECTURES.get(hf["model_type"])
    rope = {"rope_theta": hf.get("rope_theta", 10000.0)} | (
        hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    )
    rope_type = rope.get("rope_type", "default")
    if arch is None or rope_type not in ("default", "llama3"):
        raise ValueError(
            f"cannot write GGUF for model_type {hf['model_type']!r} with rope type {rope_type!r}"
        )
    tensors = _tensors(checkpoint / "model.safetensors")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    heads = (
        {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}
        if arch == gguf.MODEL_ARCH.LLAMA
        else {}
    )
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _metadata(writer, hf, head_dim, rope["rope_theta"], precision)
    names = gguf.get_tensor_name_map(arch, hf["num_hidden_layers"])
    written = {}
    for name, (shape, _) in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = precision if len(shape) == 2 else "F32"
        size = math.prod(shape) * (4 if kind == "F32" else 2)
        raw = None if kind == "F32" else gguf.GGMLQuantizationType.BF16
        writer.add_tensor_info(
            stored, shape, np.dtype(np.float32 if raw is None else np.uint16), size, raw_dtype=raw
        )
        written[name] = kind
    if rope_type == "llama3":
        writer.add_tensor_info("rope_freqs.weight", (head_dim // 2,), np.dtype(np.float32), head_dim // 2 * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind in written.items():
        shape, bits = tensors[name]
        for part, count in heads.items():
            # RoPE of this architecture: llama.cpp rotates pairs (2i, 2i+1), Hugging Face (i, i + H/2).
            if f".{part}." in name:
                bits = bits.reshape(count, 2, head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        writer.write_tensor_data(_float32(bits) if kind == "F32" else np.ascontiguousarray(bits))
    if rope_type == "llama3":
        writer.write_tensor_data(_llama3_factors(rope, head_dim))
    writer.close()


def _metadata(writer: gguf.GGUFWriter, hf: dict, head_dim: int, theta: float, precision: str) -> None:
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if precision == "F32" else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_vocab_size(hf["vocab_size"])
    writer.add_tokenizer_model("none")


def _tensors(file: Path) -> dict[str, tuple[list[int], np.ndarray]]:
    """Shape and bits (uint16: NumPy has no bfloat16) of every tensor, memory-mapped."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    data = np.memmap(file, np.uint8, "r", offset=8 + size)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            tensors[name] = entry["shape"], data[first:end].view(np.uint16).reshape(entry["shape"])
    return tensors


def _float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _llama3_factors(rope: dict, head_dim: int) -> np.ndarray:
    """The factors by which llama.cpp divides the frequencies for rope type llama3."""
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
