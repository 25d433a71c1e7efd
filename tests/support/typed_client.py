"""A program that uses the library, as its documentation shows it. Nothing runs here: type checkers read it.

    mypy --strict --follow-imports=silent tests/support/typed_client.py
    pyright tests/support/typed_client.py

Each line under "Mistakes" is an error for both type checkers. If one becomes valid, its "ignore" is an error.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedExpression=false
from typing import Any, assert_type

import jax
import numpy as np

import xinfer_jax as xj

model = xj.load_model("directory", dtype="float32")
assert_type(model, xj.Model)
assert_type(model.config, xj.ModelConfig)
assert_type(model.tokenizer, xj.Tokenizer | None)
assert_type(xj.__version__, str)
params = model.params
config = model.config

# Text: one prompt gives a text, a list gives a list.
sampling = xj.SamplingConfig(
    temperature=0.7, top_k=np.array([5, 50]), logit_bias={3: -1.0}, bad_words_ids=[[1]]
)
options = xj.GenerateOptions(max_tokens=8, sampling=sampling, stop_strings=["\n"], cache_dtype="int8")
talk = [{"role": "user", "content": "Why?"}]
assert_type(xj.generate_text(model, "Why?", options, key=jax.random.key(0)), str)
assert_type(xj.generate_text(model, talk), str)
assert_type(xj.generate_text(model, ["Why?", "How?"]), list[str])
assert_type(xj.generate_text(model, ("Why?", talk)), list[str])
assert_type(xj.generate_text(model, [talk, talk], system="Be brief."), list[str])
assert_type(xj.stream_text(model, "Why?"), xj.types.TextStream)
assert_type(xj.encode_prompt(model, talk), list[int])
xj.stream_text(model, "Why?").prepare().wait()

# Token ids.
out = xj.generate(params, config, [[1, 2], [3]], xj.GenerateOptions(eos_token_ids=None, draft="lookup"))
assert_type(out, xj.types.GenerateOutput)
assert_type(out.tokens, list[list[int]])
assert_type(out.stats.tpot_seconds, float)
assert_type(out.prefix, xj.types.Prefix | None)
assert_type(next(xj.stream(params, config, [[1]])), list[int | None])
beams = xj.beam_search(params, config, [1, 2], early_stopping=True)
assert_type(beams.sequences, list[list[list[int]]])
assert_type(beams.scores, list[list[float]])
assert_type(xj.score_completions(params, config, [[1]], [[2]]), list[list[float]])
assert_type(xj.alternatives_text(model, out)[0][0].probability, float)

# Arrays, of JAX or NumPy.
tokens_BT = np.ones((1, 4), np.int32)
num_tokens_B = np.array([4])
assert_type(xj.forward(params, config, tokens_BT), tuple[jax.Array, None])
cache = xj.init_cache(config, rows=1, capacity=16, dtype="bfloat16")
assert_type(cache, xj.KVCache)
assert_type([layer.capacity for layer in cache.layers][0], int)
assert_type(xj.forward(params, config, tokens_BT, cache, num_tokens_B), tuple[jax.Array, xj.KVCache])
hidden, _ = xj.hidden_states(params, config, tokens_BT, remat="layer")
assert_type(hidden, jax.Array)
read = xj.run_model(params, config, tokens_BT, cache, taps={3: xj.Tap(read=True)})
assert_type(read.cache, xj.KVCache)
assert_type(read.hidden, jax.Array)
assert_type(read.reads, dict[int | tuple[int, str], jax.Array] | None)
assert_type(xj.run_model(params, config, tokens_BT).cache, None)
assert_type(xj.unembed(params, config, hidden), jax.Array)
assert_type(xj.embed_tokens(params, config, tokens_BT), jax.Array)
logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
state = xj.decode_loop(
    params, config, logits_BV, cache, jax.random.key(0), xj.SamplingConfig(), np.array([2]), max_tokens=4
)
assert_type(state, xj.types.Decoded)
assert_type(state.cache, xj.KVCache)
assert_type(state.length_B, jax.Array)
assert_type(state.cache.truncate(2), xj.KVCache)
packed = xj.rollouts.pack_rollout(tokens_BT, num_tokens_B, state)
assert_type(packed.routed_experts, jax.Array | None)
scores = xj.score(params, config, packed.tokens_BT, packed.num_tokens_B, entropy=True)
assert_type(scores, xj.types.Scores)
assert_type(scores.logprobs_BT, jax.Array)
assert_type(scores.entropy_BT, jax.Array | None)


def best(logits_BCV: jax.Array) -> jax.Array:
    return logits_BCV.max(-1)


assert_type(xj.rollouts.map_logits(params, config, hidden, best), jax.Array)
assert_type(xj.ModelConfig.from_hf({"model_type": "qwen2"}), xj.ModelConfig)
assert_type(xj.init_params(config, jax.random.key(0)), dict[str, Any])

# Engines.
with xj.Engine(
    model, xj.EngineOptions(rows=4), capacity=128, cache_dtype="int8", routed_experts=True
) as engine:
    request = engine.submit("Why?", options, priority=3, key=jax.random.key(1))
    assert_type(request, xj.types.Request)
    assert_type(engine.submit_many([[1], [2]], adapter=["one", None]), list[xj.types.Request])
    assert_type(engine.generate([[1]], salt="mine"), list[xj.types.GenerateOutput])
    assert_type(engine.stats, xj.types.EngineStats)
    assert_type(engine.rows, int)
    assert_type(engine.version, int)
    engine.add_adapter("one", xj.lora.init_adapter(config, jax.random.key(0), rank=2))
    engine.update(params)


async def rollout(engine: xj.Engine) -> list[int]:
    answer = await engine.sample(tokens_BT[0], options, seed=3, client="trainer")
    assert_type(answer, xj.types.SampleOutput)
    return [int(token) for token in answer.tokens_T]


report = xj.generate_file(model, "in.jsonl", "out.jsonl", rows=4, seed=1)
assert_type(report["errors"], int)
generator = xj.DatasetGenerator(None, options, rows=2)

# Mistakes.
engine.submit("Why?", prioritty=3)  # type: ignore[call-arg]
xj.Engine(model, row=4)  # type: ignore[call-arg]
xj.generate_file(model, "in", "out", row=4)  # type: ignore[call-arg]
xj.SamplingConfig(temperature="hot")  # type: ignore[arg-type]
xj.score(params, config, tokens_BT).sum()  # type: ignore[attr-defined]
-xj.score(params, config, tokens_BT)  # type: ignore[operator]
xj.score(params, config, tokens_BT)[0]  # type: ignore[index]
xj.GenerateOptions(max_token=5)  # type: ignore[call-arg]
engine.updat(params)  # type: ignore[attr-defined]
xj.generate_texts(model, "Why?")  # type: ignore[attr-defined]
xj.generate_text(model, 5)  # type: ignore[call-overload]
xj.SamplingConfig.from_hf(5)  # type: ignore[arg-type]
xj.forward(params, config, tokens_BT, return_routed_experts=True)  # type: ignore[call-arg]
