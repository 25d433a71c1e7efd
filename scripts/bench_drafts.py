"""Times decoding by an engine without drafts, with a fixed number of draft tokens, and with
`draft_tokens="auto"`: in turn in one process, for several numbers of rows.

    python scripts/bench_drafts.py --rows=1,8
    python scripts/bench_drafts.py --config=qwen2.5-0.5b --rows=1 --sides=plain,fixed --new_tokens=33 \\
        --acceptance=0.6,0.8,0.9 --rounds=3

Without --config the bundled model answers questions, with its own head. Their phrasing or system message was
in the training of neither. With --config the weights are random, also those of a head for multi-token
prediction. The head takes its time, but its tokens are replaced: each is right with the probability of
--acceptance.

Prints, for each number of rows and acceptance rate, the median tokens per second of each engine after the
first token of each row, and its ratio to the engine without drafts: median and quartiles.
"""

from launcher import start

# isort: split
import dataclasses
import os
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from train.head_data import MOST_ANSWER_TOKENS, measured_prompts

import xinfer_jax as xj
from xinfer_jax.draft_heads.mtp import Mtp
from xinfer_jax.estimates.model_shapes import hf_config
from xinfer_jax.families.draft_heads import mtp_spec

_CONFIG = flags.DEFINE_string("config", "", "A built-in shape with random weights; empty: the bundled model.")
_ROWS = flags.DEFINE_list("rows", ["1", "8"], "Numbers of rows.")
_ACCEPTANCE = flags.DEFINE_list("acceptance", ["0.8"], "With --config: acceptance rates of a draft token.")
_DRAFTS = flags.DEFINE_integer("draft_tokens", 3, "The fixed number of draft tokens.", 1, 16)
_TOKENS = flags.DEFINE_integer("new_tokens", 128, "With --config: tokens of each answer.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Calls of each engine.", lower_bound=1)
_SIDES = flags.DEFINE_list("sides", ["plain", "fixed", "auto"], "The engines, of which plain is the first.")
_QUESTIONS = 24  # of each of two groups


@dataclasses.dataclass(frozen=True)
class ForcedMtp(Mtp):
    """A head whose draft tokens are replaced by the known tokens at their positions, with a probability."""

    def draft(self, params: Any, call: Any, count: int) -> tuple[jax.Array, Any]:
        draft_BT, cache = super().draft(params, call, count)
        position_BT = call.context.position_B[:, None] + jnp.arange(count)
        known_BT = jnp.take(params.own["known_S"], position_BT, mode="clip")
        row_BT = jnp.arange(len(draft_BT))[:, None]
        draw = jax.vmap(jax.vmap(lambda at: jax.random.uniform(jax.random.fold_in(jax.random.key(0), at))))
        is_right_BT = draw(position_BT * len(draft_BT) + row_BT) < params.own["rate"]
        wrong_BT = jnp.where(draft_BT == known_BT, draft_BT + 1, draft_BT) % self.target.vocab_size
        return jnp.where(is_right_BT, known_BT, wrong_BT), cache


def random_model() -> xj.Model:
    """Returns a model with a head, of random weights."""
    config = xj.ModelConfig.from_hf(hf_config(_CONFIG.value))
    config = dataclasses.replace(config, draft_head=mtp_spec(config))
    return xj.Model(xj.init_params(config, jax.random.key(0), "float32"), config)


def forced_draft(model: xj.Model, row: list[int], rate: float) -> xj.Draft:
    """Returns a head that knows the tokens of a row."""
    own = model.params["draft_head"] | dict(known_S=jnp.array(row), rate=jnp.float32(rate))
    head = Mtp.of_model(model.config)
    return xj.Draft(own, ForcedMtp(head.config, head.target))


def measure(engine: Any, prompts: list[list[int]], options: xj.GenerateOptions) -> float:
    """Answers as many prompts at a time as the engine has rows. Returns the tokens per second after the first
    token of each row.
    """
    tokens = 0
    seconds = 0.0
    for at in range(0, len(prompts), engine.rows):
        requests = engine.submit_many(prompts[at : at + engine.rows], options, live=False)
        tokens += sum(len(request.result().tokens[0]) - 1 for request in requests)
        times = [request.times for request in requests]
        seconds += max(own["ended"] for own in times) - max(own["first"] for own in times)
    return tokens / seconds


def compare(
    model: xj.Model, prompts: list[list[int]], options: xj.GenerateOptions, rows: int, draft: Any
) -> None:
    """Measures the three engines in turn, and prints the result."""
    capacity = -(-(max(map(len, prompts)) + options.max_tokens) // 64) * 64
    shape = dict(rows=rows, capacity=capacity, chunk=64, warm_up=True)
    widths = dict(plain={}, fixed=dict(draft_tokens=_DRAFTS.value), auto=dict(draft_tokens="auto"))
    engines = {
        side: xj.Engine(model, **shape, **widths[side], draft=None if side == "plain" else draft)
        for side in _SIDES.value
    }
    for engine in engines.values():
        for _ in range(2):
            measure(engine, prompts, options)
    found = np.empty((_ROUNDS.value, len(_SIDES.value)))
    before = {side: engine.stats for side, engine in engines.items()}
    for number in range(_ROUNDS.value):
        order = np.roll(np.arange(len(_SIDES.value)), number)
        for side in order:
            found[number, side] = measure(engines[_SIDES.value[side]], prompts, options)
    for side, name in enumerate(_SIDES.value):
        stats = engines[name].stats
        accepted = sum(stats.accepted) / max(1, stats.drafted)
        low, median, high = np.quantile(found[:, side] / found[:, 0], (0.25, 0.5, 0.75))
        line = f"{rows} rows  {name:5} {np.median(found[:, side]):8.1f} tokens/s"
        print(f"{line}  {median:.2f} ({low:.2f}-{high:.2f})  {accepted:.2f} accepted", flush=True)
    if auto := engines.get("auto"):
        drafted = np.subtract(auto.stats.drafted_by_place, before["auto"].drafted_by_place or 0)
        print(f"{rows} rows  auto drafted by place: {drafted.tolist()}", flush=True)
    for engine in engines.values():
        engine.close()


def main(argv: list[str]) -> None:
    print("python", *sys.argv)
    print(f"{os.cpu_count()} processors, {platform.machine()}, jax {jax.__version__}", flush=True)
    if not _CONFIG.value:
        model = xj.load_model(draft_head=True)
        held_out, of_system, *_ = measured_prompts(model.tokenizer, _QUESTIONS).values()
        questions = held_out + of_system
        options = xj.GenerateOptions(max_tokens=MOST_ANSWER_TOKENS)
        for rows in map(int, _ROWS.value):
            compare(model, questions, options, rows, "mtp")
        return
    model = random_model()
    prompt = np.random.RandomState(0).randint(0, model.config.vocab_size, 16).tolist()
    options = xj.GenerateOptions(max_tokens=_TOKENS.value, eos_token_ids=())
    (answer,) = xj.generate(model.params, model.config, [prompt], options).tokens
    for rate in map(float, _ACCEPTANCE.value):
        print(f"acceptance {rate}")
        for rows in map(int, _ROWS.value):
            compare(model, [prompt] * rows, options, rows, forced_draft(model, prompt + answer, rate))


if __name__ == "__main__":
    start(main)
