"""Runs the programs of scripts/, and commands: in this process, whose imports and compiled programs they use,
or in processes with several virtual devices.
"""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import launcher
from absl import flags
from paths import ROOT, SCRIPTS

from xinfer_jax.cli.commands import COMMANDS
from xinfer_jax.cli.process import run_and_exit


def device_environment(count: int) -> dict[str, str]:
    """Returns the environment of a process that has so many virtual devices and imports as this one does.

    Its programs show what is computed where, not how fast: they are compiled with few optimizations, in a
    third of the time.
    """
    # XLA on CPUs may order independent all-reduces otherwise on each device, which then wait for each other.
    order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count} {order}"
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return os.environ | dict(
        PYTHONPATH=path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1"
    )


def run_on_devices(count: int, program: Path, *arguments: str) -> str:
    """Returns what a program prints on virtual devices."""
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, env=device_environment(count), capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


def run_tests_on_devices(count: int, file: Path) -> None:
    """Runs a file of tests on virtual devices."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", str(file)]
    env = device_environment(count) | {"PYTEST_ADDOPTS": ""}  # CI selects tests by it
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def functions(name: str) -> ModuleType:
    """Returns scripts/NAME.py as a module, whose flags have no values."""
    known = set(flags.FLAGS)
    try:
        return _import(name)
    finally:
        _remove_flags(known)


def _import(name: str) -> ModuleType:
    file = SCRIPTS / f"{name}.py"
    if str(file.parent) not in sys.path:  # as Python does for a program
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"program_{name}", file)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def _remove_flags(known: set[str]) -> None:
    """Another program may have flags of the same names."""
    for flag in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, flag)


def command(name: str, *arguments: str) -> SimpleNamespace:
    """Runs `xinfer-jax NAME` here and returns what a process would leave: returncode, stdout, stderr."""
    program = importlib.import_module(f"xinfer_jax.{COMMANDS[name].module}")
    out = io.StringIO()
    err = io.StringIO()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program.main([f"xinfer-jax {name}", *arguments])
        except SystemExit as end:
            code = end.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def run(name: str, *arguments: str) -> SimpleNamespace:
    """Runs scripts/NAME.py here and returns what a process would leave: returncode, stdout, stderr."""
    known = set(flags.FLAGS)
    out = io.StringIO()
    err = io.StringIO()
    started = launcher.STARTED
    argv = sys.argv
    launcher.STARTED = Path(f"{name}.py")
    sys.argv = [f"{name}.py", *arguments]
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program = _import(name)
            given = launcher.parse(sys.argv)
            run_and_exit(name, lambda: program.main(given))
        except SystemExit as end:
            code = end.code
        finally:
            launcher.STARTED = started
            sys.argv = argv
            _remove_flags(known)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
