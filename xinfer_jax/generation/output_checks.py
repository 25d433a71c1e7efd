"""Errors that are known only after sampling: values that are not finite, a cache that is too small."""

import numpy as np

from ..cache.kv_cache import KVCache
from ..errors import ContextLengthError, InputError
from ..sampling.batched_settings import has_all_settings
from .state import SampledTokens
from .validation import ValidatedCall


def check_generated(call: ValidatedCall, generated: SampledTokens) -> None:
    """Raises InputError for tokens that `generate` must not return."""
    # After a row's last token the log-probabilities are 0.
    if len(broken := np.argwhere(~np.isfinite(generated.logprobs_BT))):
        row, step = broken[0]
        if (token := int(generated.tokens_BT[row, step])) < 0:
            raise InputError(f"row {row}, step {step}: {call.callers.nan_reason(token)}")
        what = f"the log-probability of token {token} is {generated.logprobs_BT[row, step]}"
        raise InputError(f"row {row}, step {step}: {what}: {call.non_finite_reason}")
    if has_all_settings(call.sampling_B):
        from .no_token_left import check_tokens_left  # optional: other settings

        for row, ids in enumerate(generated.rows()):
            check_tokens_left(call, row, ids)


def check_overflow(call: ValidatedCall, cache: KVCache | None) -> None:
    """Raises InputError if the tokens of a row did not fit into its cache."""
    if cache is not None and (overflow_B := np.asarray(cache.overflow_B)).any():
        row = overflow_B.argmax()
        raise ContextLengthError(f"row {row} outgrew its cache of {call.capacity} tokens: raise capacity")
