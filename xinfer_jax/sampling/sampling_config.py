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
    """The settings by which a token is sampled.

    Each setting is a number, or an array with one value per row. Settings that no row uses cost nothing. The
    first four settings are the plain ones. The first call with any other setting compiles a second program,
    which serves all settings.

    A `SamplingConfig` is a pytree of the settings that you set. So under `jit` another set of settings is
    another program, and other values of the same settings are not.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> sampling = xj.SamplingConfig(temperature=0.7, top_p=0.9)
        >>> xj.generate_text(model, "What is the capital of France?", xj.GenerateOptions(sampling=sampling))
        'The capital of France is Paris.'

    Attributes:
        temperature: the logits are divided by it. 0 takes the most likely token. At most 1000.
        top_k: sample only among the k most likely tokens. 0: all.
        top_p: sample only among the most likely tokens that together reach this probability. Above 0. 1: all.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely (CTRL, Keskar et
            al. 2019). Above 0. 1: off.
        min_p: sample only among tokens with at least this fraction of the largest probability. 0 to 1. 0:
            all.
        typical_p: sample only among the tokens whose information is closest to the entropy, until they
            together reach this probability (locally typical sampling, Meister et al. 2022). Above 0. 1: all.
        presence_penalty: a number that is subtracted from the logits of tokens that the answer already
            contains. 0: off.
        frequency_penalty: a number that is subtracted from the logit of a token for each time that the answer
            contains it. 0: off.
        no_repeat_ngram_size: no sequence of this number of tokens occurs twice in prompt and answer. 0: off.
        min_tokens: no EOS token is sampled before the answer has this number of tokens. 0: off.
        xtc_probability: the chance, at each position, to remove likely tokens (XTC of llama.cpp). Among the
            tokens that the filters keep, all that reach `xtc_threshold` are then removed, except the least
            likely of them. 0: off.
        xtc_threshold: a probability at temperature 1. Above 0.5: off.
        dry_multiplier: the factor of a penalty for a token that would repeat a sequence of the row (DRY of
            llama.cpp). The penalty is `dry_multiplier * dry_base ** (n - dry_allowed_length)`, and n is the
            number of repeated tokens before the token. 0: off.
        dry_base: the base of the DRY penalty, at least 1.
        dry_allowed_length: the number of tokens that may repeat without a penalty. At most 256 further tokens
            are counted.
        dry_penalty_last_n: the number of last tokens of prompt and answer that DRY compares. -1: all. 0:
            none.
        dry_sequence_breakers: token ids, or bool [B, V], that no repeated sequence contains. None: no
            breakers. The server takes strings, and each stands for all tokens whose text contains it. Flags
            have the default of the server.
        logit_bias: numbers that are added to logits: a dict {id: number}, or float32 [V] or [B, V]. -inf
            forbids a token. None: nothing is added.
        allowed_token_ids: only these ids are sampled. An EOS id that is missing here is never sampled. None:
            all.
        forbidden_token_ids: these ids are never sampled. None: no ids are forbidden.
        bad_words_ids: sequences of ids whose last id is not sampled after the others: at most 64 sequences
            with at most 8 ids each. A sequence of an EOS id alone has no effect, like in transformers. None:
            no sequences are forbidden.
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
        """Returns the sampling settings of a checkpoint's generation_config.json.

        Without `do_sample` the temperature is 0. With `do_sample`, missing settings have the defaults of
        transformers: temperature 1 and top_k 50.

        Args:
            generation_config: the parsed file. If you have a `GenerationConfig` of transformers, pass its
                `to_dict()`.

        Raises:
            InputError: a setting is out of range, the file has an unsupported setting that would change the
                result, or the argument is not a mapping.
        """
        from .generation_config import generation_defaults  # optional: settings of a checkpoint

        if not isinstance(generation_config, Mapping):
            from ..wrong_types import not_a_generation_config  # optional: objects of transformers

            raise not_a_generation_config(generation_config)
        config = cls(**generation_defaults(generation_config)).validate()
        sampled = bool(generation_config.get("do_sample"))
        return config if sampled else dataclasses.replace(config, temperature=0.0)

    def validate(self) -> "SamplingConfig":
        """Checks the values of all settings, and returns the settings. Traced values are not checked.

        Raises:
            InputError: a setting is outside its range.
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
