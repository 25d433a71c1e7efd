"""Programs of scripts/, run in this process: what they import and compile is there already."""

import contextlib
import importlib.util
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from absl import flags

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "examples")]

import one_line  # noqa: E402

from xinfer_jax.cli.process import finish  # noqa: E402


def on_devices(count: int) -> dict[str, str]:
    """The environment of a process that has so many virtual devices. Its programs say what is computed
    where, not how fast: LLVM may leave its optimizations out, a third of what compiling takes.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")


def run(name: str, *arguments: str) -> SimpleNamespace:
    """What a process of scripts/NAME.py would leave: returncode, stdout, stderr."""
    known = set(flags.FLAGS)
    out = io.StringIO()
    err = io.StringIO()
    spec = importlib.util.spec_from_file_location(f"program_{name}", ROOT / "scripts" / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    started = one_line.STARTED
    argv = sys.argv
    one_line.STARTED = Path(f"{name}.py")
    sys.argv = [f"{name}.py", *arguments]
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            spec.loader.exec_module(program)
            given = one_line.parse(sys.argv)
            finish(name, lambda: program.main(given))
        except SystemExit as end:
            code = end.code
        finally:
            one_line.STARTED = started
            sys.argv = argv
            for flag in set(flags.FLAGS) - known:  # another program may have one of the same name
                delattr(flags.FLAGS, flag)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
