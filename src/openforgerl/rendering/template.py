"""A Hugging Face chat template, compiled as transformers compiles it, without transformers.

Same environment: immutable sandbox, `trim_blocks`, `lstrip_blocks`, loop controls, `{% generation %}`,
`tojson` without HTML escapes, `raise_exception`, `strftime_now` (from the caller's frozen clock, in UTC).

A conversation is rendered twice: by that environment, whose text is the answer, and by one that traces who
wrote every character. Should the two texts ever differ, the first stands and every origin is unknown, so that
nothing in it is restored and nothing that data may have written is structure.

A template runs with the sandbox's bounds (no attribute tricks, `range` of at most 100,000 items, Python's
recursion limit) but without a time limit: nested loops can be made slow. Templates come with the weights and
are trusted that far; conversations cannot add loops.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro

from openforgerl.errors import TemplateError
from openforgerl.rendering.traced import (
    TEMPLATE,
    UNKNOWN,
    Traced,
    concat,
    formatted,
    join,
    least_trusted,
    uniform,
)
from openforgerl.types import JsonValue

_OF_DICTS = frozenset(dir(dict))
_ABSENT = object()
_ENCODER = json.JSONEncoder(ensure_ascii=False)


class ChatTemplate:
    """One compiled template; rendering has no side effects."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._plain = _plain_environment().from_string(source)
            self._traced = _traced_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, variables: Mapping[str, JsonValue], clock: float, *, plain: Mapping[str, JsonValue] | None = None
    ) -> Traced:
        """The text for `variables` (strings in them may be traced), with an origin for every character.

        `plain` are the same without any traced string, where the caller has them. `clock` is in Unix seconds. Raises
        `TemplateError` with the template's own words.
        """
        now = _clock(clock)
        text = _run(self._plain, {**(untraced(variables) if plain is None else plain), "strftime_now": now})
        traced = _run(self._traced, {**variables, "strftime_now": _traced_clock(now)})
        if isinstance(traced, Traced) and traced == text:
            return traced
        return uniform(text, UNKNOWN)

    def text(self, variables: Mapping[str, JsonValue], clock: float) -> str:
        """The text alone, as transformers renders it."""
        return _run(self._plain, {**untraced(variables), "strftime_now": _clock(clock)})


def traced_json(value: JsonValue, origin: int) -> JsonValue:
    """A copy of a JSON value in which every string, keys too, is traced to `origin`."""
    if isinstance(value, str):
        return uniform(value, origin)
    if isinstance(value, Mapping):
        return {traced_json(key, origin): traced_json(item, origin) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [traced_json(item, origin) for item in value]
    return value


def strings_in(value: JsonValue) -> Iterable[str]:
    """Every string of a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def untraced(value: Any) -> Any:
    """A copy of a JSON value in which no string is traced."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {untraced(key): untraced(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [untraced(item) for item in value]
    return value


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(**variables)
    except jinja2.TemplateError as error:
        raise TemplateError(error.message or type(error).__name__) from error
    # A template is a program: whatever Python error it runs into is the conversation's misfit with it.
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


def _clock(seconds: float) -> Callable[[str], str]:
    return datetime.fromtimestamp(seconds, UTC).strftime


def _traced_clock(now: Callable[[str], str]) -> Callable[[str], str]:
    def traced_now(form: str) -> str:
        return uniform(now(form), TEMPLATE)

    return traced_now


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks assistant text for trainers; its text passes unchanged."""

    tags = {"generation"}  # noqa: RUF012  # the class attribute that jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Macro) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` that stores no underscore names: they would reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot store {name!r}; rename it without the underscore")
        super().__setitem__(name, value)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _ENCODER.encode(value)  # what `json.dumps` would make anew for each call of each turn
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _traced_to_json(value: Any, *args: Any, **kwargs: Any) -> Traced:
    # The whole text is data as soon as one string in it is: JSON punctuation is nobody's structure.
    return uniform(_to_json(value, *args, **kwargs), least_trusted(strings_in(value)))


def _equip(environment: jinja2.Environment) -> None:
    names = cast("dict[str, Any]", environment.globals)
    names.update(raise_exception=_refuse, dict=_make_dict, namespace=_Namespace)
    environment.filters["tojson"] = _to_json


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's immutable sandbox, asked the same questions less often: templates ask for the same few attributes of
    every message, and every prompt holds all messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            # An object of JSON has no such attribute, so the sandbox would come to its key, by way of an exception.
            value = obj.get(attribute, _ABSENT)
            return self.undefined(obj=obj, name=attribute) if value is _ABSENT else value
        if kind is LoopContext and not attribute.startswith("_") and hasattr(LoopContext, attribute):
            return getattr(obj, attribute)  # `loop.first` and its like, which the sandbox allows
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is not Macro:
            return super().call(__context, __obj, *args, **kwargs)
        # What `Context.call` comes to for the template's own macros, which are always safe to call.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        try:
            return __obj(__context.eval_ctx, *args, **kwargs)
        except StopIteration:
            return __self.undefined("value was undefined because a callable raised a StopIteration exception")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox says; it asks nothing of `obj` but its type, and nothing of `value`."""
        key = (type(obj), attr)
        safe = self._safe.get(key)
        if safe is None:
            safe = self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return safe


def _plain_environment() -> jinja2.Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    _equip(environment)
    return environment


class _TracingCode(CodeGenerator):
    """Generates code in which the template's own literals are traced and `~` keeps origins."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.literal({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.literal({node.data!r})")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.literal({''.join(map(str, group))!r})"

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")))")


def _literal(text: str) -> Traced:
    """A string that stands in the template's source."""
    return uniform(text, TEMPLATE)


class _TracingEnvironment(_Environment):
    code_generator_class = _TracingCode
    concat = staticmethod(concat)
    intercepted_binops = frozenset({"%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Made once: there are as many as the template's source has, and each is asked for in every turn.
        self.literal = lru_cache(maxsize=None)(_literal)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if not isinstance(left, str):
            return super().call_binop(context, operator, left, right)
        if isinstance(right, Mapping):
            return formatted(left, (), dict(right), lambda form, _, named: form % named)
        args = right if isinstance(right, tuple) else (right,)
        return formatted(left, args, {}, lambda form, given, _: form % given)

    def wrap_str_format(self, value: Any) -> Any:
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text: Any = value.__self__
        if not isinstance(text, str):
            return None
        sandboxed: Any = super().wrap_str_format(getattr(str.__str__(text), value.__name__))

        def wrapped(*args: Any, **kwargs: Any) -> str:
            return formatted(text, args, kwargs, lambda _, given, named: sandboxed(*given, **named))

        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner: Any = getattr(__obj, "__self__", None)
        if type(owner) is str and isinstance(__obj, BuiltinMethodType):
            __obj = getattr(uniform(owner, UNKNOWN), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)


def _traced_environment() -> jinja2.Environment:
    # optimized=False: constant folding would bake untraced strings into lists and tuples.
    environment = _TracingEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], optimized=False
    )
    _equip(environment)
    filters: dict[str, Any] = cast("dict[str, Any]", environment.filters)
    plain_join, plain_indent, markup = filters["join"], filters["indent"], filters["safe"]
    filters["tojson"] = _traced_to_json

    @jinja2.pass_eval_context
    def joined(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            return plain_join(context, value, d, attribute)
        return join(str(d), map(str, value))

    def replaced(s: Any, old: str, new: str, count: int | None = None) -> str:
        text = s if isinstance(s, Traced) else uniform(str(s), UNKNOWN)
        return text.replace(str(old), str(new), -1 if count is None else count)

    def indented(s: str, *args: Any, **kwargs: Any) -> str:
        # What indenting adds is white space only, so the least trusted origin of the text covers it.
        return uniform(plain_indent(str.__str__(s), *args, **kwargs), least_trusted((s,)))

    def filled(value: Any, *args: Any, **kwargs: Any) -> str:
        pattern = value if isinstance(value, str) else str(value)
        return formatted(pattern, args, kwargs, lambda form, given, named: form % (named or given))

    def kept(value: Any) -> Any:
        # Nothing is escaped here, so `safe` changes nothing, but its own string would forget who wrote it.
        return value if isinstance(value, Traced) else markup(value)

    filters.update(safe=kept, join=joined, replace=replaced, indent=indented, format=filled)
    return environment
