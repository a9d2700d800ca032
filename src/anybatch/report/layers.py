"""The modules of a model as a table of rows that stays readable for deep models.

Alike blocks are merged into one row with their sums, and the contents of one of them are shown:

    emb                      147 MiB
    blocks.0-11 (12 alike)   972 MiB     sum of all blocks
      blocks.0              81.0 MiB     one block, and its modules
        qkv                 20.3 MiB
        ...
    head                     147 MiB
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

_ALIKE = 0.02
"""Maximum relative difference in bytes between blocks of the same structure that count as alike."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: name of a module, or of several alike modules.
        depth: indentation level.
        type_name: the module's class.
        output: shape of the module's output; empty if unknown.
        sizes: bytes in the order of `PARTS`.
        is_part: whether its bytes are also included in a row above.
    """

    name: str
    depth: int
    type_name: str
    output: str
    sizes: tuple[int, ...]
    is_part: bool

    @property
    def total_bytes(self) -> int:
        """Sum of `sizes`."""
        return sum(self.sizes)


@dataclass(slots=True)
class _Node:
    """A module, or several alike modules, with its submodules."""

    name: str
    type_name: str
    own: LayerBytes | None = None
    children: list[_Node] = field(default_factory=list)
    alike: int = 1
    sizes: tuple[int, ...] = ()
    structure: tuple[object, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.sizes)


def rows_of(ledger: Ledger, depth: int | None = None) -> list[Row]:
    """The layers of `ledger`, expanded to `depth` levels; None: as many levels as fit in `ROWS` rows,
    at least one."""
    root = _tree(ledger)
    if depth is not None:
        return list(_rows(root, depth))
    found = list(_rows(root, depth=1))
    for level in range(2, 10):
        deeper = list(_rows(root, level))
        if len(deeper) > ROWS:
            break
        found = deeper
    return found


def every_row(ledger: Ledger) -> list[Row]:
    """One row for every module with bytes of its own; alike modules are not merged."""
    return [
        Row(
            _name(layer.name, layer.type_name),
            0,
            layer.type_name,
            _shape(layer),
            _sizes(layer),
            False,
        )
        for layer in ledger.layers
    ]


def total_row(ledger: Ledger) -> Row:
    """The sum of all layers."""
    return Row("all layers", 0, "", "", _sums(map(_sizes, ledger.layers)), False)


# ------------------------------------------------------------------------------------------- tree


def _tree(ledger: Ledger) -> _Node:
    own = {layer.name: layer for layer in ledger.layers}
    types = ledger.modules
    root = _Node(".", types.get(".", ""), own.get("."))
    nodes = {".": root}
    for name in dict.fromkeys([*types, *own]):
        if name == ".":
            continue
        for end in _prefixes(name):
            if end not in nodes:
                layer = own.get(end)
                kind = types.get(end) or (layer.type_name if layer else "")
                nodes[end] = _Node(end, kind, layer)
                above = end.rpartition(".")[0] or "."
                nodes[above].children.append(nodes[end])
    _fold(root)
    return root


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _fold(node: _Node) -> None:
    """Sum bytes bottom up, drop modules without bytes, and merge alike ones."""
    for child in node.children:
        _fold(child)
    children = [child for child in node.children if child.own or child.children]
    node.sizes = _sums([*([_sizes(node.own)] if node.own else []), *(c.sizes for c in children)])
    node.structure = (
        node.type_name,
        node.own.num_parameters if node.own else 0,
        *((c.name.rpartition(".")[2], c.alike, c.structure) for c in children),
    )
    node.children = list(_grouped(children))


def _grouped(nodes: Sequence[_Node]) -> Iterator[_Node]:
    """`nodes`, with consecutive alike nodes merged into one."""
    begin = 0
    for i in range(1, len(nodes) + 1):
        if i < len(nodes) and _are_alike(nodes[begin], nodes[i]):
            continue
        run = nodes[begin:i]
        if len(run) == 1:
            yield run[0]
        else:
            first, last = run[0], run[-1]
            name = f"{first.name}-{last.name.rpartition('.')[2]}"
            sizes = _sums(node.sizes for node in run)
            structure = (len(run), first.structure)
            yield _Node(name, first.type_name, None, [first], len(run), sizes, structure)
        begin = i


def _are_alike(one: _Node, other: _Node) -> bool:
    """Whether two neighbors are numbered and have the same structure and nearly the same bytes. Layers
    without children are never merged."""
    if not (one.children and other.children):
        return False
    numbered = all(node.name.rpartition(".")[2].isdigit() for node in (one, other))
    slack = _ALIKE * max(one.total, other.total)
    near = all(abs(a - b) <= slack for a, b in zip(one.sizes, other.sizes, strict=True))
    return numbered and near and one.structure == other.structure


# ------------------------------------------------------------------------------------------- rows


def _passed(node: _Node) -> _Node:
    """The node shown for `node` in a table: a node without bytes of its own and with a single child is
    replaced by that child."""
    while node.own is None and node.alike == 1 and len(node.children) == 1:
        node = node.children[0]
    return node


def _rows(node: _Node, depth: int, level: int = 0, above: str = ".") -> Iterator[Row]:
    """The row of `node`, and the rows of `depth` levels inside it. The root has no row."""
    is_root = node.name == "."
    if not is_root:
        yield _row(node, level, above, bool(level))
        level += 1
    if not depth:
        return
    if node.own is not None and node.children:
        own = node.own
        name = _name(own.name, own.type_name) if is_root else "itself"
        yield Row(name, level, own.type_name, _shape(own), _sizes(own), level > 0)
    for child in node.children:
        yield from _rows(_passed(child), depth - 1, level, node.name)


def _row(node: _Node, depth: int, above: str, is_part: bool) -> Row:
    inside_group = above != "." and node.name.startswith(f"{above}.")
    name = node.name[len(above) + 1 :] if inside_group else node.name
    if node.alike > 1:
        name = f"{name} ({node.alike} alike)"
    return Row(name, depth, node.type_name, _shape(node.own), node.sizes, is_part)


def _name(name: str, type_name: str) -> str:
    return f"{type_name} itself" if name == "." else name


def _shape(layer: LayerBytes | None) -> str:
    return "x".join(map(str, layer.output_shape)) if layer and layer.output_shape else ""


def _sizes(layer: LayerBytes) -> tuple[int, ...]:
    return tuple(getattr(layer, name) for _, name in PARTS)


def _sums(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    every = list(sizes)
    return tuple(map(sum, zip(*every, strict=True))) if every else (0,) * len(PARTS)
