"""The public API: reprs, help, version, copies, EOS ids of a model, arguments of wrong types, errors of one
line, and additions to the registries.
"""

import copy
import dataclasses
import functools
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from paths import ROOT
from public_names import PUBLIC, SPACES
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax import InputError, old_names, plugins
from xinfer_jax.errors import format_names

pytestmark = pytest.mark.oldest

TOKENS = np.ones((2, 4), np.int32)


@pytest.fixture(scope="module")
def model(good) -> xj.Model:
    return xj.load_model(good)


# --- repr ---------------------------------------------------------------------------------------------------


def test_reprs_are_short(model):
    cache = xj.init_cache(model.config, 2, 64)
    out = xj.types.GenerateOutput(
        [[1] * 1000, [2, 3]], [[0.0] * 1000, [0.0] * 3], ["length", "stop"], [None, None], None
    )
    cost = xj.types.GenerateStats(2, 3, 4, 5)
    beams = xj.types.BeamOutput([[[1, 2]], [[3], [4, 5]]], [[-1.0], [-1.0, -2.0]], cost)
    prefix = xj.types.Prefix([[1, 2, 3], [4] * 50], cache)
    assert repr(model) == (
        "Model(qwen2, 0.2083 M parameters in float32, 0.8 MiB, vocabulary 288, context 256, tokenizer)"
    )
    assert repr(out) == "GenerateOutput(2 answers of 2 to 1000 tokens, finish_reason: 1 length, 1 stop)"
    assert repr(beams) == "BeamOutput(2 prompts, 3 sequences of 1 to 2 tokens)"
    assert repr(prefix).startswith(
        "Prefix(2 rows of 3 to 50 tokens, KVCache(layers=1 × Contiguous(k=float32[2, 2, 64, 8]"
    )
    assert repr(model.tokenizer) == f"Tokenizer(vocabulary 272, EOS ids ({tiny.IM_END}, {tiny.ENDOFTEXT}))"
    for thing in (model, out, beams, prefix, cache, model.tokenizer):
        assert len(repr(thing)) < 220 and "\n" not in repr(thing)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "gear"])
def test_the_repr_of_a_cache_with_any_leaves(model, dtype):
    """It works also while the cache is traced, as shapes, and as a tree of other leaves."""
    cache = xj.init_cache(model.config, 2, 64, dtype)
    seen = []
    jax.eval_shape(lambda cache: seen.append(repr(cache)), cache)
    assert seen == [repr(cache)] == [repr(jax.eval_shape(lambda: cache))] and f"(k={dtype}[2, " in seen[0]
    assert repr(jax.tree.map(lambda leaf: None, cache)).startswith("KVCache(layers=1 × ")


def test_the_repr_of_quantized_leaves():
    leaves = xj.load_model(quantize="int4").params
    assert repr(leaves["embed"]["weight"]) == "Int8Weight(values=int8[1920, 128], scale=float32[1920])"
    assert repr(leaves["layers"][0]["q"]["weight"]).startswith(
        "GroupedWeight(values=uint8[2, 32, 128], scale="
    )


# --- help, version, copies ----------------------------------------------------------------------------------


def fields(kind):
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ()))


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if fields(value)])
def test_help_explains_every_field(name):
    kind = PUBLIC[name]
    section = inspect.getdoc(kind).split("Attributes:\n")[1]
    lines = re.findall(r"^    (\w+(?:, \w+)*): \S", section, re.MULTILINE)
    assert ", ".join(lines).split(", ") == fields(kind)


def test_version_is_that_of_pyproject():
    said = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert xj.__version__ == said and "__version__" in dir(xj)
    program = "import sys, xinfer_jax; print(xinfer_jax.__version__); assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == xj.__version__


@pytest.mark.parametrize("project, said", [("xinfer-jax", "1.2.3"), ("other", "0+unknown")])
def test_the_version_where_nothing_is_installed(tmp_path, project, said):
    """The version is read in a checkout, and in a copy within another project."""
    (tmp_path / "xinfer_jax").symlink_to(ROOT / "xinfer_jax")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{project}"\nversion = "1.2.3"\n')
    program = "import sys; sys.path[:] = sys.argv[1:]; import xinfer_jax; print(xinfer_jax.__version__)"
    paths = [str(tmp_path), *(p for p in sys.path if "site-packages" not in p and Path(p) != ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == said, done.stderr


def test_types_are_packaged():
    assert (ROOT / "xinfer_jax" / "py.typed").is_file()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_errors_tokenizers_and_configs_can_be_copied(model, again):
    error = again(xj.InputError("two\nlines \x07 " + 400 * "x" + " remedy"))
    assert type(error) is xj.InputError and str(error) == str(again(error)) and str(error).endswith(" remedy")
    tokenizer = again(model.tokenizer)
    assert tokenizer.encode("the end") == model.tokenizer.encode("the end")
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == model.tokenizer.apply_chat_template(messages)
    assert tokenizer.eos_token_ids == model.tokenizer.eos_token_ids
    config = again(model.config)
    assert config == model.config and config.eos_token_ids == model.config.eos_token_ids


@pytest.mark.parametrize("old, new", old_names.MOVED.items())
def test_old_names_work_and_warn(old, new):
    with pytest.warns(DeprecationWarning, match=rf"xj\.{old} is now xj\.{re.escape(new)}; .* 0.3") as caught:
        value = getattr(xj, old)
    assert value is functools.reduce(getattr, new.split("."), xj) or inspect.ismethod(value)
    assert caught[0].filename == __file__
    assert old not in xj.__all__ and old not in dir(xj)


def test_old_names_of_arguments_and_results_work_and_warn(model):
    with pytest.warns(DeprecationWarning, match=r"init_cache\(batch=\) is now rows=; .* 0.3") as caught:
        cache = xj.init_cache(model.config, batch=3)
    assert caught[0].filename == __file__ and cache.length_B.shape == (3,)
    with pytest.warns(DeprecationWarning, match=r"GenerateOptions\(max_new_tokens=\)") as caught:
        options = xj.GenerateOptions(max_new_tokens=7)
    assert caught[0].filename == __file__ and options == xj.GenerateOptions(max_tokens=7)
    with pytest.warns(DeprecationWarning, match="GenerateOptions.max_new_tokens is now max_tokens"):
        assert options.max_new_tokens == 7
    with pytest.warns(DeprecationWarning):
        assert dataclasses.replace(options, max_new_tokens=3).max_tokens == 3
    with pytest.warns(DeprecationWarning, match=r"EngineOptions\(routes=\) is now routed_experts="):
        with pytest.raises(InputError, match="routed_experts are of mixtures"):
            xj.Engine(model, routes=True)
    out = xj.run_model(model.params, model.config, TOKENS)
    with pytest.warns(DeprecationWarning, match="ModelOutput.routes is now routed_experts"):
        assert out.routes is None
    assert list(out._asdict()) == ["hidden", "cache", "routed_experts", "reads"]
    for kind in (xj.GenerateOptions, xj.SamplingConfig, xj.EngineOptions, xj.RequestOptions):
        said = rf"{kind.__name__} takes keyword arguments .*: write {kind.__name__}\(\w+=1\)"
        with pytest.raises(InputError, match=said):
            kind(1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
            kind(nothing=1)


@pytest.mark.parametrize(
    "call, order",
    [
        (xj.save_model, "params, config, path"),
        (xj.load_prefix, "params, config, path"),
        (xj.save_prefix, "params, config, prefix, path"),
        (xj.lora.save_adapter, "adapter, config, path"),
    ],
)
def test_the_old_order_of_arguments_is_an_error(call, order, tmp_path):
    """The path was the first argument in version 0.1."""
    for path in ("directory", tmp_path):
        with pytest.raises(InputError, match=re.escape(f"{call.__name__}({order}) is the order")):
            call(path, *order.split(", ")[:-1])
    with pytest.raises(InputError, match="got 3 as the path"):
        call({}, {}, *order.split(", ")[2:-1], 3)


def test_an_old_name_works_first(tmp_path):
    """The name works in a process that has used no other name."""
    program = "import xinfer_jax as xj; print(xj.plugin('processor', 'xtc').__name__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "xtc\n" and "xj.plugin is now" in done.stderr


def test_the_overview_fits_a_screen_and_names_everything():
    text = inspect.getdoc(xj)
    assert len(text.splitlines()) <= 60
    left_out = {"ModelConfig", "Model", "Tokenizer", "KVCache", "testing"}
    assert {name for name in xj.__all__ if not re.search(rf"\b{name}\b", text)} <= left_out
    assert len({*xj.__all__} - {*SPACES}) <= 52
    for space in SPACES.values():
        named = inspect.getdoc(space)
        assert not [name for name in space.__all__ if f"`{name}" not in named], space


# --- EOS ids of the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more, count", [({}, 2), (dict(eos_token_ids=()), 0), (dict(eos_token_ids=[3]), 1)])
def test_beams_end_at_the_models_eos(model, more, count):
    """The error names their number, before anything is compiled."""
    with pytest.raises(xj.InputError, match=f"a vocabulary of 288 with {count} EOS ids"):
        xj.beam_search(model.params, model.config, [1], num_beams=289, max_tokens=1, **more)


def test_configs_that_differ_in_eos_ids_share_their_programs(model):
    prompt = xj.encode_prompt(model, tiny.QUESTION)
    options = xj.GenerateOptions(max_tokens=16)
    other = dataclasses.replace(model.config, eos_token_ids=(tiny.ANSWER_IDS[3],))
    assert model.config.eos_token_ids == (tiny.IM_END, tiny.ENDOFTEXT) == model.tokenizer.eos_token_ids
    assert other == model.config and hash(other) == hash(model.config) and repr(other) == repr(model.config)
    out = xj.generate(model.params, model.config, [prompt], options)
    assert (out.tokens, out.finish_reason) == ([[*tiny.ANSWER_IDS, tiny.IM_END]], ["stop"])
    with compiling.events() as seen:
        out = xj.generate(model.params, other, [prompt], options)
    assert out.tokens == [tiny.ANSWER_IDS[:4]] and seen == []


@pytest.mark.parametrize(
    "config, generation, expected",
    [(5, None, (5,)), (5, [7, 6, 7], (7, 6)), (None, {}, ()), (5, [3, 288, -1], (3,))],
    ids=["config", "generation", "nowhere", "beyond the vocabulary"],
)
def test_eos_ids_of_a_checkpoint_without_tokenizer(tmp_path, config, generation, expected):
    hf = tiny.CONFIG | dict(eos_token_id=config)
    given = None if generation is None else dict(eos_token_id=generation or None)
    path = tiny.write(tmp_path, hf, with_tokenizer=False, generation_config=given)
    assert xj.load_model(path).config.eos_token_ids == expected


# --- arguments of wrong types -------------------------------------------------------------------------------

Param = type("Param", (tuple,), dict(__module__="flax.nnx.variablelib"))
WRONG_TYPES = {
    "hidden-list": (lambda p, c: xj.hidden_states(p, c, [[1, 2]]), "tokens must be an array"),
    "hidden-id": (lambda p, c: xj.hidden_states(p, c, TOKENS * 288), "token id 288 is outside"),
    "hidden-number": (lambda p, c: xj.hidden_states(p, c, TOKENS, None, np.array([4, 5])), "num_tokens 5"),
    "hidden-cache": (lambda p, c: xj.hidden_states(p, c, TOKENS, "cache"), "the cache for 2 rows"),
    "hidden-inputs": (lambda p, c: xj.hidden_states(p, c, TOKENS, inputs_BTD=np.ones(3)), "inputs must"),
    "hidden-model": (
        lambda p, c: xj.hidden_states("model", c, TOKENS),
        "params must be a model's tree, .* got str",
    ),
    "forward-config": (lambda p, c: xj.forward(p, {}, TOKENS), "config must be a ModelConfig, .* got dict"),
    "forward-impl": (lambda p, c: xj.forward(p, c, TOKENS, impl="cuda"), "cuda"),
    "embed-float": (lambda p, c: xj.embed_tokens(p, c, TOKENS * 1.0), "tokens must be an array of ids"),
    "unembed-width": (lambda p, c: xj.unembed(p, c, np.ones((2, 7))), "must be an array .* got .2, 7"),
    "norm-width": (lambda p, c: xj.final_norm(p, c, np.ones((2, 7))), "must be an array .* got .2, 7"),
    "flax": (
        lambda p, c: xj.forward(p | dict(final_norm=Param(p["final_norm"])), c, TOKENS),
        "tree of arrays, got leaves of flax .Param.: give what nnx.pure",
    ),
    "truncate-float": (lambda p, c: xj.init_cache(c).truncate(1.5), "needs lengths of at least 0"),
    "truncate-rows": (
        lambda p, c: xj.init_cache(c).truncate(np.array([1, 2])),
        "one for all 1 rows or one for each",
    ),
    "from_hf-none": (lambda p, c: xj.ModelConfig.from_hf(None), "config.json's object, got None"),
    "from_hf-empty": (lambda p, c: xj.ModelConfig.from_hf({}), "model_type None is not supported"),
    "generate-options": (lambda p, c: xj.generate(p, c, [[1]], {"n": 1}), "must be GenerateOptions"),
    "beam-eos": (lambda p, c: xj.beam_search(p, c, [1], eos_token_ids=3), "eos_token_ids must be a list"),
    "forward-reads": (
        lambda p, c: xj.forward(p, c, TOKENS, taps={0: xj.Tap(read=True)}),
        "forward returns no hidden states that taps read: use run_model",
    ),
    "score-layers": (
        lambda p, c: xj.score(p | {"layers": ()}, c, TOKENS),
        "params have 0 layers, the config has 1",
    ),
    "alternatives": (lambda p, c: xj.alternatives_text(None, None), "model must be what load_model gives"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_raise_by_name(model, name):
    call, named = WRONG_TYPES[name]
    with pytest.raises(xj.InputError, match=named):
        call(model.params, model.config)


@pytest.mark.full
def test_public_parts_compose_to_forward(model):
    """hidden_states and unembed give the logits of forward. truncate takes integers of any type."""
    params = model.params
    config = model.config
    forward, hidden_states = (jax.jit(f, static_argnums=1) for f in (xj.forward, xj.hidden_states))
    logits, cache = forward(params, config, TOKENS, xj.init_cache(config, 2, 16))
    hidden, _ = hidden_states(params, config, TOKENS)
    np.testing.assert_allclose(xj.unembed(params, config, hidden), logits, atol=1e-6)
    last = config.num_hidden_layers - 1
    reads = xj.run_model(params, config, TOKENS, taps={last: xj.Tap(read=True)}).reads
    np.testing.assert_allclose(xj.final_norm(params, config, reads[last]), hidden, atol=1e-5)
    for length in (2, np.int64(2), np.array([2, 2]), jnp.array([2, 2]), 10**12):
        back = cache.truncate(length)
        assert back.length_B.tolist() == [min(length, 4) if isinstance(length, int) else 2] * 2


# --- errors: one line, at most 300 characters, no control characters ----------------------------------------


@pytest.mark.parametrize(
    "message, printed",
    [
        ("one line", "one line"),
        ("two\n   lines", "two lines"),
        ("bell \x07, escape \x1b[31m, tab\t", r"bell \x07, escape \x1b[31m, tab"),
        ("right-to-left \u202e, lone \ud800", r"right-to-left \u202e, lone \ud800"),
        ("Brasília 東京 🙂", "Brasília 東京 🙂"),
    ],
)
def test_an_error_is_one_line(message, printed):
    assert str(InputError(message)) == printed


def test_a_long_error_keeps_its_remedy():
    message = str(InputError(f"prompt {'x' * 10_000!r} is bad: leave it out"))
    assert (
        len(message) <= 300
        and message.startswith("prompt 'xxx")
        and message.endswith("x' is bad: leave it out")
    )


def test_many_names_are_counted():
    assert format_names(["a", "b"]) == "a, b"
    assert format_names(f"t{i}" for i in range(1000)) == "t0, t1, t2 and 997 more"


# --- registries: what is added from outside the package is found --------------------------------------------


@pytest.fixture
def registries(monkeypatch):
    """Entries that a test adds are gone after it."""
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    yield
    plugins.load.cache_clear()


@pytest.mark.full
def test_a_registered_kind_of_rope_turns_queries_and_keys(registries):
    config = xj.ModelConfig.from_hf(QWEN)

    def halved(rope, inverse, original, length_B):
        return inverse / 2, 1.0

    assert plugins.load("rope", "halved") is None
    xj.register("rope", "halved", halved)
    assert "halved" in plugins.names("rope")
    changed = dataclasses.replace(config, rope=dataclasses.replace(config.rope, rope_type="halved"))
    linear = dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, rope_type="linear", factor=2.0)
    )
    params = xj.init_params(config, jax.random.key(0), "float32")
    tokens = jnp.array([[3, 5, 7, 11]])
    ours, theirs, plain = (xj.forward(params, c, tokens)[0] for c in (changed, linear, config))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert np.abs(ours - plain).max() > 1e-4


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("familie", "own", "there is no registry 'familie': use one of"),
        ("device", "memory of mine", "there is no registry 'device'"),
        ("family", "qwen2", "the registry 'family' has 'qwen2' already: choose another name"),
        ("family", 3, "the name of an entry must be a text, got 3"),
    ],
)
def test_wrong_entries_are_rejected(registries, kind, name, message):
    with pytest.raises(xj.InputError, match=message):
        xj.register(kind, name, object())
