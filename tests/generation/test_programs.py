"""Tests of the programs that a call compiles: they are few, whatever the number of layers. Both executors
return the same.
"""

import compiling
import jax
import jax.experimental.pallas.tpu  # jax 0.12 compiles again what was compiled before this import
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation import batch_generator, entrypoints, streaming
from xinfer_jax.layerwise.layer_programs import layer_groups
from xinfer_jax.layerwise.layerwise_executor import LayerwiseExecutor

pytestmark = [pytest.mark.full, pytest.mark.newest]

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(20))
SMALL = tiny.CONFIG | dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
WARM = xj.SamplingConfig(temperature=0.9, top_k=30)
FULL = xj.SamplingConfig(min_p=0.1, temperature=0.9)
OURS = {
    "_embed", "_layers", "_last", "_head", "_append", "_most_likely", "_sample", "_record", "_verify",
    "_add_draft_token", "_call_draft_function", "_pick", "_reorder_layer", "reorder",
    "_reorder_tail", "_first", "_next", "decode", "prefill_chunks", "prefill_uncached", "sample", "search",
}  # fmt: skip
FIRST = dict(_embed=2, _layers=2, _last=1, _head=1, _most_likely=1, _append=1)


@pytest.fixture(scope="module")
def model():
    config = from_hf(SMALL)
    return xj.init_params(config, jax.random.key(0)), config


def layers(count: int, **given):
    """A model whose programs no other test compiles."""
    sizes = dict(num_hidden_layers=count, hidden_size=4 * count, vocab_size=1000 + count)
    config = from_hf(SMALL | sizes | given)
    return xj.init_params(config, jax.random.key(0)), config


def options(**given) -> xj.GenerateOptions:
    return xj.GenerateOptions(**dict(max_tokens=4, eos_token_ids=(), capacity=64) | given)


def streamed(model, prompts=(PROMPT,), **given):
    stream = xj.stream(*model, prompts, options(**given), key=jax.random.key(0))
    tokens = list(stream)
    return tokens, stream.output


def ours(seen) -> dict[str, int]:
    return {name: count for name, count in seen.items() if name in OURS}


def test_programs_that_each_call_compiles(model):
    """Each line of the table runs after all before it, with a cache of 64 tokens."""
    draft = xj.Model(*model)
    prefill = dict(_embed=1, _layers=1, _last=1)
    one_more = dict(_embed=1, _layers=1)
    table = [
        ("a stream", {}, FIRST),
        ("the same again", {}, {}),
        ("another length of the answer", dict(max_tokens=9), {}),
        ("a sampled answer", dict(sampling=WARM), dict(_sample=1)),
        ("other plain settings", dict(sampling=xj.SamplingConfig(repetition_penalty=1.1)), {}),
        ("any other settings", dict(sampling=FULL), dict(_sample=1, _append=1)),
        ("alternatives", dict(logprobs=2), dict(_record=1)),
        ("a longer prompt", dict(prompts=[LONG]), prefill),
        ("two prompts", dict(prompts=[PROMPT, PROMPT]), FIRST),
        ("two answers", dict(n=2), dict(_pick=1, _reorder_layer=1, reorder=1)),
        ("another cache", dict(capacity=32), dict(_layers=2, _embed=2)),
        ("quantized keys", dict(cache_dtype="int8"), dict(_layers=2)),
        ("no cache", dict(use_cache=False), one_more),
        ("look-up", dict(draft="lookup"), one_more | dict(_append=1, _call_draft_function=1, _verify=1)),
        ("a draft model", dict(draft=draft), one_more | dict(_embed=2, _add_draft_token=2)),
    ]
    for line, given, programs in table:
        with compiling.programs() as seen:
            streamed(model, **given)
        assert ours(seen) == programs, line
    with compiling.programs() as seen:
        kept = xj.generate(*model, [PROMPT], options(keep_prefix=True)).prefix
    assert ours(seen) == {}, "a short call of generate runs the programs of a stream"
    with compiling.programs() as seen:
        xj.generate(*model, [PROMPT] * 2, options(max_tokens=129, capacity=256))  # 2 x 129 > 256
    assert seen["decode"] == 1, "a long one decodes in one loop"
    with compiling.programs() as seen:
        xj.generate(*model, [[*PROMPT, 3]], options(keep_prefix=True, prefix=kept, capacity=None))
    assert ours(seen) == {}, "a prefix changes no program"
    with compiling.programs() as seen:
        xj.beam_search(*model, PROMPT, num_beams=2, max_tokens=4, capacity=64)
    assert ours(seen) == dict(_first=1, _next=1, _embed=1, _reorder_tail=1), "two rows that are reordered"


@pytest.mark.parametrize(
    "prompts, given, in_one_loop",
    [
        (1, dict(max_tokens=256), False),
        (8, dict(max_tokens=33), True),
        (5, dict(max_tokens=33), True),  # five rows are padded to eight
        (1, dict(max_tokens=33, n=8), True),
        (1, dict(max_tokens=300, draft="lookup"), True),
        (1, dict(max_tokens=16, draft="lookup", logprobs=2, keep_prefix=True), False),
    ],
)
def test_arguments_choose_the_executor(monkeypatch, prompts, given, in_one_loop):
    """The product of rows and new tokens decides for `generate`. `stream` decodes layer by layer."""
    model = layers(2, max_position_embeddings=512)
    chosen = []

    class Recorded(batch_generator.BatchGenerator):
        def start(self):
            chosen.append(self._decoder.name)
            raise InterruptedError

    monkeypatch.setattr(entrypoints, "BatchGenerator", Recorded)
    monkeypatch.setattr(streaming, "BatchGenerator", Recorded)
    asked = options(**dict(capacity=512) | given)
    calls = dict(key=jax.random.key(0))
    with pytest.raises(InterruptedError):
        xj.generate(*model, [PROMPT] * prompts, asked, **calls)
    with pytest.raises(InterruptedError):
        list(xj.stream(*model, [PROMPT] * prompts, asked, **calls))
    assert chosen == ["whole" if in_one_loop else "layer by layer", "layer by layer"]


def test_no_step_follows_the_last_token(model, monkeypatch):
    """Decoding takes a step before it knows that a row has ended; not where its length says so."""
    forward = LayerwiseExecutor.forward
    calls = []
    monkeypatch.setattr(LayerwiseExecutor, "forward", lambda *args: calls.append(0) or forward(*args))
    for decode in (xj.generate, lambda *args: list(xj.stream(*args))):
        decode(*model, [PROMPT], options(max_tokens=6))  # a dry run, too, where it compiles
        calls.clear()
        decode(*model, [PROMPT], options(max_tokens=6))
        assert len(calls) == 5


@pytest.mark.parametrize("jitted", [False, True], ids=["", "jit"])
def test_impl_chooses_the_program_of_each_call(jitted):
    """Kernels are another program than plain operations, whichever came first. Called again, it is kept."""
    params, config = layers(1)

    def logits(impl):
        cache = xj.init_cache(config, 1, 16)
        return xj.prefill(params, config, np.array([PROMPT]), np.array([len(PROMPT)]), cache, impl=impl)[0]

    jax.eval_shape(lambda: logits("interpret"))  # jax 0.12 traces again after the kernels' imports
    call = jax.jit(logits, static_argnames="impl") if jitted else logits
    name = "logits" if jitted else "prefill_chunks"
    found = []
    for impl, compiled in ("xla", 1), ("interpret", 1), ("xla", 0):
        with compiling.programs() as seen:
            found.append(call(impl=impl))
        assert seen[name] == compiled, impl
    assert (found[0] == found[2]).all()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_programs_do_not_grow_with_the_layers():
    counts = []
    for count in (6, 12):
        with compiling.programs() as seen:
            streamed(layers(count))
        counts.append(ours(seen))
    assert counts[0] == counts[1] and counts[0]["_layers"] == 2


def test_each_kind_of_layer_has_a_program():
    hf = SMALL | dict(model_type="gemma3_text", head_dim=8, sliding_window=8, num_hidden_layers=6)
    config = from_hf(hf | dict(layer_types=["sliding_attention", "full_attention"] * 3))
    with compiling.programs() as seen:
        streamed((xj.init_params(config, jax.random.key(0)), config))
    assert ours(seen)["_layers"] == 3, "prefill has a program per kind, decoding one for both"


def test_a_stream_is_compiled_before_its_weights_are_loaded(checkpoint):
    """The shapes of an opened checkpoint are enough to compile it."""
    from xinfer_jax.checkpoint.loading import open_checkpoint

    opened = open_checkpoint(checkpoint(hf=SMALL | dict(hidden_size=40, vocab_size=264)))
    shapes = opened.model
    ids = [PROMPT]
    given = options(logprobs=3)
    with compiling.programs() as ahead:
        xj.stream(shapes.params, shapes.config, ids, given).prepare().wait()
    assert ours(ahead) == FIRST | dict(_record=1)
    model = opened.read()
    with compiling.programs() as later:
        list(xj.stream(model.params, model.config, ids, given))
    assert ours(later) == {}


def test_committed_parameters_compile_each_forward_pass_once():
    """Only `_append` compiles twice: the state before the first token is not committed."""
    params, config = layers(5)
    with compiling.programs() as seen:
        streamed((jax.device_put(params, jax.devices()[0]), config))
    assert ours(seen) == FIRST | dict(_append=2)


def test_layer_groups():
    """Groups are whole periods, and there are few: 22 layers are not eleven groups."""

    def sizes(**given):
        config = from_hf(SMALL | dict(head_dim=8) | given)
        return [at.stop - at.start for at in layer_groups(config, 5)], {*map(str, layer_groups(config, 1))}

    assert sizes(num_hidden_layers=24)[0] == [4] * 6 and sizes(num_hidden_layers=80)[0] == [5] * 16
    even, one_by_one = sizes(num_hidden_layers=22)
    assert even[:2] == [5, 5] and len(one_by_one) == 22
    kinds = dict(model_type="gemma3_text", sliding_window=8)
    kinds |= dict(layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3)
    assert sizes(num_hidden_layers=18, **kinds)[0] == [6, 6, 6]


@pytest.mark.parametrize(
    "rows, widths",
    [
        (1, {1: 16, 16: 16, 20: 32, 70: 96, 130: 160, 256: 256, 300: 160, 400: 224, 512: 256, 700: 256}),
        (2, {16: 16, 70: 80, 130: 80, 300: 112}),
        (8, {16: 16, 20: 32, 300: 32}),
        (64, {300: 16}),
    ],
)
def test_layerwise_prefill_width(rows, widths):
    """The width gives as few chunks as with 256 tokens of all rows each, and little padding."""
    assert {n: LayerwiseExecutor.prefill_width(n, rows) for n in widths} == widths


def test_a_prompt_of_several_chunks_compiles_one_width():
    """It compiles as many programs as a short prompt. Another length of the same width compiles none. Padding
    changes nothing.
    """
    config = from_hf(SMALL | dict(hidden_size=24, max_position_embeddings=1024))
    model = xj.init_params(config, jax.random.key(0)), config
    prompts = {n: [(7 * i + n) % 256 for i in range(n)] for n in (300, 310, 400)}
    reading = {300: dict(_embed=2, _layers=2, _last=1), 310: {}, 400: dict(_embed=1, _layers=1, _last=1)}
    for n, programs in reading.items():
        with compiling.programs() as seen:
            tokens, output = streamed(model, [prompts[n]], capacity=512)
        assert {name: seen[name] for name in ("_embed", "_layers", "_last") if name in seen} == programs, n
        logits_BTV, _ = xj.forward(*model, np.array([prompts[n]]))
        assert tokens[0] == [int(logits_BTV[0, -1].argmax())]
        best = float(jax.nn.log_softmax(logits_BTV[0, -1]).max())
        assert output.logprobs[0][0] == pytest.approx(best, abs=1e-5)


def test_a_compilation_error_is_raised_once(model, monkeypatch):
    from xinfer_jax.layerwise import precompile

    compile_it = precompile._compile
    calls = []

    def broken(lowered):
        calls.append(lowered)
        if len(calls) == 1:
            raise MemoryError("no room")
        compile_it(lowered)

    monkeypatch.setattr(precompile, "_compile", broken)
    monkeypatch.setattr(precompile, "_precompiled", {})
    with pytest.raises(MemoryError, match="no room"):
        streamed(model, capacity=56)
    assert len(streamed(model, capacity=56)[0]) == 4, "the next call compiles again"


# --- both executors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        dict(prompts=[PROMPT, LONG, [3]], sampling=WARM),
        dict(sampling=FULL, logprobs=2, n=2),
        dict(draft="lookup", max_tokens=12),
        pytest.param(dict(cache_dtype="int4"), marks=pytest.mark.soak),
        dict(use_cache=False),
        dict(prompts=[LONG * 3], capacity=None, eos_token_ids=(7, 9)),
    ],
    ids=["rows", "answers", "look-up", "int4-keys", "no-cache", "long"],
)
def test_both_executors_return_the_same_tokens(model, given, monkeypatch):
    """Tokens and finish reasons are equal, log-probabilities nearly."""
    layered = streamed(model, **given)
    monkeypatch.setattr(batch_generator, "executor_class", lambda params: batch_generator.TracedExecutor)
    with compiling.programs() as seen:
        whole = streamed(model, **given)
    assert "_layers" not in seen and ours(seen), "this was the other executor"
    assert layered[0] == whole[0] and layered[1].finish_reason == whole[1].finish_reason
    for one, other in zip(layered[1].logprobs, whole[1].logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_the_same_call_has_the_same_bits_cold_and_warm():
    """The bits are the same whatever was compiled before the call."""
    model = layers(3, max_position_embeddings=512, num_attention_heads=1, num_key_value_heads=1)
    calls = [([PROMPT], options(max_tokens=12)), ([PROMPT], options(max_tokens=300, capacity=512))]

    def bits():
        return [xj.generate(*model, *call).logprobs for call in calls]

    jax.clear_caches()
    cold = bits()
    calls.reverse()
    assert bits() == cold[::-1]


def test_a_row_with_a_gear_cache_is_the_row_alone(model):
    """GEAR takes its directions from the first tokens of the row."""
    long = list(range(40)) * 2
    given = dict(cache_dtype="gear", capacity=128)
    (alone,) = streamed(model, [long], **given)[1].logprobs
    among = streamed(model, [long] + [PROMPT] * 15, **given)[1].logprobs[0]
    np.testing.assert_allclose(alone, among, atol=1e-5)
