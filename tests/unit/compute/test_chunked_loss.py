"""Logits that are left out: code that works on them gets what it would get from the whole, and they are
computed where they are needed, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.compute import chunked_loss
from anybatch.compute.chunked_loss import Logits, can_be_chunked, noting
from anybatch.errors import DataError, InputError

WORDS, WIDTH, BATCH, LENGTH = 97, 8, 3, 10


class Language(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, ids_bt: Tensor) -> Tensor:
        return self.head(self.norm(F.gelu(self.mix(self.embed(ids_bt)))))


IDS = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
TARGETS = IDS.roll(1, 1).masked_fill(IDS % 5 == 0, -100)

Loss = Callable[[Tensor], Tensor]


def rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.size(-1))


LEFT_OUT: dict[str, Loss] = {
    "mean over rows": lambda x: F.cross_entropy(x.view(-1, WORDS), TARGETS.view(-1)),
    "a dim left open": lambda x: F.cross_entropy(x.view(BATCH * LENGTH, -1), TARGETS.view(-1)),
    "sum, in float32": lambda x: F.cross_entropy(
        x.float().flatten(0, 1), TARGETS.flatten(), reduction="sum"
    ),
    "words second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS, label_smoothing=0.1),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGETS),
    "turned": lambda x: F.cross_entropy(x.mT, TARGETS, reduction="sum"),
    "moved by one": lambda x: nn.CrossEntropyLoss()(
        rows(x[:, :-1, :].contiguous()), TARGETS[:, 1:].reshape(-1)
    ),
    "moved by one, with dots": lambda x: F.cross_entropy(
        rows(x[..., :-1, :]), TARGETS[..., 1:].flatten()
    ),
    "those that count": lambda x: F.cross_entropy(x[TARGETS > 0], TARGETS[TARGETS > 0]),
    "weighed by hand": lambda x: (
        F.cross_entropy(rows(x), TARGETS.flatten(), reduction="none")
        * torch.linspace(0, 2, BATCH * LENGTH)
    ).sum(),
    "another thing ignored": lambda x: F.cross_entropy(rows(x), IDS.flatten(), ignore_index=4),
}
COMPUTED: dict[str, Loss] = {
    "a temperature": lambda x: F.cross_entropy(rows(x / 2), TARGETS.flatten()),
    "weights of words": lambda x: F.cross_entropy(
        rows(x), TARGETS.flatten(), weight=torch.linspace(0, 1, WORDS, dtype=x.dtype)
    ),
    "a term beside it": lambda x: (
        F.cross_entropy(rows(x), TARGETS.flatten()) + 0.1 * x.logsumexp(-1).square().mean()
    ),
    "log-softmax by hand": lambda x: F.nll_loss(F.log_softmax(rows(x), -1), TARGETS.flatten()),
    "some of the words": lambda x: F.cross_entropy(rows(x[..., :50]), IDS.flatten() % 50),
    "probabilities": lambda x: F.cross_entropy(rows(x), torch.full((BATCH * LENGTH, WORDS), 0.01)),
    "squares": lambda x: x.square().mean(),
    "turned twice": lambda x: x.mT.mT.exp().mean(),
    "words second, changed": lambda x: x.transpose(1, 2).tanh().sum(),
    "another function of autograd": lambda x: Squared.apply(x),  # type: ignore[no-any-return]
    "a function that scales gradients": lambda x: F.cross_entropy(
        rows(Scaled.apply(x)), TARGETS.flatten()
    ),
    "a function that turns gradients round": lambda x: F.cross_entropy(
        rows(Reversed.apply(x)), TARGETS.flatten()
    ),
    "checkpointed": lambda x: checkpoint(lambda y: y.tanh().sum(), x, use_reentrant=False),
    "checkpointed where they are at hand": lambda x: (
        x.mean() + checkpoint(lambda y: (x + y).tanh().mean(), torch.ones(1), use_reentrant=False)
    ),
}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view(value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 5 * gradients[0]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return gradients[0] * 2 * value / value.numel()


def trained(
    loss: Loss, chunked: bool, dtype: torch.dtype = torch.float64, autocast: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients."""
    model = Language().to(dtype)
    with ExitStack() as stack:
        if chunked:
            head, undo = chunked_loss.install(model, "head")
            stack.callback(undo)
            stack.enter_context(chunked_loss.active(head))
            stack.enter_context(chunked_loss.however_few())
        with torch.autocast("cpu", enabled=autocast):
            found = model(IDS)
            assert isinstance(found, Logits) == chunked
            value = loss(found)
        value.backward()
    return value.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "loss", [*LEFT_OUT.values(), *COMPUTED.values()], ids=[*LEFT_OUT, *COMPUTED]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_of_logits_that_are_left_out_is_that_of_the_whole(loss: Loss, dtype: torch.dtype):
    value, gradients = trained(loss, chunked=True, dtype=dtype)
    whole, whole_gradients = trained(loss, chunked=False, dtype=dtype)
    assert value.dtype == whole.dtype
    torch.testing.assert_close(value, whole)
    assert len(gradients) == len(whole_gradients)
    for one, other in zip(gradients, whole_gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "loss", [*LEFT_OUT.values(), *COMPUTED.values()], ids=[*LEFT_OUT, *COMPUTED]
)
def test_under_autocast_it_differs_by_rounding(loss: Loss):
    value, gradients = trained(loss, chunked=True, dtype=torch.float32, autocast=True)
    whole, whole_gradients = trained(loss, chunked=False, dtype=torch.float32, autocast=True)
    assert value.dtype == whole.dtype
    torch.testing.assert_close(value, whole, rtol=1e-2, atol=1e-3)
    for one, other in zip(gradients, whole_gradients, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_a_loss_in_the_dtype_of_the_weights_keeps_it():
    for loss in LEFT_OUT.values():
        value, _ = trained(loss, chunked=True, dtype=torch.bfloat16)
        whole, _ = trained(loss, chunked=False, dtype=torch.bfloat16)
        assert value.dtype == whole.dtype
        torch.testing.assert_close(value, whole, rtol=3e-2, atol=1e-2)


@pytest.fixture
def products() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of logits that were computed whole."""
    with noting() as found:
        yield found


@pytest.mark.parametrize("loss", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_is_done_before_a_cross_entropy_computes_nothing(loss: Loss, products: list[Any]):
    trained(loss, chunked=True, dtype=torch.float32)
    assert products == []


@pytest.mark.parametrize("loss", COMPUTED.values(), ids=COMPUTED)
def test_whatever_else_computes_them(loss: Loss, products: list[Any]):
    trained(loss, chunked=True)
    assert products


def without_first(logits: Tensor) -> Tensor:
    logits[..., 0] = -10.0
    return logits.sum()


@pytest.mark.parametrize(
    "loss",
    [
        without_first,
        lambda x: x.flatten(0, 1).mul_(0.5).sum(),
        lambda x: x.register_hook(lambda gradient: 3 * gradient),
    ],
)
def test_a_lasting_effect_on_them_is_refused(loss: Loss):
    with pytest.raises(InputError, match=r"written to in place, or a hook.*chunked_head empty"):
        trained(loss, chunked=True)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_index_takes_what_it_takes_of_the_whole(data: st.DataObject):
    parts = st.one_of(
        st.slices(3), st.integers(-3, 2), st.none(), st.just(...), st.just(torch.tensor([2, 0]))
    )
    index = tuple(data.draw(st.lists(parts, max_size=3)))
    model = Language().double()
    whole = model(IDS)
    try:
        wanted = whole[index]
    except (IndexError, ValueError):
        return  # no index at all
    head, _ = chunked_loss.install(model, "head")
    with chunked_loss.active(head), chunked_loss.however_few():
        found = model(IDS)[index]
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.detach(), wanted.detach())


def test_what_is_asked_about_them_is_what_the_whole_would_say(products: list[Any]):
    model = Language()
    whole = model(IDS)
    head, _ = chunked_loss.install(model, "head")
    with chunked_loss.active(head), chunked_loss.however_few():
        left_out = model(IDS)
    for about in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf"):
        assert getattr(left_out, about) == getattr(whole, about)
    assert left_out.size(-1) == WORDS
    assert len(left_out) == BATCH
    assert left_out.numel() == whole.numel()
    assert products == []


def test_few_logits_are_computed_as_ever():
    model = Language()
    head, undo = chunked_loss.install(model, "head")
    with chunked_loss.active(head):
        assert not isinstance(model(IDS), Logits)
    with chunked_loss.however_few():
        assert not isinstance(model(IDS), Logits)  # not in a loss
    undo()
    assert "forward" not in vars(model.head)


def test_a_copy_of_the_model_has_a_head_of_its_own():
    model = Language()
    head, undo = chunked_loss.install(model, "head")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.zero_()
    undo()
    with chunked_loss.active(head), chunked_loss.however_few():
        torch.testing.assert_close(copied(IDS), Language()(IDS))


def test_logits_that_outlive_an_update_are_no_others_silently():
    model = Language()
    head, _ = chunked_loss.install(model, "head")
    with chunked_loss.active(head), chunked_loss.however_few():
        kept = model(IDS)
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="after the weights have changed"):
        kept.sum()


def test_only_a_plain_product_can_be_left_out():
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    hooked = nn.Linear(2, 2)
    hooked.register_full_backward_hook(lambda *_: None)
    assert can_be_chunked(nn.Linear(2, 2))
    assert not can_be_chunked(nn.Embedding(2, 2))
    for head in (Scaled(2, 2), hooked, nn.Conv2d(2, 2, 1), None):
        assert not can_be_chunked(head)


@pytest.mark.parametrize(
    ("name", "what"), [("tail", "no module of the model"), ("norm", "of the class LayerNorm")]
)
def test_what_is_no_head_is_refused(name: str, what: str):
    with pytest.raises(InputError, match=what):
        chunked_loss.install(Language(), name)


def test_a_wrong_target_is_named():
    model = Language()
    head, _ = chunked_loss.install(model, "head")
    wrong = torch.full((BATCH * LENGTH,), WORDS)
    told = pytest.raises(DataError, match=f"is {WORDS}, and the head has {WORDS} words")
    with chunked_loss.active(head), chunked_loss.however_few(), told:
        F.cross_entropy(rows(model(IDS)), wrong)
