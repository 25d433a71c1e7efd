"""The core, which a reader of `decode_loop` and `generate` needs, is bounded and knows no platform. A reader
follows few frames of this library from `generate` to a matrix product.

The bounds are the measured lines of code, without docstrings and comments, so that an explanation costs
nothing. They include the parts of `forward` for training, and the mixer, the feed-forwards and the router of
a float model, which the core finds in the registries. `old_names`, with some hundred lines, goes in version
0.3.
`python tests/support/closure.py` prints the modules.
"""

import json
import os
import pickle
import subprocess
import sys

import closure
import jax
import numpy as np
import pytest
from closure import FUNCTIONAL, GENERATE
from paths import ROOT, SUPPORT
from quick import full_except
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax import plugins

pytestmark = pytest.mark.oldest

BOUNDS = {FUNCTIONAL: 3_839, GENERATE: 4_391}
CORE = closure.core()
# The features whose modules the core imports inside functions, when a call uses them.
OPTIONAL_FEATURES = {
    "adapters", "alternatives", "functions of callers", "grammars", "meshes", "objects of transformers",
    "other orders of RoPE", "other settings", "packed rows", "prefixes", "quantized caches", "routes",
    "settings of a checkpoint", "speculative decoding", "stacked layers", "taps", "truncated rows",
}  # fmt: skip
# Modules that import by name.
IMPORTERS = {"xinfer_jax", "xinfer_jax.lazy_names", "xinfer_jax.old_names", "xinfer_jax.registry"}


@pytest.mark.parametrize("start", BOUNDS)
def test_core_grows_no_more(start):
    size = closure.total(closure.core(start))
    print(f"{start}: {size}")
    assert size.code <= BOUNDS[start]


def test_decode_loop_needs_no_more_than_generate():
    assert {*closure.core(FUNCTIONAL)} - {FUNCTIONAL} < {*closure.core(GENERATE)}


def test_the_table_names_the_parts_of_layers():
    named = {key: f"xinfer_jax.{plugins.TABLE[key][0]}" for key in closure.LAYER_PARTS}
    assert named == closure.LAYER_PARTS


def test_core_imports_by_statements():
    assert {name for name in CORE if closure.hidden_imports(name)} <= IMPORTERS


def test_optional_imports_of_the_core_name_their_features():
    """Each is inside a function, and of one line. `pytest -s` prints the features with their imports."""
    marked = {}
    for name in CORE:
        for statement, feature in closure.optional_imports(name).items():
            assert statement.startswith("from "), f"{name}: {statement}"
            marked.setdefault(feature, set()).add(f"{name}: {statement.split('  #')[0]}")
        lines = closure.source_file(name).read_text(encoding="utf-8").splitlines()
        assert all(closure.OPTIONAL.search(line) for line in lines if "# optional" in line), name
    for feature in sorted(marked):
        print(feature, *sorted(marked[feature]), sep="\n    ")
    assert {*marked} == OPTIONAL_FEATURES


def test_no_module_of_the_core_depends_on_the_platform():
    assert not {name for name in CORE if closure.platform_names(name)}


def run_alone(*arguments):
    """The JSON that a program prints."""
    paths = os.pathsep.join([str(ROOT), str(SUPPORT)])
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)


ALONE = {
    "llama": dict(num_hidden_layers=1),
    "gemma3_text": dict(head_dim=16, sliding_window=6, sliding_window_pattern=2),
    "qwen3_moe": dict(
        num_hidden_layers=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


@pytest.mark.parametrize("family", full_except((), ALONE, soak=["llama", "gemma3_text"]))
def test_core_runs_alone(family, tmp_path):
    """The core gives the tokens of the library, and its logits, if nothing else can be imported. With nothing
    blocked, the calls load the core, the table, and the modules that the table names for this platform.
    """
    config = xj.ModelConfig.from_hf(QWEN | ALONE[family] | dict(model_type=family))
    params = xj.init_params(config, jax.random.key(0), "float32")
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (2, 9)).tolist()
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((config, jax.tree.map(np.asarray, params), tokens)))
    alone, whole = (run_alone(SUPPORT / "core_alone.py", path, blocked) for blocked in "10")
    for one, other in zip(alone["logits"], whole["logits"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert alone["tokens"] == whole["tokens"]
    assert {*alone["modules"]} <= {*CORE, "xinfer_jax.plugins"}
    others = {name for name in whole["modules"] if name not in CORE}
    named = {f"xinfer_jax.{module}" for module, *_ in plugins.TABLE.values()}
    assert others <= {"xinfer_jax.plugins"}.union(*map(closure.closure, named))
    other_platforms = tuple(f"xinfer_jax.backends.{name}." for name in ("gpu", "tpu", "kernels"))
    assert not [name for name in others if name.startswith(other_platforms)]


# --- frames -------------------------------------------------------------------------------------------------

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
options = xj.GenerateOptions(max_tokens=3, eos_token_ids=(1,), impl="xla")
xj.generate(params, config, [[3, 4, 5]], options)
sys.setprofile(None)
print(json.dumps(sorted(found)))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="list comprehensions are no frames from 3.12 on")
def test_frames_from_generate_to_a_product(tmp_path):
    """The frames are counted in a decode step of the core alone, with everything else blocked."""
    config = xj.ModelConfig.from_hf(QWEN | dict(model_type="llama", num_hidden_layers=1))
    params = xj.init_params(config, jax.random.key(0), "float32")
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((config, jax.tree.map(np.asarray, params))))
    chains = run_alone("-c", PROGRAM, path)
    assert len(chains) >= 4  # of attention, MLP and head
    for chain in chains:
        assert len(chain) <= MOST, "\n".join(chain)
