"""Generation as a loop in plain Python: prefill, sample, decode step. Read this file first.

`generate` does the same in compiled loops, with more options. Tests compare streams and engines with this.

```
prompts ─ pad on the right ─► tokens_BT ─ prefill ─► logits_BV, cache
                                                      │
tokens of the rows ◄─ state ◄─ sample and append ◄────┤
                        │                             │
                        └─ token_B ─ decode_step ─► logits_BV, cache
```

B is the rows, one for each prompt, T the tokens of the longest prompt, V the vocabulary, and E the number of
ids that end an answer.
"""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from ..cache.kv_cache import init_cache
from ..config.model_config import ModelConfig
from ..config.run_config import DEFAULT
from ..sampling.batched_settings import settings_per_row
from ..sampling.random_keys import row_keys
from ..sampling.sampling_config import SamplingConfig
from ..weights.params import Params, cache_dtype
from .batch_arrays import StateSizes, state_of_rows, token_matrix
from .functional import decode_step, prefill
from .state import DecodeState, RowSettings, sample_and_append

_sample = jax.jit(partial(sample_and_append, run_config=DEFAULT))


def generate_in_steps(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    eos_token_ids: Sequence[int] = (),
    key: jax.Array | None = None,
) -> DecodeState:
    """Continues every prompt, one decode step at a time.

    Args:
        params, config: the model.
        prompts: token ids, at least one per prompt.
        max_tokens: the most tokens of each answer.
        sampling: the settings of all rows, or of each. None: greedy.
        eos_token_ids: ids that end an answer.
        key: one PRNG key (row i then uses `fold_in(key, i)`) or one per prompt. None: any, for greedy rows.

    Returns:
        The state of the rows. `tokens_BT` has the tokens, EOS included, `length_B` the number of real tokens
        of each row, and `logprobs_BT` their log-probabilities.
    """
    B = len(prompts)
    V = config.vocab_size
    length_B = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens_BT = token_matrix(prompts, B, length_B.max())

    # What sampling needs of each row: its key, its settings, its limit, the ids that end it, and its tokens.
    key_B = row_keys(jax.random.key(0) if key is None else key, B)
    sampling_B = settings_per_row(sampling or SamplingConfig(), B, V)
    limit_B = np.full(B, max_tokens, np.int32)
    eos_BE = np.tile(np.array(eos_token_ids, np.int32), (B, 1))
    capacity = int(length_B.max()) + max_tokens
    settings = RowSettings(jax.random.key_data(key_B), sampling_B, eos_BE, limit_B)
    state = state_of_rows(prompts, V, settings, StateSizes(capacity, max_tokens))

    # Keys and values of the prompts. Padding is not written.
    cache = init_cache(config, B, capacity, cache_dtype(params))
    logits_BV, cache = prefill(params, config, tokens_BT, length_B, cache)

    # A row is active until it has sampled an EOS id or as many tokens as its limit. Other rows stay as they
    # are, whatever logits they get.
    state = _sample(logits_BV, state)
    while np.any(state.active_B):
        logits_BV, cache = decode_step(params, config, state.token_B, cache, donate=True)
        state = _sample(logits_BV, state)
    return state
