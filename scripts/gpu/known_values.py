"""Evaluates a jaxpr with those values that are known before it runs: settings, lengths, block tables. That
decides which branches run, how often loops run, and with which scalars kernels are called.

None stands for an unknown value.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

MOST_ELEMENTS = 2**24  # of a known array


def _div(x, y):
    if not np.issubdtype(np.result_type(x), np.integer):
        return np.divide(x, y)
    y = np.where(y == 0, 1, y)
    quotient = np.abs(x) // np.abs(y)
    return np.asarray(np.sign(x) * np.sign(y) * quotient, np.result_type(x))


def _select(which, *cases):
    which = np.asarray(which)
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "rem": np.fmod, "max": np.maximum,
    "min": np.minimum, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "sign": np.sign, "abs": np.abs, "select_n": _select,
    "shift_left": np.left_shift, "stop_gradient": lambda x: x, "copy": lambda x: x, "copy_p": lambda x: x,
    "optimization_barrier": lambda x: x, "layout_cast": lambda x: x, "pvary": lambda x: x,
    "square": np.square, "clamp": lambda low, x, high: np.clip(x, low, high), "add_any": operator.add,
}  # fmt: skip


def apply_primitive(name: str, primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any] | None:
    """The results of a primitive on known values; None: it cannot be computed here."""
    if function := _BINARY.get(name):
        if name == "optimization_barrier":
            return values
        return [function(*values)]
    if name == "convert_element_type":
        return [np.asarray(values[0]).astype(params["new_dtype"])]
    if name == "broadcast_in_dim":
        return [_broadcast(np.asarray(values[0]), params["shape"], params["broadcast_dimensions"])]
    if name == "reshape":
        return [np.reshape(values[0], params["new_sizes"])]
    if name == "squeeze":
        return [np.squeeze(values[0], params["dimensions"])]
    if name == "iota":
        shape = params["shape"]
        dimension = params["dimension"]
        index = np.arange(shape[dimension], dtype=params["dtype"])
        return [_broadcast(index, shape, (dimension,))]
    if "jaxpr" in params or "call_jaxpr" in params:
        return None
    try:
        out = primitive.bind(*map(jnp.asarray, values), **params)
    except Exception:  # a primitive of kernels, which runs nowhere else
        return None
    return [np.asarray(x) for x in (out if primitive.multiple_results else [out])]


def short_circuit(name: str, values: list[Any]) -> Any:
    """The result of a primitive that some known values decide alone; None: they do not."""
    known = [value for value in values if value is not None]
    if name == "and" and any(np.asarray(value).dtype == bool and not np.any(value) for value in known):
        return next(value for value in known if not np.any(value))
    if name == "or" and any(np.asarray(value).dtype == bool and np.all(value) for value in known):
        return next(value for value in known if np.all(value))
    if name == "select_n" and values[0] is not None:
        which = np.asarray(values[0])
        if which.size and np.all(which == which.flat[0]):
            return values[1 + int(which.flat[0])]
    return None


def _broadcast(x: np.ndarray, shape: tuple[int, ...], dimensions: tuple[int, ...]) -> np.ndarray:
    wide = [1] * len(shape)
    for size, dimension in zip(x.shape, dimensions, strict=True):
        wide[dimension] = size
    return np.broadcast_to(x.reshape(wide), shape)


def is_small(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is worth knowing."""
    return math.prod(shape) <= MOST_ELEMENTS


KERNELS = ("pallas_call", "mpmd_map")
_MOST_STEPS = 4096  # of a loop that is followed step by step
_CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
    " custom_vmap_call custom_lin shard_map".split()
)


class SourcePlace(NamedTuple):
    """Where an equation is: the loops and branches around it, and its source line."""

    path: tuple[str, ...]
    file: str
    line: int


class Observer:
    """Hears of what an evaluation meets; does nothing."""

    def on_branch(self, place: SourcePlace, index: int | None) -> None:
        """A conditional takes this branch; None: unknown."""

    def on_loop(self, place: SourcePlace, trips: int | None) -> None:
        """A loop ends after so many iterations."""

    def on_kernel(self, place: SourcePlace, equation: Any, values: list[Any]) -> None:
        """A Pallas kernel is called."""


class Evaluator:
    """Evaluates jaxprs."""

    def __init__(self, observer: Observer, one_step: bool = False, platform: str = "cuda"):
        """
        Args:
            observer: hears of branches, loops and kernels.
            one_step: outermost loops, those over decode steps, end after one iteration.
            platform: whose branch of `lax.platform_dependent` runs.
        """
        self._observer = observer
        self._one_step = one_step
        self._platform = platform
        self.steps = 0  # equations so far
        self._prepared: dict[int, Any] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: tuple[str, ...] = ()) -> list:
        """The results of a jaxpr on values."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        if id(jaxpr) not in self._prepared:
            self._prepared[id(jaxpr)] = jaxpr, [_prepare(equation) for equation in jaxpr.eqns]
        for equation, literals, variables in self._prepared[id(jaxpr)][1]:
            self.steps += 1
            values = [
                literal if var is None else env.get(var)
                for var, literal in zip(variables, literals, strict=True)
            ]
            results = self.equation(equation, values, path)
            if results is not None:
                env.update(zip(equation.outvars, results, strict=True))
        return [var.val if hasattr(var, "val") else env.get(var) for var in jaxpr.outvars]

    def closed(self, jaxpr: Any, args: Sequence[Any], path: tuple[str, ...]) -> list:
        """`run` of a closed jaxpr, or of one without constants."""
        consts = [_known_constant(value) for value in getattr(jaxpr, "consts", ())]
        return self.run(getattr(jaxpr, "jaxpr", jaxpr), consts, args, path)

    def equation(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> Sequence[Any] | None:
        """The results of an equation; None: unknown."""
        name = equation.primitive.name
        params = equation.params
        if name == "cond":
            return self._cond(equation, values, path)
        if name == "while":
            return self._while(equation, values, path)
        if name == "scan":
            return self._scan(equation, values, path)
        if name in KERNELS:
            self._observer.on_kernel(place_of(equation, path), equation, values)
            return None
        if name in _CALLS:
            jaxpr = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params)
            return self.closed(jaxpr, _of_shard(params, values) if name == "shard_map" else values, path)
        if not equation.outvars or not all(is_small(getattr(x.aval, "shape", ())) for x in equation.outvars):
            return None
        if any(value is None for value in values):
            result = short_circuit(name, values)
            return None if result is None else [np.broadcast_to(result, equation.outvars[0].aval.shape)]
        return apply_primitive(name, equation.primitive, values, params)

    def _cond(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> list | None:
        branches = equation.params["branches"]
        platforms = equation.params.get("branches_platforms")
        index = None if values[0] is None else int(values[0])
        if platforms is not None:  # of `lax.platform_dependent`: the compiled text has no conditional
            index = next(i for i, names in enumerate(platforms) if names is None or self._platform in names)
        else:
            self._observer.on_branch(place_of(equation, path), index)
        if index is None:
            results = []
            for i, branch in enumerate(branches):
                results.append(self.closed(branch, values[1:], (*path, "cond", f"branch_{i}_fun")))
            return None
        index = min(max(index, 0), len(branches) - 1)
        number = index if platforms is None else 0  # of the branches that the platform has
        inside = (*path, "cond", f"branch_{number}_fun")
        return self.closed(branches[index], values[1:], inside)

    def _while(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> list:
        params = equation.params
        of_test = params["cond_nconsts"]
        of_body = params["body_nconsts"]
        test_consts = values[:of_test]
        body_consts = values[of_test : of_test + of_body]
        carry = values[of_test + of_body :]
        inside = (*path, "while")
        trips = 0
        while trips < _MOST_STEPS:
            (more,) = self.closed(params["cond_jaxpr"], [*test_consts, *carry], (*inside, "cond"))
            if more is None:
                break
            if not more:
                self._observer.on_loop(place_of(equation, path), trips)
                return carry
            carry = self.closed(params["body_jaxpr"], [*body_consts, *carry], (*inside, "body"))
            trips += 1
            if path == () and self._one_step:
                break
        else:
            self._observer.on_loop(place_of(equation, path), None)
            return [None] * len(carry)
        self._observer.on_loop(place_of(equation, path), trips or None)
        if trips == 0:  # once, with what does not change
            body = getattr(params["body_jaxpr"], "jaxpr", params["body_jaxpr"])
            same = [out is var for out, var in zip(body.outvars, body.invars[of_body:], strict=True)]
            carry = [value if stays else None for value, stays in zip(carry, same, strict=True)]
            self.closed(params["body_jaxpr"], [*body_consts, *carry], (*inside, "body"))
        return [None] * len(carry)

    def _scan(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> list:
        params = equation.params
        jaxpr = params["jaxpr"]
        consts, carried = _scan_sizes(params)
        carry = values[consts : consts + carried]
        xs = values[consts + carried :]
        length = params["length"]
        inside = (*path, "while", "body")
        for i in range(length):
            at = length - 1 - i if params["reverse"] else i
            of_step = [None if x is None else np.asarray(x)[at] for x in xs]
            carry = self.closed(jaxpr, [*values[:consts], *carry, *of_step], inside)[:carried]
        return [*carry, *[None] * (len(equation.outvars) - carried)]


def _of_shard(params: dict[str, Any], values: list[Any]) -> list[Any]:
    """What is known of the arguments inside a `shard_map`: those that all devices have whole."""
    specs = params.get("in_specs", [("?",)] * len(values))
    return [None if any(spec) else value for value, spec in zip(values, specs, strict=True)]


def _prepare(equation: Any) -> tuple[Any, list[Any], list[Any]]:
    """An equation, its literals, and its variables; None where the other one stands."""
    literals = [np.asarray(var.val) if hasattr(var, "val") else None for var in equation.invars]
    return equation, literals, [None if hasattr(var, "val") else var for var in equation.invars]


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carried values."""
    if "ft_in" in params:  # since jax 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def place_of(equation: Any, path: tuple[str, ...]) -> SourcePlace:
    """Where an equation is: the innermost line outside of jax."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        file = frame.file_name
        if "/jax/" not in file and not file.startswith("<"):
            return SourcePlace(path, file, frame.line_num)
    return SourcePlace(path, "", 0)


def known_leaf(x: Any) -> Any:
    """The value of an argument; None: of a shape, of PRNG keys."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    return None


def _known_constant(value: Any) -> Any:
    if not hasattr(value, "shape"):
        return value
    is_key = not isinstance(value, np.ndarray) and "key<" in str(value.dtype)
    return None if is_key or not is_small(value.shape) else np.asarray(value)
