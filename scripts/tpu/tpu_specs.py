"""Data sheets of TPUs, and their topologies for which XLA compiles on a machine without a TPU.

Memory, bandwidth, bfloat16 and int8 rates and links are those of Google's pages on v5e, v5p, v6e and TPU7x
("System architecture", per chip). A link's figure there is of both directions: here it is halved. A chip of
TPU7x is two devices, each with half of the chip's figures; the two cores of a v5p chip are one device.

No page states the clock. It is computed: the bfloat16 rate by the FLOP that the matrix units do in a cycle
(v5e 4 units of 128 x 128, v5p 8 of them, v6e and a device of TPU7x four times 256 x 256). XLA's own schedule
of a product of 4,096 x 4,096 matrices reaches 97%, 96%, 87% and 81% of that many per cycle, so its cycles are
of this clock. What is computed from these figures is an estimate.
"""

import dataclasses
import os

import jax
import numpy as np
from jax.experimental import topologies

# With these libtpu looks for no TPU, minds no other process that compiles, and does not complain.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """The data sheet of a TPU device; fields that a `Card` has too have the same meaning."""

    name: str  # jax's device_kind
    topology: str  # one chip, with {} for its name
    memory_gib: float
    memory_gbs: float
    link_gbs: float  # all links, in each direction
    tflops: float  # bfloat16 matmuls
    int8_tops: float
    float32_tflops: float  # in full precision: six products of bfloat16
    ghz: float
    vmem_mib: int
    matrix_size: int  # of its matrix units, rows and columns
    round_us: float = 0  # latency of an all-reduce; not measured

    platform = "tpu"
    capability = (0, 0)

    def mesh(self, devices: int = 1, axis: str = "one") -> jax.sharding.Mesh:
        """A mesh of such TPUs to compile for.

        Raises:
            RuntimeError: libtpu is not installed.
        """
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=self._topology(devices))
        return jax.sharding.Mesh(np.array(topology.devices[:devices]), (axis,))

    def _topology(self, devices: int) -> str:
        name, _, chip = self.topology.partition(":")
        per_chip = 2 if name == "tpu7x" else 1
        sizes = [1] * (chip.count("x") + 1)
        at = 0
        while np.prod(sizes) * per_chip < devices:
            sizes[at % len(sizes)] *= 2
            at += 1
        return f"{name}:{'x'.join(str(size) for size in sorted(sizes))}"


TPUS = {
    "v5e": Tpu("TPU v5 lite", "v5e:1x1", 16, 819, 200, 197, 393, 197 / 6, 1.50, 128, 128),
    "v5p": Tpu("TPU v5", "v5p:1x1x1", 95, 2765, 600, 459, 918, 459 / 6, 1.75, 128, 128),
    "v6e": Tpu("TPU v6 lite", "v6e:1x1", 32, 1640, 400, 918, 1836, 918 / 6, 1.75, 128, 256),
    "tpu7x": Tpu("TPU7x", "tpu7x:1x1x1", 96, 3690, 300, 1153.5, 1153.5, 1153.5 / 6, 2.20, 64, 256),
}
