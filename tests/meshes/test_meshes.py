"""A model over a mesh, on virtual devices in separate processes (mesh_cases.py), and rows that a caller
divides over devices, by `jax.shard_map` with its check of varying values or by a mesh's axes. These programs
are traced. One runs on two devices.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from paths import SUPPORT
from random_matrices import random_params
from run_script import run_on_devices
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.cache.paged import Paged
from xinfer_jax.families.reading import from_hf
from xinfer_jax.sharding import cache_specs, partition_spec
from xinfer_jax.weights.layout import layer_partition_specs

pytestmark = pytest.mark.oldest

CONFIG = from_hf(QWEN | dict(num_hidden_layers=1))
ROWS = PartitionSpec("rows")
REPLICATED = PartitionSpec()
OTHERS = " ".join(["qwen3-4 qwen3_moe-2 qwen3_next-4", *(f"{family}-2" for family in mesh_cases.OTHERS)])
ARGUMENTS = (np.arange(48, dtype=np.int32).reshape(4, 12), np.array([12, 5, 9, 1], np.int32), np.arange(8))


def answers(params, tokens_BT, num_tokens_B, key_data, times=1, cache_dtype=None):
    """Repeats each prompt `times`, and samples four tokens after it."""
    tokens_BT = jnp.tile(tokens_BT, (1, times))
    num_tokens_B = num_tokens_B * times
    cache = xj.init_cache(CONFIG, len(tokens_BT), tokens_BT.shape[1] + 8, cache_dtype)
    logits_BV, cache = xj.prefill(params, CONFIG, tokens_BT, num_tokens_B, cache)
    keys = jax.random.wrap_key_data(key_data.reshape(-1, 2).astype(jnp.uint32))
    settings = xj.SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2)
    out = xj.decode_loop(params, CONFIG, logits_BV, cache, keys, settings, jnp.array([3]), 4)
    return out.tokens_BT, out.logprobs_BT, out.length_B, out.cache.overflow_B


@pytest.mark.parametrize(
    "given", [{}, dict(times=60), dict(cache_dtype="gear")], ids=["plain", "chunks", "gear"]
)
def test_shard_map_checks_values_that_vary_between_devices(given):
    params = jax.eval_shape(lambda: random_params(CONFIG))
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))

    def run(*args):
        return answers(*args, **given)

    specs = dict(mesh=mesh, in_specs=(REPLICATED, ROWS, ROWS, ROWS))
    jax.eval_shape(jax.shard_map(run, out_specs=ROWS, **specs), params, *ARGUMENTS)
    with pytest.raises(ValueError, match="out_specs"):  # varying values are not replicated
        jax.eval_shape(jax.shard_map(run, out_specs=REPLICATED, **specs), params, *ARGUMENTS)


def main():
    """Compares results with the check and without, on meshes of both axis types: they are equal."""
    params = random_params(CONFIG)
    outs = []
    for kind, given in ((AxisType.Explicit, {}), (AxisType.Auto, dict(check_vma=False))):
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
        replicated, rows = (NamedSharding(mesh, spec) for spec in (REPLICATED, ROWS))
        specs = dict(in_specs=(REPLICATED, ROWS, ROWS, ROWS), out_specs=ROWS)
        run = jax.jit(jax.shard_map(answers, mesh=mesh, **specs, **given))
        outs.append(run(*jax.device_put((params, *ARGUMENTS), (replicated, rows, rows, rows))))
    jax.tree.map(np.testing.assert_array_equal, *outs)


@pytest.mark.full
def test_shard_map_on_two_devices():
    run_on_devices(2, Path(__file__))


@pytest.mark.full
@pytest.mark.parametrize(
    "cases",
    [
        "formats bitnet_files mxfp4_files scaled_files gguf_leaves gradients another_layout other_ways",
        "odd_vocabulary odd_formats odd_tree_of_a_user tensors_by_name explicit_axes resharded",
        "an_engine caches int8_activations kernels experts rows_over_data training adapters taps draft_heads",
        "collectives_of_a_layer collectives_of_sampling qwen2-8 gpt_oss-4 olmo3-2 gemma4-4 glm4_moe-4 lfm2-8"
        " mamba2-8 deepseek_v3-2 deepseek_v3-8",
        "heads",
        pytest.param(OTHERS, marks=pytest.mark.soak, id="other families"),
    ],
)
def test_a_model_over_a_mesh(cases):
    wrong = json.loads(run_on_devices(8, (SUPPORT / "mesh_cases.py"), *cases.split()).splitlines()[-1])
    assert not any(wrong.values()), "\n".join(wrong.values())


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1,), ("model",))


@pytest.mark.parametrize("how", ["closed over", "vmap", "remat"])
def test_explicit_axes_outside_a_trace(mesh, how):
    """Parameters that are not traced, beside tokens that may be."""
    params = random_params(CONFIG)
    tokens_BT = jax.numpy.arange(6).reshape(2, 3) + 1
    want = jax.jit(xj.forward, static_argnums=1)(params, CONFIG, tokens_BT)[0]
    explicit = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, REPLICATED)), params)
    assert jax.typeof(explicit["final_norm"]).sharding.mesh.explicit_axes == ("model",)
    call = {
        "closed over": jax.jit(lambda x: xj.forward(explicit, CONFIG, x)[0]),
        "vmap": jax.vmap(lambda x_T: xj.forward(explicit, CONFIG, x_T[None])[0][0]),
        "remat": lambda x: xj.forward(explicit, CONFIG, x, remat="layer")[0],
    }[how]
    np.testing.assert_allclose(call(tokens_BT), want, atol=1e-5)


def test_block_tables_are_not_divided(mesh):
    """Keys, values and states of three or more axes are divided by heads. Tables and counts are not."""
    pool = np.zeros((4, 2, 64, 8), np.float32)
    paged = Paged(pool, pool, None, 128, np.zeros((3, 2), np.int32))
    specs = cache_specs((paged, np.zeros((3, 2, 4)), np.zeros(3)), mesh)
    assert specs[0].table_BP == PartitionSpec(None)
    assert specs[0].k == specs[0].v == PartitionSpec(None, "model", None, None)
    assert specs[1:] == (PartitionSpec(None, "model", None), PartitionSpec(None))


def test_shardings_of_parameters(mesh):
    """Outputs of matrices with hidden states as input, inputs of the others, rows of the vocabulary."""
    specs = jax.tree.map(lambda sharding: tuple(sharding.spec), xj.params.shardings(CONFIG, mesh))
    layer = specs["layers"][0]
    assert (
        layer["q"] == layer["gate"] | {"bias": ("model",)} == {"weight": ("model", None), "bias": ("model",)}
    )
    assert layer["o"] == layer["down"] == {"weight": (None, "model")}
    assert specs["embed"]["weight"] == ("model", None) and specs["final_norm"] == (None,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda mesh: xj.params.shardings(CONFIG, "model"),
            "mesh must be a jax.sharding.Mesh with an axis 'model'",
        ),
        (lambda mesh: xj.params.shardings(CONFIG, jax.make_mesh((1,), ("rows",))), r"got \['rows'\]"),
        (lambda mesh: xj.params.shardings(CONFIG, mesh, fsdp="data"), "fsdp='data' is no axis of the mesh"),
        (lambda mesh: xj.params.shardings(CONFIG, mesh, fsdp="model"), "'model' can be used once"),
        (lambda mesh: xj.load_model(mesh=4), "mesh must be a jax.sharding.Mesh .* got int"),
        (
            lambda mesh: layer_partition_specs({}, CONFIG, AbstractMesh((8,), ("model",))),
            "heads has 4, which 8 devices",
        ),
        (
            lambda mesh: partition_spec(("mlp",), (6,), AbstractMesh((4,), ("model",))),
            "mlp has 6, which 4 devices",
        ),
    ],
)
def test_bad_meshes_and_sizes_raise(mesh, call, message):
    with pytest.raises(xj.InputError, match=message):
        call(mesh)


@pytest.mark.parametrize(
    ("flag", "message"),
    [("model=9", "needs 9 devices, and 1 are here: XLA_FLAGS"), ("data=2", "'data=2' is not model=N")],
)
def test_bad_mesh_flags_exit_with_one_line(command, flag, message):
    code, _, said = command(f"--mesh={flag}", "--prompt=a")
    assert code == 2 and message in said and len(said.splitlines()) == 1


if __name__ == "__main__":
    main()
