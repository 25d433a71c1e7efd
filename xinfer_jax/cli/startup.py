"""What both commands do before the first token, and what a terminal shows meanwhile."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from ..checkpoint.files import checkpoint_dir
from ..checkpoint.loading import Checkpoint, Model, open_checkpoint
from ..errors import InputError, one_line, shown
from ..generation.programs import Ahead
from ..sharding import MODEL, device_groups
from ..text import TextStream
from .terminal import status
from .watch import child


def join_processes() -> int:
    """Meets the other processes of the command, if there are any; which this one is."""
    if joins := child():
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is ours
        jax.distributed.initialize(**joins)
    return joins.get("process_id", 0)


def open_model(name: str | None, flags: Any) -> Checkpoint:
    """`open_checkpoint` as flags say; what is fetched from the hub first shows its own progress."""
    path = name and checkpoint_dir(name)
    mesh = flags.mesh
    if child() and not mesh:
        mesh = f"model={jax.device_count()}"
    over = mesh_named(mesh) if mesh else None
    with status("opening the model"):
        checkpoint = open_checkpoint(path, flags.dtype, flags.quantize, over, flags.activations)
    model = dataclasses.replace(checkpoint.model, name=name or "bundled")
    return dataclasses.replace(checkpoint, model=model)


def check_devices(flags: Any) -> None:
    """Raises InputError where --data_parallel and --mesh ask for more devices than there are."""
    device_groups(flags.data_parallel, flags.mesh and list(mesh_named(flags.mesh).devices.flat))


def mesh_named(text: str) -> jax.sharding.Mesh:
    """The first devices, as --mesh says it."""
    if not re.fullmatch(r"model=[1-9]\d{0,5}", text):
        raise InputError(f"--mesh={shown(text)} is not model=N, with N devices: give that")
    count = int(text.removeprefix("model="))
    devices = jax.devices()
    if count > len(devices):
        virtual = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes virtual ones of a CPU"
        raise InputError(f"--mesh={text} needs {count} devices, and {len(devices)} are here: {virtual}")
    if count < len(devices) and jax.process_count() > 1:
        raise InputError(f"--mesh={text} leaves out some of the processes' {len(devices)} devices: take all")
    return jax.make_mesh((count,), (MODEL,), devices=devices[:count])


def read_and_compile(prepare: Callable[[], object], *checkpoints: Checkpoint) -> list[Model]:
    """Reads weights while what `prepare` begins is compiled."""
    with ThreadPoolExecutor(1) as reader, status("loading the model and compiling"):
        models = reader.submit(lambda: [checkpoint.read() for checkpoint in checkpoints])
        prepare()
        return models.result()


def from_the_first(answer: TextStream) -> Iterator[str]:
    """Its pieces; until the first of them comes, the status line says what takes so long."""
    with waiting("reading the prompt", answer.prepare):
        first = next(answer, "")
    yield first
    yield from answer


@contextmanager
def waiting(work: str, prepare: Callable[[], Ahead]) -> Iterator[None]:
    """The status line of work that waits for programs, with how many of them are compiled."""
    with status("preparing"):
        ahead = prepare()

    def line() -> str:
        done = ahead.done
        programs = ahead.programs
        return work if done == programs else f"{work}: compiled {done} of {programs} programs"

    with status(line):
        yield


def keep_compiled_programs(command: str, directory: str | None) -> None:
    """Has jax keep its programs in a directory; None: its environment variable's, or the user's; "": none."""
    if directory is None:
        user = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "xinfer_jax")
        directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or user
    if not directory:
        return
    if "://" not in directory:  # jax takes addresses of object stores too
        directory = os.path.expanduser(directory)
        try:
            os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as probe:
                probe.write(b"x")
        except OSError as error:
            jax.config.update("jax_compilation_cache_dir", None)
            why = "not a directory" if isinstance(error, FileExistsError) else error.strerror
            line = one_line(f"compilation cache {directory} cannot be used ({why}): going on without it")
            status.say(f"{command}: {line}")
            return
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
