"""Parses the text of a compiled XLA module: computations, their instructions and shapes."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b(token|[a-z]+\d*\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_BITS = {"pred": 8, "token": 0, "c64": 64, "c128": 128}


class Array(NamedTuple):
    """Element type, sizes and layout of an array."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""  # with its braces; "": not given

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{self.layout}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def itemsize(self) -> float:
        """The bytes of an element. int4 has half of one."""
        bits = _BITS.get(self.dtype) or int(_first(r"^[a-z]+(\d+)", self.dtype) or 0)
        return bits / 8

    @property
    def bytes(self) -> float:
        return self.size * self.itemsize

    @property
    def is_in_hbm(self) -> bool:
        """Returns True if the array is in device memory. It is not if its layout has S(n). Single numbers do
        not count.
        """
        return "S(" not in self.layout and self.size > 1


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # the result; several of a tuple
    operands: tuple[str, ...]
    inner: str  # the text between the parentheses
    attributes: str  # the text behind them
    is_root: bool

    @property
    def size(self) -> int:
        """Number of elements of the result."""
        return sum(array.size for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The path of jax's name stack."""
        return _first(r'op_name="([^"]*)"', self.attributes)

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return _first(r'custom_call_target="([^"]*)"', self.attributes)

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop. None: unknown."""
        count = _first(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(count) if count else None

    @property
    def takes_cycles(self) -> bool:
        """Returns True if a TPU takes cycles to run the instruction, as XLA schedules it."""
        return int(_first(r'"estimated_cycles":"(\d+)"', self.attributes) or 0) > 0

    def called(self, key: str) -> str:
        """Returns the computation that this attribute names."""
        return _first(rf"\b{key}=%?([\w.\-]+)", self.attributes)

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, in the order of jax's branches: the computation of False
        first.
        """
        if names := _first(r"branch_computations=\{([^}]*)\}", self.attributes):
            return tuple(name.strip().lstrip("%") for name in names.split(","))
        return self.called("false_computation"), self.called("true_computation")


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of their execution."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)

    def users(self, name: str) -> list[Instruction]:
        """Returns the instructions that read a result."""
        return [instruction for instruction in self.instructions if name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


def parse_module(text: str) -> Module:
    """Returns the computations of a compiled module's text."""
    computations = {}
    entry = ""
    name = ""
    body: list[Instruction] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            entry = name if header[1] else entry
            body = []
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(body))
            name = ""
        elif name and (match := _LINE.match(line)):
            body.append(_parse_instruction(match))
    return Module(computations, entry)


def _parse_instruction(match: re.Match[str]) -> Instruction:
    rest = match[3]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape = rest[:end]
    opcode, _, rest = rest[end:].strip().partition("(")
    end = _closing("(" + rest) - 2
    inner = rest[:end]
    return Instruction(
        match[2],
        opcode,
        parse_arrays(shape),
        tuple(re.findall(r"%([\w.\-]+)", inner)),
        inner,
        rest[end + 1 :],
        bool(match[1]),
    )


def parse_arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays of a shape, which may be a tuple."""
    found = ((dtype, re.sub(r"[<=]", "", dims), layout) for dtype, dims, layout in _SHAPE.findall(shape))
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), layout) for dtype, dims, layout in found
    )


def _closing(text: str) -> int:
    """Returns the position behind the parenthesis that closes the first one."""
    depth = 0
    quoted = False
    for at, letter in enumerate(text):
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    return len(text)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
