"""The secret that the processes of one run share, and signatures made with it."""

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ..errors import InputError

SECRET_VARIABLE = "XINFER_JAX_SECRET_FILE"  # environment variable with the file's path
SIGNATURE_SIZE = hashlib.sha256().digest_size  # bytes of a signature, and of a random number
_MIN_BYTES = 32
_MAX_BYTES = 4096  # of a secret


def sign(secret: bytes, *parts: bytes | memoryview) -> bytes:
    """Returns the HMAC-SHA256 of the parts in their order. Only who knows the secret can make it."""
    signature = hmac.new(secret, digestmod="sha256")
    for part in parts:
        signature.update(part)
    return signature.digest()


def is_local(host: str) -> bool:
    """Returns True if a host is this machine's own address, which no other machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_secret(path: str | None, host: str) -> bytes:
    """Returns the secret of a run. It is in the file at `path`, or in the file that the environment variable
    names. If neither is given and the host of process 0 is this machine, it is the user's own secret, which
    is created if it is missing.

    Raises:
        InputError: the file cannot be read, it belongs to another user, others may read it, or its size is
            wrong. Or no file is given and the processes are on several machines.
    """
    if path := path or os.environ.get(SECRET_VARIABLE):
        return _read_secret(Path(path))
    if not is_local(host):
        raise InputError(
            f"processes that meet at {host} need a secret: write 32 or more random bytes to a file of mode"
            f" 0600 on each machine, and give its path by --secret_file or ${SECRET_VARIABLE}"
        )
    remedy = "give --secret_file"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:  # there is no home directory
        raise InputError(f"the user's secret file cannot be created ({error}): {remedy}") from error
    return folder_secret(folder / "xinfer_jax" / "processes", remedy)


def folder_secret(folder: Path, remedy: str) -> bytes:
    """Returns the secret of a folder that belongs to the user, with mode 0700. Both are created if they are
    missing. Raises InputError, whose end is the remedy.
    """
    file = folder / "secret"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise InputError(f"{folder} must be a directory of yours with mode 0700, or {remedy}")
        if not file.exists():
            with tempfile.NamedTemporaryFile(dir=folder) as new:  # mode 0600
                new.write(secrets.token_bytes(SIGNATURE_SIZE).hex().encode())
                new.flush()
                with suppress(FileExistsError):  # another process was first
                    os.link(new.name, file)
    except OSError as error:
        raise InputError(f"{file} cannot be created ({error}): {remedy}") from error
    return _read_secret(file)


def _read_secret(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            secret = file.read(_MAX_BYTES + 3) if stat.S_ISREG(about.st_mode) else b""
    except OSError as error:
        raise InputError(f"secret file {path} cannot be read: {error.strerror}") from error
    if about.st_uid not in (0, os.geteuid()):  # its owner could read and change it
        raise InputError(
            f"secret file {path} belongs to another user (uid {about.st_uid}): it must be yours or root's"
        )
    if about.st_mode & 0o077:
        raise InputError(f"secret file {path} may be read or written by others: chmod 600 it")
    secret = secret.rstrip(b"\r\n")
    if not _MIN_BYTES <= len(secret) <= _MAX_BYTES:
        raise InputError(
            f"secret file {path} must be a file of {_MIN_BYTES} to {_MAX_BYTES} bytes, and has {len(secret)}:"
            " write random bytes to it"
        )
    return secret
