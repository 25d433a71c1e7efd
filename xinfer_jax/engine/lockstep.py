"""An engine whose model lies on devices of several processes. JAX has all of them call the same programs in
the same order, so process 0 decides and says each call, and the others do it too.

Engine of process 0 ─ Leader ─ Device
                        └ Calls ─► follow ─ Device, in every other process
"""

import dataclasses
import itertools
import pickle
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import jax
from jax._src import distributed

from ..generation.options import Call
from .device import Device

_BLOCK = 256  # calls that process 0 may be ahead
_WAIT = 600_000  # milliseconds until it is asked again
_STAY = {"row", "read", "first_choice", "take_pages", "take_row"}  # what they give is for later calls
_numbers = itertools.count()


class Calls:
    """What process 0 says to the others, in order, by the store of jax's coordination service (0.3 ms each).
    Every process makes the same ones in the same order.
    """

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client
        self._name, self._at = f"xinfer_jax/{next(_numbers)}", 0

    def say(self, what: Any) -> None:
        self._client.key_value_set_bytes(self._key, pickle.dumps(what))
        self._next()

    def hear(self) -> Any:
        said = None
        while said is None:
            try:
                said = self._client.blocking_key_value_get_bytes(self._key, _WAIT)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        self._next()
        return pickle.loads(said)

    def same(self, value: Any) -> Any:
        """Process 0's."""
        if jax.process_index() == 0:
            self.say(value)
            return value
        return self.hear()

    @property
    def _key(self) -> str:
        return f"{self._name}/{self._at // _BLOCK}/{self._at}"

    def _next(self) -> None:
        """Counts; what stands in a block is deleted once all have begun the next."""
        block, at = divmod(self._at, _BLOCK)
        self._at += 1
        if block and not at:
            self._client.wait_at_barrier(f"{self._name}/{block}", _WAIT)
            if jax.process_index() == 0:
                self._client.key_value_delete(f"{self._name}/{block - 1}/")


def calls_for(params: Any) -> Calls | None:
    """Where parameters lie on devices of several processes."""
    leaves = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    return None if all(leaf.is_fully_addressable for leaf in leaves) else Calls()


class _Number(NamedTuple):
    """Of the call that gave something."""

    number: int


class _Held:
    """What stays on the devices between two calls."""

    def __init__(self, number: int, value: Any):
        self.number, self.value = _Number(number), value


class Leader:
    """A `Device` of process 0, whose calls the others do too."""

    def __init__(self, device: Device, calls: Calls):
        self._device, self._calls = device, calls
        self._number, self._unused, self._closed = itertools.count(), deque[int](), False

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._do(name, *args)

    def _do(self, name: str, *args: Any) -> Any:
        number, unused = next(self._number), [self._unused.popleft() for _ in range(len(self._unused))]
        self._calls.say((name, [_said(arg) for arg in args], unused))
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


def _said(arg: Any) -> Any:
    if isinstance(arg, Call):
        return dataclasses.replace(arg, params={})  # they have them
    return arg.number if isinstance(arg, _Held) else arg


def follow(device: Device, calls: Calls) -> None:
    """Does what process 0 has its device do, until that is closed."""
    held: dict[int, Any] = {}
    for number in itertools.count():
        if (said := calls.hear()) is None:
            return
        name, args, unused = said
        out = getattr(device, name)(*(held[arg.number] if isinstance(arg, _Number) else arg for arg in args))
        if name in _STAY:
            held[number] = out[0] if name == "first_choice" else out
        for old in unused:
            del held[old]
