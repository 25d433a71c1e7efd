"""Parameters, caches, configs and results with other packages: `pickle`, `copy`, `jax.export` and its files,
modules of equinox and of flax.
"""

import ast
import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from paths import ROOT
from quick import full_except
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax import exporting

pytestmark = pytest.mark.oldest

HYBRID = dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], model_type="qwen3_5_text"
)
CONFIG = xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=1, eos_token_id=[2, 3]))
TOKENS = np.arange(8, dtype=np.int32).reshape(2, 4)
COUNTS = np.array([4, 3], np.int32)
KINDS = ("float32", "int8", "int4")


def params_of(kind: str) -> dict:
    quantize = None if kind == "float32" else kind
    return xj.init_params(CONFIG, jax.random.key(0), "float32", quantize=quantize)


def rollout(params, config, tokens_BT, num_tokens_B, cache, key):
    """Results of each kind."""
    logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
    sampling = xj.SamplingConfig(temperature=0.7)
    out = xj.decode_loop(params, config, logits_BV, cache, key, sampling, np.array([2]), 3, logprobs=1)
    packed = xj.rollouts.pack_rollout(tokens_BT, num_tokens_B, out)
    scores = xj.score(params, config, tokens_BT, num_tokens_B, entropy=True)
    return out, packed, scores, xj.run_model(params, config, tokens_BT)


@pytest.fixture(scope="module")
def results() -> dict:
    """Trees of each kind, by name."""
    params = {kind: params_of(kind) for kind in KINDS}
    given = TOKENS, COUNTS, xj.init_cache(CONFIG, 2, 16), jax.random.key(1)
    out, packed, scores, output = jax.jit(rollout)(params["float32"], CONFIG, *given)
    caches = {f"cache in {dtype}": xj.init_cache(CONFIG, 2, 16, dtype) for dtype in ("int8", "gear")}
    adapter = xj.lora.init_adapter(CONFIG, jax.random.key(2), rank=2)
    more = dict(adapter=adapter, adapted=xj.lora.with_adapter(params["int8"], adapter), config=CONFIG)
    return params | caches | more | dict(Decoded=out, PackedRollout=packed, Scores=scores, ModelOutput=output)


def assert_same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(jax.random.key_data(z) if is_key else z for z in (x, y)))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_the_same(results, again):
    for name, tree in results.items():
        same = again(tree)
        assert type(same) is type(tree), name
        assert_same(same, tree)
    out = xj.generate(results["int8"], CONFIG, [[1, 2], [3]], xj.GenerateOptions(max_tokens=2, logprobs=1))
    assert again(out) == out


@pytest.fixture
def with_files() -> None:
    pytest.importorskip("flatbuffers", reason="jax writes programs with flatbuffers: pip install flatbuffers")
    xj.enable_export()
    xj.enable_export()  # a further call does nothing


# --- jax.export ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_files")
@pytest.mark.parametrize("kind", full_except(["int4"], KINDS, ["int8"]))
def test_programs_with_trees_of_the_library_are_written_and_read(kind, results):
    """Parameters, cache and config are arguments, all kinds of results are results."""
    given = results[kind], CONFIG, TOKENS, COUNTS, xj.init_cache(CONFIG, 2, 16), jax.random.key(1)
    program = jax.jit(rollout)
    read = export.deserialize(export.export(program)(*given).serialize())
    got, want = read.call(*given), program(*given)
    assert [type(x) for x in got] == [type(x) for x in want]
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want))
    with pytest.raises(ValueError, match="tree"):
        read.call(given[0], xj.ModelConfig.from_hf(QWEN), *given[2:])


@pytest.mark.usefixtures("with_files")
def test_every_tree_is_written_and_read(results):
    for name, tree in results.items():
        program = jax.jit(lambda tree: jax.tree.map(lambda x: x, tree))
        read = export.deserialize(export.export(program)(tree).serialize())
        assert read.in_tree == jax.tree.structure(((tree,), {})), name
        assert_same(read.call(tree), tree)


@pytest.mark.usefixtures("with_files")
def test_a_process_reads_what_another_one_wrote(tmp_path, results):
    """It imports nothing but `xinfer_jax` and calls `enable_export`."""
    forward = jax.jit(lambda cache, x: (cache, xj.SamplingConfig(temperature=x)))
    cache = xj.init_cache(CONFIG, 2, 16, "int8")
    (tmp_path / "program").write_bytes(export.export(forward)(cache, 0.5).serialize())
    program = (
        "import sys, pathlib, jax, xinfer_jax as xj; xj.enable_export();"
        "print(jax.export.deserialize(pathlib.Path(sys.argv[1]).read_bytes()).out_tree)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "program")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "KVCache" in done.stdout and "SamplingConfig" in done.stdout, done.stderr


@pytest.mark.usefixtures("with_files")
def test_functions_of_callers_cannot_be_written():
    tap = xj.Tap(np.ones(3), lambda x, args: x + args)
    exported = export.export(jax.jit(lambda tap: tap.args))(tap)
    with pytest.raises(xj.InputError, match="cannot be written by jax.export: let the exported func"):
        exported.serialize()


@pytest.mark.parametrize(
    "path", ["os.path", "xinfer_jax.errors.InputError", "xinfer_jax.config.rope.Missing"]
)
def test_files_name_no_other_classes(path):
    with pytest.raises(xj.InputError, match="this version has no .* export it again"):
        exporting._decode({"dataclass": [path, {}]})


def test_the_table_has_every_pytree_of_the_library():
    registered = set()
    for path in (ROOT / "xinfer_jax").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                if any("register_dataclass" in ast.unparse(x) for x in node.decorator_list):
                    registered.add(node.name)
            elif "tree_util.register_pytree_with_keys(" in (call := ast.unparse(node)):
                registered.add(call.split("(")[1].split(",")[0])
    named = {name for names in exporting.DATACLASSES.values() for name in names}
    assert named | {"ModelConfig"} == registered


# --- modules of equinox and flax ----------------------------------------------------------------------------


def test_fields_of_equinox_modules(results):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed: pip install equinox")

    class Policy(eqx.Module):
        params: dict
        config: xj.ModelConfig
        cache: xj.KVCache
        last: xj.types.Scores

        def __call__(self, tokens_BT):
            return xj.forward(self.params, self.config, tokens_BT)[0]

    for kind in KINDS:
        policy = Policy(results[kind], CONFIG, results["cache in int8"], results["Scores"])
        got_BTV = eqx.filter_jit(policy)(TOKENS)
        np.testing.assert_array_equal(got_BTV, jax.jit(xj.forward)(results[kind], CONFIG, TOKENS)[0])
        arrays, rest = eqx.partition(policy, eqx.is_array)
        assert_same(eqx.combine(arrays, rest), policy)
    policy = Policy(results["float32"], CONFIG, results["cache in int8"], results["Scores"])
    loss = lambda policy: xj.score(policy.params, policy.config, TOKENS).logprobs_BT.sum()  # noqa: E731
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(policy)
    assert jnp.abs(gradient.params["final_norm"]).max() > 0


def test_fields_of_flax_modules(results):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed: pip install flax")

    class Policy(nnx.Module):
        def __init__(self, params):
            self.params = nnx.data(params)
            self.config = CONFIG
            self.cache = nnx.data(results["cache in int8"])
            self.last = nnx.data(results["Scores"])

        def __call__(self, tokens_BT):
            return xj.forward(self.params, self.config, tokens_BT)[0]

    for kind in KINDS:
        policy = Policy(results[kind])
        want_BTV = jax.jit(xj.forward)(results[kind], CONFIG, TOKENS)[0]
        np.testing.assert_array_equal(nnx.jit(lambda policy: policy(TOKENS))(policy), want_BTV)
        graph, state = nnx.split(policy)
        again = nnx.merge(graph, state)
        assert_same(again.params, policy.params)
        assert_same((again.cache, again.last), (policy.cache, policy.last))
