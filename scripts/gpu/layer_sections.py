"""The section of check_gpu.py and check_tpu.py that counts what a decode step launches, and times it."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

import xinfer_jax as xj
from gpu.model_run import ModelRun, settings
from gpu.section_cases import Case


def layers(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases that count the operations of a compiled decode step per layer, and time them."""
    name = "tiny" if plan.tiny else "0.5b"
    for impl in (None, "xla"):
        yield Case(f"{name}, {impl or 'kernels'}: compiled", partial(per_layer, plan, name, impl))
    yield Case(f"{name}: profile", partial(profile, plan, name), {"optional": True})


def per_layer(plan: SimpleNamespace, name: str, impl: str | None) -> dict[str, Any]:
    """The operations per layer of a compiled decode step by kind, from programs that differ by two layers."""
    few, more = (_operations(ModelRun(plan, settings(name, num_hidden_layers=n)), impl) for n in (1, 3))
    layer = {kind: n / 2 for kind, n in (more - few).items()}
    return {
        "per_layer": sum(layer.values()),
        "kinds": layer,
        "beside_layers": sum((few - Counter(layer)).values()),
    }


def _operations(run: ModelRun, impl: str | None) -> Counter:
    params = jax.eval_shape(run._params)
    kv_cache = jax.eval_shape(lambda: xj.init_cache(run.config, 1, 1024, run.dtype))

    def step(params, token_B, kv_cache):
        return xj.decode_step(params, run.config, token_B, kv_cache, impl=impl or run.kernels)

    token_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    text = jax.jit(step, donate_argnums=2).lower(params, token_B, kv_cache).compile().as_text()
    operation = re.compile(r"  (?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(")
    kinds = Counter()
    launched = False
    for line in text.splitlines():
        if line and not line[0].isspace():  # start of a computation; those of fusions launch nothing
            launched = line.startswith("ENTRY ") or "command_buffer" in line
        elif launched and (match := operation.match(line)):
            kinds[match[1]] += 1
    free = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call")
    return Counter({kind: n for kind, n in kinds.items() if kind not in free})


def profile(plan: SimpleNamespace, name: str) -> dict[str, Any]:
    """The operations of one generation of one row, sorted by their total time."""
    run = ModelRun(plan, settings(name))
    run.generate(1, None)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run.generate(1, None)
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        counts = Counter()
        times = Counter()
        device, lines = {"cuda": ("/device:GPU", "Stream"), "tpu": ("/device:TPU", "XLA Ops")}[plan.platform]
        devices = (plane for plane in data.planes if plane.name.startswith(device))
        streams = (line for plane in devices for line in plane.lines if line.name.startswith(lines))
        for event in (event for stream in streams for event in stream.events):
            counts[event.name] += 1
            times[event.name] += event.duration_ns / 1e6
    top = {name[:60]: f"{counts[name]} in {ms:.3f} ms" for name, ms in times.most_common(15)}
    return {"launches_per_step": sum(counts.values()) / run.new, "busy_ms": sum(times.values()), "top": top}


SECTIONS = {"layers": layers}
