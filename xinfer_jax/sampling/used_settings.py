"""The sampling settings that the rows of a batch use, and the arguments that these settings need of a
caller.
"""

from collections.abc import Callable

import numpy as np

from ..checks import is_traced
from ..errors import InputError
from .batched_settings import is_default
from .sampling_config import SamplingConfig
from .settings import SETTINGS, Setting


def used_settings(sampling_B: SamplingConfig, asked: Callable[[Setting], bool]) -> list[str]:
    """Returns the names of the settings that are asked for and that a row uses, as far as the host knows.
    sampling_B: settings from `settings_per_row`.
    """
    values = ((setting, getattr(sampling_B, setting.name)) for setting in SETTINGS.values() if asked(setting))
    return [s.name for s, value in values if value is not None and not is_default(s, value)]


def check_history(sampling_B: SamplingConfig) -> None:
    """Raises InputError if a row uses a setting that needs the tokens of the row in order.

    Args:
        sampling_B: all settings, from `settings_per_row`.
    """
    if used_settings(sampling_B, lambda setting: setting.history):
        names = " and ".join(setting.name for setting in SETTINGS.values() if setting.history)
        raise InputError(f"{names} need history_BS, tokens of each row")
    words_BWL = sampling_B.bad_words_ids
    if is_traced(words_BWL) or np.any(np.asarray(words_BWL)[..., :-1] >= 0):
        raise InputError("bad_words_ids of several tokens need history_BS, the tokens of each row so far")
