"""Draws small random checkpoints of hybrids (Qwen3-Next, Qwen3.5), Gemma 4 and gpt-oss, and compares them
with transformers.

    python scripts/soak_hybrids.py --number=12 --seed=0

Needs torch and transformers: `pip install -e '.[parity]'`. Of each configuration, drawn anew: logits, greedy
tokens, cached against uncached, chunks against the whole, ragged batches of 8 against rows alone; every few
configurations an engine (`==` alone and beside others, with preemption and prefix hits), int8 and int4
weights against the dequantized matrices, and gradients of `score` in A_log, layer_scalar or sinks. Prints a
JSON line for each. Exit code 1: something differs. Logits may differ by 1e-4, or by twenty times what one ulp
of the weights changes in transformers' own logits, if that is more: the norm of an output near 0 enlarges
rounding errors.
"""

from launcher import start

# isort: split
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.weights.quantized_weight import dequantize, is_quantized

NUMBER = flags.DEFINE_integer("number", 12, "Configurations.")
SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")
FAMILIES = flags.DEFINE_list(
    "families",
    ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "gpt_oss"],
    "Model types to draw from.",
)

_TOLERANCE = 1e-4
_FORWARD = jax.jit(xj.forward, static_argnames="config")


def draw(random: np.random.RandomState) -> dict[str, Any]:
    """The config.json of a random checkpoint of one of the families."""
    family = random.choice(FAMILIES.value)
    if family == "gemma4_text":
        return draw_gemma4(random)
    if family == "gpt_oss":
        return draw_gpt_oss(random)
    keys = int(random.choice([1, 2, 3, 4]))
    layers = int(random.choice([1, 2, 4, 5]))
    names = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
    hf: dict[str, Any] = dict(
        architectures=[f"{names[family]}ForCausalLM"],
        model_type=str(family),
        vocab_size=96,
        hidden_size=int(random.choice([36, 48, 60])),
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=int(random.choice([1, 2, 4])),
        head_dim=int(random.choice([8, 16, 24])),
        max_position_embeddings=512,
        rms_norm_eps=float(random.choice([1e-3, 1e-5])),
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * int(random.choice([1, 2, 3])),
        linear_key_head_dim=int(random.choice([5, 8, 12])),
        linear_value_head_dim=int(random.choice([7, 8, 20])),
        linear_conv_kernel_dim=int(random.choice([2, 4, 5])),
        tie_word_embeddings=bool(random.choice([True, False])),
        attention_bias=bool(random.choice([True, False])),
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
        full_attention_interval=int(random.choice([1, 2, 4])),
        hidden_act=str(random.choice(["silu", "gelu_pytorch_tanh"])),
    )
    if family != "qwen3_5_moe_text":
        hf["intermediate_size"] = int(random.choice([40, 56]))
    if family != "qwen3_5_text":
        hf |= dict(
            num_experts=6,
            num_experts_per_tok=int(random.choice([1, 2, 6])),
            moe_intermediate_size=int(random.choice([12, 20])),
            shared_expert_intermediate_size=int(random.choice([0, 12, 20])),
        )
    if family == "qwen3_next":
        hf |= dict(
            mlp_only_layers=[int(random.randint(layers))] if random.rand() < 0.5 else [],
            decoder_sparse_step=int(random.choice([1, 2])),
            norm_topk_prob=bool(random.choice([True, False])),
        )
    return hf


def draw_gemma4(random: np.random.RandomState) -> dict[str, Any]:
    """The config.json of a random Gemma 4."""
    layers = int(random.choice([3, 5, 6]))
    types = ["sliding_attention", "full_attention"]
    drawn = [*random.permutation(types), *random.choice(types, layers - 3), "full_attention"]
    experts = bool(random.rand() < 0.5)
    inputs = int(random.choice([0, 6, 8]))
    # transformers 5.24 has no model with shared keys and without inputs of layers.
    shared = int(random.randint(layers - 1)) if inputs else 0
    return dict(
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        vocab_size=96,
        hidden_size=int(random.choice([36, 48, 60])),
        intermediate_size=int(random.choice([40, 56])),
        num_hidden_layers=layers,
        layer_types=[str(kind) for kind in drawn],
        num_attention_heads=4,
        num_key_value_heads=int(random.choice([1, 2, 4])),
        num_global_key_value_heads=random.choice([None, 1, 2]),
        head_dim=int(random.choice([8, 16, 24])),
        global_head_dim=int(random.choice([8, 16, 32])),
        sliding_window=int(random.choice([5, 16, 300])),
        max_position_embeddings=512,
        rms_norm_eps=float(random.choice([1e-3, 1e-5])),
        rope_parameters=dict(
            full_attention=dict(
                rope_type="proportional", rope_theta=1e5, factor=float(random.choice([1, 2])),
                partial_rotary_factor=float(random.choice([0.1, 0.25, 0.5, 1])),
            ),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
        final_logit_softcapping=random.choice([None, 10.0]),
        tie_word_embeddings=bool(random.choice([True, False])),
        attention_bias=bool(random.choice([True, False])),
        attention_k_eq_v=bool(random.choice([True, False])),
        num_kv_shared_layers=shared,
        use_double_wide_mlp=bool(random.choice([True, False])),
        hidden_size_per_layer_input=inputs,
        vocab_size_per_layer_input=96,
        enable_moe_block=experts,
        num_experts=6 if experts else None,
        top_k_experts=int(random.choice([1, 2, 6])) if experts else None,
        moe_intermediate_size=int(random.choice([12, 20])) if experts else None,
    )  # fmt: skip


def draw_gpt_oss(random: np.random.RandomState) -> dict[str, Any]:
    """The config.json of a random gpt-oss."""
    layers = int(random.choice([1, 2, 3, 5]))
    types = random.choice(["sliding_attention", "full_attention"], layers)
    yarn = dict(
        rope_type="yarn",
        rope_theta=1.5e5,
        factor=float(random.choice([2, 32])),
        truncate=bool(random.choice([True, False])),
        original_max_position_embeddings=int(random.choice([16, 64])),
    )
    experts = int(random.choice([1, 4, 6, 16]))
    return dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        vocab_size=96,
        hidden_size=int(random.choice([36, 48, 60])),
        intermediate_size=int(random.choice([20, 36])),
        num_hidden_layers=layers,
        layer_types=[str(kind) for kind in types] if random.rand() < 0.7 else None,
        num_attention_heads=int(random.choice([4, 8])),
        num_key_value_heads=int(random.choice([1, 2, 4])),
        head_dim=int(random.choice([8, 16, 24])),
        sliding_window=int(random.choice([2, 5, 16, 300])),  # of 1 transformers' cache has all keys
        max_position_embeddings=512,
        rms_norm_eps=float(random.choice([1e-3, 1e-5])),
        rope_parameters=dict(rope_type="default", rope_theta=1e4) if random.rand() < 0.3 else yarn,
        tie_word_embeddings=bool(random.choice([True, False])),
        attention_bias=bool(random.choice([True, False])),
        num_local_experts=experts,
        num_experts_per_tok=min(experts, int(random.choice([1, 2, 4]))),
        swiglu_limit=float(random.choice([0.5, 2, 7])),
        swiglu_alpha=float(random.choice([0.7, 1.702])),
    )


def check_logits(
    cases: Any, hf: dict[str, Any], params: Any, tensors: dict, prompts: list
) -> dict[str, float]:
    """Logits of every prompt in one padded batch, and through the cache in chunks, against transformers."""
    config = xj.from_hf(hf)
    model = cases.hf_model(hf, tensors)
    ulp = {name: np.nextafter(x, np.float32(np.inf), dtype=np.float32) for name, x in tensors.items()}
    near = cases.hf_model(hf, ulp)
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    logits_BTV = np.asarray(_FORWARD(params, config, tokens_BT, None, num_tokens_B)[0])
    cache = xj.init_cache(config, len(prompts), tokens_BT.shape[1])
    worst = 0.0
    for first in range(0, tokens_BT.shape[1], 48):
        count_B = np.clip(num_tokens_B - first, 0, 48)
        chunk_BT = np.pad(
            tokens_BT[:, first : first + 48], ((0, 0), (0, max(0, first + 48 - tokens_BT.shape[1])))
        )
        logits_BV, cache = xj.prefill(params, config, chunk_BT, count_B, cache)
        for i in np.flatnonzero((count_B > 0) & (num_tokens_B <= first + 48)):
            worst = max(worst, float(np.abs(logits_BV[i] - logits_BTV[i, num_tokens_B[i] - 1]).max()))
    off = allowed = 0.0
    for i in (0, len(prompts) - 1):
        exact = cases.hf_logits(model, prompts[i])
        off = max(off, float(np.abs(logits_BTV[i, : len(prompts[i])] - exact).max()))
        allowed = max(allowed, 20 * float(np.abs(cases.hf_logits(near, prompts[i]) - exact).max()))
    allowed = max(_TOLERANCE, allowed)
    answer: list[int] = []  # transformers generates nothing without a layer of full attention
    gaps = np.zeros(0)
    if config.attention_layers:
        answer, gaps = cases.hf_greedy(model, prompts[-1], 8)
    sure = int(np.argmax(np.append(gaps, 0) < 10 * allowed))
    ours = xj.generate(params, config, prompts, xj.GenerateOptions(8, eos_token_ids=())).tokens
    alone = xj.generate(params, config, prompts[-1:], xj.GenerateOptions(8, eos_token_ids=())).tokens
    same = ours[-1][:sure] == answer[:sure] and ours[-1][:sure] == alone[0][:sure]
    return dict(
        logits=off, allowed=allowed, cached=worst, same=float(same and off <= allowed and worst <= allowed)
    )


def check_engine(params: Any, config: Any, prompts: list) -> str:
    """What is wrong: bits alone are not those beside others, with a preemption and hits; "": nothing."""
    model = xj.Model(params, config, None, {}, None)  # type: ignore[arg-type]
    options = xj.GenerateOptions(40, eos_token_ids=())
    prompts = [prompts[-1] * 2 + prompt for prompt in prompts]
    engine = xj.Engine(model, rows=2, capacity=320, chunk=64)
    alone = []
    for prompt in prompts:
        engine.update(model.params)
        alone.append(engine.submit(prompt, options).result())
    requests = [engine.submit(prompt, options) for prompt in prompts[:2]]
    while engine.stats.running + engine.stats.prefilling < 2:
        engine._core._pacing.record_decode(1.0, 1)  # of a decode step, so an engine step has one
        engine.step()
    requests.append(engine.submit(prompts[2], options, priority=20))  # preempts another
    together = [request.result() for request in requests]
    stats = engine.stats
    engine.close()
    if not stats.preemptions or not stats.hits:
        return f"{stats.preemptions} preemptions, {stats.hits} hits"
    pairs = zip(alone, together, strict=True)
    same = [a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in pairs]
    return "" if all(same) else f"alone as beside others: {same}"


def check_quantized(config: Any, quantize: str) -> float:
    """The largest difference of logits to those of the dequantized matrices."""
    params = xj.init_params(config, jax.random.key(1), "float32", quantize)

    def in_float(leaf: Any) -> Any:
        if not is_quantized(leaf):
            return leaf
        return jax.vmap(dequantize)(leaf) if len(leaf.shape) > 2 else dequantize(leaf)

    exact = jax.tree.map(in_float, params, is_leaf=is_quantized)
    tokens_BT = np.arange(60)[None] % config.vocab_size
    one, other = (np.asarray(_FORWARD(tree, config, tokens_BT)[0]) for tree in (params, exact))
    return float(np.abs(one - other).max())


def check_gradient(params: Any, config: Any, prompt: list[int]) -> float:
    """The relative difference of the slope of `score` in A_log, layer_scalar or sinks to a quotient; 0
    without such layers.
    """
    names = ("A_log", "layer_scalar", "sinks")
    found = [(i, name) for i, layer in enumerate(params["layers"]) for name in names if name in layer]
    if not found:
        return 0.0
    (number, name) = found[0]

    def loss(step: Any) -> Any:
        layers = list(params["layers"])
        layers[number] = layers[number] | {name: layers[number][name] + step}
        return xj.score({**params, "layers": tuple(layers)}, config, np.array([prompt])).mean()

    loss_jit = jax.jit(loss)
    slope = float(jax.jit(jax.grad(loss))(0.0))
    quotient = float(loss_jit(1e-3) - loss_jit(-1e-3)) / 2e-3
    return abs(slope - quotient) / max(abs(quotient), 1e-2)


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    import parity_cases as cases
    import transformers

    transformers.logging.set_verbosity_error()
    random = np.random.RandomState(SEED.value)
    failed = False
    for number in range(NUMBER.value):
        hf = draw(random)
        config = xj.from_hf(hf)
        tensors = cases.random_tensors(config, int(random.randint(1000)))
        params = cases.params_from(config, tensors)
        prompts = [random.randint(0, 96, n).tolist() for n in (3, 1, 17, 64, 65, 40, 9, 70)]
        found: dict[str, Any] = check_logits(cases, hf, params, tensors, prompts)
        ok = bool(found.pop("same"))
        if number % 4 == 0:
            found["engine"] = check_engine(params, config, prompts[-3:])
            found |= {quantize: check_quantized(config, quantize) for quantize in ("int8", "int4")}
            found["gradient"] = check_gradient(params, config, prompts[-1])
            ok &= (
                not found["engine"]
                and found["int8"] < 1e-3
                and found["int4"] < 1e-3
                and found["gradient"] < 0.05
            )
        print(json.dumps(dict(ok=ok, **found, config=hf)), flush=True)
        failed |= not ok
    return int(failed)


if __name__ == "__main__":
    start(main)
