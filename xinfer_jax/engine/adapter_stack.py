"""`AdapterStack`: the LoRA adapters that an engine holds, on its devices. For each matrix, the matrices of
all adapters are stacked. Adding an adapter writes into the arrays, so it compiles nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..adapters.adapted_params import map_matrices
from ..adapters.adapter import row_matrices
from ..config.model_config import ModelConfig
from ..generation.executor import Run
from ..sharding import REPLICATED, partition_spec
from ..weights.adapted_weight import RowAdapters
from ..weights.params import Params, activation_dtype
from . import device_programs as programs

_MAX_ROWS = 64  # arrays of `of_rows`, that are kept


class AdapterStack:
    """N adapters for the rows of an engine, and one adapter of zeros. All have one rank R: adapters of a
    lower rank end with zeros.

    Attributes:
        paths: the paths of the matrices that they may change.
    """

    def __init__(
        self, params: Params, config: ModelConfig, number: int, rank: int, mesh: Mesh | None, create: Callable
    ):
        """Makes the stack. create: calls a function and puts its result on the devices of the parameters, if
        these are no mesh.
        """
        dtype = activation_dtype(params)
        specs = row_matrices(config)
        self.paths = sorted(specs)
        self._mesh = mesh
        self._places: dict[str, Any] = {}
        self._stacks: dict[str, tuple[Any, Any]] = {}  # a [N + 1, R, I] and scale * b [N + 1, O, R] of each
        self._num_layers = config.num_hidden_layers
        self._tree: Params | None = None  # of `adapters`
        self._rows: dict[bytes, jax.Array] = {}  # adapters of the rows of earlier calls, on the devices

        def empty(path: str, weight: Any) -> Any:
            (outputs, inputs) = weight.shape
            (of_outputs, of_inputs) = specs[path].axes
            shapes = (number + 1, rank, inputs), (number + 1, outputs, rank)
            stack = create(lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes))
            if mesh is not None:
                axes = (None, None, of_inputs), (None, of_outputs, None)
                divided = (partition_spec(*pair, mesh) for pair in zip(axes, shapes, strict=True))
                self._places[path] = tuple(NamedSharding(mesh, spec) for spec in divided)
                stack = jax.device_put(stack, self._places[path])
            self._stacks[path] = stack
            return weight

        map_matrices(params, self.paths, empty)

    def of_rows(self, adapter_B: np.ndarray) -> jax.Array:
        """Returns the adapters of rows on the devices, once for all matrices, int32. -1: none."""
        if (key := adapter_B.tobytes()) not in self._rows:
            if len(self._rows) >= _MAX_ROWS:
                self._rows.clear()
            place = None if self._mesh is None else NamedSharding(self._mesh, REPLICATED)
            self._rows[key] = jax.device_put(adapter_B, place)
        return self._rows[key]

    @property
    def adapters(self) -> Params:
        """`Extras.adapters`: the stacks of all matrices."""
        if self._tree is None:
            tree: Any = {}
            for path, stack in self._stacks.items():
                node = tree
                for name in path.split("."):
                    node = node.setdefault(name, {})
                node["weight"] = RowAdapters(*stack)
            layers = tree.pop("layers", {})
            self._tree = tree | {"layers": tuple(layers.get(str(i), {}) for i in range(self._num_layers))}
        return self._tree

    def set(self, run: Run, index: int, path: str, a: Any, b: Any, scale: float) -> None:
        """Replaces one matrix of an adapter. a [r, I], b [O, r], r at most R. None: it has none."""
        self._tree = None  # the arrays are donated
        stack = self._stacks[path]
        own_a, own_b = (np.zeros((1, *x.shape[1:]), x.dtype) for x in stack)
        if a is not None:
            own_a[0, : len(a)] = a
            own_b[0, :, : len(a)] = np.float32(scale) * b.astype(np.float32)
        stack = run(programs.SET_ROW, stack, np.int32(index), (own_a, own_b))
        self._stacks[path] = jax.device_put(stack, self._places[path]) if self._places else stack
