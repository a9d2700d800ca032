"""transformers' Trainer with the mixin in front: every update is that of the whole global batch, and
the rest of the host works as it does."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from tests.equivalence.test_transformers import WORDS, llama
from torch.nn import functional as F

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
            *("compute_loss_func", "optimizers", "global_batch"),
        )
        if name in options
    }
    kind = options.pop("kind", Trainer)
    if kind is not transformers.Trainer:
        mine = {"global_batch": BATCH, **mine}
    return kind(
        model if model is not None else seeded_llama(),
        arguments(folder, **options),
        train_dataset=sequences(),
        data_collator=collate,
        **mine,
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


def work(rank: int, size: int, folder: str) -> tuple[dict[str, Any], list[Any], list[int]]:
    from accelerate.state import AcceleratorState, PartialState

    there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in there.items():
            patch.setenv(name, str(value))
        try:
            model = seeded_llama()
            made = trainer(folder, model, micro_batch=4)
            assert made.args.world_size == size
            made.train()
            return model.state_dict(), made.state.log_history, order_of(made)
        finally:
            AcceleratorState._reset_state()
            PartialState._reset_state()


def test_two_ranks_train_as_one(crew: Any, tmp_path: Any):
    (found, logs, order), (other, _, _) = crew(2, work, str(tmp_path))
    first = seeded_llama()
    told = plainly(wanted := copy.deepcopy(first), order)
    assert distance(found, wanted.state_dict(), first.state_dict()) < 1e-6
    assert all(torch.equal(found[name], other[name]) for name in found)
    losses = [log["loss"] for log in logs if "loss" in log]
    assert losses == pytest.approx([loss for loss, _ in told], rel=1e-6)


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


# ------------------------------------------------------------------------------------------ padding


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


@pytest.mark.parametrize("change", ["left", "other columns", "no mask"])
def test_other_batches_are_cut_in_order(change: str):
    batch = collate(sequences(6))
    if change == "left":
        batch = {name: value.flip(1) for name, value in batch.items()}
    elif change == "other columns":
        batch["table"] = torch.zeros(6, 3)
    else:
        del batch["attention_mask"]
    cut = PaddingCut()
    cut.expect(batch)
    piece = cut(batch, 2, 4)
    for name, value in batch.items():
        assert torch.equal(piece[name], value[2:4])
