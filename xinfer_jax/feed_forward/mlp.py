"""`Mlp`: an MLP as the feed-forward of a layer."""

from ..weights.param_specs import dense, norm_spec
from ..weights.params import Params
from .feed_forward import FeedForward


class Mlp(FeedForward):
    """An MLP, whose spec is an `MlpSpec`."""

    names = {leaf: f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")}

    def param_specs(self) -> Params:
        spec = self.spec
        d = (self.config.hidden_size, "embed")
        f = (spec.intermediate_size or self.config.intermediate_size, "mlp")
        up = dense(f, d, spec.bias)
        tree: Params = {**({"gate": up} if spec.gated else {}), "up": up, "down": dense(d, f, spec.bias)}
        return tree | ({"down_norm": norm_spec(f)} if spec.down_norm else {})

    @property
    def unsupported(self) -> dict[str, str]:
        features = "rotations", "scales"
        if self.spec.down_norm:
            return dict.fromkeys(features, "norms of another kind or in other places")
        return {} if self.spec.gated else dict.fromkeys(features, "an MLP without a gate")
