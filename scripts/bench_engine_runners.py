"""Other engines that requests join and leave, for bench_engine.py: `python bench_engine_runners.py JOB` is a
process of bench_peers.py, JOB and the answer (last line) as JSON. All requests are given at once; greedy, EOS
ignored; what a beginning has in common may be remembered.
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
from bench_peer_runners import ENGINES, Engine, PeakMemory, main

Asked = list[tuple[list[int], int]]  # ids of a prompt, and how many tokens the answer has


def measure(engine: Engine, job: dict, watch: PeakMemory) -> dict:
    generate = engine.load(job)
    asked = job["asked"]
    generate([(ids[::-1], 2) for ids, _ in asked[: job["rows"]]])
    return timed(generate, asked)


def timed(generate: Any, asked: Asked) -> dict:
    """Seconds of all requests, which must have as many tokens as was asked for."""
    start = time.perf_counter()
    counts = generate(asked)
    seconds = time.perf_counter() - start
    if counts != [new for _, new in asked]:
        return {"failed": f"asked for {[new for _, new in asked]} tokens, got {counts}"}
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

    def generate(asked: Asked) -> list[int]:
        ids = [openvino.Tensor(np.array([ids], np.int64)) for ids, _ in asked]
        how = [ov.GenerationConfig(max_new_tokens=new, ignore_eos=True, eos_token_id=0) for _, new in asked]
        return [len(out.m_generation_ids[0]) for out in pipeline.generate(ids, how)]

    return generate


def llama_server(file: str | None, asked: Asked, slots: int, threads: int, timeout: float) -> dict:
    """llama.cpp's server with so many slots; the file has a vocabulary, which holds every id."""
    server = shutil.which("llama-server")
    if not (server and file):
        return {"skipped": "needs llama-server on PATH and --llama_model"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    room = (max(len(ids) + new for ids, new in asked) // 256 + 1) * 256
    told = ["-m", file, "-np", slots, "-c", slots * room, "-t", threads, "--port", port]

    def call(path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{port}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=timeout) as answer:  # noqa: S310
            return json.load(answer)

    def one(ids: list[int], new: int) -> int:
        how = dict(prompt=ids, n_predict=new, ignore_eos=True, temperature=0, cache_prompt=True)
        return call("completion", how)["tokens_predicted"]

    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen([server, *map(str, told)], **quiet) as process:
        try:
            end = time.monotonic() + timeout
            while not ready(call):
                if process.poll() is not None or time.monotonic() > end:
                    return {"failed": f"llama-server did not start with {file}"}
                time.sleep(0.2)
            one(asked[0][0][::-1], 2)
            with ThreadPoolExecutor(len(asked)) as clients:
                return timed(lambda asked: list(clients.map(lambda a: one(*a), asked)), asked)
        except OSError as error:
            return {"failed": f"llama-server: {error}"}
        finally:
            process.terminate()


def ready(call: Any) -> bool:
    try:
        return call("health")["status"] == "ok"
    except OSError:
        return False


RUNNERS = {"openvino-genai": dataclasses.replace(ENGINES["openvino-genai"], load=load_openvino)}

if __name__ == "__main__":
    answer = json.dumps(main(json.loads(sys.argv[1]), RUNNERS, measure))
    print(f"\n{answer}", flush=True)
