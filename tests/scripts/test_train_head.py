"""`scripts/train_head.py`: a few steps lower the loss, and the file has the published names."""

import re

import pytest
import run_script
from safetensors.numpy import load_file

pytestmark = pytest.mark.oldest
pytest.importorskip("optax", reason="the extra `train` is not installed")

NAMES = {
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
    settings = dict(prompts=8, steps=3, batch=2, measured=2, draft_tokens=2, learning_rate=0.01, log_every=1)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    done = run_script.run("train_head", f"--output={tmp_path}", *flags)
    assert done.returncode is None or done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+  losses (\S+)", done.stdout, re.M)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(re.findall(r"^[01]\.\d{3} [01]\.\d{3} accepted", done.stdout, re.M)) == 5
    tensors = load_file(tmp_path / "mtp.safetensors")
    assert {name: x.shape for name, x in tensors.items()} == NAMES
    assert [path.name for path in tmp_path.iterdir()] == ["mtp.safetensors"]
