"""`LayerSpec`: the parts of a decoder layer. Layers with equal specs have parameters of equal shapes."""

import dataclasses
from typing import Any, ClassVar

from .rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class MixerSpec:
    """The part of a layer that reads other tokens. `plugins.TABLE` has the `Mixer` of each kind."""

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class FeedForwardSpec:
    """The part of a layer that works on single tokens. `plugins.TABLE` has the `FeedForward` of each kind."""

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The settings of a router, which chooses the experts of each token. `plugins.TABLE` has the `Router` of
    each kind.
    """

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class DraftHeadSpec:
    """The draft head in the files of a model. `plugins.TABLE` has the `DraftHead` of each kind."""

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Softmax attention."""

    kind = "attention"

    window: int | None = None  # a query at p sees keys p-window+1 … p; None: all of 0 … p
    ahead: int = 0  # a query at p sees the keys that one at p + ahead would see: also some after it
    uses_rope: bool = True  # queries and keys are rotated
    rope: RopeConfig | None = None  # the rotary embedding; None: the model's
    head_dim: int | None = None  # H; None: the model's
    num_key_value_heads: int | None = None  # K; None: the model's
    qkv_bias: bool = False  # queries, keys and values have biases
    o_bias: bool = False  # the output matrix has a bias
    # RMS norm of queries and keys: "head": of each head, "rotated_head": of each head after RoPE, "joint":
    # over all heads of a token; None.
    qk_norm: str | None = None
    v_norm: bool = False  # RMS norm, without a weight, of each value head
    o_norm: bool = False  # RMS norm of the input of the output matrix
    query_pre_attn_scalar: float | None = None  # scores are multiplied by its power -1/2; None: H
    attention_multiplier: float | None = None  # scores are multiplied by it instead
    # (beta, length): a query at p is multiplied by 1 + beta log(1 + floor(p / length)); None: it is not.
    query_scaling: tuple[float, int] | None = None
    logit_softcapping: float | None = None  # c: scores become c tanh(score / c); None: no cap
    sinks: bool = False  # each query head has one more logit in the softmax, of no key
    output_gate: bool = False  # the output is multiplied by sigmoid of a gate, as wide as the queries
    values_are_keys: bool = False  # there is no value matrix: values are keys before their norm and RoPE
    # There are no keys and values: the layer uses those of the last layer before it that has some, and a
    # window, or none, as it does.
    shares_kv: bool = False


@dataclasses.dataclass(frozen=True)
class MlpSpec(FeedForwardSpec):
    """An MLP."""

    kind = "mlp"

    intermediate_size: int | None = None  # F; None: the model's
    bias: bool = False  # its matrices have biases
    down_norm: bool = False  # RMS norm of the input of the last one
    gated: bool = True  # down(activation(gate) * up); else down(activation(up))


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """down(g sigmoid(alpha g) (clip(up, -limit, limit) + 1)) of g = min(gate, limit)."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class SoftmaxRouterSpec(RouterSpec):
    """A router that chooses the experts with the largest scores. Their weights are a softmax of scores."""

    kind = "softmax"

    norm_topk_prob: bool = True  # the weights of a token's experts are normalized to sum to 1
    # Its input is normed, without a weight, multiplied by one number for each feature and divided by sqrt(D).
    input_scale: bool = False
    per_expert_scale: bool = False  # the weight of each expert is multiplied by a number


@dataclasses.dataclass(frozen=True)
class ExpertsSpec(FeedForwardSpec):
    """A mixture of experts, each a gated MLP."""

    kind = "experts"

    num_experts: int  # X
    num_experts_per_tok: int  # experts of each token
    intermediate_size: int  # F of each
    router: RouterSpec = SoftmaxRouterSpec()
    shared_intermediate_size: int = 0  # F of an expert that all tokens use; 0: none
    shared_gated: bool = True  # the output of that expert is multiplied by sigmoid of a gate
    bias: bool = False  # experts and router have biases
    swiglu: ClampedSwiglu | None = None  # what an expert computes; None: as the MLP


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A decoder layer."""

    mixers: tuple[MixerSpec, ...] = (AttentionSpec(),)  # side by side: their outputs are added
    feed_forward: FeedForwardSpec | None = MlpSpec()
    pre_norm: bool = True  # RMS norm of the inputs of mixers and feed-forward
    post_norm: bool = False  # RMS norm of their outputs
    # Norms, the final one too, subtract the mean first (LayerNorm without a bias). Equal in all layers.
    centered_norms: bool = False
    scalar: bool = False  # the layer's output is multiplied by a number

    def with_mixer(self, **changes: Any) -> "LayerSpec":
        """Returns the layer with these fields changed of the mixers that have them."""
        mixers = (
            dataclasses.replace(mixer, **changes) if all(hasattr(mixer, name) for name in changes) else mixer
            for mixer in self.mixers
        )
        return dataclasses.replace(self, mixers=tuple(mixers))

    def mixer_of(self, kind: str) -> Any:
        """Returns the spec of the mixer of a kind. None: the layer has none."""
        return next((mixer for mixer in self.mixers if mixer.kind == kind), None)

    @property
    def attention(self) -> AttentionSpec | None:
        """The softmax attention. None: the layer has none."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec)), None)

    @property
    def mlp(self) -> MlpSpec | None:
        """The MLP. None: the layer has none."""
        part = self.feed_forward
        return part if isinstance(part, MlpSpec) else getattr(part, "mlp", None)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The mixture of experts. None: the layer has none."""
        part = self.feed_forward
        return part if isinstance(part, ExpertsSpec) else getattr(part, "experts", None)
