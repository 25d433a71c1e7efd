"""Runs other engines with continuous batching for bench_engine.py: `python peer_serving.py JOB` is a process
of bench_peers.py; JOB and the answer (last line) are JSON. All requests are submitted at once; greedy, EOS
ignored. Prefix caching is on.
"""

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from peer_engines import ENGINES, Engine, PeakMemory, main

Requests = list[tuple[list[int], int]]  # token ids of the prompt, number of new tokens


def measure(engine: Engine, job: dict, watch: PeakMemory) -> dict:
    """Times all requests of the job, after a few others that warm the engine up."""
    generate = engine.load(job)
    requests = job["requests"]
    generate([(ids[::-1], 2) for ids, _ in requests[: job["rows"]]])
    return time_requests(generate, requests)


def time_requests(generate: Any, requests: Requests) -> dict:
    """Seconds that all requests took. Each answer must have the requested number of tokens."""
    start = time.perf_counter()
    counts = generate(requests)
    seconds = time.perf_counter() - start
    if counts != [new for _, new in requests]:
        return {"failed": f"asked for {[new for _, new in requests]} tokens, got {counts}"}
    return {"seconds": seconds}


def load_openvino(job: dict) -> Any:
    import openvino
    import openvino_genai as ov

    scheduler = ov.SchedulerConfig()
    scheduler.max_num_seqs = job["rows"]
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = True
    threads = {"INFERENCE_NUM_THREADS": job["threads"]}
    pipeline = ov.ContinuousBatchingPipeline(job["converted"], scheduler, "CPU", threads)

    def generate(requests: Requests) -> list[int]:
        ids = [openvino.Tensor(np.array([ids], np.int64)) for ids, _ in requests]
        configs = [
            ov.GenerationConfig(max_new_tokens=new, ignore_eos=True, eos_token_id=0) for _, new in requests
        ]
        return [len(out.m_generation_ids[0]) for out in pipeline.generate(ids, configs)]

    return generate


def llama_server(file: str | None, requests: Requests, slots: int, threads: int, timeout: float) -> dict:
    """Times the requests on llama.cpp's server. The GGUF file must have a vocabulary with every id."""
    server = shutil.which("llama-server")
    if not (server and file):
        return {"skipped": "needs llama-server on PATH and --llama_model"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slot_tokens = (max(len(ids) + new for ids, new in requests) // 256 + 1) * 256
    flags = ["-m", file, "-np", slots, "-c", slots * slot_tokens, "-t", threads, "--port", port]

    def call(path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{port}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=timeout) as answer:  # noqa: S310
            return json.load(answer)

    def complete(ids: list[int], new: int) -> int:
        body = dict(prompt=ids, n_predict=new, ignore_eos=True, temperature=0, cache_prompt=True)
        return call("completion", body)["tokens_predicted"]

    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen([server, *map(str, flags)], **quiet) as process:
        try:
            end = time.monotonic() + timeout
            while not is_ready(call):
                if process.poll() is not None or time.monotonic() > end:
                    return {"failed": f"llama-server did not start with {file}"}
                time.sleep(0.2)
            complete(requests[0][0][::-1], 2)  # warms it up
            with ThreadPoolExecutor(len(requests)) as clients:
                return time_requests(lambda rs: list(clients.map(lambda r: complete(*r), rs)), requests)
        except OSError as error:
            return {"failed": f"llama-server: {error}"}
        finally:
            process.terminate()


def is_ready(call: Any) -> bool:
    try:
        return call("health")["status"] == "ok"
    except OSError:
        return False


SERVING_ENGINES = {"openvino-genai": dataclasses.replace(ENGINES["openvino-genai"], load=load_openvino)}

if __name__ == "__main__":
    answer = json.dumps(main(json.loads(sys.argv[1]), SERVING_ENGINES, measure))
    print(f"\n{answer}", flush=True)
