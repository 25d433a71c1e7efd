"""A chat template is code from whoever made the checkpoint: it runs in jinja2's sandbox, where whatever takes
time or memory is counted, before it is done, and refused beyond a limit.

One unit of work is a character written; a part of a list or of a dict is `_PART` of them, a node of the
template that a loop or a macro passes through `_NODE`. A template has `_WORK`, and more for a long
conversation: for what it weighs, and for every pair of messages (some templates look back from each).
"""

import functools
import json
import re
import string
import time
from collections import abc
from collections.abc import Callable
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import InputError

_PART, _NODE = 64, 4
_WORK, _WORK_PER_UNIT, _WORK_PER_PAIR = 2_000_000, 64, 512
_SECONDS, _SECONDS_PER_UNIT = 0.1, 1e-7  # of the processor: beneath the count, should an operation be dearer
_BITS = 10_000  # of an integer
_DEPTH = 100  # of lists in lists; C code that walks them has no more stack than that is sure to fit
_SOURCE, _NODES = 65_536, 4_000  # characters and nodes of a template: what compiling it may take

# Filters that nobody needs for a conversation, whose work is not to be told from their arguments.
_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that look at the outermost list or dict alone.
_FREE = {"attr", "count", "d", "default", "first", "last", "length"}
_SHALLOW = {
    "batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
}  # fmt: skip
# Tests that look into what they are given.
_DEEP_TESTS = (
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge",
    ">=", "in", "lower", "upper",
)  # fmt: skip
# Methods of a text that write nothing, and those that write no more than they read.
_READING = {name for name in dir(str) if name.startswith("is")} | {
    "count", "endswith", "find", "index", "rfind", "rindex", "startswith",
}  # fmt: skip
_COPYING = {
    "capitalize", "casefold", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "strip", "swapcase", "title", "upper",
}  # fmt: skip


def render(source: str, variables: dict[str, Any]) -> str:
    """The text that a template makes of its variables (messages, tools, bos_token, …).

    Raises:
        InputError: the template is broken, asks for too much, or refuses the conversation.
    """
    try:
        environment = _Environment(variables)
        return environment.template(source).render(variables)
    except Exception as error:  # a template is code: anything can go wrong in it
        raise InputError(
            f"the chat template does not take this conversation: {str(error) or type(error).__name__}"
        ) from error


def _weight(value: Any, most: float = float("inf"), depth: int = _DEPTH) -> int:
    """Units of a value, counted as a tree, which is what it takes to print or compare it; of more than `most`
    any number above.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise _refused(f"an integer of {value.bit_length()} bits")
    if not isinstance(value, abc.Collection):
        return _PART
    if not depth:
        raise _refused(f"a depth of {_DEPTH} lists")
    total = _PART
    for part in chain.from_iterable(value.items()) if isinstance(value, abc.Mapping) else value:
        total += _PART + _weight(part, most - total, depth - 1)
        if total > most:
            break
    return total


def _refused(what: str) -> jinja2.TemplateError:
    return jinja2.TemplateError(f"{what} is more than a conversation needs")


class _Work:
    """What a template may still do."""

    def __init__(self, variables: dict[str, Any]):
        pairs = len(variables.get("messages", ())) ** 2
        self.left: float = _WORK + _WORK_PER_UNIT * _weight(variables) + _WORK_PER_PAIR * pairs
        self.until = time.thread_time() + _SECONDS + _SECONDS_PER_UNIT * self.left

    def spend(self, units: float) -> None:
        self.left -= max(units, 0) + _NODE
        if self.left < 0 or time.thread_time() > self.until:
            raise _refused("the time or memory that it takes")

    def weigh(self, *values: Any, share: int = 1) -> int:
        """Spends what reading the values takes: their weight, or a share of it where little is made of it."""
        units = _weight(values, share * self.left)
        self.spend(units / share)
        return units

    def made(self, value: Any) -> Any:
        """Spends what a new value takes, without the parts that it only refers to; iterators end as lists."""
        if isinstance(value, abc.Iterator):
            items = []
            for item in value:
                self.spend(_PART)
                items.append(item)
            return items
        parts = isinstance(value, abc.Collection) and not isinstance(value, str)
        self.spend(_PART * len(value) if parts else _weight(value))
        return value

    def percent(self, text: str, values: Any = ()) -> None:
        """Spends what % makes of a text with values."""
        found = list(_PERCENT.finditer(text))
        if any(text.startswith("(", field.end()) for field in found):
            raise _refused("a format with brackets in a name")
        self._fields(text, [field[1] for field in found], values)

    def braces(self, text: str, values: Any) -> None:
        """Spends what str.format makes of a text with values."""
        parsed = string.Formatter().parse(text)
        self._fields(text, [spec or "" for _, name, spec, _ in parsed if name is not None], values)

    def _fields(self, text: str, specs: list[str], values: Any) -> None:
        if any("*" in spec or "{" in spec for spec in specs):
            raise _refused("a width that is computed")
        widths = sum(int(digits) for spec in specs for digits in re.findall(r"\d+", spec))
        # Every field may show all values.
        self.spend(len(text) + widths + len(specs) * self.weigh(values))

    def method(self, name: str, text: str, args: tuple, kwargs: dict) -> None:
        """Spends what a method of a text takes."""
        if name not in _READING | _COPYING | _WIDENING.keys():
            raise _refused(f"the method {name!r} of a text")
        self.weigh(text, args, kwargs, share=16 if name in _READING else 1)
        if name in _WIDENING:
            self.spend(_WIDENING[name](text, *args, **kwargs))

    def filter(self, name: str, args: tuple, kwargs: dict) -> None:
        """Spends what a filter takes."""
        if name in _SHALLOW:
            self.spend(_PART * len(args[0]) if isinstance(args[0], abc.Sized) else _PART)
            self.weigh(args[1:], kwargs)
        elif name not in _FREE:
            self.weigh(args, kwargs)
        if name == "format":
            self.percent(str(args[0]), (args[1:], kwargs))
        elif name in _WIDER:
            self.spend(_WIDER[name](*args, **kwargs))


# A field of % or of strftime: a name in brackets, then flags, width and precision.
_PERCENT = re.compile(r"%(?:\([^()]*\))?([-+ #0-9.*_^]*)")


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * len(str(new))


# What methods of a text and filters write beyond what they read, by their own signatures.
_WIDENING: dict[str, Callable[..., float]] = {
    "center": lambda text, width, fill=" ": width,
    "ljust": lambda text, width, fill=" ": width,
    "rjust": lambda text, width, fill=" ": width,
    "zfill": lambda text, width: width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "join": lambda text, parts: len(text) * len(parts),
    "replace": _replaced,
}
_WIDER: dict[str, Callable[..., float]] = {
    "batch": lambda value, linecount, fill_with=None: _PART * linecount,
    "center": lambda value, width=80: width,
    "indent": lambda s, width=4, first=False, blank=False: (
        (len(str(s).splitlines()) + 2) * (len(width) if isinstance(width, str) else width)
    ),
    "join": lambda value, d="", attribute=None: len(str(d)) * len(value),
    "replace": _replaced,
    "round": lambda value, precision=0, method="common": _PART * abs(precision),
    # A sum of lists copies them again and again.
    "sum": lambda iterable, attribute=None, start=0: 0 if isinstance(start, int | float) else float("inf"),
}


class _Counted(NodeTransformer):
    """Rewrites a template: whoever passes a loop or a macro pays for its nodes, and what the sandbox
    does not intercept (output, ~, comparisons, slices, keys) goes through filters whose names no template can
    spell.
    """

    def visit_For(self, node: Any) -> nodes.Node:  # noqa: N802
        pay = _filtered("pay!", nodes.Const(sum(1 for _ in node.find_all(nodes.Node)), lineno=node.lineno))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(pay, lineno=node.lineno))
        if getattr(node, "test", None):
            node.test = nodes.And(pay, node.test, lineno=node.lineno)
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered("show!", child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("concat!", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("made!", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: Any) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered("read!", node.expr)
        return node

    visit_Operand = visit_Compare

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _filtered("read!", node.key)
        return node


def _filtered(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(first, name, list(others), [], None, None, lineno=first.lineno)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's words for training; rendering passes it
    through.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __repr__(self) -> str:  # what it holds may hold it
        return "<Namespace>"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What templates written for transformers expect, for one rendering."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self, variables: dict[str, Any]):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            optimized=False,
        )
        self.work = work = _Work(variables)
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters["tojson"] = self._to_json
        for name, function in self.filters.items():
            self.filters[name] = self._counted(name, function)
        for name in _DEEP_TESTS:
            self.tests[name] = self._weighed(self.tests[name])

        def pay(nodes: int) -> bool:
            work.spend(_NODE * nodes)
            return True

        # With a context, so that jinja2 does not run them while it compiles.
        own = {
            "pay!": pay,
            "show!": lambda value: (work.weigh(value), str(value))[1],
            "concat!": lambda *values: (work.weigh(*values), "".join(map(str, values)))[1],
            "read!": lambda value: (work.weigh(value, share=16), value)[1],
            "made!": work.made,
        }
        for name, function in own.items():
            self.filters[name] = jinja2.pass_context(lambda _, *args, run=function: run(*args))
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise, strftime_now=self._now, namespace=_Namespace, range=self._range
        )

    def template(self, source: str) -> jinja2.Template:
        """Compiles."""
        if len(source) > _SOURCE:
            raise _refused(f"{len(source)} characters of template")
        tree = self.parse(source)
        if (size := sum(1 for _ in tree.find_all(nodes.Node))) > _NODES:
            raise _refused(f"{size} nodes of template")
        if tree.find(nodes.Block):
            raise _refused("a block, for templates that extend others,")
        return self.from_string(_Counted().visit(tree))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuses at once, where jinja2 would render nothing in its place."""
        raise jinja2.sandbox.SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe"
        )

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Counts a key that is no text: it is hashed."""
        if not isinstance(argument, str | int):
            self.work.weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Counts what an operator makes, before where it may be large."""
        for value, times in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(times, int) and isinstance(value, abc.Sized):
                self.work.spend((1 if isinstance(value, str) else _PART) * len(value) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _BITS:
                raise _refused(f"an integer of {left.bit_length() * abs(right)} bits")
        if operator == "%" and isinstance(left, str):
            self.work.percent(left, right)
        elif isinstance(left, bytes):
            raise _refused("bytes")
        return self.work.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        """Counts what a method makes."""
        receiver = getattr(__obj, "__self__", None)
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        __self.work.spend(_PART * (len(args) + len(given)))
        if isinstance(receiver, str):
            __self.work.method(__obj.__name__, receiver, args, given)
        elif getattr(__obj, "__name__", "") in ("fromkeys", "to_bytes") or isinstance(receiver, bytes):
            raise _refused(f"the method {__obj.__name__!r}")
        elif not isinstance(__obj, Macro | LoopContext):
            __self.work.weigh(args, given, receiver if isinstance(receiver, list | tuple | range) else None)
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.work.made(result) if isinstance(receiver, str) else result

    def wrap_str_format(self, value: Any) -> Any:
        """Counts what str.format makes."""
        form = super().wrap_str_format(value)
        if form is None:
            return None

        def counted(*args: Any, **kwargs: Any) -> str:
            self.work.braces(value.__self__, (args, kwargs))
            return form(*args, **kwargs)

        return counted

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            # Some filters take a context first.
            given = args[isinstance(args[0], jinja2.Environment | Context | EvalContext) :]
            self.work.filter(name, given, kwargs)
            result = function(*args, **kwargs)
            return result if name in _FREE else self.work.made(result)

        return counted

    def _weighed(self, function: Any) -> Callable:
        @functools.wraps(function)
        def weighed(*args: Any) -> Any:
            self.work.weigh(*args, share=16)
            return function(*args)

        return weighed

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: json's own, that is, without jinja2's HTML."""
        if (indent if isinstance(indent, int) else len(indent or "")) > _PART:
            raise _refused(f"an indent of {indent!r}")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        chunks = []
        for chunk in encoder.iterencode(value):
            self.work.spend(len(chunk))
            chunks.append(chunk)
        return "".join(chunks)

    def _now(self, form: str) -> str:
        self.work.percent(form)
        return datetime.now().strftime(form)

    def _range(self, *args: int) -> range:
        if any(abs(arg) > jinja2.sandbox.MAX_RANGE for arg in args):
            raise _refused(f"a range of {args}")
        return range(*args)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
