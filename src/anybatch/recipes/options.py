"""Options of a recipe: `-s key=value` strings, converted by the annotations of the function.

A recipe is a plain function with annotated arguments, which can also be called directly from Python, so
its options need no second description that could disagree with it. The value of an argument without an
annotation is read as a number, true or false if possible, as in JSON, and as text otherwise.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from anybatch.errors import InputError, listed

_UNKNOWN = (inspect.Parameter.empty, Any, object)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Option(NamedTuple):
    """Description of one option of a recipe: its name, type in words, default value
    (`inspect.Parameter.empty` if it is required) and text from the docstring."""

    name: str
    type: str
    default: Any
    doc: str

    @property
    def required(self) -> bool:
        """Whether the option must be given."""
        return self.default is inspect.Parameter.empty


def options_in(function: Callable[..., Any]) -> list[Option]:
    """Returns the options of `function`, in signature order, with the texts of its `Args:` section."""
    docs = _docs(inspect.getdoc(function) or "")
    return [
        Option(p.name, described(_annotation(function, p)), p.default, docs.get(p.name, ""))
        for p in inspect.signature(function).parameters.values()
        if p.kind not in _VARIADIC
    ]


def bind(
    function: Callable[..., Any], given: Mapping[str, str], place: str
) -> inspect.BoundArguments:
    """Binds the options in `given` to the arguments of `function`, converted by its annotations.

    A dash in a name is equivalent to an underscore (`global-batch=64`). Raises a single `InputError`
    that names `place` and every option that is unknown, missing, repeated or not convertible.
    """
    signature = inspect.signature(function)
    named = {p.name: p for p in signature.parameters.values() if p.kind not in _VARIADIC}
    rest = next((p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    texts: dict[str, str] = {}
    values: dict[str, Any] = {}
    faults: list[str] = []
    for key, text in given.items():
        name = key if key in named else key.replace("-", "_")
        parameter = named.get(name, rest)
        if parameter is None:
            instead = f"give {listed(named, name)}" if named else "it takes none"
            faults.append(f"there is no option {key!r}; {instead}")
        elif name in texts:
            faults.append(f"option {name!r} is given twice; give it once")
        else:
            texts[name] = text
            try:
                values[name] = convert(str(text), _annotation(function, parameter))
            except ValueError as error:
                faults.append(f"option {name!r} is {text!r}; {error}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in texts:
            kind = described(_annotation(function, parameter))
            faults.append(f"option {name!r} ({kind}) is required; add -s {name}=VALUE")
    if faults:
        raise InputError(f"{place} cannot be called with these options: {'; '.join(faults)}.")

    bound = signature.bind_partial()
    bound.arguments.update({name: values[name] for name in named if name in values})
    if rest is not None:
        bound.arguments[rest.name] = {n: v for n, v in values.items() if n not in named}
    bound.apply_defaults()
    return bound


def convert(text: str, annotation: Any = inspect.Parameter.empty) -> Any:
    """Converts `text` to `annotation` as pydantic does; `none` is None where the annotation allows it.

    Without an annotation, the result is an int, a float, True or False if possible, else `text`. Raises
    `ValueError` that states which values are allowed.
    """
    from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError  # takes 0.15 s

    if annotation in _UNKNOWN:
        parts = int | float | Literal[True, False] | str
        annotation = Annotated[parts, Field(union_mode="left_to_right")]
    wanted = described(annotation)
    if text.strip().lower() in ("none", "null") and "none" in wanted.split(" or "):
        return None
    try:
        adapter = TypeAdapter(annotation)
    except PydanticUserError:
        raise ValueError(f"its type, {wanted}, cannot be written as an option") from None
    for read in (adapter.validate_strings, adapter.validate_json):
        with suppress(ValidationError):
            value = read(text)
            if not isinstance(value, Path):
                return value
            if text:  # an empty text is not the current folder
                return value.expanduser()
    raise ValueError(f"it has to be {wanted}")


def described(annotation: Any) -> str:
    """Returns the type in words: `int`, `Path or none`, `'a' or 'b'`, `any`."""
    origin, members = get_origin(annotation), get_args(annotation)
    if annotation in _UNKNOWN:
        return "any"
    if annotation in (None, type(None)):
        return "none"
    if origin is Annotated:
        return described(members[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(described, members))
    if origin is Literal:
        return " or ".join(map(repr, members))
    return annotation.__name__ if isinstance(annotation, type) and not members else str(annotation)


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Returns the parameter's type: its annotation, evaluated if it is a string (as all annotations are
    under `from __future__ import annotations`), or the type of its default if that is a str or a Path.

    Annotations are evaluated one by one, so that one that cannot be evaluated (such as a name imported
    under TYPE_CHECKING) does not affect the others.
    """
    annotation = parameter.annotation
    if isinstance(annotation, str):
        inner = inspect.unwrap(function)
        inner = inner.func if isinstance(inner, partial) else inner
        try:
            annotation = eval(annotation, getattr(inner, "__globals__", {}))
        except Exception:  # an expression in user code can raise anything
            annotation = parameter.empty
    if annotation is parameter.empty and isinstance(parameter.default, str | Path):
        return Path if isinstance(parameter.default, Path) else str
    return annotation


def _docs(docstring: str) -> dict[str, str]:
    """Returns the entries under `Args:` of a Google style docstring, each joined to one line."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", docstring, re.MULTILINE)
    text = dedent(section[1]) if section else ""
    entry = r"^\*{0,2}(\w+)(?: \(.*?\))?:(.*(?:\n(?:[ \t].*)?)*)"
    return {
        name: " ".join(doc.split()) for name, doc in re.findall(entry, text, flags=re.MULTILINE)
    }


# ------------------------------------------------------------------------------------------ ranges


class Range(NamedTuple):
    """Allowed values of an option, in words and as a predicate."""

    words: str
    has: Callable[[Any], bool]


ABOVE_ZERO = Range("a number above zero", lambda value: 0 < value < math.inf)
AT_LEAST_ZERO = Range("a number of at least zero", lambda value: 0 <= value < math.inf)
COUNT = Range("a whole number of at least 1", lambda value: value >= 1)
PART = Range("a number from 0 up to, not including, 1", lambda value: 0 <= value < 1)


def check(recipe: str, options: dict[str, tuple[Any, Range]], more: Iterable[str] = ()) -> None:
    """Raises `InputError` that lists all of `options` that are out of range (None never is) and all
    faults in `more`, if there are any."""
    faults = [
        f"{name} is {value!r}; give {allowed.words}"
        for name, (value, allowed) in options.items()
        if value is not None and not allowed.has(value)
    ]
    if faults := [*faults, *more]:
        raise InputError(f"the recipe {recipe!r} cannot be made: {'; '.join(faults)}.")
