"""Part disturbance of bench_engine.py with two processes, each pinned to a core: this one prefills and
submits the requests, and the one that it starts decodes. Prints the results of the rounds as JSON.

    python scripts/bench/two_processes.py ROUNDS SECONDS
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import script_paths  # noqa: E402, F401

_CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    """Runs one of the two processes."""
    if sys.argv[1] == "decode":
        os.sched_setaffinity(0, {_CORES[-1]})
        run_decode_process(int(sys.argv[2]), bytes.fromhex(sys.stdin.readline()))
        return
    os.sched_setaffinity(0, {_CORES[0]})
    print(json.dumps(measure(int(sys.argv[1]), float(sys.argv[2]))))


def measure(rounds: int, seconds: float) -> list[dict]:
    """The rounds, with an engine that prefills in this process."""
    from engine_disturbance import create_engine, measure_disturbance

    from xinfer_jax.cli.channel import listen
    from xinfer_jax.serve.peer_front import PeerEngines
    from xinfer_jax.serve.peer_worker import PeerWorker

    secret = secrets.token_bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = listen("127.0.0.1", port)
    # The child has all cores until it pins itself.
    os.sched_setaffinity(0, {*_CORES})
    command = [sys.executable, __file__, "decode", str(port)]
    decoding = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    decoding.stdin.write(f"{secret.hex()}\n")
    decoding.stdin.flush()
    os.sched_setaffinity(0, {_CORES[0]})
    try:
        with create_engine(role="prefill") as prefill:
            front = PeerEngines(prefill.model, listening, secret, _log)
            worker = PeerWorker(prefill, ("127.0.0.1", port), secret, _log)
            threading.Thread(target=worker.run, args=(threading.Event(),), daemon=True).start()
            front.wait_for_both(lambda: decoding.poll() is not None)
            measure_disturbance(front, 1.0, rounds)  # connects the transfer servers
            cpu = partial(_cpu_seconds, decoding.pid)
            results = [measure_disturbance(front, seconds, number, cpu) for number in range(rounds)]
            front.close()
            return results
    finally:
        decoding.terminate()
        decoding.wait()


def run_decode_process(port: int, secret: bytes) -> None:
    """Decodes until the other process has gone."""
    from engine_disturbance import create_engine

    from xinfer_jax.serve.peer_worker import PeerWorker

    with create_engine(role="decode") as engine:
        PeerWorker(engine, ("127.0.0.1", port), secret, _log).run(threading.Event())


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _log(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
