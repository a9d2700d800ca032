"""The modules of a model as a table of rows that stays readable for deep models.

Alike blocks, and what they contain, are one row with the sums over all of them:

    emb                      147 MiB
    blocks.* (12 alike)      972 MiB
      qkv                    243 MiB
      ...
    head                     147 MiB
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from anybatch.estimate.ledger import LayerBytes, Ledger

PARTS = (
    ("parameters", "parameter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("buffers", "buffer_bytes"),
    ("activations", "activation_bytes"),
)
"""Columns of bytes, and the attributes of `LayerBytes` that hold them."""

ROWS = 30
"""Maximum number of rows if no depth is given: levels are expanded as long as they fit."""

_Key: TypeAlias = tuple[tuple[str, str, str], ...]
"""Name, type and bytes of a module, preceded by those of the modules that contain it."""

_ITSELF = "", "", ""
"""Last part of the key of what a module has besides its submodules."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: name of a module inside that of the row above, or of several alike modules.
        depth: indentation level. The bytes of a row include those of the deeper rows below it.
        type_name: the module's class.
        output: shape of the module's output; empty if unknown.
        sizes: bytes in the order of `PARTS`.
    """

    name: str
    depth: int
    type_name: str
    output: str
    sizes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of `sizes`."""
        return sum(self.sizes)


def rows_of(ledger: Ledger, depth: int | None = None) -> list[Row]:
    """The layers of `ledger`, expanded to `depth` levels; None: as many levels as fit in `ROWS` rows,
    at least one."""
    if depth is not None:
        return _rows(ledger, depth)
    found = _rows(ledger, 1)
    for level in range(2, 10):
        deeper = _rows(ledger, level)
        if len(deeper) > ROWS:
            break
        found = deeper
    return found


def every_row(ledger: Ledger) -> list[Row]:
    """One row for every module with bytes of its own; alike modules are not merged."""
    return [
        Row(_name(one.name, one.type_name), 0, one.type_name, _shape(one), _sums([one]))
        for one in ledger.layers
    ]


def total_row(ledger: Ledger) -> Row:
    """The sum of all layers."""
    return Row("all layers", 0, "", "", _sums(ledger.layers))


def numbered(name: str, is_block: bool = False) -> str:
    """`name` with `*` for the numbers of blocks: `blocks.*.up`. The number of a layer itself is kept,
    unless it `is_block`, which contains others."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", f"{name}." if is_block else name).rstrip(".")


def _rows(ledger: Ledger, depth: int) -> list[Row]:
    """The rows of `depth` levels. Modules are alike if their names differ in numbers of blocks only,
    and they have the same type and nearly the same bytes, as have the modules that contain them."""
    layers = {layer.name: layer for layer in ledger.layers}
    blocks = {name.rpartition(".")[0] for name in (*ledger.modules, *layers)}
    paths = {name: _path(name, name in blocks) for name in layers}
    total: Counter[str] = Counter()
    for name, path in paths.items():
        total.update(dict.fromkeys(path, layers[name].total_bytes))
    groups: dict[_Key, dict[str, list[LayerBytes]]] = {}
    for name, path in paths.items():
        key: _Key = ()
        for part in path[:depth]:
            alike = (
                numbered(part, part in blocks),
                ledger.modules.get(part, ""),
                f"{total[part]:.1e}",
            )
            key = (*key, alike)
            groups.setdefault(key, {}).setdefault(part, []).append(layers[name])
        if name in blocks and len(path) < depth:
            groups.setdefault((*key, _ITSELF), {}).setdefault(name, []).append(layers[name])
    first = {key: number for number, key in enumerate(groups)}
    order = sorted(groups, key=lambda key: [first[key[: i + 1]] for i in range(len(key))])
    return [_row(key, groups[key], groups.get(key[:-1], {"": []})) for key in order]


def _row(
    key: _Key, names: Mapping[str, list[LayerBytes]], above: Mapping[str, list[LayerBytes]]
) -> Row:
    """The row of alike modules, inside the modules `above`."""
    (name, inside), (outer, *_) = next(iter(names.items())), above
    own = next((layer for layer in inside if layer.name == name), None)
    kind = key[-1][1] or (own.type_name if own else "")
    title = name.removeprefix(f"{outer}.")
    if key[-1] is _ITSELF or name == ".":
        title = "itself" if outer else _name(name, kind)
    elif len(names) > len(above):
        title = f"{numbered(title, True)} ({len(names)} alike)"
    sizes = _sums(layer for layers in names.values() for layer in layers)
    return Row(title, len(key) - 1, kind, _shape(own), sizes)


def _path(name: str, is_block: bool) -> list[str]:
    """`h.0.mlp.up` to `h.0`, `h.0.mlp`, `h.0.mlp.up`: a number of a block is no level of its own."""
    if name == ".":
        return [name]
    parts = re.split(r"\.(?!\d+(?:\.|$))" if is_block else r"\.(?!\d+\.)", name)
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _name(name: str, type_name: str) -> str:
    return f"{type_name} itself" if name == "." else name


def _shape(layer: LayerBytes | None) -> str:
    return "x".join(map(str, layer.output_shape)) if layer and layer.output_shape else ""


def _sums(layers: Iterable[LayerBytes]) -> tuple[int, ...]:
    every = list(layers)
    return tuple(sum(getattr(one, name) for one in every) for _, name in PARTS)
