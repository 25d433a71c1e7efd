"""`scripts/train_head.py`: a few steps lower the loss, the file has the published names, and the bundled head
drafts the answers.
"""

import json
import re

import jax.numpy as jnp
import pytest
import run_script
from safetensors.numpy import load_file

import xinfer_jax as xj

pytestmark = [pytest.mark.oldest, pytest.mark.full]
pytest.importorskip("optax", reason="the extra `train` is not installed")

SHAPES = {
    "mtp.fc.weight": (128, 256),
    "mtp.norm.weight": (128,),
    "mtp.pre_fc_norm_embedding.weight": (128,),
    "mtp.pre_fc_norm_hidden.weight": (128,),
    "mtp.layers.0.input_layernorm.weight": (128,),
    "mtp.layers.0.post_attention_layernorm.weight": (128,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 128),
    "mtp.layers.0.self_attn.q_proj.bias": (128,),
    "mtp.layers.0.self_attn.k_proj.weight": (64, 128),
    "mtp.layers.0.self_attn.k_proj.bias": (64,),
    "mtp.layers.0.self_attn.v_proj.weight": (64, 128),
    "mtp.layers.0.self_attn.v_proj.bias": (64,),
    "mtp.layers.0.self_attn.o_proj.weight": (128, 128),
    "mtp.layers.0.mlp.gate_proj.weight": (384, 128),
    "mtp.layers.0.mlp.up_proj.weight": (384, 128),
    "mtp.layers.0.mlp.down_proj.weight": (128, 384),
}


def test_a_short_training_writes_a_head(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    settings = dict(seed=1, prompts=8, steps=3, batch=2, measured=2, draft_tokens=2, learning_rate=0.01)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    done = run_script.run("train_head", f"--output={tmp_path}", "--log_every=1", *flags)
    assert not done.returncode, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+  losses (\S+)", done.stdout, re.M)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(re.findall(r"^[01]\.\d{3} [01]\.\d{3} accepted of 2 prompts: \S", done.stdout, re.M)) == 5
    tensors = load_file(tmp_path / "mtp.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "mtp.safetensors"}
    assert json.loads((tmp_path / "config.json").read_text()) == dict(
        model_type="qwen2", mtp_num_hidden_layers=1
    )


@pytest.mark.soak
def test_the_bundled_head_drafts_the_answers():
    program = run_script.functions("train_head")
    model = xj.load_model(dtype=jnp.float32, draft_head=True)
    (head, random) = program.new_head(model, seed=0)
    own = model.params["draft_head"]
    groups = program.head_data.measured_prompts(model.tokenizer, most=12)
    answers = program.head_data.answers(model, sum(groups.values(), []))
    (trained, untrained) = (program.accepted(model, head, params, answers, 3) for params in (own, random))
    assert trained.exists_NC.sum() > 1000
    assert trained.accepted_NC.sum() > 0.97 * trained.exists_NC.sum()
    assert untrained.accepted_NC.sum() < 0.1 * untrained.exists_NC.sum()
