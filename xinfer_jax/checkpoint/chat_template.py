"""A chat template is code from whoever made the checkpoint: in jinja2's sandbox all its work is counted."""

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
from .template_work import FREE, NODE, PART, Work, refused

_SOURCE = 65_536
_NODES = 4_000  # characters and nodes of a template: what compiling it may take

# Filters that nobody needs for a conversation, whose work is not to be told from their arguments.
_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# Tests that look into what they are given.
_DEEP_TESTS = (
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge",
    ">=", "in", "lower", "upper",
)  # fmt: skip


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


class _Counted(NodeTransformer):
    """Rewrites a template: whoever passes a loop or a macro pays for its nodes, and what the sandbox does not
    intercept (output, ~, comparisons, slices, keys) goes through filters whose names no template can spell.
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
    """{% generation %} … {% endgeneration %} marks words for training; rendering passes them through."""

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
        extensions = [_Generation, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.work = work = Work(variables)
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters["tojson"] = self._to_json
        for name, function in self.filters.items():
            self.filters[name] = self._counted(name, function)
        for name in _DEEP_TESTS:
            self.tests[name] = self._weighed(self.tests[name])

        def pay(nodes: int) -> bool:
            work.spend(NODE * nodes)
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
            raise refused(f"{len(source)} characters of template")
        tree = self.parse(source)
        if (size := sum(1 for _ in tree.find_all(nodes.Node))) > _NODES:
            raise refused(f"{size} nodes of template")
        if tree.find(nodes.Block):
            raise refused("a block, for templates that extend others,")
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
        """Counts what an operator makes, before and behind it."""
        self.work.operator(operator, left, right)
        return self.work.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        """Counts what a method makes."""
        receiver = getattr(__obj, "__self__", None)
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        __self.work.spend(PART * (len(args) + len(given)))
        if isinstance(receiver, str):
            __self.work.method(__obj.__name__, receiver, args, given)
        elif getattr(__obj, "__name__", "") in ("fromkeys", "to_bytes") or isinstance(receiver, bytes):
            raise refused(f"the method {__obj.__name__!r}")
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
            return result if name in FREE else self.work.made(result)

        return counted

    def _weighed(self, function: Any) -> Callable:
        @functools.wraps(function)
        def weighed(*args: Any) -> Any:
            self.work.weigh(*args, share=16)
            return function(*args)

        return weighed

    def _to_json(
        self, value: Any, ensure_ascii=False, indent: Any = None, separators=None, sort_keys=False
    ) -> str:
        """As transformers has it: json's own, that is, without jinja2's HTML."""
        if (indent if isinstance(indent, int) else len(indent or "")) > PART:
            raise refused(f"an indent of {indent!r}")
        settings = dict(indent=indent, separators=separators, sort_keys=sort_keys)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, **settings)
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
            raise refused(f"a range of {args}")
        return range(*args)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
