"""Bad sample search: finds the samples that make a loss or a gradient non-finite.

One bad sample makes the loss of its whole micro-batch NaN and, where BatchNorm computes statistics
across samples, those statistics too. So each sample of such a micro-batch is evaluated alone, by the
model in evaluation mode with the weights and buffers of the previous step. In that mode samples do not
affect each other and nothing is drawn at random, so the verdict depends on the sample and the weights
only, and is the same under every plan.

If the loss compares samples, a single sample has no loss, and each is judged by its encoding.

If the model cannot be evaluated this way (for example, because it computes no loss in evaluation mode),
no sample is blamed. Gradients are not checked if ranks synchronize inside passes, since no rank has a
complete gradient by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

import torch

from anybatch.compute import Replica
from anybatch.compute.joint import encodings_of
from anybatch.compute.modes import evaluating
from anybatch.data import Bad, BadSamples, Place, format_samples
from anybatch.engine.source import Source
from anybatch.errors import AnybatchError, DataError
from anybatch.oom import is_memory_error
from anybatch.parallel import Group
from anybatch.parallel.failures import first_line
from anybatch.task import JointLoss, LossFunction


@final
class OneByOne:
    """Evaluates the samples of micro-batches one at a time.

    Args:
        replica: the model and the precision it computes in.
        group: the ranks.
        loss: see `Task`.
    """

    def __init__(self, replica: Replica, group: Group, loss: LossFunction) -> None:
        self._replica = replica
        self._group = group
        self._loss = encodings_of(loss) if isinstance(loss, JointLoss) else loss
        self._judged_by = "encoding" if replica.is_joint else "loss"

    def raising(self, number: int, source: Source) -> tuple[Bad, ...]:
        """Returns the first sample of micro-batch `number` for which the model or the loss raises an
        error when evaluated alone; empty if nothing shows that other samples succeed."""
        if self._group.lockstep:
            return ()
        found: list[Bad] = []
        some_are_good = number > 0
        with evaluating(self._replica.model):
            for place in source.places(number):
                try:
                    self._replica.evaluate(self._loss, source.alone(place), 1)
                    some_are_good = True
                except Exception as error:
                    found.append(Bad(place, first_line(error)))
                if found and some_are_good:
                    return (found[0],)
                if len(found) == 2:
                    break
        return ()

    def gradients(self, numbers: Sequence[int], source: Source) -> tuple[Bad, ...]:
        """Returns the samples of this rank's micro-batches `numbers` whose own gradient is not finite
        although their loss is."""
        if self._group.lockstep:
            return ()
        found = []
        try:
            with evaluating(self._replica.model):
                for place in _suspects(numbers, source):
                    if not self._replica.gradient_is_finite(self._loss, source.alone(place)):
                        found.append(Bad(place, "its gradient is not finite"))
        except Exception:  # the error to report is the step's gradient, not this one
            return ()
        return tuple(found)

    def losses(self, numbers: Sequence[int], source: Source) -> tuple[Bad, ...]:
        """Returns the samples of this rank's micro-batches `numbers` whose own loss is not finite.
        Every rank must call it, with its own numbers."""
        suspects = _suspects(numbers, source)
        group = self._group
        if not group.lockstep:
            try:
                return self._judged(suspects, source)
            except Exception:  # the error to report is the loss, not this one
                return ()
        # Ranks synchronize inside passes, so all must run the same number of passes: a rank with fewer
        # suspects runs an arbitrary sample in the others.
        idle = max(group.exchange(len(suspects))) - len(suspects)
        anyone = suspects[:1] or list(source.places(0)[:1])
        found: tuple[Bad, ...] | None = None
        group.begin()
        try:
            self._judged(anyone * idle, source)
            found = self._judged(suspects, source)
        except Exception:
            found = None
        group.gather(failed=found is None)
        everyone = group.agree(None if found is None else torch.zeros(0, dtype=torch.float64))
        return () if found is None or everyone is None else found

    def _judged(self, suspects: Sequence[Place], source: Source) -> tuple[Bad, ...]:
        found = []
        with evaluating(self._replica.model), torch.no_grad():
            for place in suspects:
                loss = self._replica.evaluate(self._loss, source.alone(place), 1)
                for what, value in (
                    (self._judged_by, float(loss.sum)),
                    ("weight", float(loss.weight)),
                ):
                    if not math.isfinite(value):
                        found.append(Bad(place, f"its {what} is {value}"))
                        break
        return tuple(found)


@contextmanager
def naming_samples(
    blame: OneByOne | None, source: Source, number: int, step: int
) -> Iterator[None]:
    """Context manager for the pass of micro-batch `number` of `step`: errors that are raised in it name
    the samples that cause them, if these are found. `blame` finds them; None: they are not searched."""
    try:
        yield
    except BadSamples:
        raise
    except DataError as error:
        raise _of_its_sample(error, source, number) from error
    except Exception as error:
        if (
            blame is not None
            and not isinstance(error, AnybatchError)
            and not is_memory_error(error)
        ):
            with suppress(Exception):  # the error to report is `error`
                for bad in blame.raising(number, source):
                    error.add_note(
                        f"It is raised for {format_samples([bad.place.name])}, alone too (step {step},"
                        f" micro-batch {number})."
                    )
        raise


def _of_its_sample(error: DataError, source: Source, number: int) -> DataError:
    """Returns `error`, about a row of micro-batch `number`, with the name of its sample added."""
    places = source.places(number)
    alone = error.row is not None and error.row < len(places)
    names = [place.name for place in (places[error.row or 0 :][:1] if alone else places)]
    if not names:
        return error
    where = f"{'Row ' + str(error.row) + ' of micro-batch' if alone else 'Micro-batch'} {number}"
    return DataError(f"{error} {where} is {format_samples(names)}.", error.row)


def _suspects(numbers: Sequence[int], source: Source) -> list[Place]:
    return [place for number in numbers for place in source.places(number)]
