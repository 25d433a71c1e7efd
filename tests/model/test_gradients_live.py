"""Gradients of the mean score against torch, where torch and transformers are installed. `--soak` has
all families, by all ways to compute them (test_training.py and test_routes.py have those of some families);
`-s` prints the largest deviations.
"""

import jax
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except

import xinfer_jax as xj

torch = pytest.importorskip("torch", reason="the comparison needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip(
    "transformers", reason="the comparison needs transformers: pip install -e '.[parity]'"
)
pytestmark = pytest.mark.oldest

BOUND = 1e-4
LENGTHS = (23, 11)
COUNT = sum(LENGTHS) - len(LENGTHS)  # of the scores of a mean
# All others are made of the parts of these.
FAMILIES = (
    "qwen2-gqa-tied-old", "moe-some-layers-dense", "gemma2-long-caps", "gemma4-experts", "gemma4-shared-kv",
    "gpt-oss-published", "phi3-defaults", "bitnet-defaults", "qwen3-next-sparse-step", "glm4-moe-groups",
    "lfm2-bias-untied-layer-types", "deepseek-v3-yarn-groups", "mamba2-groups",
)  # fmt: skip
LAST = {case.hf["model_type"]: name for name, case in cases.CASES.items()}
OTHERS = sorted({*LAST.values()} - {*FAMILIES})
FEWER_LAYERS = {  # of each kind one
    "moe-some-layers-dense": dict(num_hidden_layers=2),
    "gemma2-long-caps": dict(num_hidden_layers=2),
    "gemma4-shared-kv": dict(num_hidden_layers=2, layer_types=["full_attention"] * 2, num_kv_shared_layers=1),
    "qwen3-next-sparse-step": dict(num_hidden_layers=2, full_attention_interval=2, mlp_only_layers=[]),
    "glm4-moe-groups": dict(num_hidden_layers=2),
    "deepseek-v3-yarn-groups": dict(num_hidden_layers=2),
}


def texts(config):
    draws = np.random.default_rng(1)
    return [draws.integers(3, config.vocab_size, n).tolist() for n in LENGTHS]


def torch_gradient(case, config, tensors):
    """The tree of gradients, those of buffers too."""
    model = cases.hf_model(case.hf, tensors)
    leaves = {name: x for name, x in model.state_dict(keep_vars=True).items() if x.is_floating_point()}
    for leaf in leaves.values():
        leaf.requires_grad_(True)
    total = 0
    for ids in texts(config):
        logits_TV = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        total = total + torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(ids)[1:, None]).sum()
    (total / COUNT).backward()
    slopes = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    slopes = {name: x.numpy() for name, x in slopes.items()}
    return cases.params_from(config, cases.split_tensors(config, slopes))


def deviation(got, want):
    """The largest difference over a leaf's largest entry, and the leaf. Sums that cancel are compared with
    all leaves: what is 0 but for rounding (a bias of keys), and numbers alone (a layer's scalar: in float32
    torch is farther from its own float64 than we are).
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = jax.tree_util.tree_leaves_with_path(want)
    largest = max(float(np.abs(y).max()) for _, y in leaves)

    def off(x, y):
        scale = float(np.abs(y).max())
        scale = max(scale, 0.1 * largest) if y.size == 1 else scale if scale > 1e-6 * largest else largest
        return float(np.abs(np.asarray(x) - np.asarray(y)).max()) / scale

    return max(
        (off(x, y), jax.tree_util.keystr(path))
        for x, (path, y) in zip(jax.tree.leaves(got), leaves, strict=True)
    )


@pytest.mark.parametrize("name", full_except(FAMILIES[:1], [*FAMILIES, *OTHERS], soak=OTHERS))
def test_gradients_are_those_of_torch(name, request):
    transformers.logging.set_verbosity_error()
    case = cases.Case(cases.CASES[name].hf | FEWER_LAYERS.get(name, {}))
    config = case.config
    tensors = cases.random_tensors(config, 11)
    params = cases.params_from(config, tensors)
    rows = texts(config)
    batch = cases.pad_prompts(rows)

    def gradient(params, *batch, **how):
        return jax.jit(
            jax.grad(lambda params: xj.score(params, config, *batch, **how).logprobs_BT.sum() / COUNT)
        )(params)

    plain = gradient(params, *batch)
    found = {"torch": deviation(plain, torch_gradient(case, config, tensors))}
    if request.config.getoption("soak"):
        stacked = params if config.shares_kv else xj.params.stack_layers(params, config)
        again = gradient(stacked, *batch, remat="layer")
        found["remat, stacked"] = deviation(
            again if config.shares_kv else xj.params.unstack_layers(again), plain
        )
        # Texts of other models are not packed: their RoPE depends on the length of a row.
        if not any(rope.rope_type in ("dynamic", "longrope") for rope in config.ropes):
            how = dict(segment_ids_BT=np.repeat(np.arange(2), LENGTHS)[None])
            if config.experts:
                routed_experts = xj.score(params, config, *batch, return_routed_experts=True).routed_experts
                how["routed_experts"] = np.concatenate(
                    [x[:n] for x, n in zip(routed_experts, LENGTHS, strict=True)]
                )[None]
            packed = gradient(params, np.array([sum(rows, [])], np.int32), **how)
            found["packed, routes" if config.experts else "packed"] = deviation(packed, plain)
    print(name, {way: f"{off:.1e} {leaf}" for way, (off, leaf) in found.items()})
    assert all(off <= BOUND for off, _ in found.values()), found
