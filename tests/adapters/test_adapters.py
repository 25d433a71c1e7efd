"""Adapters as pytrees: one for all rows, another for each row, merged, taken out; files and bad input."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from parity_cases import CASES, Case, params_from, random_tensors
from quick import full_except
from safetensors.numpy import load_file, save_file

import xinfer_jax as xj
from xinfer_jax.adapters import peft_config, peft_files
from xinfer_jax.adapters.adapter import for_all_rows_only
from xinfer_jax.cache.fingerprint import fingerprint
from xinfer_jax.formats import tensors
from xinfer_jax.weights.adapted_weight import AdaptedWeight
from xinfer_jax.weights.params_like import params_like
from xinfer_jax.weights.quantization import quantized_leaf
from xinfer_jax.weights.resharding import with_repeated_kv_heads

pytestmark = pytest.mark.oldest

CONFIG = Case(CASES["qwen2-gqa-tied-old"].hf | dict(num_hidden_layers=2)).config
PARAMS = params_from(CONFIG, random_tensors(CONFIG, 0))  # without a compilation, as every run imports this
TOKENS = np.arange(3 * 12, dtype=np.int32).reshape(3, 12) % 90
forward = jax.jit(xj.forward, static_argnums=1)


def random_adapter(seed, rank, **how):
    draws = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: xj.lora.init_adapter(CONFIG, jax.random.key(seed), rank, **how))
    return jax.tree.map(lambda x: jnp.asarray(draws.standard_normal(x.shape, np.float32) / 8), shapes)


ADAPTERS = [random_adapter(1, 4, targets=["q", "o"], alpha=16), random_adapter(2, 8)]


def logits(params):
    return np.asarray(forward(params, CONFIG, TOKENS)[0])


@pytest.mark.full
def test_a_new_adapter_changes_nothing():
    adapter = xj.lora.init_adapter(CONFIG, jax.random.key(0), 4)
    np.testing.assert_array_equal(logits(xj.lora.with_adapter(PARAMS, adapter)), logits(PARAMS))
    assert {path.rsplit(".", 1)[1] for path in adapter.matrices} == {"q", "k", "v", "o", "gate", "up", "down"}


@pytest.mark.parametrize("quantize", full_except([None], [None, "int8", "int4"]))
def test_rows_have_their_own_adapters(quantize):
    params = PARAMS if quantize is None else xj.init_params(CONFIG, jax.random.key(0), "float32", quantize)
    alone = [logits(params), *(logits(xj.lora.with_adapter(params, adapter)) for adapter in ADAPTERS)]
    together = logits(xj.lora.with_adapters(params, ADAPTERS, np.array([1, -1, 0])))
    for row, which in enumerate((2, 0, 1)):
        np.testing.assert_allclose(together[row], alone[which][row], atol=1e-5)
    assert np.abs(alone[1] - alone[0]).max() > 0.1
    swapped = logits(xj.lora.with_adapters(params, ADAPTERS, np.array([1, 0, -1])))
    np.testing.assert_array_equal(swapped[0], together[0])  # others change no bit


@pytest.mark.full
def test_adapters_of_several_dtypes_are_each_as_alone():
    """Float32 next to bfloat16, with a scale that bfloat16 rounds, in either order."""
    wide = random_adapter(1, 4, targets=["q"], alpha=7)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), wide)
    alone = [logits(xj.lora.with_adapter(PARAMS, adapter)) for adapter in (wide, narrow)]
    assert np.abs(alone[0] - alone[1]).max() > 1e-4
    for adapters, own_B in (([wide, narrow], [0, 1, 1]), ([narrow, wide], [1, 0, 0])):
        together = logits(xj.lora.with_adapters(PARAMS, adapters, np.array(own_B)))
        expected = np.stack([alone[0][0], alone[1][1], alone[1][2]])
        np.testing.assert_allclose(together, expected, atol=1e-5)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    for other, dtype in ((narrow, "bfloat16"), (wide, "float32")):
        stacked = xj.lora.with_adapters(params, [narrow, other], np.arange(2))["layers"][0]["q"]["weight"]
        assert stacked.lora_a.dtype == stacked.lora_b.dtype == dtype


@pytest.mark.full
def test_merged_split_stacked_and_generated():
    adapter = ADAPTERS[1]
    adapted = xj.lora.with_adapter(PARAMS, adapter)
    merged = xj.lora.merge_adapter(PARAMS, adapter)
    np.testing.assert_allclose(logits(adapted), logits(merged), atol=1e-5)
    np.testing.assert_allclose(logits(xj.params.stack_layers(adapted, CONFIG)), logits(adapted), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, xj.lora.split_adapter(adapted), (PARAMS, adapter))
    call = xj.GenerateOptions(max_tokens=6, eos_token_ids=())
    tokens = [xj.generate(params, CONFIG, [[5, 6, 7]], call).tokens for params in (adapted, merged)]
    assert tokens[0] == tokens[1]


BOTH = ["embed", "lm_head", "down"]


@pytest.mark.full
@pytest.mark.parametrize(
    "targets, quantize",
    [(["embed", "q"], None), (["lm_head"], None), (BOTH, None), (BOTH, "int8"), (["embed", "q"], "int4")],
)
def test_embedding_and_head(tmp_path, targets, quantize):
    """The test runs a tied model: one adapter applies to both embedding and head, or the head has another
    one.
    """
    params = PARAMS if quantize is None else xj.init_params(CONFIG, jax.random.key(0), "float32", quantize)
    adapter = random_adapter(4, 3, targets=targets)
    assert set(for_all_rows_only(adapter)) == {*targets} - {"q", "down"}
    adapted = xj.lora.with_adapter(params, adapter)
    ids = np.arange(96)
    hidden = np.eye(48, dtype=np.float32)
    plain, found = (
        (xj.embed_tokens(tree, CONFIG, ids), xj.unembed(tree, CONFIG, hidden).T) for tree in (params, adapted)
    )
    for x, y, name in zip(plain, found, ("embed", "lm_head"), strict=True):
        pair = adapter.matrices.get(name) or ("lm_head" not in targets and adapter.matrices["embed"])
        np.testing.assert_allclose(y, x + (pair[1] @ pair[0] if pair else 0), atol=2e-2 if quantize else 1e-5)
    (base, again) = xj.lora.split_adapter(adapted)
    jax.tree.map(np.testing.assert_array_equal, (base, again), (params, again))
    assert {path for path, pair in again.matrices.items() if pair.a.size} == {*adapter.matrices}
    xj.lora.save_adapter(adapter, CONFIG, tmp_path / "a")
    jax.tree.map(
        np.testing.assert_array_equal, xj.lora.load_adapter(CONFIG, tmp_path / "a").matrices, again.matrices
    )
    if quantize is None:
        merged = xj.lora.merge_adapter(params, adapter)
        np.testing.assert_allclose(logits(merged), logits(adapted), atol=1e-5)
        if "lm_head" in targets:
            with pytest.raises(xj.InputError, match="another matrix than the embedding"):
                xj.save_model(merged, CONFIG, tmp_path / "m")
        (tokens,) = xj.generate(
            adapted, CONFIG, [[5, 6, 7]], xj.GenerateOptions(max_tokens=6, eos_token_ids=())
        ).tokens
        text = np.array([[5, 6, 7, *tokens, 0, 0, 0]] * 3, np.int32)
        assert np.asarray(forward(adapted, CONFIG, text)[0])[0].argmax(-1)[2:8].tolist() == tokens


MOE = CASES["moe-some-layers-dense"].config
ONE_LAYER = xj.ModelConfig.from_hf(CASES["moe-defaults"].hf | dict(num_hidden_layers=1))


@pytest.mark.full
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts_and_routers(tmp_path, quantize):
    params = xj.init_params(ONE_LAYER, jax.random.key(0), "float32", quantize)
    adapter = xj.lora.init_adapter(
        ONE_LAYER, jax.random.key(1), 3, ["experts.gate", "experts.up", "experts.down", "router"]
    )
    adapter = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), adapter)
    assert adapter.matrices["layers.0.experts.down"].b.shape == (6, 48, 3)
    assert [*adapter.matrices] == for_all_rows_only(adapter)
    xj.lora.save_adapter(adapter, ONE_LAYER, tmp_path / "a")
    loaded = xj.lora.load_adapter(ONE_LAYER, tmp_path / "a")  # gate and up have one `a` there, of both ranks
    trees = [xj.lora.with_adapter(params, x) for x in (adapter, loaded)]
    trees += [] if quantize else [xj.lora.merge_adapter(params, adapter)]
    (found, *others) = [np.asarray(forward(tree, ONE_LAYER, TOKENS)[0]) for tree in trees]
    for other in others:
        np.testing.assert_allclose(other, found, atol=3e-5)
    assert np.abs(found - forward(params, ONE_LAYER, TOKENS)[0]).max() > 0.1
    one = forward(trees[0], ONE_LAYER, TOKENS[:1, :1])[0]  # reads the chosen experts only
    np.testing.assert_allclose(one[0], found[0, :1], atol=3e-2 if quantize else 3e-5)
    jax.tree.map(np.testing.assert_array_equal, xj.lora.split_adapter(trees[0]), (params, adapter))
    with pytest.raises(xj.InputError, match="one adapter for all rows only"):
        xj.lora.with_adapters(params, [adapter], np.zeros(3, np.int32))


@pytest.mark.full
def test_files_with_a_module_for_each_expert(tmp_path):
    """PEFT writes such files with transformers 4."""
    adapter = xj.lora.init_adapter(MOE, jax.random.key(1), 3, ["experts.up", "router"])
    adapter = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(2), x.shape), adapter)
    xj.lora.save_adapter(adapter, MOE, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    settings = json.loads(file.read_text()) | dict(target_parameters=None, target_modules=["up_proj", "gate"])
    file.write_text(json.dumps(settings))
    weights = tmp_path / "a" / "adapter_model.safetensors"
    tensors = {name: x for name, x in load_file(weights).items() if "experts" not in name}
    for path, pair in adapter.matrices.items():
        for expert in range(6 * path.endswith("up")):
            name = f"base_model.model.model.{path.replace('experts.up', f'mlp.experts.{expert}.up_proj')}"
            own = {
                f"{name}.lora_{x}.weight": np.array(part[expert]) for x, part in zip("AB", pair, strict=True)
            }
            tensors |= own
    for layer in (0, 2, 3, 4):  # dense ones
        name = f"base_model.model.model.layers.{layer}.mlp.up_proj.lora_"
        tensors |= {f"{name}A.weight": np.ones((3, 48), "f4"), f"{name}B.weight": np.ones((80, 3), "f4")}
    save_file(tensors, weights)
    loaded = xj.lora.load_adapter(MOE, tmp_path / "a").matrices
    jax.tree.map(
        np.testing.assert_array_equal, {path: loaded[path] for path in adapter.matrices}, adapter.matrices
    )
    assert {*loaded} - {*adapter.matrices} == {f"layers.{i}.up" for i in (0, 2, 3, 4)}
    file.write_text(json.dumps(settings | dict(exclude_modules=r".*experts\.4\..*")))
    save_file({name: x for name, x in tensors.items() if "experts.4" not in name}, weights)
    with pytest.raises(xj.InputError, match="all experts of a layer"):
        xj.lora.load_adapter(MOE, tmp_path / "a")


@pytest.mark.full
def test_norms_are_replaced(tmp_path):
    names = ["final_norm", "layers.1.mlp_norm"]
    adapter = dataclasses.replace(ADAPTERS[0], norms={name: jnp.arange(48.0) / 24 for name in names})
    found = logits(xj.lora.with_adapter(PARAMS, adapter))
    np.testing.assert_allclose(logits(xj.lora.merge_adapter(PARAMS, adapter)), found, atol=1e-5)
    own = PARAMS | dict(final_norm=adapter.norms["final_norm"])
    own["layers"] = PARAMS["layers"][0], PARAMS["layers"][1] | dict(mlp_norm=own["final_norm"])
    np.testing.assert_array_equal(logits(xj.lora.with_adapter(own, ADAPTERS[0])), found)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    assert xj.lora.with_adapter(narrow, adapter)["final_norm"].dtype == "bfloat16"
    gradient = jax.grad(
        lambda adapter: xj.score(xj.lora.with_adapter(PARAMS, adapter), CONFIG, TOKENS).logprobs_BT.sum()
    )(adapter)
    assert all(np.abs(x).max() > 0 for x in gradient.norms.values())
    xj.lora.save_adapter(adapter, CONFIG, tmp_path / "a")
    jax.tree.map(
        np.testing.assert_array_equal, xj.lora.load_adapter(CONFIG, tmp_path / "a").norms, adapter.norms
    )
    assert {*for_all_rows_only(adapter)} == {*names}
    for name, size in (("layers.0.q", 48), ("final_norm", 3), ("layers.9.attn_norm", 48)):
        norms = {name: jnp.ones(size)}
        with pytest.raises(xj.InputError, match="is no norm"):
            xj.lora.with_adapter(PARAMS, dataclasses.replace(adapter, norms=norms))


@pytest.mark.full
def test_vmap_takes_adapters():
    config = CASES["phi3-defaults"].config
    params = xj.init_params(config, jax.random.key(0), "float32")
    adapters = [xj.lora.init_adapter(config, jax.random.key(seed), 3) for seed in (1, 2)]
    adapters = [jax.tree.map(lambda x: x + 0.1, adapter) for adapter in adapters]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *adapters)
    found = jax.vmap(lambda x: xj.forward(xj.lora.with_adapter(params, x), config, TOKENS[:1])[0][0])(stacked)
    for i, adapter in enumerate(adapters):
        wanted = forward(xj.lora.with_adapter(params, adapter), config, TOKENS[:1])[0][0]
        np.testing.assert_allclose(found[i], wanted, atol=1e-4)


def test_a_prefix_belongs_to_one_adapter():
    """Adapters with other numbers, or with another scale alone, have other fingerprints."""
    (adapter, other) = ADAPTERS
    scaled = xj.lora.Adapter(adapter.matrices, tuple(2 * scale for scale in adapter.scales))
    trees = [PARAMS, *(xj.lora.with_adapter(PARAMS, each) for each in (adapter, other, scaled))]
    assert len({fingerprint(tree, CONFIG) for tree in trees}) == 4
    again = xj.lora.with_adapter(PARAMS, jax.tree.map(np.array, adapter))
    assert fingerprint(again, CONFIG) == fingerprint(trees[1], CONFIG)


def test_files(tmp_path):
    for i, adapter in enumerate(ADAPTERS):
        xj.lora.save_adapter(adapter, CONFIG, tmp_path / str(i))
        again = xj.lora.load_adapter(CONFIG, tmp_path / str(i))
        assert again.scales == pytest.approx(adapter.scales)
        jax.tree.map(np.testing.assert_array_equal, again.matrices, adapter.matrices)
    narrow = xj.lora.load_adapter(CONFIG, tmp_path / "1", dtype="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(narrow)} == {"bfloat16"}
    xj.lora.save_adapter(narrow, CONFIG, tmp_path / "narrow")
    jax.tree.map(np.testing.assert_array_equal, xj.lora.load_adapter(CONFIG, tmp_path / "narrow"), narrow)
    zero = random_adapter(3, 2, targets=["q"], alpha=0)
    xj.lora.save_adapter(zero, CONFIG, tmp_path / "zero")
    jax.tree.map(np.testing.assert_array_equal, xj.lora.load_adapter(CONFIG, tmp_path / "zero"), zero)
    with pytest.raises(xj.InputError, match="exists"):
        xj.lora.save_adapter(adapter, CONFIG, tmp_path / "0")
    with pytest.raises(xj.InputError, match="no matrices"):
        xj.lora.save_adapter(xj.lora.Adapter({}, ()), CONFIG, tmp_path / "empty")


REJECTED = {
    "bias": ("all", "bias"),
    "use_dora": (True, "DoRA"),
    "init_lora_weights": ("pissa", "'pissa' changes the model"),
    "modules_to_save": (["lm_head"], "norms only, got 'lm_head'"),
    "peft_type": ("IA3", "'LORA'"),
    "target_modules": (["c_attn"], "no module"),
    "rank_pattern": ({"q_proj": 5}, r"q_proj.lora_A.weight has shape \[4, 48\]"),
    "alpha_pattern": ({"(": 5}, "no regular expression"),
    "exclude_modules ": ("q{99999999999}", "no regular expression"),
    "lora_alpha": ("16", "must be a number"),
    "layer_replication": ([[0, 2]], "layer_replication"),
    "what_is_new": (1, "what_is_new"),
    "exclude_modules": (5, "exclude_modules must be names"),
    "use_rslora": ("false", "use_rslora must be true or false"),
}


@pytest.mark.parametrize("field", REJECTED)
def test_settings_that_are_rejected_by_name(tmp_path, field):
    xj.lora.save_adapter(ADAPTERS[0], CONFIG, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    (value, message) = REJECTED[field]
    file.write_text(json.dumps(json.loads(file.read_text()) | {field.strip(): value}))
    with pytest.raises(xj.InputError, match=message):
        xj.lora.load_adapter(CONFIG, tmp_path / "a")


def test_the_model_that_an_adapter_is_of(tmp_path, caplog):
    xj.lora.save_adapter(ADAPTERS[0], CONFIG, tmp_path / "a", base="owner/base-1B")
    xj.lora.load_adapter(CONFIG, tmp_path / "a", base="/models/other")
    assert "an adapter of 'owner/base-1B', the model is '/models/other'" in caplog.text
    caplog.clear()
    for base in (None, "owner/base-1B", "/models/base-1B/"):
        xj.lora.load_adapter(CONFIG, tmp_path / "a", base=base)
    assert not caplog.messages


def test_tensors_that_do_not_fit(tmp_path):
    xj.lora.save_adapter(ADAPTERS[0], CONFIG, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    for change, message in (
        ({names[0]: None}, "missing model.layers.0.self_attn.o_proj.lora_A.weight"),
        ({"base_model.model.model.layers.0.mlp.magic.lora_A.weight": tensors[names[0]]}, "unknown .*magic"),
        ({names[0]: tensors[names[0]] * np.nan}, "NaN"),
        ({names[0].removeprefix("base_model.model."): tensors[names[0]]}, "twice.*layers.0.self_attn.o_proj"),
        ({names[1]: tensors[names[1]][:, :3]}, r"has shape \[48, 3\]"),
        ({names[0]: tensors[names[0]].astype(np.int32)}, "type I32"),
    ):
        save_file({name: x for name, x in (tensors | change).items() if x is not None}, file)
        with pytest.raises(xj.InputError, match=message):
            xj.lora.load_adapter(CONFIG, tmp_path / "a")
    file.unlink()
    with pytest.raises(xj.InputError, match="adapter_model.safetensors"):
        xj.lora.load_adapter(CONFIG, tmp_path / "a")
    with pytest.raises(xj.InputError, match="holds no adapter_config.json"):
        xj.lora.load_adapter(CONFIG, tmp_path)


@pytest.mark.parametrize("rows", [96, 100])
def test_adapters_of_a_resized_vocabulary_name_the_way_out(tmp_path, rows):
    """PEFT saves the embedding and the head next to the adapter, or also what it adds to them."""
    adapter = xj.lora.init_adapter(CONFIG, jax.random.key(0), 2, ["q", "embed"])
    xj.lora.save_adapter(adapter, CONFIG, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    matrix = np.zeros((rows, 48), np.float32)
    prefix = "base_model.model."
    resized = f"has {rows} rows, the model's 96: .*resize_token_embeddings.{rows}.*merge_and"
    for changes in (
        {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix},
        {"lm_head.weight": matrix},
        {"model.embed_tokens.base_layer.weight": matrix},
        {"model.embed_tokens.lora_embedding_A": matrix[:, :2].T},
        {"lm_head.lora_B.weight": matrix[:, :2]},
    ):
        save_file(tensors | {prefix + name: np.ascontiguousarray(x) for name, x in changes.items()}, file)
        if rows != 96:
            with pytest.raises(xj.InputError, match=resized):
                xj.lora.load_adapter(CONFIG, tmp_path / "a")
        elif "lm_head.weight" in changes:
            with pytest.raises(xj.InputError, match="it has the whole .*merge_and_unload"):
                xj.lora.load_adapter(CONFIG, tmp_path / "a")
        else:
            xj.lora.load_adapter(CONFIG, tmp_path / "a")


def test_patterns_and_numbers_of_the_settings(tmp_path, monkeypatch):
    """Flags of a pattern are its own. A huge number is no scale. Patterns take bounded time."""
    xj.lora.save_adapter(ADAPTERS[0], CONFIG, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | dict(target_modules="(?i).*[QO]_PROJ")))
    assert xj.lora.load_adapter(CONFIG, tmp_path / "a").scales == ADAPTERS[0].scales
    for change in (dict(r=10**400), dict(lora_alpha=10**400), dict(alpha_pattern=dict(q_proj=1e300))):
        file.write_text(json.dumps(settings | change))
        with pytest.raises(xj.InputError, match="of model.layers.0.self_attn"):
            xj.lora.load_adapter(CONFIG, tmp_path / "a")
    monkeypatch.setattr(peft_config, "_SECONDS", 0.3)
    slow = r"([\w.]+)+!"
    layers = dict(layers_pattern=[slow], layers_to_transform=[0], target_modules=["q_proj"])
    for change in (dict(target_modules=slow), dict(rank_pattern={slow: 4}), layers):
        file.write_text(json.dumps(settings | change))
        with pytest.raises(xj.InputError, match="more than 0.3 s"):
            xj.lora.load_adapter(CONFIG, tmp_path / "a")


def test_headers_are_compared_before_tensors_are_read(tmp_path, monkeypatch):
    """A file without blocks on the disk may hold matrices of any rank; a header, any number of tensors."""
    xj.lora.save_adapter(ADAPTERS[0], CONFIG, tmp_path / "a")
    assert xj.lora.load_adapter(CONFIG, tmp_path / "a", max_rank=4).scales == ADAPTERS[0].scales
    monkeypatch.setattr(peft_files, "_read_array", None)
    with pytest.raises(xj.InputError, match="it has rank 4, and max_rank is 3"):
        xj.lora.load_adapter(CONFIG, tmp_path / "a", max_rank=3)
    model = xj.Model(PARAMS, CONFIG)
    with pytest.raises(xj.InputError, match="it has rank 4, and max_rank is 2"):
        xj.Engine(model, adapters=dict(a=tmp_path / "a"), max_rank=2)
    monkeypatch.setattr(tensors, "safe_open", None)
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes((2**19).to_bytes(8, "little") + b"{" * 2**19)
    with pytest.raises(xj.InputError, match="header of 524288 bytes, the limit is"):
        xj.lora.load_adapter(CONFIG, tmp_path / "a")


def test_calls_that_do_not_fit():
    (small, large) = ADAPTERS
    adapted = xj.lora.with_adapter(PARAMS, small)
    other = xj.lora.Adapter({"layers.0.q": xj.lora.LowRank(jnp.zeros((2, 3)), jnp.zeros((4, 2)))}, (1.0,))
    one_layer = xj.lora.Adapter({"layers.0.q": small.matrices["layers.0.q"]}, (1.0,))
    quantized = xj.init_params(CONFIG, jax.random.key(0), quantize="int8")
    for call, message in (
        (lambda: xj.lora.with_adapter(adapted, large), "has an adapter already"),
        (lambda: xj.lora.with_adapter(PARAMS, other), r"layers.0.q \[48, 48\] has a \[2, 3\] and b \[4, 2\]"),
        (lambda: xj.lora.with_adapter(PARAMS, PARAMS), "got dict"),
        (lambda: xj.lora.with_adapters(PARAMS, ADAPTERS, np.array([0.5])), "integers"),
        (lambda: xj.lora.with_adapters(PARAMS, ADAPTERS, np.array([[0]])), "shape"),
        (lambda: xj.lora.with_adapter(PARAMS, xj.lora.Adapter(small.matrices, (1.0,))), "1 scales"),
        (lambda: xj.lora.split_adapter(xj.params.stack_layers(adapted, CONFIG)), "not stacked"),
        (
            lambda: xj.params.stack_layers(xj.lora.with_adapter(PARAMS, one_layer), CONFIG),
            "layers of one kind",
        ),
        (lambda: xj.lora.init_adapter(CONFIG, jax.random.key(0), 4, alpha=np.nan), "finite"),
        (lambda: xj.lora.with_adapters(PARAMS, [], np.array([0])), "at least one"),
        (lambda: xj.lora.with_adapters(PARAMS, ADAPTERS, np.array([2])), "from -1 to 1"),
        (lambda: xj.lora.split_adapter(PARAMS), "with_adapter"),
        (
            lambda: xj.lora.split_adapter(xj.lora.with_adapters(PARAMS, ADAPTERS, np.array([0]))),
            "with_adapter",
        ),
        (lambda: xj.lora.merge_adapter(quantized, small), "quantized"),
        (lambda: xj.lora.init_adapter(CONFIG, jax.random.key(0), 4, ["w1"]), "'w1'"),
        (lambda: xj.lora.init_adapter(CONFIG, jax.random.key(0), 0), "rank"),
        (lambda: logits(xj.lora.with_adapters(PARAMS, ADAPTERS, np.array([0, 1]))), "rows"),
        (lambda: xj.save_model(adapted, CONFIG, "/nowhere/x"), "adapter"),
    ):
        with pytest.raises(xj.InputError, match=message):
            call()


@pytest.mark.parametrize("case", ["qwen2-gqa-tied-old", "phi3-gqa"])
def test_key_heads_that_a_mesh_repeats(tmp_path, case):
    """Files and adapters have them once; `with_adapter` repeats them."""
    hf = CASES["phi3-defaults"].hf | dict(num_key_value_heads=2)
    config = xj.ModelConfig.from_hf(hf) if case == "phi3-gqa" else CONFIG
    adapter = xj.lora.init_adapter(config, jax.random.key(0), 3)
    adapter = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(2), x.shape), adapter)
    xj.lora.save_adapter(adapter, config, tmp_path / "a")
    repeated = with_repeated_kv_heads(config, 4)
    loaded = xj.lora.load_adapter(repeated, tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, loaded, xj.lora.load_adapter(config, tmp_path / "a"))
    xj.lora.save_adapter(loaded, repeated, tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, xj.lora.load_adapter(config, tmp_path / "b"), loaded)
    other = dataclasses.replace(config, num_attention_heads=8)
    with pytest.raises(xj.InputError, match="has other sizes in the adapter"):
        xj.lora.save_adapter(adapter, other, tmp_path / "c")


@pytest.mark.full
def test_models_whose_inputs_are_rotated(tmp_path):
    """Int8 activations rotate the inputs of matrices, and adapters have those that are not rotated."""
    source = tiny.write(tmp_path / "model", tiny.CONFIG)
    plain = xj.load_model(source, "float32")
    rotated = xj.load_model(source, "float32", quantize="int8", activations="int8")
    targets = ["q", "k", "v", "o", "gate", "up", "down", "embed"]
    adapter = xj.lora.init_adapter(rotated.config, jax.random.key(0), 4, targets)
    noise = iter(jax.random.split(jax.random.key(1), 1000))
    adapter = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), adapter)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    (wanted, base) = (
        np.asarray(forward(x, plain.config, tokens)[0])
        for x in (xj.lora.with_adapter(plain.params, adapter), plain.params)
    )
    found = np.asarray(forward(xj.lora.with_adapter(rotated.params, adapter), rotated.config, tokens)[0])
    assert np.abs(found - wanted).max() < 0.1 * np.abs(base - wanted).max()
    in_trace = jax.jit(
        lambda x: xj.forward(xj.lora.with_adapter(rotated.params, x), rotated.config, tokens)[0]
    )(adapter)
    np.testing.assert_allclose(in_trace, found, atol=0.02 * np.abs(found).max())
    rows = np.array([0, -1])
    layers = xj.lora.Adapter(
        {path: x for path, x in adapter.matrices.items() if path != "embed"}, adapter.scales[1:]
    )
    mixed = forward(xj.lora.with_adapters(rotated.params, [layers], rows), rotated.config, tokens)[0]
    alone = forward(xj.lora.with_adapter(rotated.params, layers), rotated.config, tokens)[0]
    np.testing.assert_allclose(mixed[0], alone[0], atol=0.02 * np.abs(found).max())
    xj.lora.save_adapter(adapter, rotated.config, tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, xj.lora.load_adapter(rotated.config, tmp_path / "a"), adapter)
    xj.save_model(rotated.params, rotated.config, tmp_path / "saved")
    saved = xj.load_model(tmp_path / "saved", "float32").params
    again = forward(xj.lora.with_adapter(saved, adapter), rotated.config, tokens)[0]
    np.testing.assert_array_equal(again, found)
    apart, _ = xj.lora.split_adapter(xj.lora.with_adapter(rotated.params, adapter))
    jax.tree.map(np.testing.assert_array_equal, apart, rotated.params)


def test_updates_have_the_scale_of_the_adapter_before():
    """A scale is static: programs would go on with that of the first adapter."""
    old = xj.lora.with_adapter(PARAMS, ADAPTERS[0])
    other = xj.lora.Adapter(ADAPTERS[0].matrices, tuple(scale / 2 for scale in ADAPTERS[0].scales))
    with pytest.raises(xj.InputError, match="layers.0.o.weight has an adapter of the scale 2.0"):
        params_like(xj.lora.with_adapter(PARAMS, other), CONFIG, old)
    again = xj.lora.with_adapter(PARAMS, jax.tree.map(lambda x: 2 * x, ADAPTERS[0]))
    jax.tree.map(np.testing.assert_array_equal, params_like(again, CONFIG, old), again)


@pytest.mark.full
def test_an_adapter_has_its_own_inputs_where_the_matrix_has_them_in_an_order():
    """Inside a shard_map a GPTQ leaf with an order takes the inputs of all devices."""
    random = np.random.RandomState(0)
    matrix, x, a, b = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((16, 64), (3, 64), (1, 4, 64), (1, 16, 4))
    )
    base = dataclasses.replace(quantized_leaf(matrix, "o", "int4"), order=jnp.array(random.permutation(64)))
    weight = AdaptedWeight(base, a, b)
    mesh = jax.make_mesh((1,), ("model",), (jax.sharding.AxisType.Auto,))

    def product(x, weight):
        x, weight = weight.local_shard(x, "model")
        return weight.product(x)

    replicated = jax.sharding.PartitionSpec()
    program = jax.shard_map(
        product, mesh=mesh, in_specs=(replicated, replicated), out_specs=replicated, check_vma=False
    )
    np.testing.assert_allclose(program(x, weight), weight.product(x), atol=1e-5)
