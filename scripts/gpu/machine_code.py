"""Registers and spills of compiled kernels: their PTX, as XLA and Mosaic write it to a folder, assembled by
ptxas. Does not import jax.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def dump_settings(folder: str) -> dict[str, str]:
    """Environment variables with which a process writes its kernels' PTX to a folder; jax and Mosaic read
    them when they are imported.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_emitter_re=ptx"
    return {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder, "XLA_FLAGS": flags}


def empty(folder: str) -> None:
    """Deletes what earlier programs wrote."""
    for old in Path(folder).iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def pallas_ptx(folder: str) -> Iterator[tuple[str, Path]]:
    """(name, path) of each PTX file with a Pallas kernel; the others are of XLA itself."""
    for path in sorted(Path(folder).glob("*.ptx")):
        entry = re.search(r"\.entry (\w+)", path.read_text(errors="ignore"))
        kernels = r"attention|argmax|summarize|experts_|product|rope_append|delta_|mosaic"
        if entry and re.search(kernels, entry[1]):
            yield entry[1], path


def assemble(capability: tuple[int, int], path: Path) -> dict[str, int]:
    """Registers and spilled bytes, as ptxas reports them."""
    (major, minor) = capability
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    done = subprocess.run(
        [str(find_ptxas()), "-v", f"-arch={arch}", "-o", os.devnull, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr)]
    return dict(registers=max(registers), spill_bytes=sum(spills))


def find_ptxas() -> str | None:
    """The ptxas of the wheel, or else of the system: XLA may write PTX that only the newer one accepts."""
    wheels = (path for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin/ptxas"))
    return str(next(wheels, "")) or shutil.which("ptxas")


def ptxas_version() -> str:
    """The last line that `ptxas --version` prints."""
    done = subprocess.run([str(find_ptxas()), "--version"], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]
