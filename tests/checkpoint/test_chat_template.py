"""Chat templates are untrusted code: hostile ones are rejected, constructs of real ones work."""

import gc
import json
import resource
import sys
import time

import pytest

import xinfer_jax as xj
from xinfer_jax.tokenization.chat_template import render

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 你好"}]


def doubled(start: str, step: str, end: str = "") -> str:
    """A template that applies a step to n.x sixty times."""
    steps = f"{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{steps}{end}"


HOSTILE = {
    # operators, at compile time too, where jinja2 folds constants
    "repeated-text": "{{ 'a' * 10**10 }}",
    "repeated-text-from-the-left": "{{ 10**10 * 'a' }}",
    "repeated-list": "{{ ([1] * 10**10)|length }}",
    "repeated-tuple": "{% set x = (1, 2) * 10**9 %}",
    "repeated-twice": "{{ ('a' * 10**6) * 10**4 }}",
    "power": "{{ 10**(10**9) }}",
    "power-in-a-test": "{% if 3 ** (10**8) > 2 %}a{% endif %}",
    "percent-width": "{{ '%10000000000d' % 1 }}",
    "percent-precision": "{{ '%.1000000000f' % 1 }}",
    "percent-star": "{{ '%*d' % (10**10, 1) }}",
    "percent-name-in-brackets": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "percent-repeats": "{{ ('%(a)s' * 20000) % {'a': 'x' * 20000} }}",
    "in-autoescape": "{% autoescape 'a'|center(10**10) %}{% endautoescape %}",
    "in-a-default": "{% macro f(x='a' * 10**10) %}{% endmacro %}{{ f() }}",
    "unary": "{{ -(7 ** (10**8)) }}",
    "huge-literal": "{{ " + "9" * 9000 + " }}",
    "huge-hexadecimal": "{{ 0x" + "f" * 9000 + " * 2 }}",
    # methods
    "center": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "rjust": "{{ 'a'.rjust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "center-of-markup": "{{ ('a'|safe).center(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "expandtabs-by-name": "{{ '\t'.expandtabs(tabsize=10**10) }}",
    "unpacked-arguments": "{{ 'a'.center(*[10**10]) }}",
    "join-method": "{{ ('x' * 100000).join(range(100000)|map('string')) }}",
    "replace-method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace-nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "format-method": "{{ '{:>10000000000}'.format(1) }}",
    "format-nested": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format-nested-key": "{{ '{:>{0[w]}}'.format({'w': 10**10}) }}",
    "format-precision": "{{ '{:.1000000000f}'.format(1.5) }}",
    "format-repeats": "{{ ('{0}' * 20000).format('x' * 20000) }}",
    "format-map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "format-of-markup": "{{ ('{:>10000000000}'|safe).format(1) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "encode": "{{ ('a' * 100000).encode('punycode') }}",
    "striptags-method": "{{ (('<!-- -->' * 100000)|safe).striptags() }}",
    "to-bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "fromkeys": "{{ dict.fromkeys(range(100000), 1) }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "strftime-flags": "{{ strftime_now('%_1000000000d') }}",
    # filters
    "format-filter": "{{ '%10000000000d'|format(1) }}",
    "center-filter": "{{ 'a'|center(10**10) }}",
    "center-filter-by-name": "{{ 'a'|center(width=10**10) }}",
    "indent-filter": "{{ 'a\nb'|indent(10**10) }}",
    "indent-first": "{{ 'a'|indent(10**10, first=true) }}",
    "indent-text": "{{ ('\n' * 10000)|indent('x' * 10000, blank=true) }}",
    "join-filter": "{{ range(100000)|join('x' * 100000) }}",
    "replace-filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "tojson-indent": "{{ [[[1]]]|tojson(indent=10**10) }}",
    "tojson-deep-indent": "{{ (range(20000)|list)|tojson(indent=100000) }}",
    "tojson-separators": "{{ (range(20000)|list)|tojson(separators=('x' * 100000, ':')) }}",
    "round": "{{ 1|round(10**9, 'ceil') }}",
    "round-negative": "{{ 5|round(-10**9) }}",
    "sum-of-lists": "{{ (range(60000)|batch(1)|list)|sum(start=[]) }}",
    "many-maps": "{% for i in range(1000) %}{% set x = range(100000)|map('string')|list %}{% endfor %}",
    "map-center": "{{ ['a', 'b']|map('center', 10**10)|list }}",
    "filter-block": "{% filter center(10**10) %}a{% endfilter %}",
    "set-block": "{% set x|center(10**10) %}a{% endset %}",
    "wordwrap": "{{ ('a' * 1000000)|wordwrap(1) }}",
    "urlize": "{{ ('www.a.de ' * 100000)|urlize }}",
    "int-of-digits": "{{ ('9' * 100000)|int(base=36) * ('f' * 1000000)|int(base=16) }}",
    "colliding-keys": "{{ range(0, 2305843009213693951 * 90000, 2305843009213693951)|unique|list }}",
    "lipsum": "{{ lipsum(100000) }}",
    # doubling
    "doubled-text": doubled("'a'", "n.x ~ n.x"),
    "doubled-text-plus": doubled("'a'", "n.x + n.x"),
    "doubled-text-join": doubled("'a'", "[n.x, n.x]|join"),
    "doubled-text-format": doubled("'a'", "'%s%s' % (n.x, n.x)"),
    "doubled-text-replace": doubled("'a'", "n.x.replace('a', 'aa')"),
    "doubled-list": doubled("[1]", "n.x + n.x"),
    "doubled-number": doubled("3", "n.x * n.x"),
    "doubled-block": doubled("'a'", "n.x %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset"),
    "tree-as-text": doubled("[1]", "[n.x, n.x]", "{{ n.x }}"),
    "tree-as-json": doubled("[1]", "{'a': n.x, 'b': n.x}", "{{ n.x|tojson }}"),
    "tree-in-text": doubled("[1]", "[n.x, n.x]", "{{ 'a' ~ n.x }}"),
    "tree-compared": doubled("[1, 1]", "[[n.x[0], n.x[0]], [n.x[1], n.x[1]]]", "{{ n.x[0] == n.x[1] }}"),
    "tree-found": doubled("[1, 1]", "[[n.x[0], n.x[0]], [n.x[1], n.x[1]]]", "{{ n.x[0] in [n.x[1]] }}"),
    "tree-as-key": doubled("(1,)", "(n.x, n.x)", "{{ {n.x: 1} }}"),
    "tree-as-index": doubled("(1,)", "(n.x, n.x)", "{{ {}[n.x] }}"),
    "tree-unique": doubled("(1,)", "(n.x, n.x)", "{{ [n.x, n.x]|unique|list }}"),
    "tree-of-dicts": doubled("[1]", "dict(a=n.x, b=[n.x])", "{{ n.x }}"),
    "tree-formatted": doubled("[1]", "[n.x, n.x]", "{{ '%s' % [n.x] }}"),
    "deep-key": doubled("(1,)", "(n.x,)", "{{ {n.x: 1} }}").replace("60", "20000"),
    # loops
    "nested-ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested-printing": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "filtered-loop": "{% for a in range(99999) if range(99999)|sum == 0 %}{% endfor %}",
    "filtered-loops": "{% for a in range(999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "long-body": "{% for a in range(99999) %}" + "{% if a %}{% endif %}" * 1000 + "{% endfor %}",
    "much-text": "{% for a in range(99999) %}" + "x" * 60000 + "{% endfor %}",
    "slices": "{% set s = 'a' * 1000000 %}{% for a in range(99999) %}{% set x = s[1:] %}{% endfor %}",
    "finding": "{% set s = 'a' * 1000000 %}{% for a in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "splitting": "{% set s = 'ab' * 500000 %}{% for a in range(99) %}{% set x = s.split('b') %}{% endfor %}",
    "recursive-loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "wide-recursive-loop": "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "cycler": "{% set c = cycler('a' * 1000000, 'b') %}{% for a in range(99999) %}{{ c.next() }}{% endfor %}",
    "kept-copies": "{% set s = 'a' * 1000000 %}{% set n = namespace(x=[]) %}{% for a in range(999) %}"
    "{% set n.x = n.x + [s.upper()] %}{% endfor %}",
    # recursion
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro-tree": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "silent-macro-tree": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}"
    "{% endmacro %}{% set c = f(60) %}",
    "caller-tree": "{% macro f(n) %}{% if n %}{{ caller() }}{{ caller() }}{% endif %}{% endmacro %}"
    "{% macro g(n) %}{% if n %}{% call f(1) %}{{ g(n - 1) }}{% endcall %}{% endif %}"
    "{% endmacro %}{{ g(60) }}",
    "block-tree": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    # source
    "long-source": "x" * 50_000_000,
    "many-tags": "{{a}}" * 13_000,
    "many-sums": "{{ " + "a+" * 32_000 + "a }}",
    "many-brackets": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "many-lists": "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    "many-nots": "{{ " + "not " * 10_000 + "1 }}",
    "many-ifs": "{% if a %}" * 1000 + "{% endif %}" * 1000,
    "many-variables": "".join(f"{{% set a{i}=1 %}}{{% if a %}}{{% endif %}}" for i in range(1600)),
    "one-error": "{{ raise_exception('a' * 1900000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_rejected_quickly_with_little_memory(name):
    gc.freeze()  # collections then skip the objects of earlier tests
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    with pytest.raises(xj.InputError, match="the chat template rejects this conversation: ") as error:
        render(HOSTILE[name], dict(messages=MESSAGES, add_generation_prompt=True))
    spent = time.thread_time() - start
    gc.unfreeze()
    assert spent < 1, error
    assert "unexpected" not in str(error.value) and "expected" not in str(error.value)
    if sys.platform == "linux":  # KiB there
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "a": [1, None]}}}]
REAL = {
    # name: (template, text)
    "json-of-tools": (
        "{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}",
        json.dumps(TOOLS[0], indent=4) + "\n\n",
    ),
    "thinking": (
        "{% set c = '<think>\nhm\n</think>\n\nyes' %}{{ c.split('</think>')[-1].lstrip('\n') }}"
        "{{ c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}",
        "yeshm",
    ),
    "backwards": (
        "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}{% set index = messages|length - 1 -"
        " loop.index0 %}{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = index %}{% endif %}"
        "{% endfor %}{{ ns.last }}{{ messages[1:]|length }}",
        "11",
    ),
    "macro": (
        "{% macro kind(p, depth=0) %}{% if p is mapping %}{% for k, v in p|dictsort %}{{ k }}:"
        "{{ kind(v, depth + 1) }}{% if not loop.last %},{% endif %}{% endfor %}{% elif p is string %}{{ p }}"
        "{% else %}{{ p|length }}@{{ depth }}{% endif %}{% endmacro %}{{ kind(tools[0].function) }}",
        "name:f,parameters:a:2@2,type:object",
    ),
    "filters": (
        "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ')|trim|upper }}"
        "{{ 'a\nb'|indent(2) }}{{ [3, 1]|sort|list }}{{ 'ab'|replace('b', 'c')|capitalize }}"
        "{{ messages|map('length')|sum }}{{ 'x'|center(5) }}{{ ['a', 'b']|reverse|list }}",
        "HI 你好a\n  b[1, 3]Ac4  x  ['b', 'a']",
    ),
    "formats": (
        "{{ '%s: %5d|%-3s' % ('a', 7, 'b') }}{{ '{} {:>4} {x}'.format(1, 2, x='y') }}{{ '%d'|format(10**9) }}"
        "{{ '**%s**' % 5 }}",
        "a:     7|b  1    2 y1000000000**5**",
    ),
    "blocks": (
        "{% set b %}{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m['content'] }}"
        "{% endfor %}{% endset %}{{ b }}{% filter upper %}x{% endfilter %}"
        "{{ 'a' ~ 1 ~ none ~ nothing }}{{ 2**10 // 3 }}",
        "1Hi 你好Xa1None341",
    ),
    "comparisons": (
        "{{ 1 < 2 <= 2 }}{{ 'b' in 'abc' }}{{ 'role' in messages[0] }}{{ 'x' not in ['y'] }}"
        "{{ {'a': [1]} == {'a': [1]} }}{{ 'user' is in ['user'] }}",
        "True" * 6,
    ),
    "recursive-loop": (
        "{% for n in [[1, [2]], [3]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}",
        "123",
    ),
    "call": (
        "{% macro tag(n) %}<{{ n }}>{{ caller() }}</{{ n }}>{% endmacro %}{% call tag('a') %}b{% endcall %}",
        "<a>b</a>",
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_constructs_of_real_templates(name):
    template, text = REAL[name]
    assert render(template, dict(messages=MESSAGES, tools=TOOLS)) == text


def test_a_long_conversation_is_within_the_budget():
    """A million characters, and a template that looks back from each of 300 messages."""
    template = (
        "{% for m in messages %}{% set n = namespace(last=0) %}{% for b in messages[:loop.index0] %}"
        "{% if b.role == 'user' %}{% set n.last = loop.index %}{% endif %}{% endfor %}"
        "{{ n.last }}{{ m.content|trim }}{{ m.content.split('x')|length }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"{i}" * 1200} for i in range(300)]
    assert render(template, dict(messages=messages)) == "".join(
        f"{i}{m['content']}1" for i, m in enumerate(messages)
    )
