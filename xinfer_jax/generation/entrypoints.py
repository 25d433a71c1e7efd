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
    """Generates one or more answers to each prompt of a batch, as token ids with log-probabilities.

    Prompts may have different lengths. Each prompt gets the tokens that it gets alone. For a text in and a
    text out, use `generate_text`. For tokens as they are sampled, use `stream`.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> out = xj.generate(model.params, model.config, [ids])
        >>> model.tokenizer.decode(out.tokens[0])
        'The capital of France is Paris.'
        >>> out.finish_reason
        ['stop']

    To compile few programs, the number of rows is rounded up to a power of two, and lengths are rounded up. A
    padding row costs as much of a step as a real one.

    The arguments decide how tokens are decoded, so a call has the same bits whatever was compiled before:

    - On GPUs, on TPUs, on meshes and with taps, decoding is one loop on the device.
    - On one CPU device it is one loop if rows (rounded up, with `n` per prompt) times `max_tokens` exceed
      256.
    - Otherwise, and if the host writes the masks of a grammar, the host calls programs of a few layers, as
      `stream` does. These programs compile sooner.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        prompts: a list of prompts. Each is a list with at least one token id.
        options: the options of the call. None takes `GenerateOptions()`: greedy, at most 128 tokens.
        key: one PRNG key (row i then uses `fold_in(key, i)`), or one key per prompt. Only sampling needs it.

    Returns:
        A `GenerateOutput` with tokens, log-probabilities, the reason of each end, and statistics.

    Raises:
        InputError: a prompt, an option or the key is invalid. The call then raises it before anything is
            traced. After sampling it is raised if log-probabilities are not finite, or if no token was
            allowed.
    """
    call = validate_call(params, config, prompts, options, key)
    long = call.rows * call.options.max_tokens > _LOOP_TOKENS
    batch = BatchGenerator(call, decodes_whole=long and not call.needs_masks)
    batch.start()
    while batch.active_R.any():
        batch.decode(call.options.max_tokens)
    return batch.output()
