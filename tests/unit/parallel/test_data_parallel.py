"""The fronts compute what the plain module computes on the whole batch."""

import copy
import functools
import threading
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.errors import DataError, InputError, LossError
from anybatch.parallel.data_parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    Outputs,
    gather,
)

CPUS = ["cpu"] * 3
WIDTH, CLASSES = 5, 4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Tied, frozen, unused and shared parameters, a buffer, a parameter list, a hook."""

    def __init__(self):
        super().__init__()
        kind = {"dtype": torch.float64}
        self.first = nn.Linear(WIDTH, 8, **kind)
        self.again = self.first
        self.frozen = nn.Linear(8, 8, **kind).requires_grad_(False)
        self.unused = nn.Linear(2, 2, **kind)
        self.factors = nn.ParameterList([torch.ones(8, **kind), torch.full((8,), 0.5, **kind)])
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, **kind))
        self.head = nn.Linear(8, CLASSES, **kind)
        self.register_buffer("scale", torch.tensor(2.0, **kind))
        self.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x, *, mask=None, power=1):
        h = torch.tanh(self.first(x)) * self.factors[0]
        h = h + self.frozen(h) * self.factors[1]
        h = torch.tanh(self.norm(h)) ** power
        if mask is not None:
            h = h * mask[:, None]
        return self.head(h) * self.scale


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def data(count, seed=1):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, dtype=torch.float64, generator=draw)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    return x, y


def gradients(module):
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if gradient is None:
            assert ours[name] is None, name
        else:
            torch.testing.assert_close(
                ours[name], gradient, msg=lambda m, n=name: f"{n}: {m}", **CLOSE
            )


def check_against_plain(module, criterion, args, targets, kwargs=None, **front):
    """Loss and gradients of fronts and plain module agree."""
    plain = copy.deepcopy(module)
    expected = criterion(plain(*args, **(kwargs or {})), *targets)
    expected.backward()
    model = DataParallelModel(module, **{"devices": CPUS, **front})
    outputs = model(*args, **(kwargs or {}))
    loss = DataParallelCriterion(criterion)(outputs, *targets)
    torch.testing.assert_close(loss, expected, **CLOSE)
    loss.backward()
    assert_same_gradients(gradients(model.module), gradients(plain))
    return outputs


# --------------------------------------------------------------------------------- loss and gradients


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12, 13, 100])
@pytest.mark.parametrize("shares", [None, (5, 2, 1), (0, 1, 1), (1, 0, 0), (0, 0, 1)])
def test_gradients_are_those_of_the_plain_module(count, shares):
    x, y = data(count)
    outputs = check_against_plain(net(), nn.CrossEntropyLoss(), (x,), (y,), shares=shares)
    assert sum(outputs.sizes) == count
    assert [len(output) for output in outputs] == list(outputs.sizes)
    assert all(outputs.sizes)


def test_fewer_samples_than_devices_leave_some_idle():
    x, _ = data(2)
    assert DataParallelModel(net(), CPUS)(x).sizes == (1, 1)


def test_an_empty_batch_runs_on_the_first_device():
    x, _ = data(0)
    outputs = DataParallelModel(net(), CPUS)(x)
    assert [tuple(output.shape) for output in outputs] == [(0, CLASSES)]


def test_keyword_arguments_and_values_without_samples():
    x, y = data(7)
    mask = torch.arange(7, dtype=torch.float64)
    check_against_plain(
        net(), nn.CrossEntropyLoss(), (x,), (y,), {"mask": mask, "power": 2}, shares=(3, 2, 1)
    )


def test_inputs_get_their_gradient():
    x, y = data(8)
    plain_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    module = net()
    F.cross_entropy(module(plain_x), y).backward()
    DataParallelCriterion(F.cross_entropy)(DataParallelModel(module, CPUS)(our_x), y).backward()
    torch.testing.assert_close(our_x.grad, plain_x.grad, **CLOSE)


def test_several_backward_passes_add_up():
    x, y = data(9)
    plain = net()
    for _ in range(2):
        F.cross_entropy(plain(x), y).backward()
    model = DataParallelModel(net(), CPUS)
    for _ in range(2):
        DataParallelCriterion(F.cross_entropy)(model(x), y).backward()
    assert_same_gradients(gradients(model.module), gradients(plain))


def test_training_gives_the_plain_parameters():
    x, y = data(11)
    plain, module = net(), net()
    model, criterion = DataParallelModel(module, CPUS), DataParallelCriterion(nn.CrossEntropyLoss())
    ours = torch.optim.AdamW(model.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(8):
        part = slice(0, 11 - step)
        for optimizer, loss in (
            (ours, lambda part=part: criterion(model(x[part]), y[part])),
            (theirs, lambda part=part: F.cross_entropy(plain(x[part]), y[part])),
        ):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, **CLOSE)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_layers_use_their_replicas(cell):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = cell(WIDTH, CLASSES, num_layers=2, batch_first=True, dtype=torch.float64)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0][:, -1]

    torch.manual_seed(0)
    x = torch.randn(7, 6, WIDTH, dtype=torch.float64)
    check_against_plain(Last(), nn.CrossEntropyLoss(), (x,), (data(7)[1],))


def test_replicas_show_their_parameters():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

        def forward(self, x):
            assert len(list(self.parameters())) == 2
            return self.layer(x.to(next(self.parameters()).dtype))

    x, y = data(6)
    check_against_plain(Asks(), nn.CrossEntropyLoss(), (x,), (y,))


def test_replicas_are_copies_but_for_the_one_at_home():
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append((self.weight.data_ptr(), self.weight.is_leaf))
            return super().forward(x)

    module = Looks(WIDTH, CLASSES, dtype=torch.float64)
    DataParallelModel(module, CPUS)(data(6)[0])
    assert len({pointer for pointer, _ in seen}) == 3
    assert [pointer for pointer, leaf in seen if leaf] == [module.weight.data_ptr()]


def test_replicas_run_at_the_same_time():
    meeting = threading.Barrier(3)

    class Meets(nn.Linear):
        def forward(self, x):
            meeting.wait(timeout=60)
            return super().forward(x)

    DataParallelModel(Meets(WIDTH, CLASSES, dtype=torch.float64), CPUS)(data(6)[0])


# ------------------------------------------------------------------------------------------- criteria


IGNORED = -100


def some_ignored(y, rule):
    y = y.clone()
    if rule == "some":
        y[::3] = IGNORED
    elif rule == "all of one device":
        y[:4] = IGNORED
    return y


@pytest.mark.parametrize("rule", ["none", "some", "all of one device"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["cross entropy", "smoothed", "nll"])
def test_class_losses_are_weighed_by_what_they_count(kind, weighted, reduction, rule):
    x, y = data(10)
    options = {"reduction": reduction}
    if weighted:
        options["weight"] = torch.tensor([0.1, 2.0, 1.0, 0.7], dtype=torch.float64)
    if kind == "smoothed":
        options["label_smoothing"] = 0.2
    loss = (nn.NLLLoss if kind == "nll" else nn.CrossEntropyLoss)(**options)
    module = nn.Sequential(net(), nn.LogSoftmax(dim=1)) if kind == "nll" else net()
    check_against_plain(module, loss, (x,), (some_ignored(y, rule),))


def test_functions_of_torch_are_weighed_by_what_they_count():
    x, y = data(10)
    y = some_ignored(y, "some")
    check_against_plain(net(), F.cross_entropy, (x,), (y,))
    check_against_plain(
        nn.Sequential(net(), nn.LogSoftmax(dim=1)), F.nll_loss, (x,), (y,), shares=(3, 1, 1)
    )


@pytest.mark.parametrize(
    ("options", "told"), [({}, "leaves out targets"), ({"reduction": "sum"}, "returns a sum")]
)
def test_a_function_that_returns_no_mean_over_samples_is_warned_of(options, told):
    x, y = data(10)
    criterion = DataParallelCriterion(lambda output, y: F.cross_entropy(output, y, **options))
    with pytest.warns(UserWarning, match=told):
        criterion(DataParallelModel(net(), CPUS)(x), some_ignored(y, "some"))


def test_options_of_functions_are_kept():
    x, y = data(10)
    loss = functools.partial(F.cross_entropy, ignore_index=1, label_smoothing=0.1)
    check_against_plain(net(), loss, (x,), (y,))


def test_targets_by_keyword():
    x, y = data(10)
    y = some_ignored(y, "some")
    model = DataParallelModel(net(), CPUS)
    expected = F.cross_entropy(model.module(x), y)
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(model(x), target=y)
    torch.testing.assert_close(loss, expected, **CLOSE)


def test_all_targets_ignored_is_not_a_number_as_in_torch():
    x, y = data(10)
    y[:] = IGNORED
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(DataParallelModel(net(), CPUS)(x), y)
    assert loss.isnan()


@pytest.mark.parametrize("weighted", [False, True])
def test_class_probabilities(weighted):
    x, _ = data(10)
    torch.manual_seed(3)
    targets = torch.rand(10, CLASSES, dtype=torch.float64).softmax(dim=1)
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    check_against_plain(net(), nn.CrossEntropyLoss(weight, label_smoothing=0.1), (x,), (targets,))


def test_one_target_per_pixel():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, CLASSES, 3, padding=1, dtype=torch.float64)

        def forward(self, x):
            return self.conv(x)

    torch.manual_seed(2)
    x = torch.randn(7, 3, 5, 6, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (7, 5, 6))
    y[torch.rand(7, 5, 6) < 0.4] = IGNORED
    weight = torch.rand(CLASSES, dtype=torch.float64)
    check_against_plain(Pixels(), nn.CrossEntropyLoss(weight), (x,), (y,), shares=(4, 2, 1))
    probabilities = torch.rand(7, CLASSES, 5, 6, dtype=torch.float64)
    check_against_plain(Pixels(), nn.CrossEntropyLoss(weight), (x,), (probabilities,))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss])
def test_elementwise_losses(loss, reduction):
    x, _ = data(10)
    targets = torch.rand(10, CLASSES, dtype=torch.float64)
    check_against_plain(net(), loss(reduction=reduction), (x,), (targets,), shares=(3, 2, 2))


@pytest.mark.parametrize("form", ["loss", "loss on the device", "pair"])
def test_sums_with_their_own_weight(form):
    x, y = data(10)
    weights = torch.rand(10, dtype=torch.float64)

    def criterion(output, targets, weights):
        total = (F.cross_entropy(output, targets, reduction="none") * weights).sum()
        if form == "pair":
            return total, float(weights.sum())
        weight = weights.sum() if form == "loss on the device" else float(weights.sum())
        return ab.Loss(total, weight)

    model = DataParallelModel(net(), CPUS)
    loss = DataParallelCriterion(criterion)(model(x), y, weights)
    losses = F.cross_entropy(model.module(x), y, reduction="none")
    torch.testing.assert_close(loss, (losses * weights).sum() / weights.sum(), **CLOSE)


def test_a_plain_mean_is_weighed_by_samples():
    x, y = data(7)
    check_against_plain(net(), lambda output, y: F.cross_entropy(output, y), (x,), (y,))


def test_a_loss_inside_the_model():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.net(x), labels), "name": "x"}

    x, y = data(7)
    check_against_plain(WithLoss(), lambda output: output["loss"], (x, y), ())


def test_a_criterion_with_parameters_is_trained():
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(CLASSES, CLASSES, dtype=torch.float64))

        def forward(self, output, targets):
            return (output - self.centers[targets]).square().sum(dim=1).mean()

    torch.manual_seed(4)
    x, y = data(7)
    plain, ours, module = Centers(), Centers(), net()
    ours.load_state_dict(plain.state_dict())
    plain(module(x), y).backward()
    criterion = DataParallelCriterion(ours)
    criterion(DataParallelModel(module, CPUS)(x), y).backward()
    torch.testing.assert_close(ours.centers.grad, plain.centers.grad, **CLOSE)
    assert criterion.state_dict().keys() == plain.state_dict().keys()


def test_outputs_that_the_user_made_of_the_outputs():
    x, y = data(10)
    model = DataParallelModel(net(), CPUS, shares=(5, 3, 1))
    outputs = [{"logits": output} for output in model(x)]
    loss = DataParallelCriterion(nn.CrossEntropyLoss())([o["logits"] for o in outputs], y)
    torch.testing.assert_close(loss, F.cross_entropy(model.module(x), y), **CLOSE)


def test_several_rows_per_sample():
    """Tokens flattened into dim 0, of outputs and targets."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x.flatten(0, 1))

    x = torch.randn(5, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = some_ignored(data(15)[1], "some")
    check_against_plain(Tokens(), nn.CrossEntropyLoss(), (x,), (y,))


def test_only_scalars_cross_devices(monkeypatch):
    """What the criterion moves: three numbers per device, and the targets on their way in."""
    from anybatch.parallel import data_parallel

    moved = []
    plain = data_parallel._to

    def to(tensor, device, copy=False):
        moved.append(tensor.numel())
        return plain(tensor, device, copy)

    x, y = data(12)
    outputs = DataParallelModel(net(), CPUS)(x)
    monkeypatch.setattr(data_parallel, "_to", to)
    DataParallelCriterion(nn.CrossEntropyLoss())(outputs, y)
    assert moved == [1] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_do_not_overflow(dtype):
    outputs = Outputs([torch.full((40_000, 2), 0.0, dtype=dtype) for _ in range(2)], (40_000,) * 2)
    for output in outputs:
        output[:, 1] = 20
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, torch.zeros(80_000).long())
    torch.testing.assert_close(loss, torch.tensor(20.0))
    loss = DataParallelCriterion(lambda o, y: o.square().mean())(outputs, torch.zeros(80_000))
    torch.testing.assert_close(loss, torch.tensor(200.0))


# ----------------------------------------------------------------------------------- state and modes


def test_batch_norm_follows_the_first_device_that_has_samples():
    x, _ = data(12)
    for shares, part in (((1, 1, 1), slice(0, 4)), ((0, 1, 1), slice(0, 6))):
        module = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        expected = copy.deepcopy(module)
        pieces = DataParallelModel(module, CPUS, shares)(x)
        torch.testing.assert_close(pieces[0], expected(x[part]), **CLOSE)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, **CLOSE)
        assert int(module.num_batches_tracked) == 1


def test_evaluation_mode_reaches_the_replicas():
    model = DataParallelModel(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout()), CPUS).eval()
    x = torch.randn(9, WIDTH)
    torch.testing.assert_close(gather(model(x), "cpu"), model.module(x))
    assert int(model.module[0].num_batches_tracked) == 0


def test_what_forward_writes_on_the_module_stays():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    module = Counts(WIDTH, 2)
    model = DataParallelModel(module, CPUS)
    for _ in range(3):
        model(torch.randn(6, WIDTH))
    assert module.calls == 3


class Modes(nn.Module):
    """Returns what state it was run in, per device."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.seen = []

    def forward(self, x):
        y = self.layer(x)
        self.seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                y.dtype,
                y.requires_grad,
            )
        )
        return y


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (torch.enable_grad, (True, False, False, torch.float32, True)),
        (torch.no_grad, (False, False, False, torch.float32, False)),
        (torch.inference_mode, (False, True, False, torch.float32, False)),
        (
            functools.partial(torch.autocast, "cpu", dtype=torch.float16),
            (True, False, True, torch.float16, True),
        ),
    ],
    ids=["grad", "no grad", "inference", "autocast"],
)
def test_modes_of_the_caller_hold_in_the_threads(mode, expected):
    module = Modes()
    with mode():
        outputs = DataParallelModel(module, CPUS)(torch.randn(6, WIDTH))
    assert module.seen == [expected] * 3
    assert all(output.requires_grad == expected[-1] for output in outputs)


def test_state_dict_is_that_of_the_plain_module():
    module = net()
    fronts = [DataParallelModel(module, CPUS), BalancedDataParallel(1, module, devices=CPUS)]
    for front in fronts:
        assert list(front.state_dict()) == list(module.state_dict())
        assert front.state_dict()._metadata == module.state_dict()._metadata


@pytest.mark.parametrize("saved_by", ["plain", "nn.DataParallel", "front"])
def test_both_kinds_of_names_are_loaded(saved_by):
    source = net(seed=1)
    state = {
        "plain": source.state_dict,
        "nn.DataParallel": nn.DataParallel(source).state_dict,
        "front": DataParallelModel(source, CPUS).state_dict,
    }[saved_by]()
    model = DataParallelModel(net(seed=2), CPUS)
    assert not any(model.load_state_dict(state))
    for name, value in source.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], value)


def test_names_that_do_not_fit_are_told():
    model = DataParallelModel(nn.Linear(2, 2), CPUS)
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        model.load_state_dict({"weight": torch.zeros(2, 2)})
    assert model.load_state_dict({"weight": torch.zeros(2, 2)}, strict=False).missing_keys == [
        "bias"
    ]


def test_a_front_inside_a_module_is_saved_and_loaded():
    plain = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"module": nn.Linear(2, 2)}))
    outer = nn.Sequential(
        nn.Linear(2, 2),
        BalancedDataParallel(1, nn.ModuleDict({"module": nn.Linear(2, 2)}), 0, CPUS),
    )
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(outer.state_dict()[name], value)


# ------------------------------------------------------------------------------------- nested outputs


class Both(NamedTuple):
    logits: torch.Tensor
    extra: dict


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, batch, names):
        y = self.layer(batch["x"])
        boxes = [row[: 1 + i % 2] for i, row in enumerate(y)]
        return Both(y, {"boxes": boxes, "names": names, "none": None, "kind": "k", "sum": y.sum()})


def test_nested_inputs_and_outputs():
    x, _ = data(8)
    names = [f"n{i}" for i in range(8)]
    model = DataParallelModel(Nested(), CPUS)
    outputs = model({"x": x, "scale": torch.tensor(1.0)}, names=names)
    assert [output.extra["names"] for output in outputs] == [names[:3], names[3:6], names[6:]]
    whole = gather(outputs, "cpu")
    expected = model.module({"x": x}, names)
    assert isinstance(whole, Both)
    torch.testing.assert_close(whole.logits, expected.logits, **CLOSE)
    assert whole.extra["names"] == names
    assert len(whole.extra["boxes"]) == 8
    assert (whole.extra["none"], whole.extra["kind"]) == (None, "k")
    torch.testing.assert_close(whole.extra["sum"].sum(), expected.extra["sum"], **CLOSE)


def test_lists_of_samples_are_scattered():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 1, 1, dtype=torch.float64)

        def forward(self, images, targets):
            return [
                {"score": self.layer(image).mean() * target["weight"]}
                for image, target in zip(images, targets, strict=True)
            ]

    torch.manual_seed(6)
    images = [torch.randn(3, 4 + i, 5, dtype=torch.float64) for i in range(5)]
    targets = [{"weight": torch.tensor(float(i))} for i in range(5)]
    model = DataParallelModel(Detector(), CPUS)
    outputs = model(images, targets)
    assert outputs.sizes == (2, 2, 1)
    expected = [float(one["score"].detach()) for one in model.module(images, targets)]
    assert [float(one["score"].detach()) for one in gather(outputs)] == expected


def test_gather_is_differentiable():
    x, y = data(7)
    model, plain = DataParallelModel(net(), CPUS), net()
    F.cross_entropy(gather(model(x), "cpu"), y).backward()
    F.cross_entropy(plain(x), y).backward()
    assert_same_gradients(gradients(model.module), gradients(plain))


def test_no_arguments_run_once():
    class Constant(nn.Module):
        def forward(self):
            return torch.ones(3)

    assert len(DataParallelModel(Constant(), CPUS)()) == 1


# ------------------------------------------------------------------------------ BalancedDataParallel


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (2, 12, [2, 5, 5]),
        (2, 13, [2, 6, 5]),
        (0, 7, [0, 4, 3]),
        (9, 12, [4, 4, 4]),
        (4, 2, [1, 1, 0]),
        (1, 1, [1, 0, 0]),
        (0, 1, [0, 1, 0]),
    ],
)
def test_the_first_device_takes_less(first, count, expected):
    assert BalancedDataParallel(first, net(), devices=CPUS).sizes(count) == expected


@pytest.mark.parametrize("first", [0, 1, 2, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_balanced_gives_the_output_of_the_plain_module(first, count):
    x, y = data(count)
    model, plain = BalancedDataParallel(first, net(), devices=CPUS), net()
    output, expected = model(x), plain(x)
    torch.testing.assert_close(output, expected, **CLOSE)
    F.cross_entropy(output, y).backward()
    F.cross_entropy(expected, y).backward()
    assert_same_gradients(gradients(model.module), gradients(plain))


def test_the_arguments_of_other_fronts_are_taken():
    x, y = data(7)
    plain = net()
    expected = F.cross_entropy(plain(x), y)
    model = DataParallelModel(net(), device_ids=CPUS)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), device_ids=CPUS, output_device="cpu")
    torch.testing.assert_close(criterion(model(x), y), expected, **CLOSE)
    balanced = BalancedDataParallel(2, net(), dim=0, device_ids=CPUS, output_device="cpu")
    torch.testing.assert_close(balanced(x), plain(x), **CLOSE)


def test_samples_in_another_dim():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(WIDTH, CLASSES, dtype=torch.float64)

        def forward(self, x):
            return self.rnn(x)[0]

    module = TimeFirst()
    x = torch.randn(4, 7, WIDTH, dtype=torch.float64)
    model = BalancedDataParallel(1, module, dim=1, devices=CPUS)
    torch.testing.assert_close(model(x), module(x), **CLOSE)


def test_one_device_takes_all():
    assert BalancedDataParallel(1, net(), devices=["cpu"]).sizes(5) == [5]


# ---------------------------------------------------------------------------------------- what fails


class Fails(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.at = at

    def forward(self, x):
        if int(x[0]) in self.at:
            raise KeyError(f"sample {int(x[0])}")
        return self.layer(x)


@pytest.mark.parametrize(
    ("at", "device"), [([0], 0), ([2], 1), ([4], 2), ([2, 4], 1), ([0, 2, 4], 0)]
)
def test_an_error_keeps_its_type_and_names_its_device(at, device):
    model = DataParallelModel(Fails(at), CPUS)
    with pytest.raises(KeyError, match=f"sample {2 * device}") as caught:
        model(torch.arange(6.0)[:, None])
    assert caught.value.__notes__ == [f"raised on cpu, number {device} of 3 devices"]


def test_an_error_is_raised_when_the_others_have_ended():
    done = []

    class Slow(nn.Module):
        def forward(self, x):
            if int(x[0]) == 0:
                raise KeyboardInterrupt
            threading.Event().wait(0.05)
            done.append(int(x[0]))
            return x

    with pytest.raises(KeyboardInterrupt):
        DataParallelModel(Slow(), CPUS)(torch.arange(3.0))
    assert sorted(done) == [1, 2]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DataParallelModel(net(), []), "give a list such as"),
        (lambda: DataParallelModel(net(), "cpu"), "give a list such as"),
        (lambda: DataParallelModel(net(), ["cpu", "tape"]), "no device 'tape'"),
        (lambda: DataParallelModel(net(), ["cuda:97"]), "no device 'cuda:97'"),
        (lambda: DataParallelModel(net(), [97]), "no device 'cuda:97'"),
        (lambda: DataParallelModel(lambda x: x, CPUS), "give a torch.nn.Module"),
        (lambda: DataParallelModel(net(), CPUS, shares=(1, 1)), "2 shares for 3 devices"),
        (lambda: DataParallelModel(net(), CPUS, shares=(1, -1, 1)), "at least zero"),
        (lambda: BalancedDataParallel(-1, net(), devices=CPUS), "at least 0"),
        (lambda: BalancedDataParallel(0.5, net(), devices=CPUS), "a whole number"),
        (
            lambda: BalancedDataParallel(net(), 4),
            "BalancedDataParallel is given a value of type int",
        ),
        (lambda: DataParallelModel(net(), CPUS, device_ids=CPUS), "give one of them"),
        (lambda: DataParallelModel(net(), device_ids=[97]), "no device 'cuda:97'"),
        (lambda: DataParallelModel(net(), CPUS, output_device="cpu"), "gather with a device"),
        (lambda: DataParallelModel(net(), CPUS, dim=1), "leave both out"),
        (lambda: DataParallelCriterion(F.mse_loss, dim=1), "transpose the targets"),
        (lambda: DataParallelCriterion("mse"), "a value of type str"),
        (lambda: DataParallelCriterion(F.mse_loss)(torch.ones(3), torch.ones(3)), "give the list"),
        (lambda: DataParallelCriterion(F.mse_loss)([], torch.ones(3)), "give the list"),
        (
            lambda: DataParallelCriterion(F.mse_loss)([torch.ones(3)] * 2, torch.ones(5)),
            r"have \[3, 3\] samples, but the targets have 5",
        ),
        (lambda: gather([]), "no outputs to gather"),
        (lambda: gather([{"a": torch.ones(1)}, {"b": torch.ones(1)}]), "different parts"),
    ],
)
def test_bad_input_is_told(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


def test_a_module_elsewhere_is_told():
    model = DataParallelModel(nn.Linear(2, 2, device="meta"), CPUS)
    with pytest.raises(InputError, match=r"'weight' of the module is on meta.*\.to\('cpu'\)"):
        model(torch.ones(2, 2))


def test_arguments_that_disagree_are_told():
    with pytest.raises(DataError, match=r"batch\[0\] has 6, batch\['mask'\] has 5"):
        DataParallelModel(net(), CPUS)(data(6)[0], mask=torch.ones(5))


def test_a_loss_per_sample_is_told():
    x, y = data(6)
    outputs = DataParallelModel(net(), CPUS)(x)
    with pytest.raises(LossError, match="not that of a single number"):
        DataParallelCriterion(nn.CrossEntropyLoss(reduction="none"))(outputs, y)


def test_default_devices_are_all_there_are():
    expected = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    assert list(DataParallelModel(net()).devices) == (expected or [torch.device("cpu")])
