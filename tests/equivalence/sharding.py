"""One rank of a sharded run: what the engine does with a group and a replica, in its simplest form."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from tests.equivalence.reference import samples_of
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.compute import Replica
from anybatch.compute.loss import read_loss
from anybatch.data import micro_batches, share, steps_of
from anybatch.engine.rollback import SavedBuffers
from anybatch.oom import as_memory_failure
from anybatch.parallel.norms import PassAbandoned
from anybatch.parallel.shard import Shard
from anybatch.parallel.whole import full_state_dict
from anybatch.plans import Choice

CPU = torch.device("cpu")


@dataclass
class Run:
    """What a rank has to tell at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    attempts: int = 0
    woken: list[str] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class Sharded:
    """One rank. `before_pass(step, number)` is called before each of its passes."""

    def __init__(self, task, micro_batch, shares, recompute=None, before_pass=None, **options):
        # torch's own: setting up warns of things that concern its authors.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        self.task = task
        self.micro_batch = micro_batch
        # Half-precision weights are the group's business; what is left to the replica is autocast.
        computed = options.get("precision", "fp32").removesuffix("-weights")
        self.group = Shard(shares, CPU, **options)
        self.model = self.group.build(task.build_model)
        self.zeroed = False
        more = {"recompute": recompute} if recompute else {}
        self.replica = Replica(
            self.model,
            lambda: task.optimizer(task.parameters_of(self.model)),
            self._loss,
            Choice(micro_batch=micro_batch, evaluation_batch=1, precision=computed, **more),
            CPU,
            task.global_batch,
        )
        self.group.adopt(self.replica)
        self.buffers = SavedBuffers(self.model)
        self.before_pass = before_pass or (lambda step, number: None)
        self.steps = steps_of(task)
        self.run = Run()

    def train(self) -> Run:
        """All steps."""
        self.model.train()
        for step in range(self.steps.total_steps):
            while not self._attempt(step):
                pass
        return self.finish()

    def finish(self) -> Run:
        """What was trained, whole."""
        self.run.state = full_state_dict(self.model)
        self.group.close()
        return self.run

    def passes(self, step):
        """(indices, real) of each pass of this rank: as many as the rank with most of them has."""
        indices = samples_of(self.task, self.steps, step)
        cuts = [
            micro_batches(
                share(len(indices), self.group.shares, rank), self.micro_batch, None, len(indices)
            )
            for rank in range(self.group.size)
        ]
        mine = [[indices[i] for i in part] for part in cuts[self.group.rank]]
        missing = max(map(len, cuts)) - len(mine)
        return [((mine or [indices[:1]])[0], False)] * missing + [(part, True) for part in mine]

    def _attempt(self, step) -> bool:
        group, replica, run = self.group, self.replica, self.run
        run.attempts += 1
        totals = torch.zeros(2, dtype=torch.float64)
        mine, failed = None, False
        try:
            group.begin()
            self.buffers.save()
            replica.drop()
            passes = self.passes(step)
            for number, (indices, real) in enumerate(passes):
                self.before_pass(step, number)
                last = group.last_pass() if number + 1 == len(passes) else nullcontext()
                with last:
                    totals += self._pass(indices, real)
            group.staged(self.buffers.held)
            mine = totals
        except PassAbandoned as error:
            run.woken.append(str(error))
        except Exception as error:
            if as_memory_failure(error) is None:
                raise
            failed = True
        group.gather(failed)
        agreed = group.agree(mine)
        if agreed is None:
            replica.drop()
            self.buffers.put_back()
            return False
        loss_sum, weight = agreed.totals
        norm = replica.finish(weight, self.task.clip_norm)
        run.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        replica.apply()
        group.committed(replica)
        run.losses.append(loss_sum / weight)
        return True

    def _pass(self, indices, real):
        batch = (self.task.collate or default_collate)([self.task.train[i] for i in indices])
        self.zeroed = not real
        loss = self.replica.accumulate(batch, len(indices))
        if not real:  # the first passes of a step, so this is what the step found
            self.buffers.put_back()
        return torch.tensor([float(loss.sum), float(loss.weight)], dtype=torch.float64)

    def _loss(self, model, batch):
        told = read_loss(self.task.loss(model, batch), lambda: len(batch[0]))
        return ab.Loss(told.sum * 0.0, 0) if self.zeroed else told
