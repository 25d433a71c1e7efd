"""A cache that outlives its call: what rows have read and written, so that the next call reads only what is
new; kept in files too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from .cache import KVCache, init_cache, remembered
from .config import ModelConfig
from .errors import InputError
from .kv import by_slot
from .params import Params


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A cache and the tokens in it, row by row."""

    tokens: list[list[int]]
    cache: KVCache

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


def save_prefix(path: str | Path, prefix: Prefix, params: Params, config: ModelConfig) -> None:
    """Writes a prefix as safetensors: the keys and values of the tokens it holds, and which model they are
    of.

    Raises:
        InputError: the file cannot be written.
    """
    tensors, cache = {}, prefix.cache
    reached = None if cache.reached_B is None else np.asarray(cache.reached_B).tolist()
    used = max(reached or map(len, prefix.tokens))
    in_use = [by_slot(lambda array: array[:, :, :used], layer) for layer in (*cache.k, *cache.v)]
    for i, array in enumerate(jax.tree.leaves(in_use)):
        held = np.ascontiguousarray(np.asarray(array))
        tensors[f"{i}"] = held.view(np.uint16) if held.itemsize == 2 else held
    kept = {"tokens": prefix.tokens, "dtype": cache.dtype, "capacity": cache.capacity, "reached": reached}
    try:
        save_file(
            tensors, path, metadata={"xinfer_jax": json.dumps(kept), "model": _fingerprint(params, config)}
        )
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from error


def load_prefix(path: str | Path, params: Params, config: ModelConfig, capacity: int | None = None) -> Prefix:
    """Reads what `save_prefix` wrote.

    Args:
        path: the file.
        params, config: the model that it must be of.
        capacity: of the cache; None: as it was.

    Raises:
        InputError: no such file, another model's, or more tokens than the capacity.
    """
    try:
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if "xinfer_jax" not in metadata:
                raise InputError(f"{path} is not a saved prefix: write one with save_prefix")
            if metadata.get("model") != _fingerprint(params, config):
                raise InputError(f"{path} was saved with another model: load that one, or prefill again")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    kept = json.loads(metadata["xinfer_jax"])
    capacity, longest = kept["capacity"] if capacity is None else capacity, max(map(len, kept["tokens"]))
    if longest > capacity:
        raise InputError(f"{path} holds {longest} tokens, more than the capacity {capacity}: raise capacity")

    empty = init_cache(config, len(kept["tokens"]), capacity, kept["dtype"])

    def padded(array: np.ndarray, like: jax.Array) -> jax.Array:
        if array.shape[2] > min(like.shape[2], capacity):
            raise InputError(
                f"{path} holds {array.shape[2]} slots of a layer, which capacity {capacity} has not: raise it"
                f" to {kept['capacity']}"
            )
        return jnp.asarray(
            np.pad(array.view(like.dtype), ((0, 0), (0, 0), (0, like.shape[2] - array.shape[2]), (0, 0)))
        )

    leaves, tree = jax.tree.flatten((empty.k, empty.v))
    k, v = jax.tree.unflatten(tree, [padded(arrays[f"{i}"], like) for i, like in enumerate(leaves)])
    length_B = jnp.array([len(row) for row in kept["tokens"]], jnp.int32)
    reached_B = None if empty.reached_B is None else jnp.array(kept["reached"] or length_B, jnp.int32)
    return Prefix(
        kept["tokens"], dataclasses.replace(empty, k=k, v=v, length_B=length_B, reached_B=reached_B)
    )


def _fingerprint(params: Params, config: ModelConfig) -> str:
    """Of the configuration and of two small leaves, which no other checkpoint shares."""
    digest = hashlib.sha256(repr(config).encode())
    for leaf in (params["final_norm"], params["layers"][-1]["attn_norm"]):
        digest.update(np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()


def kept_prefix(prompts: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]], cache: Any) -> Prefix:
    """What a call leaves behind: of each row everything but the last token, which was chosen and not read."""
    tokens = [[*prompt, *ids][:-1] for prompt, ids in zip(prompts, chosen, strict=True)]
    return Prefix(
        tokens, dataclasses.replace(cache, length_B=jnp.array([len(row) for row in tokens], jnp.int32))
    )
