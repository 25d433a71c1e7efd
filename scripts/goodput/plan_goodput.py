"""`plan.py --goodput`: meshes for prefill and decode apart, beside the best single engine. Imports jax."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from gpu import plan_estimates as estimates
from gpu.plan_estimates import Job

from goodput import placement
from goodput.device_times import Machine, computed_times, page_bytes, sizes_that_fit
from goodput.goodput_search import Workload, simulated_attainment
from goodput.placement import Group, Option
from goodput.simulated_engine import EngineSizes
from goodput.simulator import Deployment
from goodput.step_times import StepTimes

_PREFILL_ROWS = 16  # slots of a prefill engine: rows that prefill or wait until they have moved


class Cluster(NamedTuple):
    """Devices, in nodes whose devices have fast links.

    Attributes:
        devices: of all nodes.
        node: devices of a node.
        link_gbs: GB/s between nodes where links are slow, for each node.
    """

    machine: Machine
    devices: int
    node: int
    link_gbs: float


class Plan(NamedTuple):
    """What was found; None: nothing is within the limits."""

    engines: list[Option]
    prefill: list[Option]
    decode: list[Option]
    fast: Group | None
    slow: Group | None


def make_plan(job: Job, cluster: Cluster, capacity: int, workload_of: Callable[[int], Workload]) -> Plan:
    """Searches. workload_of: requests for so many engines; capacity: tokens of a row."""
    workload = workload_of(1)
    engines = [
        engine
        for n in estimates.valid_mesh_sizes(job)
        if n <= min(cluster.node, cluster.devices)
        if (engine := _engine(job, n, cluster, capacity, workload))
    ]
    prefill_engines = [(n, sizes._replace(rows=_PREFILL_ROWS), times) for n, sizes, times in engines]
    single = placement.phase_options(engines, workload, "both")
    prefill = placement.phase_options(prefill_engines, workload, "prefill")
    decode = placement.phase_options(engines, workload, "decode")

    def simulate(group: Group, between_nodes: bool) -> Group:
        link = cluster.machine.card.link_gbs * min(group.prefill.devices, group.decode.devices)
        gbs = cluster.link_gbs if between_nodes else link
        page = page_bytes(job, group.prefill.devices) * group.prefill.devices
        return placement.simulate_group(group, workload_of, page / gbs / 1e9)

    inside = partial(simulate, between_nodes=False)
    fast = placement.group_with_fast_links(prefill, decode, cluster.devices, inside)
    slow = placement.group_in_a_node(prefill, decode, min(cluster.node, cluster.devices), inside)
    if fast and fast.devices > cluster.node:
        across = simulate(fast, between_nodes=True)
        slow = max(filter(None, (slow, across)), key=lambda group: group.per_device)
    return Plan(single, prefill, decode, fast, slow)


def _engine(
    job: Job, n: int, cluster: Cluster, capacity: int, workload: Workload
) -> tuple[int, EngineSizes, StepTimes] | None:
    """Devices, sizes and times of an engine on n devices; None: it does not fit."""
    sizes = sizes_that_fit(job, n, cluster.machine, capacity, workload.mean_tokens, workload.tpot)
    if sizes is None:
        return None
    gbs = n * cluster.machine.card.link_gbs
    return n, sizes, computed_times(dataclasses.replace(job, rows=sizes.rows), n, cluster.machine, gbs)


# --- output -------------------------------------------------------------------------------------------------


def print_plan(
    plan: Plan, cluster: Cluster, rate: float | None, workload_of: Callable[[int], Workload]
) -> None:
    """Prints the tables, the deployments, what a rate needs, and JSON as the last line."""
    if not plan.engines:
        print(f"It fits on no mesh of at most {min(cluster.node, cluster.devices)} devices")
        return
    print("\nside      mesh       slots   pages   requests/s   and device")
    for side, options in (("engine", plan.engines), ("prefill", plan.prefill), ("decode", plan.decode)):
        for o in options:
            sizes = f"{o.sizes.rows:8,}{o.sizes.pages:8,}"
            print(f"{side:10}model={o.devices:<4}{sizes}{o.goodput:13.3g}{o.per_device:13.3g}")
    single = placement.best_option(plan.engines)
    print(f"\nOne engine: {_text(single)}")
    for name, group in (("fast", plan.fast), ("slow", plan.slow)):
        print(f"Apart, {name} links between nodes: {_group_text(group, single)}")
    if rate:
        _print_counts(plan, single, rate, workload_of)
    groups = {
        name: group and _group_json(group) for name, group in (("fast", plan.fast), ("slow", plan.slow))
    }
    meshes = {f"model={option.devices}": option.per_device for option in plan.engines}
    print(json.dumps(dict(engine_per_device=meshes, **groups)))


def _text(option: Option | None) -> str:
    if option is None:
        return "90% are within both limits on no mesh at any rate"
    return f"model={option.devices}, {option.per_device:.3g} requests per second and device"


def _group_text(group: Group | None, single: Option | None) -> str:
    if group is None or not group.goodput:
        return "90% are within both limits in no such group at any rate"
    engines = (
        f"{group.num_prefill} x model={group.prefill.devices} and"
        f" {group.num_decode} x model={group.decode.devices} on {group.devices} devices"
    )
    ratio = f", {group.per_device / single.per_device:.2f} times one engine's" if single else ""
    return f"{engines}, {group.per_device:.3g} requests per second and device{ratio}"


def _group_json(group: Group) -> dict[str, Any]:
    meshes = dict(prefill_mesh=group.prefill.devices, decode_mesh=group.decode.devices)
    counts = dict(prefill=group.num_prefill, decode=group.num_decode, devices=group.devices)
    return meshes | counts | dict(goodput=group.goodput, per_device=group.per_device)


def _print_counts(
    plan: Plan, single: Option | None, rate: float, workload_of: Callable[[int], Workload]
) -> None:
    """Prints how many engines a rate needs."""
    if single:
        count = placement.count_for(rate, single)
        print(f"{rate:g} requests/s: {count} x model={single.devices}, {count * single.devices} devices")
    if not plan.fast:
        return
    prefill = plan.fast.prefill
    decode = plan.fast.decode
    counts = placement.count_for(rate, prefill), placement.count_for(rate, decode)
    sides = Deployment(prefill.sizes, prefill.times, 0, *counts, decode.sizes, decode.times)
    found = simulated_attainment(sides, workload_of(max(counts)), rate)
    devices = counts[0] * prefill.devices + counts[1] * decode.devices
    print(
        f"{rate:g} requests/s: {counts[0]} x model={prefill.devices} that prefill and {counts[1]} x"
        f" model={decode.devices} that decode, {devices} devices: {found.both:.0%} within both limits"
    )
