"""What the tests of compressed, local and stale training have in common: a run on some ranks, and
the bytes that it handed to torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tests.equivalence.reference import plan_for, train_plainly
from tests.equivalence.worlds import World, task_of

import anybatch as ab

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


@dataclass
class Ran:
    """What a rank is left with.

    Attributes:
        parameters: by name, as the user's module has them.
        step_bytes: sent in each step, see `sending`.
    """

    parameters: dict[str, torch.Tensor]
    losses: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)
    evaluation: Any = None


@contextmanager
def sending() -> Iterator[Counter[str]]:
    """Counts the bytes of the tensors that are given to the collectives of torch.distributed, by
    collective, each as what a rank sends in the ring algorithm: of n ranks, 2 (n - 1) / n of an
    all-reduced tensor, (n - 1) / n of one that is exchanged or gathered."""
    sent: Counter[str] = Counter()
    twice = {"all_reduce": 2, "all_to_all_single": 1}
    twice[
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    ] = 1
    originals = {name: getattr(dist, name) for name in twice}

    def counted(name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            size = dist.get_world_size()
            sent[name] += twice[name] * tensor.nbytes * (size - 1) // size
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in twice:
        setattr(dist, name, counted(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def run(task: ab.Task, plan: ab.Plan, evaluate: bool = False) -> Ran:
    """`task` under `plan` on this rank."""
    ran = Ran({})
    with sending() as sent, ab.Session(task, plan, [ran.events.append]) as session:
        before = sent.total()
        for step in session.steps():
            ran.losses.append(step.loss)
            ran.step_bytes.append(sent.total() - before)
            before = sent.total()
        if evaluate:
            ran.evaluation = session.evaluate()
    ran.parameters = {n: t.detach().clone() for n, t in session.model.state_dict().items()}
    return ran


def as_ranks(
    rank: int,
    size: int,
    world: World,
    micro_batch: int,
    shares: tuple[float, ...],
    knobs: dict[str, Any],
) -> Ran:
    """`world` trained by this rank together with the others."""
    task = task_of(world)
    return run(task, plan_for(task, micro_batch, shares=shares, **knobs))


def digits(rank: int, size: int, knobs: dict[str, Any], options: dict[str, Any]) -> Ran:
    """The recipe of handwritten digits on this rank, evaluated at the end."""
    from anybatch.recipes.digits import digits

    task = digits(**options)
    shares = (1.0,) * size
    return run(task, plan_for(task, 32, shares=shares, **knobs), evaluate=True)


_exact: dict[str, Ran] = {}


def exact_digits(crew: Any, options: dict[str, Any]) -> Ran:
    """What exchanges everything learns on two ranks; once for all tests that compare with it."""
    key = repr(sorted(options.items()))
    if key not in _exact:
        _exact[key] = crew(2, digits, {"parallel": "replicate"}, options)[0]
    return _exact[key]


def deviation(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest relative distance between two sets of parameters of the same names."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp_min(1e-30)) for n in other)


def alike(ranks: list[Ran]) -> bool:
    """Whether all ranks are left with the same weights, to the bit."""
    first = ranks[0].parameters
    return all(torch.equal(r.parameters[n], first[n]) for r in ranks for n in first)


def plainly(world: World) -> Ran:
    """`world`, trained by the plain loop in one piece."""
    trained = train_plainly(task_of(world))
    return Ran(dict(trained.model.state_dict()), trained.losses)
