"""The child process of section_runner.py: runs the cases of one section and prints a JSON line before and
after each.

check_gpu.py and check_tpu.py start it with a JSON object as argument: the section, the first case, the time
limit in seconds, the platform, whether shapes are tiny.
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

LEAVING = 70  # exit code: this process can no longer use the GPU


def main() -> None:
    plan = SimpleNamespace(**json.loads(sys.argv[1]))
    end = time.monotonic() + 0.92 * plan.seconds
    send = open_channel()
    faulthandler.enable()
    faulthandler.dump_traceback_later(
        max(plan.seconds - 1, 0.5)
    )  # prints where it hangs, before the parent kills it
    from gpu import section_cases

    if plan.section == "machine" and not plan.tiny and (why := section_cases.unusable_reason(plan.platform)):
        send(event="unsupported", why=why)
        return
    if plan.tiny and plan.platform == "tpu":
        import kernels_pallas

        with kernels_pallas.assume_device(None, "emulated", platform="tpu"):
            run_cases(plan, end, send)
    else:
        run_cases(plan, end, send)
    send(event="end")
    os._exit(0)  # without teardown, which may hang


def run_cases(plan: SimpleNamespace, end: float, send: Callable[..., None]) -> None:
    """Runs the cases of the section from the first one of the plan on, until `end`."""
    sections = sections_of(plan.platform)
    for number, case in enumerate(sections[plan.section](plan)):
        if number < plan.first:
            continue
        named = {"case": number, "name": case.name, **case.facts}
        if time.monotonic() > end:
            send(event="result", **named, skipped="out of time", ok=None)
            continue
        send(event="begin", **named)
        result = run_case(case)
        send(event="result", **named, **result)
        if "error" in result and not device_works():
            send(event="leaving")
            os._exit(LEAVING)


def sections_of(platform: str) -> dict[str, Callable]:
    """The sections that such a device may run, by name."""
    from gpu import (
        decoding_sections,
        kernel_sections,
        layer_sections,
        layout_sections,
        model_sections,
        section_cases,
        tpu_sections,
    )

    kernels = (tpu_sections,) if platform == "tpu" else (kernel_sections, layout_sections)
    sections = {"machine": section_cases.machine}
    for module in (*kernels, model_sections, decoding_sections, layer_sections):
        sections |= module.SECTIONS
    return sections


def open_channel() -> Callable[..., None]:
    """A function that prints a JSON line on standard output. All other output goes to standard error from now
    on.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        print(json.dumps(jsonable(message)), file=results, flush=True)

    return send


def run_case(case: Any) -> dict[str, Any]:
    """The results of the case or its exception, its seconds, and the seconds of compilation."""
    from xinfer_jax.stats import Stopwatch

    with Stopwatch() as watch:
        try:
            result = case.run()
        except Exception as error:  # the other cases still run
            result = {
                "error": f"{type(error).__name__}: {error}"[:1500],
                "traceback": traceback.format_exc()[-2000:],
            }
            result["ok"] = None if case.facts.get("optional") else False
    seconds = {"seconds": round(watch.seconds, 2), "compile_s": round(watch.compile_seconds, 2)}
    return seconds | result


def device_works() -> bool:
    """Whether the device still computes. For example, an illegal address breaks a CUDA context for good."""
    import jax.numpy as jnp

    try:
        return bool((jnp.zeros(8) + 1).sum() == 8)
    except Exception:
        return False


def jsonable(value: Any) -> Any:
    """The value with Python numbers for NumPy's; NaN, infinities and other objects become strings."""
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
