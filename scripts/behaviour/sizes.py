"""Records of sizes and kernels: caches, pages of engines, shardings over a mesh, and `kernels_used`."""

import contextlib
import importlib.util
import resource
from pathlib import Path
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj
from behaviour.recording import CACHE_DTYPES, CAPACITY, Records, attempt, num_bytes, shapes
from xinfer_jax.engine.engine import LocalEngine

# In commits before 0.2.0 the kernels are a package of their own.
_NAMES = ("xinfer_jax.kernels_pallas", "kernels_pallas")
kernels_pallas = importlib.import_module(next(filter(importlib.util.find_spec, _NAMES)))

MEMORY = 64 << 20  # bytes that every check takes to be there
CACHE_SIZES = ((1, 16), (2, CAPACITY), (3, 300))  # rows, capacity
TOO_MANY = 1 << 24  # rows of a cache that does not fit
DEVICES: dict[str, tuple[Any, Any]] = {  # compute capability, platform
    "cpu": (None, None),  # this machine
    "h200": ((9, 0), "cuda"),
    "a100": ((8, 0), "cuda"),
    "v6e": (None, "tpu"),
}


def limit_memory() -> None:
    """Makes `MEMORY` the memory that checks find, whatever this machine has: it seems to be this process's
    limit.
    """
    resource.getrlimit = lambda kind: (MEMORY, resource.RLIM_INFINITY)


def cache_record(config: xj.ModelConfig, rows: int, capacity: int, dtype: str) -> Records:
    cache = jax.eval_shape(lambda: xj.init_cache(config, rows, capacity, dtype))
    return dict(
        bytes=num_bytes(cache), arrays=sorted(shapes(cache).values()), dtype=cache.dtype,
        capacity=cache.capacity, most_at_once=cache.most_at_once,
    )  # fmt: skip


def cache_records(config: xj.ModelConfig) -> Records:
    records = {
        f"init_cache {rows} rows of {capacity}, {dtype}": attempt(
            lambda of=(rows, capacity, dtype): cache_record(config, *of)
        )
        for rows, capacity in CACHE_SIZES
        for dtype in CACHE_DTYPES
    }
    records["init_cache too large"] = attempt(lambda: repr(xj.init_cache(config, TOO_MANY, CAPACITY)))
    return records


def engine_without_programs(model: xj.Model, **settings: Any) -> xj.Engine:
    """Returns an engine that has its sizes and compiles nothing. No public name gives them: this replaces a
    method of `LocalEngine`. If another commit has no such method, its engine is compiled.
    """

    class Sized(LocalEngine):
        def _create_core(self, shape: Any) -> None:
            return None

    return Sized(model, **settings)


def engine_record(model: xj.Model, **settings: Any) -> Records:
    """Returns pages, and the bytes of one page: the bytes that one page more adds to the cache."""
    engine = engine_without_programs(model, **settings)
    if "pages" in settings:
        return dict(cache_bytes=engine.cache_bytes)
    more = engine_without_programs(model, **settings, pages=engine.pages + 1)
    names = (
        "rows",
        "capacity",
        "pages",
        "host_pages",
        "chunk",
        "cache_bytes",
        "weight_bytes",
        "routed_experts",
    )
    sizes = {name: getattr(engine, name) for name in names}
    return sizes | dict(page_bytes=more.cache_bytes - engine.cache_bytes)


def engine_settings(model: xj.Model) -> dict[str, Records]:
    """Returns the arguments of engines, by a name."""
    steering = {"north": {0: np.ones(model.config.hidden_size, np.float32)}}
    return dict(
        {"plain": {}, "8 rows of 256": dict(rows=8, capacity=256), "64 rows": dict(rows=64, capacity=1024)},
        **{f"cache {dtype}": dict(cache_dtype=dtype) for dtype in CACHE_DTYPES},
        lookup=dict(draft="lookup"), draft_model=dict(draft=model), routed_experts=dict(routed_experts=True),
        adapters=dict(max_adapters=4, max_rank=8), host_pages=dict(host_pages=8), taps=dict(taps=steering),
        prefill=dict(role="prefill"), decode=dict(role="decode"), no_prefixes=dict(prefix_cache=False),
        long=dict(capacity=1 << 20), many=dict(pages=1 << 20), triton=dict(impl="triton"),
    )  # fmt: skip


def engine_records(model: xj.Model) -> Records:
    return {
        f"engine {name}": attempt(lambda of=settings: engine_record(model, **of))
        for name, settings in engine_settings(model).items()
    }


def kernel_records(config: xj.ModelConfig) -> Records:
    """Returns the result of `kernels_used`, for float and int8 weights, on the device that is assumed."""
    records = {}
    for name, quantize in (("bfloat16", None), ("int8", "int8")):
        shape = attempt(
            lambda of=quantize: jax.eval_shape(
                lambda: xj.init_params(config, jax.random.key(0), "bfloat16", of)
            )
        )
        for dtype in ("bfloat16", "int8") if not isinstance(shape, str) else ():
            used = attempt(lambda of=(shape, dtype): xj.kernels_used(of[0], config, cache_dtype=of[1]))
            records[f"kernels {name}, cache {dtype}"] = used
    return records


def device_records(configs: dict[str, xj.ModelConfig]) -> Records:
    """Returns kernels and caches of all models on this CPU and on devices that need not be here."""
    records = {}
    for device, (capability, platform) in DEVICES.items():
        with (
            kernels_pallas.assume_device(capability, device, platform)
            if platform
            else contextlib.nullcontext()
        ):
            for name, config in configs.items():
                found = kernel_records(config)
                if platform == "tpu":  # other devices have the caches of a CPU
                    found |= cache_records(config)
                records |= {f"{name}: {device}: {what}": record for what, record in found.items()}
    return records


def mesh_records(folder: Path, config: xj.ModelConfig) -> Records:
    """Returns how parameters are divided over two devices, and the sizes of an engine over them."""

    def layout(axis: str, **more: Any) -> dict[str, str]:
        mesh = jax.make_mesh((2,), (axis,))
        leaves = jax.tree_util.tree_flatten_with_path(xj.params.shardings(config, mesh, **more))[0]
        return {jax.tree_util.keystr(path): str(sharding.spec) for path, sharding in leaves}

    def loaded(quantize: str | None) -> Records:
        mesh = jax.make_mesh((2,), ("model",))
        model = xj.load_model(folder, dtype="float32", quantize=quantize, mesh=mesh)
        return dict(params=shapes(model.params), engine=attempt(lambda: engine_record(model)))

    return {
        "mesh shardings": attempt(lambda: layout("model")),
        "mesh shardings, fsdp": attempt(lambda: layout("data", fsdp="data")),
        "mesh float32": attempt(lambda: loaded(None)),
        "mesh int8": attempt(lambda: loaded("int8")),
    }
