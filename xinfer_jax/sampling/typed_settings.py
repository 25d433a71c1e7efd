"""`SamplingSettings`: the fields of `SamplingConfig` as keyword arguments, for type checkers."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ..annotations import AnyArray, PerRow


class SamplingSettings(TypedDict, total=False):
    """The keyword arguments of `Model.sampling_config`. They have the types that they have in
    `SamplingConfig`.
    """

    temperature: PerRow
    top_k: PerRow
    top_p: PerRow
    repetition_penalty: PerRow
    min_p: PerRow | None
    typical_p: PerRow | None
    presence_penalty: PerRow | None
    frequency_penalty: PerRow | None
    no_repeat_ngram_size: PerRow | None
    min_tokens: PerRow | None
    xtc_probability: PerRow | None
    xtc_threshold: PerRow | None
    dry_multiplier: PerRow | None
    dry_base: PerRow | None
    dry_allowed_length: PerRow | None
    dry_penalty_last_n: PerRow | None
    dry_sequence_breakers: Sequence[int] | AnyArray | None
    logit_bias: Mapping[int, float] | AnyArray | None
    allowed_token_ids: Sequence[int] | AnyArray | None
    forbidden_token_ids: Sequence[int] | AnyArray | None
    bad_words_ids: Sequence[Sequence[int]] | AnyArray | None
