"""From logits to a token: `SamplingConfig`, the processors in the order of transformers, and draws from
explicit keys.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import numbers, traced
from ..errors import InputError, shown
from ..model.greedy import argmax
from . import processors
from .biases import bias_rows, check_ids

_DRAW_TOKEN = 0  # purpose of a draw, the last fold of its key; later strategies take the next numbers
DRAW_BEAMS = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to choose a token; numbers, or arrays [B] with one setting per row.

    What no row asks for costs nothing, once compiled: of the settings below `repetition_penalty`, switching
    one on compiles another program; changing it does not.

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

    @classmethod
    def from_hf(cls, generation_config: Mapping[str, Any]) -> "SamplingConfig":
        """The defaults that a checkpoint's generation_config.json asks for; `do_sample` absent or false means
        temperature 0.

        Where it samples and is silent, transformers' own defaults hold: temperature 1, top_k 50.

        Raises:
            InputError: a setting out of range, or one that would change the result and is not supported.
        """
        check_generation_config(generation_config)
        for name, neutral in _UNSUPPORTED_DEFAULTS.items():
            value = generation_config.get(name)
            if value is not None and value not in neutral:
                raise InputError(
                    f"generation_config.json asks for {name}={shown(value)}, which is not supported: ignore"
                    " that file or remove the setting"
                )
        sampled = bool(generation_config.get("do_sample"))
        given = {name: generation_config.get(name) for name in _FROM_HF}
        given["forbidden_token_ids"] = generation_config.get("suppress_tokens") or None
        config = cls(
            **({"temperature": 1.0, "top_k": 50} if sampled else {})
            | {k: v for k, v in given.items() if v is not None}
        ).validate()
        return config if sampled else dataclasses.replace(config, temperature=0.0)

    def validate(self) -> "SamplingConfig":
        """Returns itself. What is traced is not checked.

        Raises:
            InputError: a setting outside its range.
        """
        for name, (good, remedy) in _RANGES.items():
            value = getattr(self, name)
            # The default itself, or absent as `per_row` leaves it: nothing to look at.
            if value is getattr(SamplingConfig, name) or (value is None and name in ABSENT):
                continue
            array = numbers(value)
            if array is None or not traced(array) and not _fits(array, good):
                raise InputError(f"{name} must be {remedy}, got {shown(value)}")
        check_ids(self.allowed_token_ids, self.forbidden_token_ids)
        return self


_FROM_HF = (
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "min_p",
    "typical_p",
    "no_repeat_ngram_size",
    "min_new_tokens",
)

# generation_config.json fields that change the result, with the values at which they do nothing.
_UNSUPPORTED_DEFAULTS = dict(
    num_beams=(1,), num_beam_groups=(1,), diversity_penalty=(0,), epsilon_cutoff=(0,), eta_cutoff=(0,),
    encoder_repetition_penalty=(1,), encoder_no_repeat_ngram_size=(0,), bad_words_ids=([],),
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

    for name in _FROM_HF:
        if (value := settings.get(name)) is not None:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            refuse_unless(is_number and abs(value) < 1e30, name, "a number", value)
    refuse_unless(
        settings.get("do_sample") in (None, True, False),
        "do_sample",
        "true or false",
        settings.get("do_sample"),
    )
    ids = settings.get("suppress_tokens")
    form = "a list of token ids" + (f" below {vocab_size}" if vocab_size else "")
    refuse_unless(isinstance(ids, list | None), "suppress_tokens", form, ids)
    for token in ids or ():
        refuse_unless(
            type(token) is int and 0 <= token < (vocab_size or 2**31), "suppress_tokens", form, token
        )
    ends = settings.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [ends]:
        refuse_unless(
            token is None or type(token) is int, "eos_token_id", "a token id or a list of them", token
        )


_WHOLE = ("top_k", "no_repeat_ngram_size", "min_new_tokens")
ABSENT = dict(
    min_p=0.0,
    typical_p=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    no_repeat_ngram_size=0,
    min_new_tokens=0,
)


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
    sampling: SamplingConfig | Sequence[SamplingConfig], batch: int, vocab_size: int | None = None
) -> SamplingConfig:
    """Settings as arrays [B] (float32, or int32 where they count) from one setting for all rows, arrays, or
    one setting per row.

    The newer settings are None where no row asks for them; biases, allowed and forbidden ids become one
    `logit_bias` [B, V].

    Args:
        sampling: one for all rows, or one per row.
        batch: B.
        vocab_size: V, needed where ids are named.

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
    ids = [(row.logit_bias, row.allowed_token_ids, row.forbidden_token_ids) for row in rows]
    return SamplingConfig(
        **{name: _spread(name, rows, batch) for name in names}, logit_bias=bias_rows(ids, batch, vocab_size)
    )


def _spread(name: str, rows: Sequence[SamplingConfig], batch: int) -> Any:
    """One setting of each row, [B]; None where it is absent."""
    values = [getattr(row, name) for row in rows]
    values = [ABSENT[name] if value is None else value for value in values]
    # Numbers stay on the host: no program is compiled for them.
    xp = jnp if any(traced(value) or isinstance(value, jax.Array) for value in values) else np
    arrays = [xp.asarray(value, np.int32 if name in _WHOLE else np.float32) for value in values]
    if any(array.shape not in ((), (1,), (batch,) if len(rows) == 1 else ()) for array in arrays):
        raise InputError(
            f"{name} of shape {np.shape(arrays[0])} for {batch} rows: give one number, or one per row"
        )
    array = arrays[0] if len(rows) == 1 else xp.stack([array.reshape(()) for array in arrays])
    if name in ABSENT and not traced(array) and np.all(np.asarray(array) == ABSENT[name]):
        return None
    return xp.broadcast_to(array, (batch,))


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One key per row: `fold_in(key, row)` of one key, or the keys themselves where there is one per row.

    Old-style uint32 keys are taken too.

    Raises:
        InputError: no key, a number of keys that is not the batch, or keys of another kind than threefry.
    """
    if not isinstance(key, np.ndarray | jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == np.uint32 and key.ndim in (1, 2))
    ):
        raise InputError(f"key must come from jax.random.key(seed), got {shown(key)}")
    if key.dtype == np.uint32 and key.shape[-1] == 2:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    if str(key.dtype) != "key<fry>":  # rbg draws other numbers in a batch than alone
        raise InputError(
            f"keys of {key.dtype}{list(key.shape)} are not served: make them by"
            " jax.random.key(seed, impl='threefry2x32')"
        )
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise InputError(f"keys of shape {key.shape} for {batch} rows: give one key, or one per row")
    return key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What the processors know of the rows; None where none of them asks for it."""

    seen_BV: jax.Array  # bool: tokens already present in each row
    count_BV: jax.Array | None = None  # int32: how often each row chose each token
    history_BS: jax.Array | None = None  # int32: each row's tokens in order, prompt included
    chosen_B: jax.Array | None = None  # int32: how many tokens each row chose
    eos_E: jax.Array | None = None  # int32: ids that end a row


def choose(
    logits_BV: jax.Array,
    row_key_B: jax.Array,
    position_B: jax.Array,
    sampling: SamplingConfig,
    context: Context,
    impl: str | None = None,
) -> jax.Array:
    """The next token of each row, int32 [B]. A batch without temperature and processors takes the argmax and
    nothing else.

    Args:
        logits_BV: float32.
        row_key_B: one key per row.
        position_B: the position that the new token will have in its row: the draw depends on it and the key
            alone.
        sampling: from `per_row`.
        context: what the processors look at.
        impl: of the argmax.
    """

    def processed() -> jax.Array:
        logits = process(logits_BV, position_B, sampling, context)
        return lax.cond(
            jnp.all(sampling.temperature <= 0),
            lambda: argmax(logits, impl),
            lambda: sample(row_key_B, position_B, logits, sampling),
        )

    return lax.cond(plain(sampling), lambda: argmax(logits_BV, impl), processed)


def plain(sampling: SamplingConfig) -> jax.Array:
    """Whether every row just takes its likeliest token."""
    newer = any(getattr(sampling, name) is not None for name in (*ABSENT, "logit_bias"))
    return ~jnp.bool_(newer) & jnp.all((sampling.temperature <= 0) & (sampling.repetition_penalty == 1))


def process(
    logits_BV: jax.Array, position_B: jax.Array, sampling: SamplingConfig, context: Context
) -> jax.Array:
    """The processors that hold for greedy rows too: biases and penalties."""
    s = sampling
    if s.logit_bias is not None:
        logits_BV = logits_BV + s.logit_bias
    logits_BV = processors.repetition_penalty(logits_BV, s.repetition_penalty, context.seen_BV)
    if s.presence_penalty is not None or s.frequency_penalty is not None:
        presence, frequency = (
            0 * s.temperature if x is None else x for x in (s.presence_penalty, s.frequency_penalty)
        )
        logits_BV = processors.presence_frequency(logits_BV, presence, frequency, context.count_BV)
    if s.no_repeat_ngram_size is not None:
        logits_BV = processors.no_repeat_ngram(
            logits_BV, s.no_repeat_ngram_size, context.history_BS, position_B
        )
    if s.min_new_tokens is not None:
        logits_BV = processors.min_new_tokens(logits_BV, s.min_new_tokens, context.chosen_B, context.eos_E)
    return logits_BV


def warp(logits_BV: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Temperature, then `narrow`: logits of what is drawn from. Rows at temperature 0 stay as they are."""
    greedy_B1 = (sampling.temperature <= 0)[:, None]
    # Taken off first: the smallest temperatures must not overflow.
    above = jnp.max(logits_BV, -1, keepdims=True)
    scaled = (logits_BV - above) / jnp.where(
        greedy_B1, 1.0, jnp.maximum(sampling.temperature, 1e-37)[:, None]
    )
    return jnp.where(greedy_B1, logits_BV, narrow(scaled, sampling))


def narrow(scaled_BV: jax.Array, sampling: SamplingConfig, fewest: int = 1) -> jax.Array:
    """Top-k, top-p, min-p and typical-p: what they leave, but `fewest` tokens of each row at least; the rest
    becomes -inf.
    """
    k_B = jnp.where(sampling.top_k > 0, jnp.maximum(sampling.top_k, fewest), 0)
    kept = processors.top_k_top_p(scaled_BV, k_B, sampling.top_p)
    kept = kept if sampling.min_p is None else processors.min_p(kept, sampling.min_p)
    if fewest > 1:  # the three above keep what is likeliest, and one token of it in any case
        kept = jnp.where(processors.top_k(scaled_BV, jnp.full_like(k_B, fewest)) > -jnp.inf, scaled_BV, kept)
    return kept if sampling.typical_p is None else processors.typical_p(kept, sampling.typical_p, fewest)


def sample(
    row_key_B: jax.Array, position_B: jax.Array, logits_BV: jax.Array, sampling: SamplingConfig
) -> jax.Array:
    """Draws from softmax(warp(logits)) by the largest logit + Gumbel noise; rows at temperature 0 take the
    argmax.
    """
    return draw(row_key_B, position_B, warp(logits_BV, sampling), sampling)


def draw(
    row_key_B: jax.Array, position_B: jax.Array, warped_BV: jax.Array, sampling: SamplingConfig
) -> jax.Array:
    noise = jax.vmap(lambda key, position: gumbel(draw_key(key, position, _DRAW_TOKEN), warped_BV.shape[1]))(
        row_key_B, position_B
    )
    return argmax(jnp.where((sampling.temperature <= 0)[:, None], warped_BV, warped_BV + noise), "xla")


def draw_key(row_key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """The key of one draw: fold_in(fold_in(row_key, position), purpose)."""
    return jax.random.fold_in(jax.random.fold_in(row_key, position), purpose)


def gumbel(key: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise, float32 [size], from 23 random bits a number: written out so that every jax
    version draws the same.
    """
    bits = jax.random.bits(key, (size,), jnp.uint32)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))
