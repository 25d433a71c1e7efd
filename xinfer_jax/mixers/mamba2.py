"""`Mamba2`: the state-space mixer Mamba-2 (Dao & Gu 2024), which has a state in place of keys and values.

Each head has a state h [Y, H]. A step is h ← exp(-exp(A_log) dt) h + dt x Bᵀ, and the output is h C + D x.
B and C are equal for the heads of a group. dt is softplus(dt + dt_bias), and x, B and C come out of a
depthwise causal convolution with the activation silu. More tokens are processed in blocks of 64 (SSD). All
of it is in float32.

The formulas are from decode steps in transformers 5.24 (`modeling_mamba2.py`, `modeling_nemotron_h.py`, …).
For prompts transformers also limits dt to `time_step_limit`, or in Nemotron-H to at least `time_step_min`, so
its own prompt and steps differ if dt reaches a limit. Here dt has no limits, and prompts equal steps.

Here N are heads, G groups, Y is the width of a head, H is `state_size`, I = N Y, W tokens before the current
one that the convolution reads.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ..config.layer_spec import MixerSpec
from ..config.run_config import RunConfig
from ..ops.operation import match_varying_axes, run
from ..weights.layers import Norm, linear, products, scaled
from ..weights.param_specs import Axis, Params, dense, tensor
from .blocks import BlockDecays, matmul, scan_blocks
from .convolution import by_group, convolve
from .mixer import Divided, Mixer, Positions
from .recurrent import Inputs, Recurrent

_PRODUCTS = ("ssm_z", "ssm_x", "ssm_b", "ssm_c", "ssm_dt")
_CONVOLVED = ("conv_c", "conv_b", "conv_x")  # in the order of `Recurrent.inputs`
_KERNELS = ("mamba_step", "mamba_prefill")
_NUMBERS = ("A_log", "dt_bias", "D")  # of each head


@dataclasses.dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """Mamba-2."""

    kind = "mamba2"

    num_heads: int
    head_dim: int
    n_groups: int  # head n has B and C of group n // (num_heads // n_groups)
    state_size: int
    conv_kernel: int  # tokens that its convolution reads, the token itself included
    bias: bool = False  # its matrices have biases
    conv_bias: bool = True
    # RMS norm before the output matrix: "after_gate": of y silu(z); "before_gate": of y, before it is
    # multiplied by silu(z); None: there is none.
    norm: str | None = "after_gate"
    norm_groups: int = 1  # the norm is over each of these equal parts of its input
    in_multiplier: float = 1.0  # of the hidden states
    multipliers: tuple[float, ...] = (1.0,) * 5  # of z, x, B, C and dt
    out_multiplier: float = 1.0  # of the output


class _Tokens(NamedTuple):
    """The inputs of the recurrence for T tokens, float32."""

    c_BGTH: jax.Array
    b_BGTH: jax.Array
    x_BNTY: jax.Array
    decay_BNT: jax.Array  # its logarithm; 0 of padding
    dt_BNT: jax.Array  # 0 of padding
    first_B1T: Any = None  # int32: where each token's segment begins; None: a row is one segment


class Mamba2(Mixer):
    """Mamba-2, whose spec is a `Mamba2Spec`."""

    unsupported = dict.fromkeys(("scales", "draft model"), "Mamba-2 layers")

    def param_specs(self) -> Params:
        spec = self.spec
        d = (self.config.hidden_size, "embed")
        heads = (spec.num_heads, "linear_heads")
        inner = (spec.num_heads * spec.head_dim, "linear_heads")
        groups = (spec.n_groups * spec.state_size, "kv_heads")
        sizes = dict(z=inner, x=inner, b=groups, c=groups, dt=heads)
        tree: Params = {
            f"ssm_{name}": self._of_groups(dense(size, d, spec.bias)) for name, size in sizes.items()
        }
        for name, channels in dict(x=inner, b=groups, c=groups).items():
            tree |= self._of_groups(self._convolution(f"conv_{name}", channels))
        tree |= dict(
            A_log=tensor(heads, init="log_decay"),
            dt_bias=tensor(heads, init="ones"),
            D=tensor(heads, init="ones"),
        )
        tree |= dict(gated_norm=tensor(inner, init="ones")) if spec.norm else {}
        return tree | dict(ssm_o=dense(d, inner, spec.bias))

    def _convolution(self, name: str, channels: Axis) -> Params:
        """Returns the specs of the convolution of some channels."""
        tree = {name: tensor(channels, (self.spec.conv_kernel, None), stays_float=True)}
        return tree | ({f"{name}_bias": tensor(channels, init="small")} if self.spec.conv_bias else {})

    def _of_groups(self, tree: Params) -> Params:
        """Returns the specs, which name the number of groups if they have an axis of groups."""
        own = self.spec.n_groups
        return {
            name: dataclasses.replace(spec, kv_heads=own) if "kv_heads" in spec.axes else spec
            for name, spec in tree.items()
        }

    def forward(
        self,
        params: Params,
        x_BTD: Any,
        positions: Positions,
        cache: Any,
        run_config: RunConfig,
        before: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Recurrent | None]:
        leaves = [self._input_leaf(params[name]) for name in _PRODUCTS]
        new = products(x_BTD, leaves, before=before, run_config=run_config)
        factors = [self.spec.in_multiplier * factor for factor in self.spec.multipliers]
        (z_BTI, *new) = [scaled(x, factor) for x, factor in zip(new, factors, strict=True)]
        between = [*_CONVOLVED, *(f"{name}_bias" for name in _CONVOLVED if self.spec.conv_bias), *_NUMBERS]
        layer = {name: params[name] for name in between}
        operands: dict[str, Any] = dict(products=new, layer=layer, cache=cache)
        operands |= {name: getattr(positions, name) for name in ("start_B", "num_tokens_B", "first_BT")}
        plain = partial(mix_states, spec=self.spec)
        out_BTI, cache = run("mamba_step", plain, run_config, static=dict(config=self.config), **operands)
        out_BTI = self._gated(out_BTI, z_BTI, params, run_config)
        around: dict[str, Any] = dict(over=run_config.over, run_config=run_config)
        if self.spec.out_multiplier == 1:
            return linear(out_BTI, params["ssm_o"], residual=residual, **around), cache
        out_BTD = scaled(linear(out_BTI, params["ssm_o"], **around), self.spec.out_multiplier)
        return out_BTD if residual is None else residual + out_BTD, cache

    def _input_leaf(self, leaf: Params) -> Params:
        """Returns a matrix whose bias the factor of the hidden states, which products get, leaves as it
        is.
        """
        factor = self.spec.in_multiplier
        return leaf | {"bias": leaf["bias"] / factor} if factor != 1 and "bias" in leaf else leaf

    def _gated(
        self, out_BTI: jax.Array, z_BTI: jax.Array, params: Params, run_config: RunConfig
    ) -> jax.Array:
        """Returns the input of the output matrix: the gate and the norm of the outputs of heads."""
        gate_BTI = jax.nn.silu(z_BTI.astype(jnp.float32))
        if self.spec.norm != "before_gate":
            out_BTI = out_BTI * gate_BTI
        if self.spec.norm is not None:
            width = self.spec.num_heads * self.spec.head_dim // self.spec.norm_groups
            out_BTI = _group_norm(out_BTI, width, self.config.rms_norm_eps, run_config.over)
            out_BTI = out_BTI * params["gated_norm"].astype(jnp.float32)
        if self.spec.norm == "before_gate":
            out_BTI = out_BTI * gate_BTI
        return out_BTI.astype(z_BTI.dtype)

    def empty_cache(self, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None) -> Recurrent:
        return Recurrent.empty(self.fits, batch, capacity, mesh)

    def row_bytes(self, capacity: int, dtype: Any) -> int:
        return 4 * sum(map(math.prod, self.fits))

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        spec = self.spec
        W = spec.conv_kernel - 1
        of_group = (spec.n_groups, W, spec.state_size)
        of_heads = (spec.num_heads, W, spec.head_dim)
        return of_group, of_group, of_heads, (spec.num_heads, spec.head_dim, spec.state_size)

    def kernels(self, params: Params, rows: int, dtype: Any, cache: Any) -> dict[str, tuple[Any, ...]]:
        x = jax.ShapeDtypeStruct((rows, self.spec.num_heads * self.spec.head_dim), dtype)
        return dict.fromkeys(_KERNELS, (x, params, self.config, cache))

    @property
    def divided(self) -> tuple[Divided, ...]:
        heads = Divided("linear_heads", "heads of Mamba-2", self.spec.num_heads)
        groups = Divided("kv_heads", "groups of Mamba-2", self.spec.n_groups)
        return heads, groups


def mix_states(
    products: list[jax.Array],
    layer: Params,
    cache: Recurrent | None,
    start_B: Any,
    num_tokens_B: jax.Array,
    first_BT: Any,
    spec: Mamba2Spec,
) -> tuple[jax.Array, Recurrent | None]:
    """Returns the outputs of heads, float32 [B, T, I], and the state after the new tokens.

    Args:
        products: x [B, T, I], B and C [B, T, G H], and dt [B, T, N].
        layer: the parameters of the convolution and the numbers of each head.
        cache: the state before these tokens. None: they are the first tokens.
        start_B, num_tokens_B, first_BT: the fields of `Positions`.
        spec: the spec of the mixer.
    """
    x_BTI, b_BTX, c_BTX, dt_BTN = products
    sizes = (spec.state_size, spec.state_size, spec.head_dim)
    new = [
        by_group(x.astype(jnp.float32), size) for x, size in zip((c_BTX, b_BTX, x_BTI), sizes, strict=True)
    ]
    steps = _steps(layer, dt_BTN, num_tokens_B)
    if cache is None:
        inputs, state = _empty(new, spec)
    else:
        inputs, state = cache.before(
            start_B, lambda old, steps, state: state_space(_tokens(layer, old, steps), state)[1]
        )
    inputs = tuple(jnp.concatenate(pair, 2) for pair in zip(inputs, new, strict=True))
    tokens = _tokens(layer, inputs, steps, first_BT)
    out_BNTY, after = state_space(tokens, state)
    out_BNTY = out_BNTY + layer["D"].astype(jnp.float32)[:, None, None] * tokens.x_BNTY
    if cache is not None:
        state = state if cache.holds_drafts(x_BTI.shape[1]) else after
        cache = cache.after(inputs, state, steps, start_B, num_tokens_B)
    return jnp.swapaxes(out_BNTY, 1, 2).reshape(x_BTI.shape), cache


def state_space(tokens: _Tokens, state_BNYH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [B, N, T, Y] without D x, and the state after T tokens."""
    if tokens.x_BNTY.shape[2] != 1:  # it may be symbolic
        return scan_blocks(_block, tokens, state_BNYH)
    groups = tokens.x_BNTY.shape[1] // tokens.b_BGTH.shape[1]
    c_BNH, b_BNH = (jnp.repeat(x[:, :, 0], groups, 1) for x in tokens[:2])
    shrink_BN11 = jnp.exp(tokens.decay_BNT)[..., None]
    added_BNY1 = jnp.swapaxes(tokens.x_BNTY, 2, 3) * tokens.dt_BNT[..., None]
    state_BNYH = shrink_BN11 * state_BNYH + added_BNY1 * b_BNH[:, :, None]
    return (state_BNYH * c_BNH[:, :, None]).sum(-1)[:, :, None], state_BNYH


def _block(state_BNYH: jax.Array, tokens: _Tokens, decays: BlockDecays) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a block, and the outputs [B, N, C, Y]."""
    c, b, x, _, dt_BNC, _ = tokens
    groups = x.shape[1] // b.shape[1]
    of_pair_BNCC = jnp.repeat(matmul(c, jnp.swapaxes(b, -1, -2)), groups, 1) * decays.between_BNCC
    c, b = (jnp.repeat(of_group, groups, 1) for of_group in (c, b))
    added = x * dt_BNC[..., None]
    out = decays.from_begin_BNC1 * matmul(c, jnp.swapaxes(state_BNYH, -1, -2)) + matmul(of_pair_BNCC, added)
    written = matmul(jnp.swapaxes(added * decays.to_end_BNC1, -1, -2), b)
    return state_BNYH * decays.from_begin_BNC1[..., -1:, :] + written, out


def _steps(layer: Params, dt_BTN: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """Returns, float32 [B, N, T, 2], the logarithm of the decay, and dt. They are 0 at padding, which changes
    no state.
    """
    dt_BTN = jax.nn.softplus(dt_BTN.astype(jnp.float32) + layer["dt_bias"].astype(jnp.float32))
    decay_BTN = -jnp.exp(layer["A_log"].astype(jnp.float32)) * dt_BTN
    is_real_BT = jnp.arange(dt_BTN.shape[1]) < num_tokens_B[:, None]
    steps_BTN2 = jnp.where(is_real_BT[..., None, None], jnp.stack([decay_BTN, dt_BTN], -1), 0)
    return jnp.swapaxes(steps_BTN2, 1, 2)


def _tokens(layer: Params, inputs: Inputs, steps_BNT2: jax.Array, first_BT: Any = None) -> _Tokens:
    """Returns the inputs of the recurrence: C, B and x after the convolution and silu."""

    def convolved(x: jax.Array, name: str) -> jax.Array:
        out = convolve(x, layer[name], first_BT)
        if f"{name}_bias" in layer:
            out = out + layer[f"{name}_bias"].astype(jnp.float32).reshape(out.shape[1], 1, -1)
        return jax.nn.silu(out)

    c, b, x = (convolved(x, name) for x, name in zip(inputs, _CONVOLVED, strict=True))
    first_B1T = None if first_BT is None else first_BT[:, None]
    return _Tokens(c, b, x, steps_BNT2[..., 0], steps_BNT2[..., 1], first_B1T)


def _empty(new: list[jax.Array], spec: Mamba2Spec) -> tuple[Inputs, jax.Array]:
    """Returns inputs and state before the first token: zeros."""
    W = spec.conv_kernel - 1
    inputs = tuple(jnp.zeros((*x.shape[:2], W, x.shape[3]), jnp.float32) for x in new)
    state = jnp.zeros((*new[2].shape[:2], spec.head_dim, spec.state_size), jnp.float32)
    return match_varying_axes((inputs, state), new)


def _group_norm(x_BTI: jax.Array, width: int, eps: float, over: str | None) -> jax.Array:
    """Returns the RMS norm over groups of this width, which the axis `over` may divide."""
    (*rows, own) = x_BTI.shape
    x_BTGX = x_BTI.reshape(*rows, -1, min(width, own))
    mean = jnp.square(x_BTGX).mean(-1, keepdims=True)
    if own < width:  # several devices have a group
        means = lax.all_gather(mean, over, axis=-1, tiled=True)
        of_groups = means.reshape(*means.shape[:-1], -1, width // own).mean(-1)
        group = lax.axis_index(over) // (width // own)
        mean = lax.dynamic_index_in_dim(of_groups, group, -1)
    return (x_BTGX * lax.rsqrt(mean + eps)).reshape(x_BTI.shape)
