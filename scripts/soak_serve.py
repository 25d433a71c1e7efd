"""Sends a server malformed requests and attacks: nothing may break, leak or differ.

    python scripts/soak_serve.py --malformed=2000
    python scripts/soak_serve.py --attacks=all
    python scripts/soak_serve.py --attacks=flood,stop --calls=50 --attack_seconds=20

Without --attacks: a server with the bundled model runs in this process. Prints a JSON line. The exit code is
1 if there is a status of 500 or above, if rows or pages stay occupied, or if memory grew by 20 MiB or more.

With --attacks only attacks run. Each attack has a new server process: one client attacks it while a second
makes --calls small calls, first without the attack and then during it. Then the server gets SIGTERM.
soak/attacks.py defines the attacks, and the calls if they are others. Prints a JSON line for the calls
without an attack, and for each attack. The exit code is 1 in these cases:

- A 99th percentile is above three times the one without an attack plus half a second.
- The second client or /health gets a status other than 200.
- A text differs from the text without an attack.
- Memory (of the server and its worker processes, after a warm-up) grows by 200 MiB or more (400 for grammars,
  500 for adapters).
- A log has 10 MiB.
- A server needs more than five seconds beyond its --grace to exit.

Needs Linux and two idle cores, and about half an hour for all attacks.
"""

from launcher import start

# isort: split
import json
import random
import time

from absl import flags
from soak import attack_runs
from soak.server_requests import SETTINGS, malformed, resident, serve, wait_idle

import xinfer_jax as xj

MALFORMED = flags.DEFINE_integer("malformed", 2000, "Number of malformed requests.", lower_bound=1)
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8", "int4"], "Format of the weights.")
ATTACKS = flags.DEFINE_list("attacks", [], "Names of attacks, or all.")
CALLS = flags.DEFINE_integer("calls", 200, "Calls of the second client in each attack.", lower_bound=1)
ATTACK_SECONDS = flags.DEFINE_float(
    "attack_seconds", 60, "Longest duration of an attack, in seconds.", lower_bound=2
)
MOST = 20  # limit of the growth of memory, in MiB


def main(argv: list[str]) -> int:
    if ATTACKS.value:
        settings = dict(model=MODEL.value, quantize=QUANTIZE.value)
        options = [f"--{name}={value}" for name, value in settings.items() if value]
        return attack_runs.run(ATTACKS.value, CALLS.value, ATTACK_SECONDS.value, options)
    service, port = serve(xj.load_model(MODEL.value, quantize=QUANTIZE.value), SETTINGS, [])
    rng = random.Random(0)
    malformed(port, 200, rng)  # creates threads and caches
    while service.engine and service.engine.stats.warming_up:
        time.sleep(0.1)
    before_mib = resident()
    bad = malformed(port, MALFORMED.value, rng)
    idle = wait_idle(service, 20)
    grown_mib = round(resident() - before_mib, 1)
    print(json.dumps(dict(requests=MALFORMED.value, server_errors=bad, idle=idle, grown_mib=grown_mib)))
    return int(bool(bad) or not idle or grown_mib >= MOST)


if __name__ == "__main__":
    start(main)
