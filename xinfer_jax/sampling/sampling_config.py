"""`SamplingConfig`: how a caller asks for tokens to be sampled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ..annotations import AnyArray, PerRow
from ..checks import is_traced, number_array
from ..errors import InputError, format_value
from ..old_names import keyword_options
from .settings import LISTS, NUMBERS, Setting, is_unset, unset

# A `SamplingConfig` as `settings_per_row` returns it: its fields are arrays [B, ...], or not there.
SettingsOfRows: TypeAlias = Any


@keyword_options(min_new_tokens="min_tokens")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to sample a token; numbers, or arrays [B] with one setting per row. A pytree of those that are set:
    under `jit` another set of them is another program.

    Settings that no row uses cost nothing. The first four settings are the plain ones. The first call with
    any other setting compiles a second program, which serves them all.

    Attributes:
        temperature: logits are divided by it; 0: the most likely token; at most 1000.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the most likely tokens that together reach this probability; above 0, 1: all.
        repetition_penalty: above 1: tokens of the prompt and the answer become less likely (CTRL, Keskar et
            al. 2019); above 0, 1: off.
        min_p: only tokens at least this many times as likely as the most likely one; 0 to 1, 0: all.
        typical_p: only the tokens whose information is closest to the entropy, until they together reach
            this probability; above 0, 1: all.
        presence_penalty: subtracted from the logits of tokens that the answer already contains; 0: off.
        frequency_penalty: the same, once for each time the answer contains the token; 0: off.
        no_repeat_ngram_size: no sequence of this length occurs twice in prompt and answer; 0: off.
        min_tokens: no EOS before the answer has this number of tokens; 0: off.
        xtc_probability: chance at each position that, of the tokens that the filters keep, those that reach
            `xtc_threshold` are removed, but the least likely of them (XTC of llama.cpp); 0: off.
        xtc_threshold: a probability at temperature 1; above 0.5: off.
        dry_multiplier: a token that would repeat a sequence of the row gets a penalty of dry_multiplier *
            dry_base ** (tokens before it - dry_allowed_length) (DRY of llama.cpp); 0: off.
        dry_base: at least 1.
        dry_allowed_length: so many tokens may be repeated; at most 256 more are counted.
        dry_penalty_last_n: DRY compares so many last tokens of prompt and answer; -1: all, 0: none.
        dry_sequence_breakers: token ids, or bool [B, V], that no repeated sequence contains; None: none. The
            server takes strings, each for all tokens whose text contains it; flags have its default.
        logit_bias: {id: number added to its logit}, or float32 [V] or [B, V]; -inf forbids; None: nothing.
        allowed_token_ids: only these are sampled (an EOS id that is not among them is never); None: all.
        forbidden_token_ids: these are never sampled; None: none.
        bad_words_ids: sequences of ids that must not end in the answer: at most 64 of at most 8 ids. An EOS
            id alone has no effect, as in transformers; None: none.
    """

    temperature: PerRow = unset("temperature")
    top_k: PerRow = unset("top_k")
    top_p: PerRow = unset("top_p")
    repetition_penalty: PerRow = unset("repetition_penalty")
    min_p: PerRow | None = unset("min_p")
    typical_p: PerRow | None = unset("typical_p")
    presence_penalty: PerRow | None = unset("presence_penalty")
    frequency_penalty: PerRow | None = unset("frequency_penalty")
    no_repeat_ngram_size: PerRow | None = unset("no_repeat_ngram_size")
    min_tokens: PerRow | None = unset("min_tokens")
    xtc_probability: PerRow | None = unset("xtc_probability")
    xtc_threshold: PerRow | None = unset("xtc_threshold")
    dry_multiplier: PerRow | None = unset("dry_multiplier")
    dry_base: PerRow | None = unset("dry_base")
    dry_allowed_length: PerRow | None = unset("dry_allowed_length")
    dry_penalty_last_n: PerRow | None = unset("dry_penalty_last_n")
    dry_sequence_breakers: Sequence[int] | AnyArray | None = unset("dry_sequence_breakers")
    logit_bias: Mapping[int, float] | AnyArray | None = unset("logit_bias")
    allowed_token_ids: Sequence[int] | AnyArray | None = unset("allowed_token_ids")
    forbidden_token_ids: Sequence[int] | AnyArray | None = unset("forbidden_token_ids")
    bad_words_ids: Sequence[Sequence[int]] | AnyArray | None = unset("bad_words_ids")

    @classmethod
    def from_hf(cls, generation_config: Mapping[str, Any]) -> "SamplingConfig":
        """Returns the defaults of a checkpoint's generation_config.json.

        Without `do_sample` the temperature is 0. With it, missing settings have transformers' own defaults:
        temperature 1, top_k 50.

        Raises:
            InputError: a setting out of range, or one that would change the result and is not supported;
                no mapping, for example a `GenerationConfig` of transformers: give its `to_dict()`.
        """
        from .generation_config import generation_defaults  # optional: settings of a checkpoint

        if not isinstance(generation_config, Mapping):
            from ..wrong_types import not_a_generation_config  # optional: objects of transformers

            raise not_a_generation_config(generation_config)
        config = cls(**generation_defaults(generation_config)).validate()
        sampled = bool(generation_config.get("do_sample"))
        return config if sampled else dataclasses.replace(config, temperature=0.0)

    def validate(self) -> "SamplingConfig":
        """Returns itself. Traced values are not checked.

        Raises:
            InputError: a setting outside its range.
        """
        for setting in NUMBERS:
            value = getattr(self, setting.name)
            if is_unset(value) or (value is None and not setting.plain) or _is_valid(setting, value):
                continue
            valid_range = setting.valid[1] if setting.valid else "true or false"
            raise InputError(f"{setting.name} must be {valid_range}, got {format_value(value)}")
        if any(getattr(self, setting.name) is not None for setting in LISTS):
            from .biases import check_lists  # optional: other settings

            check_lists(self)
        return self


_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingConfig))


def _flatten(sampling: SamplingConfig) -> tuple[list[tuple[Any, Any]], None]:
    """Returns the settings that are set, by their names, and None in place of the other settings."""
    values = ((name, getattr(sampling, name)) for name in _FIELDS)
    return [(jax.tree_util.GetAttrKey(n), None if is_unset(value) else value) for n, value in values], None


def _unflatten(_: None, values: Sequence[Any]) -> SamplingConfig:
    given = zip(_FIELDS, values, strict=True)
    return SamplingConfig(**{name: value for name, value in given if value is not None})


jax.tree_util.register_pytree_with_keys(SamplingConfig, _flatten, _unflatten)


def _is_valid(setting: Setting, value: Any) -> bool:
    """Returns True if a setting is one value or one per row, each valid and finite in float32. The values of
    traced settings are not read.
    """
    if setting.valid is None:  # a switch
        return np.dtype(getattr(value, "dtype", type(value))) == np.bool_ and np.ndim(value) <= 1
    array = number_array(value)
    if array is None or is_traced(array):
        return array is not None
    with np.errstate(over="ignore"):
        finite = np.all(np.isfinite(array.astype(np.float32)))
    return array.ndim <= 1 and array.size > 0 and bool(finite and np.all(setting.valid[0](array)))


def min_tokens_of_row(sampling: SamplingConfig | Sequence[SamplingConfig] | None, row: int = 0) -> int:
    """Returns `min_tokens` of a row of checked settings, which have one for all rows, or one per row. It is 0
    for None.
    """
    if sampling is None:
        return 0
    settings = sampling if isinstance(sampling, SamplingConfig) else sampling[row]
    values = np.ravel(0 if settings.min_tokens is None else settings.min_tokens)
    return int(values[row if values.size > 1 else 0])
