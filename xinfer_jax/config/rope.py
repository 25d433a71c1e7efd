"""`RopeConfig`: the rotary embedding of a layer."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the field names of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope: context length of the first training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: from factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    partial_rotary_factor: float = 1.0  # the leading part of each head that is rotated
    short_factor: tuple[float, ...] = ()  # longrope: divides each pair's frequency, up to that length
    long_factor: tuple[float, ...] = ()  # longrope: the same for longer sequences
    head_dim: int | None = None  # of the layers that use it; None: that of the model

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
