"""An engine whose model lies on devices of several processes (multi-controller JAX). All processes must call
the same programs in the same order: process 0 decides and sends each call, and the others repeat it.

Engine of process 0 ─ Leader ─ Device
                        └ ControlChannel ─► Follower ─ Device, in every other process
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
from ..signing import Signer, load_secret
from ..weights.params import Params
from .engine_device import Device
from .messages import ResultReference, decode_message, encode_message

_BLOCK = 256  # calls that process 0 may be ahead of the others
_WAIT = 600_000  # milliseconds until a blocked read of the store is repeated
# Methods of `Device` that process 0 may call; results of the first set stay on the devices, for later calls.
_RESULT_STAYS = {"new_row", "prefill", "copy_pages_out", "get_row"}
_METHODS = _RESULT_STAYS | {
    "prefill_with_logprobs", "put_first", "sample_first", "set_row", "decode", "draft_tokens",
    "copy_routes", "copy_pages_in", "save_pages", "load_pages", "save_state", "load_state", "release_cache",
    "restore_cache", "adopt_params", "set_adapter",
}  # fmt: skip
_UPDATE = "update"  # the message that asks for new weights
_numbers = itertools.count()


class ControlChannel:
    """Ordered messages from process 0 to the others, through the key-value store of JAX's coordination
    service (0.3 ms each). Every process creates the same channels in the same order.

    Anyone who reaches that service can write to the store, so messages that are not signed with the run's
    secret are rejected. Messages of another run do not verify: each other process begins with a random
    number, and process 0 signs the numbers of all.
    """

    def __init__(self, client: Any, name: str, process: int, processes: int, secret: bytes) -> None:
        """client: of JAX's coordination service; process: index of this process."""
        self._client = client
        self._name = name
        self._number = 0  # of the next message
        self._process = process
        self._processes = processes
        self._secret = secret
        self._run = ""
        self._run = self._agree_on_run()
        self._signer = Signer(secret, self._run, "process 0")

    def send(self, value: Any) -> None:
        """Sends a value that `encode_message` takes from process 0 to the others."""
        self._client.key_value_set_bytes(self._key, self._signer.sign(self._key, encode_message(value)))
        self._next()

    def receive(self, config: Any = None) -> Any:
        """The next value from process 0, which has signed it. config: as of `decode_message`."""
        message = self._signer.verify(self._key, self._get(self._key))
        self._next()
        return decode_message(message, config)

    def broadcast(self, value: Any) -> Any:
        """The value of process 0, in every process."""
        if self._process == 0:
            self.send(value)
            return value
        return self.receive()

    def agree(self, problem: str) -> str:
        """What is wrong in one of the processes; "": nothing. All call it, each with its own problem."""
        for i in [self._process] if self._process else range(1, self._processes):
            key = f"{self._key}/{i}"
            signer = self._signer_of(i)
            if self._process:
                self._client.key_value_set_bytes(key, signer.sign(key, problem.encode()))
            else:
                problem = signer.verify(key, self._get(key)).decode() or problem
        return str(self.broadcast(problem))

    def _agree_on_run(self) -> str:
        """A name of the run that no other run has: the random numbers of the other processes."""
        run_key = f"{self._name}/run"
        numbers = list[str]()
        if self._process:
            own = secrets.token_hex()
            key = f"{run_key}/{self._process}"
            self._client.key_value_set_bytes(key, self._signer_of(self._process).sign(key, own.encode()))
            run = self._signer_of(0).verify(run_key, self._get(run_key)).decode()
            if run.split()[self._process - 1 : self._process] != [own]:
                raise InputError("process 0 began another run than this process: start all of them again")
            return run
        for i in range(1, self._processes):
            key = f"{run_key}/{i}"
            numbers.append(self._signer_of(i).verify(key, self._get(key)).decode())
        run = " ".join(numbers)
        self._client.key_value_set_bytes(run_key, self._signer_of(0).sign(run_key, run.encode()))
        return run

    def _signer_of(self, process: int) -> Signer:
        """The signer of a process's own messages; before the run has a name, of those of its name."""
        return Signer(self._secret, self._run, f"process {process}")

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, _WAIT)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    @property
    def _key(self) -> str:
        return f"{self._name}/{self._number // _BLOCK}/{self._number}"

    def _next(self) -> None:
        """Counts the message. Once all processes have begun a block, the previous block is deleted."""
        block, number_in_block = divmod(self._number, _BLOCK)
        self._number += 1
        if block and not number_in_block:
            self._client.wait_at_barrier(f"{self._name}/{block}", _WAIT)
            if self._process == 0:
                self._client.key_value_delete(f"{self._name}/{block - 1}/")


def open_control_channel() -> ControlChannel:
    """A channel between the processes that `jax.distributed.initialize` connected. Raises InputError where
    they share no secret, or have different ones.
    """
    state: Any = distributed.global_state
    secret = load_secret(None, state.coordinator_address.rpartition(":")[0])
    name = f"xinfer_jax/{next(_numbers)}"
    return ControlChannel(state.client, name, jax.process_index(), jax.process_count(), secret)


def control_channel_for(params: Any) -> ControlChannel | None:
    """A channel if parameters lie on devices of several processes, else None."""
    leaves = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    return None if all(leaf.is_fully_addressable for leaf in leaves) else open_control_channel()


class _DeviceResult:
    """A result that stays on the devices between two calls. number: of the call that returned it."""

    def __init__(self, number: int, value: Any):
        self.reference = ResultReference(number)
        self.value = value


class Leader:
    """A `Device` of process 0 whose calls the other processes repeat."""

    def __init__(self, device: Device, channel: ControlChannel):
        self._device = device
        self._channel = channel
        self._number = itertools.count()
        self._unused = deque[int]()  # results that nothing refers to any more
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"{name} is not a device method that the other processes can repeat")
        return lambda *args: self._call(name, *args)

    @property
    def params(self) -> Params:
        return self._device.params

    @params.setter
    def params(self, params: Params) -> None:
        """Replaces the parameters in all processes; each has given its own to `Device.next_params`."""
        self._device.next_params = params
        self._call("adopt_params")

    def ask_for_params(self) -> None:
        """Lets `Follower.run` return in the other processes."""
        self._channel.send(_UPDATE)

    def _call(self, name: str, *args: Any) -> Any:
        number = next(self._number)
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        sent = [arg.reference if isinstance(arg, _DeviceResult) else arg for arg in args]
        self._channel.send([name, sent, unused])
        own = (arg.value if isinstance(arg, _DeviceResult) else arg for arg in args)
        out = getattr(self._device, name)(*own)
        if name not in _RESULT_STAYS:
            return out
        result = _DeviceResult(number, out)
        weakref.finalize(result, self._unused.append, number)
        return result

    def close(self) -> None:
        """Ends `Follower.run` in the other processes; safe to call again."""
        if not self._closed:
            self._closed = True
            with suppress(jax.errors.JaxRuntimeError):  # they have ended already
                self._channel.send(None)


class Follower:
    """Repeats the device calls of process 0 in another process.

    Attributes:
        wants_params: process 0 waits for this process's part of new weights.
    """

    def __init__(self, device: Device, channel: ControlChannel):
        self._device = device
        self._channel = channel
        self._results: dict[int, Any] = {}
        self._numbers = itertools.count()
        self.wants_params = False

    def run(self) -> bool:
        """Repeats calls until process 0's engine is closed, False, or asks for new weights. Raises InputError
        for a message that process 0 did not sign, or with an unknown method.
        """
        results = self._results
        while (message := self._channel.receive(self._device.config)) not in (None, _UPDATE):
            name, args, unused = message
            if name not in _METHODS:
                raise InputError(
                    f"process 0 calls {name!r}, which this version does not have: start all processes with"
                    " one version"
                )
            number = next(self._numbers)
            own = (results[arg.number] if isinstance(arg, ResultReference) else arg for arg in args)
            out = getattr(self._device, name)(*own)
            if name in _RESULT_STAYS:
                results[number] = out
            for old in unused:
                del results[old]
        self.wants_params = message == _UPDATE
        return self.wants_params
