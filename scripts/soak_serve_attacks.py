"""soak_serve.py --attacks: what a second client notices while a first one attacks a server.

The server is a process of its own, new for each attack (soak_serve_process.py), and so is the attacker;
soak_serve_attackers.py has the attacks. The attacker comes from 127.0.0.1, the second client from 127.0.0.2,
and /health is asked for from 127.0.0.3.
"""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from soak_serve_attackers import ATTACKS, CHAT, COMPLETIONS, Attack
from soak_serve_process import GRACE, HERE, MORE_GRACE, SHAPE, Server, Watcher

from xinfer_jax.errors import InputError

FACTOR = 3.0
EXTRA = 0.5  # a 99th percentile may be so many times that without an attack, and these seconds
GROWTH = 200
LOG = 10  # MiB: of memory, and of the log
WARM = 60.0
SETTLED = 5.0  # seconds that a call of the warm-up, and calm after an attack, may take
LAST = 2.0  # seconds that a call may go on after the end of an attack's time: the attacker goes on, too
CALL = dict(prompt="What is the capital of France?", max_tokens=16, ignore_eos=True, temperature=0)


def run(names: Sequence[str], calls: int, seconds: float, options: Sequence[str]) -> int:
    """Runs attacks one after the other, and prints what was found.

    Args:
        names: of attacks, or "all".
        calls: of the second client, in each.
        seconds: after which an attack ends, however many calls were answered.
        options: flags of the server that name a model.

    Returns:
        The exit code: 1 where a bar is missed.

    Raises:
        InputError: no attack has that name, or the server does not start.
    """
    wanted = list(ATTACKS) if list(names) == ["all"] else list(names)
    for name in wanted:
        if name not in ATTACKS:
            raise InputError(f"no attack is called {name!r}: use all, or some of {', '.join(ATTACKS)}")
    alone, text = quiet(calls, options)
    rows = [attacked(name, calls, seconds, options, alone, text) for name in wanted]
    found = [ended(max(rows, key=lambda row: row["p99_ms"])["attack"], seconds, options)]
    table(alone, rows)
    return int(any(row["missed"] for row in (*rows, *found)))


@contextlib.contextmanager
def serving(options: Sequence[str], attack: Attack | None) -> Iterator[Server]:
    """A server that has been warmed up; killed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options, attack)
        try:
            warm_up(server)
            yield server
        finally:
            server.kill()


def warm_up(server: Server) -> None:
    """Some of everything, side by side, so that memory that is only taken once has been taken."""
    ids = [7 + i % 1000 for i in range(900)]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, CALL),
        (COMPLETIONS, dict(prompt=ids, max_tokens=100, ignore_eos=True)),
        (COMPLETIONS, dict(prompt=ids, max_tokens=0, echo=True, logprobs=1)),
        (COMPLETIONS, dict(prompt="a", max_tokens=50, n=4, logprobs=20, temperature=1.0)),
        (COMPLETIONS, dict(prompt="a", max_tokens=50, stream=True, stop=["b", "c"], logit_bias={"7": 2})),
        (COMPLETIONS, dict(prompt="a", max_tokens=50, allowed_token_ids=[7, 8], no_repeat_ngram_size=9)),
        (CHAT, dict(messages=[dict(role="user", content="Hello")] * 50, max_tokens=20)),
        ("/tokenize", dict(prompt="word " * 10_000)),
        ("/detokenize", dict(tokens=ids * 10)),
    ]
    with ThreadPoolExecutor(8) as pool:
        for status, text in pool.map(lambda one: server.send("POST", *one, seconds=WARM), bodies * 4):
            if status != "200":
                raise InputError(f"the server was not attacked yet, and answered {status} {text[:300]!r}")


def measured(server: Server, calls: int, end: float, text: str | None) -> dict[str, Any]:
    """What the second client saw: seconds of each call, statuses, answers other than the text."""
    seconds = list[float]()
    statuses = Counter[str]()
    wrong = 0
    while len(seconds) < calls and time.monotonic() < end:
        began = time.monotonic()
        status, data = server.send("POST", COMPLETIONS, CALL, end - began + LAST)
        seconds.append(time.monotonic() - began)
        statuses[status] += 1
        if status == "200":
            found = json.loads(data)["choices"][0]["text"]
            wrong += text not in (None, found)
            text = text or found
        else:
            time.sleep(0.1)
    order = sorted(seconds)
    p99 = order[math.ceil(0.99 * len(order)) - 1]
    times = dict(p50_ms=order[len(order) // 2], p99_ms=p99, worst_ms=order[-1])
    found = {name: round(1e3 * value, 1) for name, value in times.items()}
    return dict(calls=len(seconds), **found, statuses=dict(statuses), wrong=wrong, text=text)


def quiet(calls: int, options: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The same calls without an attack, and the text that they return."""
    with serving(options, None) as server:
        found = measured(server, calls, time.monotonic() + 300, None)
    text = found.pop("text")
    if not text or found["statuses"] != {"200": calls} or found["wrong"]:
        raise InputError(f"without an attack, the second client got {found['statuses']}: nothing to compare")
    print(json.dumps(dict(part="alone", **found)), flush=True)
    return found, text


@contextlib.contextmanager
def attacker(name: str, server: Server, seconds: float) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A process that is ready to attack for so long: what starts it, and what it said once it has ended."""
    job = dict(attack=name, port=server.port, context=SHAPE["capacity"], seconds=seconds)
    job["headers"] = {"content-type": "application/json"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, HERE / "soak_serve_attackers.py", json.dumps(job)]
    said: dict[str, Any] = {}
    process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdin and process.stdout
        process.stdout.readline()  # ready
        yield lambda: (process.stdin.write("\n"), process.stdin.flush()), said  # type: ignore[union-attr]
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired, ValueError):
            said.update(json.loads(process.communicate("\n", timeout=20)[0].splitlines()[-1]))
    finally:
        process.kill()
        process.wait()


def attacked(
    name: str, calls: int, seconds: float, options: Sequence[str], alone: dict[str, Any], text: str
) -> dict[str, Any]:
    """One attack: what the second client saw, the server's memory and health, and which bars were missed."""
    with serving(options, ATTACKS[name]) as server:
        with attacker(name, server, seconds + 10) as (begin, said):
            watcher = Watcher(server)
            end = time.monotonic() + seconds
            begin()
            time.sleep(1)
            found = measured(server, calls, end, text)
            died = server.process.poll() is not None
        settled = time.monotonic() + SETTLED
        while time.monotonic() < settled and not died:
            if measured(server, 1, settled, None)["worst_ms"] < 2 * alone["p99_ms"]:
                break
        after = server.resident()
        watcher.stop()
        ended, left = server.end()
        log = server.log.stat().st_size / 2**20
        last = server.said()[-300:] if died else ""
    del found["text"]
    found |= dict(
        attack=name, health=dict(watcher.health), health_worst_ms=round(1e3 * watcher.slowest, 1),
        before_mib=round(watcher.before), peak_mib=round(watcher.peak - watcher.before, 1),
        after_mib=round(after - watcher.before, 1), log_mib=round(log, 2), end_seconds=round(ended, 1),
        died=died, killed=watcher.killed, left_processes=len(left), attacker=said,
    )  # fmt: skip
    if last:
        found["last_words"] = last
    found["missed"] = missed(found, alone, calls)
    print(json.dumps(dict(part="attack", **found)), flush=True)
    return found


def missed(found: dict[str, Any], alone: dict[str, Any], calls: int) -> list[str]:
    """Names of the bars that an attack missed."""
    bars = dict(
        p99=found["p99_ms"] <= FACTOR * alone["p99_ms"] + 1e3 * EXTRA,
        status={*found["statuses"]} == {"200"},
        wrong=not found["wrong"],
        health={*found["health"]} == {"200"},
        memory=found["peak_mib"] < GROWTH,
        log=found["log_mib"] < LOG,
        end=found["end_seconds"] <= GRACE + MORE_GRACE and not found["left_processes"],
        died=not found["died"] and not found["killed"],
    )
    return [name for name, good in bars.items() if not good]


def ended(name: str, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    """SIGTERM in the middle of an attack."""
    with serving(options, ATTACKS[name]) as server:
        with attacker(name, server, seconds) as (begin, _):
            begin()
            time.sleep(5)
            took, left = server.end()
    found = dict(attack=name, end_seconds=round(took, 1), left_processes=len(left))
    found["missed"] = ["end"] if took > GRACE + MORE_GRACE or left else []
    print(json.dumps(dict(part="SIGTERM", **found)), flush=True)
    return found


def table(alone: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Markdown rows."""
    bar = FACTOR * alone["p99_ms"] + 1e3 * EXTRA
    times = f"99th percentile, worst (calls); at most {bar:.0f} ms"
    print(f"| attack | {times} | /health | MiB: peak, after | bars |")
    print("|---|---|---|---|---|")
    print(f"| none | {alone['p99_ms']:.0f}, {alone['worst_ms']:.0f} ms ({alone['calls']}) | | | |")
    for row in rows:
        name = row["attack"]
        what = ATTACKS[row["attack"]].what
        times = f"{row['p99_ms']:.0f}, {row['worst_ms']:.0f} ms ({row['calls']})"
        memory = f"{row['peak_mib']:+.0f}, {row['after_mib']:+.0f}"
        bars = "missed: " + ", ".join(row["missed"]) if row["missed"] else "kept"
        print(f"| `{name}`: {what} | {times} | {row['health_worst_ms']:.0f} ms | {memory} | {bars} |")
