"""Calls that a model may not support, and how they end."""

import importlib
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj
from behaviour.recording import CACHE_DTYPES, CAPACITY, Calls, Records, attempt, result_types, without_tracing

ROWS = 2
TOKENS = 8
PROMPT = [*range(1, 41)]


def generate_calls(model: xj.Model, draft: xj.Model) -> Calls:
    """Returns calls of the host with several options. draft: a model with the same vocabulary."""
    edit = xj.Tap(edit=lambda hidden_BTD, args: hidden_BTD)
    options: dict[str, Records] = {
        "plain": {},
        **{f"cache {dtype}": dict(cache_dtype=dtype) for dtype in CACHE_DTYPES},
        "draft model": dict(draft=draft),
        "itself as draft model": dict(draft=model),
        "lookup": dict(draft="lookup"),
        "lookup, gear": dict(draft="lookup", cache_dtype="gear"),
        "lookup, without cache": dict(draft="lookup", use_cache=False),
        "without cache": dict(use_cache=False),
        "keep_prefix": dict(keep_prefix=True),
        "keep_prefix, lookup": dict(keep_prefix=True, draft="lookup"),
        "taps": dict(taps={0: edit}),
        "taps by attention": dict(taps={(0, "attention"): edit}),
        "taps of no layer": dict(taps={99: edit}),
        "2 of 3": dict(n=2, best_of=3),
        "logits, logprobs": dict(logits=True, logprobs=3),
        "triton": dict(impl="triton"),
        "long": dict(capacity=1 << 20),
    }
    params = model.params
    config = model.config

    def generate(more: Records, prompt: list[int] = PROMPT) -> str:
        return repr(xj.generate(params, config, [prompt], xj.GenerateOptions(max_tokens=8, **more)))

    calls: Calls = {f"generate {name}": lambda more=more: generate(more) for name, more in options.items()}
    calls["generate a short prompt"] = lambda: generate({}, PROMPT[:3])
    calls["generate a long prompt"] = lambda: generate({}, PROMPT * 30)
    calls["generate after a prefix"] = lambda: generate(
        dict(prefix=xj.types.Prefix([PROMPT[:3]], xj.init_cache(config, 1, CAPACITY)))
    )
    beams = dict(plain={}, int8=dict(cache_dtype="int8"), gear=dict(cache_dtype="gear"))
    calls |= {
        f"beam_search {name}": lambda more=more: repr(
            xj.beam_search(params, config, [PROMPT], num_beams=2, max_tokens=8, **more)
        )
        for name, more in beams.items()
    }
    calls["stream"] = lambda: repr(
        next(iter(xj.stream(params, config, [PROMPT], xj.GenerateOptions(max_tokens=8))))
    )
    calls["embed_texts"] = lambda: repr(xj.embed_texts(model, [PROMPT]))
    calls["score_completions"] = lambda: repr(xj.score_completions(params, config, [PROMPT], [PROMPT[:2]]))
    return calls


def compress_calls(model: xj.Model) -> Calls:
    """Returns the calls of `xinfer-jax quantize`, which have no public name. If their module moves, name both
    places here.
    """

    def compress(quantize: str, **more: Any) -> str:
        awq_params = importlib.import_module("xinfer_jax.compress.awq").awq_params
        return repr(awq_params(model.params, model.config, [PROMPT], quantize, **more))

    return {
        "awq int8": lambda: compress("int8"),
        "awq int4": lambda: compress("int4"),
        "awq int4, int8 activations": lambda: compress("int4", activations="int8"),
    }


def function_calls(model: xj.Model) -> Calls:
    """Returns calls that a caller traces: `result_types` gives their results."""
    params = model.params
    config = model.config
    tokens_BT = np.ones((ROWS, TOKENS), np.int32)
    num_tokens_B = np.full(ROWS, TOKENS, np.int32)
    token_B = np.ones(ROWS, np.int32)
    inputs_BTD = np.zeros((ROWS, TOKENS, config.hidden_size), np.float32)
    reads = {0: xj.Tap(read=True)}
    new_cache = lambda dtype=None: xj.init_cache(config, ROWS, CAPACITY, dtype)  # noqa: E731
    forward = lambda *args, **more: xj.forward(params, config, tokens_BT, *args, **more)  # noqa: E731
    hidden = lambda **more: xj.hidden_states(params, config, tokens_BT, **more)  # noqa: E731
    run_model = lambda **more: xj.run_model(params, config, tokens_BT, **more)  # noqa: E731
    prompt = params, config, tokens_BT, num_tokens_B

    def routed() -> Any:
        routed_experts = run_model(return_routed_experts=True).routed_experts
        return xj.forward(params, config, tokens_BT, routed_experts=routed_experts)

    calls: Calls = {
        "forward": forward,
        "forward with a cache": lambda: forward(new_cache()),
        "forward of stacked layers": lambda: xj.forward(
            xj.params.stack_layers(params, config), config, tokens_BT
        ),
        "forward of segments": lambda: forward(segment_ids_BT=tokens_BT),
        "run_model with routes": lambda: run_model(return_routed_experts=True),
        "run_model with a cache and routes": lambda: run_model(cache=new_cache(), return_routed_experts=True),
        "run_model with taps that read": lambda: run_model(taps=reads).reads,
        "forward with routes": routed,
        "forward with taps that read": lambda: forward(taps=reads),
        "hidden_states of inputs_BTD": lambda: hidden(inputs_BTD=inputs_BTD),
        "hidden_states with inputs, segments and a cache": lambda: hidden(
            segment_ids_BT=tokens_BT, cache=new_cache()
        ),
        "attention_weights": lambda: [
            xj.attention_weights(params, config, tokens_BT, [layer])
            for layer in range(config.num_hidden_layers)
        ],
        "prefill": lambda: xj.prefill(*prompt, new_cache()),
        "prefill with inputs_BTD": lambda: xj.prefill(*prompt, new_cache(), inputs_BTD=inputs_BTD),
        "prefill with taps that read": lambda: xj.prefill(*prompt, new_cache(), taps=reads),
        "score": lambda: xj.score(*prompt).logprobs_BT,
        "score with inputs_BTD": lambda: xj.score(*prompt, inputs_BTD=inputs_BTD).logprobs_BT,
        "score with return_routed_experts": lambda: xj.score(*prompt, return_routed_experts=True),
        "repeat_rows": lambda: new_cache().repeat_rows(2),
        "truncate": lambda: new_cache().truncate(0),
    }
    for dtype in (None, "int8", "gear"):
        calls[f"decode_step, cache {dtype}"] = lambda dtype=dtype: xj.decode_step(
            params, config, token_B, new_cache(dtype)
        )
    return calls


def adapter_calls(model: xj.Model) -> Calls:
    """Returns calls with adapters. A caller traces these calls too."""
    params = model.params
    config = model.config
    tokens_BT = np.ones((ROWS, TOKENS), np.int32)

    def adapter(*targets: str) -> xj.lora.Adapter:
        return xj.lora.init_adapter(config, jax.random.key(0), 2, targets or None)

    def of_rows(*targets: str) -> Any:
        return xj.lora.with_adapters(params, [adapter(*targets)] * 2, np.arange(ROWS, dtype=np.int32))

    calls: Calls = {
        "init_adapter": lambda: adapter().matrices,
        "forward with adapters of rows": lambda: xj.forward(of_rows(), config, tokens_BT),
    }
    for target in ("q", "gate", "embed", "lm_head", "router", "experts.down", "in_proj"):
        calls[f"with_adapter {target}"] = lambda of=target: xj.lora.with_adapter(params, adapter(of))
        calls[f"with_adapters {target}"] = lambda of=target: of_rows(of)
    calls["merge_adapter"] = lambda: xj.lora.merge_adapter(params, adapter())
    calls["split_adapter"] = lambda: xj.lora.split_adapter(xj.lora.with_adapter(params, adapter()))[0]
    return calls


def call_records(model: xj.Model, draft: xj.Model, quantized: xj.Model | None) -> Records:
    """Returns how each call ends. quantized: the same model in int8."""
    records: Records = {}
    for name, call in (function_calls(model) | adapter_calls(model)).items():
        records[name] = attempt(lambda call=call: result_types(call))
    with without_tracing():
        for name, call in (generate_calls(model, draft) | compress_calls(model)).items():
            records[name] = attempt(call)
    if quantized is not None:
        some = {"forward", "forward with taps that read", "init_adapter", "merge_adapter"}
        for name, call in (function_calls(quantized) | adapter_calls(quantized)).items():
            if name in some:
                records[f"int8: {name}"] = attempt(lambda call=call: result_types(call))
    ternary = lambda: xj.init_params(model.config, jax.random.key(0), "float32", "ternary")  # noqa: E731
    records["init_params ternary"] = attempt(lambda: result_types(ternary))
    return records
