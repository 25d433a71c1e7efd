"""A server under bodies that make no sense and clients that go away: nothing may break, leak or differ.

    python scripts/soak_serve.py --malformed=2000 --clients=200 --seconds=60
    python scripts/soak_serve.py --attacks=all
    python scripts/soak_serve.py --attacks=flood,stop --calls=50 --attack_seconds=20

A server with the bundled model in this process, the crowd in another. Prints a JSON line a part. Exit
code 1: a status of 500 or above, an answer that differs from the one computed alone, rows or pages that stay
taken, memory that grew by 20 MiB or more (for the crowd: behind a first one, a tenth as long, that leaves
threads and caches, `first_mib`), calls that are slower afterwards than the slower quarter before, or a first
token that takes more than three times as long beside another client's flood.

With --attacks nothing of that runs. A server process, new for each attack, is attacked by one client while a
second one makes --calls small calls; soak_serve_attackers.py has the attacks. Prints a JSON line for the
calls without an attack, for each attack, and for SIGTERM in the middle of the worst one, then a table. Exit
code 1: a 99th percentile above three times that without an attack and half a second more, a status other than
200 for the second client or /health, another text than without an attack, memory (of the server and its
worker processes, after a warm-up) that grows by 200 MiB or more, a log of 10 MiB, or a server that needs more
than five seconds beyond its --grace to end. Needs Linux and two idle cores; about twelve minutes for all.
"""

from one_line import start

# isort: split
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
from functools import partial

import soak_serve_attacks
from absl import flags
from soak_serve_requests import SETTINGS, crowd, flood, malformed, resident, serve, timed, wait_idle

import xinfer_jax as xj

MALFORMED = flags.DEFINE_integer("malformed", 2000, "Requests that make no sense.", lower_bound=0)
CLIENTS = flags.DEFINE_integer("clients", 200, "At a time.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 60, "That they stay.", lower_bound=1)
FLOOD = flags.DEFINE_integer("flood", 500, "Requests of one client, beside another.", lower_bound=0)
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled one.")
QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8", "int4"], "Its weights.")
ATTACKS = flags.DEFINE_list("attacks", [], "Names of attacks, or all.")
CALLS = flags.DEFINE_integer("calls", 200, "Of the second client, in each attack.", lower_bound=1)
ATTACK_SECONDS = flags.DEFINE_float("attack_seconds", 60, "That an attack lasts at most.", lower_bound=2)
PORT = flags.DEFINE_integer("port", None, "Client: where to ask.")


def main(argv: list[str]) -> int:
    if PORT.value is not None:
        flooded = flood(PORT.value, FLOOD.value, ("one", "other")) if FLOOD.value else None
        print(json.dumps(flooded or crowd(PORT.value, CLIENTS.value, SECONDS.value)), flush=True)
        os._exit(0)  # the flood is still there
    if ATTACKS.value:
        given = dict(model=MODEL.value, quantize=QUANTIZE.value)
        options = [f"--{name}={value}" for name, value in given.items() if value]
        return soak_serve_attacks.run(ATTACKS.value, CALLS.value, ATTACK_SECONDS.value, options)
    model = xj.load_model(MODEL.value, quantize=QUANTIZE.value)
    service, port = serve(model, SETTINGS, [])
    rng = random.Random(0)
    failed = False
    before = [timed(port) for _ in range(20)]
    began = resident()
    if MALFORMED.value:
        bad = malformed(port, MALFORMED.value, rng)
        found = dict(requests=MALFORMED.value, server_errors=bad, grown_mib=round(resident() - began, 1))
        print(json.dumps(dict(part="malformed", **found)), flush=True)
        failed = bool(bad) or found["grown_mib"] >= 20
    a_crowd = partial(elsewhere, port, f"--clients={CLIENTS.value}", "--flood=0")
    a_crowd(f"--seconds={SECONDS.value / 10}")
    first = resident() - began
    began = resident()
    counted = a_crowd(f"--seconds={SECONDS.value}")
    idle = wait_idle(service, 20)
    after = [timed(port) for _ in range(20)]
    quarters = statistics.quantiles(before)
    now = statistics.median(after)
    found = dict(
        clients=CLIENTS.value, seconds=SECONDS.value, **counted, idle=idle, first_mib=round(first, 1),
        grown_mib=round(resident() - began, 1), before_ms=[round(1e3 * x, 2) for x in quarters],
        after_ms=round(1e3 * now, 2),
    )  # fmt: skip
    print(json.dumps(dict(part="crowd", **found)), flush=True)
    failed |= bool(counted["wrong"]) or not idle or found["grown_mib"] >= 20 or now > quarters[2]
    if FLOOD.value:
        service.close()
        _, port = serve(model, dataclasses.replace(SETTINGS, api_keys=(b"one", b"other")), [])
        found = elsewhere(port, f"--flood={FLOOD.value}")
        print(json.dumps(dict(part="flood", requests=FLOOD.value, **found)), flush=True)
        failed |= found["times"] > 3
    return int(failed)


def elsewhere(port: int, *told: str) -> dict:
    """What clients in another process saw."""
    command = [sys.executable, __file__, f"--port={port}", *told]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    start(main)
