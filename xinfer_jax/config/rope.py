"""`RopeConfig`: the rotary embedding of a layer."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A rotary position embedding (RoPE, Su et al. 2021).

    Fields have the names of Hugging Face's `rope_parameters`.

    Attributes:
        rope_type: the type of scaling, for example "yarn".
        rope_theta: the base of the frequencies.
        factor: the factor of the context length.
        original_max_position_embeddings: llama3, yarn and longrope: the context length of the first training.
        low_freq_factor: llama3: the bound between low and medium frequencies.
        high_freq_factor: llama3: the bound between medium and high frequencies.
        attention_factor: yarn and longrope: the scale of cos and sin. None computes it from `factor`.
        beta_fast: yarn: the field `beta_fast` of transformers.
        beta_slow: yarn: the field `beta_slow` of transformers.
        mscale: yarn: the field `mscale` of transformers.
        mscale_all_dim: yarn: the field `mscale_all_dim` of transformers.
        truncate: yarn: the field `truncate` of transformers.
        partial_rotary_factor: the leading part of each head that is rotated, 0 to 1.
        short_factor: longrope: the divisors of each pair's frequency, for sequences up to the original
            length.
        long_factor: longrope: the divisors of each pair's frequency, for longer sequences.
        head_dim: the head width of the layers that use it. None: the model's `head_dim`.
        interleaved: a pair is two neighbours of a head, 2i and 2i + 1, as in GLM-4 and DeepSeek. False: it is
            i and i + P of the P pairs, as in Llama.
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
    interleaved: bool = False

    @property
    def switches_at(self) -> int | None:
        """The length beyond which all angles of a sequence change (longrope), or None if they do not."""
        return None if self.short_factor == self.long_factor else self.original_max_position_embeddings

    def rotated_width(self, head_dim: int) -> int:
        """Returns the width of the leading part of a head in which pairs are rotated.

        The type `proportional` rotates pairs of the whole head. It rotates pairs beyond the part by the angle
        0.
        """
        width = self.head_dim or head_dim
        return width if self.rope_type == "proportional" else int(width * self.partial_rotary_factor)
