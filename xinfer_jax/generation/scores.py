"""`Scores`: the result of `score`."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from ..errors import InputError, ShortRepr
from ..old_names import OldAttribute


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Scores(ShortRepr):
    """The result of `score`. A field that you did not ask for is None.

    Entry t of the arrays [B, T-1] belongs to the distribution of token t+1. Entries at padding are 0.

    Attributes:
        logprobs_BT: float32 [B, T-1]: the natural log-probability of each token.
        entropy_BT: float32 [B, T-1]: the entropy of each distribution, in nats.
        kl_BT: float32 [B, T-1]: KL(this model ‖ reference) of each distribution, in nats.
        topk_kl_BT: float32 [B, T-1]: the sum of p (log p - log q) over the teacher's tokens. p is the
            probability by the teacher, and q the probability by this model.
        routed_experts: int32 [B, T, L, U]: the experts of token t itself, -1 at padding.
    """

    logprobs_BT: jax.Array
    entropy_BT: jax.Array | None = None
    kl_BT: jax.Array | None = None
    topk_kl_BT: jax.Array | None = None
    routed_experts: jax.Array | None = None

    routes = OldAttribute("routed_experts")

    if not TYPE_CHECKING:  # for type checkers `Scores` has neither operators nor other attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or not hasattr(jax.Array, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(_sentence(f".{name}", f".logprobs_BT.{name}"))


def _sentence(used: str, remedy: str) -> str:
    return f"score returns Scores, which is no array and has no {used}: use {remedy}"


def _not_an_array(name: str) -> Any:
    def operator(self: Scores, *operands: object, **settings: object) -> Any:
        raise InputError(_sentence(name, ".logprobs_BT"))

    return operator


# Earlier versions returned an array if only log-probabilities were asked for.
for _name in (
    "abs add array bool float floordiv ge getitem gt iter jax_array le len lt matmul mod mul neg pos pow radd"
    " rfloordiv rmatmul rmod rmul rpow rsub rtruediv sub truediv"
).split():
    setattr(Scores, f"__{_name}__", _not_an_array(f"__{_name}__"))
