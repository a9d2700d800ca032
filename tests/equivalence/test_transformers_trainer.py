"""transformers' Trainer with the mixin in front: every update is that of the whole global batch, and
the rest of the host works as it does."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.equivalence.test_transformers import WORDS, bert, llama
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from anybatch.errors import InputError
from anybatch.integrations.batches import PaddingCut

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from anybatch.integrations.transformers import AnyBatch  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, STEPS, RATE, CLIP = 16, 4, 0.05, 0.5


class Trainer(AnyBatch, transformers.Trainer):
    pass


def seeded_llama() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return llama().double()


def sequences(num: int = 52) -> list[dict[str, Any]]:
    """Of very unequal length."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 30, (num,), generator=draw).tolist()
    return [{"input_ids": torch.randint(3, WORDS, (n,), generator=draw).tolist()} for n in lengths]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, one in enumerate(samples):
        length = len(one["input_ids"])
        ids[row, :length] = torch.tensor(one["input_ids"])
        mask[row, :length] = 1
        labels[row, :length] = ids[row, :length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(folder: Any, **options: Any) -> Any:
    given = {
        "optim": "sgd",
        "learning_rate": RATE,
        "max_grad_norm": CLIP,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": [],
        "use_cpu": True,
        **options,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **given)


def trainer(folder: Any, model: Any = None, **options: Any) -> Any:
    mine = {
        name: options.pop(name)
        for name in (
            *("micro_batch", "memory", "callbacks", "eval_dataset"),
            *("compute_loss_func", "optimizers", "global_batch", "data_collator"),
            *("train_dataset", "count_samples", "slice_batch"),
        )
        if name in options
    }
    kind = options.pop("kind", Trainer)
    if issubclass(kind, AnyBatch):
        mine = {"global_batch": BATCH, **mine}
    mine = {"train_dataset": sequences(), "data_collator": collate, **mine}
    return kind(
        model if model is not None else seeded_llama(), arguments(folder, **options), **mine
    )


def order_of(made: Any, epoch: int = 0) -> list[int]:
    """In which the host's own sampler takes the samples."""
    loader = made.get_train_dataloader()
    sampler = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler).sampler
    sampler.set_epoch(epoch)
    return list(sampler)


def plainly(model: torch.nn.Module, order: list[int]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a loop over single samples, and `model` trained by it."""
    data, told = sequences(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in order[step * BATCH : (step + 1) * BATCH]:
            ids = torch.tensor(data[index]["input_ids"])
            logits = model(input_ids=ids[None]).logits[0]
            total = total + F.cross_entropy(logits[:-1].double(), ids[1:], reduction="sum")
            count += len(ids) - 1
        gradients = torch.autograd.grad(total / count, trained)
        norm = torch.cat([one.flatten() for one in gradients]).norm().item()
        told.append((total.item() / count, norm))
        rate = RATE * (1 - step / STEPS) * min(1.0, CLIP / (norm + 1e-6))
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= rate * gradient
    return told


def distance(found: dict[str, Any], wanted: dict[str, Any], first: dict[str, Any]) -> float:
    """Of two trained models, in parts of the way that one went."""
    one, other, start = (
        torch.cat([value.flatten().double() for value in state.values()])
        for state in (found, wanted, first)
    )
    return ((one - other).norm() / (other - start).norm()).item()


def assert_told(made: Any, told: list[tuple[float, float]]) -> None:
    logs = [log for log in made.state.log_history if "loss" in log]
    assert [log["loss"] for log in logs] == pytest.approx([loss for loss, _ in told], rel=1e-6)
    assert [log["grad_norm"] for log in logs] == pytest.approx([n for _, n in told], rel=1e-6)
    rates = [RATE * (1 - step / STEPS) for step in range(STEPS)]
    assert [log["learning_rate"] for log in logs] == pytest.approx(rates)


@pytest.mark.parametrize("micro_batch", [3, 4, 16])
def test_every_update_is_that_of_the_whole_batch(micro_batch: int, tmp_path: Any, capfd: Any):
    model = seeded_llama()
    first = copy.deepcopy(model)
    made = trainer(tmp_path, model, micro_batch=micro_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a scheduler before its optimizer, say
        made.train()
    told = plainly(wanted := copy.deepcopy(first), order_of(made))
    assert distance(model.state_dict(), wanted.state_dict(), first.state_dict()) < 1e-6
    assert_told(made, told)
    assert "anybatch.Step: 16 samples per step" in capfd.readouterr().err


@contextmanager
def ranks(rank: int, size: int) -> Iterator[None]:
    """Context manager in which accelerate finds itself on one rank of several."""
    from accelerate.state import AcceleratorState, PartialState

    there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in there.items():
            patch.setenv(name, str(value))
        try:
            yield
        finally:
            AcceleratorState._reset_state()
            PartialState._reset_state()


def work(
    rank: int, size: int, folder: str, num: int = 52
) -> tuple[dict[str, Any], list[Any], list[int]]:
    with ranks(rank, size):
        model = seeded_llama()
        made = trainer(folder, model, micro_batch=4, train_dataset=sequences()[:num])
        assert made.args.world_size == size
        made.train()
        return model.state_dict(), made.state.log_history, order_of(made)


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return ({"input_ids": one["input_ids"][:3]} for one in sequences())


def stream(rank: int, size: int, folder: str) -> tuple[float, str]:
    with ranks(rank, size):
        made = trainer(folder, micro_batch=4, train_dataset=Stream(), max_steps=1)
        made.train()
        with pytest.raises(InputError) as refused:
            trainer(folder, global_batch=BATCH - 1, train_dataset=Stream()).train()
        return made._outcome.weight, str(refused.value)


def test_the_global_batch_of_a_stream_is_that_of_all_ranks(crew: Any, tmp_path: Any):
    (weight, refused), _ = crew(2, stream, str(tmp_path))
    assert weight == BATCH * 2  # tokens
    assert "an IterableDataset gives each of the 2 ranks as many samples" in refused


@pytest.mark.parametrize("num", [52, 49], ids=["", "the second has none of the last batch"])
def test_two_ranks_train_as_one(num: int, crew: Any, tmp_path: Any):
    (found, logs, order), (other, _, _) = crew(2, work, str(tmp_path), num)
    first = seeded_llama()
    told = plainly(wanted := copy.deepcopy(first), order)
    assert distance(found, wanted.state_dict(), first.state_dict()) < 1e-6
    assert all(torch.equal(found[name], other[name]) for name in found)
    losses = [log["loss"] for log in logs if "loss" in log]
    assert losses == pytest.approx([loss for loss, _ in told], rel=1e-6)


def rebalanced(rank: int, size: int, folder: str) -> tuple[list[int], str]:
    with ranks(rank, size):
        options = {"train_sampling_strategy": "batch_rebalance", "global_batch": 15}
        made = trainer(folder, train_dataset=sequences(47), **options)
        shares = [len(batch["input_ids"]) for batch in made.get_train_dataloader()]
        with pytest.raises(InputError) as refused:
            trainer(folder, train_dataset=sequences(46), **options).get_train_dataloader()
        return shares, str(refused.value)


def test_rebalanced_batches_are_of_the_global_batch(crew: Any, tmp_path: Any):
    (one, refused), (other, _) = crew(2, rebalanced, str(tmp_path))
    assert [sum(pair) for pair in zip(one, other, strict=True)] == [15, 15, 15, 2]
    assert "each of the 2 ranks a sample of every batch, and one has 1" in refused


def test_a_budget_is_planned_for(tmp_path: Any):
    model = seeded_llama()
    first = copy.deepcopy(model)
    made = trainer(tmp_path, model, memory="512MiB")
    made.train()
    plainly(wanted := copy.deepcopy(first), order_of(made))
    assert distance(model.state_dict(), wanted.state_dict(), first.state_dict()) < 1e-6


def test_adapters_train_alone(tmp_path: Any):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(seeded_llama(), config).double()
    first = copy.deepcopy(model)
    made = trainer(tmp_path, model, micro_batch=4)
    made.train()
    told = plainly(wanted := copy.deepcopy(first), order_of(made))
    assert distance(model.state_dict(), wanted.state_dict(), first.state_dict()) < 1e-6
    assert_told(made, told)
    made.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved/adapter_model.safetensors").exists()


def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path: Any):
    options = {"micro_batch": 4, "optim": "adamw_torch", "save_steps": 3, "max_steps": 6}
    whole = trainer(tmp_path, save_strategy="steps", **options)
    whole.train()
    again = trainer(tmp_path, save_strategy="steps", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 6
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    last = [log for log in whole.state.log_history if "loss" in log][-1]
    assert last == [log for log in again.state.log_history if "loss" in log][-1]


class Seen(transformers.TrainerCallback):
    """What callbacks get to see, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.norms: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("begin")

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.calls.append("before the update")
        gradients = [p.grad.flatten() for p in model.parameters()]
        self.norms.append(torch.cat(gradients).norm().item())

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.calls.append("after the update")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("end")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.calls.append("evaluated")


def test_callbacks_and_evaluations_come_as_they_do(tmp_path: Any):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": sequences()[:9]}
    calls = []
    for kind in (Trainer, transformers.Trainer):
        seen = Seen()
        share = {"per_device_train_batch_size": BATCH} if kind is transformers.Trainer else {}
        made = trainer(tmp_path, kind=kind, callbacks=[seen], **options, **share)
        made.train()
        calls.append((seen.calls, seen.norms, made.state.log_history))
    mine, theirs = calls
    assert mine[0] == theirs[0]
    assert mine[1] == pytest.approx(theirs[1], rel=1e-6)  # clipped
    for ours, host in zip(mine[2], theirs[2], strict=True):
        assert ours.keys() == host.keys()
        for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step"):
            assert name not in host or ours[name] == pytest.approx(host[name], rel=1e-5)


def test_losses_of_the_users_own_are_weighed_by_tokens(tmp_path: Any):
    def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits.double(), wanted)  # a plain mean, for all that it is told

    model = seeded_llama()
    first = copy.deepcopy(model)
    made = trainer(tmp_path, model, micro_batch=3, compute_loss_func=mean)
    made.train()
    plainly(wanted := copy.deepcopy(first), order_of(made))
    assert distance(model.state_dict(), wanted.state_dict(), first.state_dict()) < 1e-6


class SumOverItems(transformers.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        wanted = inputs.pop("labels")[:, 1:].flatten()
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class SumOverItemsCut(AnyBatch, SumOverItems):
    pass


def test_an_evaluation_tells_the_loss_its_number_of_items(tmp_path: Any):
    found = []
    for kind in (SumOverItemsCut, SumOverItems):
        share = {"per_device_train_batch_size": BATCH} if kind is SumOverItems else {}
        made = trainer(tmp_path, kind=kind, eval_dataset=sequences()[:9], max_steps=1, **share)
        made.train()
        found.append(made.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


class TimesTokens(Trainer):
    """Its loss is no mean over anything."""

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        return super().compute_loss(model, inputs, **options) * inputs["attention_mask"].sum()


def test_a_loss_that_is_no_mean_is_told_by_its_name(tmp_path: Any):
    with pytest.warns(
        UserWarning, match=r"TimesTokens.compute_loss' does not.*count_items"
    ) as told:
        trainer(tmp_path, kind=TimesTokens, micro_batch=4, max_steps=1).train()
    assert any(one.filename == __file__ for one in told)


def test_a_scheduler_of_the_users_own_is_stepped(tmp_path: Any, caplog: Any):
    model = seeded_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    made = trainer(tmp_path, model, micro_batch=4, optimizers=(optimizer, scheduler))
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made.train()
    rates = [log["learning_rate"] for log in made.state.log_history if "loss" in log]
    assert rates == pytest.approx([RATE * 0.5**step for step in range(STEPS)])


# ----------------------------------------------------------------- several rows, and other items


class OfPairs(Trainer):
    """Of preferences, as TRL trains them: the first rows are to have less loss than the others."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].double()
        wanted = inputs["input_ids"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").sum(1)
        first, other = losses.chunk(2)
        return -F.logsigmoid(other - first).mean()


def collate_pairs(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """All samples, then all of them backwards."""
    backwards = [{"input_ids": one["input_ids"][::-1]} for one in samples]
    both = collate([*samples, *backwards])
    return {"input_ids": both["input_ids"], "attention_mask": both["attention_mask"]}


def count_pairs(batch: Any) -> int:
    return len(batch["input_ids"]) // 2


def slice_pairs(batch: Any, start: int, stop: int) -> Any:
    n = count_pairs(batch)
    return {k: torch.cat([v[start:stop], v[n + start : n + stop]]) for k, v in batch.items()}


def test_a_collator_that_makes_several_rows_of_a_sample_is_refused(tmp_path: Any):
    made = trainer(tmp_path, kind=OfPairs, data_collator=collate_pairs, micro_batch=4)
    said = r"\(collate_pairs\) made 32 rows of 16 samples, .* give count_samples= and slice_batch="
    with pytest.raises(InputError, match=said):
        made.train()
    with pytest.raises(InputError, match="count_samples and slice_batch go together"):
        trainer(tmp_path, count_samples=count_pairs)


def test_pairs_are_kept_together_by_slices_of_the_users_own(tmp_path: Any):
    first, trained = seeded_llama(), []
    for micro_batch in (BATCH, 3):
        made = trainer(
            tmp_path,
            copy.deepcopy(first),
            kind=OfPairs,
            data_collator=collate_pairs,
            micro_batch=micro_batch,
            count_samples=count_pairs,
            slice_batch=slice_pairs,
        )
        made.train()
        assert made._outcome.weight == len(sequences()) % BATCH  # pairs of the last step
        trained.append(made.model.state_dict())
    whole, cut = trained
    assert distance(cut, whole, first.state_dict()) < 1e-6


def test_answers_that_were_cut_off_count_nothing(tmp_path: Any):
    """Of one micro-batch, all were: the model's mean over nothing is NaN."""
    first, trained = bert("QuestionAnswering", 2).double(), []
    ids = torch.randint(3, WORDS, (BATCH, 12), generator=torch.Generator().manual_seed(0))
    places = [99 if i % 3 else 2 for i in range(BATCH)]
    rows = [
        {"input_ids": one, "start_positions": place, "end_positions": place + 2}
        for one, place in zip(ids, places, strict=True)
    ]
    for micro_batch in (BATCH, 1):
        made = trainer(
            tmp_path,
            copy.deepcopy(first),
            train_dataset=rows,
            data_collator=transformers.default_data_collator,
            micro_batch=micro_batch,
            max_steps=1,
        )
        made.train()
        assert made._outcome.weight == 6
        trained.append(made.model.state_dict())
    assert distance(trained[1], trained[0], first.state_dict()) < 1e-6


def test_items_are_counted_as_the_model_s_own_loss_does(tmp_path: Any):
    config = transformers.SegformerConfig(
        num_labels=3, depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4
    )
    labels = torch.tensor([[[0, 255], [1, 2]]])
    segmented = trainer(tmp_path, transformers.SegformerForSemanticSegmentation(config))
    assert segmented.count_items({"labels": labels}) == 3
    config = transformers.Wav2Vec2Config(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=2,
    )
    heard = trainer(tmp_path, transformers.Wav2Vec2ForCTC(config))
    with pytest.raises(InputError, match="set ctc_loss_reduction='mean'"):
        heard.count_items({"labels": labels[0]})
    config.ctc_loss_reduction = "mean"
    assert heard.count_items({"labels": labels[0]}) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is True"),
        ({"global_batch": 0}, "global_batch is 0"),
    ],
)
def test_arguments_that_say_the_same_twice_are_refused(options: Any, said: str, tmp_path: Any):
    with pytest.raises(InputError, match=said):
        trainer(tmp_path, **options)


class Doubled(transformers.Trainer):
    def training_step(self, *args: Any) -> Any:
        return 2 * super().training_step(*args)


class Prepared(transformers.Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return {**super()._prepare_inputs(inputs), "position_ids": None}


@pytest.mark.parametrize("base", [Doubled, Prepared])
def test_a_trainer_whose_overrides_would_not_be_called_is_refused(base: Any, tmp_path: Any):
    kind: Any = type("Own", (AnyBatch, base), {})
    with pytest.raises(InputError, match=f"{base.__name__} overrides .*, which is not called"):
        kind(seeded_llama(), arguments(tmp_path), global_batch=BATCH)


def test_trl_trains_as_exactly(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    import datasets
    from datasets.fingerprint import Hasher
    from tests.equivalence.test_transformers import tokenizer

    # It cannot pickle a trainer.
    monkeypatch.setattr(Hasher, "hash", classmethod(lambda _, value: str(id(value))))

    class SFTTrainer(AnyBatch, trl.SFTTrainer):
        pass

    given = trl.SFTConfig(
        str(tmp_path),
        optim="sgd",
        learning_rate=RATE,
        max_grad_norm=CLIP,
        max_steps=STEPS,
        logging_steps=1,
        lr_scheduler_type="linear",
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    words = tokenizer()
    words.eos_token = "w2"
    data = datasets.Dataset.from_list(sequences())
    first = seeded_llama()
    made = SFTTrainer(
        copy.deepcopy(first),
        given,
        train_dataset=data,
        processing_class=words,
        global_batch=BATCH,
        micro_batch=4,
    )
    made.train()
    order = order_of(made)
    told = plainly(wanted := copy.deepcopy(first), order)
    assert distance(made.model.state_dict(), wanted.state_dict(), first.state_dict()) < 1e-6
    assert_told(made, told)
    tokens = sum(len(one["input_ids"]) for one in sequences())
    assert made.state.log_history[-2]["num_tokens"] == tokens


@pytest.mark.parametrize("boundaries", [False, True])
@pytest.mark.parametrize("micro_batch", [3, None])
def test_sequences_of_padding_free_batches_are_the_samples(
    boundaries: bool, micro_batch: int | None, tmp_path: Any, capfd: Any
):
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=boundaries)
    model = seeded_llama()
    first = copy.deepcopy(model)
    made = trainer(tmp_path, model, micro_batch=micro_batch, data_collator=collator)
    made.train()
    told = plainly(wanted := copy.deepcopy(first), order_of(made))
    assert distance(model.state_dict(), wanted.state_dict(), first.state_dict()) < 1e-6
    assert_told(made, told)
    assert "anybatch.Step: 16 samples per step" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------ padding


def test_a_piece_of_a_padding_free_batch_is_what_the_collator_makes_of_its_sequences():
    samples = sequences(9)
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_tensors="pt"
    )
    batch = collator(samples)
    cut = PaddingCut()
    cut.expect(batch)
    assert cut.count(batch) == 9
    piece, wanted = cut(batch, 2, 5), collator(samples[2:5])
    assert piece.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(piece[name]), torch.as_tensor(value))


def test_pieces_have_the_longest_samples_first_and_no_needless_padding():
    batch = collate(sequences(20))
    cut = PaddingCut()
    cut.expect(batch)
    pieces = [cut(batch, start, start + 5) for start in range(0, 20, 5)]
    widths = [piece["input_ids"].shape[1] for piece in pieces]
    lengths = sorted((len(one["input_ids"]) for one in sequences(20)), reverse=True)
    longest = batch["input_ids"].shape[1]
    assert widths == [min(-(-lengths[i] // 8) * 8, longest) for i in range(0, 20, 5)]
    found = [row[row != 0].tolist() for piece in pieces for row in piece["input_ids"]]
    assert sorted(found) == sorted(one["input_ids"] for one in sequences(20))
    assert sum(int(piece["labels"].ne(-100).sum()) for piece in pieces) == sum(lengths)


@pytest.mark.parametrize("change", ["left", "other columns", "no mask", "answers"])
def test_other_batches_are_cut_in_order(change: str):
    batch = collate(sequences(6))
    if change == "left":
        batch = {name: value.flip(1) for name, value in batch.items()}
    elif change == "other columns":
        batch["table"] = torch.zeros(6, 3)
    elif change == "answers":  # whose loss is over the columns
        batch["start_positions"] = torch.zeros(6, dtype=torch.int64)
    else:
        del batch["attention_mask"]
    cut = PaddingCut()
    cut.expect(batch)
    piece = cut(batch, 2, 4)
    for name, value in batch.items():
        assert torch.equal(piece[name], value[2:4])
