"""Data sheets of GPUs and TPUs, and the descriptions of them with which XLA compiles on a machine without
them.

The memory of TPUs is the memory on Google's pages on v5e, v5p, v6e and TPU7x ("System architecture", per
chip). A chip of TPU7x is two devices, each with half of its memory. The two cores of a v5p chip are one
device.

jax is imported when a description is made: commands check their flags before.
"""

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

MOST_DEVICES = 128  # of a mesh


@dataclasses.dataclass(frozen=True)
class Card:
    """The data sheet of a GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # per block
    l2_mib: int
    ghz: float
    memory_gib: float  # usable by a program
    memory_gbs: float

    platform = "cuda"
    memory_fraction = 0.75  # that jax allocates by default

    def mesh(self) -> "jax.sharding.Mesh":
        """Returns a mesh of one such GPU to compile for."""
        from jax.experimental import topologies

        major, minor = self.capability
        config = f"""
          gpu_device_info {{
            name: "{self.name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
            cuda_compute_capability {{
              major: {major} minor: {minor} {"feature_extension: ACCELERATED_FEATURES" * (major >= 9)}
            }}
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_bytes}
            shared_memory_per_core: {self.shared_bytes + 1024}
            core_count: {self.multiprocessors} fpus_per_core: 128 clock_rate_ghz: {self.ghz}
            memory_bandwidth: {int(self.memory_gbs * 1e9)} l2_cache_size: {self.l2_mib * 2**20}
            device_memory_size: {int(self.memory_gib * 2**30)}
            runtime_version: "12.8.0" driver_version: "13.0.0" compile_time_toolkit_version: "12.8.0"
            dnn_version: "9.10.0"
          }}
          platform_name: "CUDA" device_description_str: "{self.name}"
          dnn_version_info {{ major: 9 minor: 10 }}"""
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
        return topologies.make_mesh(topology, (1,), ("one",))


CARDS = {
    "b200": Card("NVIDIA B200", (10, 0), 148, 232448, 126, 1.96, 179, 8000),
    "h200": Card("NVIDIA H200", (9, 0), 132, 232448, 50, 1.98, 140, 4800),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 50, 1.98, 79, 3350),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 40, 1.41, 79, 2039),
    "l40s": Card("NVIDIA L40S", (8, 9), 142, 101376, 96, 2.52, 44, 864),
    "l4": Card("NVIDIA L4", (8, 9), 58, 101376, 48, 2.04, 22, 300),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 72, 2.52, 23, 1008),
}


# With these libtpu looks for no TPU, minds no other process that compiles, and does not complain.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """The data sheet of a TPU device. Fields that a `Card` also has have the same meaning."""

    name: str  # jax's device_kind
    topology: str  # of one chip
    memory_gib: float

    platform = "tpu"
    memory_fraction = 0.97
    capability = (0, 0)

    def mesh(self) -> "jax.sharding.Mesh":
        """Returns a mesh of one such TPU to compile for.

        Raises:
            RuntimeError: libtpu is not installed.
        """
        import jax
        import numpy as np
        from jax.experimental import topologies

        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=self.topology)
        return jax.sharding.Mesh(np.array(topology.devices[:1]), ("one",))


TPUS = {
    "v5e": Tpu("TPU v5 lite", "v5e:1x1", 16),
    "v5p": Tpu("TPU v5", "v5p:1x1x1", 95),
    "v6e": Tpu("TPU v6 lite", "v6e:1x1", 32),
    "tpu7x": Tpu("TPU7x", "tpu7x:1x1x1", 96),
}
