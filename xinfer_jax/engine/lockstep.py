"""An engine whose model lies on devices of several processes. JAX has all of them call the same programs in
the same order, so process 0 decides and says each call, and the others do it too.

Engine of process 0 ─ Leader ─ Device
                        └ Calls ─► follow ─ Device, in every other process
"""

import itertools
import secrets
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import jax
from jax._src import distributed

from ..errors import InputError
from ..signing import Signer, secret_of
from .device import Device
from .messages import Kept, decode, encode

_BLOCK = 256  # calls that process 0 may be ahead
_WAIT = 600_000  # milliseconds until it is asked again
_STAY = {"row", "read", "first_choice", "take_pages", "take_row"}  # what they give is for later calls
_METHODS = _STAY | {"score", "place", "window", "put_pages"}  # of `Device`, that process 0 may have called
_numbers = itertools.count()


class Calls:
    """What process 0 says to the others, in order, by the store of jax's coordination service (0.3 ms each).
    Every process makes the same ones in the same order.

    Whoever reaches that service may write to the store, so what the run's secret has not signed is rejected.
    No message of another run verifies: each other process begins with a random number of its own, and
    process 0 signs the numbers of all.
    """

    def __init__(self, client: Any, name: str, process: int, processes: int, secret: bytes) -> None:
        """client: of jax's coordination service; name: of these calls; process: which of so many this is."""
        self._client = client
        self._name = name
        self._at = 0
        self._process = process
        self._secret = secret
        self._signer = Signer(secret, self._meet(processes), "process 0")

    def say(self, what: Any) -> None:
        """Tells the others, as process 0. what: that `encode` takes."""
        self._set(self._key, self._signer.sign(self._key, encode(what)))
        self._next()

    def hear(self, config: Any = None) -> Any:
        """What process 0 says next. config: of the model, for calls.

        Raises:
            InputError: somebody else said it.
        """
        said = self._signer.verify(self._key, self._get(self._key))
        self._next()
        return decode(said, config)

    def same(self, value: Any) -> Any:
        """Process 0's."""
        if self._process == 0:
            self.say(value)
            return value
        return self.hear()

    def _meet(self, processes: int) -> str:
        """The run's name, which no other run has."""
        place = f"{self._name}/run"
        numbers = list[str]()
        if self._process:
            own = secrets.token_hex()
            number = f"{place}/{self._process}"
            self._set(number, self._by(self._process).sign(number, own.encode()))
            run = self._by(0).verify(place, self._get(place)).decode()
            if run.split()[self._process - 1 : self._process] != [own]:
                raise InputError("process 0 began another run than this process: start all of them again")
            return run
        for i in range(1, processes):
            number = f"{place}/{i}"
            numbers.append(self._by(i).verify(number, self._get(number)).decode())
        run = " ".join(numbers)
        self._set(place, self._by(0).sign(place, run.encode()))
        return run

    def _by(self, process: int) -> Signer:
        return Signer(self._secret, "", f"process {process}")

    def _set(self, key: str, message: bytes) -> None:
        self._client.key_value_set_bytes(key, message)

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, _WAIT)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    @property
    def _key(self) -> str:
        return f"{self._name}/{self._at // _BLOCK}/{self._at}"

    def _next(self) -> None:
        """Counts; what stands in a block is deleted once all have begun the next."""
        block, at = divmod(self._at, _BLOCK)
        self._at += 1
        if block and not at:
            self._client.wait_at_barrier(f"{self._name}/{block}", _WAIT)
            if self._process == 0:
                self._client.key_value_delete(f"{self._name}/{block - 1}/")


def calls() -> Calls:
    """Of this process, which `jax.distributed.initialize` made one of several.

    Raises:
        InputError: there is no secret that the processes share, or they have different ones.
    """
    state: Any = distributed.global_state
    secret = secret_of(None, state.coordinator_address.rpartition(":")[0])
    name = f"xinfer_jax/{next(_numbers)}"
    return Calls(state.client, name, jax.process_index(), jax.process_count(), secret)


def calls_for(params: Any) -> Calls | None:
    """Where parameters lie on devices of several processes.

    Raises:
        InputError: as `calls`.
    """
    leaves = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    return None if all(leaf.is_fully_addressable for leaf in leaves) else calls()


class _Held:
    """What stays on the devices between two calls."""

    def __init__(self, number: int, value: Any):
        self.number = Kept(number)
        self.value = value


class Leader:
    """A `Device` of process 0, whose calls the others do too."""

    def __init__(self, device: Device, calls: Calls):
        self._device = device
        self._calls = calls
        self._number = itertools.count()
        self._unused = deque[int]()
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"{name} of a device is nothing that other processes do")
        return lambda *args: self._do(name, *args)

    def _do(self, name: str, *args: Any) -> Any:
        number = next(self._number)
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        said = [arg.number if isinstance(arg, _Held) else arg for arg in args]
        self._calls.say([name, said, unused])
        out = getattr(self._device, name)(*(arg.value if isinstance(arg, _Held) else arg for arg in args))
        if name not in _STAY:
            return out
        held = _Held(number, out[0] if name == "first_choice" else out)
        weakref.finalize(held, self._unused.append, number)
        return (held, *out[1:]) if name == "first_choice" else held

    def close(self) -> None:
        """Lets the others go; once is enough."""
        if not self._closed:
            self._closed = True
            with suppress(jax.errors.JaxRuntimeError):  # they are gone
                self._calls.say(None)


def follow(device: Device, calls: Calls) -> None:
    """Does what process 0 has its device do, until that is closed.

    Raises:
        InputError: somebody else says what to do.
    """
    held: dict[int, Any] = {}
    for number in itertools.count():
        if (said := calls.hear(device.config)) is None:
            return
        name, args, unused = said
        if name not in _METHODS:
            raise InputError(f"process 0 asks for {name!r}, which this version does not do: start all again")
        out = getattr(device, name)(*(held[arg.number] if isinstance(arg, Kept) else arg for arg in args))
        if name in _STAY:
            held[number] = out[0] if name == "first_choice" else out
        for old in unused:
            del held[old]
