"""Arrays from one process to another: pulled over the network by `jax.experimental.transfer`, or through the
host and the processes' messages if jax has no such server.
"""

import datetime
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_LOGGER = logging.getLogger(__name__)

EXPIRY_SECONDS = 60.0  # until arrays that nobody has acknowledged are freed
_POLL_SECONDS = 0.001


class ArrayTransfer:
    """Offers arrays of this process to others, and pulls theirs. The port of the transfer server knows no
    passwords: who reaches it and guesses a random number of 63 bits, which is used once, can read an array.
    """

    def __init__(self, host: str, log: Callable[[str], None] = _LOGGER.info):
        """Starts the server, if there is one. host: the address of this machine that the server binds to, at
        a free port. log: writes a line.
        """
        self._lock = threading.Lock()
        self._offered: dict[int, tuple[float, Any]] = {}  # by uuid: when it expires, the arrays
        self._connections: dict[str, Any] = {}
        self._server: Any = None
        try:
            from jax.experimental import transfer

            address = f"[{host}]:0" if ":" in host else f"{host}:0"
            client = jax.local_devices()[0].client
            self._server = transfer.start_transfer_server(client, address, [address])
        except (ImportError, AttributeError, RuntimeError, NotImplementedError) as error:
            log(f"no transfer server ({error}): arrays go through the host and the processes' messages")

    def offer(self, tree: Any, send: Callable[[int, np.ndarray], None]) -> list[Any]:
        """Makes arrays of this process ready for one pull by another, until `withdraw` or until they expire.
        Returns the offer that the other process gives to `pull`. send: a function that sends the bytes of the
        array of this number, if there is no server.
        """
        leaves = [_without_key(x) for x in jax.tree.leaves(tree) if x.size]  # an empty one never arrives
        if self._server is None:
            for number, x in enumerate(leaves):
                send(number, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
            return [0, ""]
        uuid = secrets.randbits(63)
        with self._lock:
            now = time.monotonic()
            self._offered = {u: kept for u, kept in self._offered.items() if kept[0] > now}
            self._offered[uuid] = now + EXPIRY_SECONDS, leaves
        expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=EXPIRY_SECONDS)
        self._server.await_pull(uuid, leaves, timeout=expiry)
        return [uuid, self._server.address()]

    def withdraw(self, uuid: int) -> None:
        """Frees the arrays of an offer, which have arrived or are not wanted."""
        with self._lock:
            self._offered.pop(uuid, None)

    def pull(self, offer: list[Any], like: Any, sent: dict[int, np.ndarray], lost: Callable[[], bool]) -> Any:
        """Returns the arrays of an offer of another process, once they are here.

        Args:
            offer: the result of `offer`.
            like: arrays of the same structure, shapes and types, on the devices on which the result has to
                be.
            sent: the bytes that the other process sent, by the number of their array.
            lost: returns True if the other process is gone.

        Raises:
            ConnectionError: they have not come before they expired, or the other process is gone.
        """
        (uuid, address) = offer
        leaves, structure = jax.tree.flatten(like)
        filled = [x for x in leaves if x.size]
        bare = [_without_key(x) for x in filled]
        if address:
            arrays = self._pull(uuid, address, bare, lost)
        else:
            contents = (sent[i].view(x.dtype).reshape(x.shape) for i, x in enumerate(bare))
            arrays = [jax.device_put(new, x.sharding) for new, x in zip(contents, bare, strict=True)]
        arrived = map(_with_key, arrays, filled)
        return jax.tree.unflatten(structure, [next(arrived) if x.size else x for x in leaves])

    def _pull(self, uuid: int, address: str, like: list[Any], lost: Callable[[], bool]) -> list[Any]:
        if self._server is None:
            raise ConnectionError("this process has no transfer server, and the other has one")
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in like]
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        arrays = connection.pull(uuid, structs)
        end = time.monotonic() + EXPIRY_SECONDS
        while not all(x.is_ready() for x in arrays):  # a program that uses them would wait without an end
            if lost() or time.monotonic() > end:
                with self._lock:
                    self._connections.pop(address, None)
                raise ConnectionError("its arrays did not arrive")
            time.sleep(_POLL_SECONDS)
        try:
            return jax.block_until_ready(arrays)
        except RuntimeError as error:
            raise ConnectionError(f"its arrays did not arrive: {error}") from error


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_key(x: Any) -> Any:
    """Returns the numbers of a random key, and other arrays as they are."""
    return jax.random.key_data(x) if _is_key(x) else x


def _with_key(x: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if _is_key(like) else x
