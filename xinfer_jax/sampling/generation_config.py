"""Reads the sampling settings of generation_config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, format_value
from .settings import SETTINGS

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
    """Raises InputError if a value of generation_config.json has the wrong type or range.

    Args:
        settings: its contents.
        vocab_size: ids of suppress_tokens must be below it. None: unknown.
    """
    limit = vocab_size or 2**31
    is_ids = lambda x: isinstance(x, list) and all(type(i) is int and 0 <= i < limit for i in x)  # noqa: E731
    number = (lambda x: type(x) in (int, float) and abs(x) < 1e30, "a number")
    forms: dict[str, tuple[Callable[[Any], bool], str]] = dict(
        number=number,
        count=number,
        switch=(lambda x: x in (True, False), "true or false"),
        ids=(is_ids, "a list of token ids" + (f" below {vocab_size}" if vocab_size else "")),
        words=(
            lambda x: isinstance(x, list) and all(map(is_ids, x)),
            f"a list of lists of token ids below {limit}",
        ),
        ends=(
            lambda x: all(i is None or type(i) is int for i in (x if isinstance(x, list) else [x])),
            "a token id or a list of them",
        ),
    )
    kinds = {s.hf: s.kind for s in SETTINGS.values() if s.hf} | dict(do_sample="switch", eos_token_id="ends")
    for name, kind in kinds.items():
        is_valid, form = forms[kind]
        if (value := settings.get(name)) is not None and not is_valid(value):
            raise InputError(f"generation_config.json: {name} must be {form}, got {format_value(value)}")


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of generation_config.json as fields of `SamplingConfig`."""
    check_generation_config(generation_config)
    for name, neutral in _UNSUPPORTED_DEFAULTS.items():
        value = generation_config.get(name)
        if value is not None and value not in neutral:
            raise InputError(
                f"generation_config.json asks for {name}={format_value(value)}, which is not supported:"
                " ignore that file (--nogeneration_config), give sampling=SamplingConfig(), or remove the"
                " setting"
            )
    found = ((setting, generation_config.get(setting.hf)) for setting in SETTINGS.values() if setting.hf)
    given = [(setting, value) for setting, value in found if value is not None]
    for setting, value in given:
        if setting.valid and not setting.valid[0](value):
            form = setting.valid[1]
            raise InputError(
                f"generation_config.json: {setting.hf} must be {form}, got {format_value(value)}"
            )
    sampled = {"temperature": 1.0, "top_k": 50} if generation_config.get("do_sample") else {}
    return sampled | {setting.name: value for setting, value in given if value != []}
