"""Compiles the sampler for an H200, which need not be present, and prints what it launches, as a JSON object:
for some numbers of rows and structures of settings.
"""

import json
import re

import jax
import numpy as np
from gpu.card_specs import CARDS
from jax.sharding import NamedSharding, PartitionSpec

import kernels_pallas
import xinfer_jax as xj
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.context import init_context
from xinfer_jax.sampling.sampler import sample_tokens

V = 151936
NOT_LAUNCHED = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def compiled_sampler(rows: int, all_settings: bool) -> str:
    """The compiled program's text."""
    settings = settings_per_row(xj.SamplingConfig(0.8, 20, 0.8), rows, V, all_settings)
    history_BS = np.zeros((rows, 64), np.int32)
    context = init_context(
        settings, history_BS[:, 0], history_BS[:, :1], np.zeros((rows, V), bool), history_BS
    )
    keys = jax.random.split(jax.random.key(0), rows)
    args = jax.ShapeDtypeStruct((rows, V), np.float32), keys, settings, context
    mesh = CARDS["h200"].mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with (
        kernels_pallas.assume_device((9, 0), "H200"),
        jax.default_device(mesh.devices.flat[0]),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        return jax.jit(lambda *args: sample_tokens(*args)[:2]).lower(*args).compile().as_text()


def count(text: str) -> dict[str, int]:
    """Operations that are launched outside the branches, and what the host would wait for."""
    entry = text[text.index("\nENTRY ") :].split("\n}")[0]
    operations = re.findall(r"^ .* = (?:\(.*?\)|\S+) ([\w-]+)\(", entry, re.M)
    launched = [operation for operation in operations if operation not in NOT_LAUNCHED]
    loops = re.findall(r".* while\(.*", text)
    return dict(
        launched=len(launched) - launched.count("conditional"),
        branches=launched.count("conditional"),
        loops=launched.count("while"),
        loops_of_unknown_count=sum("known_trip_count" not in loop for loop in loops),
        sorts_of_the_vocabulary=len(re.findall(rf"= [^=]*\b{V}\b[^=]* sort\(", text)),
    )


if __name__ == "__main__":
    found = {}
    for rows, all_settings in ((1, False), (64, True)):
        found[f"{rows} {'all' if all_settings else 'plain'}"] = count(compiled_sampler(rows, all_settings))
    print(json.dumps(found))
