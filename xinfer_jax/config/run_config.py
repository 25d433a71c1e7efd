"""`RunConfig`: the static settings of a run that are no part of the model."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings by which programs of a model are made. They are static under `jit`. Public functions make
    them from their arguments.

    Attributes:
        impl: the form of the operations. A name: that kernel. "xla": no kernel, though another form may
            serve. None: the best for this process's device.
        remat: the values of a layer that are stored for the backward pass. None: all that it needs. "layer":
            the input of the layer. Otherwise a policy of `jax.checkpoint_policies`.
        over: a mesh axis along which a `jax.shard_map` around the layer has divided the heads, experts,
            features of the MLP and the cache. None: there is no such axis.
        half: the half of each layer that runs: "attention" (mixers) or "mlp" (feed-forward). None: both.
        return_routed_experts: True: the experts that tokens used are returned.
    """

    impl: str | None = None
    remat: str | Callable | None = None
    over: str | None = None
    half: str | None = None
    return_routed_experts: bool = False


DEFAULT = RunConfig()
PLAIN = RunConfig("xla")  # without kernels
