"""An estimate of the time of a TPU program's operations.

The time of an operation is the larger of its cycles, as XLA schedules them, by the clock, and its bytes of
HBM by the bandwidth; of a collective, of the bytes that a device of a ring sends by the rate of its links,
without latency.

A Pallas kernel, which XLA gives no cycles, takes the 2,100 cycles of XLA's smallest operations, and the
longer of two: all copies and the arithmetic of the last grid step, or the copies of the first step and all
arithmetic. Its arithmetic is the longer of its products by the matrix rate and its vector operations, four
in a cycle (`kernel_dma`), and 0.35 us for each grid step, which is assumed: nobody measured it here.
Attention of 2,048 tokens at 7B is given 136 us of vector operations a layer on a v6e and 191 on a v5e; its
compiled instructions take 138 and 247.

Copies between HBM and VMEM that run beside operations ("copy-start") have what operations leave of the
bandwidth, one after the other, and "copy-done" waits for its own. Nothing is assumed of the time to start an
operation beyond what XLA's cycles have (of small fusions about 2,100). Operations on single numbers, and
gathers and scatters of single rows, have none.
"""

import dataclasses

from gpu.card_specs import Tpu

from tpu.kernel_dma import KernelWork

_START_CYCLES = 2100
_STEP_SECONDS = 0.35e-6


@dataclasses.dataclass
class Timeline:
    """The operations of a computation one after the other, and the copies that run beside them, which HBM
    serves in their order when no operation needs it.
    """

    left: dict[str, float] = dataclasses.field(default_factory=dict)  # copy -> seconds that it still needs
    ends: dict[str, float] = dataclasses.field(default_factory=dict)  # of collectives, which need the links
    started: dict[str, str] = dataclasses.field(default_factory=dict)  # what "call-update" goes on with
    now: float = 0

    def run(self, seconds: float, memory: float) -> None:
        """An operation takes some seconds, in which it needs HBM for `memory` seconds."""
        self.now += seconds
        spare = seconds - memory
        for name, needed in list(self.left.items()):
            if spare < needed:
                self.left[name] = needed - max(0.0, spare)
                return
            spare -= needed
            del self.left[name]

    def wait(self, name: str) -> float:
        """Seconds until a copy or collective has ended."""
        while name in self.started:
            name = self.started[name]
        if name in self.ends:
            seconds = max(0.0, self.ends[name] - self.now)
            self.run(seconds, 0)
            return seconds
        seconds = 0.0
        while name in self.left:
            first = next(iter(self.left))
            seconds += self.left.pop(first)
        self.now += seconds
        return seconds

    def start_collective(self, name: str, seconds: float) -> None:
        """A collective starts, after those before it."""
        self.ends[name] = max([self.now, *self.ends.values()]) + seconds


def kernel_seconds(work: KernelWork, tpu: Tpu, memory: float) -> float:
    """An estimate of the time of a Pallas kernel, whose copies from and to HBM take `memory` seconds."""
    busy = work.seconds(tpu) + work.steps * _STEP_SECONDS
    steps = max(1, work.steps)
    return _START_CYCLES / tpu.ghz / 1e9 + max(memory + busy / steps, memory / steps + busy)
