"""Reading the documents: their commands and code blocks, as cases for a test."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAGMENT = "<!-- fragment -->"
_FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and whether it is marked as a fragment."""

    document: str
    language: str
    text: str
    is_fragment: bool


@dataclass(frozen=True)
class Command:
    """A command of a block, and the exit status that the block says it has."""

    words: tuple[str, ...]
    status: int = 0

    def __str__(self) -> str:
        return shlex.join(self.words)


@cache
def documents() -> tuple[str, ...]:
    """Paths of all documents, from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return tuple(str(path.relative_to(ROOT)) for path in found)


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def blocks(document: str) -> tuple[Block, ...]:
    text = text_of(document)
    return tuple(
        Block(
            document=document,
            language=match[1],
            text=match[2],
            is_fragment=text[: match.start()].rstrip().endswith(FRAGMENT),
        )
        for match in _FENCE.finditer(text)
    )


def commands_of(block: Block) -> tuple[Command, ...]:
    """The commands of a block that can be run here: those of anybatch, and the examples.

    In a `console` block commands follow `$ ` and the rest is output; `$ echo $?` and the number
    below it say how the command before ends.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        numbered = [(i, line[2:]) for i, line in enumerate(lines) if line.startswith("$ ")]
    elif block.language == "bash":
        numbered = list(enumerate(lines))
    else:
        return ()
    commands: list[Command] = []
    for i, line in numbered:
        if line == "echo $?":
            commands[-1] = Command(commands[-1].words, int(lines[i + 1]))
            continue
        words = tuple(shlex.split(line, comments=True))
        is_example = words[:1] == ("python",) and words[1].startswith("examples/")
        if words[:1] == ("anybatch",) or is_example:
            commands.append(Command(words))
    return tuple(commands)


@cache
def command_blocks() -> tuple[tuple[Command, ...], ...]:
    """The commands of each block, which may build on each other. Blocks with the same first command are
    one, in which each command runs once."""
    found: dict[Command, dict[Command, None]] = {}
    for commands in (commands_of(block) for name in documents() for block in blocks(name)):
        if commands:
            found.setdefault(commands[0], {}).update(dict.fromkeys(commands))
    return tuple(
        tuple(one)
        for one in found.values()
        if not any(set(one) < set(other) for other in found.values() if other is not one)
    )


@cache
def scripts() -> tuple[tuple[str, str], ...]:
    """(document, code): the Python blocks of each document in order, as one script; each once."""
    found: dict[str, str] = {}
    for name in documents():
        code = "\n\n".join(
            block.text
            for block in blocks(name)
            if block.language == "python" and not block.is_fragment
        )
        if code:
            found.setdefault(code, name)
    return tuple((name, code) for code, name in found.items())


@cache
def examples() -> tuple[str, ...]:
    return tuple(str(p.relative_to(ROOT)) for p in sorted((ROOT / "examples").glob("*.py")))
