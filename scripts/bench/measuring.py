"""What the measuring programs share: facts about a run, numbers of flags, random models."""

import importlib.metadata
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jax
from absl import flags

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.host import cpu_count


def about() -> dict[str, Any]:
    """Command, date, versions and machine of this run."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return dict(
        command=shlex.join(["python", *sys.argv]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions | {"python": platform.python_version()},
        device=f"{jax.devices()[0].device_kind}, {cpu_count()} cores",
    )


def whole_numbers(flag: flags.FlagHolder, least: int = 1) -> list[int]:
    """The numbers of a list flag."""
    if not flag.value or not all(x.isascii() and x.isdigit() and int(x) >= least for x in flag.value):
        raise xj.InputError(
            f"--{flag.name}={','.join(flag.value)}: give whole numbers from {least} on, with commas between"
        )
    return [int(x) for x in flag.value]


def chosen(flag: flags.FlagHolder, known: Sequence[str]) -> list[str]:
    """The values of a list flag, all of which are known."""
    if not flag.value or not {*flag.value} <= {*known}:
        raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: choose among {', '.join(known)}")
    return flag.value


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def random_model(hf: dict[str, Any], dtype: str | None, quantize: str | None) -> xj.Model:
    """A model of a config.json with random weights. quantize: None or "none": float weights."""
    config = from_hf(hf)
    params = xj.init_params(config, jax.random.key(0), dtype, None if quantize == "none" else quantize)
    return xj.Model(jax.block_until_ready(params), config, None, {}, xj.LoadStats(0.0, 0, dtype or ""))
