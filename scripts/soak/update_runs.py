"""Answers in whose course an engine's weights are replaced; for soak_engine.py."""

import random
import time
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj
from soak.engine_requests import compilations, draw, outcome

MODES = ("continue", "recompute", "wait")


def run(model: xj.Model, quantize: str | None, shape: dict, tokens: int, longest: int) -> dict[str, Any]:
    """Samples so many tokens, with an update of each of `MODES` in flight, and replays every answer.

    Returns counts: `wrong` answers are not replayed bit for bit, so that a token of them has another version
    than they say, or other keys; `unmarked` ones have the same bits with their versions exchanged.
    """
    trees = [jax.tree.map(lambda x, i=i: np.asarray(x) * (1 - i / 20), model.params) for i in range(4)]
    if quantize:
        model = xj.load_model(None if model.name == "bundled" else model.name, quantize=quantize)
    rng = random.Random(0)
    start_s = time.perf_counter()
    with xj.Engine(model, **shape, warm_up=True) as engine, compilations() as compiled:
        asked = draw(rng, model.config.vocab_size, 10 * tokens // 40, longest, shape)
        asked = [one for one in asked if not one.options.n > 1 and "deadline" not in one.more]
        own = engine.model.params
        submitted: list[xj.Request] = []
        modes = list(MODES)
        while (count := engine.stats.generated_tokens) < tokens or modes:
            while engine.stats.waiting < 8 and asked:
                one = asked.pop()
                submitted.append(engine.submit(one.ids, one.options, key=one.key, **one.more))
            if modes and count > tokens * (4 - len(modes)) / 4:
                engine.update(trees[4 - len(modes)], mode=modes.pop(0))
            time.sleep(0.005)
        answered = [r for r in submitted if not isinstance(outcome(r)[0], str)]
        ended = [r for r in answered if r.answers[0].logprobs]
        mixed = [r for r in ended if len({*r.answers[0].token_versions}) > 1]
        params = dict(enumerate([own, *trees[1:]]))
        wrong = sum(engine.replay(r, params) != r.answers[0].logprobs for r in ended)
        exchanged = dict(enumerate([trees[3], own, *trees[1:3]]))
        unmarked = sum(engine.replay(r, exchanged) == r.answers[0].logprobs for r in mixed)
        while engine.stats.pages_used:
            time.sleep(0.01)
        stats = engine.stats
        lost = engine.pages - 1 - stats.pages_free - stats.pages_cached
    return dict(
        quantize=quantize, tokens=stats.generated_tokens, answers=len(ended), mixed=len(mixed), wrong=wrong,
        unmarked=unmarked, compiled=len(compiled), lost=lost,
        preemptions=stats.preemptions, hits=stats.hits, seconds=round(time.perf_counter() - start_s, 1),
    )  # fmt: skip
