"""The sampling settings, one entry each. From an entry follow the arrays of rows, the check of values, the
field of bodies, the flag, the setting of generation_config.json, and whether beams reject it.

It imports no jax, since commands check their flags before they do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Range = tuple[Callable[[Any], Any], str]  # the check of a number or an array, and the range in words


@dataclasses.dataclass(frozen=True)
class Setting:
    """One sampling setting.

    Attributes:
        name: of its field in `SamplingConfig`.
        default: the value that does nothing, alone or at all; of each entry, if rows have arrays.
        valid: of a number.
        help: of its flag, which commands list in the order of `SETTINGS`; "": it has no flag.
        kind: "number" (`default` is an int where it counts) or "switch", with one value per row; "texts": of
            a body and a flag, for all tokens that contain one of them, which are bool [B, V] in rows; "ids",
            "bias": parts of one bias [B, V]; "words": sequences of tokens, [B, W, L].
        other_name: its name in bodies and flags; "": `name`.
        in_bodies: bodies have it.
        hf: its name in generation_config.json; None: that file never has it.
        plain: it belongs to the plain settings.
        beams: a beam search takes it.
        history: it needs the order of a row's tokens.
        penalty: the name in `plugins.py` of the processor that it turns on, for greedy rows too: a function
            (logits_BV, settings of rows, `Context`) -> logits_BV.
        filter: the same, of sampled rows: a function (warped_BV, logits_BV before temperature and filters,
            settings of rows, key_B, position_B) -> warped_BV.
        most: the largest number in a body, where it bounds a decode step's work.
        also_default: another number of a body for `default`, as other servers have it.
        default_texts: texts if `texts_for` is set and the setting is not; some may be in no token.
        texts_for: the name of that setting.
    """

    name: str
    default: Any
    valid: Range | None = None
    help: str = ""
    kind: Literal["number", "switch", "texts", "ids", "bias", "words"] = "number"
    other_name: str = ""
    in_bodies: bool = True
    hf: str | None = None
    plain: bool = False
    beams: bool = True
    history: bool = False
    penalty: str = ""
    filter: str = ""
    most: int | None = None
    also_default: float | None = None
    default_texts: tuple[str, ...] = ()
    texts_for: str = ""

    @property
    def field(self) -> str:
        """Its name in bodies and flags."""
        return self.other_name or self.name

    @property
    def is_number(self) -> bool:
        """Whether rows have one value each: a number or a switch."""
        return self.kind in ("number", "switch")

    @property
    def dtype(self) -> str:
        """Of the values of rows."""
        if self.kind != "number":
            return "bool"
        return "int32" if isinstance(self.default, int) else "float32"


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
        hf="top_k", plain=True, also_default=-1,
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
    Setting(
        "frequency_penalty", 0.0, _PENALTY, "Subtracted for each occurrence in the answer; 0: off.",
    ),
    Setting(
        "no_repeat_ngram_size", 0, _COUNT, "No sequence of this many tokens occurs twice; 0: off.",
        hf="no_repeat_ngram_size", history=True, most=_MOST_NGRAM,
    ),
    Setting(
        "min_new_tokens", 0, _COUNT, "The answer has at least this many tokens.", other_name="min_tokens",
        hf="min_new_tokens",
    ),
    Setting(
        "xtc_probability", 0.0, _FRACTION, "XTC: chance to remove the top choices; 0: off.", beams=False,
        filter="xtc",
    ),
    Setting(
        "xtc_threshold", 0.1, (_FRACTION[0], "from 0 to 1 (above 0.5: off)"),
        "XTC: top choices reach it. Default: 0.1.",
    ),
    Setting(
        "dry_multiplier", 0.0, (lambda x: (x >= 0) & (x <= 1e30), "from 0 (off) to 1e30"),
        "DRY: penalty of a repeated sequence; 0: off.", history=True, penalty="dry",
    ),
    Setting(
        "dry_base", 1.75, (lambda x: (x >= 1) & (x <= 1e30), "from 1 to 1e30"),
        "DRY: its factor for each token more. Default: 1.75.",
    ),
    Setting(
        "dry_allowed_length", 2, (_is_count, "a whole number from 0 to 2^31 - 1"),
        "DRY: so many tokens may be repeated. Default: 2.", most=_MOST_NGRAM,
    ),
    Setting(
        "dry_penalty_last_n", -1,
        (lambda x: (x == -1) | _is_count(x), "-1 (all), or a whole number from 0 to 2^31 - 1"),
        "DRY: last tokens that count. Default: -1: all.",
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
NUMBERS = tuple(setting for setting in _ENTRIES if setting.is_number)
PLAIN_SETTINGS = tuple(setting.name for setting in _ENTRIES if setting.plain)
# Other names of settings in bodies and flags.
FIELD_OF_SETTING = {setting.name: setting.field for setting in _ENTRIES if setting.other_name}


class _UnsetFloat(float):
    """The value of a setting that is not set."""


class _UnsetInteger(int):
    """The value of a whole-number setting, or of a switch, that is not set."""


def unset(name: str) -> Any:
    """The value of a setting that is not set: None, or a number that `is_unset` tells from a given one."""
    setting = SETTINGS[name]
    if not setting.is_number:
        return None
    marker = _UnsetFloat if setting.dtype == "float32" else _UnsetInteger
    return marker(setting.default)


def is_unset(value: Any) -> bool:
    """Whether it is the default of a setting that is a number."""
    return isinstance(value, _UnsetFloat | _UnsetInteger)
