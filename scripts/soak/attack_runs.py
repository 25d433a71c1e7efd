"""Runs soak_serve.py --attacks: measures a second client while a first one attacks a server.

The server (server_process.py) and the attacker (attacks.py) are processes, new for each attack. The attacker
connects from 127.0.0.1, the second client from 127.0.0.2, and /health is requested from 127.0.0.3.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import xinfer_jax
from soak.attacks import ATTACKS, CALL, CHAT, COMPLETIONS, Attack, Call
from soak.server_process import GRACE, MORE_GRACE, SHAPE, Server, Watcher
from xinfer_jax.errors import InputError

FACTOR = 3.0
EXTRA = 0.5  # limit of the 99th percentile: FACTOR times that without an attack, plus EXTRA seconds
LOG = 10  # limit in MiB of the size of the log
WARM = 60.0  # limit in seconds of a call of the warm-up
LAST = 2.0  # seconds that a call may last beyond the time of an attack; the attacker continues too


def run(names: Sequence[str], calls: int, seconds: float, options: Sequence[str]) -> int:
    """Runs attacks, or "all", one after another, and prints a line for each. Returns the exit code: 1 if a
    limit is exceeded.

    Args:
        calls: the calls of the second client in each attack.
        seconds: time limit of an attack.
        options: flags of the server that name a model.

    Raises:
        InputError: an attack is unknown, or the server does not start.
    """
    wanted = list(ATTACKS) if list(names) == ["all"] else list(names)
    for name in wanted:
        if name not in ATTACKS:
            raise InputError(f"there is no attack {name!r}: use all, or some of {', '.join(ATTACKS)}")
    rows = [run_attack(name, calls, seconds, options) for name in wanted]
    return int(any(row["missed"] for row in rows))


@contextlib.contextmanager
def serving(options: Sequence[str], attack: Attack) -> Iterator[Server]:
    """Yields a server after its warm-up. The server is killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        if attack.reranker:
            options = [f"--model={write_reranker(Path(folder) / 'reranker')}"]
        server = Server(Path(folder), options, attack)
        try:
            warm_up(server)
            yield server
        finally:
            server.kill()


def write_reranker(path: Path) -> Path:
    """Writes the bundled model with a token for each of yes and no, and returns its directory. "y" with "es",
    and "n" with "o", replace the last two merges of the tokenizer.
    """
    shutil.copytree(Path(xinfer_jax.__file__).parent / "assets", path)
    file = path / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    model = settings["model"]
    words = {i: word for word, i in model["vocab"].items()}
    for number, merge in enumerate((["y", "es"], ["n", "o"]), 1):
        words[model["vocab"]["".join(model["merges"][-number])]] = "".join(merge)
        model["merges"][-number] = merge
    model["vocab"] = {word: i for i, word in words.items()}
    file.write_text(json.dumps(settings), encoding="utf-8")
    return path


def warm_up(server: Server) -> None:
    """Sends some requests of every kind concurrently, so that memory that is allocated once is allocated."""
    ids = [7 + i % 1000 for i in range(900)]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, CALL),
        (COMPLETIONS, dict(prompt=ids, max_tokens=100, ignore_eos=True)),
        (COMPLETIONS, dict(prompt=ids, max_tokens=0, echo=True, logprobs=1)),
        (COMPLETIONS, dict(prompt="a", max_tokens=50, n=4, logprobs=20, temperature=1.0)),
        (COMPLETIONS, dict(prompt="a", max_tokens=50, stream=True, stop=["b", "c"], logit_bias={"7": 2})),
        (COMPLETIONS, dict(prompt="a", max_tokens=9, guided_regex="[a-z]+")),
        (COMPLETIONS, dict(prompt="a", max_tokens=50, allowed_token_ids=[7, 8], no_repeat_ngram_size=9)),
        (CHAT, dict(messages=[dict(role="user", content="Hello")] * 50, max_tokens=20)),
        ("/tokenize", dict(prompt="word " * 10_000)),
        ("/detokenize", dict(tokens=ids * 10)),
    ]
    with ThreadPoolExecutor(8) as pool:
        for status, text in pool.map(lambda request: server.send("POST", *request, seconds=WARM), bodies * 4):
            if status != "200":
                raise InputError(f"before any attack, the server answered {status} {text[:300]!r}")


def measure(server: Server, calls: int, end: float, text: str | None, call: Call) -> dict[str, Any]:
    """Measures the times of the second client's calls, their statuses, and the number of answers that differ
    from the text.
    """
    seconds = list[float]()
    statuses = Counter[str]()
    wrong = 0
    while len(seconds) < calls and time.monotonic() < end:
        start_s = time.monotonic()
        status, data = server.send("POST", *call(len(seconds)), end - start_s + LAST)
        seconds.append(time.monotonic() - start_s)
        statuses[status] += 1
        if status == "200":
            body = json.loads(data)
            answer = body["choices"][0]["text"] if "choices" in body else str(body["data"])
            wrong += text not in (None, answer)
            text = text or answer
        else:
            time.sleep(0.1)
    quantiles = np.quantile(seconds, (0.5, 0.99, 1), method="higher")
    times = zip(("p50_ms", "p99_ms", "worst_ms"), np.round(1e3 * quantiles, 1).tolist(), strict=True)
    return dict(calls=len(seconds), **dict(times), statuses=dict(statuses), wrong=wrong, text=text)


def measure_alone(server: Server, calls: int, attack: Attack) -> tuple[dict[str, Any], str]:
    """Returns results of the same calls before the attack, and the text of their answers."""
    requests = [attack.call(0)]
    if attack.reranker:
        path, body = attack.chains(SHAPE["capacity"])[0][-1]
        requests.append((path, json.loads(body)))
    for request in requests:  # compiles their programs
        server.send("POST", *request)
    result = measure(server, calls, time.monotonic() + 300, None, attack.call)
    text = result.pop("text")
    if not text or result["statuses"] != {"200": calls} or result["wrong"]:
        raise InputError(f"without an attack, the second client got {result['statuses']}: nothing to compare")
    return result, text


@contextlib.contextmanager
def attacker(name: str, server: Server, seconds: float) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields a process that is ready to attack for some seconds: a function that starts the attack, and a
    dict that gets its report after its end.
    """
    job = dict(attack=name, port=server.port, context=SHAPE["capacity"], seconds=seconds)
    job["headers"] = {"content-type": "application/json"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, Path(__file__).with_name("attacks.py"), json.dumps(job)]
    report: dict[str, Any] = {}
    process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdin and process.stdout
        process.stdout.readline()  # ready
        yield lambda: (process.stdin.write("\n"), process.stdin.flush()), report  # type: ignore[union-attr]
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired, ValueError):
            report.update(json.loads(process.communicate("\n", timeout=20)[0].splitlines()[-1]))
    finally:
        process.kill()
        process.wait()


def run_attack(name: str, calls: int, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    """Runs an attack, at whose end SIGTERM comes while it goes on: results of the second client, memory and
    health of the server, and exceeded limits.
    """
    attack = ATTACKS[name]
    with serving(options, attack) as server:
        alone, text = measure_alone(server, calls, attack)
        print(json.dumps(dict(part="alone", attack=name, **alone)), flush=True)
        with attacker(name, server, seconds + 10) as (begin, report):
            watcher = Watcher(server)
            end = time.monotonic() + seconds
            begin()
            time.sleep(1)
            result = measure(server, calls, end, text, attack.call)
            watcher.stop()
            died = server.process.poll() is not None
            exit_s, left = server.end()
        log = server.log.stat().st_size / 2**20
        log_end = server.log_end()[-300:] if died else ""
    del result["text"]
    result |= dict(
        attack=name, what=attack.what, health=dict(watcher.health),
        health_worst_ms=round(1e3 * watcher.slowest, 1), before_mib=round(watcher.before),
        peak_mib=round(watcher.peak - watcher.before, 1), log_mib=round(log, 2), log_end=log_end,
        end_seconds=round(exit_s, 1), died=died, killed=watcher.killed, left_processes=len(left),
        attacker=report,
    )  # fmt: skip
    result["missed"] = exceeded_limits(result, alone)
    print(json.dumps(dict(part="attack", **result)), flush=True)
    return result


def exceeded_limits(result: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    """Returns the names of the limits that an attack exceeded."""
    limits = dict(
        p99=result["p99_ms"] <= FACTOR * alone["p99_ms"] + 1e3 * EXTRA,
        status={*result["statuses"]} == {"200"},
        wrong=not result["wrong"],
        health={*result["health"]} == {"200"},
        memory=result["peak_mib"] < ATTACKS[result["attack"]].growth,
        log=result["log_mib"] < LOG,
        end=result["end_seconds"] <= GRACE + MORE_GRACE and not result["left_processes"],
        died=not result["died"] and not result["killed"],
        attacker="OSError" not in result["attacker"].get("counts", {}),  # of a socket that cannot be opened
    )
    return [name for name, good in limits.items() if not good]
