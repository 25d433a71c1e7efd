"""Beam search against all sequences there are, against itself and transformers; beam sampling against its
distribution.
"""

import dataclasses
import gc
import itertools
from collections import Counter

import compiling
import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation import beam_steps
from xinfer_jax.generation.beam_steps import BeamSearch

pytestmark = pytest.mark.oldest

TINY = dict(
    model_type="qwen2", vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip
EOS = tuple(range(2, 60, 5))  # many, so that sequences end early
PROMPTS = [[5, 8, 13, 21], [7] * 3 + list(range(30)), [1, 2]]

forward = jax.jit(xj.forward, static_argnames="config")


def build(vocab_size: int = 60, quantize: str | None = None):
    config = from_hf(TINY | dict(vocab_size=vocab_size))
    params = xj.init_params(config, jax.random.key(4), "float32", quantize)
    # Fewer near ties.
    return (params if quantize else jax.tree.map(lambda x: 2.5 * x if x.ndim > 1 else x, params)), config


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def small():
    return build(5)


def assert_same(ours: xj.types.BeamOutput, sequences, scores) -> None:
    assert ours.sequences == sequences
    np.testing.assert_allclose(ours.scores, scores, rtol=0, atol=1e-4)


def logprobs(params, config, rows: list[list[int]]) -> np.ndarray:
    """Log-probabilities [rows, T - 1] of every token but the first, by one forward pass over rows of one
    length.
    """
    tokens_BT = np.array(rows, np.int32)
    all_BTV = jax.nn.log_softmax(forward(params, config, tokens_BT)[0], -1)
    return np.take_along_axis(np.asarray(all_BTV)[:, :-1], tokens_BT[:, 1:, None], -1)[..., 0]


# --- identities ---------------------------------------------------------------------------------------------


def test_one_beam_is_greedy(model):
    params, config = model
    free = xj.generate(params, config, PROMPTS, xj.GenerateOptions(max_tokens=20)).tokens
    eos = (free[0][7], free[2][11])
    greedy = xj.generate(params, config, PROMPTS, xj.GenerateOptions(max_tokens=20, eos_token_ids=eos))
    assert "stop" in greedy.finish_reason
    options = dict(num_beams=1, max_tokens=20, eos_token_ids=eos, early_stopping=False)
    ours = xj.beam_search(params, config, PROMPTS, **options)
    assert_same(ours, [[t] for t in greedy.tokens], [[np.mean(p)] for p in greedy.logprobs])


@pytest.mark.full
def test_as_many_beams_as_sequences_find_all_in_order(small):
    """1 + 4 + 4 · 4 · 5 = 85 sequences of at most 3 tokens that end with token 2 or at the limit."""
    params, config = small
    prompt = [0, 4, 1]
    penalty = 1.3
    paths = [
        p
        for n in (1, 2, 3)
        for p in itertools.product(range(5), repeat=n)
        if 2 not in p[:-1] and (n == 3 or p[-1] == 2)
    ]
    score = {p: logprobs(params, config, [prompt + list(p)])[0, 2:].sum() / len(p) ** penalty for p in paths}
    best = sorted(paths, key=score.get, reverse=True)
    wanted = [[list(p) for p in best]], [[score[p] for p in best]]
    options = dict(max_tokens=3, eos_token_ids=(2,), length_penalty=penalty)
    assert_same(xj.beam_search(params, config, prompt, num_beams=len(paths), **options), *wanted)
    # 16 beams hold every prefix, so nothing better can be missed
    narrow = xj.beam_search(
        params, config, prompt, num_beams=16, num_return_sequences=5, early_stopping="never", **options
    )
    assert_same(narrow, [wanted[0][0][:5]], [wanted[1][0][:5]])
    with pytest.raises(
        xj.InputError, match=r"num_beams 86 exceeds the 85 different sequences .*: lower num_beams"
    ):
        xj.beam_search(params, config, prompt, num_beams=86, **options)


@pytest.mark.full
def test_a_row_of_a_ragged_batch_is_the_row_alone(model):
    params, config = model
    settings = [
        xj.SamplingConfig(),
        xj.SamplingConfig(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.2),
        xj.SamplingConfig(temperature=1.5, top_p=0.5),
    ]
    keys = jax.random.split(jax.random.key(9), 3)
    options = dict(num_beams=3, max_tokens=18, eos_token_ids=EOS[:2])
    together = xj.beam_search(params, config, PROMPTS, sampling=settings, key=keys, **options)
    for i, prompt in enumerate(PROMPTS):
        alone = xj.beam_search(params, config, prompt, sampling=settings[i], key=keys[i : i + 1], **options)
        assert_same(alone, [together.sequences[i]], [together.scores[i]])
    tight = xj.beam_search(params, config, PROMPTS, sampling=settings, key=keys, capacity=33 + 18, **options)
    assert_same(tight, together.sequences, together.scores)


@pytest.mark.full
def test_the_cache_of_the_prompts_is_freed_before_the_first_step(model, monkeypatch):
    """The layerwise executor copies it for each beam."""
    caches = []
    step = BeamSearch.step

    def count_caches(strategy, ops, constants, carry):
        caches.append(sum(x.ndim == 4 and len(x) == 1 for x in jax.live_arrays()))
        return step(strategy, ops, constants, carry)

    gc.collect()
    before = sum(x.ndim == 4 and len(x) == 1 for x in jax.live_arrays())
    monkeypatch.setattr(BeamSearch, "step", count_caches)
    xj.beam_search(*model, PROMPTS[0], num_beams=3, max_tokens=4, eos_token_ids=())
    assert caches[-1] == before


@pytest.mark.full
def test_scores_in_fewer_bytes_are_those_of_one_forward_pass():
    params, config = build(quantize="int8")
    options = dict(max_tokens=10, length_penalty=0.5, cache_dtype="int8")
    ours = xj.beam_search(params, config, PROMPTS[0], **options)
    (sequences,), (scores,) = ours.sequences, ours.scores
    assert len({tuple(s) for s in sequences}) == 4 and scores == sorted(scores, reverse=True)
    sums = logprobs(params, config, [PROMPTS[0] + s for s in sequences])[:, 3:].sum(1)
    np.testing.assert_allclose(scores, sums / 10**0.5, atol=0.02)


@pytest.mark.full
def test_beams_without_an_allowed_token(model):
    """Beams that had ended by then are returned, and no prompt disturbs another."""
    params, config = model
    settings = [
        xj.SamplingConfig(no_repeat_ngram_size=1, allowed_token_ids=ids)
        for ids in ((3, 4), (3, 4, 9), range(60))
    ]
    found = xj.beam_search(
        params, config, [[1, 2]] * 3, num_beams=4, max_tokens=8, eos_token_ids=(9,), sampling=settings
    )
    assert found.sequences[0] == [] and found.scores[0] == []
    # All that there are, but one.
    assert len({tuple(s) for s in found.sequences[1]} & {(9,), (3, 9), (4, 9), (3, 4, 9), (4, 3, 9)}) == 4
    assert len(found.sequences[2]) == 4 and all(len(set(s)) == len(s) for s in found.sequences[2])


@pytest.mark.full
def test_other_settings_and_fewer_prompts_compile_nothing(model):
    params, config = model
    key = jax.random.key(0)

    def search(count, new, penalty, temperature, eos):
        sampling = xj.SamplingConfig(temperature=temperature, top_k=9)
        options = dict(max_tokens=new, length_penalty=penalty, eos_token_ids=(eos,), sampling=sampling)
        xj.beam_search(params, config, [PROMPTS[0]] * count, num_beams=2, key=key, **options)

    search(4, 10, 1.0, 0.0, 3)
    with compiling.events() as compiled:
        search(3, 16, 0.3, 0.7, 5)
        search(4, 2, -1.0, 1.5, 9)
    assert compiled == []


# --- sampling -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_pairs_have_the_frequencies_of_sampling_without_replacement(small):
    """One step of two beams ends with the two most likely of the four tokens drawn, of five."""
    params, config = small
    prompt = [0, 4, 1]
    rows = 6000
    sampling = xj.SamplingConfig(temperature=1.7)
    options = dict(num_beams=2, max_tokens=1, sampling=sampling, key=jax.random.key(2))
    found = xj.beam_search(params, config, [prompt] * rows, **options)
    logits_V = np.asarray(forward(params, config, np.array([prompt]))[0])[0, -1].astype(np.float64) / 1.7
    p = np.exp(logits_V - logits_V.max())
    p /= p.sum()
    expected: Counter = Counter()
    for drawn in itertools.permutations(range(len(p)), 4):
        before = np.cumsum(p[[*drawn]]) - p[[*drawn]]
        best = sorted(drawn, key=lambda token: -p[token])[:2]
        expected[tuple(sorted(best))] += rows * np.prod(p[[*drawn]] / (1 - before))
    counts = Counter(tuple(sorted(token for (token,) in pair)) for pair in found.sequences)
    assert set(counts) <= set(expected) and len(expected) == 3
    chi2 = sum((counts[pair] - number) ** 2 / number for pair, number in expected.items())
    assert chi2 < 13.8  # 2 degrees of freedom: exceeded once in a thousand keys
    assert all(scores[0] >= scores[1] for scores in found.scores)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_beams=0), "num_beams must be a whole number of at least 1, got 0"),
        (dict(num_beams=2.0), "num_beams must be a whole number of at least 1, got 2.0"),
        (dict(num_return_sequences=5), "num_return_sequences 5 exceeds num_beams 4: raise num_beams"),
        (dict(num_return_sequences=0), "num_return_sequences must be a whole number"),
        (dict(early_stopping="always"), "early_stopping must be True, False or 'never', got 'always'"),
        (dict(length_penalty=float("nan")), "length_penalty must be a finite number, got nan"),
        (dict(num_beams=61, max_tokens=1), "num_beams 61 exceeds the 60 different sequences"),
        (dict(num_beams=2**26), "num_beams 67108864 with a vocabulary of 60 makes .* lower num_beams"),
        (dict(max_tokens=300), "exceeds the model's context limit 256"),
        (dict(capacity=20), "exceeds the capacity 20: raise capacity"),
        (dict(sampling=xj.SamplingConfig(min_p=2.0)), "min_p must be from 0"),
        (dict(eos_token_ids=(60,)), "eos_token_ids holds token id 60, outside the vocabulary of 60"),
        (dict(ids=[[1], []]), "prompt 1 must be a non-empty list"),
        (dict(sampling=xj.SamplingConfig(temperature=0.7)), "sampling needs a PRNG key"),
        (
            dict(sampling=xj.SamplingConfig(temperature=0.7), num_beams=1, key=0),
            "num_beams 1 with a temperature above 0 is plain sampling: use generate",
        ),
    ],
)
def test_bad_arguments_of_beam_search_raise(model, arguments, message):
    params, config = model
    if "key" in arguments:
        arguments = arguments | dict(key=jax.random.key(arguments["key"]))
    with pytest.raises(xj.InputError, match=message), compiling.events() as compiled:
        xj.beam_search(params, config, **dict(ids=PROMPTS[0]) | arguments)
    assert compiled == []


# --- transformers: sequences and scores, stopping rules, processors -----------------------------------------


def hf_beam_search(
    model, ids: list[int], eos: tuple[int, ...], **options
) -> tuple[list[list[int]], np.ndarray]:
    """Sequences with their EOS, and scores, of one prompt. options: by our names."""
    import torch

    names = dict(max_tokens="max_new_tokens", min_tokens="min_new_tokens")
    options = {names.get(name, name): value for name, value in options.items()}
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        eos_token_id=list(eos) or None,
        output_scores=True, return_dict_in_generate=True, **dict(do_sample=False) | options,
    )  # fmt: skip
    rows = []
    for row in out.sequences[:, len(ids) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows, out.sequences_scores.numpy()


@pytest.fixture
def one_thread():
    """Models this small only wait for the other threads."""
    torch = pytest.importorskip("torch", reason="the live comparison needs torch: pip install -e '.[parity]'")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(name: str):
    transformers = pytest.importorskip(
        "transformers", reason="the live comparison needs transformers: pip install -e '.[parity]'"
    )
    transformers.logging.set_verbosity_error()
    config = cases.CASES[name].config
    tensors = cases.random_tensors(config, 5)
    return config, cases.params_from(config, tensors), cases.hf_model(cases.CASES[name].hf, tensors)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name, rules", [("qwen3-head-dim-tied", 2), ("smollm3-window", 3)])
def test_transformers_finds_the_same(name, rules):
    """All three prompts in one ragged batch here, each alone there; with and without EOS ids. `rules`: how
    many of the three stopping rules make a difference.
    """
    config, params, theirs = both(name)
    prompts = cases.prompts(cases.CASES[name])
    found = {}
    early_ends = 0
    cases_of = [*itertools.product((EOS,), (True, False, "never"), (0.7, 1.0, 1.5)), ((), False, 1.0)]
    for eos, early_stopping, length_penalty in cases_of:
        options = dict(num_beams=4, num_return_sequences=3, max_tokens=14)
        options |= dict(early_stopping=early_stopping, length_penalty=length_penalty)
        ours = xj.beam_search(params, config, prompts, eos_token_ids=eos, **options)
        for prompt, sequences, scores in zip(prompts, ours.sequences, ours.scores, strict=True):
            one = dataclasses.replace(ours, sequences=[sequences], scores=[scores])
            wanted = hf_beam_search(theirs, prompt, eos, **options)
            assert_same(one, *([part] for part in wanted))
            early_ends += sum(len(s) < 14 for s in sequences)
        if eos:
            found.setdefault(early_stopping, []).append(ours.sequences)
    assert early_ends > 10
    assert len({str(sequences) for sequences in found.values()}) == rules


def penalty_on(start: int, presence: float, frequency: float):
    """The two penalties that transformers lacks, as a processor for it. `start`: where the answer begins."""
    import torch

    def processor(ids, scores):
        count = torch.nn.functional.one_hot(ids[:, start:], scores.shape[1]).sum(1)
        return scores - presence * (count > 0) - frequency * count

    return processor


NGRAMS = [[7, 8, 9, 7, 8, 10, 8] * 3, [3, 4] * 5]
ALLOWED = tuple(range(0, 96, 4))
HOT = dict(temperature=0.8)
# Each a row of one batch: the prompt, our settings, transformers' own.
SERVED = {
    "off": (0, {}, {}),
    "logit_bias": (0, dict(logit_bias={33: -3.0, 18: -2.5, 40: 1.5}),
        dict(sequence_bias={(33,): -3.0, (18,): -2.5, (40,): 1.5})),
    "allowed_token_ids": (1, dict(allowed_token_ids=ALLOWED),
        dict(prefix_allowed_tokens_fn=lambda row, ids: list(ALLOWED))),
    "forbidden_token_ids": (1, dict(forbidden_token_ids=range(0, 96, 3)),
        dict(suppress_tokens=list(range(0, 96, 3)))),
    "repetition_penalty": (0, dict(repetition_penalty=1.4), dict(repetition_penalty=1.4)),
    "presence_penalty": (2, dict(presence_penalty=1.2), dict(penalties=(1.2, 0.0))),
    "frequency_penalty": (3, dict(frequency_penalty=0.7), dict(penalties=(0.0, 0.7))),
    "no_repeat_ngram_size 1": (0, dict(no_repeat_ngram_size=1), dict(no_repeat_ngram_size=1)),
    "no_repeat_ngram_size 2": (3, dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
    "min_tokens": (0, dict(min_tokens=9), dict(min_tokens=9)),
    "all of them": (
        2,
        dict(
            logit_bias={9: 2.0}, forbidden_token_ids=(5, 6), repetition_penalty=1.2, presence_penalty=0.3,
            frequency_penalty=0.4,
            no_repeat_ngram_size=2, min_tokens=3,
        ),
        dict(
            sequence_bias={(9,): 2.0}, suppress_tokens=[5, 6], repetition_penalty=1.2, penalties=(0.3, 0.4),
            no_repeat_ngram_size=2,
            min_tokens=3,
        ),
    ),
    "top_k": (1, dict(HOT, top_k=2), dict(HOT, top_k=2)),
    "top_p": (1, dict(HOT, top_p=0.3), dict(HOT, top_p=0.3)),
    "min_p": (2, dict(HOT, min_p=0.6), dict(HOT, min_p=0.6)),
    "typical_p": (1, dict(HOT, typical_p=0.2), dict(HOT, typical_p=0.2)),
    "typical_p's fewest": (0, dict(HOT, typical_p=0.01), dict(HOT, typical_p=0.01)),
    "all warpers": (
        3, dict(HOT, top_k=40, top_p=0.9, min_p=0.1, typical_p=0.7, frequency_penalty=0.5),
        dict(HOT, top_k=40, top_p=0.9, min_p=0.1, typical_p=0.7, penalties=(0.0, 0.5)),
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_every_processor_as_in_transformers(monkeypatch):
    """One batch, each row with settings of its own. Where candidates are drawn, both sides draw with the same
    noise at every step.
    """
    config, params, theirs = both("qwen3-head-dim-tied")
    import torch

    noise = np.random.RandomState(0).gumbel(size=3 * cases.VOCAB).astype(np.float32)
    monkeypatch.setattr(
        torch,
        "multinomial",
        lambda p, num_samples: torch.topk(p.log() + torch.tensor(noise), num_samples).indices,
    )
    monkeypatch.setattr(beam_steps, "gumbel_noise", lambda *_: noise)
    # A program traced with other noise would not do, nor may another test meet this one.
    jax.clear_caches()
    options = dict(num_beams=3, num_return_sequences=3, max_tokens=12)
    eos = (2, 7, 33, 47)
    prompts = cases.prompts(cases.CASES["qwen3-head-dim-tied"])[:2] + NGRAMS
    rows, ours, _ = zip(*SERVED.values(), strict=True)
    settings = [xj.SamplingConfig(**given) for given in ours]
    key = jax.random.key(0)
    found = xj.beam_search(
        params, config, [prompts[i] for i in rows], eos_token_ids=eos, sampling=settings, key=key, **options
    )
    jax.clear_caches()

    def wanted(prompt: list[int], penalties=None, **given):
        """Returns the beams of transformers. If there is a temperature, do_sample is set, and transformers'
        own default of top_k 50 is not used.
        """
        given = dict(do_sample=True, top_k=0) | given if "temperature" in given else given
        given |= dict(logits_processor=[penalty_on(len(prompt), *penalties)]) if penalties else {}
        return hf_beam_search(theirs, prompt, eos, **options, **given)

    for row, (name, (i, _, given)) in enumerate(SERVED.items()):
        sequences, scores = wanted(prompts[i], **given)
        ours = dataclasses.replace(found, sequences=[found.sequences[row]], scores=[found.scores[row]])
        assert_same(ours, [sequences], [scores])
        without, _ = wanted(prompts[i], **HOT if "temperature" in given else {})
        assert (sequences == without) == (name == "off"), f"{name} changes nothing"
