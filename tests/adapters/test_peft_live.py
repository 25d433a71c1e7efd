"""Adapters that peft writes, in many forms of its settings, next to its model, and ours, opened by peft.

Gradients are compared for a form of each kind of matrix; `--soak` compares those of all forms.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except

import xinfer_jax as xj

torch = pytest.importorskip("torch", reason="the live comparison needs torch: pip install -e '.[parity]'")
peft = pytest.importorskip("peft", reason="adapters are compared with peft: pip install -e '.[train]'")
pytestmark = [pytest.mark.full, pytest.mark.oldest]

forward = jax.jit(xj.forward, static_argnums=1)
FORMS = {
    "all-linear": ("llama-mlp-bias-head-dim", dict(target_modules="all-linear", r=3, use_rslora=True)),
    "patterns": (
        "qwen3-head-dim-tied",
        dict(
            target_modules=["q_proj", "o_proj", "up_proj"], r=4, exclude_modules=r".*\.1\.self_attn\.q_proj",
            rank_pattern={"o_proj": 6, r"layers\.0\.mlp\.up_proj": 2}, alpha_pattern={"up_proj": 32},
            init_lora_weights="gaussian",
        ),
    ),
    "layers": (
        "mistral-window",
        dict(target_modules=["k_proj", "gate_proj"], layers_to_transform=[1], layers_pattern="layers"),
    ),
    "fused": ("phi3-defaults", dict(target_modules=["qkv_proj", "gate_up_proj", "o_proj"], r=5)),
    "hybrid": (
        "qwen3-next-sparse-step",
        dict(target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"], r=4),
    ),
    "hybrid apart": ("qwen3-5-tied", dict(target_modules="all-linear", r=4, lora_alpha=3)),
    "latent attention": (
        "deepseek-v3-yarn-groups",
        dict(target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], r=3),
    ),
    "short convolutions": ("lfm2-published-tied", dict(target_modules="all-linear", r=3, lora_alpha=5)),
    # peft rejects out_proj of models that it knows as Mamba.
    "mamba2": ("mamba2-groups", dict(target_modules=["in_proj"], r=3)),
    "nemotron": (
        "nemotron-h-published",
        dict(target_modules=["in_proj", "q_proj", "o_proj", "up_proj", "down_proj", "fc1_latent_proj"], r=3),
    ),
    "falcon_h1": (
        "falcon-h1-norm-after-gate-bias",
        dict(target_modules=["in_proj", "q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"], r=3),
    ),
    "granite 4": ("granite-hybrid-published", dict(target_modules="all-linear", r=3)),
    "head": ("gemma2-long-caps", dict(target_modules=["lm_head", "embed_tokens", "v_proj"], r=3)),
    "embeddings": (
        "gemma4-shared-kv",
        dict(target_modules=["embed_tokens_per_layer", "per_layer_model_projection", "embed_tokens"]),
    ),
    "experts and routers": ("qwen3-next-sparse-step", dict(target_modules="all-linear", r=2)),
    "mixtral": (
        "mixtral-old",
        dict(target_modules=["w1", "w2", "w3"], target_parameters=["gate.weight"], r=2, use_rslora=True),
    ),
    "experts of gpt_oss": (
        "gpt-oss-published",
        dict(target_modules=[], target_parameters=["down_proj", "mlp.experts.gate_up_proj"]),
    ),
    "norms": ("qwen3-head-dim-tied", dict(target_modules=["q_proj"], r=2, modules_to_save=["norm"])),
    "norms of one kind": (
        "gemma2-long-caps",
        dict(target_modules=["q_proj"], modules_to_save=["model.norm", "1.input_layernorm"]),
    ),
    "tied": (
        "qwen2-gqa-tied-old",
        dict(target_modules=["embed_tokens", "o_proj"], r=3, ensure_weight_tying=True),
    ),
}  # fmt: skip

# Plain, fused, apart, experts, embeddings and heads, norms, and matrices that share a pair.
GRADIENTS = (
    "patterns", "fused", "latent attention", "hybrid apart", "embeddings", "mixtral", "experts of gpt_oss",
    "norms of one kind", "tied",
)  # fmt: skip


def adapted(name, settings):
    """peft's model with random matrices, and ours without: config, params, model."""
    case = cases.CASES[name]
    tensors = cases.random_tensors(case.config, zlib.crc32(name.encode()) % 1000)
    model = peft.get_peft_model(
        cases.hf_model(case.hf, tensors), peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                is_norm = parameter.ndim == 1
                parameter.copy_(is_norm * parameter + 0.1 * torch.randn(parameter.shape, generator=generator))
    return case.config, cases.params_from(case.config, tensors), model.eval()


AGAIN = (
    "layers", "hybrid apart", "head", "mixtral", "norms of one kind", "mamba2", "falcon_h1", "granite 4",
)  # fmt: skip


@pytest.mark.parametrize("form", full_except((), FORMS, soak=AGAIN))
def test_logits_and_gradients_are_those_of_peft(tmp_path, form, request):
    config, params, model = adapted(*FORMS[form])
    model.save_pretrained(tmp_path / "theirs")
    adapter = xj.lora.load_adapter(config, tmp_path / "theirs")
    ids = cases.prompts(cases.CASES[FORMS[form][0]])[1]
    wanted = wanted_logits = cases.hf_logits(model.get_base_model(), ids)
    for tree in (xj.lora.with_adapter(params, adapter), xj.lora.merge_adapter(params, adapter)):
        found = np.asarray(forward(tree, config, jnp.array([ids]))[0][0])
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(np.asarray(forward(params, config, jnp.array([ids]))[0][0]) - wanted).max() > 0.01

    if form in GRADIENTS or request.config.getoption("soak"):
        compare_gradients(tmp_path, form, config, params, model, adapter, ids)

    xj.lora.save_adapter(adapter, config, tmp_path / "ours")
    for module in model.modules():  # unload would leave the new norms
        if hasattr(module, "original_module"):
            module.modules_to_save["default"] = module.original_module
    again = peft.PeftModel.from_pretrained(model.unload(), tmp_path / "ours")
    again = cases.hf_logits(again.eval().get_base_model(), ids)
    np.testing.assert_allclose(again, wanted_logits, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, xj.lora.load_adapter(config, tmp_path / "ours"), adapter)


def compare_gradients(tmp_path, form, config, params, model, adapter, ids):
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), -1)
    logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum().backward()

    def score(adapter):
        return xj.score(xj.lora.with_adapter(params, adapter), config, jnp.array([ids])).logprobs_BT.sum()

    gradients = jax.jit(jax.grad(score))(adapter)
    with torch.no_grad():
        trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
        if form == "tied":  # two names of one pair, each with its share
            (embedding, head) = (
                [x for name, x in trained.items() if part in name] for part in ("embed", "head")
            )
            for x, y in zip(embedding, head[::-1], strict=True):
                x.grad += y.grad.T
                y.grad = x.grad.T
        for parameter in trained.values():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    theirs = xj.lora.load_adapter(config, tmp_path / "gradients")
    shared: dict = {}  # several matrices may have a share of the gradient of one `a`
    for path, (a, b) in theirs.matrices.items():
        ours = gradients.matrices[path]
        shared.setdefault(np.asarray(a).tobytes(), [(a, 0)]).append((0, ours.a))
        shared[np.asarray(b).tobytes()] = [(b, ours.b)]
    shared |= {path: [(x, gradients.norms[path])] for path, x in theirs.norms.items()}
    for pairs in shared.values():
        (wanted, ours) = map(sum, zip(*pairs, strict=True))
        assert not wanted.size or np.abs(ours - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("form", ["fused", "hybrid"])
def test_own_a_of_matrices_that_peft_has_in_one_module(tmp_path, form):
    case = cases.CASES[FORMS[form][0]]
    (config, tensors) = (case.config, cases.random_tensors(case.config, 5))
    params = cases.params_from(config, tensors)
    # peft takes a shared expert's matrices for those of all experts.
    targets = [name for name in "qkvzab" if form == "hybrid" or name in "qkv"] + ["o"]
    adapter = xj.lora.init_adapter(config, jax.random.key(0), 3, targets, alpha=6)
    adapter = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), adapter)
    xj.lora.save_adapter(adapter, config, tmp_path / "ours")
    ids = cases.prompts(cases.CASES[FORMS[form][0]])[1]
    opened = peft.PeftModel.from_pretrained(cases.hf_model(case.hf, tensors), tmp_path / "ours").eval()
    wanted = np.asarray(forward(xj.lora.with_adapter(params, adapter), config, jnp.array([ids]))[0][0])
    np.testing.assert_allclose(cases.hf_logits(opened.get_base_model(), ids), wanted, atol=1e-4)
