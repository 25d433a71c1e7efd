"""The sampling settings, one entry each. From an entry follow the arrays of rows, the check of values, the
field of bodies, the flag, and the setting of generation_config.json. An entry also says whether beams reject
the setting.

It imports no jax, since commands check their flags before they do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

# Of the kinds with one value per row.
DTYPES = dict(number="float32", count="int32", switch="bool")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One sampling setting."""

    name: str  # of its field in `SamplingConfig`
    default: Any  # it does nothing, alone or at all; of each entry, if rows have arrays
    valid: tuple[Callable[[Any], Any], str] | None = None  # the check of numbers, and the range in words
    help: str = ""  # of its flag; "": it has none
    # One of `DTYPES`; "texts": all tokens that contain one of them, bool [B, V] in rows; "ids", "bias": parts
    # of one bias, [B, V]; "words": sequences of tokens, [B, W, L].
    kind: str = "number"
    other_name: str = ""  # in bodies and flags, if they do not have `name`
    in_bodies: bool = True
    hf: str | None = None  # its name in generation_config.json; None: it is never there
    plain: bool = False  # it belongs to the plain settings
    beams: bool = True  # a beam search takes it, unless it is a warper
    history: bool = False  # it needs the order of a row's tokens
    # Names in `plugins.py` of the function that it turns on. A processor is for all rows: (logits_BV,
    # settings, context) -> logits_BV. A warper is for rows that sample, and for no beams: (warped_BV,
    # logits_BV, settings, key_B, position_B) -> warped_BV.
    processor: str = ""
    warper: str = ""
    most: int | None = None  # in a body: it bounds the work of a decode step
    also_default: float | None = None  # what other servers have for the default
    default_texts: tuple[str, ...] = ()  # if the setting `texts_for` is given; some may be in no token
    texts_for: str = ""

    @property
    def field(self) -> str:
        """Its name in bodies and flags."""
        return self.other_name or self.name


def _is_count(x: Any) -> Any:
    return (x >= 0) & (x < 2**31) & (x == x // 1)


_COUNT = (_is_count, "a whole number from 0 (off) to 2^31 - 1")
_MASS = (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1 (off)")
_FRACTION = (lambda x: (x >= 0) & (x <= 1), "from 0 (off) to 1")
# Within these bounds no logit overflows float32.
_PENALTY = (lambda x: abs(x) <= 1e30, "from -1e30 to 1e30 (0: off)")
_MOST_NGRAM = 256  # a decode step compares this many tokens at each position of a row

_ENTRIES = (
    Setting(
        "temperature", 0.0, (lambda x: (x >= 0) & (x <= 1000), "from 0 (greedy) to 1000"),
        "0: always the most likely token. Default: the checkpoint's.", hf="temperature", plain=True,
    ),
    Setting(
        "top_k", 0, _COUNT, "Sample among the k most likely tokens; 0: all. Default: the checkpoint's.",
        kind="count", hf="top_k", plain=True, also_default=-1,
    ),
    Setting(
        "top_p", 1.0, _MASS,
        "Sample among the most likely tokens whose probabilities sum up to this; 1: all. Default: the"
        " checkpoint's.", hf="top_p", plain=True,
    ),
    Setting(
        "repetition_penalty", 1.0, (lambda x: (x >= 1e-6) & (x <= 1e6), "from 1e-6 to 1e6 (1: off)"),
        "Above 1: repeats become less likely; 1: off. Default: the checkpoint's.", hf="repetition_penalty",
        plain=True,
    ),
    Setting(
        "min_p", 0.0, _FRACTION,
        "Sample among tokens with at least this fraction of the largest probability; 0: all.", hf="min_p",
    ),
    Setting(
        "typical_p", 1.0, _MASS,
        "Locally typical sampling among tokens whose probabilities sum up to this; 1: all.", hf="typical_p",
    ),
    Setting(
        "presence_penalty", 0.0, _PENALTY,
        "Subtracted from the logits of tokens that the answer already has; 0: off.",
    ),
    Setting("frequency_penalty", 0.0, _PENALTY, "Subtracted for each occurrence in the answer; 0: off."),
    Setting(
        "no_repeat_ngram_size", 0, _COUNT, "No sequence of this many tokens occurs twice; 0: off.",
        kind="count", hf="no_repeat_ngram_size", history=True, most=_MOST_NGRAM,
    ),
    Setting(
        "min_tokens", 0, _COUNT, "The answer has at least this many tokens.", kind="count",
        hf="min_new_tokens",
    ),
    Setting(
        "xtc_probability", 0.0, _FRACTION, "XTC: chance to remove the top choices; 0: off.",
        warper="xtc",
    ),
    Setting(
        "xtc_threshold", 0.1, (_FRACTION[0], "from 0 to 1 (above 0.5: off)"),
        "XTC: top choices reach it. Default: 0.1.",
    ),
    Setting(
        "dry_multiplier", 0.0, (lambda x: (x >= 0) & (x <= 1e30), "from 0 (off) to 1e30"),
        "DRY: penalty of a repeated sequence; 0: off.", history=True, processor="dry",
    ),
    Setting(
        "dry_base", 1.75, (lambda x: (x >= 1) & (x <= 1e30), "from 1 to 1e30"),
        "DRY: its factor for each token more. Default: 1.75.",
    ),
    Setting(
        "dry_allowed_length", 2, (_is_count, "a whole number from 0 to 2^31 - 1"),
        "DRY: so many tokens may be repeated. Default: 2.", kind="count", most=_MOST_NGRAM,
    ),
    Setting(
        "dry_penalty_last_n", -1,
        (lambda x: (x == -1) | _is_count(x), "-1 (all), or a whole number from 0 to 2^31 - 1"),
        "DRY: last tokens that count. Default: -1: all.", kind="count",
    ),
    Setting(
        "dry_sequence_breakers", False, kind="texts", texts_for="dry_multiplier",
        default_texts=("\n", ":", '"', "*"),  # llama.cpp's
    ),
    Setting("logit_bias", 0.0, kind="bias"),
    Setting("allowed_token_ids", None, kind="ids"),
    Setting("forbidden_token_ids", None, kind="ids", in_bodies=False, hf="suppress_tokens"),
    Setting("bad_words_ids", -1, kind="words", other_name="bad_words", hf="bad_words_ids"),
)  # fmt: skip
SETTINGS = {setting.name: setting for setting in _ENTRIES}
NUMBERS = tuple(setting for setting in _ENTRIES if setting.kind in DTYPES)
LISTS = tuple(setting for setting in _ENTRIES if setting.kind not in DTYPES)
# Fields in bodies, and flags, of arguments that errors of the library name.
FIELD_OF_ARGUMENT = dict(max_tokens="max_tokens", min_tokens="min_tokens", stop_strings="stop") | {
    setting.name: setting.field for setting in _ENTRIES if setting.other_name
}


class _UnsetFloat(float):
    """The value of a setting that is not set."""


class _UnsetInteger(int):
    """The value of a whole-number setting, or of a switch, that is not set."""


def unset(name: str) -> Any:
    """Returns the value of a setting that is not set: None, or a number that `is_unset` tells from a given
    one.
    """
    setting = SETTINGS[name]
    if setting.kind not in DTYPES:
        return None
    return (_UnsetFloat if setting.kind == "number" else _UnsetInteger)(setting.default)


def is_unset(value: Any) -> bool:
    """Returns True if a value is the default of a setting that is a number."""
    return isinstance(value, _UnsetFloat | _UnsetInteger)
