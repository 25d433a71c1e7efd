"""The families and features that test_family_features.py checks, and that the table of families in
`.docs/pages/models.md` lists. Each check raises an AssertionError.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import scaled_checkpoints as files
from family_checks import CACHED
from random_adapters import random_adapter
from random_matrices import write_checkpoint

import xinfer_jax as xj
from xinfer_jax.compress import awq
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.mixers.latent_attention import LatentAttentionSpec
from xinfer_jax.weights.params import tree_bytes

# Of each family the first case that generates after all of its prompts.
FAMILIES = {
    case.hf["model_type"]: case
    for case in reversed(cases.CASES.values())
    if len(case.continued_prompts) == len(case.lengths)
}
forward = jax.jit(xj.forward, static_argnums=1)


def _logits(params: Any, config: xj.ModelConfig, prompts: list[list[int]]) -> np.ndarray:
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    logits_BTV = np.asarray(forward(params, config, tokens_BT, None, num_tokens_B)[0])
    return np.concatenate([row[:n] for row, n in zip(logits_BTV, num_tokens_B, strict=True)])


def check_quantized(family: str, folder: Path) -> None:
    """int8 and int4: leaves in fewer bytes, and the logits of the same numbers as floats."""
    case = FAMILIES[family]
    path = write_checkpoint(folder, case.hf, fused=True)
    whole = xj.load_model(path, "float32")
    for quantize in ("int8", "int4"):
        model = xj.load_model(path, "float32", quantize)
        assert tree_bytes(model.params) < 0.7 * tree_bytes(whole.params)
        numbers = xj.params.dequantize(model.params)
        prompts = cases.prompts(case)[:2]
        found, wanted = (_logits(params, model.config, prompts) for params in (model.params, numbers))
        np.testing.assert_allclose(found, wanted, atol=2e-4)


def check_own_files(family: str, folder: Path) -> None:
    """A model in int8 is saved in the library's own format, and loads with the same leaves."""
    path = write_checkpoint(folder / "a", FAMILIES[family].hf, fused=True)
    model = xj.load_model(path, "float32", "int8")
    xj.save_model(model.params, model.config, folder / "b")
    again = xj.load_model(folder / "b")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def check_fp8_files(family: str, folder: Path) -> None:
    """Matrices of a file in FP8 become the floats that they stand for."""
    hf = FAMILIES[family].hf
    path, equal = files.checkpoint(folder / "a", hf, files.fp8_settings([10, 14]), files.fp8((10, 14)))
    found, wanted = xj.load_model(path, "float32"), files.equal_model(folder / "b", hf, equal)
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


def check_adapters(family: str, folder: Path) -> None:
    """Adapters of all default targets: added to the matrices they give the logits that they give beside
    them; rows of one call have different ones; and they are saved and loaded.
    """
    params, config, prompts = family_checks.small_model(FAMILIES[family])
    adapters = [random_adapter(config, seed, 3) for seed in (1, 2)]
    wanted = [_logits(xj.lora.merge_adapter(params, x), config, prompts[:1]) for x in adapters]
    for adapter, want in zip(adapters, wanted, strict=True):
        found = _logits(xj.lora.with_adapter(params, adapter), config, prompts[:1])
        np.testing.assert_allclose(found, want, atol=2e-4)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.01
    together = xj.lora.with_adapters(params, adapters, jnp.array([1, 0]))
    found = _logits(together, config, [prompts[0]] * 2)
    np.testing.assert_allclose(found, np.concatenate(wanted[::-1]), atol=2e-4)
    xj.lora.save_adapter(adapters[0], config, folder / "adapter")
    loaded = xj.lora.load_adapter(config, folder / "adapter")
    found = _logits(xj.lora.merge_adapter(params, loaded), config, prompts[:1])
    np.testing.assert_allclose(found, wanted[0], atol=2e-4)


def check_scales(family: str, folder: Path) -> None:
    """Scales of inputs of matrices, which activation-aware rounding folds in, keep the logits."""
    params, config, prompts = family_checks.small_model(FAMILIES[family])
    scaled = awq.scaled_params(params, config, prompts, "int4", 16)
    before, after = (_logits(tree, config, prompts[:2]) for tree in (params, scaled))
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-4 * np.abs(before).max())
    downs = [
        (a["down"]["weight"], b["down"]["weight"])
        for a, b in zip(params["layers"], scaled["layers"], strict=True)
    ]
    assert not all(np.array_equal(a, b) for a, b in downs)


def check_engine(family: str, folder: Path) -> None:
    model = family_checks.small_model(FAMILIES[family])
    is_latent = LatentAttentionSpec.kind in {mixer.kind for mixer in model[1].mixer_specs}
    family_checks.check_engine_bits(model, "float32" if is_latent else "int8")


def check_drafts(family: str, folder: Path) -> None:
    """With draft tokens from the text: the greedy tokens, which are those of a forward pass without cache."""
    family_checks.check_tokens(family_checks.small_model(FAMILIES[family]))


def check_draft_model(family: str, folder: Path) -> None:
    """A model as the draft model of itself: its own tokens, and most draft tokens are accepted."""
    params, config, prompts = family_checks.small_model(FAMILIES[family])
    drafted = dataclasses.replace(CACHED, draft=xj.Model(params, config), draft_tokens=2)
    out = xj.generate(params, config, prompts[:2], drafted)
    assert out.tokens == xj.generate(params, config, prompts[:2], CACHED).tokens
    assert min(out.stats.acceptance) > 0.5


# By feature its check.
CHECKS: dict[str, Callable[[str, Path], None]] = dict(
    quantized=check_quantized,
    own_files=check_own_files,
    fp8_files=check_fp8_files,
    scales=check_scales,
    adapters=check_adapters,
    engine=check_engine,
    drafts=check_drafts,
    draft_model=check_draft_model,
)


# Features that the library excludes for some models, by their names in `check_supported`.
EXCLUDABLE = dict(own_files="leaf formats", draft_model="draft model", scales="scales")


def is_supported(feature: str, family: str) -> bool:
    """Returns False if a call with the models of this family raises `InputError`."""
    if feature not in EXCLUDABLE:
        return True
    try:
        check_supported(FAMILIES[family].config, EXCLUDABLE[feature], "it is", "leave it out")
    except xj.InputError:
        return False
    return True
