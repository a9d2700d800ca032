"""Metric objects over ranks find what one rank finds with all samples, or say what cannot be merged."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torchmetrics import (
    BootStrapper,
    CatMetric,
    ClasswiseWrapper,
    ExplainedVariance,
    MaxMetric,
    MeanMetric,
    Metric,
    MinMetric,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryCalibrationError,
    BinaryConfusionMatrix,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
    BinaryROC,
    MulticlassF1Score,
)

from anybatch.engine.scores import Scores
from anybatch.errors import InputError
from anybatch.metrics import Metrics
from anybatch.parallel import Replicate, SingleDevice

CPU = torch.device("cpu")
SPLITS = [(10,), (5, 5), (7, 3), (3, 0, 7), (0, 10), (1, 2, 3, 4), (0, 0, 10, 0)]
"""Samples of each rank; in batches of at most 4."""


def pairs(kind):
    draw = torch.Generator().manual_seed(3)
    if kind == "values":
        x = torch.randn(10, generator=draw)
        return x, x + 0.3 * torch.randn(10, generator=draw)
    if kind == "classes":
        return torch.randint(0, 3, (10,), generator=draw), torch.arange(10) % 3
    return torch.rand(10, generator=draw), torch.arange(10) % 2


class Norm(Metric):
    """A state with a reduction of its own."""

    def __init__(self):
        super().__init__()
        self.add_state("root", torch.zeros(()), dist_reduce_fx=lambda x: x.square().sum(0).sqrt())

    def update(self, preds, target):
        self.root = (self.root**2 + (preds - target).square().sum()).sqrt()

    def compute(self):
        return self.root


class Grown(Metric):
    """A state that is one tensor, and grows."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.empty(0), dist_reduce_fx="cat")

    def update(self, preds, target):
        self.seen = torch.cat([self.seen, preds])

    def compute(self):
        return {"first": self.seen[0], "all": self.seen.sum()}


class Learning(BinaryF1Score):
    """Learns something beside its states from the samples."""

    def update(self, preds, target):
        self.learned = 1.0
        super().update(preds, target)

    def compute(self):
        return super().compute() * self.learned


class Own:
    """Not torchmetrics' at all."""

    def __init__(self):
        self.seen = []

    def reset(self):
        self.seen = []

    def update(self, preds, target):
        self.seen += preds.tolist()

    def merge_state(self, others):
        for other in others:
            self.seen += other.seen

    def compute(self):
        return sorted(self.seen)[len(self.seen) // 2]


CASES = {
    "f1": (BinaryF1Score, "binary"),
    "auroc": (BinaryAUROC, "binary"),
    "auroc in bins": (lambda: BinaryAUROC(thresholds=20), "binary"),
    "calibration": (BinaryCalibrationError, "binary"),
    "composed": (lambda: BinaryPrecision() + 2 * BinaryRecall(), "binary"),
    "per class": (lambda: MulticlassF1Score(3, average=None), "classes"),
    "class names": (
        lambda: ClasswiseWrapper(MulticlassF1Score(3, average=None), labels=["a", "b", "c"]),
        "classes",
    ),
    "pearson": (PearsonCorrCoef, "values"),
    "spearman": (SpearmanCorrCoef, "values"),
    "r2": (R2Score, "values"),
    "variance": (ExplainedVariance, "values"),
    "own reduction": (Norm, "values"),
    "grown": (Grown, "values"),
    "learning": (Learning, "binary"),
    "own": (Own, "values"),
}


def over(split, metric, kind, group):
    """The figures of `metric` on this rank of `group`, from its part of the samples."""
    scores = Scores([Metrics({"m": metric}, lambda model, batch: batch)], CPU, group)
    preds, target = pairs(kind)
    start = sum(split[: group.rank])
    for _ in range(2):  # as when an evaluation is done again
        scores.reset()
        for low in range(start, start + split[group.rank], 4):
            high = min(low + 4, start + split[group.rank])
            scores.update(scores.inputs(torch.nn.Identity(), (preds[low:high], target[low:high])))
    return scores.results(scores.states())


def all_cases(rank, size, split):
    """For each case the figures, and whether the user's object stayed as it was."""
    group = Replicate((1.0,) * size, CPU)
    found = {}
    for case, (build, kind) in CASES.items():
        metric = build()
        before = copy.deepcopy(_state(metric))
        found[case] = over(split, metric, kind, group), _state(metric) == before
    return found


def _state(metric):
    return metric.__dict__ if isinstance(metric, Own) else metric.update_count


@pytest.fixture(scope="module")
def alone():
    return {case: over((10,), build(), k, SingleDevice()) for case, (build, k) in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [one if one == (3, 0, 7) else pytest.param(one, marks=pytest.mark.nightly) for one in SPLITS],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics on memory and on short samples
def test_what_ranks_find_is_what_one_finds(crew, alone, split):
    first, *others = crew(len(split), all_cases, split)
    assert others == [first] * len(others)
    for case, (figures, untouched) in first.items():
        assert figures == pytest.approx(alone[case], rel=1e-5), case
        assert untouched, case


def on_rank(rank, size, split, metric, kind):
    return over(split, metric, kind, Replicate((1.0,) * size, CPU))


@pytest.mark.parametrize(
    ("metric", "wanted"), [(MaxMetric(), 9.0), (MinMetric(), 0.0), (MeanMetric(), 4.5)]
)
def test_one_argument(crew, metric, wanted):
    values = torch.arange(10.0).split([1, 2, 3, 4])
    assert crew(3, of_one_argument, metric, values) == [{"m": wanted}] * 3


def of_one_argument(rank, size, metric, values):
    group = Replicate((1.0,) * size, CPU)
    scores = Scores([Metrics({"m": metric}, lambda model, batch: batch)], CPU, group)
    for value in values[rank::size]:
        scores.update([value])
    return scores.results(scores.states())


def test_torchmetrics_own_synchronisation_is_not_used():
    metric = BinaryF1Score()
    metric.distributed_available_fn = lambda: pytest.fail("asked")
    found = over((10,), metric, "binary", SingleDevice())
    assert found == over((10,), BinaryF1Score(), "binary", SingleDevice())


def test_several_figures_have_names():
    found = over((10,), MulticlassF1Score(3, average=None), "classes", SingleDevice())
    assert list(found) == ["m/0", "m/1", "m/2"]
    found = over((10,), Grown(), "values", SingleDevice())
    assert list(found) == ["m/first", "m/all"]


# ---------------------------------------------------------------------------------------- what is wrong


class MeanState(Metric):
    def __init__(self, fixed=None):
        super().__init__()
        self.fixed = fixed
        self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, preds, target):
        self.level = torch.tensor(self.fixed) if self.fixed else preds.mean()

    def compute(self):
        return self.level


class Shaped(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros(1), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.seen = preds

    def compute(self):
        return self.seen.sum()


class WithoutMerge:
    """Nobody knows what it is made of."""

    def reset(self):
        pass

    def update(self, preds, target):
        pass

    def compute(self):
        return 0.0


@pytest.mark.parametrize(
    ("metric", "split", "says"),
    [
        (MeanState(), (5, 5), "'m' cannot be merged over ranks: its state 'level' is a mean"),
        (Shaped(), (1, 2), "'m' cannot be merged.*its state 'seen' has the shapes"),
        (WithoutMerge(), (5, 5), r"'m' \(WithoutMerge\) cannot be merged over 2 ranks"),
        (BinaryConfusionMatrix(), (5, 5), r"'m' computes a tensor of shape \(2, 2\)"),
        (BinaryROC(), (5, 5), "'m' computes a value of type tuple"),
    ],
    ids=["mean", "shapes", "no merge", "matrix", "curves"],
)
def test_what_cannot_be_merged_or_told_is_named(crew, metric, split, says):
    for error, _ in crew.outcomes(len(split), on_rank, split, metric, "binary"):
        assert isinstance(error, InputError)
        assert re.search(says, str(error))


def test_a_constant_may_be_called_a_mean(crew):
    found = crew(2, on_rank, (5, 5), MeanState(fixed=2.0), "binary")
    assert found == [{"m": 2.0}] * 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Metrics(BinaryF1Score(), print), "takes a dict from names to metric objects"),
        (lambda: Metrics({"f1": BinaryF1Score()}, None), "and a function"),
        (lambda: Metrics({"f1": BinaryF1Score}, print), "'f1' is the class BinaryF1Score, not an"),
        (lambda: Metrics({"f1": 3}, print), "'f1' is a value of type int"),
        (lambda: Metrics({"f1": {"a": 3}}, print), "'f1' is a value of type dict"),
    ],
    ids=["one metric", "no function", "a class", "a number", "a dict"],
)
def test_what_is_no_metric_is_told(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_random_resampling_works_too(crew):
    # Not equal to one rank's, since it draws; but every rank knows the same.
    metric, values = BootStrapper(MeanMetric(), num_bootstraps=4), [torch.full((6,), 2.0)] * 2
    found = crew(2, of_one_argument, metric, values)
    assert found == [{"m/mean": 2.0, "m/std": 0.0}] * 2


def test_cat_metric_of_many_values_is_no_figure():
    with pytest.raises(InputError, match="computes a tensor of shape"):
        over((10,), Long(), "values", SingleDevice())


class Long(CatMetric):
    def update(self, preds, target):
        super().update(torch.zeros(2000))
