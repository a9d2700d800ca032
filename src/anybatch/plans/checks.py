"""Checks: constraints on a plan beyond the types of its fields.

Each check raises `ValueError` with a sentence that says what to change, so that it is reported like any
other error of a plan that was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from anybatch.plans.choice import LOSS_SCALED
from anybatch.plans.ranks import Sharding

if TYPE_CHECKING:
    from anybatch.plans.choice import Choice
    from anybatch.plans.plan import Plan


_LARGEST_SHARE = 1e100  # so that products and sums of shares are finite


def check(plan: Plan) -> None:
    """Raises `ValueError` if the engine cannot run `plan`."""
    _check_ranks(plan)
    _check_exchange(plan)
    _check_grains(plan)
    _check_choices(plan)


def _check_ranks(plan: Plan) -> None:
    if not all(0 <= s < _LARGEST_SHARE for s in plan.shares) or sum(plan.shares) <= 0:
        raise ValueError(
            f"shares is {list(plan.shares)}: give each rank a number of at least zero and below"
            f" {_LARGEST_SHARE:.0e}, and at least one of them a number above zero"
        )
    if plan.parallel == "single" and plan.num_ranks > 1:
        raise ValueError(
            f"shares has {plan.num_ranks} numbers, but parallel is 'single', which is one rank"
        )
    if plan.norms == "synchronised" and (
        plan.parallel != "replicate" or plan.task.ghost_batch is None
    ):
        raise ValueError(
            "norms is 'synchronised', which is for BatchNorm over several replicated ranks:"
            f" parallel is {plan.parallel!r}"
        )
    _check_sharding(plan)


def _check_sharding(plan: Plan) -> None:
    sharding, num_ranks = plan.sharding, plan.num_ranks
    if plan.parallel != "shard":
        if sharding != Sharding():
            raise ValueError(
                f"sharding is given, and parallel is {plan.parallel!r}, which divides no model: make it"
                " 'shard', or leave sharding out"
            )
        return
    if num_ranks % sharding.group_size(num_ranks):
        raise ValueError(
            f"sharding.over is {sharding.over}, which does not divide the number of ranks,"
            f" {num_ranks}: make it a divisor of that, or leave it out"
        )
    for place, choice in _choices(plan):
        if choice.optimizer_states != plan.choice.optimizer_states:
            raise ValueError(
                f"{place}.optimizer_states is {choice.optimizer_states!r}, and that of the choice"
                f" {plan.choice.optimizer_states!r}, but what a divided model keeps is not moved in a"
                " run: make them the same"
            )
    if plan.choice.optimizer_states == "device":
        return
    if plan.device == "cpu":
        raise ValueError(
            "choice.optimizer_states is 'host', and device is 'cpu', where all memory is the host's:"
            " make it 'device'"
        )
    if (precision := plan.choice.precision) in LOSS_SCALED:
        raise ValueError(
            f"choice.optimizer_states is 'host', and precision {precision!r}, whose loss scale is kept"
            " on the device while a divided model's gradients are not: take bf16"
        )


def _check_exchange(plan: Plan) -> None:
    exchange, parallel = plan.exchange, plan.parallel
    if exchange.is_exact:
        return
    described = exchange.describe()
    if parallel != "replicate" or plan.norms == "synchronised":
        raise ValueError(
            f"exchange asks for {described}, but parallel is {parallel!r} and norms {plan.norms!r}:"
            " make them 'replicate' and 'ghosts', or leave exchange out"
        )
    for precision in (choice.precision for choice in (plan.choice, *plan.ladder)):
        is_late = exchange.stale and precision in LOSS_SCALED
        if is_late or (exchange.every > 1 and precision.endswith("-weights")):
            raise ValueError(
                f"exchange asks for {described}, and precision is {precision!r}, whose loss scale or"
                " float32 weights change in between: take bf16"
            )
    if exchange.every == 1:
        return
    if plan.balance == "measured":
        raise ValueError(
            f"exchange asks for {described}, and balance is 'measured', but ranks that take steps by"
            " themselves do not tell their times: make balance 'fixed'"
        )
    if min(plan.shares) / sum(plan.shares) * plan.task.global_batch < 1:
        raise ValueError(
            f"exchange asks for {described}, and a global batch of {plan.task.global_batch} with shares"
            f" {list(plan.shares)} leaves a rank without samples: make the batch larger, or take"
            " fewer ranks"
        )


def _check_grains(plan: Plan) -> None:
    """Raises `ValueError` if the bits of a reproducible run would depend on the plan."""
    grain, part = plan.task.grain, plan.task.part
    if (grain is None) != (part is None) or (grain and part and part % grain):
        raise ValueError(
            f"task.grain is {grain} and task.part {part}: a reproducible run has both, the part a"
            " multiple of the grain; any other run has neither"
        )
    if grain is None:
        return
    faults = [
        (f"parallel is {plan.parallel!r}", plan.parallel not in ("single", "replicate")),
        (f"exchange asks for {plan.exchange.describe()}", not plan.exchange.is_exact),
        (f"norms is {plan.norms!r}", plan.norms == "synchronised"),
        (f"balance is {plan.balance!r}", plan.balance == "measured"),
        (
            f"kernels asks for {plan.kernels.describe()}",
            plan.kernels.autotune or plan.kernels.compile,
        ),
    ]
    for place, choice in _choices(plan):
        faults += [
            (f"{place}.micro_batch is {choice.micro_batch}", choice.micro_batch != grain),
            (f"{place}.chunked_head is {choice.chunked_head!r}", bool(choice.chunked_head)),
        ]
    if found := [fault for fault, is_there in faults if is_there]:
        raise ValueError(
            f"task.grain is {grain}, so the run is to be reproducible, but its bits would depend on"
            f" this: {', '.join(found)}. Make parallel 'replicate', each micro_batch the grain, and"
            " leave the others out"
        )


def _check_choices(plan: Plan) -> None:
    if plan.kernels.autotune and plan.device == "cpu":
        raise ValueError(
            "kernels.autotune is true, but device is 'cpu', and what is tuned is cuDNN, of CUDA"
            " devices: make it false"
        )
    ghost, whole = plan.task.ghost_batch, plan.task.global_batch
    unit = min(ghost or 1, whole)
    for place, choice in _choices(plan):
        if choice.freed_memory == "returned" and plan.device != "cpu":
            raise ValueError(
                f"{place}.freed_memory is 'returned', and device is {plan.device!r}, whose allocator"
                " keeps freed memory: make it 'kept'"
            )
        size = choice.micro_batch
        if size > whole:
            raise ValueError(
                f"{place}.micro_batch is {size}, more than the global batch of {whole}"
            )
        if size % unit and size != whole and plan.norms == "ghosts":
            raise ValueError(
                f"{place}.micro_batch is {size}, which would cut a ghost batch of BatchNorm: make it a"
                f" multiple of {ghost}"
            )


def _choices(plan: Plan) -> Iterator[tuple[str, Choice]]:
    """Every choice that may be run, with its location in the plan."""
    yield "choice", plan.choice
    for number, choice in enumerate(plan.ladder):
        yield f"ladder.{number}", choice
    for number, rival in enumerate(plan.rivals):
        yield f"rivals.{number}", rival.choice
