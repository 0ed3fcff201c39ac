"""Templates are compiled as transformers compiles them, and every character's writer is known or unknown."""

from __future__ import annotations

import json
from typing import Any

import jinja2.sandbox
import pytest

from openforgerl.errors import TemplateError
from openforgerl.rendering.template import ChatTemplate, traced_json
from openforgerl.rendering.traced import TEMPLATE, UNKNOWN, expand

DATA = 3


def render(source: str, clock: float = 0.0, **variables: Any) -> list[tuple[str, int]]:
    """Text and origin of every run."""
    values = {name: traced_json(value, DATA) for name, value in variables.items()}
    traced = ChatTemplate(source).render(values, clock)
    found: list[tuple[str, int]] = []
    for char, origin in zip(str.__str__(traced), expand(traced), strict=True):
        if found and found[-1][1] == origin:
            found[-1] = (found[-1][0] + char, origin)
        else:
            found.append((char, origin))
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<a>{{ x }}</a>", [("<a>", TEMPLATE), ("Hi you", DATA), ("</a>", TEMPLATE)]),
        ("{{ '<a>' + x }}", [("<a>", TEMPLATE), ("Hi you", DATA)]),
        ("{{ x ~ '<a>' }}", [("Hi you", DATA), ("<a>", TEMPLATE)]),
        ("{{ '<%s>' % x }}", [("<", TEMPLATE), ("Hi you", DATA), (">", TEMPLATE)]),
        ("{{ '<{}>'.format(x) }}", [("<", TEMPLATE), ("Hi you", DATA), (">", TEMPLATE)]),
        ("{{ '<%s>' | format(x) }}", [("<", TEMPLATE), ("Hi you", DATA), (">", TEMPLATE)]),
        ("{{ ['<', x, '>'] | join('|') }}", [("<|", TEMPLATE), ("Hi you", DATA), ("|>", TEMPLATE)]),
        ("{{ '|'.join(['<', x]) }}", [("<|", TEMPLATE), ("Hi you", DATA)]),
        ("{{ x.split(' ')[1] }}", [("you", DATA)]),
        ("{{ ('  <a> ' ~ x ~ ' ') | trim }}", [("<a> ", TEMPLATE), ("Hi you", DATA)]),
        ("{{ '<X>' | replace('X', x) }}", [("<", TEMPLATE), ("Hi you", DATA), (">", TEMPLATE)]),
        ("{{ x | tojson }}", [('"Hi you"', DATA)]),
        ("{{ '<a>' | tojson }}", [('"<a>"', TEMPLATE)]),
        ("{{ {'k': x, 'n': 1} | tojson(indent=1) }}", [('{\n "k": "Hi you",\n "n": 1\n}', DATA)]),
        ("{% macro m(v) %}<{{ v }}>{% endmacro %}{{ m(x) }}", [("<", TEMPLATE), ("Hi you", DATA), (">", TEMPLATE)]),
        ("{% set v %}<{{ x }}{% endset %}{{ v }}", [("<", TEMPLATE), ("Hi you", DATA)]),
        ("{% filter upper %}<a>{{ x }}{% endfilter %}", [("<A>", TEMPLATE), ("HI YOU", DATA)]),
        ("{% generation %}<{{ x }}{% endgeneration %}", [("<", TEMPLATE), ("Hi you", DATA)]),
        ("{% set n = namespace(v='<') %}{% set n.v = n.v + x %}{{ n.v }}", [("<", TEMPLATE), ("Hi you", DATA)]),
        ("{% for c in x %}{% if c == ' ' %}{% break %}{% endif %}{{ c }}{% endfor %}", [("Hi", DATA)]),
        ("{{ x[::-1] }}{{ x[0] }}", [("uoy iHH", DATA)]),
        ("{% for k, v in {'<': x}.items() %}{{ k ~ v }}{% endfor %}", [("<", TEMPLATE), ("Hi you", DATA)]),
        ("{{ x if x is string else '' }}{{ '<' if x else '' }}", [("Hi you", DATA), ("<", TEMPLATE)]),
        ("{{ x | length }}", [("6", UNKNOWN)]),
        ("{{ x | escape }}", [("Hi you", UNKNOWN)]),
        ("{{ [x] }}", [("['Hi you']", UNKNOWN)]),
        ("{{ x | wordwrap(3) }}", [("Hi\nyou", UNKNOWN)]),
    ],
)
def test_who_wrote_it(source: str, expected: list[tuple[str, int]]) -> None:
    assert render(source, x="Hi you") == expected


def test_block_whitespace_as_in_transformers() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == [("  a\nb", TEMPLATE)]


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ x | tojson }}", x="<é&'>") == [('"<é&\'>"', DATA)]
    assert render("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x={"b": 1, "a": [True, None]}) == [
        ('{"a":[true,null],"b":1}', DATA)
    ]


def test_the_clock_is_the_callers() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", clock=86400.0 * 365) == [("01 Jan 1971", TEMPLATE)]


def test_refusals_are_the_templates_words() -> None:
    with pytest.raises(TemplateError, match=r"^only two roles, not x$"):
        render("{{ raise_exception('only two roles, not ' ~ x) }}", x="x")
    with pytest.raises(TemplateError, match="'missing' is undefined"):
        render("{{ missing.attribute }}")
    with pytest.raises(TemplateError, match="TypeError"):
        render("{{ 1 + x }}", x="x")
    with pytest.raises(TemplateError, match="RecursionError"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ x._runs }}{{ x._runs[0] }}",
        "{{ x.strip.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(x) }}",
        "{{ '{0._runs}'.format(x) }}",
        "{{ [].append(1) }}",
        "{{ namespace(a=1).__init__.__globals__ }}",
        "{% for i in [1] %}{{ loop.__class__ }}{{ loop._iterable }}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m._func }}{{ m.__call__.__globals__ }}{{ m._environment }}",
        "{{ {'a': 1}.__class__ }}{{ {'a': 1}.pop('a') }}",
        "{{ {'a': 1}.clear() or '' }}{{ {'a': 1}.update({'b': 2}) or '' }}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ range(1000000000) | list }}",
        "{{ strftime_now.__globals__ }}{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = "".join(part for part, _ in render(source, x="Hi"))
    except TemplateError:
        return
    assert text == "", "an unsafe attribute is undefined, so it prints nothing"


@pytest.mark.parametrize(
    "source",
    [
        "{{ d.role }}{{ d.missing is defined }}{{ d['role'] }}{{ d.get('role') }}",
        "{{ d.items is callable }}{{ d['items'] }}{{ d.keys() | list }}",
        "{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}",
        "{{ none.role is defined }}{{ (d.missing or {}).role is defined }}{{ d.nested.deep.x }}",
        "{% for m in l %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.cycle('a', 'b') }}"
        "{{ loop.changed(m) }}{{ loop.length }}{{ loop.missing is defined }}{% endfor %}",
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
        "{{ m(1) }}{{ m(1, 3, 4, c=5) }}{{ m() }}",
        "{% macro outer() %}<{{ caller('x') }}>{% endmacro %}{% call(x) outer() %}{{ x }}{% endcall %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{% for m2 in l %}{% set y = m2 %}{{ m(y) }}{% endfor %}{{ m.name }}",
        "{{ d | tojson }}{{ d | tojson(indent=2) }}{{ l | tojson(separators=(',', ':')) }}",
        "{{ t | tojson }}{{ t | tojson(ensure_ascii=true) }}{{ d | tojson(sort_keys=true) }}",
        "{% set ns = namespace(a=1) %}{% set ns.f = d.items %}{{ ns.a }}{{ ns.missing is defined }}"
        "{{ ns.f is callable }}",
    ],
)
def test_what_is_asked_in_a_shorter_way_is_answered_as_jinja_answers(source: str) -> None:
    """Against the very environment of transformers, which knows none of our shortcuts."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **given: json.dumps(
        value, ensure_ascii=ensure_ascii, **given
    )
    d = {"role": "user", "items": 3, "nested": {"deep": {"x": 1.5}}}
    variables = {"d": d, "l": ["a", "b", "b"], "t": "\N{SNOWMAN}</a>"}
    expected = environment.from_string(source).render(variables)
    assert expected and ChatTemplate(source).text(variables, 0.0) == expected
    assert (
        ChatTemplate(source).render({name: traced_json(value, 0) for name, value in variables.items()}, 0.0) == expected
    )


def test_a_template_may_tell_lies_about_origins_only_to_its_cost() -> None:
    """Whatever loses track makes text unknown, and unknown text is not the template's."""
    assert all(origin != TEMPLATE for _, origin in render("{{ ('<' ~ x).translate({}) }}", x="a>"))
    assert render("{{ ('<' ~ x) | safe }}", x="a>") == render("{{ '<' ~ x }}", x="a>")  # this one does not
