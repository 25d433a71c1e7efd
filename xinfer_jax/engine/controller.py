"""An engine whose model lies on devices of several processes (multi-controller JAX). All processes must call
the same programs in the same order: process 0 decides and sends each call, and the others repeat it.

Engine of process 0 ─ Leader ─ Device
                        └ ControlChannel ─► Follower ─ Device, in every other process
"""

import dataclasses
import itertools
import weakref
from collections import deque
from typing import Any

import jax

from ..errors import InputError
from ..processes.control_channel import ControlChannel, open_control_channel
from ..weights.params import Params
from .engine_device import Device, NewRow
from .messages import DeviceResult

# Methods of `Device` that process 0 may call; results of the first set stay on the devices, for later calls.
_RESULT_STAYS = {"prefill", "copy_pages_out", "get_row"}
_METHODS = _RESULT_STAYS | {
    "prefill_with_logprobs", "put_first", "sample_first", "set_row", "decode", "draft_tokens", "read_unread",
    "finish_pages", "copy_routes", "copy_pages_in", "save_pages", "load_pages", "save_state", "load_state",
    "save_snapshot", "release_cache", "restore_cache", "adopt_params", "set_adapter",
}  # fmt: skip
_UPDATE = "update"  # the message that asks for new weights
_CLOSE = "close"  # the message that ends `Follower.run`


def control_channel_for(params: Any) -> ControlChannel | None:
    """Returns a channel if parameters lie on devices of several processes, else None."""
    leaves = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    return None if all(leaf.is_fully_addressable for leaf in leaves) else open_control_channel()


class Leader:
    """A `Device` of process 0 whose calls the other processes repeat."""

    def __init__(self, device: Device, channel: ControlChannel):
        self._device = device
        self._channel = channel
        self._number = itertools.count()
        self._unused = deque[int]()  # results that nothing refers to any more

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"{name} is not a device method that the other processes can repeat")
        return lambda *args: self._call(name, *args)

    @property
    def params(self) -> Params:
        return self._device.params

    @params.setter
    def params(self, params: Params) -> None:
        """Replaces the parameters in all processes. Each process has given its parameters to
        `Device.next_params`.
        """
        self._device.next_params = params
        self._call("adopt_params")

    def ask_for_params(self, directory: str | None) -> None:
        """Lets `Follower.run` return in the other processes. directory: the directory with the new weights.
        None: each process gives its own part.
        """
        self._channel.send(_UPDATE, directory)

    def _call(self, name: str, *args: Any) -> Any:
        number = next(self._number)
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        self._channel.send(name, args, unused)
        own = (arg.value if isinstance(arg, DeviceResult) else arg for arg in args)
        out = getattr(self._device, name)(*own)
        if name not in _RESULT_STAYS:
            return out
        result = DeviceResult(number, out)
        weakref.finalize(result, self._unused.append, number)
        return result

    def close(self) -> None:
        """Ends `Follower.run` in the other processes. It is safe to call again."""
        self._channel.send(_CLOSE)
        self._channel.end()


class Follower:
    """Repeats the device calls of process 0 in another process.

    Attributes:
        wants_params: process 0 waits for this process's part of new weights.
        directory: the directory with these weights. None: the caller has them.
    """

    def __init__(self, device: Device, channel: ControlChannel):
        self._device = device
        self._channel = channel
        self._results: dict[int, Any] = {}
        self._numbers = itertools.count()
        self.wants_params = False
        self.directory: str | None = None

    def run(self) -> bool:
        """Repeats calls until process 0's engine is closed, False, or asks for new weights. Raises InputError
        for an unknown method, or if process 0 is gone.
        """
        while True:
            name, *message = self._channel.receive()
            if name in (_UPDATE, _CLOSE):
                self.wants_params = name == _UPDATE
                self.directory = message[0] if message else None
                return self.wants_params
            if name not in _METHODS:
                raise InputError(
                    f"process 0 calls {name!r}, which this version does not have: start all processes with"
                    " one version"
                )
            args, unused = message
            number = next(self._numbers)
            out = getattr(self._device, name)(*map(self._own, args))
            if name in _RESULT_STAYS:
                self._results[number] = out
            for old in unused:
                del self._results[old]

    def _own(self, arg: Any) -> Any:
        """Returns this process's own value of an argument."""
        if isinstance(arg, DeviceResult):
            return self._results[arg.number]
        if isinstance(arg, dict):
            return {name: self._own(item) for name, item in arg.items()}
        if isinstance(arg, NewRow):
            return arg._replace(call=dataclasses.replace(arg.call, config=self._device.config))
        return arg
