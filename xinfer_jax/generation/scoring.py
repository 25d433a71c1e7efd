"""Log-probabilities of given tokens: `score` is a differentiable function of arrays, and `score_completions`
is a host function of lists of ids. `map_logits` is for your own losses.

The logits of a long text would take gigabytes: 4.6 GiB for 8192 tokens and a vocabulary of 152k. So they are
computed for a part of the tokens at a time, and the backward pass computes each part again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..annotations import Remat
from ..checks import check_array, check_integer, check_range, is_traced, number_array
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..config.unsupported import check_causal
from ..errors import ContextLengthError, InputError, format_value
from ..model.decoder import Inputs, apply_model, check_tokens, head_logits, lm_head, unembed
from ..model.extras import NO_EXTRAS, Extras
from ..modes import in_default_modes
from ..old_names import renamed_arguments
from ..ops.operation import check_impl, over_any_mesh
from ..sampling.support import check_support, keep_support
from ..weights.params import AnyArray, Params, check_params
from .batch_arrays import pad_prompts
from .executor import next_power_of_two
from .score_masks import are_tokens, mask_scores
from .scores import Scores
from .validation import check_prompts

if TYPE_CHECKING:
    from ..model.taps import Taps

Tree = TypeVar("Tree")  # an array, or a pytree of arrays

MAX_LOGITS = 1 << 25  # that exist at the same time: 128 MiB
_MOST_LOGITS = 1 << 26  # of all tokens at the same time, where a loop over parts would take more memory


class _ScoreArrays(NamedTuple):
    """The arrays that `score` gets in addition to the model's inputs."""

    temperature_B11: Any  # None: 1
    reference: Params | None
    teacher_topk: tuple[AnyArray, AnyArray] | None
    support_BTW: AnyArray | None  # of the targets


@renamed_arguments(routes="routed_experts", return_routes="return_routed_experts")
@in_default_modes
def score(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    num_tokens_B: AnyArray | None = None,
    *,
    inputs_BTD: AnyArray | None = None,
    segment_ids_BT: AnyArray | None = None,
    positions_BT: AnyArray | None = None,
    routed_experts: AnyArray | None = None,
    return_routed_experts: bool = False,
    temperature: float | AnyArray = 1.0,
    entropy: bool = False,
    reference: Params | None = None,
    teacher_topk: tuple[AnyArray, AnyArray] | None = None,
    support: AnyArray | None = None,
    chunk: int | None = None,
    taps: "Taps | None" = None,
    remat: Remat = None,
    impl: str | None = None,
) -> Scores:
    """Returns the log-probability of every token except the first, given the tokens before it.

    Use it for the loss of a trainer, for KL divergences and for perplexity. It works inside your own `jit`.
    Values of traced arrays are not checked.

    Every float leaf of `params`, and `inputs_BTD`, has reverse-mode gradients in its dtype. Activations have
    the dtype of `final_norm` in the parameters, and log-probabilities are float32.

    Example:
        >>> import jax.numpy as jnp
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> tokens_BT = jnp.array([model.tokenizer.encode("The capital of France is Paris.")])
        >>> scores = xj.score(model.params, model.config, tokens_BT)
        >>> scores.logprobs_BT.shape == (1, tokens_BT.shape[1] - 1)
        True

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        tokens_BT: int32 token ids, padded on the right. If you trace the ids, they are not checked. An id
            below 0 (such as -100, which pads labels) then gets the entry 0. An id above the vocabulary gets
            NaN. The entries of tokens after such ids are NaN too.
        num_tokens_B: int32 [B]: the number of real tokens in each row. None: all T tokens.
        inputs_BTD: the inputs of the first layer, in place of `embed_tokens(params, config, tokens_BT)`. Use
            it for a soft prompt (Lester et al. 2021). The ids at its positions do not matter.
        segment_ids_BT: ids of segments, for several texts in a row (see `run_model`). The entry of the first
            token of a segment is 0. None: a row is one text.
        positions_BT: the positions of the tokens for RoPE (see `run_model`). None counts from 0 in each
            segment.
        routed_experts: the experts that each token uses (see `run_model`). The experts of token t have an
            effect on entry t. The router has gradients through the weights of the experts that are used. A
            reference model chooses its own experts. None: the router chooses all experts.
        return_routed_experts: True adds `routed_experts` to the result.
        temperature: a number above 0 by which logits are divided, or one number for each row.
        entropy: True also computes the entropy of each distribution.
        reference: parameters of another model with this config, for KL(this model ‖ reference). It gets no
            gradients. It takes the tokens, not `inputs_BTD`.
        teacher_topk: the best tokens of a teacher model: ids [B, T-1, k] and log-probabilities [B, T-1, k]. A
            log-probability of -inf leaves its id out.
        support: sampling masks, uint32 [B, T, ceil(V/32)], as `decode_loop(return_support=True)` and engines
            return them. Entry t belongs to token t, and bit `v % 32` of its word `v // 32` is set if the
            token could be id v. The distribution of the token is then over these ids alone. So with the
            temperature and the masks of a rollout, `score` computes the log-probabilities of its sampler. A
            token that is not in its mask gets -inf. A mask without any id, for example of a token of the
            prompt, restricts nothing. None: no masks.
        chunk: the number of tokens of each row whose logits exist at the same time. None takes 128 MiB of
            logits. If the logits of all tokens take at most 256 MiB and, with their gradient, no more than
            the matrix of the vocabulary, None takes all tokens.
        taps: edits of the residual stream (see `run_model`). No tap may read. The reference model has no
            taps.
        remat: the values of a layer that the backward pass stores (see `run_model`).
        impl: the implementation of attention: "mosaic", "triton", "tpu" or "xla". None chooses the one that
            suits the device.

    Returns:
        A `Scores`. Entry t of its `logprobs_BT`, float32 [B, T-1], is the natural log-probability of token
        t+1, and 0 at padding. Its other fields are None unless you ask for them.

    Raises:
        InputError: an argument has a wrong shape or type.
        InputError: an id is outside the vocabulary, or a number of tokens is outside the row.
        InputError: an expert is unknown, or a temperature is 0.
        InputError: a tap reads.
        InputError: `support` is given with a reference or a teacher.
        InputError: this machine lacks the `impl`, or it cannot serve the call.
    """
    check_impl(impl)
    check_params(params, config, stacked=True)
    check_causal(config, "score")
    check_tokens(config, tokens_BT, num_tokens_B, inputs_BTD, least=2)
    (B, T) = tokens_BT.shape
    chunk = None if chunk is None else check_integer("chunk", chunk, 1)
    temperature_B = number_array(temperature)
    has_shape = temperature_B is not None and temperature_B.shape in ((), (B,))
    if not has_shape or not (is_traced(temperature_B) or np.all(temperature_B > 0)):
        wanted = f"a number above 0, or one for each of {B} rows"
        raise InputError(f"temperature must be {wanted}, got {format_value(temperature)}")
    for name, given in (("segment_ids_BT", segment_ids_BT), ("positions_BT", positions_BT)):
        if given is not None:
            check_array(name, given, np.integer, B, T)
    if routed_experts is not None:
        check_array("routed_experts", routed_experts, np.integer, B, T, "layers", "experts")
        if config.num_experts:
            check_range("routed_experts: expert", routed_experts, -1, config.num_experts - 1)
    if taps is not None:
        from ..model.taps import check_edits  # optional: taps

        taps = check_edits(taps, config, "score")
    if reference is not None:
        check_params(reference, config, stacked=True)
    if teacher_topk is not None:
        ids_BTk, logprobs_BTk = teacher_topk
        check_array("teacher_topk: ids", ids_BTk, np.integer, B, T - 1, "k")
        check_array("teacher_topk: log-probabilities", logprobs_BTk, np.floating, *ids_BTk.shape)
        check_range("teacher_topk: token id", ids_BTk, 0, config.vocab_size - 1)
    support_BTW = _support_of_targets(support, config, tokens_BT, reference, teacher_topk)
    num_tokens_B = None if num_tokens_B is None else jnp.asarray(num_tokens_B)
    is_one = isinstance(temperature, int | float) and temperature == 1
    temperature_B11 = None if is_one else jnp.asarray(temperature_B, jnp.float32).reshape(-1, 1, 1)
    run_config = RunConfig(impl, remat, return_routed_experts=return_routed_experts)
    inputs = Inputs(tokens_BT, num_tokens_B, inputs_BTD, segment_ids_BT, positions_BT)
    arrays = _ScoreArrays(temperature_B11, reference, teacher_topk, support_BTW)
    extras = Extras(routed_experts=routed_experts, taps=taps)
    scores, used = _score(params, config, inputs, arrays, extras, entropy, chunk, run_config)
    return dataclasses.replace(scores, routed_experts=used) if return_routed_experts else scores


def _support_of_targets(
    support: Any, config: ModelConfig, tokens_BT: Any, reference: Any, teacher_topk: Any
) -> Any:
    """Returns the masks of all tokens but the first. None: none are given. Raises InputError."""
    if support is None:
        return None
    rows, tokens = tokens_BT.shape
    check_support(support, rows, tokens, config.vocab_size)
    for name, other in (("reference", reference), ("teacher_topk", teacher_topk)):
        if other is not None:
            raise InputError(f"support does not go with {name}, which has no mask: call score for each")
    return support[:, 1:]


@in_default_modes
def map_logits(
    params: Params,
    config: ModelConfig,
    hidden_BTD: AnyArray,
    function: Callable[..., Tree],
    *args: AnyArray | None,
    chunk: int | None = None,
) -> Tree:
    """Returns `function(logits_BTV, *args)`, computed for a part of the tokens at a time.

    Use it for your own loss over the logits, if the logits of all tokens do not fit into memory. It has
    reverse-mode gradients, which compute the logits again.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        hidden_BTD: the hidden states after the final norm, from `hidden_states`.
        function: a function of float32 logits [B, C, V] and the same C tokens of each of `args`. It returns
            an array or a pytree of arrays [B, C, ...].
        args: arrays [B, T, ...], or None.
        chunk: the number C of tokens in a part. None takes the number that `score` takes.

    Returns:
        The results of `function` for all tokens, as an array or a pytree of arrays [B, T, ...].
    """
    check_params(params, config, stacked=True)
    chunk = None if chunk is None else check_integer("chunk", chunk, 1)

    def part(hidden_BCD: jax.Array, *args: jax.Array | None) -> Tree:
        return function(unembed(params, config, hidden_BCD), *args)

    return _map_tokens(part, lm_head(params)["weight"], chunk, hidden_BTD, *args)


@renamed_arguments(batch_size="rows")
@in_default_modes
def score_completions(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    rows: int = 16,
    impl: str | None = None,
) -> list[list[float]]:
    """Returns the log-probability of every token of each completion after its prompt.

    For multiple choice, repeat the prompt for each answer, and compare the sums or the means.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> prompt = xj.encode_prompt(model, "What is the capital of France?")
        >>> answers = ["The capital of France is Paris.", "The capital of France is Rome."]
        >>> completions = [model.tokenizer.encode(text) for text in answers]
        >>> scores = xj.score_completions(model.params, model.config, [prompt, prompt], completions)
        >>> sum(scores[0]) > sum(scores[1])
        True

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        prompts: a list of prompts. Each is a list with at least one token id.
        completions: a list with one completion per prompt. Each is a list with at least one token id.
        rows: the number of completions that are scored at a time (other libraries: batch_size).
        impl: the implementation of attention (see `score`). None chooses the one that suits the device.

    Returns:
        One list per completion, with a natural log-probability for each of its tokens.

    Raises:
        InputError: the lists have different lengths, ids are outside the vocabulary, or there are more tokens
            than the context length.
    """
    prompts = check_prompts(config, prompts)
    completions = check_prompts(config, completions, "completion")
    if len(prompts) != len(completions):
        raise InputError(
            f"{len(prompts)} prompts for {len(completions)} completions: give one prompt per completion"
        )
    if rows < 1:
        raise InputError(f"rows must be at least 1, got {rows}")
    texts = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    if (longest := max(map(len, texts))) > config.context_length:
        raise ContextLengthError(
            f"prompt + completion of {longest} tokens exceed the model's context limit"
            f" {config.context_length}: shorten them"
        )
    size = min(rows, next_power_of_two(len(texts)))
    found = []
    for at in range(0, len(texts), size):
        batch = texts[at : at + size]
        tokens_BT, num_tokens_B = pad_prompts(batch, config.context_length, size)  # full: one program
        scores = score(params, config, tokens_BT, num_tokens_B, impl=impl)
        found += list(np.asarray(scores.logprobs_BT)[: len(batch)])
    return [
        row[len(p) - 1 :][: len(c)].tolist() for row, p, c in zip(found, prompts, completions, strict=True)
    ]


@partial(jax.jit, static_argnames=("config", "entropy", "chunk", "run_config"))
@over_any_mesh
def _score(params, config, inputs: Inputs, arrays: _ScoreArrays, extras, entropy, chunk, run_config):
    temperature_B11, reference, teacher_topk, support_BTW = arrays
    tokens_BT = jnp.asarray(inputs.tokens_BT, jnp.int32)
    inputs = inputs._replace(tokens_BT=tokens_BT)
    out = apply_model(params, config, inputs, None, extras, run_config)
    of_reference_BTD = None
    if reference is not None:
        reference = jax.tree.map(lax.stop_gradient, reference)
        alone = inputs._replace(embeddings_BTD=None)
        plain = dataclasses.replace(run_config, return_routed_experts=False)
        of_reference_BTD = apply_model(reference, config, alone, None, NO_EXTRAS, plain).hidden
        of_reference_BTD = of_reference_BTD[:, :-1]
    ids_BTk, logprobs_BTk = (None, None) if teacher_topk is None else teacher_topk
    ids_BTk = None if ids_BTk is None else jnp.asarray(ids_BTk, jnp.int32)

    def logits(params, hidden_BCD) -> jax.Array:
        logits_BCV = head_logits(params, config, hidden_BCD)
        return logits_BCV if temperature_B11 is None else logits_BCV / temperature_B11

    def part(hidden_BCD, target_BC, of_reference_BCD, ids_BCk, logprobs_BCk, support_BCW) -> Scores:
        logits_BCV = logits(params, hidden_BCD)
        if support_BCW is not None:
            logits_BCV = keep_support(logits_BCV, support_BCW)
        total_BC = jax.nn.logsumexp(logits_BCV, -1)

        def logprobs_of(ids_BCk: jax.Array) -> jax.Array:  # NaN of those that are no tokens
            at_BCk = jnp.where(are_tokens(ids_BCk, config), ids_BCk, logits_BCV.shape[-1])
            return jnp.take_along_axis(logits_BCV, at_BCk, -1) - total_BC[..., None]

        found: dict[str, Any] = {}
        if entropy:
            finite_BCV = logits_BCV
            if support_BCW is not None:  # 0 * -inf would be NaN
                finite_BCV = jnp.where(logits_BCV > -jnp.inf, logits_BCV, 0)
            found["entropy_BT"] = total_BC - (jax.nn.softmax(logits_BCV, -1) * finite_BCV).sum(-1)
        if of_reference_BCD is not None:
            logprobs_BCV = logits_BCV - total_BC[..., None]
            other_BCV = jax.nn.log_softmax(logits(reference, of_reference_BCD), -1)
            found["kl_BT"] = (jnp.exp(logprobs_BCV) * (logprobs_BCV - other_BCV)).sum(-1)
        if ids_BCk is not None:
            apart_BCk = jnp.where(logprobs_BCk > -jnp.inf, logprobs_BCk - logprobs_of(ids_BCk), 0)
            found["topk_kl_BT"] = (jnp.exp(logprobs_BCk) * apart_BCk).sum(-1)
        return Scores(logprobs_of(target_BC[..., None])[..., 0], **found)

    of_tokens = out.hidden[:, :-1], tokens_BT[:, 1:], of_reference_BTD, ids_BTk, logprobs_BTk, support_BTW
    scores = _map_tokens(part, lm_head(params)["weight"], chunk, *of_tokens)
    read = config, tokens_BT, inputs.num_tokens_B, inputs.segment_ids_BT, inputs.embeddings_BTD is None
    return Scores(**mask_scores(vars(scores), *read)), out.routed_experts


def _map_tokens(function: Callable, matrix: Any, chunk: int | None, *args: Any) -> Any:
    """Returns function(*args), of arrays [B, T, ...] to arrays [B, T, ...], for parts of T of equal size: of
    `chunk` tokens, or by `_chunk` of the vocabulary's matrix. T is split, not B: rows may be on different
    devices.
    """
    B, T = args[0].shape[:2]
    parts = -(-T // (chunk or _chunk(matrix, B, T)))
    size = -(-T // parts)

    def split(x_BT: jax.Array) -> jax.Array:  # [parts, B, size, ...]
        padded_BT = jnp.pad(x_BT, ((0, 0), (0, parts * size - T), *[(0, 0)] * (x_BT.ndim - 2)))
        return jnp.moveaxis(padded_BT.reshape(B, parts, size, *x_BT.shape[2:]), 1, 0)

    # The iterations of a loop are not merged anyway.
    part = jax.checkpoint(lambda args: function(*args), prevent_cse=False)
    done = lax.map(part, jax.tree.map(split, args))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])[:, :T], done)


def _chunk(matrix: Any, B: int, T: int) -> int:
    """Returns the tokens of each row whose logits exist at the same time, if the caller gives no `chunk`: all
    of them if they and their gradient take no more than the gradient of the vocabulary's matrix. A loop over
    parts would carry that.
    """
    if not (isinstance(B, int) and isinstance(T, int)):  # symbolic
        return T
    carried = matrix.size * matrix.dtype.itemsize if isinstance(matrix, AnyArray) else 0
    row = B * matrix.shape[0]
    is_whole = T * row <= _MOST_LOGITS and 2 * 4 * T * row <= carried
    return T if is_whole else max(1, MAX_LOGITS // row)
