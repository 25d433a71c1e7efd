"""The secret that the processes of one run share, and messages that are signed with it. Without jax."""

import hashlib
import hmac
import ipaddress
import itertools
import json
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from .errors import InputError

VARIABLE = "XINFER_JAX_SECRET_FILE"  # of the environment: names the file where no flag does
SIZE = hashlib.sha256().digest_size  # bytes of a signature, and of a random number
_LEAST = 32
_MOST = 4096  # bytes of a secret
_handed = list[bytes]()  # the secret that a parent process has given to this one


class Signer:
    """Signs, or verifies, the messages of one sender in one run, in their order.

    A signature is HMAC-SHA256 over the run, the sender, the message's key, its number and its content: a
    message of another run, of another sender, or one that was sent before does not verify.
    """

    def __init__(self, secret: bytes, run: str, sender: str):
        """secret: that both sides know; run: text that no other run has; sender: its name in errors."""
        self._secret = secret
        self._run = run
        self._sender = sender
        self._number = itertools.count()

    def sign(self, key: str, content: bytes) -> bytes:
        """The next message: its signature, then its content. key: where it is put."""
        return self._signature(key, content) + content

    def verify(self, key: str, message: bytes) -> bytes:
        """The content of the next message.

        Raises:
            InputError: it is not what the sender signed.
        """
        content = message[SIZE:]
        if not hmac.compare_digest(message[:SIZE], self._signature(key, content)):
            raise InputError(
                f"a message of {self._sender} has a wrong signature: give all processes the same"
                " --secret_file, and keep others out of their network"
            )
        return content

    def _signature(self, key: str, content: bytes) -> bytes:
        about = json.dumps([self._run, self._sender, key, next(self._number)]).encode()
        return hmac.digest(self._secret, about + b"\n" + content, "sha256")


def is_local(host: str) -> bool:
    """Whether a host is this machine's own address, which no other machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def hand_over(secret: bytes) -> None:
    """Has `secret_of` return this one in this process."""
    _handed[:] = [secret]


def secret_of(path: str | None, host: str) -> bytes:
    """The secret of a run: of a file, of the file that the environment names, or, where all processes are on
    this machine, of the user's own file, which the first of them makes.

    Args:
        path: of --secret_file.
        host: of process 0.

    Raises:
        InputError: the file cannot be had, it belongs to another user, others may read it, or it is too
            short; no file is named and the processes are on several machines.
    """
    if _handed:
        return _handed[0]
    if path := path or os.environ.get(VARIABLE):
        return _secret_in(Path(path))
    if is_local(host):
        return _secret_in(_own_file())
    raise InputError(
        f"processes that meet at {host} need a secret: write 32 or more random bytes to a file of mode 0600"
        f" on each machine, and name it with --secret_file or ${VARIABLE}"
    )


def _secret_in(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            secret = file.read(_MOST + 3) if stat.S_ISREG(about.st_mode) else b""
    except OSError as error:
        raise InputError(f"secret file {path} cannot be read: {error.strerror}") from error
    if about.st_uid not in (0, os.geteuid()):  # its owner can read and change it
        raise InputError(
            f"secret file {path} belongs to another user (uid {about.st_uid}): it must be yours or root's"
        )
    if about.st_mode & 0o077:
        raise InputError(f"secret file {path} may be read or written by others: chmod 600 it")
    secret = secret.rstrip(b"\r\n")
    if not _LEAST <= len(secret) <= _MOST:
        raise InputError(
            f"secret file {path} must be a file of {_LEAST} to {_MOST} bytes, and has {len(secret)}:"
            " write random bytes to it"
        )
    return secret


def _own_file() -> Path:
    """The user's own, made at its first use."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "xinfer_jax" / "processes"
    file = folder / "secret"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise InputError(f"{folder} must be a directory of yours with mode 0700, or give --secret_file")
        if not file.exists():
            with tempfile.NamedTemporaryFile(dir=folder) as new:  # mode 0600
                new.write(secrets.token_bytes(SIZE).hex().encode())
                new.flush()
                with suppress(FileExistsError):  # another process was first
                    os.link(new.name, file)
    except (OSError, RuntimeError) as error:  # the second: there is no home directory
        raise InputError(f"{file} cannot be made ({error}): give --secret_file") from error
    return file
