"""Runs many requests through one engine, and checks memory, pages and compilations.

    python scripts/soak_engine.py --requests=20000
    python scripts/soak_engine.py --updates --tokens=10000
    python scripts/soak_engine.py --requests=2000 --adapters=16
    python scripts/soak_engine.py --requests=2000 --callers

Prints a JSON line for every 1,000 requests, and one at the end. Exit code 1: resident memory grew by --most
MiB or more after the first thousand requests, a page leaked, or a program was compiled after the engine was
ready. With --updates: an answer was not replayed bit for bit. With --adapters each request has a LoRA adapter
or none, and at every twentieth an adapter is replaced, or removed and added again. With --callers most
requests have logits processors and a vector of the caller, with different arguments.
"""

from launcher import start

# isort: split
import dataclasses
import json
import random
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from soak.engine_requests import compilations, draw, outcome, processors_and_taps
from soak.server_requests import resident

import xinfer_jax as xj

UPDATES = flags.DEFINE_bool("updates", False, "Replace weights in flight, also in int8, and replay answers.")
TOKENS = flags.DEFINE_integer("tokens", 10_000, "With --updates: tokens of each engine.", lower_bound=100)
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
REQUESTS = flags.DEFINE_integer("requests", 20_000, "Number of requests.", lower_bound=1000)
LONGEST = flags.DEFINE_integer("longest", 100, "Tokens of the longest prompt.", lower_bound=1)
NEW = flags.DEFINE_integer("new_tokens", 8, "Largest number of tokens of an answer.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 4, "Rows of the engine.", lower_bound=1)
PAGES = flags.DEFINE_integer("pages", 20, "Pages of the engine.", lower_bound=2)
ADAPTERS = flags.DEFINE_integer("adapters", 0, "LoRA adapters that the engine holds.", lower_bound=0)
CALLERS = flags.DEFINE_bool("callers", False, "The engine has processors and a vector of the caller.")
MOST = flags.DEFINE_float("most", 20, "Limit of memory growth, in MiB.", lower_bound=0)
MODES = ("continue", "recompute", "wait")


def main(argv: list[str]) -> int:
    model = xj.load_model(MODEL.value)
    rng = random.Random(0)
    shape = dict(rows=ROWS.value, pages=PAGES.value, capacity=512, chunk=128, time_slice=0.01)
    if UPDATES.value:
        runs = [run_updates(model, q, shape, TOKENS.value, LONGEST.value) for q in (None, "int8")]
        for found in runs:
            print(json.dumps(found), flush=True)
        return int(any(found[name] for found in runs for name in ("wrong", "unmarked", "compiled", "lost")))
    start_s = time.perf_counter()
    sizes = []
    contents = [
        xj.lora.init_adapter(model.config, jax.random.key(i), 4 + i % 5) for i in range(ADAPTERS.value)
    ]
    contents = [jax.tree.map(lambda x: x + 0.05, adapter) for adapter in contents]  # b is zero until then
    names = [f"adapter {i}" for i in range(ADAPTERS.value)]
    shape |= dict(adapters=dict(zip(names, contents, strict=True)), max_adapters=2 * ADAPTERS.value)
    own = processors_and_taps(model.config) if CALLERS.value else {}
    with xj.Engine(model, **shape, **own, warm_up=True) as engine, compilations() as compiled:
        for _ in range(REQUESTS.value // 1000):
            for drawn in draw(rng, model.config.vocab_size, 1000, LONGEST.value, shape):
                fewer = min(drawn.options.max_tokens, NEW.value)
                options = dataclasses.replace(drawn.options, max_tokens=fewer, **draw_callers(rng))
                name = rng.choice([None, *names])
                request = engine.submit(drawn.ids, options, key=drawn.key, adapter=name, **drawn.more)
                if name and rng.random() < 1 / 20:
                    change_adapter(engine, name, rng.choice(contents), rng.random() < 1 / 2)
                if engine.stats.waiting > 50:
                    outcome(request)
            outcome(request)
            sizes.append(round(resident(), 1))
            print(json.dumps(dict(requests=engine.stats.requests, resident_mib=sizes[-1])), flush=True)
        engine.generate([[1]], xj.GenerateOptions(max_tokens=1))
        while engine.stats.running + engine.stats.prefilling + engine.stats.waiting:
            time.sleep(0.1)
        stats = engine.stats
    lost = engine.pages - 1 - stats.pages_free - stats.pages_cached
    grown = round(max(sizes) - sizes[0], 1)
    seconds = round(time.perf_counter() - start_s, 1)
    print(
        json.dumps(dict(grown_mib=grown, lost=lost, compiled=len(compiled), seconds=seconds, **vars(stats)))
    )
    return int(grown >= MOST.value or lost > 0 or bool(compiled))


def run_updates(
    model: xj.Model, quantize: str | None, shape: dict, tokens: int, longest: int
) -> dict[str, Any]:
    """Samples this number of tokens, with an update of each of `MODES` in flight, and replays every answer.

    Returns counts. `wrong` answers are not replayed bit for bit, so a token of them has another version than
    they say, or other keys. `unmarked` answers have the same bits with their versions exchanged.
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
        submitted: list[xj.types.Request] = []
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


def draw_callers(rng: random.Random) -> dict:
    """Draws options of a request for --callers: some of these, with arguments."""
    if not CALLERS.value:
        return {}
    named = {name: rng.uniform(0, 3) for name in ("less", "noise") if rng.random() < 1 / 2}
    return dict(processors=named or None, taps=dict(up=rng.uniform(-1, 1)) if rng.random() < 1 / 2 else None)


def change_adapter(engine: xj.Engine, name: str, adapter: xj.lora.Adapter, in_place: bool) -> None:
    """Gives a name another adapter: for requests that have it too, or for later ones alone."""
    if in_place:
        engine.update_adapter(name, adapter, mode=random.choice(("continue", "recompute")))
        return
    engine.remove_adapter(name)
    while len(engine.adapters.with_places) >= 2 * ADAPTERS.value:
        time.sleep(0.001)
    engine.add_adapter(name, adapter)


if __name__ == "__main__":
    start(main)
