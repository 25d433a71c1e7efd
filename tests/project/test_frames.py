"""How deep a reader must follow: frames of this library from `generate` to a matrix product."""

import json
import os
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from paths import ROOT
from small_models import QWEN

import xinfer_jax as xj

MOST = 18

PROGRAM = """
import json, os, pickle, sys
import closure, core_alone

sys.meta_path.insert(0, core_alone.Blocker())
import xinfer_jax as xj

with open(sys.argv[1], "rb") as file:
    config, params = pickle.load(file)
library = os.path.dirname(xj.__file__) + os.sep
found = set()


def profile(frame, event, argument):
    if event != "call" or frame.f_code.co_name != "dot" or "product" not in frame.f_code.co_filename:
        return
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(library):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    if "Plain.step" in names:
        found.add(tuple(reversed(names)))


sys.setprofile(profile)
options = xj.GenerateOptions(3, eos_token_ids=(1,), impl="xla")
xj.generate(params, config, [[3, 4, 5]], options)
sys.setprofile(None)
print(json.dumps(sorted(found)))
"""


@pytest.mark.full
@pytest.mark.oldest
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="list comprehensions are no frames from 3.12 on")
def test_frames_from_generate_to_a_product(tmp_path):
    """In a decode step of the core alone, with everything else blocked."""
    config = xj.from_hf(QWEN | dict(model_type="llama", num_hidden_layers=1))
    params = xj.init_params(config, jax.random.key(0), "float32")
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((config, jax.tree.map(np.asarray, params))))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    chains = json.loads(done.stdout)
    assert len(chains) >= 4  # of attention, MLP and head
    for chain in chains:
        assert len(chain) <= MOST, "\n".join(chain)
