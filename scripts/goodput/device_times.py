"""Step times of an engine on a mesh of GPUs or TPUs that need not be here, from bytes and FLOP at
the rates of data sheets. Imports jax.
"""

import dataclasses
import re
from collections.abc import Callable

from bench.model_shapes import hf_config
from bench.model_work import prefill_work
from gpu import plan_estimates as estimates
from gpu.card_specs import CARDS, TPUS, Card, Tpu
from gpu.plan_estimates import Job, Limits

from goodput.simulator import EngineSizes
from goodput.step_times import StepTimes
from xinfer_jax.cache.page_size import PAGE_SIZE
from xinfer_jax.errors import InputError
from xinfer_jax.families.reading import from_hf

KINDS: dict[str, Card | Tpu] = {**CARDS, **TPUS}
_HOST_GBS = 25  # of a device to host memory: PCIe 4 with 16 lanes


def parse_devices(text: str) -> tuple[int, Card | Tpu]:
    """The number of devices in COUNTxKIND, and their data sheet."""
    match = re.fullmatch(r"(\d+)x(\w+)", text)
    if not match or match[2] not in KINDS or not 1 <= int(match[1]) <= estimates.MOST_DEVICES:
        known = f"1 to {estimates.MOST_DEVICES} of {', '.join(KINDS)}"
        raise InputError(f"--devices takes {known}, as in 8xh200: got {text!r}")
    return int(match[1]), KINDS[match[2]]


def times_of_shape(model: str, devices: str, sizes: EngineSizes) -> StepTimes:
    """Times of an engine of a model in bfloat16, a built-in shape or a directory with config.json, on devices
    COUNTxKIND.
    """
    n, card = parse_devices(devices)
    job = Job(from_hf(hf_config(model)), "bfloat16", "bfloat16", sizes.rows, sizes.capacity, sizes.chunk)
    if bad := estimates.indivisible_sizes(job, n):
        raise InputError(f"{n} devices do not divide {bad} of {model}: choose others in --devices")
    return computed_times(job, n, card, n * card.link_gbs)


def computed_times(job: Job, n: int, card: Card | Tpu, move_gbs: float) -> StepTimes:
    """Times of an engine on n devices, with the rows and the chunk of the job. Each is the larger of two
    lines: memory, and compute, with links. move_gbs: GB/s of the pages that move to or from this engine.
    """
    page = page_bytes(job, n) * n

    def lines(limits: Callable[[int], Limits], tokens: int) -> list[list[float]]:
        ends = [(at, limits(at)) for at in (tokens, 2 * tokens)]
        links = ends[0][1].links
        found = []
        for kind in ("memory", "compute"):
            first, second = (getattr(of, kind) for _, of in ends)
            found.append([2 * first - second + links, (second - first) / tokens])
        return found

    return StepTimes(
        chunk=lines(lambda start: _prefill_limits(job, n, card, start, job.chunk), 1024),
        page=lines(lambda start: _prefill_limits(job, n, card, start, PAGE_SIZE), 1024),
        decode=lines(lambda tokens: _decode_limits(job, n, card, tokens // job.rows), 512 * job.rows),
        swap=page / n / _HOST_GBS / 1e9,
        move=page / move_gbs / 1e9,
        move_call=state_bytes(job, n) / 2 * n / move_gbs / 1e9,
    )


def page_bytes(job: Job, n: int) -> int:
    """Bytes of a page on each of n devices."""
    one, two = (
        estimates.device_bytes(dataclasses.replace(job, context=pages * PAGE_SIZE), n).per_row
        for pages in (1, 2)
    )
    return two - one


def state_bytes(job: Job, n: int) -> int:
    """Bytes of a row beside its pages on each of n devices: a recurrent state and a snapshot of it."""
    return estimates.device_bytes(dataclasses.replace(job, context=PAGE_SIZE), n).per_row - page_bytes(job, n)


def _prefill_limits(job: Job, n: int, card: Card | Tpu, start: int, width: int) -> Limits:
    """Limits of a chunk of this width after `start` tokens."""
    before, after = (prefill_work(job.config, 0, [tokens]).flop for tokens in (start, start + width))
    moved = estimates.weight_bytes(job, n, width) + estimates.kv_bytes(job, n, start + width)
    return estimates.pass_limits(job, n, card, 1, width, moved, after - before)


def _decode_limits(job: Job, n: int, card: Card | Tpu, context: int) -> Limits:
    """Limits of a step of all rows, each with so many tokens."""
    return estimates.decode_limits(dataclasses.replace(job, context=context), n, card)
