"""The flags of processes that run one model together, and the settings that they must share. Without jax."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError, format_message
from ..formats.hub import HubOptions, checkpoint_path, is_gguf
from ..processes.channel import parse_host_port
from ..processes.coordinator import GroupMember
from ..processes.launcher import Supervisor, become_child
from .flag_parser import FlagParser, version
from .process import capture_signals
from .terminal import status

# Flags that may differ between processes. Of the model the files are compared, not their path.
_OWN = {
    "coordinator", "process_id", "log_dir", "start_seconds", "compilation_cache", "model", "revision", "host",
    "port", "api_key_file", "secret_file",
}  # fmt: skip
_SEVERAL = ("data_parallel", "prefill_devices", "decode_devices")  # engines
_SAMPLE = 1 << 14  # bytes that are read at each of 64 offsets of a safetensors file
_HEADER = 2**24  # bytes of a GGUF file
_DETECT = """import json
from jax._src.clusters import ClusterEnv
print(json.dumps(ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [0], None, 60)[:3]))"""


def define_processes(parser: FlagParser) -> None:
    """Defines flags for several processes that run one model."""
    parser.group = "several processes"
    parser.add_text(
        "coordinator",
        "Run one model in several processes, of which this is one: HOST:PORT of process 0; or auto: taken"
        " from the cluster (SLURM, Open MPI, Kubernetes, the hosts of a TPU slice).",
        empty="give HOST:PORT or auto",
    )
    parser.add_integer("num_processes", "Number of processes.", least=1)
    parser.add_integer(
        "process_id", "Number of this process, from 0 on. Process 0 does all input and output."
    )
    parser.add_text(
        "secret_file",
        "File of mode 0600 with 32 or more random bytes, the same for all processes. They sign their messages"
        " with it. Required on several machines; on one machine the default is a file of the user.",
        empty="give a file",
    )
    parser.add_integer("start_seconds", "Seconds for all processes to connect.", default=300, least=1)
    parser.add_text(
        "log_dir",
        "Directory for the logs of jax in several processes. Default: a new one.",
        empty="give a directory",
    )


def supervise(parser: FlagParser) -> int | None:
    """Runs the command in a child until all processes have ended, if flags make it one of several. Returns
    the exit code. None: go on in this process, which is such a child or alone.
    """
    if become_child() or (member := member_from_flags(parser.values)) is None:
        return None
    flags = parser.values
    if directory := flags.log_dir:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--log_dir={directory} cannot be made: {error.strerror}") from error
    supervisor = Supervisor(member, flags.start_seconds, directory, flags.secret_file)
    with capture_signals() as stop:
        code, line = supervisor.run(lambda: shared_settings(parser), stop)
    if line:
        status.log(f"{parser.name}: {format_message(line)}")
    return code


def member_from_flags(flags: Any) -> GroupMember | None:
    """Returns the group and this process's number in it, from flags or the cluster. Returns None if the
    process runs alone.
    """
    known = flags.coordinator, flags.num_processes, flags.process_id
    if known[0] is None:
        peers = any(name in flags and flags[name].value for name in ("peers", "peer", "weight_address"))
        for name in ("num_processes", "process_id", "log_dir", "start_seconds", "secret_file"):
            if not (peers and name == "secret_file") and flags[name].value != flags[name].default:
                raise InputError(f"--{name} does nothing without --coordinator: give that too")
        return None
    several = [name for name in _SEVERAL if name in flags and flags[name].value != flags[name].default]
    if several:
        given = f"--{several[0]}={flags[several[0]].value}"
        raise InputError(f"{given} does not go with --coordinator: start a command for each")
    if known[0] == "auto":
        known = _detect_cluster(known[1:])
    address, processes, number = known
    where = parse_host_port("--coordinator", address, 1, ", or auto")
    for name, value in (("num_processes", processes), ("process_id", number)):
        if value is None:
            raise InputError(f"--{name} is missing: give it, or --coordinator=auto on a cluster")
    if number >= processes:
        raise InputError(f"--process_id={number} must be below --num_processes={processes}")
    return GroupMember(*where, processes, number)


def _detect_cluster(given: Any) -> tuple[str, int, int]:
    """Returns the address, the number of processes and the process id as `jax.distributed.initialize` finds
    them. Values in `given` take precedence. A child process imports jax for this, and this process stays
    without jax.
    """
    run = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True)
    address, *found = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else (None,)
    if address is None:
        raise InputError("--coordinator=auto finds no cluster: give HOST:PORT of process 0")
    processes, number = (own if own is not None else other for own, other in zip(given, found, strict=True))
    return address, processes, number


def shared_settings(parser: FlagParser) -> dict[str, str]:
    """Returns the settings that must be the same in all processes, by name: flags, versions, digests of
    files.
    """
    flags = parser.values
    same = {f"--{name}": str(flags[name].value) for name in flags if name not in _OWN}
    same["the version"] = version()
    for name in ("model", "draft"):
        path = flags[name].value if name in flags else "none"
        if path not in ("lookup", "mtp", "none") and (path or name == "model"):
            hub = HubOptions(flags.revision if name == "model" else None)
            directory = checkpoint_path(path or None, f"--{name}", hub)
            files = [*directory.glob("*"), *directory.glob("additional_chat_templates/*")]
            files = [file for file in sorted(files) if file.suffix in (".json", ".jinja", ".safetensors")]
            files += [directory] * is_gguf(directory)
            same |= {f"{file.name} of --{name}": _digest(file) for file in files}
    return same


def _digest(file: Path) -> str:
    """Returns the digest of a file. For weights it covers the size, the header and samples of the numbers."""
    size = file.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            sha.update(opened.read(min(size, 8 + int.from_bytes(opened.read(8), "little"))))
        else:
            sha.update(opened.read(_HEADER if is_gguf(file) else size))
        for at in range(opened.tell(), size, max(_SAMPLE, size // 64)):
            opened.seek(at)
            sha.update(opened.read(_SAMPLE))
    return sha.hexdigest()[:12]
