"""The error of settings that left a row no token, which is known only after sampling."""

from collections.abc import Sequence

import numpy as np

from ..errors import NoTokenLeftError
from ..sampling.sampling_config import SettingsOfRows
from .validation import ValidatedCall


def check_tokens_left(call: ValidatedCall, row: int, ids: list[int]) -> None:
    """Raises NoTokenLeftError for a token that the settings forbid: such a token is sampled only if they
    forbid all.
    """
    prompt = row // call.answers
    settings: SettingsOfRows = call.sampling_B
    wrong = np.flatnonzero(np.asarray(settings.logit_bias)[prompt, ids] == -np.inf).tolist()
    wrong += [i for i, token in enumerate(ids[: settings.min_tokens[prompt]]) if token in call.end_ids]
    wrong += _repeats(call.prompts[prompt], ids, int(settings.no_repeat_ngram_size[prompt]))
    wrong += _bad_words(call.prompts[prompt], ids, settings.bad_words_ids[prompt], call.end_ids)
    if wrong:
        raise NoTokenLeftError(
            f"row {row}, step {min(wrong)}: the settings leave no token that can be chosen: loosen the"
            " allowed and forbidden ids, bad_words_ids, no_repeat_ngram_size or min_tokens, or ask for"
            " fewer tokens"
        )


def _repeats(prompt: Sequence[int], ids: Sequence[int], size: int) -> list[int]:
    """Returns the indices in `ids` of tokens that complete an n-gram (n = size) for the second time. Each
    n-gram has a number, made of the numbers of two shorter ones, so that the time hardly grows with n.
    """
    row = np.array([*prompt, *ids], np.int64)
    width = 1
    if not 0 < size <= len(row):
        return []
    name_S = row
    while width < size:
        step = min(width, size - width)
        pair_S = name_S[:-step] * (name_S.max() + 1) + name_S[step:]
        name_S = np.unique(pair_S, return_inverse=True)[1]
        width = width + step
    repeats = np.ones(len(name_S), bool)
    repeats[np.unique(name_S, return_index=True)[1]] = False  # the first of each
    last = np.flatnonzero(repeats) + size - 1 - len(prompt)
    return [int(i) for i in last if i >= 0]


def _bad_words(
    prompt: Sequence[int], ids: Sequence[int], words_WL: np.ndarray, end_ids: Sequence[int]
) -> list[int]:
    """Returns the indices in `ids` of tokens that complete a forbidden sequence."""
    row = [*prompt, *ids]
    by_last = dict[int, list[list[int]]]()
    for word_L in words_WL[words_WL[:, -1] >= 0]:
        word = word_L[word_L >= 0].tolist()
        if len(word) > 1 or word[0] not in end_ids:
            by_last.setdefault(word[-1], []).append(word)
    ends = enumerate(range(len(prompt) + 1, len(row) + 1)) if by_last else ()
    return [
        i
        for i, end in ends
        if any(row[max(0, end - len(w)) : end] == w for w in by_last.get(row[end - 1], ()))
    ]
