"""ab.Step around a loop of one's own: the plain loop's result, and nothing left behind."""

import copy
import dataclasses
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import deviation, imitate_ghost_batches, mean_loss
from tests.equivalence.test_recompute import Stack
from tests.equivalence.worlds import World, loss_of, task_of
from torch import nn

import anybatch as ab
import anybatch.step.plans
from anybatch.errors import InputError, LossError
from anybatch.events import OutOfMemory, Replanned
from anybatch.plans import Recompute

KIND = {"dtype": torch.float64}


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8, bias=False, **KIND), nn.BatchNorm1d(8, **KIND), nn.ReLU(inplace=True)
        )
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3, **KIND)

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


def loss(model, batch):
    out = model(batch["x"])
    return ab.Loss(
        F.cross_entropy(out, batch["y"], reduction="sum"), len(out), metrics={"one": len(out)}
    )


def batch_of(size, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, 6, generator=draw, **KIND),
        "y": torch.randint(0, 3, (size,), generator=draw),
    }


def plainly(model, optimizer, batches, loss=loss, clip_norm=None, size=None):
    """The loop without anybatch; BatchNorm in ghost batches of 4 if `size` of a batch is given."""
    ghosts = imitate_ghost_batches(model, 4) if size else None
    losses = []
    for batch in batches:
        if ghosts is not None:
            ghosts.num_samples = size(batch)
        value = mean_loss(loss(model, batch))
        optimizer.zero_grad()
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(value.item())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Counting(Net):
    """Keeps what it has seen, as metrics do."""

    def __init__(self):
        super().__init__()
        self.sizes, self.totals, self.count = [], {"seen": 0}, torch.zeros(1)

    def forward(self, x):
        self.sizes.append(len(x))
        self.totals["seen"] += len(x)
        self.count += len(x)
        return super().forward(x)


@pytest.mark.parametrize("options", [{"micro_batch": 4, "ghost_batch": 4}, {}])
def test_what_a_model_keeps_is_of_the_samples_of_steps_alone(options):
    model = Counting()
    with ab.Step(model, sgd(model), loss, verbose=False, **options) as step:
        for seed in range(3):
            step(batch_of(16, seed))
    assert (sum(model.sizes), model.totals, model.count.item()) == (48, {"seen": 48}, 48)


@pytest.mark.parametrize("micro_batch", [4, 8, 32, None])
@pytest.mark.parametrize("recompute", [None, Recompute(blocks=("body",))])
def test_batches_of_any_size_give_the_result_of_the_plain_loop(micro_batch, recompute):
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    batches = [batch_of(n, n) for n in (32, 17, 5, 2, 33, 64, 9)]
    optimizer = sgd(model)
    with ab.Step(
        model,
        optimizer,
        loss,
        micro_batch=micro_batch,
        recompute=recompute,
        ghost_batch=4,
        clip_norm=0.5,
    ) as step:
        outcomes = [step(batch) for batch in batches]
    expected = plainly(
        other, sgd(other), batches, clip_norm=0.5, size=lambda batch: len(batch["x"])
    )
    assert [o.loss for o in outcomes] == pytest.approx(expected, rel=1e-9)
    assert [o.weight for o in outcomes] == [32, 17, 5, 2, 33, 64, 9]
    assert {o.metrics["one"] for o in outcomes} == {1.0}
    assert deviation(model, other) < 1e-9
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("data", ["tensors", "tuples", "dicts", "dataclass", "lists", "ragged"])
@pytest.mark.parametrize("kind", ["mean", "counted on device", "weighted"])
def test_batches_of_any_structure(data, kind):
    from torch.utils.data import default_collate

    task = task_of(World(data=data, loss=kind, sometimes=True, tied=True))
    collate = task.collate or default_collate
    batches = [
        collate([task.train[i] for i in part]) for part in (range(13), range(13, 20), range(20, 37))
    ]
    model, other = task.build_model(), task.build_model()
    sizes = iter((13, 7, 17))
    with ab.Step(model, sgd(model), task.loss, micro_batch=3) as step:
        losses = [step(batch).loss for batch in batches]
    expected = plainly(
        other,
        sgd(other),
        batches,
        loss=lambda m, b: loss_of(kind, m, b),
        size=lambda _: next(sizes),
    )
    assert losses == pytest.approx(expected, rel=1e-9)
    assert deviation(model, other) < 1e-9


def test_a_step_is_a_session_of_one_batch():
    task = dataclasses.replace(task_of(World(clip_norm=0.1)), shuffle=False, steps=1)
    from tests.equivalence.reference import train

    ours = train(task, 5)
    model = task.build_model()
    with ab.Step(model, task.optimizer(model.parameters()), task.loss, clip_norm=0.1) as step:
        outcome = step([t[:16] for t in task.train.tensors])
    assert outcome.loss == pytest.approx(ours.losses[0])
    assert outcome.grad_norm == pytest.approx(ours.norms[0])
    assert deviation(model, ours.model) < 1e-12


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


def same_generators(one, other):
    return torch.equal(one[0], other[0]) and one[1:] == other[1:]


@pytest.fixture
def seeded():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_the_generators_after_a_redone_step_are_those_of_an_undisturbed_one(place, seeded):
    class Fuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, burn):
            ctx.burn = burn
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if type(grad) is torch.Tensor and grad.any():  # not where it is tried with zeros
                ctx.burn("backward")
            return grad, None

    def run(micro_batch, blow):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = Net(dropout=0.5)

        def burn(where):
            if where == place and blow and len(blow) > 0 and blow.pop() == "now":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        def drawing(model, batch):
            random.random()
            np.random.rand()
            if type(batch["x"]) is torch.Tensor:  # not when the step is planned
                burn("forward")
            out = Fuse.apply(model(batch["x"]), burn)
            return F.cross_entropy(out, batch["y"], reduction="sum"), len(out)

        events = []
        with ab.Step(
            model,
            sgd(model),
            drawing,
            micro_batch=micro_batch,
            ghost_batch=4,
            sinks=[events.append],
        ) as step:
            step(batch_of(32))
            states = [generators()]
            step(batch_of(20))
            states.append(generators())
        return model, states, sum(isinstance(e, OutOfMemory) for e in events)

    calm, expected, none = run(16, [])
    hit, states, failures = run(32, ["now"])
    assert (none, failures) == (0, 1)
    assert all(map(same_generators, states, expected))
    assert deviation(hit, calm) == 0


def test_planning_draws_nothing(seeded):
    model = Net(dropout=0.5)
    before = generators()

    def drawing(model, batch):
        if type(batch["x"]) is not torch.Tensor:
            random.random()
            np.random.rand()
            torch.rand(3, device="cpu")
        return loss(model, batch)

    step = ab.Step(model, sgd(model), drawing)
    assert same_generators(generators(), before)
    step(batch_of(8))
    after = generators()
    step.close()
    torch.set_rng_state(before[0])
    nn.Dropout(0.5)(torch.ones(8, 8, **KIND))
    # Python's and NumPy's are untouched, and torch's has drawn for dropout alone.
    assert after[1:] == before[1:]
    assert torch.equal(after[0], torch.get_rng_state())


def test_close_leaves_a_plain_model():
    model = Stack()
    keys = list(model.state_dict())
    optimizer = adamw(model)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    step = ab.Step(
        model,
        optimizer,
        lambda m, b: (m(b["x"]).square().sum(), len(b["x"])),
        recompute=Recompute(blocks=("blocks.*",)),
        micro_batch=3,
    )
    step(batch_of(7))
    assert any("forward" in vars(m) for m in model.modules())
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    step.close()
    step.close()
    assert not any("forward" in vars(m) for m in model.modules())
    assert list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(params, after, strict=True))
    x = torch.randn(4, 6, **KIND)
    torch.testing.assert_close(twin(x), model(x))


@pytest.mark.parametrize("precision", ["bf16-weights", "fp16-weights", "bf16-pure", "bf16"])
def test_close_gives_model_and_optimizer_back_as_they_came(precision):
    """The optimizer of a closed Step went on training the masters, and the model stood still."""
    model = Net().float()
    optimizer = adamw(model)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch_of(16).items()}
    plainly(model, optimizer, [batch])  # states from before
    with ab.Step(model, optimizer, loss, precision=precision, micro_batch=8, ghost_batch=4) as step:
        step(batch)
        step(batch)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert {p.dtype for p in params} == {torch.float32}
    assert set(optimizer.state) == set(params)
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}
    before = [p.detach().clone() for p in params]
    plainly(model, optimizer, [batch])
    assert all(not torch.equal(a, b) for a, b in zip(params, before, strict=True))


def planned_sizes(monkeypatch):
    """For how many samples plans are made from now on."""
    sizes = []
    make = anybatch.step.plans.make_plan

    def counted(subject, *args, **options):
        sizes.append(subject.identity.global_batch)
        return make(subject, *args, **options)

    monkeypatch.setattr("anybatch.step.plans.make_plan", counted)
    return sizes


def test_a_small_first_batch_does_not_decide_for_larger_ones(monkeypatch):
    sizes = planned_sizes(monkeypatch)
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    batches = [batch_of(n, n) for n in (4, 512, 300, 9)]
    optimizer, events = sgd(model), []
    with ab.Step(model, optimizer, loss, ghost_batch=4, sinks=[events.append]) as step:
        outcomes = [step(batch) for batch in batches]
        assert step.plan.task.global_batch == 512
        assert step.plan.choice.micro_batch > 4
    assert sizes == []  # nothing is traced
    (told,) = events
    assert isinstance(told, Replanned)
    assert (told.step, "larger" in told.reason) == (2, True)
    assert [outcome.step for outcome in outcomes] == [1, 2, 3, 4]
    expected = plainly(other, sgd(other), batches, size=lambda batch: len(batch["x"]))
    assert [o.loss for o in outcomes] == pytest.approx(expected, rel=1e-9)
    assert deviation(model, other) < 1e-9


def test_batches_that_become_larger_little_by_little_are_not_traced(monkeypatch):
    sizes = planned_sizes(monkeypatch)
    model = Net()
    with ab.Step(model, sgd(model), loss, ghost_batch=4) as step:
        for size in range(4, 24):
            step(batch_of(size))
    assert sizes == []
    assert step.plan.choice.micro_batch == 23


def test_a_plan_that_was_outgrown_is_not_tried_again(monkeypatch):
    monkeypatch.setattr("anybatch.engine.ladder.STEPS", 2)
    model, blow, events = Net(), [8], []

    def fail(_module, inputs):
        if type(inputs[0]) is torch.Tensor and len(inputs[0]) in blow:
            blow.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(fail)
    with ab.Step(model, sgd(model), loss, ghost_batch=4, sinks=[events.append]) as step:
        for size in (8, 64, 64, 64, 64):
            step(batch_of(size))
        assert step.plan.choice.micro_batch > 8
    assert [type(event) for event in events] == [OutOfMemory, Replanned, Replanned]


def test_a_first_batch_may_be_smaller_than_the_micro_batch_that_was_asked_for():
    model = Net()
    with ab.Step(model, sgd(model), loss, micro_batch=8, ghost_batch=4) as step:
        passes = [step(batch_of(size)).num_micro_batches for size in (4, 32)]
    assert passes == [1, 4]


@pytest.mark.parametrize("precision", ["bf16-weights", "fp16-pure"])
def test_a_new_plan_takes_nothing_from_half_precision(precision):
    """Masters stay, and sums over larger batches stay in range."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False)
    start = model.weight.detach().half().float()

    def far(model, batch):
        return 2000 * model(batch).squeeze(1).float().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with ab.Step(model, optimizer, far, precision=precision) as step:
        for size in (2, 256, 256):
            assert step(torch.ones(size, 6)).grad_norm == pytest.approx(2000 * 6**0.5, rel=0.01)
    if precision == "bf16-weights":  # steps too small for bfloat16 have added up
        assert torch.allclose(start - model.weight, torch.full((1, 6), 6e-3), atol=3e-3)


class Tempered(nn.Module):
    """A loss with something to learn."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), **KIND))

    def forward(self, model, batch):
        out = model(batch["x"]) * self.log_scale.exp()
        return ab.Loss(F.cross_entropy(out, batch["y"], reduction="sum"), len(out))


def test_parameters_of_the_loss_are_trained_beside_those_of_the_model():
    def both(model, criterion):
        params = [*model.parameters(), *criterion.parameters()]
        return torch.optim.AdamW(params, lr=0.01)

    model, other, mine, theirs = Net().eval(), Net().eval(), Tempered(), Tempered()
    other.load_state_dict(model.state_dict())
    batches = [batch_of(n, n) for n in (6, 13, 9)]
    with ab.Step(
        model, both(model, mine), mine, micro_batch=4, clip_norm=0.1, ghost_batch=4
    ) as step:
        losses = [step(batch).loss for batch in batches]
    optimizer = both(other, theirs)
    for batch, found in zip(batches, losses, strict=True):
        value = mean_loss(theirs(other, batch))
        assert found == pytest.approx(value.item(), rel=1e-9)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_([*other.parameters(), *theirs.parameters()], 0.1)
        optimizer.step()
    assert deviation(model, other) < 1e-9
    assert mine.log_scale.item() == pytest.approx(theirs.log_scale.item(), rel=1e-9)
    assert mine.log_scale.item() != 0.0


def test_an_optimizer_that_was_loaded_goes_on():
    first, second = Net(), Net()
    optimizer = adamw(first)
    plainly(first, optimizer, [batch_of(12)])
    second.load_state_dict(first.state_dict())
    loaded = adamw(second)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    batches = [batch_of(12, i) for i in range(3)]
    plainly(first, optimizer, batches, size=lambda b: len(b["x"]))
    with ab.Step(second, loaded, loss, micro_batch=4, ghost_batch=4) as step:
        for batch in batches:
            step(batch)
    # The bias-free layer before BatchNorm has gradients near zero, which Adam makes large.
    assert deviation(second, first) < 1e-6


class Plain(nn.Module):
    """Without BatchNorm, to be cut anywhere."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8, **KIND), nn.Tanh())
        self.head = nn.Linear(8, 3, **KIND)

    def forward(self, x):
        return self.head(self.body(x))


def head_only(model):
    model.body.requires_grad_(False)
    return torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)


def unfreeze(model, optimizer):
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.05})


def freeze(model, optimizer):
    optimizer.param_groups.pop()
    model.body.requires_grad_(False)
    model.body.zero_grad()  # or a plain loop would clip by what is left there


@pytest.mark.parametrize("precision", ["fp32", "bf16-weights"])
def test_layers_may_be_unfrozen_on_the_way_and_frozen_again(precision):
    exactly = precision == "fp32"
    dtype = torch.float64 if exactly else torch.float32
    model, other = Plain().to(dtype), Plain().to(dtype)
    other.load_state_dict(model.state_dict())
    optimizer, theirs = head_only(model), head_only(other)
    with ab.Step(model, optimizer, loss, micro_batch=3, clip_norm=0.5, precision=precision) as step:
        for number in range(6):
            if number in (2, 4):
                change = unfreeze if number == 2 else freeze
                change(model, optimizer)
                change(other, theirs)
            batch = batch_of(10, number)
            batch["x"] = batch["x"].to(dtype)
            outcome = step(batch)
            (wanted,) = plainly(other, theirs, [batch], clip_norm=0.5)
            assert outcome.loss == pytest.approx(wanted, rel=1e-9 if exactly else 0.02)
    assert deviation(model, other) < (1e-9 if exactly else 0.05)


def test_what_was_frozen_is_counted_in_the_plan_once_it_is_trained():
    model = Plain()
    optimizer = head_only(model)
    with ab.Step(model, optimizer, loss) as step:
        step(batch_of(8))
        assert step.plan.task.trainable_parameters == 27
        unfreeze(model, optimizer)
        step(batch_of(8))
        assert step.plan.task.trainable_parameters == 83


def test_norms_in_evaluation_mode_are_not_cut_and_modes_may_change_between_steps():
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    optimizer, plain, passes, losses, expected = sgd(model), sgd(other), [], [], []
    with ab.Step(model, optimizer, loss, micro_batch=8, ghost_batch=4) as step:
        for number, frozen in enumerate([True, True, False, False, True]):
            batch = batch_of(16, number)
            for one in (model, other):
                one.eval()  # between two steps, as to evaluate
                assert torch.isfinite(one(batch["x"])).all()
                one.train()
                one.body.train(not frozen)
            before = model.body[1].running_mean.clone()
            outcome = step(batch)
            losses.append(outcome.loss)
            passes.append(outcome.num_micro_batches)
            assert torch.equal(before, model.body[1].running_mean) == frozen
            assert step.plan.task.ghost_batch == (None if frozen else 4)
            assert model.training
            assert model.body.training != frozen
            expected += plainly(other, plain, [batch], size=lambda batch: len(batch["x"]))
            del other.body[1].forward
    assert losses == pytest.approx(expected, rel=1e-9)
    assert deviation(model, other) < 1e-9
    assert passes == [2] * 5


@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_a_frozen_backbone_may_be_cut_below_a_ghost_batch(micro_batch):
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        one.body.requires_grad_(False).eval()
    batches = [batch_of(n, n) for n in (16, 5)]
    with ab.Step(model, sgd(model), loss, micro_batch=micro_batch) as step:
        outcomes = [step(batch) for batch in batches]
    assert outcomes[0].num_micro_batches == -(-16 // micro_batch)
    assert [o.loss for o in outcomes] == pytest.approx(
        plainly(other, sgd(other), batches), rel=1e-9
    )
    assert deviation(model, other) < 1e-9


def test_what_the_user_has_compiled_is_not_compiled_while_it_is_planned(recwarn):
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    model, other = Plain(), Plain()
    other.load_state_dict(model.state_dict())
    batches = [batch_of(8, i) for i in range(2)]
    with ab.Step(torch.compile(model, backend=backend), sgd(model), loss, micro_batch=4) as step:
        step(batches[0])
        assert len(compiled) == 1  # the first pass; others are of the same shape
        step(batches[1])
    plainly(other, sgd(other), batches)
    assert deviation(model, other) < 1e-9
    assert not [one for one in recwarn if "torch.compile" in str(one.message)]


@pytest.mark.parametrize("precision", ["fp32", "bf16-weights", "fp16-weights", "bf16-pure"])
def test_weights_that_are_loaded_or_clamped_between_steps_are_trained_on_from(precision):
    model = Plain().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = batch_of(8)
    batch["x"] = batch["x"].float()
    with ab.Step(model, optimizer, loss, micro_batch=4, precision=precision) as step:
        step(batch)
        model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
        step(batch)
        for param in model.head.parameters():
            param.data.clamp_(-0.25, 0.25)
        step(batch)
    assert (model.body[0].weight - 1).abs().max() < 0.02
    assert (model.head.weight - 0.25).abs().max() < 0.02


def test_masters_keep_what_half_precision_does_not_show():
    model = Plain()
    before = model.body[0].weight.detach().float().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = batch_of(8)
    batch["x"] = batch["x"].bfloat16()
    with ab.Step(model, optimizer, loss, precision="bf16-weights") as step:
        for _ in range(3):
            step(batch)
    assert torch.equal(model.body[0].weight.float(), before)


def of_hooked(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def test_a_hook_on_a_gradient_is_told_to_see_sums_and_hooks_of_the_optimizer_see_the_mean(recwarn):
    model, other = Plain(), Plain()
    other.load_state_dict(model.state_dict())
    optimizer, theirs = sgd(model), sgd(other)

    def clamp(one, _args, _kwargs):
        for group in one.param_groups:
            for param in group["params"]:
                param.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clamp)
    theirs.register_step_pre_hook(clamp)
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    other.head.weight.register_hook(lambda gradient: gradient * 0.5)
    batches = [batch_of(10, i) for i in range(3)]
    with ab.Step(model, optimizer, of_hooked, micro_batch=3) as step:
        for batch in batches:
            step(batch)
    told = [str(one.message) for one in recwarn if "has a hook" in str(one.message)]
    assert len(told) == 1
    assert "the gradient of 'head.weight' has a hook" in told[0]
    plainly(other, theirs, batches)
    assert deviation(model, other) < 1e-9


def test_a_step_that_fails_changes_nothing():
    model = Net()
    optimizer = sgd(model)
    step = ab.Step(model, optimizer, loss, micro_batch=4, ghost_batch=4)
    step(batch_of(8))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    bad = batch_of(8)
    bad["x"][5] = float("nan")
    with pytest.raises(LossError, match=r"micro-batch 1 \(samples 4 to 7 of the batch\)") as raised:
        step(bad)
    assert "alone" not in str(raised.value)  # none was tried alone
    for name, value in model.state_dict().items():
        assert torch.equal(before[0][name], value)
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(before[1]["state"][key]["momentum_buffer"], state["momentum_buffer"])
    step(batch_of(8, 1))
    step.close()


@pytest.mark.parametrize(
    ("model", "optimizer", "more", "message"),
    [
        ("net", lambda m: sgd(m), {}, "not str and SGD"),
        (Net(), lambda m: None, {}, "not Net and NoneType"),
        (
            Net(),
            lambda m: torch.optim.LBFGS(m.parameters()),
            {},
            "LBFGS, which computes the loss",
        ),
        (Net(), sgd, {"precision": "fp4"}, "precision is 'fp4'"),
        (Net(), sgd, {"memory": "much"}, "memory is 'much'"),
    ],
)
def test_what_cannot_be_used_is_refused(model, optimizer, more, message):
    net = model if isinstance(model, nn.Module) else Net()
    with pytest.raises(InputError, match=message):
        ab.Step(model, optimizer(net), loss, **more)


@pytest.mark.parametrize("accumulates", [True, False])
def test_an_optimizer_of_accelerate_that_would_not_make_the_update_is_refused(accumulates):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if accumulates else 1)
    try:
        model = nn.Linear(3, 1)
        scaler = None if accumulates else torch.amp.GradScaler("cpu")
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
        message = "skip this update" if accumulates else "precision='fp16' to Step"
        step = ab.Step(model, optimizer, lambda model, batch: model(batch).mean(), verbose=False)
        with accelerator.accumulate(), pytest.raises(InputError, match=message):
            step(torch.randn(4, 3))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_a_run_resumed_by_accelerate_is_the_same_as_an_undisturbed_one(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import set_seed

    def trained(stop=None, resume=None):
        accelerator = Accelerator(cpu=True)
        set_seed(1)
        data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        order = torch.Generator().manual_seed(2)  # else the loader draws from the restored one
        loader = torch.utils.data.DataLoader(data, 6, shuffle=True, generator=order)
        loader = accelerator.prepare(loader)
        accelerator.register_for_checkpointing(model, optimizer, scheduler)
        if resume is not None:
            accelerator.load_state(tmp_path)
            loader = accelerator.skip_first_batches(loader, resume)

        def loss(model, batch):
            inputs, labels = batch
            return ab.Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))

        with ab.Step(model, optimizer, loss, micro_batch=4, verbose=False) as step:
            for number, batch in enumerate(loader, 1):
                step(batch)
                scheduler.step()
                if number == stop:
                    accelerator.save_state(tmp_path)
                    break
        return model.state_dict()

    try:
        undisturbed = trained()
        trained(stop=2)
        resumed = trained(resume=2)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    for name, value in undisturbed.items():
        assert torch.equal(resumed[name], value)


def test_a_first_call_that_fails_leaves_a_plain_model():
    model = Net()
    step = ab.Step(model, sgd(model), loss, recompute=Recompute(blocks=("nowhere",)))
    with pytest.raises(InputError, match="'nowhere'"):
        step(batch_of(8))
    step.close()
    assert not any("forward" in vars(m) for m in model.modules())


def test_gradients_of_the_users_own_backward_passes_are_not_added_to_those_of_a_step():
    """A loop that zeroes gradients first leaves those of its last batch behind."""
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    optimizer, theirs = sgd(model), sgd(other)
    plainly(model, optimizer, [batch_of(12)])
    plainly(other, theirs, [batch_of(12)])
    rest = [batch_of(8, 1), batch_of(8, 2)]
    plainly(other, theirs, rest, size=lambda batch: len(batch["x"]))
    with ab.Step(model, optimizer, loss, micro_batch=4, ghost_batch=4) as step:
        step(batch_of(8, 1))
        model.eval()
        model(batch_of(3)["x"]).sum().backward()
        model.train()
        step(batch_of(8, 2))
    assert deviation(model, other) < 1e-9


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
}


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("first", [True, False])
def test_a_scheduler_of_the_script_may_come_before_the_step_or_after_it(name, first, make):
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    batches = [batch_of(16, n) for n in range(5)]
    optimizer, plain = make(model), make(other)
    scheduler = SCHEDULERS[name](optimizer) if first else None
    with ab.Step(model, optimizer, loss, micro_batch=4, ghost_batch=4) as step:
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        losses = []
        for batch in batches:
            losses.append(step(batch).loss)
            scheduler.step()
    by_hand = SCHEDULERS[name](plain)
    expected = []
    for batch in batches:
        expected += plainly(other, plain, [batch], size=lambda batch: len(batch["x"]))
        by_hand.step()
    assert losses == pytest.approx(expected, rel=1e-9)
    assert deviation(model, other) < 1e-9
    assert scheduler.get_last_lr() == by_hand.get_last_lr()


def test_without_a_budget_what_the_model_holds_already_is_no_reason_against_it(monkeypatch):
    from anybatch.machine import Machine

    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 3))
    free = dataclasses.replace(Machine.here(device="cpu").device, budget_bytes=120 << 20)
    monkeypatch.setattr(Machine, "here", classmethod(lambda *_: Machine((free,))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, lambda m, x: m(x).square().mean()) as step:
        step(torch.randn(64, 4096))
    assert step.plan.budget_bytes == free.budget_bytes + 4 * sum(
        p.numel() for p in model.parameters()
    )
    assert step.plan.prediction.peak_bytes > free.budget_bytes


def test_statistics_that_advance_once_per_pass_are_told_where_a_batch_is_cut():
    def run(micro_batch):
        model = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
        )

        def own(model, batch):
            return model(batch).square().mean()

        with ab.Step(model, sgd(model), own, micro_batch=micro_batch) as step:
            step(torch.randn(8, 2, 6))

    with pytest.warns(UserWarning, match="'1' keeps statistics that advance once per pass"):
        run(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(8)


class Tagger(nn.Module):
    """Its sizes depend on the numbers in a batch, so no trace can follow it."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True, **KIND)
        self.head = nn.Linear(8, 3, **KIND)

    def forward(self, x, lengths):
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed, _ = self.lstm(pack(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(pad(packed, batch_first=True, total_length=x.size(1))[0])


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_a_model_that_no_trace_can_follow_is_planned_by_passes_that_leave_no_trace(micro_batch):
    calls = []

    def own(model, batch):
        calls.append(torch.rand(()).item())
        x, lengths = batch
        seen = torch.arange(x.size(1)) < lengths[:, None]
        return ab.Loss(model(x, lengths).square().sum(dim=2)[seen].sum(), seen.sum())

    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(90, 9, 6, generator=draw, **KIND), torch.randint(1, 10, (90,), generator=draw))
        for _ in range(3)
    ]
    torch.manual_seed(0)
    model, other = Tagger(), Tagger()
    other.load_state_dict(model.state_dict())
    with ab.Step(model, sgd(model), own, memory="64MiB", micro_batch=micro_batch) as step:
        torch.manual_seed(1)
        losses, passes = [], 0
        for batch in batches:
            outcome = step(batch)
            losses.append(outcome.loss)
            passes += outcome.num_micro_batches
        assert len(calls) == passes
        assert calls == torch.rand(passes, generator=torch.Generator().manual_seed(1)).tolist()
        assert step.plan.choice.micro_batch == (micro_batch or 90)
        assert (step.plan.prediction is None) == (micro_batch is not None)
    torch.testing.assert_close(losses, plainly(other, sgd(other), batches, own), rtol=1e-12, atol=0)
    assert deviation(model, other) < 1e-12


def test_a_model_that_got_other_parameters_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss, verbose=False) as step:
        step(batch_of(6))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        with pytest.raises(InputError, match="no step would change the model"):
            step(batch_of(6))


def test_parts_of_unequal_size_that_are_taken_as_samples_are_told():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def residuals(model, batch):
        return sum(model(part).square().mean() for part in batch)

    parts = torch.rand(32, 2), torch.rand(8, 2)
    told = "a tuple of 2 tensors of 32 and 8 rows, which are taken as 2 samples"
    with (
        ab.Step(model, optimizer, residuals, verbose=False) as step,
        pytest.warns(UserWarning, match=told),
    ):
        step(parts)


@pytest.mark.parametrize(
    ("shape", "size", "told"),
    [((3, 4, 4), 8, "parts of 3 samples"), ((5, 2), 6, "parts of 5 samples"), ((8, 2), 2, None)],
)
def test_samples_of_one_shape_that_are_taken_as_parts_are_told(shape, size, told):
    model = nn.Linear(shape[-1], 1)

    def energy(model, batch):
        return model(torch.stack([*batch])).square().mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = [torch.rand(shape) for _ in range(size)]
        with ab.Step(model, sgd(model), energy, verbose=False) as step:
            step(batch)
        options = {
            "count_samples": len,
            "slice_batch": lambda batch, start, stop: batch[start:stop],
        }
        with ab.Step(model, sgd(model), energy, micro_batch=2, verbose=False, **options) as step:
            assert step(batch).num_micro_batches == size // 2
    sentences = [str(one.message) for one in caught if "are taken as" in str(one.message)]
    assert len(sentences) == (told is not None)
    assert all(told in one for one in sentences)
