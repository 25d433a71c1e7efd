"""`RunConfig`: what is static about a run of a model, and no part of the model."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How programs of a model are made; static under `jit`. Public functions make it of their arguments.

    Attributes:
        impl: of the operations: a kernel by name; "xla": no kernel, though another form may serve; None: the
            best for this process's device.
        remat: what the backward pass stores of a layer: None: all that it needs; "layer": its input; or a
            policy of `jax.checkpoint_policies`.
        over: a mesh axis along which a `jax.shard_map` around the layer has divided heads, experts, the MLP's
            features and the cache; None: there is none.
        half: of layers that runs: "attention" (mixers) or "mlp" (feed-forward); None: both.
        return_routed_experts: the experts that tokens used are returned.
    """

    impl: str | None = None
    remat: str | Callable | None = None
    over: str | None = None
    half: str | None = None
    return_routed_experts: bool = False


DEFAULT = RunConfig()
PLAIN = RunConfig("xla")  # without kernels
