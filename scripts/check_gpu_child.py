"""The other end of check_gpu_runner.py: runs the cases of one section and prints a JSON line before and after
each.

Started by check_gpu.py with a JSON object as its argument: the section, the first case, the seconds it has,
whether shapes are tiny.
"""

import faulthandler
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

LEAVING = 70  # exit code: nothing on this GPU works any more for this process


def main() -> None:
    plan = SimpleNamespace(**json.loads(sys.argv[1]))
    end = time.monotonic() + 0.92 * plan.seconds
    say = speaker()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(plan.seconds - 1, 0.5))  # where it hangs, for who kills it
    import check_gpu_kernels
    import check_gpu_measure
    import check_gpu_models

    if plan.section == "machine" and not plan.tiny and (why := check_gpu_measure.unusable()):
        return say(event="refuse", why=why)
    sections = {"machine": check_gpu_measure.machine} | check_gpu_kernels.SECTIONS | check_gpu_models.SECTIONS
    for number, case in enumerate(sections[plan.section](plan)):
        if number < plan.first:
            continue
        named = {"case": number, "name": case.name, **case.facts}
        if time.monotonic() > end:
            say(event="result", **named, skipped="out of time", ok=None)
            continue
        say(event="begin", **named)
        found = outcome(case)
        say(event="result", **named, **found)
        if "error" in found and not sound():
            say(event="leaving")
            os._exit(LEAVING)
    say(event="end")
    os._exit(0)  # no tear-down, which may hang too


def speaker() -> Callable[..., None]:
    """Prints a JSON line on standard output, which from now on is standard error for everybody else."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(jsonable(message)), file=results, flush=True)

    return say


def outcome(case: Any) -> dict[str, Any]:
    """What the case found, its seconds, and apart those of compiling; an exception is a finding too."""
    from xinfer_jax.stats import Stopwatch

    with Stopwatch() as watch:
        try:
            found = case.run()
        except Exception as error:  # whatever a case dies of, the others still run
            found = {
                "error": f"{type(error).__name__}: {error}"[:1500],
                "traceback": traceback.format_exc()[-2000:],
            }
            found["ok"] = None if case.facts.get("optional") else False
    seconds = {"seconds": round(watch.seconds, 2), "compile_s": round(watch.compile_seconds, 2)}
    return seconds | found


def sound() -> bool:
    """Whether the device still computes: an illegal address, say, ends a CUDA context for good."""
    import jax.numpy as jnp

    try:
        return bool((jnp.zeros(8) + 1).sum() == 8)
    except Exception:
        return False


def jsonable(value: Any) -> Any:
    """NumPy's numbers as Python's, and what is no number by its name."""
    if isinstance(value, dict):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


if __name__ == "__main__":
    main()
