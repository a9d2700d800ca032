"""Options are converted by the annotations of the function, and every fault is told at once."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from anybatch.errors import InputError
from anybatch.recipes.options import bind, convert, options_in


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("64", int, 64),
        ("-1_000", int, -1000),
        ("1e-3", float, 1e-3),
        ("3", float, 3.0),
        ("64", str, "64"),
        ("", str, ""),
        ("a/b", Path, Path("a/b")),
        ("yes", bool, True),
        ("False", bool, False),
        ("0", bool, False),
        ("adam", Literal["adam", "sgd"], "adam"),
        ("2", Literal[1, 2], 2),
        ("none", Optional[int], None),  # noqa: UP045
        ("7", int | None, 7),
        ("none", Path | None, None),
        ("none", str, "none"),
        ("0.5", Union[int, float], 0.5),  # noqa: UP007
        ("auto", int | Literal["auto"], "auto"),
        ("true", int | bool, True),
        ("x", Annotated[str, "a note"], "x"),
        ("none", Annotated[int | None, "a note"], None),
        ("5", list[int] | int, 5),
        ("[1, 2]", list[int], [1, 2]),
        ("5", Any, 5),
    ],
)
def test_text_becomes_the_annotated_type(text, annotation, value):
    converted = convert(text, annotation)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("3.5", 3.5), ("1e-3", 1e-3), ("true", True), ("False", False), ("run-1", "run-1")],
)
def test_without_an_annotation_it_is_read_as_json_would_be(text, value):
    assert convert(text) == value
    assert type(convert(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "annotation", "said"),
    [
        ("2.5", int, "it has to be int"),
        ("big", float, "it has to be float"),
        ("maybe", bool, "it has to be bool"),
        ("rmsprop", Literal["adam", "sgd"], "it has to be 'adam' or 'sgd'"),
        ("x", int | None, "it has to be int or none"),
        ("", Path, "it has to be Path"),
        ("1,2", list[int], r"it has to be list\[int\]"),
        ("x", Thread, "its type, Thread, cannot be written as an option"),
    ],
)
def test_text_that_does_not_fit_is_refused_with_what_does(text, annotation, said):
    with pytest.raises(ValueError, match=said):
        convert(text, annotation)


def example(steps: int, global_batch: int = 8, tag="run", data: Path | None = None, x=None):
    """An example.

    Args:
        steps: how long
            it takes.
        data (Path): a folder: or none.

    Returns:
        tag: not an option.
    """
    return steps, global_batch, tag, data, x


def call(function, given):
    bound = bind(function, given, "the function")
    return function(*bound.args, **bound.kwargs)


def test_given_options_are_bound_and_the_rest_keep_their_defaults():
    # A dash stands for an underscore; a default of text makes an unannotated option text.
    given = {"steps": "3", "global-batch": "16", "tag": "12", "x": "12"}
    assert call(example, given) == (3, 16, "12", None, 12)


def test_every_fault_is_told_at_once():
    given = {"global_batch": "many", "stepz": "3", "global-batch": "4"}
    with pytest.raises(InputError) as caught:
        bind(example, given, "the function")
    for words in (
        "the function cannot be called",
        "option 'global_batch' is 'many'; it has to be int",
        "there is no option 'stepz'; give 'steps', 'data', 'global_batch'",
        "option 'global_batch' is given twice",
        "option 'steps' (int) is required; add -s steps=VALUE",
    ):
        assert words in str(caught.value)


def test_a_function_without_options_says_so():
    with pytest.raises(InputError, match="no option 'a'; it takes none"):
        bind(lambda: None, {"a": "1"}, "the function")


def test_every_kind_of_parameter_can_be_given():
    def function(a: int, /, b: int = 2, *args: int, c: int, **rest: float):
        return a, b, args, c, rest

    assert call(function, {"c": "3", "a": "1", "d": "4"}) == (1, 2, (), 3, {"d": 4.0})


def test_one_annotation_that_cannot_be_read_does_not_cost_the_others():
    def function(a: int, b: OnlyForTheTypeChecker = 0):  # noqa: F821
        return a, b

    assert call(function, {"a": "1", "b": "2.5"}) == (1, 2.5)


def test_options_are_described_for_people():
    found = {option.name: option for option in options_in(example)}
    assert list(found) == ["steps", "global_batch", "tag", "data", "x"]
    assert [option.type for option in found.values()] == [
        "int",
        "int",
        "str",
        "Path or none",
        "any",
    ]
    assert found["steps"].required
    assert not found["global_batch"].required
    assert found["global_batch"].default == 8
    assert found["steps"].doc == "how long it takes."
    assert found["data"].doc == "a folder: or none."
    assert found["tag"].doc == ""
