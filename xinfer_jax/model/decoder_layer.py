"""One decoder layer for all families: norms and residuals around mixers and a feed-forward, by the config."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError
from ..mixers.mixer import Positions
from ..ops.operation import Call, chosen_form
from ..weights.layers import activation, linear, norm, norm_before, scaled
from ..weights.params import Params
from .extras import Extras


class LayerInputs(NamedTuple):
    """The inputs that a layer takes of the tokens, in addition to their hidden states."""

    input_BTP: jax.Array | None = None  # of the layer itself (Gemma 4)
    route_BTU: jax.Array | None = None  # int32: experts of tokens, -1: those that the router chooses


class LayersOutput(NamedTuple):
    """The output of one or several layers."""

    hidden_BTD: jax.Array
    caches: tuple[Any, ...]  # with the new tokens; without a cache: None, or keys that other layers use
    experts: Any  # of each token, int32 [M, U], if the layer has some; of several layers a list


class LayerGroup(NamedTuple):
    """The layers of a model that run. It is static. Layers of one kind share a trace, or a program."""

    config: ModelConfig
    kinds: tuple[int, ...]  # of each layer: the first one with its spec
    caches: tuple[tuple[int, ...], ...]  # of each layer: the caches that its mixers use, as indices

    def part(self, layers: slice) -> "LayerGroup":
        """Returns some of the layers."""
        return self._replace(kinds=self.kinds[layers], caches=self.caches[layers])


@functools.lru_cache(maxsize=64)
def layer_kinds(config: ModelConfig) -> tuple[int, ...]:
    """Returns the kind of each layer: the first one with its spec."""
    return tuple(map(config.layers.index, config.layers))


def all_layers(config: ModelConfig) -> LayerGroup:
    """Returns the layers of a model."""
    return LayerGroup(config, layer_kinds(config), config.caches_of_layers)


def run_layer(
    layer: Params,
    config: ModelConfig,
    kind: int,
    x_BTD: Any,
    positions: Positions,
    inputs: LayerInputs,
    caches: tuple[Any, ...],
    run_config: RunConfig,
) -> LayersOutput:
    """Runs one layer, or the half of it that `run_config` names. caches: the caches of its mixers."""
    plain = functools.partial(_run_layer, config=config, kind=kind, run_config=run_config)
    operands = dict(layer=layer, x_BTD=x_BTD, positions=positions, inputs=inputs, caches=caches)
    form = chosen_form("decoder_layer", Call(plain, operands, dict(config=config), run_config))
    return (form or plain)(**operands)


def _run_layer(layer, x_BTD, positions, inputs, caches, config, kind, run_config) -> LayersOutput:
    spec = config.layers[kind]
    added_after = spec.post_norm or config.residual_multiplier != 1  # after a norm or a factor
    expert_MU = None
    if run_config.half != "mlp" and spec.mixers:
        before = norm_before(layer, "attn_norm", config) if spec.pre_norm else None
        sum_BTD: Any = None if added_after else x_BTD
        new = []
        for mixer, old in zip(config.mixers(kind), caches, strict=True):
            sum_BTD, cache = mixer.forward(layer, x_BTD, positions, old, run_config, before, sum_BTD)
            new.append(cache)
        caches = tuple(new)
        sum_BTD = checkpoint_name(sum_BTD, "attention_out")
        x_BTD = _add_output(x_BTD, sum_BTD, layer, "attn_post_norm", config, spec)
    if run_config.half == "attention":
        return LayersOutput(x_BTD, caches, None)
    if feed_forward := config.feed_forward(kind):
        before = norm_before(layer, "mlp_norm", config) if spec.pre_norm else None
        residual = None if added_after else x_BTD
        fed_BTD, expert_MU = feed_forward.forward(
            layer, x_BTD, before, residual, run_config, inputs.route_BTU
        )
        fed_BTD = checkpoint_name(fed_BTD, "mlp_out")
        x_BTD = _add_output(x_BTD, fed_BTD, layer, "mlp_post_norm", config, spec)
    if inputs.input_BTP is not None:
        x_BTD = x_BTD + _of_layer_input(x_BTD, inputs.input_BTP, layer, config, run_config)
    x_BTD = x_BTD * layer["layer_scalar"] if spec.scalar else x_BTD
    return LayersOutput(x_BTD, caches, None if inputs.route_BTU is None else expert_MU)


def _add_output(x_BTD, out_BTD, layer: Params, name: str, config: ModelConfig, spec: LayerSpec) -> jax.Array:
    """Adds the output of mixers or feed-forward to x, after its norm and factor. If it has neither, the
    output already is the sum.
    """
    factor = config.residual_multiplier
    if spec.post_norm:
        out_BTD = norm(out_BTD, layer, name, config)
    elif factor == 1:
        return out_BTD
    return x_BTD + scaled(out_BTD, factor)


def _of_layer_input(
    x_BTD: Any, input_BTP: jax.Array, layer: Params, config: ModelConfig, run_config: RunConfig
) -> jax.Array:
    """Returns the values that the layer's own input adds to the hidden states, which gate them."""
    gate_BTP = activation(config)(linear(x_BTD, layer["input_gate"], run_config=run_config))
    added_BTD = linear(gate_BTP * input_BTP, layer["input_proj"], run_config=run_config)
    return norm(added_BTD, layer, "input_norm", config)


# Jitted within a trace too: layers then share a trace, and lowering 24 of them takes a tenth of the time.
_JITTED_LAYER = jax.jit(run_layer, static_argnames=("config", "kind", "run_config"))


def layer_runner(run_config: RunConfig) -> Callable[..., LayersOutput]:
    """Returns `run_layer`, for which the backward pass stores the values that `RunConfig.remat` names."""
    remat = run_config.remat
    if remat is None:
        return _JITTED_LAYER
    if remat != "layer" and not callable(remat):
        raise InputError(f'remat must be None, "layer" or a policy of jax.checkpoint_policies, got {remat!r}')
    policy = remat if callable(remat) else None
    return jax.checkpoint(_JITTED_LAYER, policy=policy, static_argnums=(1, 2, 7))


def run_layers(
    layers: Any,
    group: LayerGroup,
    x_BTD: Any,
    positions: Positions,
    inputs: tuple[LayerInputs, ...],
    extras: Extras,
    caches: tuple[Any, ...],
    run_config: RunConfig,
) -> LayersOutput:
    """Runs several layers in order.

    Args:
        layers, inputs: the parameters and inputs of each layer.
        group: the group of these layers.
        x_BTD, positions, run_config: see `run_layer`.
        extras: the extras of these layers.
        caches: the caches that `LayerGroup.caches` names.
    """
    updated = list(caches)
    experts = []
    run_one = layer_runner(run_config)
    layers = extras.adapted({"layers": tuple(layers)})["layers"]
    for i, (layer, kind, used) in enumerate(zip(layers, group.kinds, group.caches, strict=True)):
        own = tuple(updated[cache] for cache in used)
        out = run_one(layer, group.config, kind, x_BTD, positions, inputs[i], own, run_config)
        x_BTD = extras.steered(out.hidden_BTD, i)
        for cache, new in zip(used, out.caches, strict=True):
            updated[cache] = new
        experts.append(out.experts)
    return LayersOutput(x_BTD, tuple(updated), experts)
