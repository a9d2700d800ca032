"""Options whose value may be left out, which typer has no word for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, final

import typer
from typer.core import TyperCommand

STANDARD_OUTPUT = "-"

JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Save all of it as JSON; without FILE, print that and nothing else.",
    ),
]

_MEANT = {"--json": STANDARD_OUTPUT, "--tensorboard": ""}
"""What is meant by an option that is the last word, or is followed by another one."""


@final
class BareOptions(TyperCommand):
    """A command whose `--json` may stand without a file, which is standard output then, as by `anybatch
    plan --json`; and its `--tensorboard` without a folder, which is that of the run then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_values(args)))


def _with_values(words: list[str]) -> Iterator[str]:
    for word, following in pairwise([*words, "--"]):
        is_bare = following.startswith("-") and following != STANDARD_OUTPUT
        yield f"{word}={_MEANT[word]}" if is_bare and word in _MEANT else word
