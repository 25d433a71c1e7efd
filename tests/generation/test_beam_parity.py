"""Beam search against transformers: sequences and scores, stopping rules, processors."""

import dataclasses
import itertools

import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.generation import beam_steps

pytestmark = [pytest.mark.full, pytest.mark.oldest]

EOS = tuple(range(2, 60, 5))  # many, so that sequences end early


def assert_same(ours: xj.BeamOutput, sequences, scores) -> None:
    assert ours.sequences == sequences
    np.testing.assert_allclose(ours.scores, scores, rtol=0, atol=1e-4)


def hf_beam_search(
    model, ids: list[int], eos: tuple[int, ...], **options
) -> tuple[list[list[int]], np.ndarray]:
    """Sequences without EOS, and scores, of one prompt."""
    import torch

    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        eos_token_id=list(eos) or None,
        output_scores=True, return_dict_in_generate=True, **dict(do_sample=False) | options,
    )  # fmt: skip
    rows = [
        list(itertools.takewhile(lambda token: token not in eos, row))
        for row in out.sequences[:, len(ids) :].tolist()
    ]
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
        options = dict(num_beams=4, num_return_sequences=3, max_new_tokens=14)
        options |= dict(early_stopping=early_stopping, length_penalty=length_penalty)
        ours = xj.beam_search(params, config, prompts, eos_token_ids=eos, **options)
        for prompt, sequences, scores in zip(prompts, ours.sequences, ours.scores, strict=True):
            one = dataclasses.replace(ours, sequences=sequences, scores=scores)
            assert_same(one, *hf_beam_search(theirs, prompt, eos, **options))
            early_ends += sum(len(s) < 14 for s in sequences)
        if eos:
            found.setdefault(early_stopping, []).append(ours.sequences)
    assert early_ends > 10
    assert len({str(sequences) for sequences in found.values()}) == rules


def penalty_on(start: int, presence: float, frequency: float):
    """The two penalties that transformers lacks, as a processor for it; `start`: where the answer begins."""
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
    "min_new_tokens": (0, dict(min_new_tokens=9), dict(min_new_tokens=9)),
    "all of them": (
        2,
        dict(
            logit_bias={9: 2.0}, forbidden_token_ids=(5, 6), repetition_penalty=1.2, presence_penalty=0.3,
            frequency_penalty=0.4,
            no_repeat_ngram_size=2, min_new_tokens=3,
        ),
        dict(
            sequence_bias={(9,): 2.0}, suppress_tokens=[5, 6], repetition_penalty=1.2, penalties=(0.3, 0.4),
            no_repeat_ngram_size=2,
            min_new_tokens=3,
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
    options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=12)
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
        """With do_sample where there is a temperature, and then without transformers' own default of top_k
        50.
        """
        given = dict(do_sample=True, top_k=0) | given if "temperature" in given else given
        given |= dict(logits_processor=[penalty_on(len(prompt), *penalties)]) if penalties else {}
        return hf_beam_search(theirs, prompt, eos, **options, **given)

    for row, (name, (i, _, given)) in enumerate(SERVED.items()):
        sequences, scores = wanted(prompts[i], **given)
        ours = dataclasses.replace(found, sequences=found.sequences[row], scores=found.scores[row])
        assert_same(ours, sequences, scores)
        without, _ = wanted(prompts[i], **HOT if "temperature" in given else {})
        assert (sequences == without) == (name == "off"), f"{name} changes nothing"
