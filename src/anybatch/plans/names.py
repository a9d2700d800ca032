"""Names: parses the option values that users write into the values of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from anybatch.errors import InputError, setting
from anybatch.plans.choice import PRECISION_ALIASES, Precision, Recompute
from anybatch.plans.ranks import (
    Balancing,
    Compression,
    Exchange,
    Norms,
    Parallel,
    Sharding,
    check_removed,
)
from anybatch.units import check_count

AS_WRITTEN = "as-written"
"""BatchNorm over the whole global batch, as in a plain loop. A setting of the task, not of the plan."""


def parse_precision(text: str) -> Precision:
    """The precision named `text`; the names O0 to O3 are accepted. Raises `InputError` for another
    name."""
    known: tuple[str, ...] = Precision.__args__
    is_text = isinstance(text, str)
    name = PRECISION_ALIASES.get(text.upper(), text.lower()) if is_text else ""
    if name not in known:
        raise InputError(
            f"{setting('precision')} is {text!r}: choose one of {', '.join(known)},"
            f" or {', '.join(PRECISION_ALIASES)}; or, where a plan is made, auto."
        )
    return cast("Precision", name)


def parse_open_precision(text: str) -> Precision | None:
    """Like `parse_precision`, but returns None for `"auto"`, which leaves the precision open."""
    return None if str(text).lower() == "auto" else parse_precision(text)


def parse_recompute(wish: object, blocks: Sequence[str], chains: Sequence[str]) -> Recompute | None:
    """The recompute method for `wish`: None, a `Recompute`, `"none"`, `"all"` of the `blocks` of a
    model, `"nested"` for its `chains`, or names of modules separated by commas. Raises `InputError`
    for another value, or if the model has no such modules."""
    if wish is None or isinstance(wish, Recompute):
        return wish
    if wish == "none":
        return Recompute()
    named = {"all": blocks, "nested": chains}.get(wish) if isinstance(wish, str) else None
    if named is None:
        names = wish.split(",") if isinstance(wish, str) else ()
        found = tuple(name.strip() for name in names if name.strip())
        if not found:
            raise InputError(
                f"{setting('recompute')} is {wish!r}, which names no module: give 'none', 'all',"
                " 'nested' or names of modules separated by commas."
            )
        return Recompute(blocks=found)
    if not named:
        what = "repeated blocks" if wish == "all" else "nn.Sequential of at least three layers"
        raise InputError(
            f"{setting('recompute')} is {wish!r}, but the model has no {what}: name the modules to"
            " recompute, separated by commas, or leave it out."
        )
    return Recompute(blocks=tuple(named), nested=wish == "nested")


def parse_parallel(text: str | None) -> Parallel | None:
    """The `Parallel` value named `text`. Raises `InputError` for another name."""
    return _named("parallel", text, Parallel.__args__)


def parse_norms(text: str | None) -> Norms | None:
    """The `Norms` value named `text`. Raises `InputError` for another name."""
    return _named("norms", text, Norms.__args__)


def parse_norms_of_task(text: str | None) -> tuple[Norms | None, bool]:
    """The `Norms` value named `text`, and whether the name was `AS_WRITTEN`, for which the value is
    None. Raises `InputError` for another name."""
    found = _named("norms", text, (*Norms.__args__, AS_WRITTEN))
    return (None, True) if found == AS_WRITTEN else (found, False)


def parse_balance(text: str | None) -> Balancing | None:
    """The `Balancing` value named `text`. Raises `InputError` for another name."""
    return _named("balance", text, Balancing.__args__)


def parse_compile(value: object) -> bool:
    """Whether blocks are compiled. Raises `InputError` if `value` is not a bool."""
    if isinstance(value, bool):
        return value
    hint = "" if value != "if-faster" else " Runs no longer try whether compiling is faster."
    raise InputError(f"compile is {value!r}: give True or False.{hint}")


def parse_chunked_loss(value: object) -> bool | None:
    """Whether the loss is computed in chunks; None: open. Raises `InputError` for any other value."""
    if value is None or isinstance(value, bool):
        return value
    raise InputError(f"{setting('chunked_loss')} is {value!r}: give True, False or None.")


def parse_exchange(compress: str | None, local_steps: int, stale: bool) -> Exchange | None:
    """The `Exchange` for these options; None: the exact one. Raises `InputError` if they are not
    supported."""
    check_count(local_steps, "local_steps")
    if local_steps > 1 and stale:
        raise InputError(
            f"{setting('local_steps')} is {local_steps} and {setting('stale')} is given, but local"
            " steps exchange no gradients that could be late: ask for one of the two."
        )
    how = _named("compress", compress, Compression.__args__)
    if how is None and local_steps == 1 and not stale:
        return None
    return Exchange(compress=how, every=local_steps, stale=stale)


def parse_sharding(over: int | None) -> Sharding | None:
    """The `Sharding` over `over` ranks; None: open. Raises `InputError` if `over` is not a valid
    number."""
    if over is None:
        return None
    check_count(over, "shard_over")
    return Sharding(over=over)


def _named(what: str, text: str | None, known: tuple[str, ...]) -> Any:
    try:
        check_removed(text)
    except ValueError as error:
        raise InputError(f"{setting(what)} is {text!r}: {error}.") from None
    if text is not None and text not in known:
        raise InputError(f"{setting(what)} is {text!r}: choose one of {', '.join(known)}.")
    return text
