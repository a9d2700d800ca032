"""Accumulation against the plain loop, on the setups where the usual recipes go wrong."""

import dataclasses

import torch
import torch.nn.functional as F
from tests.equivalence.reference import (
    assert_equal,
    deviation,
    own_model,
    plan_for,
    samples_of,
    train,
    train_plainly,
)
from tests.equivalence.worlds import World, task_of
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import anybatch as ab
from anybatch.data import Steps

IGNORED = -100


def sequences():
    """52 sequences of 3 to 40 tokens; of each a part, unequal too, is not counted."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(52):
        length = int(torch.randint(3, 41, (), generator=draw))
        tokens = torch.randint(0, 12, (length,), generator=draw)
        targets = (tokens * 5 + 3) % 12
        ignored = int(torch.randint(0, length, (), generator=draw))
        targets[:ignored] = IGNORED
        samples.append((tokens, targets))
    return samples


def padded(samples):
    """A batch of sequences, padded to the longest."""
    tokens, targets = zip(*samples, strict=True)
    return (
        pad_sequence(tokens, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=IGNORED),
    )


class Tagger(nn.Module):
    """(B, T) tokens to (B, T, 12) logits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(12, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 12)
        )

    def forward(self, tokens):
        return self.layers(tokens)


def token_loss(model, batch):
    """Sum over the counted tokens, and their number, which stays on the device."""
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    total = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return ab.Loss(total, (targets != IGNORED).sum())


def tagging():
    """The setup: 52 sequences, global batch 16, one epoch (so the last batch has 4)."""
    return ab.Task(
        model=Tagger,
        loss=token_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        train=sequences(),
        collate=padded,
        global_batch=16,
        epochs=1,
    )


def accumulate_naively(task, micro_batch):
    """The popular loop: mean loss of each micro-batch, divided by the number of micro-batches."""
    model = task.build_model()
    optimizer = task.optimizer(model.parameters())
    steps = Steps(num_samples=len(task.train), global_batch=task.global_batch, epochs=1)
    accumulation = task.global_batch // micro_batch
    for step in range(steps.total_steps):
        indices = samples_of(task, steps, step)
        optimizer.zero_grad()
        for start in range(0, len(indices), micro_batch):
            batch = padded([task.train[i] for i in indices[start : start + micro_batch]])
            logits = model(batch[0]).flatten(0, 1)
            mean = F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED)
            (mean / accumulation).backward()
        optimizer.step()
    return model


def relative_to_update(model, true, start):
    """Distance of `model` from `true` over the length of the way that `true` went."""
    ours, theirs, before = (
        torch.cat([p.detach().double().flatten() for p in m.parameters()])
        for m in (model, true, start)
    )
    return float((ours - theirs).norm() / (theirs - before).norm())


def test_52_sequences_of_unequal_length_are_accumulated_exactly(record_property):
    task = tagging()
    start, true = task.build_model(), train_plainly(task)
    ours = train(task, micro_batch=4)
    naive = accumulate_naively(task, micro_batch=4)
    mine = relative_to_update(ours.model, true.model, start)
    theirs = relative_to_update(naive, true.model, start)
    record_property("deviation of anybatch", mine)
    record_property("deviation of the naive loop", theirs)
    print(f"deviation of the update: anybatch {mine:.2e}, naive loop {theirs:.1%}")
    assert len(ours.losses) == 4
    assert mine < 1e-5
    assert theirs > 0.1  # the test would not see a difference otherwise


def test_every_micro_batch_gives_the_same_loss_weight_and_norm():
    task = tagging()
    events = {}
    for size in (1, 3, 16):
        seen = events[size] = []
        train(task, size, sinks=[seen.append])
    for size in (1, 3):
        for one, other in zip(events[size], events[16], strict=True):
            assert one.weight == other.weight
            assert abs(one.loss - other.loss) < 1e-5
            assert (one.samples, one.samples_seen) == (other.samples, other.samples_seen)
    assert [event.samples for event in events[16]] == [16, 16, 16, 4]


def test_clipping_comes_after_the_division():
    world = World(loss="weighted", clip_norm=0.05, global_batch=12, num_samples=30)
    task = task_of(world)
    ours, theirs = train(task, 5), train_plainly(task)
    assert max(theirs.norms) > 0.05  # there was something to clip
    assert_equal(ours, theirs)


def test_a_parameter_without_gradient_is_left_alone_by_weight_decay():
    world = World(optimizer="adamw", sometimes=True, num_samples=40, global_batch=4, steps=12)
    task = task_of(world)
    start = task.build_model()
    ours, theirs = train(task, 1), train_plainly(task)
    assert torch.equal(ours.model.never.weight, start.never.weight)
    steps = {float(state["step"]) for p, state in ours.optimizer.state.items() if p.shape == (5, 5)}
    assert steps
    assert max(steps) < 12  # the branch was used in some steps only
    assert_equal(ours, theirs)


def test_a_parameter_in_no_group_gathers_no_gradient():
    world = World(num_samples=12, global_batch=6, steps=3)
    task = task_of(world)

    def heads(model):
        return list(model.head.parameters())

    task = dataclasses.replace(task, parameters=heads)
    ours, theirs = train(task, 2), train_plainly(task)
    assert_equal(ours, theirs)
    assert all(p.grad is None for p in ours.model.parameters())


def test_gradients_of_embeddings_may_be_sparse():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 6, sparse=True, dtype=torch.float64)

        def forward(self, tokens):
            return self.embed(tokens).sum(-1)

    def loss(model, batch):
        counted = batch[1] != IGNORED
        return ab.Loss((model(batch[0]).square() * counted).sum(), counted.sum())

    task = ab.Task(
        model=Sparse,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=sequences(),
        collate=padded,
        global_batch=16,
        epochs=1,
    )
    assert_equal(train(task, 3), train_plainly(task))


def test_a_module_given_as_such_is_trained_in_place():
    task = tagging()
    task = own_model(dataclasses.replace(task, model=task.build_model()))
    reference = train_plainly(task)
    with ab.Session(task, plan_for(task, 4)) as session:
        assert session.model is task.model
        for _ in session.steps():
            pass
    assert deviation(task.model, reference.model) < 1e-5


def test_a_stream_is_accumulated_exactly_too():
    samples = sequences()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(samples)

    listed = dataclasses.replace(tagging(), shuffle=False)
    task = dataclasses.replace(tagging(), train=Stream())
    ours, theirs = train(task, 3), train_plainly(listed)
    assert deviation(ours.model, theirs.model) < 1e-5
