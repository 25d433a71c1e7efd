"""What both commands do before the first token, and what a terminal shows meanwhile."""

import os
import tempfile
from collections.abc import Iterator

import jax

from ..checkpoint.files import checkpoint_dir
from ..checkpoint.loading import Model, load_model
from ..errors import one_line
from .terminal import status


def load(name: str | None, dtype: str | None, quantize: str | None) -> Model:
    """`load_model`; what is fetched from the hub first shows its own progress."""
    path = name and checkpoint_dir(name)
    with status("loading the model"):
        return load_model(path, dtype=dtype, quantize=quantize)


def from_the_first(pieces: Iterator[str]) -> Iterator[str]:
    """The same pieces; until the first of them comes, the status line says what takes so long."""
    with status("compiling and reading the prompt"):
        first = next(pieces, "")
    yield first
    yield from pieces


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
