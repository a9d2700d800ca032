"""Slurm's short forms, written out: `node[01-03,7],gpu` as names, `2(x3),1` as numbers.

`scontrol show hostnames` would write out the first, but it is not installed in every container that
a job step runs in, and every rank would have to ask.
"""

from __future__ import annotations

import re

from anybatch.errors import InputError

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?$")


def hosts(text: str) -> list[str]:
    """The names of a Slurm host list, in its order. Brackets may stand anywhere in a name and more
    than once; leading zeros are kept.

    Raises `InputError` for what is not such a list.
    """
    names: list[str] = []
    for part in _PART.findall(text):
        names += _expand(part, text)
    if not names or ",".join(_PART.findall(text)) != text:
        raise InputError(f"{text!r} is not a Slurm host list such as node[01-03],gpu.")
    return names


def counts(text: str) -> list[int]:
    """One number per node of `SLURM_TASKS_PER_NODE`: `2(x3),1` is `[2, 2, 2, 1]`.

    Raises `InputError` for what is not such a list.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNT.match(part)
        if match is None:
            raise InputError(f"{text!r} is not a Slurm list of counts such as 2(x3),1.")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _expand(name: str, text: str) -> list[str]:
    bracket = _BRACKET.search(name)
    if bracket is None:
        return [name]
    before, after = name[: bracket.start()], name[bracket.end() :]
    middles: list[str] = []
    for item in bracket[1].split(","):
        match = _RANGE.match(item)
        if match is None:
            raise InputError(f"{text!r} is not a Slurm host list: [{bracket[1]}] is no range.")
        first, last = match[1], match[2] or match[1]
        width = len(first)
        middles += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return [before + middle + rest for middle in middles for rest in _expand(after, text)]
