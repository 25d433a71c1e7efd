"""Which processes run one model together, and what has to be the same in all of them: without jax."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.files import BUNDLED, checkpoint_dir
from ..errors import InputError
from .program import Program, version

# Of one process, or of the place where it runs. Of the model its files are compared, not where they are.
_OWN = {
    "coordinator", "process_id", "log_dir", "start_seconds", "compilation_cache", "model", "host", "port",
    "api_key_file", "secret_file",
}  # fmt: skip
_SAMPLE = 1 << 14  # bytes of numbers that are read at each of 64 places of a file
_DETECT = """import json
from jax._src.clusters import ClusterEnv
print(json.dumps(ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [0], None, 60)[:3]))"""


class Job(NamedTuple):
    """Process `id` of so many, which meet at process 0's host and port."""

    host: str
    port: int
    processes: int
    id: int


def define_processes(program: Program) -> None:
    """Several processes that run one model."""
    program.text(
        "coordinator",
        "This is one of several processes that run one model: HOST:PORT of process 0, or auto: as the cluster"
        " says (SLURM, Open MPI, Kubernetes).",
        empty="give HOST:PORT or auto",
    )
    program.integer("num_processes", "How many they are.", least=1)
    program.integer("process_id", "Which of them this is, from 0 on; 0 reads, writes, listens and decides.")
    program.text(
        "secret_file",
        "File of mode 0600 with 32 or more random bytes that all processes know, with which they sign their"
        " messages. Needed on several machines; on one the default is a file of yours.",
        empty="give a file",
    )
    program.integer("start_seconds", "Time for all of them to come.", default=300, least=1)
    program.text(
        "log_dir",
        "Directory for what jax says in several processes. Default: a new one.",
        empty="give a directory",
    )


def job_of(flags: Any) -> Job | None:
    """What flags, or the cluster, say of this process; None: it is alone.

    Raises:
        InputError: not enough is known, or it makes no sense.
    """
    known = flags.coordinator, flags.num_processes, flags.process_id
    if known[0] is None:
        for name in ("num_processes", "process_id", "log_dir", "start_seconds", "secret_file"):
            if flags[name].value != flags[name].default:
                raise InputError(f"--{name} does nothing without --coordinator: give that too")
        return None
    if "data_parallel" in flags and flags.data_parallel > 1:
        raise InputError(
            f"--data_parallel={flags.data_parallel} does not go with --coordinator: start a command for each"
        )
    if known[0] == "auto":
        known = _detected(known[1:])
    address, processes, number = known
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise InputError(f"--coordinator={address} must be HOST:PORT, or auto")
    for name, value in (("num_processes", processes), ("process_id", number)):
        if value is None:
            raise InputError(f"--{name} is missing: give it, or --coordinator=auto on a cluster")
    if number >= processes:
        raise InputError(f"--process_id={number} must be below --num_processes={processes}")
    return Job(host.strip("[]"), int(port), processes, number)


def _detected(given: Any) -> tuple[str, int, int]:
    """As `jax.distributed.initialize` finds it, but for what is given; jax is imported elsewhere."""
    run = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True)
    address, *found = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else (None,)
    if address is None:
        raise InputError("--coordinator=auto finds no cluster here: give HOST:PORT of process 0")
    processes, number = (own if own is not None else other for own, other in zip(given, found, strict=True))
    return address, processes, number


def compared(program: Program) -> dict[str, str]:
    """By name what has to be the same everywhere: flags, versions, files of checkpoints as digests.

    Raises:
        InputError: a checkpoint cannot be had.
    """
    flags = program.values
    same = {f"--{name}": str(flags[name].value) for name in flags if name not in _OWN}
    same["the version"] = version()
    for name in ("model", "draft"):
        path = flags[name].value if name in flags else "none"
        if path not in ("lookup", "none") and (path or name == "model"):
            directory = checkpoint_dir(path) if path else BUNDLED
            files = (file for file in sorted(directory.iterdir()) if file.suffix in (".json", ".safetensors"))
            same |= {f"{file.name} of --{name}": _digest(file) for file in files}
    return same


def _digest(file: Path) -> str:
    """Of all of it; of safetensors of the size, the header and some of the numbers."""
    size = file.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        numbers = file.suffix == ".safetensors"
        sha.update(opened.read(min(size, 8 + int.from_bytes(opened.read(8), "little")) if numbers else size))
        for at in range(opened.tell(), size, max(_SAMPLE, size // 64)):
            opened.seek(at)
            sha.update(opened.read(_SAMPLE))
    return sha.hexdigest()[:12]


def difference(told: dict[int, dict[str, str]]) -> str:
    """The first thing that is not the same in all processes; "": there is none."""
    first, *others = sorted(told)
    for other in others:
        for name in told[first] | told[other]:
            values = [told[i].get(name, "missing") for i in (first, other)]
            if values[0] != values[1]:
                where = f"{values[0]} on process {first} and {values[1]} on process {other}"
                return f"{name} is {where}: start all with the same flags, versions and checkpoint"
    return ""
