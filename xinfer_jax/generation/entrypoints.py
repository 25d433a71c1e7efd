"""`generate`: lists of token ids in, lists of token ids out.

prompts ─ pad to a bucket ─► tokens_BT ─ prefill ─► first token of each row ─ decode some steps, repeat ─► ids
"""

from collections.abc import Sequence

import jax

from ..config.model_config import ModelConfig
from ..ops.operation import without_mesh_context
from ..weights.params import Params
from .batch_generator import BatchGenerator
from .options import GenerateOptions, GenerateOutput
from .validation import validate_call

# Rows x new tokens up to which, on a CPU, the loop of the whole model does not save what compiling it takes.
_LOOP_TOKENS = 256


@without_mesh_context
def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> GenerateOutput:
    """Continues every prompt. Lengths may differ. Each prompt gets the tokens that it gets alone.

    The number of rows is rounded up to a power of two, and lengths are rounded up, so that few programs are
    compiled.
    Padding rows cost their share of a step.

    On one CPU device, decoding is one loop on the device if rows (padded, `n` of each prompt) x
    `max_tokens` exceed 256; else, and where the host writes a grammar's masks, it calls programs of a few
    layers, as `stream` does, which compile sooner. The arguments alone decide, so a call has the same bits
    whatever is compiled already. On GPUs, on meshes and with taps it is always a loop.

    Args:
        params, config: the model.
        prompts: token ids, at least one per prompt.
        options: None: `GenerateOptions()`.
        key: one PRNG key (row i then uses `fold_in(key, i)`) or one per prompt; only sampling needs it.

    Raises:
        InputError: an invalid prompt, option or key; before anything is traced. Also where sampling found
            log-probabilities that are not finite, or no token that is allowed.
    """
    call = validate_call(params, config, prompts, options, key)
    long = call.rows * call.options.max_tokens > _LOOP_TOKENS
    batch = BatchGenerator(call, decodes_whole=long and not call.needs_masks)
    batch.start()
    while batch.active_R.any():
        batch.decode(call.options.max_tokens)
    return batch.output()
