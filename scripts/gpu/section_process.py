"""The child process of section_runner.py: runs the cases of one section, and records each.

Its argument is a JSON object: the section, the first case, the time limit in seconds, the platform, whether
shapes are tiny, and the file of results.
"""

import faulthandler
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu.section_runner import add_record


def main() -> None:
    plan = SimpleNamespace(**json.loads(sys.argv[1]))
    end = time.monotonic() + 0.92 * plan.seconds
    add = partial(add_record, Path(plan.out), section=plan.section)
    faulthandler.enable()
    # Prints where it hangs, before the parent kills it.
    faulthandler.dump_traceback_later(max(plan.seconds - 1, 0.5))
    from gpu import section_cases

    if plan.section == "machine" and not plan.tiny and (why := section_cases.unusable_reason(plan.platform)):
        add(event="unsupported", why=why)
        return
    if plan.tiny and plan.platform == "tpu":
        from xinfer_jax import kernels_pallas

        with kernels_pallas.assume_device(None, "emulated", platform="tpu"):
            run_cases(plan, end, add)
    else:
        run_cases(plan, end, add)
    add(event="end")
    os._exit(0)  # without teardown, which may hang


def run_cases(plan: SimpleNamespace, end: float, add: Callable[..., None]) -> None:
    """Runs the cases of the section from the first one of the plan on, until `end`."""
    for number, case in enumerate(sections_of(plan.platform)[plan.section](plan)):
        if number < plan.first:
            continue
        named = {"case": number, "name": case.name, **case.facts}
        if time.monotonic() > end:
            add(event="result", **named, skipped="out of time", ok=None)
            continue
        add(event="begin", **named)
        result = run_case(case)
        add(event="result", **named, **jsonable(result))
        if "error" in result and not device_works():
            os._exit(1)  # another process runs the next case


def sections_of(platform: str) -> dict[str, Callable]:
    """Returns the sections that such a device may run, by name."""
    from gpu import kernel_sections, model_sections, section_cases

    own = kernel_sections.SECTIONS[platform] | model_sections.SECTIONS
    return {"machine": section_cases.machine, **own}


def run_case(case: Any) -> dict[str, Any]:
    """Returns the results of the case or its exception, its seconds, and the seconds of compilation."""
    from xinfer_jax.stats import Stopwatch

    with Stopwatch() as watch:
        try:
            result = case.run()
        except Exception as error:  # the other cases still run
            result = {
                "error": f"{type(error).__name__}: {error}"[:1500],
                "traceback": traceback.format_exc()[-2000:],
                "ok": False,
            }
    return {"seconds": round(watch.seconds, 2), "compile_s": round(watch.compile_seconds, 2)} | result


def device_works() -> bool:
    """Returns True if the device still computes. For example, an illegal address breaks a CUDA context for
    good.
    """
    import jax.numpy as jnp

    try:
        return bool((jnp.zeros(8) + 1).sum() == 8)
    except Exception:
        return False


def jsonable(value: Any) -> Any:
    """Returns the value with Python numbers in place of NumPy's. NaN, infinities and other objects become
    strings.
    """
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
