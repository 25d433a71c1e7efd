"""What shows only once tokens are chosen: numbers of the model that are not finite, a choice where the
settings left none, a cache outgrown.
"""

from collections.abc import Sequence

import numpy as np

from ..cache.kv_cache import KVCache
from ..errors import InputError
from ..sampling.settings import is_full
from .options import Call
from .state import Chosen


def check_chosen(call: Call, chosen: Chosen) -> None:
    """Raises InputError for what `generate` must not return.

    Args:
        call: what was asked.
        chosen: what the rows chose.
    """
    # Behind a row's last token the log-probabilities are 0.
    if len(broken := np.argwhere(~np.isfinite(chosen.logprobs_BT))):
        row, step = broken[0]
        is_what = f"{chosen.tokens_BT[row, step]} is {chosen.logprobs_BT[row, step]}"
        raise InputError(f"row {row}, step {step}: the log-probability of token {is_what}: {call.broken}")
    if is_full(call.sampling_B):
        for row, ids in enumerate(chosen.rows()):
            _check_allowed(call, row, ids)


def check_cache(call: Call, cache: KVCache | None) -> None:
    """Raises InputError where what a row read or wrote did not fit its cache."""
    if cache is not None and (overflow_B := np.asarray(cache.overflow_B)).any():
        row = overflow_B.argmax()
        raise InputError(f"row {row} outgrew its cache of {call.capacity} tokens: raise capacity")


def _check_allowed(call: Call, row: int, ids: list[int]) -> None:
    """Where settings forbid every token, one that they forbid is chosen."""
    prompt, settings = row // call.answers, call.sampling_B
    wrong = np.flatnonzero(call.forbidden_BV[prompt, ids]).tolist()
    wrong += [i for i, token in enumerate(ids[: settings.min_new_tokens[prompt]]) if token in call.ending]
    wrong += _repeats(call.prompts[prompt], ids, int(settings.no_repeat_ngram_size[prompt]))
    if wrong:
        raise InputError(
            f"row {row}, step {min(wrong)}: the settings leave no token that can be chosen: loosen the"
            " allowed and forbidden ids, no_repeat_ngram_size or min_new_tokens, or ask for fewer tokens"
        )


def _repeats(prompt: Sequence[int], ids: Sequence[int], size: int) -> list[int]:
    """The ids that complete a sequence of so many tokens that is there already."""
    row, grams, repeated = [*prompt, *ids], set(), []
    for end in range(size, len(row) + 1 if size else 0):
        gram = tuple(row[end - size : end])
        if gram in grams and end > len(prompt):
            repeated.append(end - 1 - len(prompt))
        grams.add(gram)
    return repeated
