"""`verify` finds each planted cause of inexactness, names it, and calls what is exact exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import anybatch as ab
from anybatch.compute.frozen_randomness import calm
from anybatch.plans import Choice, Plan
from anybatch.proof import TOLERANCES

NUM = 48
X = torch.randn(NUM, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :1] - X[:, 1:2].square()
TOKENS = torch.randint(0, 11, (NUM, 7), generator=torch.Generator().manual_seed(2))


pytestmark = pytest.mark.usefixtures("one_thread")


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def task(model: Callable[[], nn.Module] | nn.Module, loss: Any = mse, **changes: Any) -> ab.Task:
    fields = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(X, Y),
        "global_batch": 24,
        "epochs": 1,
    }
    return ab.Task(model=model, loss=loss, **{**fields, **changes})


def plan_for(one: ab.Task, micro_batch: int = 8) -> Plan:
    plan = ab.plan(one)
    return plan.model_copy(update={"choice": Choice(micro_batch=micro_batch, evaluation_batch=8)})


def verdict_on(one: ab.Task, micro_batch: int = 8, **options: Any) -> ab.Verdict:
    return ab.verify(one, plan_for(one, micro_batch), **options)


def mlp(*middle: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 1))


class OwnNorm(nn.Module):
    """BatchNorm as people write it by hand."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num))
        self.register_buffer("running_mean", torch.zeros(num))
        self.register_buffer("running_var", torch.ones(num))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.running_mean) / (self.running_var + 1e-5).sqrt() * self.weight
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var, 0.1)
        return (x - mean) / (var + 1e-5).sqrt() * self.weight


class Words(nn.Module):
    """Tokens (B, T) int64 to logits (B, T, 11), with the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


def ignoring(batch: Any) -> Tensor:
    """Targets of which every sample ignores another number."""
    (tokens,) = batch
    kept = torch.arange(tokens.size(1)) < 1 + tokens[:, :1] % 6
    return torch.where(kept, tokens, -100)


def mean_over_kept_tokens(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), ignoring(batch))


def sum_over_kept_tokens(model: nn.Module, batch: Any) -> ab.Loss:
    targets = ignoring(batch)
    total = F.cross_entropy(model(batch[0]).transpose(1, 2), targets, reduction="sum")
    return ab.Loss(total, (targets != -100).sum())


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    one = F.normalize(model(batch[0]), dim=1)
    other = F.normalize(model(batch[0] + 0.1), dim=1)
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


# ------------------------------------------------------------------------------------- what is exact


def test_a_plain_task_is_exact_up_to_rounding_in_float64():
    verdict = verdict_on(task(mlp(nn.Tanh())))
    assert verdict.exact
    assert verdict.deviation < 1e-14
    assert verdict.dtype == "float64"
    assert verdict.causes == ()
    assert verdict.notes == ()
    assert (verdict.num_samples, verdict.pieces) == (44, (8, 8, 8, 8, 8, 4))
    assert verdict.groups.keys() == {"0", "2"}


def test_pieces_are_of_unequal_size_where_the_sample_does_not_divide():
    verdict = verdict_on(task(mlp(nn.Tanh())), micro_batch=7, samples=30)
    assert verdict.exact
    assert verdict.num_samples == 30
    assert verdict.pieces == (7, 7, 7, 7, 2)


def test_a_micro_batch_of_the_whole_sample_is_made_smaller_since_it_would_prove_nothing():
    verdict = verdict_on(task(mlp(nn.Tanh()), global_batch=48), micro_batch=48)
    assert verdict.exact
    assert len(verdict.pieces) == 3


def test_torch_batch_norm_is_exact_over_ghost_batches_and_this_is_noted():
    verdict = verdict_on(task(mlp(nn.BatchNorm1d(8), nn.Tanh()), ghost_batch=8))
    assert verdict.exact
    assert len(verdict.notes) == 1
    assert "ghost batches of 8" in verdict.notes[0]
    assert "belongs to the task" in verdict.notes[0]


def test_a_sum_over_tokens_with_its_weight_is_exact_with_tied_weights_and_integer_inputs():
    verdict = verdict_on(task(Words, sum_over_kept_tokens, train=TensorDataset(TOKENS)))
    assert verdict.exact
    assert verdict.groups.keys() == {"embed", "middle"}


def test_frozen_layers_have_no_part_in_it():
    def model() -> nn.Module:
        built = mlp(nn.Tanh())()
        built[0].requires_grad_(False)
        return built

    verdict = verdict_on(task(model))
    assert verdict.exact
    assert verdict.groups.keys() == {"2"}


def test_a_parameter_that_is_never_used_does_not_matter():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 1)
            self.spare = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    verdict = verdict_on(task(Spare))
    assert verdict.exact
    assert verdict.groups["spare"] == 0


def test_a_task_that_insists_on_float32_is_proved_in_float32():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if batch[0].dtype != torch.float32:  # as kernels do that are written for one dtype
            raise RuntimeError("expected float32")
        return F.mse_loss(model(batch[0]), batch[1])

    verdict = verdict_on(task(mlp(nn.Tanh()), loss))
    assert verdict.dtype == "float32"
    assert verdict.tolerance == TOLERANCES[torch.float32]
    assert verdict.exact


def test_constants_and_casts_to_float32_are_no_reason_to_prove_in_float32():
    def loss(model: nn.Module, batch: Any) -> ab.Loss:
        factor = torch.full((1,), 0.3, dtype=torch.float32)
        kept = torch.zeros(len(batch[0]), 1)  # float32 by default, and written to
        kept += model(batch[0] * factor)
        return ab.Loss((kept.float() - batch[1]).square().sum(), len(kept))

    verdict = verdict_on(task(mlp(nn.Tanh()), loss))
    assert verdict.dtype == "float64"
    assert verdict.exact


def test_a_stream_is_proved_by_its_first_samples():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(X, Y, strict=True)

    verdict = verdict_on(task(mlp(nn.Tanh()), train=Stream()), samples=20)
    assert verdict.exact
    assert verdict.num_samples == 20


def test_recompute_is_part_of_the_proof():
    one = task(mlp(nn.BatchNorm1d(8), nn.Tanh()), ghost_batch=8)
    verdict = ab.verify(one, ab.plan(one, micro_batch=8, recompute="nested"))
    assert verdict.exact


# ------------------------------------------------------------------------------- each planted cause


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self._draw(x)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        Noisy(torch.randn_like),
        Noisy(lambda x: torch.rand(len(x), 1)),
        Noisy(lambda x: torch.normal(2.0, 1.0, x.shape)),
        Noisy(lambda x: torch.empty_like(x).uniform_(-1, 3)),
        Noisy(lambda x: torch.bernoulli(torch.sigmoid(x.detach()))),
        Noisy(lambda x: torch.distributions.Normal(x.detach(), 1.0).sample()),
    ],
    ids=["dropout", "randn_like", "rand", "normal", "uniform_", "bernoulli", "distribution"],
)
def test_what_is_exact_apart_from_random_draws_is_exact(layer: nn.Module):
    verdict = verdict_on(task(mlp(nn.Tanh(), layer)))
    assert verdict.exact
    assert verdict.draws
    assert verdict.deviation < 1e-14
    assert verdict.causes == ()
    (note,) = verdict.notes
    assert "random numbers" in note
    assert "held still" in note


def test_a_model_that_draws_nothing_is_told_to_draw_nothing():
    assert not verdict_on(task(mlp(nn.Tanh()))).draws


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_of_recurrent_layers_is_held_still_and_put_back(kind: Any):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(6, 8, 2, batch_first=True, dropout=0.4)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.layers(x[:, None].expand(-1, 3, -1))
            return self.head(hidden[:, -1])

    model = Recurrent()
    verdict = verdict_on(task(model))
    assert verdict.exact
    assert verdict.draws
    with calm(model, (), still=True):
        assert model.layers.dropout == 0
    assert model.layers.dropout == 0.4


def test_what_the_data_draw_is_left_to_them():
    class Drawn(Dataset):
        def __len__(self) -> int:
            return NUM

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(6, generator=torch.Generator().manual_seed(index))
            return x, x[:1]

    verdict = verdict_on(task(mlp(nn.Tanh(), nn.Dropout(0.5)), train=Drawn()))
    assert verdict.exact
    assert verdict.draws


def test_an_order_that_is_drawn_cannot_be_held_still():
    shuffled = Noisy(lambda x: x[torch.randperm(len(x))])
    verdict = verdict_on(task(mlp(nn.Tanh(), shuffled)))
    assert not verdict.exact
    assert verdict.draws
    (cause,) = verdict.causes
    assert "torch.randperm" in cause


def test_a_loss_that_is_no_number_is_named_with_its_sample():
    inputs = X.clone()
    inputs[17, 2] = torch.nan
    data = TensorDataset(inputs, Y)
    verdict = verdict_on(task(mlp(nn.Tanh()), train=data, shuffle=False))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("The loss is nan. Of the samples, sample 17 of the training data")


def test_a_sample_is_named_by_its_number_in_the_data_whatever_the_order():
    inputs = X.clone()
    inputs[17, 2] = torch.inf
    (cause,) = verdict_on(task(mlp(), train=TensorDataset(inputs, Y))).causes
    assert "sample 17 of the training data" in cause


def test_a_gradient_that_is_no_number_is_told_apart_from_the_loss():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) * 0).abs().sqrt().mean()

    (cause,) = verdict_on(task(mlp(nn.Tanh()), loss)).causes
    assert cause.startswith("The gradient is no number, though the loss is one")


def test_a_mean_that_is_returned_as_a_sum_is_recognised():
    def loss(model: nn.Module, batch: Any) -> ab.Loss:
        return ab.Loss(F.mse_loss(model(batch[0]), batch[1]), len(batch[1]))

    verdict = verdict_on(task(mlp(nn.Tanh()), loss))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("The sum of the loss is a mean")
    assert "anybatch.Loss(mean * n, weight=n)" in cause


def test_a_mean_with_a_weight_of_one_is_no_sum_though_pieces_of_one_size_would_hide_it():
    def loss(model: nn.Module, batch: Any) -> ab.Loss:
        return ab.Loss((model(batch[0]) - batch[1]).square().mean(), 1)

    verdict = verdict_on(task(mlp(nn.Tanh()), loss), micro_batch=12)  # a quarter of the samples
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("The weight of the loss does not add up: it is 1 for")
    assert "anybatch.Loss(sum, weight)" in cause


def test_a_mean_weighted_by_class_is_named_in_float64_though_its_weights_are_float32():
    labels = torch.arange(NUM) % 3
    weights = torch.tensor([1.0, 10.0, 0.1])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    verdict = verdict_on(task(nn.Linear(6, 3), loss, train=TensorDataset(X, labels)), micro_batch=7)
    assert verdict.dtype == "float64"
    assert not verdict.exact
    (cause,) = verdict.causes
    assert "mean over something else than samples" in cause


def test_weights_that_are_added_up_in_float32_are_no_deviation():
    labels = torch.arange(NUM) % 3
    weights = torch.tensor([0.2, 1.1, 0.7])

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        total = F.cross_entropy(model(inputs), targets, weight=weights, reduction="sum")
        return total, weights[targets].sum()

    verdict = verdict_on(task(nn.Linear(6, 3), loss, train=TensorDataset(X, labels)), micro_batch=7)
    assert verdict.exact, verdict.causes
    assert verdict.dtype == "float64"


def test_padding_that_is_not_masked_is_found_though_few_samples_are_short():
    lengths = [3 if i % 8 == 5 else 9 for i in range(NUM)]
    rows = [X[i, 0].repeat(length) for i, length in enumerate(lengths)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch.mean(1, keepdim=True)).square().mean()

    verdict = verdict_on(
        task(nn.Linear(1, 2), loss, train=rows, collate=partial(pad_sequence, batch_first=True))
    )
    assert not verdict.exact
    (cause,) = verdict.causes
    assert "padding that the model or the loss does not mask" in cause


def test_state_that_is_kept_between_passes_is_recognised():
    class Counting(nn.Module):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return x * self.passes

    verdict = verdict_on(task(mlp(Counting(), nn.Tanh())))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert "pass a second time" in cause


def test_a_norm_written_by_hand_is_named():
    verdict = verdict_on(task(mlp(OwnNorm(8), nn.Tanh())))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("'1' looks across the samples")
    assert "GroupNorm" in cause


def test_several_norms_are_counted():
    norms = [OwnNorm(8) for _ in range(5)]
    verdict = verdict_on(task(mlp(*norms)))
    (cause,) = verdict.causes
    assert cause.startswith("'1', '2', '3' and 2 more look across")


def test_a_mean_over_kept_tokens_is_named_a_mean_of_means():
    verdict = verdict_on(task(Words, mean_over_kept_tokens, train=TensorDataset(TOKENS)))
    assert not verdict.exact
    assert verdict.deviation > 1e-3
    (cause,) = verdict.causes
    assert "mean over something else than samples" in cause
    assert "anybatch.Loss(sum, weight)" in cause


# ------------------------------------------------------------------------------- of transformers


def language_model(name: str, dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        options = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        options |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        config = transformers.GPT2Config(vocab_size=19, **options)
    else:
        config = transformers.LlamaConfig(
            vocab_size=19,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=dropout,
        )
    return transformers.AutoModelForCausalLM.from_config(config)


def sequences(ignored: int = 0) -> list[dict[str, Tensor]]:
    """Rows of 3 to 9 tokens; of the first `ignored` no label counts."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 10, (32,), generator=draw).tolist()
    rows = [torch.randint(1, 19, (n,), generator=draw) for n in lengths]
    return [
        {"input_ids": ids, "labels": torch.full_like(ids, -100) if i < ignored else ids}
        for i, ids in enumerate(rows)
    ]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def own_mean(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def of_language(name: str, loss: Any = own_mean, ignored: int = 0, **options: Any) -> ab.Task:
    rows = sequences(ignored)
    shuffled = {"train": rows, "collate": padded, "shuffle": not ignored}
    return task(lambda: language_model(name, **options), loss, **shuffled)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("ignored", [0, 4])
def test_a_models_own_mean_is_named_one_over_tokens(name: str, ignored: int):
    verdict = verdict_on(of_language(name, ignored=ignored))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("The loss does not add up over samples")
    assert "mean over something else than samples (tokens" in cause
    assert "anybatch.model_loss" in cause


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_models_own_mean_is_named_beside_dropout_in_its_attention(name: str):
    verdict = verdict_on(of_language(name, dropout=0.2))
    assert not verdict.exact
    assert verdict.draws
    (cause,) = verdict.causes
    assert "mean over something else than samples (tokens" in cause


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dropout_of_attention_alone_is_no_error(name: str):
    verdict = verdict_on(of_language(name, ab.causal_lm_loss, dropout=0.2))
    assert verdict.exact
    assert verdict.draws


@pytest.mark.parametrize("loss", [ab.model_loss, ab.causal_lm_loss])
def test_what_is_recommended_is_exact(loss: Any):
    assert verdict_on(of_language("llama", loss)).exact


def test_dropout_of_torchs_own_attention_and_of_functions_is_left_out_too():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(6, 8)
            self.attend = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
            self.write = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.read(x)[:, None].expand(-1, 3, -1)
            attended, _ = self.attend(hidden, hidden, hidden)
            return self.write(F.dropout(attended.sum(1), 0.3, self.training))

    verdict = verdict_on(task(Attending))
    assert verdict.exact
    assert verdict.draws


# ------------------------------------------------------------------------------- others


def test_a_contrastive_loss_is_found():
    verdict = verdict_on(task(mlp(nn.Tanh()), contrastive))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("The loss tells the samples of a pass from one another (as contrastive")
    assert "anybatch.JointLoss(encode, compare)" in cause


def test_a_loss_that_returns_the_sum_as_if_it_were_the_mean_is_found():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    verdict = verdict_on(task(mlp(nn.Tanh()), loss))
    assert not verdict.exact
    (cause,) = verdict.causes
    assert cause.startswith("The loss is a sum over the samples")


def test_samples_of_which_everything_is_ignored_do_not_hide_a_mean_of_means():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        targets = ignoring(batch)
        targets[batch[0][:, 0] == 3] = -100
        return F.cross_entropy(model(batch[0]).transpose(1, 2), targets)

    verdict = verdict_on(task(Words, loss, train=TensorDataset(TOKENS)))
    (cause,) = verdict.causes
    assert "mean over something else than samples" in cause


def test_draws_hide_no_cause():
    one = task(mlp(OwnNorm(8), nn.Dropout(0.5)))
    verdict = verdict_on(one)
    assert not verdict.exact
    assert verdict.draws
    assert any("'1' looks across" in cause for cause in verdict.causes)


# ---------------------------------------------------------------------------------- and what it leaves


def test_the_task_is_left_as_it_was():
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))()
    model[3].requires_grad_(False)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    verdict_on(task(model, ghost_batch=8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("samples", [1, 0, -3])
def test_a_sample_that_cannot_be_cut_is_refused(samples: int):
    with pytest.raises(ab.InputError, match=f"samples is {samples}: .* at least 2"):
        verdict_on(task(mlp(nn.Tanh())), samples=samples)


def test_a_plan_for_another_task_is_refused():
    plan = plan_for(task(mlp(nn.Tanh())))
    with pytest.raises(ab.InputError, match="another task"):
        ab.verify(task(mlp(nn.Tanh()), global_batch=16), plan)


def test_a_data_set_of_one_sample_is_refused():
    with pytest.raises(ab.InputError, match="single sample"):
        verdict_on(task(mlp(nn.Tanh()), train=TensorDataset(X[:1], Y[:1])))
