"""Renders chat templates. They are untrusted code: jinja2's sandbox runs them, and their cost is counted."""

import functools
import json
from collections.abc import Callable
from datetime import datetime
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
from .template_budget import FREE_FILTERS, ITEM, NODE, TemplateBudget, limit_error

_MAX_CHARACTERS = 65_536  # of a template: these two limit the cost of compiling it
_MAX_NODES = 4_000

# Filters that no conversation needs, and whose cost does not follow from their arguments.
_REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# Tests that compare whole values.
_COMPARING_TESTS = (
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge",
    ">=", "in", "lower", "upper",
)  # fmt: skip


def render(source: str, variables: dict[str, Any]) -> str:
    """Renders a template with its variables (messages, tools, bos_token, …). Raises InputError if it is
    broken, exceeds its budget, or raises an error for this conversation.
    """
    try:
        return _Environment(variables).template(source).render(variables)
    except Exception as error:  # a template is code: any exception can occur
        raise InputError(
            f"the chat template rejects this conversation: {str(error) or type(error).__name__}"
        ) from error


# Of nodes that the sandbox does not intercept (output, ~, comparisons, keys): what they read, and what
# divides its cost.
_READ = {
    nodes.Output: ("nodes", 1),
    nodes.Concat: ("nodes", 1),
    nodes.Compare: ("expr", 16),
    nodes.Operand: ("expr", 16),
    nodes.Pair: ("key", 16),
}


class _AddCounting(NodeTransformer):
    """Rewrites a template so that its costs are counted. Each pass through a loop or a macro spends the cost
    of its nodes. The names in `_READ`, and slices, go through filters, which a template cannot call: their
    names end in "!".
    """

    def visit_For(self, node: Any) -> nodes.Node:
        count = nodes.Const(sum(1 for _ in node.find_all(nodes.Node)), lineno=node.lineno)
        spend = _apply_filter("spend_nodes!", count)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(spend, lineno=node.lineno))
        if getattr(node, "test", None):
            node.test = nodes.And(spend, node.test, lineno=node.lineno)
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _apply_filter("slice!", node) if isinstance(node.arg, nodes.Slice) else node

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if type(node) in _READ:
            field, share = _READ[type(node)]
            read = getattr(node, field)
            count = lambda x: _apply_filter("read!", x, nodes.Const(share))  # noqa: E731
            setattr(node, field, list(map(count, read)) if isinstance(read, list) else count(read))
        return node


def _apply_filter(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(first, name, list(others), [], None, None, lineno=first.lineno)


class _Generation(jinja2.ext.Extension):
    """Parses {% generation %} … {% endgeneration %}, which marks training targets. Rendering ignores the
    tags.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __repr__(self) -> str:  # without its values, which may contain the namespace itself
        return "<Namespace>"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that templates written for transformers expect, for one rendering."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self, variables: dict[str, Any]):
        extensions = [_Generation, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.budget = TemplateBudget(variables)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = self._to_json
        for name, function in self.filters.items():
            self.filters[name] = self._counting_filter(name, function)
        for name in _COMPARING_TESTS:
            self.tests[name] = self._counting_test(self.tests[name])
        added = {"spend_nodes!": self._spend_nodes, "read!": self._read, "slice!": self.budget.spend_result}
        for name, function in added.items():
            # With a context, so that jinja2 does not evaluate them at compile time.
            self.filters[name] = jinja2.pass_context(lambda _, *args, run=function: run(*args))
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise, strftime_now=self._now, namespace=_Namespace, range=self._range
        )

    def _spend_nodes(self, count: int) -> bool:
        self.budget.spend(NODE * count)
        return True

    def _read(self, value: Any, share: int) -> Any:
        self.budget.spend_read(value, share=share)
        return value

    def template(self, source: str) -> jinja2.Template:
        """Compiles a template."""
        if len(source) > _MAX_CHARACTERS:
            raise limit_error(f"{len(source)} characters of template")
        tree = self.parse(source)
        if (size := sum(1 for _ in tree.find_all(nodes.Node))) > _MAX_NODES:
            raise limit_error(f"{size} nodes of template")
        if tree.find(nodes.Block):
            raise limit_error("a block, for templates that extend others,")
        return self.from_string(_AddCounting().visit(tree))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Raises an error, although jinja2 would render nothing."""
        raise jinja2.sandbox.SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe"
        )

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Counts the hashing of a key that is not a text."""
        if not isinstance(argument, str | int):
            self.budget.spend_read(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Counts an operator, before and after it runs."""
        self.budget.spend_operator(operator, left, right)
        return self.budget.spend_result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts a call of a function or a method."""
        receiver = getattr(__obj, "__self__", None)
        own = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        __self.budget.spend(ITEM * (len(args) + len(own)))
        if isinstance(receiver, str):
            __self.budget.spend_method(__obj.__name__, receiver, args, own)
        elif getattr(__obj, "__name__", "") in ("fromkeys", "to_bytes") or isinstance(receiver, bytes):
            raise limit_error(f"the method {__obj.__name__!r}")
        elif not isinstance(__obj, Macro | LoopContext):
            items = receiver if isinstance(receiver, list | tuple | range) else None
            __self.budget.spend_read(args, own, items)
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.budget.spend_result(result) if isinstance(receiver, str) else result

    def wrap_str_format(self, value: Any) -> Any:
        """Counts str.format."""
        str_format = super().wrap_str_format(value)
        if str_format is None:
            return None

        def counting(*args: Any, **kwargs: Any) -> str:
            self.budget.spend_str_format(value.__self__, (args, kwargs))
            return str_format(*args, **kwargs)

        return counting

    def _counting_filter(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            # Some filters take a context as their first argument.
            own = args[isinstance(args[0], jinja2.Environment | Context | EvalContext) :]
            self.budget.spend_filter(name, own, kwargs)
            result = function(*args, **kwargs)
            return result if name in FREE_FILTERS else self.budget.spend_result(result)

        return counting

    def _counting_test(self, function: Any) -> Callable:
        @functools.wraps(function)
        def counting(*args: Any) -> Any:
            self.budget.spend_read(*args, share=16)
            return function(*args)

        return counting

    def _to_json(
        self, value: Any, ensure_ascii=False, indent: Any = None, separators=None, sort_keys=False
    ) -> str:
        """Returns JSON without the HTML escapes that jinja2 would add. Templates for transformers expect
        none.
        """
        if (indent if isinstance(indent, int) else len(indent or "")) > ITEM:
            raise limit_error(f"an indent of {indent!r}")
        settings = dict(indent=indent, separators=separators, sort_keys=sort_keys)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, **settings)
        chunks = []
        for chunk in encoder.iterencode(value):
            self.budget.spend(len(chunk))
            chunks.append(chunk)
        return "".join(chunks)

    def _now(self, date_format: str) -> str:
        self.budget.spend_percent_format(date_format)
        return datetime.now().strftime(date_format)

    def _range(self, *args: int) -> range:
        if any(abs(arg) > jinja2.sandbox.MAX_RANGE for arg in args):
            raise limit_error(f"a range of {args}")
        return range(*args)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
