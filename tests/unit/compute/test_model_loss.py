"""model_loss: what the model's own mean is over, found by asking the model."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab

WORDS = 7


class Own(nn.Module):
    """A model with a loss of its own, as transformers' are: `mean(logits, labels)`."""

    def __init__(self, mean, width=WORDS):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, width, dtype=torch.float64)
        self.drop = nn.Dropout(0.5)
        self.mean = mean
        self.num_calls = 0

    def forward(self, input_ids, labels):
        self.num_calls += 1
        return SimpleNamespace(loss=self.mean(self.drop(self.embed(input_ids)), labels))


def over_all(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def over_next(logits, labels):
    return over_all(logits[:, :-1], labels[:, 1:])


def over_samples(logits, labels):
    """A mean over the samples of the mean over the tokens of each."""
    return torch.stack([F.cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)]).mean()


def balanced(logits, labels):
    """With a term that looks at all tokens of the batch together."""
    return over_all(logits, labels) + logits.flatten(0, 1).softmax(1).mean(0).square().sum()


def batch(rows=4, length=6):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    labels = torch.randint(WORDS, (rows, length), generator=generator)
    labels[0, 3:] = labels[2:3, 1:] = -100
    return {"input_ids": ids, "labels": labels}


def pieces(whole):
    return [
        {name: value[part] for name, value in whole.items()} for part in (slice(1), slice(1, 4))
    ]


@pytest.mark.parametrize(("mean", "weight"), [(over_all, 16), (over_next, 12), (over_samples, 4)])
def test_the_weight_is_what_the_mean_is_over(mean, weight):
    model = Own(mean).eval()
    whole = batch()
    if mean is over_next:
        whole["labels"][2, 1] = 3  # a mean over nothing would be no number for the sample either
        weight += 1
    found = ab.model_loss(model, whole)
    parts = [ab.model_loss(model, part) for part in pieces(whole)]
    assert float(found.weight) == weight == sum(float(part.weight) for part in parts)
    torch.testing.assert_close(
        found.sum, mean(model.embed(whole["input_ids"]), whole["labels"]) * weight
    )
    torch.testing.assert_close(found.sum, sum(part.sum for part in parts))


@pytest.mark.parametrize(
    ("mean", "labels"),
    [
        (lambda logits, _: logits.square().mean(), torch.zeros(257)),
        (lambda logits, _: logits.square().mean(), torch.zeros(257, dtype=torch.int64)),
        (over_samples, batch(257)["labels"].clamp_min(0)),
    ],
    ids=["regression", "labels", "samples"],
)
def test_a_mean_in_half_precision_is_weighed_in_full(mean, labels):
    """bfloat16 has no 257."""
    model = Own(mean).eval().bfloat16()
    ids = batch(257)["input_ids"]
    found = ab.model_loss(model, {"input_ids": ids, "labels": labels})
    wanted = mean(model.embed(ids), labels)
    assert wanted.dtype == torch.bfloat16
    assert found.sum.item() == wanted.item() * 257


def test_the_model_is_asked_once_and_stays_as_it_is():
    model = Own(over_all)
    before = torch.random.get_rng_state()
    ab.model_loss(model, batch())
    asked = model.num_calls
    assert model.training
    assert model.drop.training
    torch.random.set_rng_state(before)
    model.embed.weight.grad = None
    ab.model_loss(model, batch()).sum.backward()
    assert model.num_calls == asked + 1
    assert model.embed.weight.grad is not None


@pytest.mark.parametrize("mean", [over_all, over_next])
def test_a_batch_without_a_label_has_no_weight_and_no_gradient(mean):
    model = Own(mean)
    ab.model_loss(model, batch())
    empty = {**batch(), "labels": torch.full((4, 6), -100)}
    found = ab.model_loss(model, empty)
    found.sum.backward()
    assert float(found.weight) == float(found.sum.detach()) == 0
    assert model.embed.weight.grad.abs().sum() == 0


@pytest.mark.parametrize("length", [1, 2])
def test_sequences_too_short_to_compare_are_counted_by_their_first_label(length):
    assert float(ab.model_loss(Own(over_all), batch(length=length)).weight) == 4 * length - (
        length - 1
    )


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_loss_that_is_no_mean_over_labels_is_told(rows):
    with pytest.warns(UserWarning, match=r"loss of Own on two samples .* no mean over labels"):
        ab.model_loss(Own(balanced), batch(rows))


def test_a_loss_that_is_a_sum_is_refused_with_a_remedy():
    def summed(logits, labels):
        return over_all(logits, labels) * (labels != -100).sum()

    with pytest.raises(ab.InputError, match=r"loss of Own is a sum .* anybatch\.Loss\(model"):
        ab.model_loss(Own(summed), batch())


def test_the_first_batch_may_be_one_sample():
    for mean, weight in ((over_all, 3), (over_next, 2), (over_samples, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert float(ab.model_loss(Own(mean), batch(1)).weight) == weight


def test_labels_of_samples_and_numbers_are_weighed_by_samples():
    def over_rows(logits, labels):
        return F.cross_entropy(logits.mean(1), labels)

    def squared(logits, labels):
        return F.mse_loss(logits.mean(1), labels)

    ids = batch()["input_ids"]
    classes = {"input_ids": ids, "labels": torch.tensor([1, 2, -100, 3])}
    assert float(ab.model_loss(Own(over_rows), classes).weight) == 3
    numbers = {"input_ids": ids, "labels": torch.zeros(4, WORDS, dtype=torch.float64)}
    assert float(ab.model_loss(Own(squared), numbers).weight) == 4


def test_without_warnings_in_an_ordinary_case():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ab.model_loss(Own(over_next), batch())


class Answers(nn.Module):
    """A model for question answering with the loss of transformers' own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 2, dtype=torch.float64)

    def forward(self, input_ids, start_positions, end_positions):
        length = input_ids.size(1)
        losses = [
            F.cross_entropy(logits, positions.clamp(0, length), ignore_index=length)
            for logits, positions in zip(
                self.embed(input_ids).unbind(2), (start_positions, end_positions), strict=True
            )
        ]
        return SimpleNamespace(loss=sum(losses) / 2)


def questions(start, end):
    ids = batch()["input_ids"]
    return {
        "input_ids": ids,
        "start_positions": torch.tensor(start),
        "end_positions": torch.tensor(end),
    }


def test_answers_beyond_the_text_count_nothing():
    """Negative positions are the first token for transformers."""
    model, whole = Answers(), questions([1, 6, -1, 400], [2, 9, 5, 512])
    found = ab.model_loss(model, whole)
    parts = [ab.model_loss(model, {k: v[i : i + 1] for k, v in whole.items()}) for i in range(4)]
    assert int(found.weight) == 2
    assert [int(part.weight) for part in parts] == [1, 0, 1, 0]
    torch.testing.assert_close(found.sum, model(**whole).loss * 2)
    torch.testing.assert_close(found.sum, sum(part.sum for part in parts))
    parts[1].sum.backward()
    assert model.embed.weight.grad.abs().sum() == 0


def test_an_answer_of_which_only_the_end_is_beyond_the_text_is_refused():
    said = (
        r"start_positions has 3 and end_positions 8 at \[2\] of a micro-batch of length 6: only one"
    )
    with pytest.raises(ab.InputError, match=said):
        ab.model_loss(Answers(), questions([1, 6, 3, 0], [2, 9, 8, 0]))


@pytest.mark.slow  # imports transformers
def test_answers_at_the_image_that_follows_the_text_count():
    transformers = pytest.importorskip("transformers")
    config = transformers.LayoutLMv3Config(
        vocab_size=30,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        coordinate_size=4,
        shape_size=4,
        input_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.LayoutLMv3ForQuestionAnswering(config).double()
    batch = {
        "input_ids": torch.arange(3, 24).view(3, 7),
        "bbox": torch.zeros(3, 7, 4, dtype=torch.long),
        "pixel_values": torch.rand(3, 3, 8, 8).double(),
        "start_positions": torch.tensor([1, 7, 12]),  # in the text, in the image, in neither
        "end_positions": torch.tensor([2, 11, 12]),
    }
    found = ab.model_loss(model, batch)
    parts = [ab.model_loss(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(3)]
    assert [int(part.weight) for part in parts] == [1, 1, 0]
    torch.testing.assert_close(found.sum, model(**batch).loss * 2)
    torch.testing.assert_close(found.sum, sum(part.sum for part in parts))


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_a_label_that_the_model_has_no_class_for_is_named(wrong):
    for mean, shape in ((over_all, [4, 6]), (lambda x, y: F.cross_entropy(x.mean(1), y), [4])):
        labels = torch.zeros(shape, dtype=torch.int64)
        labels[2] = wrong
        place = r"\[2, 0\]" if len(shape) > 1 else r"\[2\]"
        with pytest.raises(
            ab.DataError, match=rf"labels have {wrong} at {place} .* Own has no such"
        ):
            ab.model_loss(Own(mean), {**batch(), "labels": labels})


def test_another_index_error_of_the_model_is_raised_as_it_is():
    def beyond(logits, labels):
        return logits[9].sum()

    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        ab.model_loss(Own(beyond), batch())


def moved(name):
    ids = torch.randint(WORDS, (3, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    return {"input_ids": ids, name: labels}


def test_labels_that_are_moved_already_are_refused():
    with pytest.raises(ab.InputError, match=r"moved by one already .* call yours 'shift_labels'"):
        ab.model_loss(Own(over_next), moved("labels"))
    assert ab.model_loss(
        Own(over_all), moved("labels")
    ).weight  # of a model that does not move them


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(2, 3), "needs a batch that is a mapping.*was given a Tensor"),
        ({"input_ids": torch.zeros(2, 3)}, "needs a batch with 'labels'.*'input_ids'"),
        ({"labels": [{}, {}]}, "a tensor with the samples on dim 0"),
        ({}, "was given nothing"),
    ],
)
def test_a_batch_without_labels_is_refused(given, said):
    with pytest.raises(ab.InputError, match=said):
        ab.model_loss(Own(over_all), given)


def test_a_model_without_a_loss_is_refused():
    model = Own(lambda *_: None)
    with pytest.raises(ab.InputError, match="Own returned no loss"):
        ab.model_loss(model, {**batch(), "labels": torch.zeros(4, dtype=torch.int64)})


# ------------------------------------------------------------------------------- of transformers


def test_moved_labels_are_refused_without_logits_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    make = partial(transformers.AutoModelForCausalLM.from_config, config)
    with pytest.raises(ab.InputError, match="moved by one already"):
        ab.causal_lm_loss(make(), moved("labels"))
    right = moved("shift_labels")
    assert float(ab.causal_lm_loss(make(), right).weight) == 21
    with pytest.raises(ab.InputError, match="shift_labels are the tokens themselves"):
        ab.causal_lm_loss(make(), {**right, "shift_labels": right["input_ids"]})


def speech(reduction):
    """A small model for CTC, and a batch with one label or two per sample."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        conv_dim=(8,),
        conv_kernel=(4,),
        conv_stride=(4,),
        num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction=reduction,
    )
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2], [3, -100], [4, -100], [5, 6]])
    model = transformers.Wav2Vec2ForCTC(config).double().eval()
    return model, {"input_values": torch.randn(4, 64, dtype=torch.float64), "labels": labels}


def test_ctc_is_weighed_by_samples():
    model, whole = speech("mean")
    found = ab.model_loss(model, whole)
    parts = [ab.model_loss(model, part) for part in pieces(whole)]
    assert (found.weight, [part.weight for part in parts]) == (4, [1, 3])
    torch.testing.assert_close(found.sum, model(**whole).loss * 4)
    torch.testing.assert_close(found.sum, sum(part.sum for part in parts), rtol=1e-5, atol=0)


def test_ctc_as_a_sum_is_refused():
    with pytest.raises(
        ab.InputError, match=r"Wav2Vec2ForCTC is a sum .* set ctc_loss_reduction='mean'"
    ):
        ab.model_loss(*speech("sum"))


@pytest.mark.parametrize("loss", [ab.causal_lm_loss, ab.model_loss])
@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_a_token_that_the_model_does_not_know_is_named(loss, wrong):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    given = batch()
    given["input_ids"][2, 1] = wrong
    with pytest.raises(
        ab.DataError, match=rf"has 7 rows, 0 to 6, and was given {wrong} at \[2, 1\]"
    ):
        loss(model, given)


def mixtral(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_a_mixture_of_experts_that_balances_them_is_told(rows, factor):
    model = mixtral(output_router_logits=True, router_aux_loss_coef=factor)
    with pytest.warns(UserWarning, match=r"balances experts .*router_aux_loss_coef=0 in its conf"):
        ab.model_loss(model, batch(rows))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_mixture_of_experts_that_balances_them_is_told_in_place_of_a_loss_by_the_head(rows):
    model = mixtral(output_router_logits=True, router_aux_loss_coef=0.02)
    with pytest.warns(UserWarning, match="balances experts over all samples"):
        ab.causal_lm_loss(model, batch(rows))


@pytest.mark.parametrize(
    "options", [{}, {"output_router_logits": True, "router_aux_loss_coef": 0.0}]
)
def test_a_mixture_of_experts_that_does_not_is_exact(options):
    model, whole = mixtral(**options), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ab.model_loss(model, whole)
        parts = [ab.model_loss(model, part) for part in pieces(whole)]
    torch.testing.assert_close(found.sum, sum(part.sum for part in parts))
