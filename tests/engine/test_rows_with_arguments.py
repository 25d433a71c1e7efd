"""An engine that holds adapters, vectors for hidden states, and logits processors, which its rows name: their
bits next to other rows, versions, pages, drafts, bad input.
"""

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from random_adapters import random_adapter
from soak import engine_requests
from soak.engine_requests import answer_of as answer

import xinfer_jax as xj
from xinfer_jax.engine.held_processors import HeldProcessors, repeated
from xinfer_jax.engine.held_vectors import HeldVectors

pytestmark = [pytest.mark.full, pytest.mark.oldest]  # else test_serve_adapters.py, test_taps.py

SAMPLED = xj.SamplingConfig(temperature=1.0, top_p=0.95)
SHAPE = dict(rows=3, capacity=384, chunk=128, pages=24)
PROMPT = [i % 50 + 3 for i in range(150)]
NEW = 40
D = 64


def count(state, token_B, context):
    return state | dict(count=state["count"].at[jnp.arange(len(token_B)), token_B].add(1))


PRESENCE = xj.LogitsProcessor(
    lambda penalty_B, context: dict(penalty=penalty_B, count=jnp.zeros(context.seen_BV.shape, int)),
    lambda state, logits_BV, context: logits_BV - state["penalty"][:, None] * (state["count"] > 0),
    count,
)
NOISE = xj.LogitsProcessor(
    None,
    lambda s, logits_BV, context: (
        logits_BV
        + s["by"][:, None] * jax.vmap(lambda k: jax.random.normal(k, logits_BV.shape[1:]))(context.key_B)
    ),
    last=True,
)
PROCESSORS = dict(presence=(PRESENCE, 0.0), noise=(NOISE, dict(by=1.0)))
V_2D = np.random.RandomState(0).standard_normal((2, D)).astype(np.float32)
TAPS = dict(calm={0: V_2D[0], 1: V_2D[1]}, loud={1: V_2D[0]})
ROWS = [
    {},
    dict(adapter="a"),
    dict(adapter="c"),
    dict(taps=dict(calm=1.0)),
    dict(taps=dict(calm=-2, loud=0.5)),
    dict(processors=dict(presence=2.0)),
    dict(processors=dict(noise=None)),
    dict(processors=dict(presence=30.0, noise=dict(by=3))),
    dict(adapter="b", taps=dict(loud=1.0), processors=dict(presence=9.0)),
]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return engine_requests.random_model("qwen2", None)


@pytest.fixture(scope="module")
def adapters(model) -> list[xj.lora.Adapter]:
    return [random_adapter(model.config, i, rank) for i, rank in enumerate((4, 2, 3))]


@pytest.fixture(scope="module")
def own_engine(model):
    how = dict(max_adapters=3, max_rank=4, taps=TAPS, processors=PROCESSORS)
    return xj.Engine(model, **SHAPE, **how, warm_up=True)


@pytest.fixture
def engine(own_engine, adapters):
    """Yields an engine with the adapters a, b and c."""
    for name in list(own_engine.adapters):
        own_engine.remove_adapter(name)
    for name, adapter in zip("abc", adapters, strict=True):
        own_engine.add_adapter(name, adapter)
    yield own_engine
    stats = own_engine.stats
    assert (stats.pages_used, stats.pages_cached + stats.pages_free) == (0, own_engine.pages - 1)


def submit(engine, adapter=None, taps=None, processors=None, prompt=PROMPT, **how) -> xj.types.Request:
    options = xj.GenerateOptions(
        max_tokens=NEW, sampling=SAMPLED, eos_token_ids=(), taps=taps, processors=processors
    )
    return engine.submit(prompt, options, key=jax.random.key(0), adapter=adapter, **how)


def generated(model, adapters, adapter=None, taps=None, processors=None, **how) -> xj.types.GenerateOutput:
    """The answer that `generate` gives to a row with these arguments."""
    params = model.params
    if adapter is not None:
        params = xj.lora.with_adapter(params, adapters["abc".index(adapter)])
    added = {}
    for name, factor in (taps or {}).items():
        for layer, vector_D in TAPS[name].items():
            added[layer] = added.get(layer, 0) + np.float32(factor) * vector_D
    given = []
    for name, arguments in (processors or {}).items():
        processor, default = PROCESSORS[name]
        given.append((processor, default if arguments is None else arguments))
    how |= dict(taps={layer: xj.Tap(x_D, jnp.add) for layer, x_D in added.items()} or None)
    options = xj.GenerateOptions(
        max_tokens=NEW, sampling=SAMPLED, eos_token_ids=(), processors=given or None, **how
    )
    return xj.generate(params, model.config, [PROMPT], options, key=jax.random.key(0))


def test_rows_have_the_bits_that_they_have_alone(engine, model, adapters, monkeypatch):
    """Rows run next to others, and a row is preempted in each step. Nothing is compiled."""
    contents = dict(zip("abc", adapters, strict=True))
    with compiling.events() as seen:
        alone = [answer(submit(engine, **row)) for row in ROWS]
        for order in (range(9), (8, 0, 4, 2, 0, 6, 5)):
            requests = [submit(engine, **ROWS[i]) for i in order]  # with pages of the prompt
            assert [answer(request) for request in requests] == [alone[i] for i in order]
        with monkeypatch.context() as patched:
            patched.setattr(engine.core.scheduler, "time_slice", 1e-9)
            before = engine.stats.preemptions
            requests = [submit(engine, **row, client=str(i)) for i, row in enumerate(ROWS)]
            assert [answer(request) for request in requests] == alone
            assert engine.stats.preemptions - before > 5
        for i in range(1, 9):
            given = {0: contents[ROWS[i]["adapter"]]} if "adapter" in ROWS[i] else {}
            request = submit(engine, **ROWS[i])
            out = request.result()
            assert engine.replay(request, {0: model.params}, given) == out.logprobs[0]
        engine.remove_adapter("c")
        engine.add_adapter("d", adapters[0])  # in the place of another one
        assert answer(submit(engine, "d")) == alone[1]
        assert answer(submit(engine, taps=dict(loud=0.0))) == alone[0]
    assert seen == []
    assert len({str(tokens) for tokens, _ in alone}) == len(ROWS)
    for i in (0, 2, 4, 7, 8):
        tokens, logprobs = alone[i]
        want = generated(model, adapters, **ROWS[i])
        assert want.tokens[0] == tokens
        np.testing.assert_allclose(logprobs, want.logprobs[0], atol=2e-4)


# --- adapters -----------------------------------------------------------------------------------------------


def hits(request) -> int:
    request.result()
    return request.answers[0].row.hits


def test_pages_are_shared_with_the_same_adapter_only(engine, adapters):
    engine.update_adapter("b", adapters[0])  # the contents of a
    found = [hits(submit(engine, name, salt="pages")) for name in (None, "a", "c", "b", None, "c")]
    assert found == [0, 0, 0, 128, 128, 128]
    engine.update_adapter("a", adapters[1])
    assert [hits(submit(engine, name, salt="pages")) for name in ("a", "b", "c", None)] == [0, 128, 128, 128]


@pytest.mark.parametrize("mode", ["continue", "wait", "abort", "recompute"])
def test_an_adapter_is_replaced_as_weights_are(engine, model, adapters, mode):
    alone = [answer(submit(engine, name)) for name in "ab"]
    (first, other) = requests = [submit(engine, name, salt=mode) for name in "ab"]
    while min(len(request.answers[0].tokens) for request in requests) < 5:
        engine.core._pacing.step_seconds = 0.1
        engine.step()
    assert first.answers[0].finish_reason is None
    waiting = submit(engine, "a", salt="later")
    engine.update_adapter("a", adapters[2], version=7, mode=mode)
    assert answer(other) == alone[1]
    out = first.result()
    assert engine.adapters["a"].version == 7
    if mode == "abort":
        assert out.finish_reason == waiting.result().finish_reason == ["abort"]
        return
    versions = {engine.version: model.params}
    assert engine.replay(first, versions, {0: adapters[0], 7: adapters[2]}) == out.logprobs[0]
    with pytest.raises(xj.InputError, match="needs its adapter of version 0"):
        engine.replay(first, versions, {7: adapters[2]})
    if mode == "wait":
        assert (out.tokens[0], out.logprobs[0]) == alone[0]
        assert out.adapter_versions == [[0] * NEW]
    else:
        mixed = out.adapter_versions[0]
        assert set(mixed) == {0, 7} and mixed == sorted(mixed)
        assert out.logprobs[0] != alone[0][1]
        assert other.result().adapter_versions == [[0] * NEW]
        assert other.result().token_versions == [[engine.version] * NEW]
    assert answer(waiting) == answer(submit(engine, "a", salt="still later"))
    assert waiting.result().adapter_versions == [[7] * NEW]


def test_a_removed_adapter_stays_until_its_requests_end(engine, adapters):
    alone = answer(submit(engine, "a"))
    request = submit(engine, "a")
    engine.remove_adapter("a")
    with pytest.raises(xj.InputError, match="no adapter is called 'a': the engine has b, c"):
        submit(engine, "a")
    with pytest.raises(xj.InputError, match="holds 3 adapters .* requests of removed ones still run: a"):
        engine.add_adapter("a", adapters[1])
    assert answer(request) == alone
    engine.add_adapter("a", adapters[1])
    assert answer(submit(engine, "a")) == answer(submit(engine, "b"))


def test_adapters_come_within_a_mesh(engine, adapters):
    """The caller trains on a mesh whose axes are Explicit."""
    with jax.set_mesh(jax.make_mesh((1,), ("model",))):
        own = jax.tree.map(lambda x: jnp.array(x) * 1, adapters[0])
        engine.update_adapter("b", own)
        found = answer(submit(engine, "b"))
    assert found == answer(submit(engine, "a"))


def test_new_weights_keep_the_adapters(engine, model):
    before = answer(submit(engine, "a"))
    engine.update(jax.tree.map(lambda x: np.asarray(x) / 2, model.params))
    assert answer(submit(engine, "a")) != before
    engine.update(model.params)
    assert answer(submit(engine, "a")) == before


def test_prompt_logprobs_and_generate_take_adapters(engine, model, adapters):
    request = submit(engine, "a", prompt_logprobs=1)
    request.result()
    found = [token.logprob for token in request.prompt_logprobs]
    wanted = xj.score(
        xj.lora.with_adapter(model.params, adapters[0]), model.config, np.array([PROMPT])
    ).logprobs_BT[0]
    np.testing.assert_allclose(found, wanted[-len(found) :], atol=2e-4)
    short = xj.GenerateOptions(max_tokens=4, eos_token_ids=())
    (plain, adapted) = engine.generate([PROMPT, PROMPT], short, adapter=[None, "a"])
    assert plain.adapter is None and adapted.adapter == "a"
    assert plain.tokens != adapted.tokens


def test_bad_calls_of_adapters(engine, model, adapters, tmp_path):
    engine.remove_adapter("b")
    engine.remove_adapter("c")
    path = "layers.0.q"
    matrices = {path: adapters[0].matrices[path]}
    deleted = jax.tree.map(lambda x: jnp.array(x), adapters[0])
    jax.tree.leaves(deleted)[0].delete()
    shape = SHAPE | dict(max_adapters=3, max_rank=4)
    adapted = xj.Model(**vars(model) | dict(params=xj.lora.with_adapter(model.params, adapters[0])))
    for contents, message in (
        (random_adapter(model.config, 5, 5), "rank 5, and the engine max_rank 4"),
        (jax.tree.map(lambda x: x * np.nan, adapters[0]), "NaN or inf"),
        (xj.lora.Adapter(matrices, (np.inf,)), f"NaN or inf in {path}, .* scale inf"),
        (xj.lora.Adapter({path: (1, 2)}, (1.0,)), f"{path} has no LowRank"),
        (deleted, "donated"),
        (xj.lora.Adapter({"embed": xj.lora.LowRank(np.zeros((2, 9)), np.zeros((9, 2)))}, (1.0,)), "embed"),
        (tmp_path, "holds no adapter_config.json"),
        (5, "load_adapter"),
    ):
        with pytest.raises(xj.InputError, match=message):
            engine.add_adapter("b", contents)
    for call, message in (
        (lambda: engine.add_adapter("a", adapters[1]), "'a' is there"),
        (lambda: engine.add_adapter("", adapters[1]), "short text"),
        (lambda: engine.update_adapter("b", adapters[0]), "'b': the engine has a"),
        (lambda: engine.update_adapter("a", adapters[0], mode="x"), "mode must be"),
        (lambda: engine.remove_adapter("b"), "'b'"),
        (lambda: engine.generate([PROMPT], adapter=["a", "a"]), "2 adapters for 1"),
        (lambda: engine.generate([PROMPT], adapter=5), "no adapter is called 5"),
        (lambda: xj.Engine(model, **shape | dict(max_rank=0)), "max_rank"),
        (lambda: xj.Engine(model, **shape, adapters=["a"]), "adapters of an engine must be a dict"),
        (lambda: xj.Engine(model, **shape, adapters=dict(a=5)), "what load_adapter returns, got int"),
        (lambda: xj.Engine(model, rows=1, capacity=64).add_adapter("a", adapters[0]), "max_adapters"),
        (lambda: xj.Engine(adapted, **shape), "has an adapter already"),
    ):
        with pytest.raises(xj.InputError, match=message):
            call()
    assert [*engine.adapters] == ["a"]


# --- vectors ------------------------------------------------------------------------------------------------


def test_pages_of_steered_requests_are_never_shared(engine):
    """They are shared neither with other requests nor with requests of equal vectors, and none of them is
    kept. With factors of 0 they are shared.
    """
    found = []
    cached = []
    for taps in (None, dict(calm=1.0), dict(calm=1.0), None, dict(calm=2.0), dict(loud=0.0)):
        found.append(hits(submit(engine, taps=taps, salt="steered", share_answers=True)))
        cached.append(engine.stats.pages_cached)
    assert found == [0, 0, 0, 128, 0, 128]
    assert cached[1:3] == cached[:1] * 2


def test_factors_are_put_on_the_devices_once(model):
    """Few factors of earlier rows are kept."""
    held = HeldVectors(TAPS, model.params, model.config)

    def factors(calm):
        return held.of_rows([(calm, 0.0), ()], None)[1]

    first = factors(1.0)
    assert factors(1.0) is first
    for i in range(100):
        np.testing.assert_array_equal(factors(float(i)), [[i, 0], [0, 0]])
    assert factors(1.0) is not first


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([V_2D], "taps of an engine must be a dict of names and vectors by layer"),
        (dict(calm=V_2D[0]), "tap 'calm' must be vectors by layer, got"),
        ({"": {0: V_2D[0]}}, "the name of a tap must be a short text, got ''"),
        (dict(calm={99: V_2D[0]}), "tap 'calm': layer must be .*, got 99"),
        (dict(calm={0: V_2D}), "tap 'calm': layer 0 must have 64 numbers that are finite in float32, got"),
        (dict(calm={0: V_2D[0] * np.inf}), "tap 'calm': layer 0 must have 64 numbers that are finite"),
    ],
    ids=["list", "vector", "name", "layer", "shape", "infinite"],
)
def test_wrong_vectors_of_an_engine(model, taps, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(model, **SHAPE, taps=taps)


# --- processors ---------------------------------------------------------------------------------------------


def test_nan_ends_its_own_request(engine):
    beside = submit(engine, processors=dict(presence=2.0))
    wrong = submit(engine, processors=dict(noise=dict(by=np.nan)))
    with pytest.raises(xj.InputError, match="step 0: apply .*lambda.* of a processor returned nan"):
        wrong.result()
    assert answer(beside) == answer(submit(engine, processors=dict(presence=2.0)))


PRESENCE_AS, NOISE_AS = (f"arguments of the processor '{x}' must be as" for x in ("presence", "noise"))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (dict(taps=dict(other=1)), "no tap is called 'other': the engine has calm, loud"),
        (dict(taps={0: xj.Tap()}), "the tap of layer 0 is not of Tap.steer"),
        (dict(taps=3), "taps of a request must be factors by name of the engine's, got 3"),
        (dict(taps=dict(calm=np.nan)), "tap 'calm': the factor must be a number up to 1e6, got nan"),
        (dict(taps=dict(calm="x")), "tap 'calm': the factor must be a number up to 1e6, got 'x'"),
        (dict(adapter="x"), "no adapter is called 'x': the engine has a, b, c"),
        (dict(processors=dict(other=1)), "no processor is called 'other': the engine has noise, presence"),
        (
            dict(processors=dict(presence="x")),
            f"{PRESENCE_AS} array.0., dtype=float32.*got 'x'",
        ),
        (dict(processors=dict(presence=[1.0, 2.0])), PRESENCE_AS),
        (dict(processors=dict(noise=dict(at=1.0))), f"{NOISE_AS} {{'by'"),
        (dict(processors=dict(noise=dict(by=np.ones(2)))), f"{NOISE_AS} {{'by'"),
        (dict(processors=dict(noise=3)), f"{NOISE_AS} {{'by'.*got 3"),
        (dict(processors=dict(noise=dict(by=1e300))), f"{NOISE_AS} {{'by'.*got .*1e.300"),
    ],
    ids=lambda value: value if isinstance(value, str) else "named",
)
def test_wrong_arguments_of_a_request(engine, named, message):
    with pytest.raises(xj.InputError, match=message):
        submit(engine, **named)


def test_arguments_are_those_of_the_call():
    """A value that the caller writes into an array later does not count."""
    array_V = np.ones(4, np.float32)
    held = HeldProcessors(dict(bias=(PRESENCE, array_V)))
    of_request = held.of_request(dict(bias=array_V))
    array_V[:] = 5
    for callers in (of_request, held.of_request(dict(bias=None))):
        np.testing.assert_array_equal(callers.states[0], np.ones((1, 4)))


def of_apply(apply, update=None):
    return dict(a=(xj.LogitsProcessor(None, apply, update), 0.0))


KEPT = []


def keeps(_, logits_BV, context):
    KEPT.append(logits_BV)
    return logits_BV + KEPT[0].sum()


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([PRESENCE], "processors of an engine must be a dict of names"),
        (dict(a=(PRESENCE, np.array(2**40))), "arguments of the processor 'a' must be a pytree of numbers"),
        ({"": (PRESENCE, 0.0)}, "the name of a processor must be a short text, got ''"),
        (dict(a=PRESENCE), "'a' must be .LogitsProcessor, arguments of a request that gives none., got"),
        (dict(a=(PRESENCE, "x")), "arguments of the processor 'a' must be a pytree of numbers .*got 'x'"),
        (of_apply(lambda _, x, c: x[:, 1:]), "apply .* returned float32.1, 511., expected float32.1, 512."),
        (of_apply(lambda _, x, c: x, lambda s, *_: s[0]), "update .* returned float32.., exp"),
        (of_apply(lambda _, x, c: x if x.sum() else x), "apply .* cannot be traced: Attempt"),
        (of_apply(keeps), "keeps: a function of yours uses a traced value of another call"),
    ],
)
def test_wrong_processors_of_an_engine(model, processors, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(model, **SHAPE, processors=processors)


def test_functions_have_to_work_for_all_rows(model):
    """An engine has programs of one row and of all: a function that serves one row only is found at once."""
    with pytest.raises(TypeError, match="cannot reshape"):
        xj.Engine(model, **SHAPE, processors=of_apply(lambda s, x, c: x - s.reshape(1, 1)))


def test_states_may_be_keys_of_any_kind():
    key_1 = jax.random.key(3, impl="rbg")[None]
    keys_B = repeated(key_1, 2)
    assert jax.random.key_data(keys_B).tolist() == jax.random.key_data(key_1).tolist() * 2


@pytest.mark.parametrize("draft", full_except((), ["lookup", "itself"], soak=["itself"]))
def test_states_follow_drafts(model, draft):
    """The state after each accepted token, in `generate` and in an engine, is that of plain decoding."""
    rows = [ROWS[7], {}]
    want = [generated(model, (), **row).tokens[0] for row in rows]
    drafted = generated(model, (), **rows[0], draft=model if draft == "itself" else draft)
    assert drafted.tokens[0] == want[0]
    if draft == "lookup":
        engine = xj.Engine(model, **SHAPE, processors=PROCESSORS, draft="lookup")
        requests = [submit(engine, **row) for row in rows]
        assert [answer(request)[0] for request in requests] == want
