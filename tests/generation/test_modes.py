"""Public calls work under the modes of jax with which callers look for faults of their own. Their results
have the shapes and dtypes, and the tokens, that they have without.
"""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from public_names import PUBLIC
from quick import full_except

import xinfer_jax as xj
from xinfer_jax import old_names

pytestmark = pytest.mark.oldest

STRICT = dict(
    jax_numpy_rank_promotion="raise",
    jax_numpy_dtype_promotion="strict",
    jax_transfer_guard="disallow",
    jax_debug_nans=True,
)
MODES = {name.removeprefix("jax_"): {name: value} for name, value in STRICT.items()}
MODES |= dict(strict=STRICT, x64=dict(jax_enable_x64=True), x64_strict=STRICT | dict(jax_enable_x64=True))
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-6, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
HF = {
    "mixture": SIZES | EXPERTS | dict(model_type="qwen3_moe"),
    "hybrid": SIZES | LINEAR | dict(model_type="qwen3_5_text", tie_word_embeddings=True),
    "windows": SIZES
    | dict(model_type="gemma3_text", sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
}
CONFIGS = {name: xj.ModelConfig.from_hf(hf) for name, hf in HF.items()}
TOKENS = np.array([[5, 6, 7, 8, 9, 5, 6, 3], [11, 12, 13, 1, 4, 0, 0, 0]])
COUNTS = np.array([8, 5])
PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [11, 12]]
EOS = np.array([2], np.int32)
SETTINGS = xj.SamplingConfig(
    temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, min_p=0.01, typical_p=0.95,
    presence_penalty=0.1, frequency_penalty=0.2, no_repeat_ngram_size=4, min_tokens=2,
    xtc_probability=0.5, xtc_threshold=0.05, dry_multiplier=0.8, dry_base=1.7, dry_allowed_length=1,
    dry_penalty_last_n=30, dry_sequence_breakers=[7], logit_bias={3: -1.0},
    allowed_token_ids=list(range(60)), forbidden_token_ids=[70], bad_words_ids=[[5, 6], [9]],
)  # fmt: skip


@contextlib.contextmanager
def modes(settings):
    """Sets the modes for all threads, such as the threads of engines."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def rollout(config, cache_dtype=None, quantize=None):
    """A function of a key and the prompts, for `jax.eval_shape`."""

    def run(key, tokens_BT, num_tokens_B):
        params = xj.init_params(config, key, "float32", quantize)
        cache = xj.init_cache(config, 2, 64, cache_dtype)
        logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
        history_BS = jnp.pad(tokens_BT, ((0, 0), (0, 56)))
        how = dict(history_BS=history_BS, logprobs=2)
        out = xj.decode_loop(params, config, logits_BV, cache, key, SETTINGS, EOS, 4, **how)
        logits_BV, cache = xj.decode_step(params, config, out.tokens_BT[:, 0], out.cache)
        packed = xj.rollouts.pack_rollout(tokens_BT, num_tokens_B, out)
        return out, logits_BV, cache.truncate(3), cache.repeat_rows(2), packed

    return run


def training(config, dtype):
    """Gradients of packed, stacked and plain scores."""

    def run(key, tokens_BT, num_tokens_B):
        params = xj.init_params(config, key, dtype)
        segments = dict(segment_ids_BT=jnp.asarray([[1] * 4 + [2] * 4] * 2), remat="layer", chunk=3)
        teacher = jnp.zeros((2, 7, 3), jnp.int32), jnp.full((2, 7, 3), -2, jnp.float32)

        def loss(params):
            more = dict(temperature=0.7, entropy=True, reference=params, teacher_topk=teacher)
            scores = xj.score(params, config, tokens_BT, num_tokens_B, **more)
            plain = scores.logprobs_BT + scores.entropy_BT + scores.kl_BT + scores.topk_kl_BT
            stacked = xj.params.stack_layers(params, config)
            return (plain + xj.score(stacked, config, tokens_BT, **segments).logprobs_BT).sum()

        return jax.grad(loss)(params), xj.forward(params, config, tokens_BT, None, num_tokens_B)

    return run


TRACED = {
    **{name: rollout(config) for name, config in CONFIGS.items()},
    "int8 cache": rollout(CONFIGS["windows"], "int8"),
    "training": training(CONFIGS["mixture"], "float32"),
    "hybrid's training": training(CONFIGS["hybrid"], "bfloat16"),
    "int8": rollout(CONFIGS["mixture"], quantize="int8"),
    "int4 and its cache": rollout(CONFIGS["windows"], "int4", "int4"),
}


def shapes(function, dtype=np.int32):
    given = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (TOKENS, COUNTS))
    return jax.eval_shape(function, jax.eval_shape(lambda: jax.random.key(0)), *given)


def types(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in leaves}


@pytest.mark.parametrize("name", full_except(["hybrid"], TRACED, soak=["mixture", "windows", "int8 cache"]))
def test_functions_in_a_trace(name):
    """The functions run under all modes together, and with 64-bit ids under x64."""
    want = shapes(TRACED[name])
    for mode in ("strict", "x64_strict"):
        with modes(MODES[mode]):
            got = shapes(TRACED[name], np.int64 if "x64" in mode else np.int32)
        assert types(got) == types(want)


# --- calls that run -----------------------------------------------------------------------------------------

NEW = dict(max_tokens=3)
SAMPLED = xj.SamplingConfig(temperature=0.8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by name, a folder, and a key, made without modes."""
    key = jax.random.key(1)
    models = {name: xj.Model(random_params(config), config) for name, config in CONFIGS.items()}
    return models | dict(folder=tmp_path_factory.mktemp("modes"), key=key)


@pytest.fixture(scope="module")
def text_models(models):
    text = tiny.shallow_model()
    return models | dict(text=text, adapter=xj.lora.init_adapter(text.config, models["key"], rank=2))


def random_params(config):
    draws = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: xj.init_params(config, key, "float32"), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(draws.standard_normal(x.shape, np.float32) / 4), shapes)


def generated(name, **options):
    def call(models):
        model = models[name]
        given = xj.GenerateOptions(**NEW | options)
        out = xj.generate(model.params, model.config, PROMPTS, given, key=models["key"])
        return out.tokens, len(list(xj.stream(model.params, model.config, PROMPTS, given, key=models["key"])))

    return call


def host_arrays(models):
    """Functions of NumPy arrays, outside a trace."""
    model = models["windows"]
    params = model.params
    config = model.config
    cache = xj.init_cache(config, 2, 32)
    logits_BV, cache = xj.prefill(params, config, TOKENS, COUNTS, cache)
    out = xj.decode_loop(params, config, logits_BV, cache, models["key"], SAMPLED, EOS, 3)
    xj.decode_step(params, config, np.asarray(out.tokens_BT)[:, 0], out.cache)
    hidden_BTD, _ = xj.hidden_states(params, config, TOKENS)
    xj.unembed(params, config, hidden_BTD)
    xj.score(params, config, TOKENS, COUNTS, temperature=0.7)
    out.cache.truncate(np.array([3, 2]))
    return out.tokens_BT.tolist()


def engine(models):
    """Runs an engine with pages on the host, a prefix, a grammar, an adapter, all settings, and new
    weights.
    """
    model = models["text"]
    how = dict(pages=6, host_pages=8, adapters={"a": models["adapter"]})
    with xj.Engine(model, rows=2, capacity=192, **how) as engine:
        options = [
            xj.GenerateOptions(**NEW, grammar=xj.grammar.regex("[ab]{2,3}")),
            xj.GenerateOptions(**NEW, sampling=SETTINGS, logprobs=2, n=2),
            xj.GenerateOptions(**NEW),
        ]
        prompt = PROMPTS[0] * 10
        requests = [engine.submit(prompt, given, key=models["key"]) for given in options]
        requests.append(engine.submit(prompt, options[-1], adapter="a"))
        tokens = [request.result().tokens for request in requests]
        engine.update(model.params)
        return [*tokens, engine.generate([prompt], options[-1])[0].tokens]


def files(models):
    model = models["text"]
    folder = models["folder"] / str(len([*models["folder"].iterdir()]))
    xj.save_model(model.params, model.config, folder / "model")
    xj.lora.save_adapter(models["adapter"], model.config, folder / "adapter")
    adapter = xj.lora.load_adapter(model.config, folder / "adapter")
    params = xj.load_model(folder / "model", quantize="int4").params
    out = xj.generate(params, model.config, PROMPTS, xj.GenerateOptions(**NEW, keep_prefix=True))
    xj.save_prefix(params, model.config, out.prefix, folder / "prefix")
    xj.load_prefix(params, model.config, folder / "prefix")
    adapted = xj.lora.with_adapter(model.params, adapter)
    merged = xj.lora.merge_adapter(*xj.lora.split_adapter(adapted))
    xj.params.params_from_tensors(model.config, xj.params.params_to_tensors(merged, model.config))
    xj.params.dequantize(params)
    return out.tokens


def beams(models):
    model = models["windows"]
    return xj.beam_search(model.params, model.config, PROMPTS, num_beams=2, max_tokens=3).sequences


def texts(models):
    model = models["text"]
    vectors = xj.embed_texts(model, ["hello", "world"])
    out = xj.generate_text(model, "hello", xj.GenerateOptions(**NEW, grammar=xj.grammar.regex("[ab]{2,3}")))
    return vectors.shape, out


CALLS = dict(
    greedy=generated("windows"),
    settings=generated("windows", sampling=[SETTINGS, SAMPLED], logprobs=2, n=2),
    engine=engine,
    host_arrays=host_arrays,
    hybrid=generated("hybrid"),
    drafts=generated("windows", draft="lookup", sampling=SAMPLED),
    int8_cache=generated("mixture", cache_dtype="int8"),
    beams=beams,
    files=files,
    texts=texts,
)


@pytest.mark.parametrize("mode", full_except(["strict"], MODES, soak={*MODES} - {"strict"}))
@pytest.mark.parametrize("name", full_except(["greedy"], CALLS))
def test_calls_that_run(models, name, mode, request):
    given = request.getfixturevalue("text_models") if name in ("engine", "files", "texts") else models
    want = CALLS[name](given)
    with modes(MODES[mode]):
        assert CALLS[name](given) == want


def test_every_function_of_arrays_has_default_modes():
    """The functions that are left call others, or take no arrays."""
    functions = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
    for name, function in functions.items():
        if function.__code__.co_filename == old_names.__file__:  # it takes old names of arguments too
            functions[name] = function.__wrapped__
    assert {name for name, function in functions.items() if not hasattr(function, "__wrapped__")} == {
        "alternatives_text", "encode_prompt", "forward", "generate_file", "generate_text", "grammar.choice",
        "grammar.compile_dfa", "grammar.json_object", "grammar.json_schema", "grammar.lark", "grammar.regex",
        "hidden_states", "params.param_names", "params.shardings", "register", "rollouts.receive_weights",
        "stream_text",        "tools.parse_tool_calls", "tools.tool_grammar",
    }  # fmt: skip


def precisions(config):
    shape = jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)
    params = jax.eval_shape(lambda key: xj.init_params(config, key, "float32"), jax.random.key(0))
    text = str(jax.make_jaxpr(lambda p, t: xj.forward(p, config, t)[0])(params, shape))
    return {line.strip() for line in text.split("\n") if "precision=" in line}


def test_callers_choose_the_precision_of_float32():
    """`jax.default_matmul_precision` lowers it."""
    for name in ("hybrid", "mixture"):
        lines = precisions(CONFIGS[name])
        assert lines and all("HIGHEST" in line for line in lines)
        with jax.default_matmul_precision("tensorfloat32"):
            assert not [line for line in precisions(CONFIGS[name]) if "HIGHEST" in line]
