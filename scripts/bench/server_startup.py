"""Starts xinfer-jax-serve for bench_start.py and measures its first answer."""

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from peer_engines import PeakMemory, our_format

_ROOT = Path(__file__).parents[2]


def server(job: dict, python: str, environment: dict[str, str], messages: list[dict], timeout: float) -> dict:
    """Starts a server, and sends a request as soon as it listens, and again while it answers 503. timeout:
    seconds until the process is killed.
    """
    given = dict(model=job["folder"], compilation_cache=job["compiled"], port=0)
    given |= our_format(job["precision"])
    program = "from xinfer_jax.__main__ import serve; serve()"
    command = [python, "-c", program, *(f"--{name}={value}" for name, value in given.items())]
    command.append("--noescape_control_tokens")  # made-up words may be control tokens
    environment = environment | {"PYTHONPATH": str(_ROOT)}
    body = dict(messages=messages, max_tokens=job["new_tokens"], temperature=0, stream=True)
    started = time.monotonic()
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        guard = threading.Timer(timeout, process.kill)
        guard.start()
        watch = PeakMemory(process.pid)
        try:
            line = next((line for line in process.stderr if "listening on" in line), "")
            log = threading.Thread(target=process.stderr.read, daemon=True)
            log.start()  # or the log would fill the pipe
            if not line:
                return {"failed": "the server did not start"}
            url = f"{line.split()[-1]}/v1/chat/completions"
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            ready_s, times = _send(request, started, timeout)
            anon_mib, hwm_mib = watch.peaks()
        finally:
            process.terminate()
            guard.cancel()
    phases = {"decoding": [times[-1] - times[0], times[0], times[-1], 1]}
    ends = dict(ready_s=ready_s, first_s=times[0], last_s=times[-1])
    return dict(phases=phases, **ends, anon_mib=anon_mib, hwm_mib=hwm_mib)


def _send(request: urllib.request.Request, started: float, timeout: float) -> tuple[float, list[float]]:
    """Seconds until the server took the request, and until each chunk of the answer."""
    while True:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                ready_s = time.monotonic() - started
                lines = (line for line in response if b'"content"' in line)
                return ready_s, [time.monotonic() - started for _ in lines]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise RuntimeError(error.read().decode()) from error
            time.sleep(0.02)
