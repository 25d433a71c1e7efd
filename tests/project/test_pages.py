"""Pages in .docs: names and arguments in inline code exist, quoted messages are in the code, and figures of
memory are those of the plan.
"""

import ast
import functools
import inspect
import re

import pytest
from paths import ROOT

import xinfer_jax as xj
from xinfer_jax.estimates import plan_estimates
from xinfer_jax.estimates.card_specs import CARDS
from xinfer_jax.estimates.model_shapes import hf_config
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".docs").rglob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
TROUBLESHOOTING = ".docs/pages/troubleshooting.md"
# Instances by their usual names, with their classes.
INSTANCES = dict(engine=xj.Engine, model=xj.Model, request=xj.types.Request, stream=xj.types.TextStream)
ATTRIBUTES = ("memory", "prompt_logprobs")  # of instances, which their classes lack


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def expressions(page: str) -> list[ast.AST]:
    """Returns the inline code of a page that is Python; "…" stands for some argument or value."""
    found = []
    text = FENCED.sub("", text_of(page))
    if "/from-" in page:  # the first column of its tables is of another library
        text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
    for code in INLINE.findall(text):
        try:
            found.append(ast.parse(code.replace("\\|", "|").replace("…", "..."), mode="exec"))
        except SyntaxError:
            continue
    return found


def resolve(node: ast.AST) -> object:
    """Returns what `xj.a.b`, `engine.a` or `model.a` names; None: it is none of these. Fails if it does not
    exist.
    """
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        if owner is None or inspect.isfunction(owner) or isinstance(owner, property):
            return None
        fields = getattr(owner, "__dataclass_fields__", {})
        assert node.attr in {*fields, *ATTRIBUTES} or hasattr(owner, node.attr), ast.unparse(node)
        return getattr(owner, node.attr, None)
    if isinstance(node, ast.Name):
        return xj if node.id == "xj" else INSTANCES.get(node.id)
    return None


def takes(function: object, name: str) -> bool:
    """Whether a call takes an argument by this name."""
    if function is xj.Engine:
        return name in xj.EngineOptions.__dataclass_fields__
    parameters = inspect.signature(function).parameters
    names = {*parameters}
    if function in (xj.Engine.submit, xj.Engine.submit_many, xj.Engine.sample, xj.Engine.generate):
        names |= {*xj.RequestOptions.__dataclass_fields__}
    if function is xj.Model.sampling_config:
        names |= {*xj.SamplingConfig.__dataclass_fields__}
    return name in names


@pytest.mark.parametrize("page", PAGES)
def test_names_and_arguments_exist(page):
    for tree in expressions(page):
        for node in ast.walk(tree):
            resolve(node)
            if isinstance(node, ast.Call) and callable(function := resolve(node.func)):
                for keyword in node.keywords:
                    if keyword.arg and function.__module__.startswith("xinfer_jax"):
                        assert takes(function, keyword.arg), ast.unparse(node)


@functools.cache
def literals() -> list[str]:
    """Returns the texts in the code of the library. A value within an f-string is a line feed."""
    found = []
    for path in (*(ROOT / "xinfer_jax").rglob("*.py"), *(ROOT / "kernels_pallas").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
                found.append("".join(map(str, parts)))
    return found


def messages() -> list[str]:
    """Returns the lines of the blocks ```text of the page; "…" stands for a value."""
    blocks = (code for language, code in FENCED.findall(text_of(TROUBLESHOOTING)) if language == "text")
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_in_the_code(message):
    parts = [part.strip() for part in message.split("…")]
    assert max(map(len, parts)) > 10
    for part in filter(None, parts):
        assert any(part in literal for literal in literals()), part


def test_many_messages_are_quoted():
    assert len(messages()) >= 40


def test_figures_of_memory_are_those_of_the_plan():
    text = text_of(".docs/pages/recipes.md")
    rows = re.search(r"<!-- plan -->\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        name, weights, devices, *shown, fit = (cell.strip() for cell in row.strip("|").split("|"))
        config = from_hf(hf_config(name))
        job = plan_estimates.EngineLoad(config, weights, "bfloat16", rows=8, context=4096, chunk=256)
        plan = plan_estimates.mesh_plan(job, 1)
        parts = plan.parts
        sizes = parts["weights"], parts["pages"] + parts["states"], parts["temporaries"] + parts["logits"]
        assert shown == [f"{size / 2**30:.1f}" for size in sizes], row
        card = CARDS[devices.removeprefix("1x")]
        free = card.memory_gib * card.memory_fraction * 2**30 - plan.total
        assert int(fit) == max(0, 8 + int(free // plan_estimates.row_bytes(job, 1))), row
