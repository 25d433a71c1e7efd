"""Sampling settings as arrays with one setting per row, in one of two tree structures."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import array_module, is_traced
from ..errors import InputError
from .sampling_config import SamplingConfig
from .settings import DTYPES, LISTS, NUMBERS, Setting, is_unset


def settings_per_row(
    sampling: SamplingConfig | Sequence[SamplingConfig],
    batch: int,
    vocab_size: int,
    all_settings: bool = False,
) -> SamplingConfig:
    """Returns settings as arrays [B]: int32 if they count tokens, otherwise float32.

    The result has one of two tree structures, so that few programs serve all requests:

    - Plain: the first four settings, if no row uses another.
    - All settings: biases, allowed and forbidden ids become one `logit_bias` [B, V]. `bad_words_ids` becomes
      int32 [B, W, L], each sequence at the end of its L places, and -1 in the other places. Lists of tokens
      become bool [B, V].

    Args:
        sampling: one for all rows, with numbers or arrays [B], or one per row.
        batch: B.
        vocab_size: V.
        all_settings: True: return all settings even if no row uses them.

    Raises:
        InputError: there is a sequence whose length is not the batch, a setting outside its range, or ids
            outside the vocabulary.
    """
    rows = [sampling] if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(rows, list | tuple) or not all(isinstance(row, SamplingConfig) for row in rows):
        from ..wrong_types import not_sampling  # optional: objects of transformers

        raise not_sampling(sampling)
    if len(rows) != batch and rows is sampling:
        raise InputError(
            f"{len(rows)} sampling settings for {batch} prompts: give one setting, or one per prompt"
        )
    for row in rows:
        row.validate()
    values = {setting.name: _setting_of_rows(setting, rows, batch) for setting in NUMBERS}
    is_off = (is_default(setting, values[setting.name]) for setting in NUMBERS if not setting.plain)
    lists = {setting.name: [getattr(row, setting.name) for row in rows] for setting in LISTS}
    has_lists = any(value is not None for of_rows in lists.values() for value in of_rows)
    is_plain = not all_settings and not has_lists and all(is_off)
    values = {name: _per_row(value, batch) for name, value in values.items()}
    if is_plain:
        return SamplingConfig(**{s.name: values[s.name] for s in NUMBERS if s.plain})
    from .biases import rows_of_lists  # optional: other settings

    return SamplingConfig(**values, **rows_of_lists(lists, batch, vocab_size))


def has_all_settings(sampling_B: SamplingConfig) -> bool:
    """Returns True if settings from `settings_per_row` have the structure with all settings."""
    return not is_unset(sampling_B.min_p)


def takes_most_likely(sampling_B: SamplingConfig) -> bool:
    """Returns True if every row takes its most likely token without any processor, as far as the host knows.
    sampling_B: settings from `settings_per_row`.
    """
    plain = sampling_B.temperature, sampling_B.repetition_penalty
    if has_all_settings(sampling_B) or any(map(is_traced, plain)):
        return False
    temperature_B, penalty_B = map(np.asarray, plain)
    return bool(np.all(temperature_B <= 0) and np.all(penalty_B == 1))


def select_rows(sampling_B: SamplingConfig, rows_B: Any) -> SamplingConfig:
    """Returns the settings of these rows. All settings of the other rows are off, so their work is skipped.

    Args:
        sampling_B: settings from `settings_per_row`.
        rows_B: bool.
    """
    numbers = [s for s in NUMBERS if s.plain or has_all_settings(sampling_B)]
    selected = {s.name: jnp.where(rows_B, getattr(sampling_B, s.name), s.default) for s in numbers}
    if has_all_settings(sampling_B):
        selected["bad_words_ids"] = jnp.where(jnp.reshape(rows_B, (-1, 1, 1)), sampling_B.bad_words_ids, -1)
    return dataclasses.replace(sampling_B, **selected)


def is_default(setting: Setting, value_B: Any) -> bool:
    """Returns True if no row uses a setting, as far as the host knows."""
    if is_traced(value_B):
        return False
    array = np.asarray(value_B)
    return bool(np.all(array == np.asarray(setting.default, array.dtype)))


def _per_row(value: Any, batch: int) -> Any:
    """Returns a setting of each row, [B]."""
    xp: Any = array_module(batch) if isinstance(value, np.ndarray) else jnp
    return xp.broadcast_to(value, (batch,))


def _setting_of_rows(setting: Setting, rows: Sequence[SamplingConfig], batch: int) -> Any:
    """Returns one setting of each row, or of all rows: [B], [1] or a number."""
    values = [getattr(row, setting.name) for row in rows]
    values = [setting.default if value is None else value for value in values]
    # Numbers stay on the host: no program is compiled for them.
    xp: Any = np
    if not all(isinstance(value, int | float) for value in values):
        xp = jnp if any(is_traced(value) or isinstance(value, jax.Array) for value in values) else np
    arrays = [xp.asarray(value, np.dtype(DTYPES[setting.kind])) for value in values]
    if any(array.shape not in ((), (1,), (batch,) if len(rows) == 1 else ()) for array in arrays):
        raise InputError(
            f"{setting.name} of shape {np.shape(arrays[0])} for {batch} rows: give one number, or one per row"
        )
    return arrays[0] if len(rows) == 1 else xp.stack([array.reshape(()) for array in arrays])
