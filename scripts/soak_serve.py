"""A server under bodies that make no sense and clients that go away: nothing may break, leak or differ.

    python scripts/soak_serve.py --malformed=2000 --clients=200 --seconds=60

A server with the bundled model in this process, the crowd in another. Prints a JSON line a part. Exit
code 1: a status of 500 or above, an answer that differs from the one computed alone, rows or pages that stay
taken, memory that grew by 20 MiB or more (for the crowd: behind a first one, a tenth as long, that leaves
threads and caches, `first_mib`), calls that are slower afterwards than the slower quarter before, or a first
token that takes more than three times as long beside another client's flood.
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

from absl import flags
from soak_serve_requests import SETTINGS, crowd, flood, malformed, resident, serve, timed, wait_idle

import xinfer_jax as xj

MALFORMED = flags.DEFINE_integer("malformed", 2000, "Requests that make no sense.", lower_bound=0)
CLIENTS = flags.DEFINE_integer("clients", 200, "At a time.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 60, "That they stay.", lower_bound=1)
FLOOD = flags.DEFINE_integer("flood", 500, "Requests of one client, beside another.", lower_bound=0)
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled one.")
QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8", "int4"], "Its weights.")
PORT = flags.DEFINE_integer("port", None, "Client: where to ask.")


def main(argv: list[str]) -> int:
    if PORT.value is not None:
        flooded = flood(PORT.value, FLOOD.value, ("one", "other")) if FLOOD.value else None
        print(json.dumps(flooded or crowd(PORT.value, CLIENTS.value, SECONDS.value)), flush=True)
        os._exit(0)  # the flood is still there
    model = xj.load_model(MODEL.value, quantize=QUANTIZE.value)
    service, port = serve(model, SETTINGS, [])
    rng, failed = random.Random(0), False
    before = [timed(port) for _ in range(20)]
    began = resident()
    if MALFORMED.value:
        bad = malformed(port, MALFORMED.value, rng)
        found = dict(requests=MALFORMED.value, server_errors=bad, grown_mib=round(resident() - began, 1))
        print(json.dumps(dict(part="malformed", **found)), flush=True)
        failed = bool(bad) or found["grown_mib"] >= 20
    a_crowd = partial(elsewhere, port, f"--clients={CLIENTS.value}", "--flood=0")
    a_crowd(f"--seconds={SECONDS.value / 10}")
    first, began = resident() - began, resident()
    counted = a_crowd(f"--seconds={SECONDS.value}")
    idle = wait_idle(service, 20)
    after = [timed(port) for _ in range(20)]
    quarters, now = statistics.quantiles(before), statistics.median(after)
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
