"""The defaults that a checkpoint's generation_config.json asks for."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, shown

_SETTINGS = (
    "temperature", "top_k", "top_p", "repetition_penalty", "min_p", "typical_p",
    "no_repeat_ngram_size", "min_new_tokens",
)  # fmt: skip

# generation_config.json fields that change the result, with the values at which they do nothing.
_UNSUPPORTED_DEFAULTS: dict[str, Any] = dict(
    num_beams=(1,), num_beam_groups=(1,), diversity_penalty=(0,), epsilon_cutoff=(0,), eta_cutoff=(0,),
    encoder_repetition_penalty=(1,), encoder_no_repeat_ngram_size=(0,),
    sequence_bias=([], {}), begin_suppress_tokens=([],), forced_bos_token_id=(), forced_eos_token_id=(),
    force_words_ids=([],), constraints=([],), min_length=(0,), penalty_alpha=(0,), guidance_scale=(1,),
    stop_strings=([], ""), exponential_decay_length_penalty=(), watermarking_config=(), top_h=(),
    dola_layers=(),
)  # fmt: skip


def check_generation_config(settings: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Raises InputError where what is read of generation_config.json has a form that it cannot have.

    Args:
        settings: its contents.
        vocab_size: ids of suppress_tokens lie below; None: unknown.
    """

    def refuse_unless(fits: bool, name: str, form: str, value: Any) -> None:
        if not fits:
            raise InputError(f"generation_config.json: {name} must be {form}, got {shown(value)}")

    for name in _SETTINGS:
        if (value := settings.get(name)) is not None:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            refuse_unless(is_number and abs(value) < 1e30, name, "a number", value)
    drawn = settings.get("do_sample")
    refuse_unless(drawn in (None, True, False), "do_sample", "true or false", drawn)
    ids = settings.get("suppress_tokens")
    limit = vocab_size or 2**31
    form = "a list of token ids" + (f" below {vocab_size}" if vocab_size else "")
    refuse_unless(isinstance(ids, list | None), "suppress_tokens", form, ids)
    words = settings.get("bad_words_ids")
    form = f"a list of lists of token ids below {limit}"
    fits = isinstance(words, list | None) and all(isinstance(word, list) for word in words or ())
    good = lambda token: type(token) is int and 0 <= token < limit  # noqa: E731
    refuse_unless(fits and all(good(t) for word in words or () for t in word), "bad_words_ids", form, words)
    form = "a list of token ids" + (f" below {vocab_size}" if vocab_size else "")
    for token in ids or ():
        refuse_unless(type(token) is int and 0 <= token < limit, "suppress_tokens", form, token)
    ends = settings.get("eos_token_id")
    form = "a token id or a list of them"
    for token in ends if isinstance(ends, list) else [ends]:
        refuse_unless(token is None or type(token) is int, "eos_token_id", form, token)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What it asks for, as fields of `SamplingConfig`.

    Raises:
        InputError: as `SamplingConfig.from_hf`.
    """
    check_generation_config(generation_config)
    for name, neutral in _UNSUPPORTED_DEFAULTS.items():
        value = generation_config.get(name)
        if value is not None and value not in neutral:
            remedy = "ignore that file or remove the setting"
            setting = f"{name}={shown(value)}"
            raise InputError(f"generation_config.json asks for {setting}, which is not supported: {remedy}")
    given = {name: generation_config.get(name) for name in _SETTINGS}
    given["bad_words_ids"] = generation_config.get("bad_words_ids") or None
    given["forbidden_token_ids"] = generation_config.get("suppress_tokens") or None
    sampled = {"temperature": 1.0, "top_k": 50} if generation_config.get("do_sample") else {}
    return sampled | {name: value for name, value in given.items() if value is not None}
