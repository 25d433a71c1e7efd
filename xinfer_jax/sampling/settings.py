"""`SamplingConfig`: how a caller says how tokens are chosen; and the same as arrays, one setting per row."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import numbers, traced
from ..errors import InputError, shown
from .biases import bad_word_rows, bias_rows, check_bad_words, check_ids, is_bad_word_rows
from .generation_config import sampling_defaults


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to choose a token; numbers, or arrays [B] with one setting per row.

    What no row asks for is skipped. The first four settings are the plain ones; the first call with any of
    those below compiles another program, which serves them all.

    Attributes:
        temperature: logits are divided by it; 0: the most likely token.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the most likely tokens that together reach this probability; above 0, 1: all.
        repetition_penalty: above 1: tokens already present, the prompt's too, become less likely (CTRL,
            Keskar et al. 2019); above 0, 1: off.
        min_p: only tokens at least this many times as likely as the likeliest; 0 to 1, 0: all.
        typical_p: only the tokens of most typical surprise that together reach this probability; above 0,
            1: all.
        presence_penalty: taken off the logits of tokens that the answer already holds; 0: off.
        frequency_penalty: the same, as often as the answer holds them; 0: off.
        no_repeat_ngram_size: no sequence of so many tokens occurs twice in prompt and answer; 0: off.
        min_new_tokens: no EOS before the answer has so many tokens; 0: off.
        logit_bias: {id: number added to its logit}, or float32 [V] or [B, V]; -inf forbids; None: nothing.
        allowed_token_ids: only these are chosen (an EOS id that is not among them is never); None: all.
        forbidden_token_ids: these are never chosen; None: none.
        bad_words_ids: sequences of ids, at most 64 of at most 8 ids; none that lies in prompt and answer ends
            in the answer. An EOS id alone is passed over, as in transformers; None: none.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    repetition_penalty: Any = 1.0
    min_p: Any = 0.0
    typical_p: Any = 1.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0
    no_repeat_ngram_size: Any = 0
    min_new_tokens: Any = 0
    logit_bias: Any = None
    allowed_token_ids: Sequence[int] | None = None
    forbidden_token_ids: Sequence[int] | None = None
    bad_words_ids: Any = None

    @classmethod
    def from_hf(cls, generation_config: Mapping[str, Any]) -> "SamplingConfig":
        """The defaults that a checkpoint's generation_config.json asks for; `do_sample` absent or false means
        temperature 0.

        Where it samples and is silent, transformers' own defaults hold: temperature 1, top_k 50.

        Raises:
            InputError: a setting out of range, or one that would change the result and is not supported.
        """
        config = cls(**sampling_defaults(generation_config)).validate()
        sampled = bool(generation_config.get("do_sample"))
        return config if sampled else dataclasses.replace(config, temperature=0.0)

    def validate(self) -> "SamplingConfig":
        """Returns itself. What is traced is not checked.

        Raises:
            InputError: a setting outside its range.
        """
        for name, (good, remedy) in _RANGES.items():
            value = getattr(self, name)
            # The default itself, or absent as `per_row` leaves it: nothing to look at.
            if value is getattr(SamplingConfig, name) or (value is None and name in _OFF):
                continue
            array = numbers(value)
            if array is None or not traced(array) and not _fits(array, good):
                raise InputError(f"{name} must be {remedy}, got {shown(value)}")
        check_ids(self.allowed_token_ids, self.forbidden_token_ids)
        if self.bad_words_ids is not None and not is_bad_word_rows(self.bad_words_ids):
            check_bad_words(self.bad_words_ids)
        return self


def check_min_tokens(sampling: SamplingConfig, ending: Sequence[int]) -> None:
    """Raises InputError where only ids that end an answer (`ending`) are allowed, and not before so many."""
    least = sampling.min_new_tokens
    allowed = sampling.allowed_token_ids
    if allowed is None or traced(allowed) or traced(least) or not np.any(np.asarray(least) > 0):
        return
    others = sampling.forbidden_token_ids
    bias = sampling.logit_bias
    banned = {*ending, *(() if others is None or traced(others) else map(int, others))}
    if isinstance(bias, Mapping) and not traced(bias):
        banned |= {int(i) for i, value in bias.items() if value == -np.inf}
    if {*map(int, allowed)} <= banned:
        raise InputError(
            f"min_new_tokens {shown(least)} forbids what ends an answer before it, and allowed_token_ids name"
            " nothing else: the settings leave no token, allow more"
        )


_WHOLE = ("top_k", "no_repeat_ngram_size", "min_new_tokens")
# The settings that are not plain, with the values at which they do nothing.
_OFF = dict(
    min_p=0.0, typical_p=1.0, presence_penalty=0.0, frequency_penalty=0.0, no_repeat_ngram_size=0,
    min_new_tokens=0,
)  # fmt: skip


_COUNT = (lambda x: (x >= 0) & (x < 2**31) & (x == np.floor(x)), "a whole number from 0 (off) to 2^31 - 1")
_MASS = (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1 (off)")
# Within their bounds no logit leaves float32.
_PENALTY = (lambda x: np.abs(x) <= 1e30, "a finite number (0: off), at most 1e30")
_RANGES = dict(
    temperature=(lambda x: x >= 0, "0 (greedy) or above"),
    top_k=_COUNT,
    top_p=_MASS,
    repetition_penalty=(lambda x: (x >= 1e-6) & (x <= 1e6), "above 0 (1: off), from 1e-6 to 1e6"),
    min_p=(lambda x: (x >= 0) & (x <= 1), "from 0 (off) to 1"),
    typical_p=_MASS,
    presence_penalty=_PENALTY,
    frequency_penalty=_PENALTY,
    no_repeat_ngram_size=_COUNT,
    min_new_tokens=_COUNT,
)


def _fits(array: np.ndarray, good: Any) -> bool:
    """Whether it is one number, or one per row, all of them finite in float32 and good."""
    with np.errstate(over="ignore"):
        finite = np.all(np.isfinite(array.astype(np.float32)))
    return array.ndim <= 1 and array.size > 0 and bool(finite and np.all(good(array)))


def per_row(
    sampling: SamplingConfig | Sequence[SamplingConfig], batch: int, vocab_size: int, full: bool = False
) -> SamplingConfig:
    """Settings as arrays [B] (float32, or int32 where they count) from one setting for all rows, arrays, or
    one setting per row.

    They have one of two tree structures, so that few programs serve: plain, with None for all but the first
    four where no row asks for more; else full, with every setting, biases, allowed and forbidden ids as one
    `logit_bias` [B, V], and `bad_words_ids` as int32 [B, W, L], at the end of L places, else -1.

    Args:
        sampling: one for all rows, or one per row.
        batch: B.
        vocab_size: V.
        full: whatever they ask for.

    Raises:
        InputError: a sequence whose length is not the batch, a setting outside its range, or ids outside the
            vocabulary.
    """
    rows = [sampling] if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(rows, list | tuple) or not all(isinstance(row, SamplingConfig) for row in rows):
        raise InputError(f"sampling must be a SamplingConfig, or a list of them, got {shown(rows)}")
    if len(rows) != batch and rows is sampling:
        raise InputError(
            f"{len(rows)} sampling settings for {batch} prompts: give one setting, or one per prompt"
        )
    for row in rows:
        row.validate()
    names = [f.name for f in dataclasses.fields(SamplingConfig) if not f.name.endswith(("_bias", "_ids"))]
    values = {name: _spread(name, rows, batch) for name in names}
    ids = [(row.logit_bias, row.allowed_token_ids, row.forbidden_token_ids) for row in rows]
    words = [row.bad_words_ids for row in rows]
    named = any(part is not None for parts in [*ids, words] for part in parts)
    if not full and not named and all(_is_off(values[name], off) for name, off in _OFF.items()):
        return SamplingConfig(**values | dict.fromkeys(_OFF))
    bias_BV = bias_rows(ids, batch, vocab_size)
    words_BWL = bad_word_rows(words, batch, vocab_size)
    return SamplingConfig(**values, logit_bias=bias_BV, bad_words_ids=words_BWL)


def is_full(sampling_B: SamplingConfig) -> bool:
    """Which of the two structures that `per_row` gives it has."""
    return sampling_B.min_p is not None


def only(sampling_B: SamplingConfig, among_B: Any) -> SamplingConfig:
    """The settings of the rows among them; the others ask for nothing, so that what they did is skipped."""
    names = [name for name in _RANGES if getattr(sampling_B, name) is not None]
    off = {
        name: jnp.where(among_B, getattr(sampling_B, name), getattr(SamplingConfig, name)) for name in names
    }
    if is_full(sampling_B):
        off["bad_words_ids"] = jnp.where(jnp.reshape(among_B, (-1, 1, 1)), sampling_B.bad_words_ids, -1)
    return dataclasses.replace(sampling_B, **off)


def _is_off(value_B: Any, off: float) -> bool:
    return not traced(value_B) and bool(np.all(np.asarray(value_B) == off))


def _spread(name: str, rows: Sequence[SamplingConfig], batch: int) -> Any:
    """One setting of each row, [B]."""
    values = [getattr(row, name) for row in rows]
    values = [_OFF[name] if value is None else value for value in values]
    # Numbers stay on the host: no program is compiled for them.
    xp = jnp if any(traced(value) or isinstance(value, jax.Array) for value in values) else np
    arrays = [xp.asarray(value, np.int32 if name in _WHOLE else np.float32) for value in values]
    if any(array.shape not in ((), (1,), (batch,) if len(rows) == 1 else ()) for array in arrays):
        raise InputError(
            f"{name} of shape {np.shape(arrays[0])} for {batch} rows: give one number, or one per row"
        )
    array = arrays[0] if len(rows) == 1 else xp.stack([array.reshape(()) for array in arrays])
    return xp.broadcast_to(array, (batch,))
