"""`RopeConfig`: the rotary embedding of a layer."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the field names of Hugging Face's `rope_parameters`.

    Attributes:
        rope_type, rope_theta, factor: the kind of frequencies, their base, and the factor of the context.
        original_max_position_embeddings: llama3, yarn, longrope: context length of the first training.
        low_freq_factor, high_freq_factor: llama3.
        attention_factor: yarn, longrope: scale of cos and sin; None: from factor.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
        partial_rotary_factor: the leading part of each head that is rotated.
        short_factor: longrope: divides each pair's frequency, up to that length.
        long_factor: longrope: the same for longer sequences.
        head_dim: of the layers that use it; None: that of the model.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    head_dim: int | None = None

    @property
    def switches_at(self) -> int | None:
        """The length beyond which all angles of a sequence change (longrope); None: they never change."""
        return None if self.short_factor == self.long_factor else self.original_max_position_embeddings

    def rotated_width(self, head_dim: int) -> int:
        """The leading part of a head in which pairs are rotated. `proportional` rotates pairs of the whole
        head, those beyond its part by the angle 0.
        """
        width = self.head_dim or head_dim
        return width if self.rope_type == "proportional" else int(width * self.partial_rotary_factor)
