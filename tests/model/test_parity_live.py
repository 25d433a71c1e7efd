"""The comparison of test_golden.py with other weights, live, where torch and transformers are installed, and
tests that need them.
"""

import copy
import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.sampling import other_processors, processors, random_keys, sampler as sampling
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.context import init_context

torch = pytest.importorskip("torch", reason="the live comparison needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip(
    "transformers", reason="the live comparison needs transformers: pip install -e '.[parity]'"
)
pytestmark = [pytest.mark.full, pytest.mark.oldest]

TOLERANCE = 1e-4  # on logits of order 1 to 10
DOUBT = 1e-3  # where the two best logits are closer than this, the choice between them may differ

# Of families that test_golden.py does not generate.
GENERATED = (
    "mamba2-groups", "lfm2-published-tied",
    "nemotron-h-published", "bamba-published", "falcon-h1-published", "granite-hybrid-published",
    "glm4-moe-groups", "ministral3-published", "granite-bias-llama3-new",
    "glm4-published", "cohere2-published", "hunyuan-alpha-tied", "apertus-published", "minimax-m2-published",
    "ernie4-5-moe-published", "dots1-groups-windows-tied",
    "deepseek-v3-yarn-groups",
)  # fmt: skip

forward = jax.jit(xj.forward, static_argnames="config")


@pytest.fixture(scope="module", autouse=True)
def _few_threads_no_warnings():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads only slow such small models down
    yield
    torch.set_num_threads(threads)


def build(name: str, seed: int = 1000):
    """A case with weights that no golden file has seen: config, params and transformers' model."""
    case = cases.CASES[name]
    tensors = cases.random_tensors(case.config, seed + zlib.crc32(name.encode()) % 1000)
    return case.config, cases.params_from(case.config, tensors), cases.hf_model(case.hf, tensors)


def until_near_tie(answer: list[int], gaps: np.ndarray) -> list[int]:
    """The answer up to the first token where rounding may change the choice. Prints how many are left out."""
    doubtful = np.flatnonzero(gaps < DOUBT)
    if len(doubtful):
        print(
            f"{len(answer) - doubtful[0]} of {len(answer)} ids left out, from a gap of"
            f" {gaps[doubtful[0]]:.1e} on"
        )
        return answer[: doubtful[0]]
    return answer


def assert_same_start(ours: list[list[int]], expected: list[list[int]]) -> None:
    assert [o[: len(e)] for o, e in zip(ours, expected, strict=True)] == expected


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_logits_and_greedy_ids(name):
    """Every logit of every prompt, and the ids of `model.generate`, which uses its own cache."""
    config, params, model = build(name)
    prompts = cases.prompts(cases.CASES[name])
    rows = cases.CASES[name].continued_prompts
    answers = {i: until_near_tie(*cases.hf_greedy(model, prompts[i])) for i in rows}
    tokens_BT, num_tokens_B = cases.pad_prompts(
        [prompt + answers.get(i, []) for i, prompt in enumerate(prompts)]
    )
    logits_BTV = np.asarray(forward(params, config, tokens_BT, None, num_tokens_B)[0])
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(
            logits_BTV[i, : len(prompt)], cases.hf_logits(model, prompt), rtol=0, atol=TOLERANCE
        )
        answer = answers.get(i, [])
        assert logits_BTV[i, len(prompt) - 1 :][: len(answer)].argmax(-1).tolist() == answer
    out = xj.generate(
        params, config, [prompts[i] for i in rows], xj.GenerateOptions(max_tokens=cases.NEW_TOKENS)
    )
    assert_same_start(out.tokens, list(answers.values()))


def test_stops_at_the_same_eos():
    """Rows stop at once, and after the tokens that `min_tokens` asks for."""
    name = "qwen2-window-late-layers"
    config, params, model = build(name)
    prompts = cases.prompts(cases.CASES[name])
    eos = [cases.hf_greedy(model, prompt)[0][4 + 5 * i] for i, prompt in enumerate(prompts)]
    fewest = [0] * len(prompts) + [9] * len(prompts)
    settings = [xj.SamplingConfig(min_tokens=n) for n in fewest]
    options = xj.GenerateOptions(max_tokens=cases.NEW_TOKENS, sampling=settings, eos_token_ids=eos)
    out = xj.generate(params, config, prompts * 2, options)
    for i, (prompt, n) in enumerate(zip(prompts * 2, fewest, strict=True)):
        expected, gaps = cases.hf_greedy(model, prompt, eos_token_id=eos, min_new_tokens=n or None)
        wanted = until_near_tie(expected, gaps)
        wanted = wanted[:-1] if wanted[-1] in eos else wanted
        assert out.tokens[i][: len(wanted)] == wanted and len(wanted) > (3 if n else 0)
        if n == 0:
            assert expected[-1] in eos and out.tokens[i] == expected and out.finish_reason[i] == "stop"


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.FIRST.values())
def test_transformers_opens_what_is_saved(tmp_path, name):
    """Its logits stay, and next to its own checkpoint the names, dtypes and bits of all tensors."""
    config, params, model = build(name)
    prompt = cases.prompts(cases.CASES[name])[1]
    xj.save_model(params, config, tmp_path / "ours", max_shard_bytes=100_000)
    opened = type(model).from_pretrained(tmp_path / "ours", dtype="auto", attn_implementation="eager").eval()
    np.testing.assert_allclose(cases.hf_logits(opened, prompt), cases.hf_logits(model, prompt), atol=1e-5)
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, xj.params.params_from_tensors(config, theirs), params)
    tensors = xj.params.params_to_tensors(params, config)
    width_0 = {
        key for key in theirs if ".shared_expert" in key and not config.experts.shared_intermediate_size
    }
    assert tensors.keys() == theirs.keys() - width_0
    xj.save_model(params, config, tmp_path / "like", like=tmp_path / "theirs")
    copied = load_file(tmp_path / "like" / "model.safetensors")
    assert {key: x.dtype for key, x in copied.items()} == {key: x.dtype for key, x in theirs.items()}
    jax.tree.map(np.testing.assert_array_equal, copied, theirs)


@pytest.mark.parametrize("name", cases.CASES)
def test_configs_written_by_transformers_mean_the_same(name):
    """transformers reads every config.json and writes it with its current field names. The result must mean
    the same to us.
    """
    settings = copy.deepcopy(cases.CASES[name].hf)
    written = transformers.CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings).to_dict()
    rewritten = cases.Case(written).config
    ours = cases.CASES[name].config
    if ours.rope.rope_type in ("llama3", "yarn", "longrope"):
        assert rewritten.rope == ours.rope
    assert dataclasses.replace(rewritten, rope=ours.rope) == ours


@pytest.mark.parametrize(
    "name, stored",
    [("qwen2-gqa-tied-old", "float32"), ("qwen3-bias-mqa", "bfloat16"), ("llama-bias", "float16"),
     ("moe-some-layers-dense", "bfloat16"), ("gemma2-long-caps", "float16"), ("phi3-defaults", "float32")],
)  # fmt: skip
def test_loaded_model_equals_transformers(name, stored, tmp_path):
    """A checkpoint of save_pretrained, in one file or in shards, loads exactly, and is rounded as torch
    rounds.
    """
    config, _, model = build(name)
    model.to(getattr(torch, stored)).save_pretrained(
        tmp_path, max_shard_size="30KB" if stored == "float16" else "1GB"
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == (stored == "float16")
    for dtype in ("float32", "bfloat16"):
        loaded = xj.load_model(tmp_path, dtype=dtype)
        assert loaded.tokenizer is None and loaded.config == config
        tensors = {
            name: t.to(getattr(torch, dtype)).float().numpy() for name, t in model.state_dict().items()
        }
        same = jax.tree.map(
            lambda ours, theirs, dtype=dtype: (
                ours.dtype == dtype and np.array_equal(ours.astype(jnp.float32), theirs)
            ),
            loaded.params,
            cases.params_from(config, cases.split_tensors(config, tensors)),
        )
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_loaded_model_gives_the_same_logits(stored, tmp_path):
    """Stored in 16 bits, computed in float32 on both sides."""
    name = "llama3-old-tied"
    _, _, model = build(name)
    model.to(getattr(torch, stored)).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ours = xj.load_model(tmp_path, dtype="float32")
    prompt = cases.prompts(cases.CASES[name])[2]
    logits_BTV, _ = forward(ours.params, ours.config, np.array([prompt]))
    np.testing.assert_allclose(logits_BTV[0], cases.hf_logits(theirs, prompt), rtol=0, atol=TOLERANCE)


# --- sampling: candidates and their values ------------------------------------------------------------------

ROWS = 64
VOCAB = 257


def random_logits(seed: int) -> np.ndarray:
    """Rows from nearly uniform to nearly certain, some with many ties."""
    random = np.random.RandomState(seed)
    logits_BV = random.standard_normal((ROWS, VOCAB)) * np.exp(random.uniform(-2, 3, (ROWS, 1)))
    logits_BV[: ROWS // 4] = np.round(logits_BV[: ROWS // 4])
    return logits_BV.astype(np.float32)


def assert_same_candidates(ours, theirs) -> None:
    ours = np.asarray(ours)
    theirs = theirs.numpy()
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    finite = np.isfinite(ours)
    np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_top_k(seed):
    logits_BV = random_logits(seed)
    random = np.random.RandomState(seed)
    k_B = random.randint(1, VOCAB + 20, ROWS)
    k_B[::4] = random.randint(1, 6, len(k_B[::4]))
    ours = jax.jit(processors.top_k)(logits_BV, k_B)
    theirs = [
        transformers.TopKLogitsWarper(int(k))(None, torch.tensor(row[None]))
        for k, row in zip(k_B, logits_BV, strict=True)
    ]
    assert_same_candidates(ours, torch.cat(theirs))


@pytest.mark.parametrize("seed", range(2))
def test_top_p(seed):
    """The rows have no ties, because transformers keeps some of the tied tokens at random, and this library
    keeps all. No row ends within rounding of p.
    """
    logits_BV = random_logits(seed)[ROWS // 4 :]
    random = np.random.RandomState(seed)
    p_B = random.uniform(0.01, 1, len(logits_BV)).astype(np.float32)
    p_B[::4] = random.choice([0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0], len(p_B[::4]))
    ours = np.asarray(jax.jit(processors.top_p)(logits_BV, p_B))
    theirs = [
        transformers.TopPLogitsWarper(float(p))(None, torch.tensor(row[None]))
        for p, row in zip(p_B, logits_BV, strict=True)
    ]
    probs_BV = np.sort(np.exp(logits_BV - logits_BV.max(-1, keepdims=True), dtype=np.float64))[:, ::-1]
    edge_B = np.abs(np.cumsum(probs_BV / probs_BV.sum(-1, keepdims=True), -1) - p_B[:, None]).min(-1)
    clear_B = (edge_B > 1e-6) | (p_B == 1)
    print(f"{(~clear_B).sum()} of {len(p_B)} rows left out")
    assert clear_B.mean() > 0.9
    assert_same_candidates(ours[clear_B], torch.cat(theirs)[clear_B])


@pytest.mark.parametrize("seed", range(2))
def test_repetition_penalty_processor(seed):
    logits_BV = random_logits(seed)
    random = np.random.RandomState(seed)
    penalty_B = random.uniform(0.5, 2, ROWS)
    seen = [random.randint(0, VOCAB, random.randint(1, 80)) for _ in range(ROWS)]
    seen_BV = np.array([np.isin(np.arange(VOCAB), ids) for ids in seen])
    ours = jax.jit(processors.repetition_penalty)(logits_BV, penalty_B.astype(np.float32), seen_BV)
    theirs = [
        transformers.RepetitionPenaltyLogitsProcessor(float(penalty))(
            torch.tensor(ids[None]), torch.tensor(row[None])
        )
        for penalty, ids, row in zip(penalty_B, seen, logits_BV, strict=True)
    ]
    assert_same_candidates(ours, torch.cat(theirs))


def test_min_p_and_typical_p():
    logits_BV = random_logits(1)
    random = np.random.RandomState(1)
    for ours, theirs, least in (
        (processors.min_p, transformers.MinPLogitsWarper, 0.001),
        (processors.typical_p, transformers.TypicalLogitsWarper, 0.05),
    ):
        p_B = random.uniform(least, 0.9, ROWS).astype(np.float32)
        expected = [
            theirs(float(p))(None, torch.tensor(row[None])) for p, row in zip(p_B, logits_BV, strict=True)
        ]
        assert_same_candidates(jax.jit(ours)(logits_BV, p_B), torch.cat(expected))


def test_no_repeat_ngram_and_min_new_tokens():
    logits_BV = random_logits(2)
    random = np.random.RandomState(2)
    size_B = random.randint(1, 5, ROWS)
    length_B = random.randint(1, 80, ROWS)
    history_BS = random.randint(0, 12, (ROWS, 80))
    rows = list(zip(size_B.tolist(), length_B.tolist(), history_BS, logits_BV, strict=True))
    theirs = [
        transformers.NoRepeatNGramLogitsProcessor(n)(
            torch.tensor(ids[None, :length]), torch.tensor(row[None])
        )
        for n, length, ids, row in rows
    ]
    assert_same_candidates(
        jax.jit(other_processors.no_repeat_ngram)(logits_BV, size_B, history_BS, length_B), torch.cat(theirs)
    )
    words = [
        [[1], [2, 3], [3], [4, 5, 6], [11]],
        [[0, 1]],
        [[7]],
        [[i, j] for i in range(7) for j in range(9)],
    ]
    theirs = [
        transformers.NoBadWordsLogitsProcessor(words[i % 4], [3, 7])(
            torch.tensor(ids[None, :length]), torch.tensor(row[None])
        )
        for i, (_, length, ids, row) in enumerate(rows)
        if i % 4 != 2  # transformers rejects a list that becomes empty
    ]
    settings = [xj.SamplingConfig(bad_words_ids=words[i % 4]) for i in range(ROWS)]
    words_BWL = settings_per_row(settings, ROWS, logits_BV.shape[1]).bad_words_ids
    eos_BE = np.broadcast_to(np.array([3, 7, -1, -1]), (ROWS, 4))
    found = np.asarray(
        jax.jit(other_processors.bad_words)(logits_BV, words_BWL, history_BS, length_B, eos_BE)
    )
    kept = np.arange(ROWS) % 4 != 2
    assert_same_candidates(found[kept], torch.cat(theirs))
    np.testing.assert_array_equal(found[~kept], logits_BV[~kept])
    theirs = [
        transformers.MinNewTokensLengthLogitsProcessor(0, n, [3, 7], "cpu")(
            torch.tensor(ids[None, :2]), torch.tensor(row[None])
        )
        for n, _, ids, row in rows
    ]
    ours = jax.jit(other_processors.min_tokens)(logits_BV, size_B, np.full(ROWS, 2), np.array([3, 7, -1, -1]))
    assert_same_candidates(ours, torch.cat(theirs))


PROCESSORS = [  # settings of transformers, and ours
    (dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
    (dict(bad_words_ids=[[41], [76, 81]]), dict(bad_words_ids=[[41], [76, 81]])),
    (dict(suppress_tokens=[41, 76, 81]), dict(forbidden_token_ids=[41, 76, 81])),
    (dict(repetition_penalty=1.1), dict(repetition_penalty=1.1)),
    (
        dict(sequence_bias=[[[5], 2.5], [[9], -3.0]], repetition_penalty=1.3),
        dict(logit_bias={5: 2.5, 9: -3.0}, repetition_penalty=1.3),
    ),
]


def test_greedy_with_each_processor():
    """One in each row, of prompts of all lengths."""
    name = "qwen2-window-late-layers"
    config, params, model = build(name)
    rows = [
        (prompt, *settings)
        for prompt in cases.prompts(cases.CASES[name])
        for settings in [({}, {}), *PROCESSORS]
    ]
    settings = [xj.SamplingConfig(**ours) for _, _, ours in rows]
    options = xj.GenerateOptions(max_tokens=cases.NEW_TOKENS, sampling=settings, eos_token_ids=())
    out = xj.generate(params, config, [prompt for prompt, *_ in rows], options)
    for (prompt, theirs, _), got in zip(rows, out.tokens, strict=True):
        wanted = until_near_tie(*cases.hf_greedy(model, prompt, **theirs))
        assert got[: len(wanted)] == wanted and len(wanted) > 3
    several = len(PROCESSORS) + 1
    for i in range(1, several):
        assert out.tokens[i::several] != out.tokens[::several], f"{PROCESSORS[i - 1]} changed nothing"


@pytest.mark.parametrize(
    "temperature, top_k, top_p, penalty",
    [(0.7, 20, 0.8, 1.1), (1.5, 0, 0.6, 0.8)],
)
def test_draws_follow_the_distribution_of_transformers(temperature, top_k, top_p, penalty):
    """All processors in the order of transformers: which tokens are drawn, and how often."""
    _, _, model = build("qwen2-mqa-untied-new")
    random = np.random.RandomState(3)
    draws = 1 << 15
    logits_V = (2 * random.standard_normal(cases.VOCAB)).astype(np.float32)
    prompt = random.randint(0, cases.VOCAB, 30)
    settings = dict(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty
    )
    processors = model._get_logits_processor(
        transformers.GenerationConfig(**settings), input_ids_seq_length=len(prompt)
    )
    probs_V = (
        processors(torch.tensor(prompt[None]), torch.tensor(logits_V[None]).clone())
        .softmax(-1)[0]
        .double()
        .numpy()
    )
    del settings["do_sample"]
    rows = settings_per_row(xj.SamplingConfig(**settings), draws, cases.VOCAB)
    ends = np.full((draws, 1), -1)
    seen = np.broadcast_to(np.isin(np.arange(cases.VOCAB), prompt), (draws, cases.VOCAB))
    tokens, *_ = jax.jit(sampling.sample_tokens)(
        jnp.broadcast_to(logits_V, (draws, cases.VOCAB)),
        random_keys.row_keys(jax.random.key(5), draws),
        rows,
        init_context(rows, np.full(draws, len(prompt), np.int32), ends, seen),
    )
    counts_V = np.bincount(tokens, minlength=cases.VOCAB)
    assert not counts_V[probs_V == 0].any()
    deviation_V = np.abs(counts_V - draws * probs_V) / np.sqrt(np.maximum(draws * probs_V * (1 - probs_V), 1))
    assert deviation_V.max() < 5
