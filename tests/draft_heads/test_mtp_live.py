"""Drafts of heads for multi-token prediction against transformers' `MtpModel`, where torch and transformers
are installed. The files are written by `save_model`, and transformers reads all tensors of the head.
"""

import dataclasses

import jax
import jax.numpy as jnp
import mtp_cases
import numpy as np
import pytest
from mtp_cases import DRAFTS, ROWS
from quick import full_except

import xinfer_jax as xj

torch = pytest.importorskip("torch", reason="the live comparison needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip(
    "transformers", reason="the live comparison needs transformers: pip install -e '.[parity]'"
)
modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("the live comparison needs transformers with MtpModel", allow_module_level=True)
pytestmark = [pytest.mark.full, pytest.mark.oldest]

TOLERANCE = 1e-4  # on logits of order 1 to 10
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_next")


@pytest.fixture(scope="module", autouse=True)
def _few_threads_no_warnings():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(
    scope="module", params=full_except((), FAMILIES, soak=("glm4_moe", "qwen3_5_moe", "qwen3_next"))
)
def saved(request, tmp_path_factory):
    """A model, and transformers' model and head of its files."""
    model = mtp_cases.build(request.param)
    path = tmp_path_factory.mktemp("mtp") / request.param
    xj.save_model(model.params, model.config, path)
    loaded = xj.load_model(path, "float32", draft_head=True)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    other.config.num_mtp_layers = 1
    if model.config.norm_offset is None:
        other._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # on the class it has no effect
        other.config.mtp_mlp_layer_types = ["sparse"]
    else:
        other.config.mtp_layer_types = ["full_attention"]
    return loaded, other, modeling_layers.MtpModel.from_pretrained(other).eval()


def reference(other, head, ids):
    """The logits of the drafts after a prompt, without a cache: each step runs all tokens again. Token p + 1
    comes with the state of token p, and the states of drafts are of the head, after its norm.
    """
    with torch.no_grad():
        out = other.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        # Normed: the state of the last layer alone is not.
        torch.testing.assert_close(out.hidden_states[-1], out.last_hidden_state)
        states = out.last_hidden_state[:, :-1]
        ids = torch.tensor([ids[1:]])
        logits = []
        for _ in range(DRAFTS):
            positions = torch.arange(1, ids.shape[1] + 1)[None]
            own = head.forward_layer(0, states, positions, None, input_ids=ids)[:, -1:]
            logits.append(head._project_to_logits(own)[0, 0])
            states = torch.cat([states, own], 1)
            ids = torch.cat([ids, logits[-1].argmax()[None, None]], 1)
    return torch.stack(logits).numpy()


def furthest(logits_BTV, other_BTV):
    return float(np.abs(np.asarray(logits_BTV) - other_BTV).max())


def test_drafts_are_those_of_transformers(saved):
    model, *others = saved
    want_BTV = np.stack([reference(*others, ids) for ids in ROWS])
    found = mtp_cases.draft(model, mtp_cases.read_prompts(model))
    print(f"logits to {np.abs(want_BTV).max():.1f}, difference {furthest(found.logits_BTV, want_BTV):.1e}")
    assert furthest(found.logits_BTV, want_BTV) < TOLERANCE
    np.testing.assert_array_equal(found.tokens_BT, want_BTV.argmax(-1))
    for wrong in wrong_drafts(model):
        assert furthest(wrong.logits_BTV[:, 0], want_BTV[:, 0]) > 100 * TOLERANCE


def wrong_drafts(model):
    """Drafts with one error each, which no test of generated tokens shows."""
    unread = mtp_cases.read_prompts(model)
    norm = model.params["final_norm"] + (model.config.norm_offset or 0)
    yield mtp_cases.draft(model, unread._replace(features_BTX=unread.features_BTX / norm))  # not normed
    head = model.params["draft_head"]
    swapped = {"weight": jnp.roll(head["proj"]["weight"], model.config.hidden_size, 1)}  # hidden state first
    params = model.params | dict(draft_head=head | dict(proj=swapped))
    yield mtp_cases.draft(dataclasses.replace(model, params=params), unread)
    if model.config.norm_offset is not None:  # norms of the head multiply by w in place of 1 + w
        less = {name: x - 1 if name.endswith("norm") else x for name, x in head.items()}
        less |= dict(layers=(jax.tree_util.tree_map_with_path(without_one, head["layers"][0]),))
        params = model.params | dict(draft_head=less)
        yield mtp_cases.draft(dataclasses.replace(model, params=params), unread)


def without_one(path, leaf):
    return leaf - 1 if path[-1].key.endswith("norm") else leaf
