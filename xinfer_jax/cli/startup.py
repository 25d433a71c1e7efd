"""The work of a command before its first token: processes, checkpoint, compilation, status lines."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from ..checkpoint.draft_loading import is_draft, load_draft
from ..checkpoint.loading import Checkpoint, Model, open_checkpoint
from ..errors import InputError, format_message, format_value
from ..formats.hub import HubOptions, checkpoint_path, split_revision
from ..processes.launcher import distributed_args
from ..sharding import MODEL, device_groups
from ..text import TextStream
from ..weights.params import activation_dtype
from .terminal import status

_DRAFT_NAMES = ("lookup", "mtp")  # values of --draft that name no files


def join_processes() -> int:
    """Connects to the other processes of the command, if any. Returns the number of this process."""
    if jax_args := distributed_args():
        jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM, as we do
        jax.distributed.initialize(**jax_args)
    return jax_args.get("process_id", 0)


def open_model(name: str | None, flags: Any, noun: str = "model") -> Checkpoint:
    """Opens a checkpoint with the settings of flags. A download shows its progress bar. noun: the word for it
    in errors. --revision belongs to the "model", and so does the head of --draft=mtp.
    """
    path = checkpoint_path(name, noun, HubOptions(flags.revision if noun == "model" else None))
    mesh = flags.mesh
    if distributed_args() and not mesh:
        mesh = f"model={jax.device_count()}"
    mesh = parse_mesh(mesh) if mesh else None
    with_head = noun == "model" and "draft" in flags and flags.draft == "mtp"
    options: dict[str, Any] = dict(dequantize=flags.dequantize, draft_head=with_head)
    with status("opening the model"):
        checkpoint = open_checkpoint(path, flags.dtype, flags.quantize, mesh, flags.activations, **options)
    name = split_revision(name)[0] if name else "bundled"
    model = dataclasses.replace(checkpoint.model, name=name)
    return dataclasses.replace(checkpoint, model=model)


def open_draft(flags: Any, model: Model) -> tuple[Any, list[Checkpoint]]:
    """Returns the draft that --draft names, for `GenerateOptions`, and the checkpoint of a draft model, whose
    weights are not read yet. model: the model that verifies the draft tokens.
    """
    draft = _named_draft(flags.draft, model)
    if not isinstance(draft, str) or draft in _DRAFT_NAMES:
        return draft, []
    checkpoint = open_model(draft, flags, "draft model")
    return checkpoint.model, [checkpoint]


def engine_draft(draft: Any, model: Model) -> Any:
    """Returns the draft that --draft names, for `EngineOptions`. Raises InputError if it names a model."""
    found = _named_draft(draft, model)
    if isinstance(found, str) and found not in _DRAFT_NAMES:
        raise InputError(
            f"--draft={format_value(found)} has no draft head, and draft models work only in xinfer-jax"
            " generate and chat: give lookup, mtp, or a draft head"
        )
    return found


def _named_draft(draft: str | None, model: Model) -> Any:
    """Returns None, "lookup", "mtp", or the head in a directory or a repository on the hub. Returns the name
    of any other checkpoint as it is.
    """
    if draft in (None, "none"):
        return None
    if draft in _DRAFT_NAMES or not is_draft(draft):
        return draft
    with status("loading the draft head"):
        return load_draft(draft, activation_dtype(model.params))


def check_devices(flags: Any) -> None:
    """Raises InputError if --data_parallel and --mesh need more devices than there are."""
    device_groups(flags.data_parallel, flags.mesh and list(parse_mesh(flags.mesh).devices.flat))


def parse_mesh(text: str) -> jax.sharding.Mesh:
    """Returns the mesh of --mesh=model=N: the first N devices."""
    if not re.fullmatch(r"model=[1-9]\d{0,5}", text):
        raise InputError(f"--mesh={format_value(text)} is not model=N, with N devices: give that")
    count = int(text.removeprefix("model="))
    devices = jax.devices()
    if count > len(devices):
        virtual = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes virtual devices of a CPU"
        raise InputError(f"--mesh={text} needs {count} devices, and {len(devices)} are here: {virtual}")
    if count < len(devices) and jax.process_count() > 1:
        raise InputError(f"--mesh={text} leaves out some of the processes' {len(devices)} devices: take all")
    return jax.make_mesh((count,), (MODEL,), devices=devices[:count])


def load_and_compile(prepare: Callable[[], object], *checkpoints: Checkpoint) -> list[Model]:
    """Loads weights, while the programs of `prepare` are compiled."""
    with ThreadPoolExecutor(1) as reader, status("loading the model and compiling"):
        models = reader.submit(lambda: [checkpoint.read() for checkpoint in checkpoints])
        prepare()
        return models.result()


def chunks_with_status(answer: TextStream) -> Iterator[str]:
    """Yields the chunks of an answer. A status line is shown until the first one."""
    with compile_status("prefilling the prompt", answer.prepare):
        first = next(answer, "")
    yield first
    yield from answer


@contextmanager
def compile_status(work: str, prepare: Callable[[], Any]) -> Iterator[None]:
    """Shows a status line for work that waits for compilation, with the number of compiled programs."""
    with status("preparing"):
        precompiler = prepare()

    def line() -> str:
        done = precompiler.num_compiled
        programs = precompiler.num_programs
        return work if done == programs else f"{work}: compiled {done} of {programs} programs"

    with status(line):
        yield


def use_compilation_cache(command: str, directory: str | None) -> None:
    """Sets the directory of jax's compilation cache. None: the directory of its environment variable, or the
    user's. "": no cache.
    """
    if directory is None:
        user = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "xinfer_jax")
        directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or user
    if not directory:
        return
    if "://" not in directory:  # jax also accepts the address of an object store
        directory = os.path.expanduser(directory)
        try:
            os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as probe:
                probe.write(b"x")
        except OSError as error:
            jax.config.update("jax_compilation_cache_dir", None)
            why = "not a directory" if isinstance(error, FileExistsError) else error.strerror
            line = f"compilation cache {directory} cannot be used ({why}): going on without it"
            status.log(f"{command}: {format_message(line)}")
            return
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
