"""Runs one engine of bench_peers.py in its own process: `python peer_engines.py JOB`. JOB is JSON; the last
line of the output is the answer as JSON.

Needs only numpy and the engine, so that it runs under the Python that has the peer installed. An engine is an
entry of ENGINES: how to install it, what it imports, how to convert the checkpoint (if needed) and how to
load it. Loading returns a function `generate(prompts, new_tokens) -> (seconds to the first token of every
row, token ids per row)`: greedy, EOS ignored.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], tuple[float, list[list[int]]]]


def main(
    job: dict, engines: dict[str, "Engine"], measure: Callable[["Engine", dict, "PeakMemory"], dict]
) -> dict:
    """Converts the checkpoint, or loads it and measures every case. If that fails, the reason is the only
    entry of the answer.
    """
    engine = engines[job["engine"]]
    watch = PeakMemory()
    try:
        start = time.perf_counter()
        for module in engine.convert_modules if job["convert"] else engine.modules:
            importlib.import_module(module)
        import_s = time.perf_counter() - start
        if job["convert"]:
            engine.convert(Path(job["checkpoint"]), Path(job["converted"]), job["precision"], job["threads"])
            return {"converted": True}
        return {
            "import_s": import_s,
            "version": importlib.metadata.version(engine.package),
            **measure(engine, job, watch),
        }
    except ImportError as error:
        return {"skipped": f"not installed ({engine.install}): {error}"}
    except Exception as error:  # any of them: one line in the parent's table
        reason = " ".join(str(error).split())[:300] or "no reason given"
        return (
            {"skipped": reason}
            if type(error).__name__ == "InputError"
            else {"failed": f"{type(error).__name__}: {reason}"}
        )


def measure(engine: "Engine", job: dict, watch: "PeakMemory") -> dict:
    """Loads the engine and measures a first and a warm call of every case."""
    start = time.perf_counter()
    generate = engine.load(job)
    result: dict[str, Any] = {"load_s": time.perf_counter() - start}
    new = job["new_tokens"]
    draw = np.random.RandomState(job["seed"])
    for length, rows in job["cases"]:
        case = f"{length} x{rows}"
        seconds = []
        # An engine may cache a prompt, so the first call has other prompts.
        others, prompts = draw.randint(0, job["vocab_size"], (2, rows, length)).tolist()
        for batch in (others, prompts):
            start = time.perf_counter()
            first_s, tokens = generate(batch, new)
            seconds.append(time.perf_counter() - start)
        result[f"first {case}"], result[f"warm {case}"] = seconds
        if [len(row) for row in tokens] != [new] * rows:
            raise RuntimeError(f"asked for {rows} x {new} tokens, got {[len(row) for row in tokens]}")
        result.setdefault("tokens", tokens[0])
        result[f"prefill {case}"] = rows * length / first_s
        result[f"decode {case}"] = rows * (new - 1) / (seconds[1] - first_s)
        if rows == 1:
            result["anon_mib"], result["hwm_mib"] = watch.peaks()
    result["anon_all_mib"], result["hwm_all_mib"] = watch.peaks()
    return result


class PeakMemory:
    """Peak anonymous memory, sampled every 20 ms in a thread, and peak resident memory as the kernel reports
    it (Linux only).
    """

    def __init__(self, process: int | str = "self") -> None:
        """process: its id; this process by default."""
        self._file = Path(f"/proc/{process}/status")
        self._anon = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def peaks(self) -> tuple[float | None, float | None]:
        """MiB of anonymous memory, and of resident memory including mapped files."""
        status = self._status()
        self._anon = max(self._anon, status.get("RssAnon", 0.0))
        return self._anon or None, status.get("VmHWM")

    def _watch(self) -> None:
        while True:
            self.peaks()
            time.sleep(0.02)

    def _status(self) -> dict[str, float]:
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return {}
        return {
            name: int(rest.split()[0]) / 1024
            for name, _, rest in (line.partition(":") for line in lines)
            if rest.endswith(" kB")
        }


class FirstToken:
    """Stops the clock when it has been called once for each of `rows` rows."""

    def __init__(self, rows: int = 1) -> None:
        self._missing = rows
        self._start = time.perf_counter()
        self.seconds = 0.0

    def __call__(self) -> None:
        if self._missing:
            self._missing -= 1
            self.seconds = time.perf_counter() - self._start


# --- ours ---------------------------------------------------------------------------------------------------


def our_format(precision: str) -> dict[str, str]:
    """The arguments of `load_model` and of the command for this precision."""
    formats = {"int8-activations": {"quantize": "int8", "activations": "int8"}}
    formats |= {name: {"quantize": name} for name in ("int8", "int4")}
    return formats.get(precision, {"dtype": precision})


def our_model(job: dict) -> Any:
    import xinfer_jax as xj

    return xj.load_model(job["checkpoint"], **our_format(job["precision"]))


def load_ours(job: dict) -> Generate:
    import xinfer_jax as xj

    model = our_model(job)

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        options = xj.GenerateOptions(max_new_tokens=new, eos_token_ids=())
        out = xj.generate(model.params, model.config, prompts, options)
        return out.stats.ttft_seconds, out.tokens

    return generate


# --- transformers, eager: not compiled, dynamic cache, its default attention --------------------------------


def transformers_model(job: dict) -> Any:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], dtype=getattr(torch, job["precision"])
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def load_transformers(job: dict) -> Generate:
    import torch

    model = transformers_model(job)

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        first = FirstToken()
        ids = torch.tensor(prompts)

        def after_each_step(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            first()
            return torch.zeros(len(ids), dtype=torch.bool)

        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=[after_each_step],
        )
        return first.seconds, out[:, ids.shape[1] :].tolist()

    return generate


# --- ctranslate2: takes token strings, so each id is written <id> -------------------------------------------


def convert_ctranslate2(checkpoint: Path, converted: Path, precision: str, threads: int) -> None:
    from ctranslate2.converters import TransformersConverter

    class Numbers:
        bos_token = eos_token = unk_token = pad_token = "<0>"

        @staticmethod
        def get_vocab() -> dict[str, int]:
            return {
                f"<{i}>": i for i in range(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
            }

    class Converter(TransformersConverter):
        def load_tokenizer(self, *_: object, **__: object) -> type[Numbers]:
            return Numbers

    Converter(str(checkpoint)).convert(str(converted), quantization=precision)


def load_ctranslate2(job: dict) -> Generate:
    import ctranslate2

    model = ctranslate2.Generator(
        job["converted"], device="cpu", compute_type=job["precision"], intra_threads=job["threads"]
    )

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        first = FirstToken(len(prompts))

        def after_each_token(_: object) -> bool:
            first()
            return False

        words = [[f"<{i}>" for i in prompt] for prompt in prompts]
        # Without the prompt in the result it is prefilled in one pass; min_length prevents the end token.
        out = model.generate_batch(
            words, max_length=new, min_length=new, include_prompt_in_result=False, callback=after_each_token
        )
        return first.seconds, [row.sequences_ids[0] for row in out]

    return generate


# --- openvino-genai -----------------------------------------------------------------------------------------


def convert_openvino(checkpoint: Path, converted: Path, precision: str, threads: int) -> None:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantization = OVWeightQuantizationConfig(bits=int(precision.removeprefix("int")))
    OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, quantization_config=quantization
    ).save_pretrained(converted)


def load_openvino(job: dict) -> Generate:
    import openvino
    import openvino_genai

    # No prefix caching; a prompt is prefilled in one pass, as without a scheduler config.
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1 << 30
    pipeline = openvino_genai.LLMPipeline(
        job["converted"], "CPU", INFERENCE_NUM_THREADS=job["threads"], scheduler_config=scheduler
    )

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        # It needs an EOS id even where it ignores it, and the checkpoint has none.
        out = pipeline.generate(
            inputs, max_new_tokens=new, eos_token_id=0, stop_token_ids={0}, ignore_eos=True, do_sample=False
        )
        return out.perf_metrics.get_ttft().mean / 1e3, [list(row) for row in out.tokens]

    return generate


# --- onnxruntime-genai: its builder needs a tokenizer, which is not used ------------------------------------


def convert_onnxruntime(checkpoint: Path, converted: Path, precision: str, threads: int) -> None:
    from tokenizers import Tokenizer, models

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hf = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": 0, "bos_token_id": 0}
        (folder / "config.json").write_text(json.dumps(hf))
        (folder / "model.safetensors").symlink_to(checkpoint.resolve() / "model.safetensors")
        Tokenizer(models.WordLevel({"<0>": 0}, "<0>")).save(str(folder / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<0>", "pad_token": "<0>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "--input", name]
        paths = ["--output", str(converted), "--cache_dir", str(folder / "cache")]
        options = ["--precision", precision, "--execution_provider", "cpu"]
        done = subprocess.run([*builder, *paths, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["nothing on standard error"])[-1])


def load_onnxruntime(job: dict) -> Generate:
    import onnxruntime_genai

    config = onnxruntime_genai.Config(job["converted"])
    session = {"intra_op_num_threads": job["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = onnxruntime_genai.Model(config)

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        rows = len(prompts)
        size = len(prompts[0]) + new
        options = onnxruntime_genai.GeneratorParams(model)
        # min_length prevents the end token. A new generator for each call caches nothing.
        options.set_search_options(batch_size=rows, max_length=size, min_length=size, do_sample=False)
        first = FirstToken()
        chosen = []
        generator = onnxruntime_genai.Generator(model, options)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new):
            generator.generate_next_token()
            chosen.append(generator.get_next_tokens().tolist())
            first()
        return first.seconds, [list(row) for row in zip(*chosen, strict=True)]

    return generate


# --- llama.cpp: in peer_llama_cpp.py ------------------------------------------------------------------------


def convert_llama_cpp(checkpoint: Path, converted: Path, precision: str, threads: int) -> None:
    from peer_llama_cpp import convert

    convert(checkpoint, converted, precision, threads)


def load_llama_cpp(job: dict) -> Generate:
    from peer_llama_cpp import load

    return load(job)


# --- ENGINES ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Engine:
    """How to run one engine."""

    install: str  # the command that installs it
    package: str  # whose version is reported
    modules: tuple[str, ...]  # imported before the time of loading starts
    precisions: dict[str, str]  # the engine's name of a precision → ours that it is compared with
    load: Callable[[dict], Generate]
    convert: Callable[[Path, Path, str, int], None] | None = None
    convert_modules: tuple[str, ...] = ()


def _same_names(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


ENGINES = {
    "ours": Engine(
        "pip install .",
        "jax",
        ("xinfer_jax",),
        _same_names("float32", "bfloat16", "int8", "int4") | {"int8-activations": "int8"},
        load_ours,
    ),
    "transformers": Engine(
        "pip install torch transformers",
        "transformers",
        ("torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.generation.utils"),
        _same_names("float32", "bfloat16"),
        load_transformers,
    ),
    "ctranslate2": Engine(
        "pip install ctranslate2 torch transformers",
        "ctranslate2",
        ("ctranslate2",),
        _same_names("float32", "int8"),
        load_ctranslate2,
        convert_ctranslate2,
        ("ctranslate2", "torch", "transformers"),
    ),
    "openvino-genai": Engine(
        "pip install openvino-genai optimum-intel nncf",
        "openvino-genai",
        ("openvino_genai",),
        _same_names("int8", "int4"),
        load_openvino,
        convert_openvino,
        ("optimum.intel", "nncf"),
    ),
    "onnxruntime-genai": Engine(
        "pip install onnxruntime-genai onnxruntime onnx onnx-ir torch transformers",
        "onnxruntime-genai",
        ("onnxruntime_genai",),
        {"fp32": "float32", "int8": "int8", "int4": "int4"},
        load_onnxruntime,
        convert_onnxruntime,
        ("onnxruntime_genai", "onnx_ir", "torch", "transformers"),
    ),
    "llama.cpp": Engine(
        "pip install llama-cpp-python gguf",
        "llama-cpp-python",
        ("llama_cpp",),
        {"F32": "float32", "BF16": "bfloat16", "Q8_0": "int8", "Q4_0": "int4"},
        load_llama_cpp,
        convert_llama_cpp,
        ("llama_cpp", "gguf"),
    ),
}

if __name__ == "__main__":
    answer = json.dumps(main(json.loads(sys.argv[1]), ENGINES, measure))
    print(f"\n{answer}", flush=True)
