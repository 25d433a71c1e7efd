"""A mixture of experts in order of the experts: a tile of choices of one expert at a time.

A token is computed by its chosen experts only, forwards and backwards, and each expert is read as often as it
has tiles. Here C are the choices of all tokens, R the rows of a tile.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig
from ..feed_forward.experts import expert_at, expert_output, inner_activation, num_local_experts
from ..modes import in_default_modes
from ..ops.operation import by_position, match_varying_axes
from ..ops.product import float_precision
from ..weights.layers import activation, products
from ..weights.params import AnyArray, Params

_TILE_ROWS = 64  # at most: more rows are no faster
_MOST_KEYS = 2**31  # of int32
_GRADIENT_ROWS = 128  # of a backward pass, and of the forward pass before it


class Tiles(NamedTuple):
    """Choices in order of the experts, cut into tiles. Choices of experts on other devices are in no tile."""

    token_C: jax.Array  # int32, with R more entries
    choice_C: jax.Array  # int32, with R more entries: the index of m, u
    first_X: jax.Array  # int32: each expert's first choice, its number of tiles, and the end of its tiles
    tiles_X: jax.Array
    last_X: jax.Array
    stop_X: jax.Array  # int32: the end of its choices


def is_tiled(expert_MU: jax.Array, config: ModelConfig) -> bool:
    """Returns True if tiles are faster than running every expert on all tokens. Tiles cost up to 3 rows per
    choice.
    """
    size = expert_MU.size
    return isinstance(size, int) and size >= config.num_experts >= 4 * config.num_experts_per_tok


def _rows(expert_MU: jax.Array, config: ModelConfig, most: int = _GRADIENT_ROWS) -> int:
    return min(most, 1 << (2 * expert_MU.size // config.num_experts - 1).bit_length())


def _tiles(expert_MU: jax.Array, experts: Params, rows: int) -> Tiles:
    M, U = expert_MU.shape
    C = M * U
    X = num_local_experts(experts)
    choice_C, start_X1 = sort_choices(expert_MU.reshape(C), X)
    padded_C = jnp.pad(choice_C, (0, rows))
    first_X = start_X1[:-1]
    stop_X = start_X1[1:]
    tiles_X = -((first_X - stop_X) // rows)
    return Tiles(padded_C // U, padded_C, first_X, tiles_X, jnp.cumsum(tiles_X), stop_X)


def sort_choices(expert_C: jax.Array, X: int) -> tuple[jax.Array, jax.Array]:
    """Returns the choices in order of their experts, int32 [C], and the place in that order at which each
    expert begins, with the end of the last one, int32 [X + 1].
    """
    C = len(expert_C)
    expert_C = jnp.clip(expert_C, -1, X)  # experts of other devices
    if (X + 1) * C <= _MOST_KEYS:
        key_C = lax.sort(expert_C * C + jnp.arange(C), is_stable=False)  # no two are equal
        return key_C % C, (key_C < C * jnp.arange(X + 1)[:, None]).sum(1)
    expert_C, choice_C = lax.sort((expert_C, jnp.arange(C)), num_keys=2, is_stable=False)
    return choice_C, jnp.searchsorted(expert_C, jnp.arange(X + 1), method="sort")


def _for_each_tile(tiles: Tiles, rows: int, step: Callable, *carry: Any) -> Any:
    """Runs carry = step(expert, first choice of the tile, carry) for every tile. A tile may have rows after
    the expert's last choice: `_add` leaves them out, and the next tile overwrites the rows that are written
    for them.
    """

    def body(tile: Any, carry: Any) -> Any:
        expert = (tiles.last_X <= tile).sum()
        first = tiles.first_X[expert] + (tile - tiles.last_X[expert] + tiles.tiles_X[expert]) * rows
        return step(expert, first, carry)

    return lax.fori_loop(0, tiles.last_X[-1], body, carry)


def experts_by_tiles(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """Returns [M, D], float32: as `plain_experts`."""
    rows = _rows(expert_MU, config, _TILE_ROWS)
    tiles = _tiles(expert_MU, experts, rows)

    def step(expert: Any, first: Any, carry: Any) -> Any:
        token_R = lax.dynamic_slice_in_dim(tiles.token_C, first, rows)
        out_RD = expert_output(x_MD[token_R], expert_at(expert, experts), config)
        return (_add_weighted(carry[0], out_RD, weight_MU, tiles, expert, first),)

    start_MD = match_varying_axes(jnp.zeros(x_MD.shape, jnp.float32), x_MD, expert_MU, experts)
    return _for_each_tile(tiles, rows, step, start_MD)[0]


def _add(total: jax.Array, index_C: jax.Array, new: jax.Array, tiles: Tiles, expert: Any, first: Any) -> Any:
    """Returns total with the rows of a tile added at the places in index_C. On CPUs this is faster than
    storing the rows of all choices and gathering the rows of each token at the end.
    """
    rows = jnp.arange(len(new))
    is_here = (first + rows < tiles.stop_X[expert]).reshape(-1, *[1] * (new.ndim - 1))
    at_R = lax.dynamic_slice_in_dim(index_C, first, len(new))
    return total.at[at_R].add(jnp.where(is_here, new, 0).astype(total.dtype))


def _add_weighted(sum_MD: Any, out_RD: Any, weight_MU: Any, tiles: Tiles, expert: Any, first: Any) -> Any:
    """Adds the outputs of a tile with their weights."""
    choice_R = lax.dynamic_slice_in_dim(tiles.choice_C, first, len(out_RD))
    weight_R1 = weight_MU.reshape(-1)[choice_R][:, None]
    return _add(sum_MD, tiles.token_C, weight_R1 * out_RD, tiles, expert, first)


def with_tiled_gradient(call: Callable, operands: dict[str, Any], config: ModelConfig) -> jax.Array | None:
    """Returns call(**operands), which is the mixture by any form, with a reverse-mode gradient by tiles.
    None: plain forms have a better one, as few tokens or few experts do, or quantized experts.
    """
    is_float = all(isinstance(x, AnyArray) for leaf in operands["experts"].values() for x in leaf.values())
    if not is_tiled(operands["expert_MU"], config) or not is_float:
        return None
    values = tuple(operands.values())
    mixture = jax.custom_vjp(by_position(call, operands))
    mixture.defvjp(partial(_forwards, config=config), partial(_backwards, config))
    return mixture(*match_varying_axes(values, values))


@in_default_modes
def _forwards(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> tuple[jax.Array, Any]:
    """Returns the output, and the values that the backward pass needs: the operands, and for each choice the
    products with `_input_matrices`, [C, F].
    """
    rows = _rows(expert_MU, config)
    tiles = _tiles(expert_MU, experts, rows)
    inner = _inner_activation(experts, config)
    C = len(tiles.token_C)
    F = experts["up"]["weight"].shape[1]

    def step(expert: Any, first: Any, carry: Any) -> Any:
        token_R = lax.dynamic_slice_in_dim(tiles.token_C, first, rows)
        tree = expert_at(expert, experts)
        new = products(x_MD[token_R], _input_matrices(tree))
        (out_RD,) = products(inner(*new), [tree["down"]], dtype=jnp.dtype(jnp.float32))
        sum_MD, *kept = carry
        put = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        sum_MD = _add_weighted(sum_MD, out_RD, weight_MU, tiles, expert, first)
        return sum_MD, *map(put, kept, new)

    inputs = _input_matrices(experts)
    starts = jnp.zeros(x_MD.shape, jnp.float32), *(jnp.zeros((C, F), x_MD.dtype) for _ in inputs)
    starts = match_varying_axes(starts, x_MD, expert_MU, experts)
    out_MD, *kept = _for_each_tile(tiles, rows, step, *starts)
    return out_MD, (x_MD, weight_MU, expert_MU, experts, kept)


@in_default_modes
def _backwards(config: ModelConfig, residuals: Any, out_bar_MD: jax.Array) -> tuple[Any, ...]:
    """Returns the cotangents of the operands. The cotangents of experts are summed in float32."""
    x_MD, weight_MU, expert_MU, experts, kept = residuals
    rows = _rows(expert_MU, config)
    tiles = _tiles(expert_MU, experts, rows)
    weight_C = weight_MU.reshape(-1)
    out_bar_MD = out_bar_MD.astype(x_MD.dtype)

    def step(expert: Any, first: Any, carry: Any) -> Any:
        x_bar_MD, weight_bar, sums = carry
        cut = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=rows)
        token_R = cut(tiles.token_C)
        valid_R = first + jnp.arange(rows) < tiles.stop_X[expert]
        weight_R = jnp.where(valid_R, weight_C[cut(tiles.choice_C)], 0)
        tree = expert_at(expert, experts)
        inner_RF, inner_vjp = jax.vjp(_inner_activation(experts, config), *map(cut, kept))
        out_bar_RD = out_bar_MD[token_R]
        unweighted_RF = _product(out_bar_RD, tree["down"]["weight"])
        weight_bar_R = (inner_RF * unweighted_RF).astype(jnp.float32).sum(1)
        if "bias" in tree["down"]:
            weight_bar_R += (out_bar_RD * tree["down"]["bias"]).astype(jnp.float32).sum(1)
        down_bar_RD = out_bar_RD * weight_R[:, None].astype(x_MD.dtype)
        bars = inner_vjp(unweighted_RF * weight_R[:, None].astype(x_MD.dtype))
        back = (_product(bar, leaf["weight"]) for bar, leaf in zip(bars, _input_matrices(tree), strict=True))
        x_bar_RD = functools.reduce(jnp.add, back)
        x_RD = x_MD[token_R]
        parts = dict(up=(bars[-1], x_RD), gate=(bars[0], x_RD), down=(down_bar_RD, inner_RF))

        def add(name: str, kind: str, total: jax.Array) -> jax.Array:
            bar, inputs = parts[name]
            new = _product(bar.T, inputs) if kind == "weight" else bar.astype(jnp.float32).sum(0)
            return total.at[expert].add(new.astype(jnp.float32))

        sums = {name: {kind: add(name, kind, x) for kind, x in leaf.items()} for name, leaf in sums.items()}
        x_bar_MD = _add(x_bar_MD, tiles.token_C, x_bar_RD, tiles, expert, first)
        return x_bar_MD, _add(weight_bar, tiles.choice_C, weight_bar_R, tiles, expert, first), sums

    starts = (
        jnp.zeros(x_MD.shape, jnp.float32),
        jnp.zeros(weight_MU.size, jnp.float32),
        jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), experts),
    )
    starts = match_varying_axes(starts, residuals, out_bar_MD)
    x_bar_MD, weight_bar, sums = _for_each_tile(tiles, rows, step, *starts)
    sums = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, experts)
    weight_bar_MU = weight_bar.reshape(weight_MU.shape).astype(weight_MU.dtype)
    return x_bar_MD.astype(x_MD.dtype), weight_bar_MU, None, sums


def _input_matrices(tree: Params) -> list[Params]:
    """Returns the matrices that multiply the input of experts: gate and up, or up if there is no gate."""
    return [tree[name] for name in ("gate", "up") if name in tree]


def _inner_activation(experts: Params, config: ModelConfig) -> Callable[..., jax.Array]:
    """Returns the function from the products with `_input_matrices` to the input of down."""
    return inner_activation(config) if "gate" in experts else activation(config)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x @ y in the dtype of x, summed in float32."""
    precision = float_precision(y.dtype)
    return jnp.matmul(x, y, preferred_element_type=jnp.float32, precision=precision).astype(x.dtype)
