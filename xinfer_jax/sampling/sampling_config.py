"""`SamplingConfig`: how a caller asks for tokens to be sampled, and what generation_config.json asks for."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..checks import is_traced, number_array
from ..errors import InputError, format_value
from .biases import check_bad_words, check_id_lists, is_bad_word_rows


class _UnsetFloat(float):
    """The value of a setting that is not set."""


class _UnsetInteger(int):
    """The value of a whole-number setting that is not set."""


@dataclasses.dataclass(frozen=True)
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
        min_new_tokens: no EOS before the answer has this number of tokens; 0: off.
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

    temperature: Any = _UnsetFloat(0)
    top_k: Any = _UnsetInteger(0)
    top_p: Any = _UnsetFloat(1)
    repetition_penalty: Any = _UnsetFloat(1)
    min_p: Any = _UnsetFloat(0)
    typical_p: Any = _UnsetFloat(1)
    presence_penalty: Any = _UnsetFloat(0)
    frequency_penalty: Any = _UnsetFloat(0)
    no_repeat_ngram_size: Any = _UnsetInteger(0)
    min_new_tokens: Any = _UnsetInteger(0)
    xtc_probability: Any = _UnsetFloat(0)
    xtc_threshold: Any = _UnsetFloat(0.1)
    dry_multiplier: Any = _UnsetFloat(0)
    dry_base: Any = _UnsetFloat(1.75)
    dry_allowed_length: Any = _UnsetInteger(2)
    dry_penalty_last_n: Any = _UnsetInteger(-1)
    dry_sequence_breakers: Any = None
    logit_bias: Any = None
    allowed_token_ids: Sequence[int] | None = None
    forbidden_token_ids: Sequence[int] | None = None
    bad_words_ids: Any = None

    @classmethod
    def from_hf(cls, generation_config: Mapping[str, Any]) -> "SamplingConfig":
        """Returns the defaults of a checkpoint's generation_config.json.

        Without `do_sample` the temperature is 0. With it, missing settings have transformers' own defaults:
        temperature 1, top_k 50.

        Raises:
            InputError: a setting out of range, or one that would change the result and is not supported.
        """
        config = cls(**_generation_defaults(generation_config)).validate()
        sampled = bool(generation_config.get("do_sample"))
        return config if sampled else dataclasses.replace(config, temperature=0.0)

    def validate(self) -> "SamplingConfig":
        """Returns itself. Traced values are not checked.

        Raises:
            InputError: a setting outside its range.
        """
        for name, (is_valid, valid_range) in NUMBER_SETTINGS.items():
            value = getattr(self, name)
            if is_unset(value) or (value is None and name not in PLAIN_SETTINGS):
                continue
            array = number_array(value)
            if array is None or not is_traced(array) and not _is_valid_array(array, is_valid):
                raise InputError(f"{name} must be {valid_range}, got {format_value(value)}")
        check_id_lists(self.allowed_token_ids, self.forbidden_token_ids)
        if self.bad_words_ids is not None and not is_bad_word_rows(self.bad_words_ids):
            check_bad_words(self.bad_words_ids)
        return self


def is_unset(value: Any) -> bool:
    """Whether it is the default of a setting that is a number."""
    return isinstance(value, _UnsetFloat | _UnsetInteger)


_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingConfig))


def _flatten(sampling: SamplingConfig) -> tuple[list[tuple[Any, Any]], None]:
    """What is set by its name, and None in place of the rest."""
    values = ((name, getattr(sampling, name)) for name in _FIELDS)
    return [(jax.tree_util.GetAttrKey(n), None if is_unset(value) else value) for n, value in values], None


def _unflatten(_: None, values: Sequence[Any]) -> SamplingConfig:
    given = zip(_FIELDS, values, strict=True)
    return SamplingConfig(**{name: value for name, value in given if value is not None})


jax.tree_util.register_pytree_with_keys(SamplingConfig, _flatten, _unflatten)


def _is_valid_array(array: np.ndarray, is_valid: Callable) -> bool:
    """Whether it is one number or one per row, all finite in float32 and valid."""
    with np.errstate(over="ignore"):
        finite = np.all(np.isfinite(array.astype(np.float32)))
    return array.ndim <= 1 and array.size > 0 and bool(finite and np.all(is_valid(array)))


def min_tokens_of_row(sampling: SamplingConfig | Sequence[SamplingConfig], row: int = 0) -> int:
    """`min_new_tokens` of a row of checked settings: one for all rows, or one per row."""
    settings = sampling if isinstance(sampling, SamplingConfig) else sampling[row]
    values = np.ravel(0 if settings.min_new_tokens is None else settings.min_new_tokens)
    return int(values[row if values.size > 1 else 0])


def check_min_tokens(sampling: SamplingConfig, eos_ids: Sequence[int]) -> None:
    """Raises InputError where only `eos_ids` are allowed, and `min_new_tokens` forbids them."""
    min_tokens = sampling.min_new_tokens
    allowed = sampling.allowed_token_ids
    if (
        allowed is None
        or is_traced(allowed)
        or is_traced(min_tokens)
        or not np.any(np.asarray(min_tokens) > 0)
    ):
        return
    forbidden = sampling.forbidden_token_ids
    bias = sampling.logit_bias
    banned = {*eos_ids, *(() if forbidden is None or is_traced(forbidden) else map(int, forbidden))}
    if isinstance(bias, Mapping) and not is_traced(bias):
        banned |= {int(i) for i, value in bias.items() if value == -np.inf}
    if {*map(int, allowed)} <= banned:
        raise InputError(
            f"min_new_tokens {format_value(min_tokens)} forbids the ids that end an answer, and"
            " allowed_token_ids has no others: the settings leave no token, allow more"
        )


# --- settings that are numbers: row arrays, generation_config.json and HTTP fields follow from these entries


_COUNT = (lambda x: (x >= 0) & (x < 2**31) & (x == np.floor(x)), "a whole number from 0 (off) to 2^31 - 1")
_MASS = (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1 (off)")
# Within these bounds no logit overflows float32.
_PENALTY = (lambda x: np.abs(x) <= 1e30, "a finite number (0: off), at most 1e30")
# For each the check of its values, and the valid range for errors. The field's default means "off".
NUMBER_SETTINGS: dict[str, tuple[Callable, str]] = dict(
    temperature=(lambda x: (x >= 0) & (x <= 1000), "from 0 (greedy) to 1000"),
    top_k=_COUNT,
    top_p=_MASS,
    repetition_penalty=(lambda x: (x >= 1e-6) & (x <= 1e6), "above 0 (1: off), from 1e-6 to 1e6"),
    min_p=(lambda x: (x >= 0) & (x <= 1), "from 0 (off) to 1"),
    typical_p=_MASS,
    presence_penalty=_PENALTY,
    frequency_penalty=_PENALTY,
    no_repeat_ngram_size=_COUNT,
    min_new_tokens=_COUNT,
    xtc_probability=(lambda x: (x >= 0) & (x <= 1), "from 0 (off) to 1"),
    xtc_threshold=(lambda x: (x >= 0) & (x <= 1), "from 0 to 1 (above 0.5: off)"),
    dry_multiplier=(lambda x: (x >= 0) & (x <= 1e30), "from 0 (off) to 1e30"),
    dry_base=(lambda x: (x >= 1) & (x <= 1e30), "from 1 to 1e30"),
    dry_allowed_length=(_COUNT[0], "a whole number from 0 to 2^31 - 1"),
    dry_penalty_last_n=(lambda x: (x == -1) | _COUNT[0](x), "-1 (all), or a whole number from 0 to 2^31 - 1"),
)
PLAIN_SETTINGS = ("temperature", "top_k", "top_p", "repetition_penalty")
_NOT_IN_TRANSFORMERS = ("presence_", "frequency_", "xtc_", "dry_")  # of OpenAI's API, and of llama.cpp
INTEGER_SETTINGS = {name for name in NUMBER_SETTINGS if isinstance(getattr(SamplingConfig, name), int)}
# The settings that are not plain, with the values at which they do nothing.
OPTIONAL_SETTINGS: dict[str, float] = {
    name: getattr(SamplingConfig, name) for name in NUMBER_SETTINGS if name not in PLAIN_SETTINGS
}


# --- generation_config.json


_GENERATION_SETTINGS = [name for name in NUMBER_SETTINGS if not name.startswith(_NOT_IN_TRANSFORMERS)]
# Fields that change the result and are not supported, with the values at which they do nothing.
_UNSUPPORTED_DEFAULTS: dict[str, Any] = dict(
    num_beams=(1,), num_beam_groups=(1,), diversity_penalty=(0,), epsilon_cutoff=(0,), eta_cutoff=(0,),
    encoder_repetition_penalty=(1,), encoder_no_repeat_ngram_size=(0,),
    sequence_bias=([], {}), begin_suppress_tokens=([],), forced_bos_token_id=(), forced_eos_token_id=(),
    force_words_ids=([],), constraints=([],), min_length=(0,), penalty_alpha=(0,), guidance_scale=(1,),
    stop_strings=([], ""), exponential_decay_length_penalty=(), watermarking_config=(), top_h=(),
    dola_layers=(),
)  # fmt: skip


def check_generation_config(settings: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Raises InputError where a value of generation_config.json has the wrong type or range.

    Args:
        settings: its contents.
        vocab_size: ids of suppress_tokens must be below it; None: unknown.
    """

    def check(is_valid: bool, name: str, form: str, value: Any) -> None:
        if not is_valid:
            raise InputError(f"generation_config.json: {name} must be {form}, got {format_value(value)}")

    for name in _GENERATION_SETTINGS:
        if (value := settings.get(name)) is not None:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            check(is_number and abs(value) < 1e30, name, "a number", value)
    do_sample = settings.get("do_sample")
    check(do_sample in (None, True, False), "do_sample", "true or false", do_sample)
    limit = vocab_size or 2**31
    words = settings.get("bad_words_ids")
    form = f"a list of lists of token ids below {limit}"
    is_lists = isinstance(words, list | None) and all(isinstance(word, list) for word in words or ())
    is_id = lambda token: type(token) is int and 0 <= token < limit  # noqa: E731
    check(is_lists and all(is_id(t) for word in words or () for t in word), "bad_words_ids", form, words)
    ids = settings.get("suppress_tokens")
    form = "a list of token ids" + (f" below {vocab_size}" if vocab_size else "")
    check(isinstance(ids, list | None), "suppress_tokens", form, ids)
    for token in ids or ():
        check(is_id(token), "suppress_tokens", form, token)
    eos_ids = settings.get("eos_token_id")
    form = "a token id or a list of them"
    for token in eos_ids if isinstance(eos_ids, list) else [eos_ids]:
        check(token is None or type(token) is int, "eos_token_id", form, token)


def _generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of generation_config.json as fields of `SamplingConfig`."""
    check_generation_config(generation_config)
    for name, neutral in _UNSUPPORTED_DEFAULTS.items():
        value = generation_config.get(name)
        if value is not None and value not in neutral:
            raise InputError(
                f"generation_config.json asks for {name}={format_value(value)}, which is not supported:"
                " ignore that file (--nogeneration_config), or remove the setting"
            )
    given = {name: generation_config.get(name) for name in _GENERATION_SETTINGS}
    given["bad_words_ids"] = generation_config.get("bad_words_ids") or None
    given["forbidden_token_ids"] = generation_config.get("suppress_tokens") or None
    sampled = {"temperature": 1.0, "top_k": 50} if generation_config.get("do_sample") else {}
    return sampled | {name: value for name, value in given.items() if value is not None}
