"""Writes how a checkout of the library behaves with small checkpoints, as JSON: a process that
scripts/compare_behaviour.py starts for each of two checkouts, in its folder. It uses public names alone,
except in the functions whose docstring says so.

Arguments: the file to write, and a folder with the checkpoints: `parity/NAME`, of which everything is
recorded, and `quantized/NAME`, of which parameters and saved files are.

A call that compiles is made under `jax_no_tracing`: all checks of arguments run before anything is traced, so
the record says how a call ends that is not supported, or that another one begins.
"""

import contextlib
import hashlib
import importlib
import json
import math
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kernels_pallas
import xinfer_jax as xj
from bench.public_api import api_records, without_places

MEMORY = 64 << 20  # bytes that every check takes to be there
ROWS = 2
TOKENS = 8
CAPACITY = 48  # the smallest limit of a rope of type dynamic
PROMPT = [*range(1, 41)]
FORMATS: dict[str, dict[str, Any]] = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "int8": dict(dtype="float32", quantize="int8"),
    "int4": dict(dtype="float32", quantize="int4"),
    "int8-a8": dict(dtype="float32", quantize="int8", activations="int8"),
    "int4-a8": dict(dtype="float32", quantize="int4", activations="int8"),
}
CACHE_DTYPES = ("float32", "bfloat16", "int8", "int4", "float8_e4m3fn", "gear")
CACHE_SIZES = ((1, 16), (2, CAPACITY), (3, 300))
TOO_LARGE = 1 << 24  # rows of a cache that does not fit
DEVICES: dict[str, tuple[Any, str]] = {
    "h200": ((9, 0), "cuda"),
    "a100": ((8, 0), "cuda"),
    "v6e": (None, "tpu"),
}

Records = dict[str, Any]
Calls = dict[str, Callable[[], Any]]


# --- what is recorded of a value, an array or an error ------------------------------------------------------


def attempt(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, as JSON has it, or the error with which it ends."""
    try:
        return call()
    except Exception as error:
        text = without_places(str(error))
        if "no_tracing" in text:
            return "begins"
        return f"{type(error).__name__}: {text.replace(tempfile.gettempdir(), 'TMP')}"


@contextlib.contextmanager
def without_tracing() -> Iterator[None]:
    """Inside, a call that would trace a program raises RuntimeError."""
    jax.config.update("jax_no_tracing", True)
    try:
        yield
    finally:
        jax.config.update("jax_no_tracing", False)


def array_type(x: Any) -> str:
    """Returns dtype and shape, as in float32[2,3]."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def shapes(tree: Any) -> dict[str, str]:
    """Returns the type of each array of a tree, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): array_type(x) for path, x in leaves if hasattr(x, "dtype")}


def result_types(call: Callable[[], Any]) -> list[str]:
    """Returns the types of the arrays that a traced call returns. Nothing is compiled."""
    return [array_type(x) for x in jax.tree.leaves(jax.eval_shape(call))]


def num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# --- caches, pages, kernels ---------------------------------------------------------------------------------


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
    records["init_cache too large"] = attempt(lambda: repr(xj.init_cache(config, TOO_LARGE, CAPACITY)))
    return records


def engine_without_programs(model: xj.Model, **settings: Any) -> xj.Engine:
    """Returns an engine that has its sizes and compiles nothing. No public name gives them: this replaces a
    method of `Engine`; if another commit has no such method, its engine is compiled.
    """

    class Sized(xj.Engine):
        def _create_core(self, *args: Any) -> None:
            return None

    return Sized(model, **settings)


def engine_record(model: xj.Model, **settings: Any) -> Records:
    """Returns pages, and the bytes of one page: what one page more adds to the cache."""
    engine = engine_without_programs(model, **settings)
    if "pages" in settings:
        return dict(cache_bytes=engine.cache_bytes)
    more = engine_without_programs(model, **settings, pages=engine.pages + 1)
    names = "rows", "capacity", "pages", "host_pages", "chunk", "cache_bytes", "weight_bytes", "routes"
    sizes = {name: getattr(engine, name) for name in names}
    return sizes | dict(page_bytes=more.cache_bytes - engine.cache_bytes)


def engine_settings(model: xj.Model) -> dict[str, Records]:
    """Returns the arguments of engines, by a name."""
    steering = {"north": {0: np.ones(model.config.hidden_size, np.float32)}}
    return dict(
        {"plain": {}, "8 rows of 256": dict(rows=8, capacity=256), "64 rows": dict(rows=64, capacity=1024)},
        **{f"cache {dtype}": dict(cache_dtype=dtype) for dtype in CACHE_DTYPES},
        lookup=dict(draft="lookup"), draft_model=dict(draft=model), routes=dict(routes=True),
        adapters=dict(max_adapters=4, max_rank=8), host_pages=dict(host_pages=8), taps=dict(taps=steering),
        prefill=dict(role="prefill"), decode=dict(role="decode"), no_prefixes=dict(prefix_cache=False),
        long=dict(capacity=1 << 20), many=dict(pages=1 << 20), triton=dict(impl="triton"),
    )  # fmt: skip


def kernel_records(config: xj.ModelConfig) -> Records:
    """Returns what `kernels_used` says, for float and int8 weights, of the device that is assumed."""
    records = {}
    for name, quantize in (("bfloat16", None), ("int8", "int8")):
        shape = attempt(
            lambda of=quantize: jax.eval_shape(
                lambda: xj.init_params(config, jax.random.key(0), "bfloat16", of)
            )
        )
        for dtype in ("bfloat16", "int8") if not isinstance(shape, str) else ():
            used = attempt(lambda of=(shape, dtype): xj.kernels_used(of[0], config, kv_dtype=of[1]))
            records[f"kernels {name}, cache {dtype}"] = used
    return records


def device_records(configs: dict[str, xj.ModelConfig]) -> Records:
    """Returns kernels and caches of all models on this CPU and on devices that need not be here."""
    records = {}
    for device, (capability, platform) in {"cpu": (None, "")}.items() | DEVICES.items():
        assumed = contextlib.nullcontext()
        if platform:
            assumed = kernels_pallas.assume_device(capability, device, platform)
        with assumed:
            for name, config in configs.items():
                found = kernel_records(config)
                if platform == "tpu":  # other devices have the caches of a CPU
                    found |= cache_records(config)
                records |= {f"{name}: {device}: {what}": record for what, record in found.items()}
    return records


# --- files --------------------------------------------------------------------------------------------------


def tensors_of(file: Path) -> Records:
    """Returns type, shape and SHA-256 of each tensor of a safetensors file, and its metadata."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, tensor in json.loads(data[8:start]).items():
        if name == "__metadata__":
            found[name] = tensor
            continue
        first, last = tensor["data_offsets"]
        digest = hashlib.sha256(data[start + first : start + last]).hexdigest()
        found[name] = f"{tensor['dtype']}{tensor['shape']} {digest}"
    return found


def files_of(folder: Path) -> Records:
    """Returns the content of each file of a checkpoint."""
    found: Records = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found[name] = tensors_of(file)
        elif file.suffix == ".json":
            found[name] = json.loads(file.read_text(encoding="utf-8"))
        elif file.is_file():
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def saved(write: Callable[[Path], None]) -> Records:
    """Returns the files that a function writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "saved")
        return files_of(Path(folder) / "saved")


def file_records(folder: Path, formats: dict[str, Records]) -> Records:
    """Returns parameters and saved files of a checkpoint, loaded in each of these formats."""
    records = {}
    for name, how in formats.items():
        model = attempt(lambda how=how: xj.load_model(folder, **how))
        if isinstance(model, str):
            records[f"load {name}"] = model
            continue
        records[f"params {name}"] = shapes(model.params)
        records[f"save {name}"] = attempt(
            lambda model=model: saved(lambda path: xj.save_model(path, model.params, model.config))
        )
    return records


def adapter_files(model: xj.Model) -> Records:
    adapter = xj.init_adapter(model.config, jax.random.key(0), 2)
    return saved(lambda path: xj.save_adapter(path, adapter, model.config))


# --- calls that a model may not support ---------------------------------------------------------------------


def generate_calls(model: xj.Model, other: xj.Model) -> Calls:
    """Returns calls of the host with several options. other: a draft model with the same vocabulary."""
    edit = xj.Tap(edit=lambda hidden_BTD, args: hidden_BTD)
    options: dict[str, Records] = {
        "plain": {},
        **{f"cache {dtype}": dict(cache_dtype=dtype) for dtype in CACHE_DTYPES},
        "draft model": dict(draft=other),
        "itself as draft model": dict(draft=model),
        "lookup": dict(draft="lookup"),
        "lookup, gear": dict(draft="lookup", cache_dtype="gear"),
        "lookup, without cache": dict(draft="lookup", use_cache=False),
        "without cache": dict(use_cache=False),
        "keep_prefix": dict(keep_prefix=True),
        "keep_prefix, lookup": dict(keep_prefix=True, draft="lookup"),
        "taps": dict(taps={0: edit}),
        "taps by attention": dict(taps={(0, "attention"): edit}),
        "taps of no layer": dict(taps={99: edit}),
        "2 of 3": dict(n=2, best_of=3),
        "logits, logprobs": dict(logits=True, logprobs=3),
        "triton": dict(impl="triton"),
        "long": dict(capacity=1 << 20),
    }
    params = model.params
    config = model.config

    def generate(more: Records, prompt: list[int] = PROMPT) -> str:
        return repr(xj.generate(params, config, [prompt], xj.GenerateOptions(8, **more)))

    calls: Calls = {f"generate {name}": lambda more=more: generate(more) for name, more in options.items()}
    calls["generate a short prompt"] = lambda: generate({}, PROMPT[:3])
    calls["generate a long prompt"] = lambda: generate({}, PROMPT * 30)
    calls["generate after a prefix"] = lambda: generate(
        dict(prefix=xj.Prefix([PROMPT[:3]], xj.init_cache(config, 1, CAPACITY)))
    )
    beams = dict(plain={}, int8=dict(cache_dtype="int8"), gear=dict(cache_dtype="gear"))
    calls |= {
        f"beam_search {name}": lambda more=more: repr(
            xj.beam_search(params, config, [PROMPT], num_beams=2, max_new_tokens=8, **more)
        )
        for name, more in beams.items()
    }
    calls["stream"] = lambda: repr(next(iter(xj.stream(params, config, [PROMPT], xj.GenerateOptions(8)))))
    calls["embed_texts"] = lambda: repr(xj.embed_texts(model, [PROMPT]))
    calls["score_completions"] = lambda: repr(xj.score_completions(params, config, [PROMPT], [PROMPT[:2]]))
    return calls


def compress_calls(model: xj.Model) -> Calls:
    """Returns the calls of `scripts/quantize.py`, which have no public name."""

    def compress(method: str) -> str:
        module = importlib.import_module(f"xinfer_jax.compress.{method}")
        function = getattr(module, f"{method}_params")
        return repr(function(model.params, model.config, [PROMPT]))

    return {f"compress by {method}": lambda method=method: compress(method) for method in ("awq", "gptq")}


def function_calls(model: xj.Model) -> Calls:
    """Returns calls that a caller traces: `result_types` gives their results."""
    params = model.params
    config = model.config
    tokens_BT = np.ones((ROWS, TOKENS), np.int32)
    num_tokens_B = np.full(ROWS, TOKENS, np.int32)
    token_B = np.ones(ROWS, np.int32)
    inputs_BTD = np.zeros((ROWS, TOKENS, config.hidden_size), np.float32)
    reads = {0: xj.Tap(read=True)}
    new_cache = lambda dtype=None: xj.init_cache(config, ROWS, CAPACITY, dtype)  # noqa: E731
    forward = lambda *args, **more: xj.forward(params, config, tokens_BT, *args, **more)  # noqa: E731
    hidden = lambda **more: xj.hidden_states(params, config, tokens_BT, **more)  # noqa: E731
    prompt = params, config, tokens_BT, num_tokens_B

    def routed() -> Any:
        routes = hidden(return_routes=True)[2]
        return xj.forward(params, config, tokens_BT, routes=routes)

    calls: Calls = {
        "forward": forward,
        "forward with a cache": lambda: forward(new_cache()),
        "forward of stacked layers": lambda: xj.forward(xj.stack_layers(params, config), config, tokens_BT),
        "forward of segments": lambda: forward(segment_ids_BT=tokens_BT),
        "forward with return_routes": lambda: forward(return_routes=True),
        "forward with routes": routed,
        "forward with taps that read": lambda: forward(taps=reads),
        "hidden_states of inputs_BTD": lambda: hidden(inputs_BTD=inputs_BTD),
        "hidden_states with inputs, segments and a cache": lambda: hidden(
            segment_ids_BT=tokens_BT, cache=new_cache()
        ),
        "attention_weights": lambda: [
            xj.attention_weights(params, config, tokens_BT, [layer])
            for layer in range(config.num_hidden_layers)
        ],
        "prefill": lambda: xj.prefill(*prompt, new_cache()),
        "prefill with inputs_BTD": lambda: xj.prefill(*prompt, new_cache(), inputs_BTD=inputs_BTD),
        "prefill with return_routes": lambda: xj.prefill(*prompt, new_cache(), return_routes=True),
        "prefill with taps that read": lambda: xj.prefill(*prompt, new_cache(), taps=reads),
        "score": lambda: xj.score(*prompt),
        "score with inputs_BTD": lambda: xj.score(*prompt, inputs_BTD=inputs_BTD),
        "score with return_routes": lambda: xj.score(*prompt, return_routes=True),
        "repeat_rows": lambda: xj.repeat_rows(new_cache(), 2),
        "truncate": lambda: xj.truncate(new_cache(), 0),
    }
    for dtype in (None, *CACHE_DTYPES[2:]):
        calls[f"decode_step, cache {dtype}"] = lambda dtype=dtype: xj.decode_step(
            params, config, token_B, new_cache(dtype)
        )
    return calls


def adapter_calls(model: xj.Model) -> Calls:
    """Returns calls with adapters; a caller traces them too."""
    params = model.params
    config = model.config
    tokens_BT = np.ones((ROWS, TOKENS), np.int32)

    def adapter(*targets: str) -> xj.Adapter:
        return xj.init_adapter(config, jax.random.key(0), 2, targets or None)

    def of_rows(*targets: str) -> Any:
        return xj.with_adapters(params, [adapter(*targets)] * 2, np.arange(ROWS, dtype=np.int32))

    calls: Calls = {
        "init_adapter": lambda: adapter().matrices,
        "forward with adapters of rows": lambda: xj.forward(of_rows(), config, tokens_BT),
    }
    for target in ("q", "gate", "embed", "lm_head", "router", "experts.down", "in_proj"):
        calls[f"with_adapter {target}"] = lambda of=target: xj.with_adapter(params, adapter(of))
        calls[f"with_adapters {target}"] = lambda of=target: of_rows(of)
    calls["merge_adapter"] = lambda: xj.merge_adapter(params, adapter())
    calls["split_adapter"] = lambda: xj.split_adapter(xj.with_adapter(params, adapter()))[0]
    return calls


def mesh_records(folder: Path, config: xj.ModelConfig) -> Records:
    """Returns how parameters are divided over two devices, and the sizes of an engine over them."""
    mesh = jax.make_mesh((2,), ("model",))

    def layout(**more: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(xj.shardings(config, mesh, **more))[0]
        return {jax.tree_util.keystr(path): str(sharding.spec) for path, sharding in leaves}

    def loaded(quantize: str | None) -> Records:
        model = xj.load_model(folder, dtype="float32", quantize=quantize, mesh=mesh)
        return dict(params=shapes(model.params), engine=attempt(lambda: engine_record(model)))

    records = {"mesh shardings": attempt(layout), "mesh fsdp": attempt(lambda: layout(fsdp="model"))}
    return records | {
        f"mesh load {quantize}": attempt(lambda of=quantize: loaded(of)) for quantize in (None, "int8")
    }


def combination_records(model: xj.Model, other: xj.Model, quantized: Any) -> Records:
    """Returns how each call ends. quantized: the same model in int8, or why there is none."""
    records: Records = {}
    for name, settings in engine_settings(model).items():
        records[f"engine {name}"] = attempt(lambda of=settings: engine_record(model, **of))
    for name, call in (function_calls(model) | adapter_calls(model)).items():
        records[name] = attempt(lambda call=call: result_types(call))
    with without_tracing():
        for name, call in (generate_calls(model, other) | compress_calls(model)).items():
            records[name] = attempt(call)
    if not isinstance(quantized, str):
        some = {"forward", "forward with taps that read", "init_adapter", "merge_adapter"}
        for name, call in (function_calls(quantized) | adapter_calls(quantized)).items():
            if name in some:
                records[f"int8: {name}"] = attempt(lambda call=call: result_types(call))
        records["int8: engine"] = attempt(lambda: engine_record(quantized))
    ternary = lambda: xj.init_params(model.config, jax.random.key(0), "float32", "ternary")  # noqa: E731
    records["init_params ternary"] = attempt(lambda: result_types(ternary))
    return records


# --- all of it ----------------------------------------------------------------------------------------------


def case_records(folder: Path, draft_folder: Path) -> Records:
    """Returns everything of one checkpoint, except what depends on a device that is assumed."""
    records = file_records(folder, FORMATS)
    model = attempt(lambda: xj.load_model(folder, dtype="float32"))
    if isinstance(model, str):
        return {"load": model}
    quantized = attempt(lambda: xj.load_model(folder, dtype="float32", quantize="int8"))
    draft = xj.load_model(draft_folder, dtype="float32")
    records |= cache_records(model.config)
    records |= combination_records(model, draft, quantized)
    records["save_adapter"] = attempt(lambda: adapter_files(model))
    if jax.local_device_count() > 1:
        records |= mesh_records(folder, model.config)
    return records


def limit_memory() -> None:
    """Makes `MEMORY` the memory that checks find, whatever this machine has: it seems to be this process's
    limit.
    """
    resource.getrlimit = lambda kind: (MEMORY, resource.RLIM_INFINITY)


def main(out: str, work: str) -> None:
    assert Path.cwd() in Path(xj.__file__).parents, "another checkout is imported"
    limit_memory()
    records = api_records()
    folders = sorted(Path(work, "parity").iterdir())
    configs = {}
    for folder in folders:
        jax.clear_caches()
        found = case_records(folder, folders[0])
        records |= {f"{folder.name}: {name}": record for name, record in found.items()}
        if "load" not in found:
            configs[folder.name] = xj.from_hf(json.loads((folder / "config.json").read_text()))
    records |= device_records(configs)
    for folder in sorted(Path(work, "quantized").iterdir()):
        formats = {"as stored": {}, "dequantized": dict(dtype="float32", dequantize=True)}
        found = file_records(folder, formats | dict(fp8=dict(quantize="fp8")))
        records |= {f"{folder.name}: {name}": record for name, record in found.items()}
    Path(out).write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
