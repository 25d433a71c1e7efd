"""`MemoryPlan`: the bytes that a model, its caches and its programs take, as named parts."""

import dataclasses
from typing import Any

from .registry import plugin

_KEYS = 256  # that a prefill chunk attends to at the same time
_SAMPLING_BYTES = 28  # of each row and token of the vocabulary, while a token is sampled


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of named parts: weights, cache or pages, states, adapters, vectors, temporaries, logits, results.
    `fraction` of them are in one memory: the memory of a device or, on a CPU, of all devices of this process.
    """

    parts: dict[str, int]
    fraction: float = 1.0

    @property
    def total(self) -> int:
        """Bytes of all parts in one memory."""
        return int(self.fraction * sum(self.parts.values()))

    def check(self, remedy: str, have: int | None = None) -> None:
        """Raises InputError, which ends with the remedy, if one memory has less, as far as that is known.
        have: its bytes. None: the bytes of the device.
        """
        if (check_memory := plugin("device", "memory")) is not None:
            check_memory(self.total, str(self), remedy, have)

    def __str__(self) -> str:
        sizes = {name: self.fraction * size for name, size in self.parts.items() if size}
        return " + ".join(f"{name} ({format_mib(size)})" for name, size in sizes.items())


def program_parts(config: Any, chunk_tokens: int, rows: int, row_bytes: int) -> dict[str, int]:
    """Returns bounds of the memory that the programs of a model need in addition to their arguments:
    temporaries and logits. In the forms for CPUs, a prefill chunk has the scores of a block of keys, or the
    activations of an MLP, the hidden states of all layers, and parts of a matrix that is converted. Kernels
    need less.

    Args:
        config: the `ModelConfig`.
        chunk_tokens: tokens of all rows in a prefill chunk.
        rows: the number of rows that are sampled together.
        row_bytes: bytes for each token of the vocabulary, of a row: logits, settings, tokens so far.
    """
    heads = config.num_attention_heads
    width = config.hidden_size
    widest = max(2 * heads * _KEYS, 3 * config.intermediate_size)
    head_width = max([config.head_dim, *(x.fits[1] for x in config.cached_mixers if x.has_keys)])
    hidden = (config.num_hidden_layers + 3) * width + 2 * heads * head_width
    prefill = 4 * chunk_tokens * (widest + hidden) + 3 * width * config.intermediate_size // 2
    logits = rows * config.vocab_size
    return dict(temporaries=max(prefill, _SAMPLING_BYTES * logits), logits=row_bytes * logits)


def format_mib(count: float) -> str:
    """Returns a number of bytes in MiB."""
    return f"{count / 2**20:.1f} MiB" if count < 10 * 2**20 else f"{count / 2**20:.0f} MiB"
