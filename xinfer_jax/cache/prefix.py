"""A cache that outlives its call: what rows have read and written, so that the next call reads only what is
new; kept in files too.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from ..brief import counted
from ..config.model_config import ModelConfig
from ..errors import InputError, few
from ..weights.params import Params
from .fingerprint import fingerprint
from .kv_cache import KVCache, init_cache, remembered, truncate
from .quantized import KV_BITS, by_slot

_FORMAT = 2  # of files; the first had no number, and its mark did not identify the model


@dataclasses.dataclass(frozen=True, repr=False)
class Prefix:
    """A cache and the tokens in it, row by row.

    `generate` makes one, with keep_prefix. One made by hand, of a cache that `prefill` filled, need not say
    whose it is.

    Attributes:
        tokens: of each row, the ids whose keys and values the cache holds.
        cache: theirs.
        model: whose keys and values they are: its `fingerprint`; None: the caller vouches.
        factors: longrope's, by which the keys are rotated; () for other models.
    """

    tokens: list[list[int]]
    cache: KVCache
    model: str | None = None
    factors: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return f"Prefix({counted(self.tokens, 'row')}, {self.cache!r})"

    def shared(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """How many tokens at the start of each prompt the cache holds, int32 [B]: at most all but the last,
        whose logits are wanted.

        None of them where layers with a sliding window have forgotten what the next token sees.

        Raises:
            InputError: another number of prompts than rows.
        """
        if len(prompts) != len(self.tokens):
            raise InputError(
                f"{len(prompts)} prompts for a prefix of {len(self.tokens)} rows: give one prompt per row"
            )

        def common(held: Sequence[int], prompt: Sequence[int]) -> int:
            most = min(len(held), len(prompt) - 1)
            return next((i for i in range(most) if held[i] != prompt[i]), most)

        shared_B = np.array([common(*pair) for pair in zip(self.tokens, prompts, strict=True)], np.int32)
        return np.where(remembered(self.cache, shared_B), shared_B, 0)

    def usable(self, params: Params, config: ModelConfig) -> "Prefix":
        """What a call can build on: this prefix, or an empty one where its keys are rotated by other longrope
        factors than the call's. config: with the factors fixed.

        Raises:
            InputError: as `check`.
        """
        self.check(params, config)
        if self.factors == config.rope.short_factor:
            return self
        return dataclasses.replace(self, tokens=[[] for _ in self.tokens], cache=truncate(self.cache, 0))

    def check(self, params: Params, config: ModelConfig) -> None:
        """Raises InputError where it is another model's, or its tokens are not as many as its cache holds."""
        k, lengths = self.cache.k, [len(row) for row in self.tokens]
        shape = (len(k), k[0].shape[1], k[0].shape[3])
        ours = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        if shape != ours or self.model not in (None, fingerprint(params, config)):
            raise InputError(
                "the prefix was read by another model, or before these parameters changed: read its prompts"
                " anew, without it"
            )
        held = self.cache.length_B.tolist()
        if held != lengths or self.cache.overflow_B.any():
            raise InputError(
                f"the prefix names {few(lengths)} tokens of rows of which its cache holds {few(held)}: give"
                " the tokens that were read, all of which fit the cache"
            )


def kept_prefix(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[int]],
    cache: Any,
) -> Prefix:
    """What a call leaves behind: of each row everything but the last token, which was chosen and not read.
    config: with longrope's factors fixed.
    """
    tokens = [[*prompt, *ids][:-1] for prompt, ids in zip(prompts, chosen, strict=True)]
    cache = dataclasses.replace(cache, length_B=jnp.array([len(row) for row in tokens], jnp.int32))
    return Prefix(tokens, cache, fingerprint(params, config), config.rope.short_factor)


def save_prefix(path: str | Path, prefix: Prefix, params: Params, config: ModelConfig) -> None:
    """Writes a prefix as safetensors: the keys and values of the tokens it holds, and which model they are
    of.

    Raises:
        InputError: the file cannot be written; the prefix is another model's.
    """
    prefix.check(params, config)
    if prefix.factors not in _factors(config):
        raise InputError("which of longrope's factors the prefix has is not known: give Prefix its factors")
    cache = prefix.cache
    reached = None if cache.reached_B is None else cache.reached_B.tolist()
    tokens = [list(map(int, row)) for row in prefix.tokens]
    used = _used(tokens, reached)
    tensors = {
        f"{i}": held.view(np.uint16) if held.itemsize == 2 else held
        for i, held in enumerate(map(np.ascontiguousarray, jax.tree.leaves(_cut(cache, used))))
    }
    kept = dict(
        format=_FORMAT,
        tokens=tokens,
        dtype=cache.dtype,
        capacity=cache.capacity,
        reached=reached,
        factors=prefix.factors,
    )
    try:
        save_file(
            tensors, path, metadata={"xinfer_jax": json.dumps(kept), "model": fingerprint(params, config)}
        )
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from error


def load_prefix(path: str | Path, params: Params, config: ModelConfig, capacity: int | None = None) -> Prefix:
    """Reads what `save_prefix` wrote.

    Args:
        path: the file.
        params, config: the model that it must be of.
        capacity: of the cache, at most the model's context limit; None: as it was.

    Raises:
        InputError: no such file, a damaged one, an older version's, another model's, or more tokens than the
            capacity.
    """
    if capacity is not None and not _whole([capacity], 1, config.context_length):
        raise InputError(
            "capacity must be a whole number from 1 to the model's context limit"
            f" {config.context_length}, got {capacity!r}"
        )
    try:
        with safetensors.safe_open(path, "np") as file:
            kept = _metadata(path, file.metadata() or {}, params, config)
            factors = tuple(kept["factors"])
            fixed = dataclasses.replace(config.rope, short_factor=factors, long_factor=factors)
            config = dataclasses.replace(config, rope=fixed)
            # A file may ask for any capacity, and no call can use more than the context limit.
            before = min(kept["capacity"], config.context_length)
            new = partial(init_cache, config, len(kept["tokens"]), dtype=kept["dtype"])
            arrays = _tensors(path, file, jax.eval_shape(lambda: new(capacity=before)), kept)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    capacity, used = before if capacity is None else capacity, _used(kept["tokens"], kept["reached"])
    if used > capacity:
        raise InputError(
            f"{path} holds what {used} tokens left, more than the capacity {capacity}: raise capacity"
        )

    empty = jax.eval_shape(lambda: new(capacity=capacity))
    leaves, tree = jax.tree.flatten((empty.k, empty.v))

    def padded(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(np.pad(array, [(0, n - m) for n, m in zip(like.shape, array.shape, strict=True)]))

    try:
        k, v = jax.tree.unflatten(tree, map(padded, arrays, leaves))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"{path} does not fit in memory with a capacity of {capacity}: lower it") from error
    length_B = jnp.array([len(row) for row in kept["tokens"]], jnp.int32)
    reached_B = None if empty.reached_B is None else jnp.array(kept["reached"] or length_B, jnp.int32)
    cache = dataclasses.replace(
        empty, k=k, v=v, length_B=length_B, overflow_B=jnp.zeros(len(length_B), bool), reached_B=reached_B
    )
    return Prefix(kept["tokens"], cache, fingerprint(params, config), factors)


def _metadata(
    path: str | Path, metadata: dict[str, str], params: Params, config: ModelConfig
) -> dict[str, Any]:
    """What a file says about itself, checked."""
    if "xinfer_jax" not in metadata:
        raise InputError(f"{path} is not a saved prefix: write one with save_prefix")
    try:
        kept = json.loads(metadata["xinfer_jax"])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged, its metadata is no JSON ({error}): save it anew") from error
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT:
        known = isinstance(kept, dict) and "format" not in kept and "tokens" in kept
        raise InputError(
            f"{path} was written by {'an older' if known else 'another'} version of xinfer_jax, which marked"
            " its model differently: prefill again and save it anew"
        )
    given: list[Any] = [kept.get(name) for name in ("tokens", "capacity", "reached")]
    tokens, capacity, reached = given
    rows_fit = isinstance(tokens, list) and all(_whole(row, 0, config.vocab_size - 1) for row in tokens)
    lengths = list(map(len, tokens)) if rows_fit else []
    fits = {
        "tokens": max(lengths, default=0) > 0,
        "capacity": _whole([capacity], max(lengths, default=1), None),
        "dtype": kept.get("dtype") in (*KV_BITS, "float32", "bfloat16", "float16"),
        "reached": (reached is None and "reached" in kept)
        or (
            _whole(reached, 0, capacity)
            and len(reached) == len(lengths)
            and all(n <= most for n, most in zip(lengths, reached, strict=True))
        ),
        "factors": isinstance(kept.get("factors"), list),
    }
    for name in (name for name, fit in fits.items() if not fit):
        raise InputError(f"{path} is damaged, its {name} cannot be {kept.get(name)!r:.60}: save it anew")
    if metadata.get("model") != fingerprint(params, config) or tuple(kept["factors"]) not in _factors(config):
        raise InputError(f"{path} was saved with another model: load that one, or prefill again")
    return kept


def _tensors(path: str | Path, file: Any, like: KVCache, kept: dict[str, Any]) -> list[np.ndarray]:
    """The arrays of a cache like this one, cut to the slots in use, as they were saved."""
    wanted = jax.tree.leaves(
        jax.eval_shape(lambda cache: _cut(cache, _used(kept["tokens"], kept["reached"])), like)
    )
    stored = [np.dtype(np.uint16) if x.dtype.itemsize == 2 else x.dtype for x in wanted]
    names = [f"{i}" for i in range(len(wanted))]
    if set(file.keys()) != set(names):
        raise InputError(
            f"{path} is damaged, it has other tensors than the {len(names)} of its cache: save it anew"
        )
    arrays = []
    for name, x, dtype in zip(names, wanted, stored, strict=True):
        held = file.get_slice(name)
        got, want = (
            (held.get_dtype(), held.get_shape()),
            (f"{dtype.kind.upper()}{8 * dtype.itemsize}", list(x.shape)),
        )
        if got != want:
            raise InputError(
                f"{path} is damaged, its tensor {name} is {got} where {want} belongs: save it anew"
            )
        array = file.get_tensor(name).view(x.dtype)
        if x.dtype != np.uint8 and not np.isfinite(array).all():
            raise InputError(f"{path} holds numbers that are not finite: save it anew")
        arrays.append(array)
    return arrays


def _cut(cache: KVCache, used: int) -> list[Any]:
    """Keys and values of the slots in use."""
    return [by_slot(lambda array: array[:, :, :used], layer) for layer in (*cache.k, *cache.v)]


def _used(tokens: list[list[int]], reached: list[int] | None) -> int:
    """Slots in use: of a ring as many as a row ever had tokens."""
    return max(reached or map(len, tokens))


def _factors(config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """Those that a prefix of this model can have; () where there are none to choose from."""
    return config.rope.short_factor, config.rope.long_factor


def _whole(values: Any, least: int, most: int | None) -> bool:
    """Whether it is a list of whole numbers within these limits."""
    return isinstance(values, list) and all(
        type(x) is int and least <= x and (most is None or x <= most) for x in values
    )
