"""Products: the buffers into which MKL packs the matrices of products in float32 on a CPU.

Each thread keeps its buffers, and takes one again for a later product where it is large enough. So what
they hold in the end depends on the order of the products, and on thresholds in their sizes; it is told
from the products of a step as they come, not from a line between two sizes of a batch.

Two rules, by how many rows of the right matrix the CPU packs at a time (`anybatch.mkl.packed_depth`).
Both were found from MKL's own books (`mkl_mem_stat`), from what each thread asks malloc for, and from
resident memory; MKL 2024.2, as torch 2.13 has it:

- 192 rows (AVX-512, 1 MiB of second-level cache), `_shallow`: of some 100 shapes on 1 and 2 threads it
  is exact to 20 KiB a thread where a product is 64 deep and more.
- 384 rows (2 MiB), `_deep`: of 1,000 random shapes, of 16 to 4,096 rows, deep and wide, 9 of 10 within
  100 KiB on 2 threads (the others are mostly those of fewer than 64 rows or columns, within 2 MiB), and
  248 of 250 on one. On 4 and 8 threads (of two cores) half are within 200 KiB, 0.3 MiB off in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

_PANEL = 48
"""Columns that a kernel of AVX-512 computes at a time."""
_ROWS = 384
"""Of the left matrix, that are packed at a time."""
_MOST_BUFFERS = 5
"""That a thread keeps: of a sixth, the first gives way."""
_KIB = 1 << 10

_LEAST_ROWS, _LEAST_COLUMNS = 4, 12
_MOST_COLUMNS = 6400
_SHALLOW = 192
_LEAST_ALONE = 192
_LEAST_ASKED = 128


class Product(NamedTuple):
    """A product of `[rows, depth]` and `[depth, columns]` in float32.

    Attributes:
        is_turned: whether the right matrix is read down its columns.
        is_whole: whether one thread computes all of it, beside others that compute as many.
        is_inner: whether it is one of attention's, which are packed however small they are.
    """

    rows: int
    depth: int
    columns: int
    is_turned: bool = False
    is_whole: bool = False
    is_inner: bool = False

    def between(self, other: Product, part: float) -> Product:
        """The product that lies between this (0) and `other` (1), or beyond them, at `part`."""

        def told(a: int, b: int) -> int:
            return max(1, round(a + (b - a) * part))

        return self._replace(
            rows=told(self.rows, other.rows),
            depth=told(self.depth, other.depth),
            columns=told(self.columns, other.columns),
        )


@dataclass(frozen=True)
class Products:
    """What a CPU multiplies on so many threads, in this order. `packed_depth`: see `anybatch.mkl`."""

    taken: tuple[Product, ...] = ()
    num_threads: int = 1
    packed_depth: int = 0

    @cached_property
    def kept_bytes(self) -> int:
        """What the buffers hold once all were computed."""
        rule = _shallow if self.packed_depth <= _SHALLOW else _deep
        first: list[_Buffer] = []
        others: list[_Buffer] = []
        for product in dict.fromkeys(self.taken):
            wants = rule(product, self.num_threads)
            _take(first, (*wants.first, *wants.each))
            _take(others, wants.each)
        kept, beside = (sum(b.low + b.high for b in buffers) for buffers in (first, others))
        return kept + (self.num_threads - 1) * beside

    def between(self, other: Products, part: float) -> Products:
        """The products that lie between these (0) and `other` (1), or beyond them, at `part`; of those
        that are not as many, the ones that keep more."""
        if len(self.taken) != len(other.taken):
            return max(self, other, key=lambda products: products.kept_bytes)
        pairs = zip(self.taken, other.taken, strict=True)
        return replace(self, taken=tuple(a.between(b, part) for a, b in pairs))

    def before(self, other: Products) -> Products:
        """These, and then `other`."""
        return replace(self, taken=self.taken + other.taken)


class _Buffer(NamedTuple):
    """Bytes asked for, and those that are written: from its beginning, and behind what may come there.

    panel       | rows ........ |        | columns .... |
    all columns | columns ............. |
    results     | ........................ |
    """

    asked: int
    low: int
    high: int = 0


class _Wants(NamedTuple):
    """Buffers of a product: those of the first thread alone, and the one of each thread."""

    first: tuple[_Buffer, ...] = ()
    each: tuple[_Buffer, ...] = ()


def _take(buffers: list[_Buffer], wanted: tuple[_Buffer, ...]) -> None:
    """A thread that has `buffers` uses as many as are wanted, at one time."""
    used: set[int] = set()
    for want in wanted:
        found = next(
            (i for i, b in enumerate(buffers) if i not in used and b.asked >= want.asked), None
        )
        if found is not None:
            there = buffers[found]
            buffers[found] = _Buffer(
                there.asked, max(there.low, want.low), max(there.high, want.high)
            )
        elif len(buffers) < _MOST_BUFFERS:
            found = len(buffers)
            buffers.append(want)
        else:
            found = min(i for i in range(len(buffers)) if i not in used)
            buffers[found] = want
        used.add(found)


def _shallow(product: Product, num_threads: int) -> _Wants:
    """Each thread packs the columns of a slice of the depth, and some of its rows; and asks for twice
    the rows."""
    m, k, n, _, is_whole, _ = product
    if m < _LEAST_ROWS or n < _LEAST_COLUMNS or k < 2:
        return _Wants()  # by other kernels, that pack nothing
    rows = -(-m // (1 if is_whole else num_threads))
    columns = min(-(-n // 16) * 16, _MOST_COLUMNS)
    depth = _slice(k, _SHALLOW)
    least = depth if k >= _SHALLOW * 2 // 3 else _SHALLOW * 2 // 3
    asked = 17024 + 4 * least * (columns + 2 * min(rows, _ROWS))
    return _Wants(each=(_Buffer(asked, 8 * _KIB + 4 * depth * (columns + min(rows, _ROWS))),))


def _deep(product: Product, num_threads: int) -> _Wants:
    """A thread that has up to 384 rows packs these and a block of columns at a time; with more rows it
    packs all columns. The threads divide the depth where it is by far the largest, with a second
    result; or the rows; or the columns; or all columns are packed once for all of them."""
    m, k, n, is_turned, is_whole, is_inner = product
    if is_whole or num_threads == 1:
        is_thin = n < _LEAST_ALONE or m < (16 if is_turned else _LEAST_ALONE)
        if is_thin and not is_inner:
            return _Wants()
        return _Wants(each=(_panel(m, _slice(k, 384), n),))
    if m < (16 if is_turned else _LEAST_ROWS) or k < 2:
        return _Wants()
    is_tall = k >= max(8 * m, 512)
    if (is_tall and n >= 32) or (k >= 8 * n and 3 * k >= m and n >= (64 if is_turned else 32)):
        size = 4 * m * (-(-n // 128) * 128 + 16)
        results = (_Buffer(size, size),) if size > 64 * _KIB else ()
        return _Wants(results, (_panel(m, _slice(k // num_threads, 384), n),))
    if n < (64 if is_turned else 48):
        return _Wants()
    depth = _slice(k, 384)
    rows = -(-m // num_threads)
    if m >= n and (n <= 640 or m <= n <= 768):
        return _Wants(each=(_panel(rows, depth, n),))
    if m < 192 or n <= 768:
        panel = _panel(m, depth, -(-n // num_threads))
        return _Wants(each=(panel._replace(asked=panel.asked - 32 * _KIB),))
    shared = 4 * depth * n
    own = 4 * depth * min(rows, _ROWS)
    each = _Buffer(own + 9 * _KIB, own + 12 * _KIB)
    return _Wants((_Buffer(shared + 4130 * _KIB, shared),), (each,))


def _panel(rows: int, depth: int, columns: int) -> _Buffer:
    """For so many rows that a thread has of a slice so deep."""
    taken = min(rows, _ROWS)
    asked = 4138 * _KIB + 4 * max(depth, _LEAST_ASKED) * (columns + taken)
    packed = _PANEL if rows <= _ROWS else columns
    return _Buffer(asked, 12 * _KIB + 4 * depth * taken, 4 * depth * packed)


def _slice(depth: int, most: int) -> int:
    """How much of a depth is packed at a time."""
    return depth if depth <= most else min(depth // 2, most)
