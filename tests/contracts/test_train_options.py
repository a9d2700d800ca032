"""`anybatch train` and `anybatch.train` have the same options with the same defaults.

Each lists them for its own readers, as words with help or as typed arguments; what only one of them has
is named here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from anybatch.cli.options import with_groups
from anybatch.cli.train import train
from anybatch.runs import planning
from anybatch.runs import train as run

OF_THE_COMMAND = {"context", "global_batch", "settings", "why"}
OF_THE_COMMAND |= {"reproducible", "grain"}  # of the task, in Python
OF_THE_COMMAND |= {"rendezvous_secret"}  # in Python, a variable of the environment
OF_THE_COMMAND |= {"track"}  # in Python one of `sinks`
OF_THE_COMMAND |= {"backend"}  # which says what the device has said
OF_PYTHON = {"sinks", "progress"}
IN_OTHER_WORDS = {
    "plan": {"plan_file"},
    "exchange": {"compress", "local_steps", "stale"},
    "sharding": {"shard_over"},
}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


IN_PYTHON, ON_THE_COMMAND_LINE = defaults(run.train), defaults(with_groups(train))
IN_THE_SAME_WORDS = sorted(IN_PYTHON.keys() - OF_PYTHON - IN_OTHER_WORDS.keys() - {"task"})


def test_the_command_and_the_function_have_the_same_options():
    words = set().union(*IN_OTHER_WORDS.values())
    assert ON_THE_COMMAND_LINE.keys() - OF_THE_COMMAND - words == {"task", *IN_THE_SAME_WORDS}


@pytest.mark.parametrize("name", IN_THE_SAME_WORDS)
def test_an_option_has_one_default(name: str):
    typed, written = IN_PYTHON[name], ON_THE_COMMAND_LINE[name]
    if name == "nodes":  # a word, since it may be two numbers
        assert str(typed) == written
    else:
        assert typed == written


@pytest.mark.parametrize("function", [run.train, planning.plan])
def test_what_a_plan_settles_has_one_default(function: Callable[..., Any]):
    found = defaults(function)
    for option in fields(planning.PlanOptions):
        assert found[option.name] == option.default
