"""Sends a server malformed requests, clients that disconnect, and attacks: nothing may break, leak or differ.

    python scripts/soak_serve.py --malformed=2000 --clients=200 --seconds=60
    python scripts/soak_serve.py --attacks=all
    python scripts/soak_serve.py --attacks=flood,stop --calls=50 --attack_seconds=20

Without --attacks: a server with the bundled model runs in this process, many clients in another. Prints a
JSON line per part. Exit code 1: a status of 500 or above; an answer that differs from the one computed alone;
rows or pages that stay occupied; memory that grew by 20 MiB or more (for the clients: after a first run, a
tenth as long, that creates threads and caches, `first_mib`); or calls that are afterwards slower than the
third quartile before.

With --attacks only attacks run. Each attack has a new server process: one client attacks it while a second
makes --calls small calls, first without the attack and then during it; then the server gets SIGTERM.
soak/attacks.py defines the attacks, and the calls where they are other ones. Prints a JSON line for the calls
without an attack, and for each attack. Exit code 1: a 99th percentile above three times that without an
attack plus half a second; a status other than 200 for the second client or /health; a text that differs from
that without an attack; memory (of the server and its worker processes, after a warm-up) that grows by 200 MiB
or more (400 for grammars, 500 for adapters); a log of 10 MiB; or a server that needs more than five seconds
beyond its --grace to exit. Needs Linux and two idle cores; about half an hour for all attacks.
"""

from launcher import start

# isort: split
import json
import random
import statistics
import subprocess
import sys

from absl import flags
from soak import attack_runs
from soak.server_requests import SETTINGS, crowd, malformed, resident, serve, time_call, wait_idle

import xinfer_jax as xj

MALFORMED = flags.DEFINE_integer("malformed", 2000, "Number of malformed requests.", lower_bound=0)
CLIENTS = flags.DEFINE_integer("clients", 200, "Number of concurrent clients.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 60, "Seconds that the clients run.", lower_bound=1)
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8", "int4"], "Format of the weights.")
ATTACKS = flags.DEFINE_list("attacks", [], "Names of attacks, or all.")
CALLS = flags.DEFINE_integer("calls", 200, "Calls of the second client in each attack.", lower_bound=1)
ATTACK_SECONDS = flags.DEFINE_float(
    "attack_seconds", 60, "Longest duration of an attack, in seconds.", lower_bound=2
)
PORT = flags.DEFINE_integer("port", None, "Internal: port of the server, for a client process.")


def main(argv: list[str]) -> int:
    if PORT.value is not None:
        print(json.dumps(crowd(PORT.value, CLIENTS.value, SECONDS.value)))
        return 0
    if ATTACKS.value:
        settings = dict(model=MODEL.value, quantize=QUANTIZE.value)
        options = [f"--{name}={value}" for name, value in settings.items() if value]
        return attack_runs.run(ATTACKS.value, CALLS.value, ATTACK_SECONDS.value, options)
    model = xj.load_model(MODEL.value, quantize=QUANTIZE.value)
    service, port = serve(model, SETTINGS, [])
    rng = random.Random(0)
    failed = False
    before = [time_call(port) for _ in range(20)]
    start_mib = resident()
    if MALFORMED.value:
        bad = malformed(port, MALFORMED.value, rng)
        result = dict(requests=MALFORMED.value, server_errors=bad, grown_mib=round(resident() - start_mib, 1))
        print(json.dumps(dict(part="malformed", **result)), flush=True)
        failed = bool(bad) or result["grown_mib"] >= 20
    run_clients(port, SECONDS.value / 10)
    first = resident() - start_mib
    start_mib = resident()
    counts = run_clients(port, SECONDS.value)
    idle = wait_idle(service, 20)
    after = [time_call(port) for _ in range(20)]
    quarters = statistics.quantiles(before)
    median_after = statistics.median(after)
    result = dict(
        clients=CLIENTS.value, seconds=SECONDS.value, **counts, idle=idle, first_mib=round(first, 1),
        grown_mib=round(resident() - start_mib, 1), before_ms=[round(1e3 * x, 2) for x in quarters],
        after_ms=round(1e3 * median_after, 2),
    )  # fmt: skip
    print(json.dumps(dict(part="crowd", **result)), flush=True)
    failed |= bool(counts["wrong"]) or not idle or result["grown_mib"] >= 20 or median_after > quarters[2]
    return int(failed)


def run_clients(port: int, seconds: float) -> dict:
    """Runs clients in another process for some seconds, and returns their results."""
    command = [
        sys.executable,
        __file__,
        f"--port={port}",
        f"--clients={CLIENTS.value}",
        f"--seconds={seconds}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    start(main)
