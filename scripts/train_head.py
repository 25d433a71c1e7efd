"""Trains a draft head (multi-token prediction) of the bundled model on the model's own answers.

`pip install -e '.[train]'`, then `python scripts/train_head.py`: some minutes on two CPU cores. It writes
mtp.safetensors to --output, and sets `mtp_num_hidden_layers` in the config.json there, if there is one. The
same seed gives the same weights on one machine with the same versions.
"""

from launcher import start

# isort: split
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from safetensors.numpy import save
from train import head_data
from train.head_data import Answers

import xinfer_jax as xj
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.draft_heads.draft_head import DraftCall, HeadParams, UnreadTokens
from xinfer_jax.draft_heads.mtp import Mtp
from xinfer_jax.families.draft_heads import mtp_spec
from xinfer_jax.families.naming import file_specs
from xinfer_jax.formats.files import BUNDLED
from xinfer_jax.weights.params import Params

_OUTPUT = flags.DEFINE_string("output", str(BUNDLED), "Directory to write to.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the initial weights, the prompts and their order.")
_PROMPTS = flags.DEFINE_integer("prompts", 6000, "Different prompts to train on.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Training steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 32, "Answers per step.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Highest learning rate of Adam.", lower_bound=0)
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 3, "Draft tokens in a row to train.", lower_bound=1)
_LOG_EVERY = flags.DEFINE_integer("log_every", 100, "Steps between lines of losses.", lower_bound=1)
_MEASURED = flags.DEFINE_integer(
    "measured", None, "The most prompts of each group of the measurement. By default all.", lower_bound=1
)

FILE = "mtp.safetensors"
STEPS = 256  # steps of a decoder that are measured in one call
LENGTHS = (48, 72)  # answers with their prompts are padded to one of these; the rare longer ones are dropped
TARGETS = head_data.MOST_ANSWER_TOKENS


class Accepted(NamedTuple):
    """Draft tokens of N steps, C of each."""

    row_N: np.ndarray  # int32: the answer of each step
    exists_NC: np.ndarray  # bool: the answer has such a token
    accepted_NC: np.ndarray  # bool: this draft token and those before it are right


def batches(answers: Answers, seed: int, rows: int) -> Iterator[Answers]:
    """Yields an endless stream of batches. Each has answers of similar length."""
    rng = np.random.default_rng(seed)
    pending: dict[int, list[int]] = {length: [] for length in LENGTHS}
    while True:
        for row in rng.permutation(len(answers.length_B)):
            length = next((length for length in LENGTHS if answers.length_B[row] <= length), None)
            if length is None:
                continue
            pending[length].append(row)
            if len(pending[length]) == rows:
                batch = answers.rows(np.array(pending[length]))
                pending[length] = []
                yield batch._replace(tokens_BT=batch.tokens_BT[:, :length])


def shifted(x_BTD: jax.Array) -> jax.Array:
    """Returns the features of the token before each, zeros for the first."""
    return jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def mean_losses(own: Params, head: Mtp, target: Params, batch: Answers, count: int) -> jax.Array:
    """Returns the mean KL divergence of the head's distribution from the model's, for the first to the last
    of `count` draft tokens in a row, [count]. From the second token on, the features are the head's states.

    The tokens of answers count, except the first, which the model samples after the prompt.
    """
    (tokens_BT, prompt_B, length_B) = batch
    params = HeadParams(own, target)
    step_W = jnp.arange(TARGETS)
    at_BW = prompt_B[:, None] + step_W  # tokens after which a token is drafted
    last = tokens_BT.shape[1] - 1

    def logprobs(states_BTD: jax.Array) -> jax.Array:
        states_BWD = jnp.take_along_axis(states_BTD, jnp.minimum(at_BW, last)[..., None], 1)
        return jax.nn.log_softmax(head.logits(params, states_BWD))

    states_BTD, _ = xj.hidden_states(target, head.target, tokens_BT, num_tokens_B=length_B)
    right_BWV = logprobs(states_BTD)
    losses = []
    for i in range(count):
        unread = UnreadTokens(tokens_BT, shifted(states_BTD), length_B)
        call = DraftCall(unread, None, None, None, None, RunConfig())
        states_BTD, _ = head.run(params, unread, call)
        loss_BW = optax.losses.kl_divergence_with_log_targets(logprobs(states_BTD), right_BWV)
        counts_BW = (at_BW + 1 < length_B[:, None]) & (step_W >= i)
        losses.append(jnp.sum(loss_BW * counts_BW) / jnp.maximum(counts_BW.sum(), 1))
    return jnp.stack(losses)


def train(model: xj.Model, head: Mtp, own: Params, stream: Iterator[Answers]) -> Params:
    """Trains with Adam, warm-up and cosine decay to 1% of the learning rate. Prints the losses."""
    steps = _STEPS.value
    rate = _LEARNING_RATE.value
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps, rate / 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

    def loss_of(own: Params, target: Params, batch: Answers) -> tuple[jax.Array, jax.Array]:
        losses = mean_losses(own, head, target, batch, _DRAFT_TOKENS.value)
        return losses.mean(), losses

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(own, state, target, batch):
        gradient, losses = jax.grad(loss_of, has_aux=True)(own, target, batch)
        change, state = optimizer.update(gradient, state, own)
        return optax.apply_updates(own, change), state, losses

    state = optimizer.init(own)
    recent = []
    begin = time.perf_counter()
    for step, batch in zip(range(1, steps + 1), stream, strict=False):
        own, state, losses = update(own, state, model.params, batch)
        recent.append(losses)
        if step % _LOG_EVERY.value == 0 or step == steps:
            means = (f"{loss:.4f}" for loss in np.mean(jax.device_get(recent), 0))
            print(f"step {step:5}  losses", *means, f" {time.perf_counter() - begin:.0f} s", flush=True)
            recent = []
    return own


def new_head(model: xj.Model, seed: int) -> tuple[Mtp, Params]:
    """Returns a head of this model with random parameters."""
    config = dataclasses.replace(model.config, draft_head=mtp_spec(model.config))
    init = jax.jit(lambda key: xj.init_params(config, key, jnp.float32)["draft_head"])
    return Mtp.of_model(config), init(jax.random.key(seed))


@partial(jax.jit, static_argnums=(0, 3))
def draft_tokens(head: Mtp, params: HeadParams, unread: UnreadTokens, count: int) -> jax.Array:
    """Returns greedy draft tokens, int32 [B, count], after these tokens."""
    (B, T) = unread.tokens_BT.shape
    cache = xj.init_cache(head.config, B, T + count)
    call = DraftCall(unread, cache, None, None, greedy, RunConfig())
    return head.draft(params, call, count)[0]


def accepted(model: xj.Model, head: Mtp, own: Params, answers: Answers, count: int) -> Accepted:
    """Drafts after each token of each answer, except the last, as a decoder does."""
    (tokens_BT, prompt_B, length_B) = answers
    T = tokens_BT.shape[1]
    place_T = np.arange(T)
    (row_N, at_N) = np.nonzero((place_T >= prompt_B[:, None]) & (place_T + 1 < length_B[:, None]))  # N steps
    hidden_BTD, _ = jax.jit(xj.hidden_states, static_argnums=1)(model.params, model.config, tokens_BT)
    features_BTD = np.asarray(jax.jit(shifted)(hidden_BTD))
    draft_NC = np.zeros((len(row_N), count), np.int32)
    for first in range(0, len(row_N), STEPS):
        row_S = np.resize(row_N[first : first + STEPS], STEPS)
        num_tokens_S = np.resize(at_N[first : first + STEPS], STEPS) + 1
        unread = UnreadTokens(tokens_BT[row_S], features_BTD[row_S], num_tokens_S)
        drafted_SC = draft_tokens(head, HeadParams(own, model.params), unread, count)
        draft_NC[first : first + STEPS] = drafted_SC[: len(row_N) - first]
    place_NC = at_N[:, None] + 1 + np.arange(count)
    right_NC = draft_NC == tokens_BT[row_N[:, None], np.minimum(place_NC, T - 1)]
    exists_NC = place_NC < length_B[row_N, None]
    return Accepted(row_N, exists_NC, np.logical_and.accumulate(right_NC, 1) & exists_NC)


def print_acceptance(model: xj.Model, head: Mtp, own: Params) -> None:
    """Prints the acceptance by the position of the draft token, for each group of prompts."""
    groups = head_data.measured_prompts(model.tokenizer, _MEASURED.value)
    answers = head_data.answers(model, list(itertools.chain(*groups.values())))
    (row_N, exists_NC, accepted_NC) = accepted(model, head, own, answers, _DRAFT_TOKENS.value)
    first = 0
    for group, prompts in groups.items():
        chosen_N = (row_N >= first) & (row_N < first + len(prompts))
        shares = accepted_NC[chosen_N].sum(0) / np.maximum(exists_NC[chosen_N].sum(0), 1)
        print(*(f"{share:.3f}" for share in shares), f"accepted of {len(prompts)} prompts: {group}")
        first += len(prompts)


def greedy(logits_BV: jax.Array, context: Any) -> tuple[jax.Array, Any]:
    """Returns the best tokens, and the context as it is."""
    return jnp.argmax(logits_BV, -1).astype(jnp.int32), context


def write_head(directory: Path, head: Mtp, own: Params) -> None:
    """Writes the parameters, and the number of the head's layers to config.json, if there is one."""
    names = [spec.hf_name for spec in jax.tree.leaves(file_specs(head.target)["draft_head"])]
    complete = directory / f".{FILE}.new"
    tensors = dict(zip(names, jax.tree.leaves(own), strict=True))
    complete.write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(complete, directory / FILE)
    config = directory / "config.json"
    if config.exists():
        settings = json.loads(config.read_text(encoding="utf-8")) | dict(mtp_num_hidden_layers=1)
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    output = Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    model = xj.load_model(dtype=jnp.float32)
    begin = time.perf_counter()
    cpu = time.process_time()
    prompts = head_data.training_prompts(model.tokenizer, _SEED.value, _PROMPTS.value)
    answers = head_data.answers(model, prompts)
    print(f"{len(prompts)} answers  {time.perf_counter() - begin:.0f} s", flush=True)
    (head, own) = new_head(model, _SEED.value)
    own = train(model, head, own, batches(answers, _SEED.value, _BATCH.value))
    seconds = time.perf_counter() - begin
    cpu_seconds = time.process_time() - cpu
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), own)
    print_acceptance(model, head, jax.tree.map(lambda leaf: leaf.astype(np.float32), rounded))
    write_head(output, head, rounded)
    print(f"{output / FILE}: trained in {seconds:.0f} s, {cpu_seconds:.0f} s of CPU time")


if __name__ == "__main__":
    start(main)
