"""The types that a program using the library sees. Nothing runs here: mypy checks the file with
`mypy --strict --follow-imports=silent tests/support/typed_client.py`.
"""

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
options = xj.GenerateOptions(max_tokens=8, sampling=xj.SamplingConfig(temperature=0.7), stop_strings=["\n"])
talk = [{"role": "user", "content": "Why?"}]
assert_type(xj.generate_text(model, "Why?", options, key=jax.random.key(0)), str)
assert_type(xj.generate_text(model, talk), str)
assert_type(xj.generate_text(model, ["Why?", "How?"]), list[str])
assert_type(xj.generate_text(model, ("Why?", talk)), list[str])
assert_type(xj.generate_text(model, [talk, talk], system="Be brief."), list[str])
assert_type(xj.stream_text(model, "Why?"), xj.types.TextStream)
assert_type(xj.encode_prompt(model, talk), list[int])

# Token ids.
out = xj.generate(params, config, [[1, 2], [3]], xj.GenerateOptions(eos_token_ids=None))
assert_type(out, xj.types.GenerateOutput)
assert_type(out.tokens, list[list[int]])
assert_type(out.stats.tpot_seconds, float)
assert_type(out.prefix, xj.types.Prefix | None)
assert_type(next(xj.stream(params, config, [[1]])), list[int | None])
assert_type(xj.beam_search(params, config, [1, 2]), xj.types.BeamOutput)
assert_type(xj.score_completions(params, config, [[1]], [[2]]), list[list[float]])
assert_type(xj.alternatives_text(model, out)[0][0].probability, float)

# Arrays, of JAX or NumPy.
tokens_BT = np.ones((1, 4), np.int32)
num_tokens_B = np.array([4])
assert_type(xj.forward(params, config, tokens_BT), tuple[jax.Array, None])
cache = xj.init_cache(config, rows=1, capacity=16)
assert_type(cache, xj.KVCache)
assert_type(xj.forward(params, config, tokens_BT, cache, num_tokens_B), tuple[jax.Array, xj.KVCache])
logits, cache = xj.forward(params, config, tokens_BT, cache)
assert_type(logits, jax.Array)
assert_type(cache, xj.KVCache)
hidden, _ = xj.hidden_states(params, config, tokens_BT)
assert_type(hidden, jax.Array)
assert_type(xj.run_model(params, config, tokens_BT, return_routed_experts=True), xj.types.ModelOutput)
assert_type(xj.unembed(params, config, hidden), jax.Array)
assert_type(xj.embed_tokens(params, config, tokens_BT), jax.Array)
logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
state = xj.decode_loop(
    params, config, logits_BV, cache, jax.random.key(0), xj.SamplingConfig(), np.array([2]), max_tokens=4
)
assert_type(state, xj.types.Decoded)
assert_type(cache.truncate(2), xj.KVCache)
assert_type(xj.score(params, config, tokens_BT), jax.Array)
assert_type(xj.ModelConfig.from_hf({"model_type": "qwen2"}), xj.ModelConfig)
assert_type(xj.init_params(config, jax.random.key(0)), dict[str, Any])

# What a type checker must reject: an unused "ignore" is an error.
xj.generate_texts(model, "Why?")  # type: ignore[attr-defined]
xj.generate_text(model, 5)  # type: ignore[call-overload]
xj.GenerateOptions(max_tokens=5)  # type: ignore[call-arg]
xj.SamplingConfig.from_hf(5)  # type: ignore[arg-type]
xj.forward(params, config, tokens_BT, return_routed_experts=True)  # type: ignore[call-arg]
