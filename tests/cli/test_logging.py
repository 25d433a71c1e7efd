"""The library logs by the logger "xinfer_jax", and prints nothing. Commands show what it logs."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import tiny
from paths import ROOT

from xinfer_jax.cli.terminal import log_on_terminal

pytestmark = pytest.mark.oldest


def process(*args) -> subprocess.CompletedProcess:
    environment = os.environ | dict(PYTHONPATH=str(ROOT))
    return subprocess.run(
        [sys.executable, *map(str, args)], env=environment, capture_output=True, text=True, timeout=300
    )


def test_what_the_library_logs_is_on_standard_error(capsys):
    """Lines are printed as they are, and warnings as Python's. Afterwards the logger is as before."""
    logger = logging.getLogger("xinfer_jax.engine.engine")
    with log_on_terminal("xinfer-jax"):
        logger.debug("nobody asked")
        logger.info("%s rows, ready in 1.0 s", 4)
        logger.warning("two\nlines")
        logger.error("the engine has failed: ValueError: no")
    logger.info("nobody asked")
    lines = "4 rows, ready in 1.0 s", "xinfer-jax: two lines", "the engine has failed: ValueError: no"
    assert capsys.readouterr().err.splitlines() == [*lines]
    library = logging.getLogger("xinfer_jax")
    assert (library.level, library.propagate, library.handlers) == (logging.NOTSET, True, [])


def test_without_settings_of_logging_python_shows_warnings_only(tmp_path):
    tensor = {"v_head.weight": np.ones(1, np.float32)}  # that no model has
    tiny.write(tmp_path, weights=tiny.tensors() | tensor)
    program = f"import logging, xinfer_jax as xj; xj.load_model({str(tmp_path)!r})\n"
    program += "logging.getLogger('xinfer_jax.engine.engine').info('4 rows')"
    run = process("-c", program)
    said = "tensors that are not read, since no model has them: v_head.weight (1)"
    assert run.stderr == f"{tmp_path}: {said}\n"
    command = process(
        "-m", "xinfer_jax", f"--model={tmp_path}", "--prompt=a", "--max_tokens=1", "--compilation_cache="
    )
    assert command.stderr.splitlines()[0] == f"xinfer-jax: {run.stderr.rstrip()}"
