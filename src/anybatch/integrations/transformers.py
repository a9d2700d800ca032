"""Mixin for transformers' `Trainer` and its subclasses, for a global batch of any size.

    class Trainer(AnyBatch, transformers.Trainer):
        pass

    trainer = Trainer(model, args, train_dataset=data, global_batch=512, memory="22GiB")
    trainer.train()

Training loop, callbacks, logging, evaluation, schedule and checkpoints remain those of the `Trainer`.
Its loader yields one batch per optimizer step, this rank's share of the global batch, which
`training_step` passes to a `Step`. The `Step` cuts it into micro-batches and makes the update. When the
`Trainer` then clips the gradient and steps the optimizer, both are already done, and it only reads the
norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from anybatch.compute.model_loss import count_answers, ignored_label, is_mean_over_samples
from anybatch.errors import InputError
from anybatch.events import Sink
from anybatch.integrations.batches import (
    CollateOrNone,
    CollateRows,
    PaddingCut,
    Shares,
    presented_as,
)
from anybatch.step import Outcome, Step, check_cutting
from anybatch.task import Loss
from anybatch.units import check_count

if TYPE_CHECKING:
    from transformers import Trainer as _Host
else:
    _Host = object


_REMEDY = " In a Trainer, override count_items to say what the loss is a mean over."


class AnyBatch(_Host):
    """Mixin for `transformers.Trainer` or a subclass, to be listed before it in the bases.

    `per_device_train_batch_size` is set to the share of a rank. The gradient is that of the mean over
    all items of the global batch, on all ranks. Items are labels that are not ignored, or samples if
    there are no labels (for question answering, samples with an answer in their text). A custom
    `compute_loss` or `compute_loss_func` has to return a sum divided by `num_items_in_batch`, or a
    plain mean over these items; for another mean, override `count_items`.

    On several ranks, the last batch of an epoch contains the remaining samples and is not filled up
    with samples that were seen already (except from an `IterableDataset`, as in the `Trainer`). Values
    that `compute_loss` gathers for metrics are those of this rank only, since the number of
    micro-batches may differ between ranks.

    Args:
        global_batch: samples per optimizer step, over all ranks.
        memory: budget per rank, see `Step`; None: plan for the free memory.
        micro_batch, sinks: see `Step`.
        count_samples, slice_batch: for collators that make several rows of each sample, as those of
            TRL's trainers of preferences and rewards do (below): see `Step`. Batches are then cut with
            the padding that they have.
        args, kwargs: arguments of the `Trainer`.

    Raises `InputError` if arguments of the `Trainer` also set the batch, or divide the model; if the
    `Trainer` overrides what is not called here, as those do that generate samples (GRPO); and while
    training, if the collator makes several rows of a sample and `slice_batch` is not given: which rows
    belong together is not known. In `trl.DPOTrainer` and `trl.RewardTrainer`, a batch consists of all
    chosen rows, then of all rejected rows:

        def count_pairs(batch):
            return len(batch["input_ids"]) // 2

        def slice_pairs(batch, start, stop):
            n = count_pairs(batch)
            return {k: torch.cat([v[start:stop], v[n + start : n + stop]]) for k, v in batch.items()}
    """

    def __init__(
        self,
        *args: Any,
        global_batch: int,
        memory: str | int | None = None,
        micro_batch: int | None = None,
        sinks: Sequence[Sink] = (),
        count_samples: Callable[[Any], int] | None = None,
        slice_batch: Callable[[Any, int, int], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_count(global_batch, "global_batch")
        check_cutting(count_samples, slice_batch)
        _check_called(type(self))
        self.global_batch = global_batch
        self._options: Any = {"memory": memory, "micro_batch": micro_batch, "sinks": sinks}
        self._step: Step | None = None
        self._outcome: Outcome | None = None
        self._cut = PaddingCut()
        self._is_cut_by_user = slice_batch is not None
        self._count = count_samples or self._cut.count
        self._slice = slice_batch or self._cut
        super().__init__(*args, **kwargs)

    def count_items(self, inputs: dict[str, Any]) -> Tensor | float:
        """Returns the number of items that the loss of `inputs` is a mean over, as a scalar tensor or a
        number: labels that are not ignored, or samples if there are no labels."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        is_own = self.compute_loss_func is None and self.label_smoother is None
        model: Any = self.model
        if not isinstance(labels, Tensor):
            if is_own and isinstance(inputs.get("start_positions"), Tensor):
                return count_answers(model, inputs)
            return float(self._count(inputs))
        if is_own and is_mean_over_samples(model):
            return float(len(labels))
        if self._loss_shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return labels.ne(ignored_label(model) if is_own else -100).sum()

    # ----------------------------------------------------------------- called by the `Trainer`

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        args, accelerator = self.args, self.accelerator
        for name, default in (("gradient_accumulation_steps", 1), ("auto_find_batch_size", False)):
            if getattr(args, name) != default:
                raise InputError(
                    f"{name} is {getattr(args, name)} in TrainingArguments: global_batch says how many"
                    f" samples a step has, and how it is cut is planned. Leave {name} out."
                )
        if args.n_gpu > 1:
            raise InputError(
                f"one process sees {args.n_gpu} GPUs: start one process for each (torchrun"
                f" --nproc-per-node {args.n_gpu}), or set CUDA_VISIBLE_DEVICES to one of them."
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or accelerator.parallelism_config:
            raise InputError(
                "deepspeed, fsdp or parallelism_config in TrainingArguments divides the model, and"
                " Step takes one that each rank has whole: leave it out."
            )
        args.per_device_train_batch_size = -(-self.global_batch // args.world_size)

        def prepare_model(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
            accelerator._models.append(model)  # else the `Trainer` prepares it in each evaluation
            return model

        # No DistributedDataParallel or autocast around the model: Step replaces both.
        accelerator.prepare_model = prepare_model
        accelerator.prepare_optimizer = lambda optimizer, *_, **__: _Updated.of(optimizer)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        is_training = self.model is not None and self.model.training
        return nullcontext() if is_training else self.accelerator.autocast()

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.global_batch

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        size = getattr(sampler, "dp_size", 1)  # of train_sampling_strategy="batch_rebalance"
        if size == 1:
            return sampler
        sampler = type(sampler)(
            sampler.lengths,
            max(self.global_batch, size),
            size,
            grad_accum=1,
            rank=sampler.rank,
            drop_last=sampler.drop_last,
        )
        rest = sampler.remainder if sampler.has_tail else size
        if min(self.global_batch, rest) < size:
            raise InputError(
                f"train_sampling_strategy is 'batch_rebalance', which gives each of the {size} ranks a"
                f" sample of every batch, and one has {min(self.global_batch, rest)} (global_batch is"
                f" {self.global_batch}, of {len(sampler.lengths)} samples): give another global_batch,"
                " dataloader_drop_last=True, or another strategy."
            )
        return sampler

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        if is_training and not isinstance(kwargs.get("dataset"), IterableDataset):
            kwargs["batch_size"] = self.global_batch
        elif is_training and self.global_batch % self.args.world_size:
            raise InputError(
                f"global_batch is {self.global_batch}, and an IterableDataset gives each of the"
                f" {self.args.world_size} ranks as many samples: give a multiple of that."
            )
        loader: Any = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        if not is_training:
            return loader
        loader.device = None  # Step moves one micro-batch at a time
        inner = loader.base_dataloader  # which calls the collator
        if not self._is_cut_by_user:
            inner.collate_fn = CollateRows(inner.collate_fn)
        shard = loader.batch_sampler
        if isinstance(shard, BatchSamplerShard) and type(shard.batch_sampler) is BatchSampler:
            rank, size = shard.process_index, shard.num_processes
            shard.batch_sampler = Shares(shard.batch_sampler, rank, size)
            shard.num_processes, shard.process_index, shard.batch_size = 1, 0, None
            name = getattr(self.model, "main_input_name", "input_ids")
            nothing = {name: torch.empty(0, 0, dtype=torch.long)}
            inner.collate_fn = CollateOrNone(inner.collate_fn, nothing)
        return loader

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            if self._step is not None:
                self._step.close()
                self._step = None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        optimizer: Any = self.optimizer
        optimizer.train()
        step = self._step = self._step or self._make_step(model, optimizer.optimizer)
        batch = dict(inputs)
        self._cut.expect(batch)
        # compute_loss is for this rank alone: Step sums over the ranks.
        accelerator: Any = self.accelerator
        accelerator.gather_for_metrics = lambda values, *_, **__: values
        try:
            with self._without_scaling():
                self._outcome = step(batch if self._count(batch) else None)
        finally:
            del accelerator.gather_for_metrics
        return torch.tensor(self._outcome.loss, device=self.args.device)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_scaling():  # else means are multiplied by the number of ranks
            return super().prediction_step(*args, **kwargs)

    @contextmanager
    def _without_scaling(self) -> Iterator[None]:
        """Context manager in which items are counted, and losses are means, on this rank alone."""
        args = self.args
        scales, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            yield
        finally:
            args.average_tokens_across_devices = scales

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any = None
    ) -> tuple[list[Any], None]:
        """Returns batches without their number of items, which is counted in each micro-batch."""
        return list(islice(epoch_iterator, num_batches)), None

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        assert self._outcome is not None
        return self._outcome.grad_norm

    # -------------------------------------------------------------------------- called by Step

    def _make_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        args = self.args
        precision = args.mixed_precision
        return Step(
            model,
            optimizer,
            presented_as(self.compute_loss_func or type(self).compute_loss, self._loss, _REMEDY),
            precision=("tf32" if args.tf32 else "fp32") if precision == "no" else precision,
            clip_norm=args.max_grad_norm or None,
            compile=bool(args.torch_compile),
            keep_grad=True,  # callbacks may read it
            count_samples=self._count,
            slice_batch=self._slice,
            **self._options,
        )

    def _loss(self, model: nn.Module, inputs: dict[str, Any]) -> Loss:
        """Returns the `Trainer`'s loss of one micro-batch, as a sum over its items."""
        items = torch.as_tensor(self.count_items(inputs))
        mean: Any = self.compute_loss(model, dict(inputs), num_items_in_batch=items.clamp(min=1))
        mean = mean.where(items.to(mean.device) > 0, 0.0)  # a mean over no items may be NaN
        return Loss(mean * items, items)


def _check_called(kind: type) -> None:
    """Raises `InputError` if a base of `kind` behind `AnyBatch` overrides a method of the `Trainer`
    that `AnyBatch` does not call."""
    for base in kind.__mro__[kind.__mro__.index(AnyBatch) + 1 :]:
        home = base.__module__.partition(".")[0]
        if home == "transformers":
            return
        # The steps of TRL's trainers measure time, and offload what the plan has room for.
        for name in ("_prepare_inputs", *(("training_step",) if home != "trl" else ())):
            if name in vars(base):
                raise InputError(
                    f"{base.__name__} overrides {name}, which is not called, since AnyBatch cuts each"
                    " batch and runs its passes: put what it does into compute_loss or the data"
                    " collator. Trainers that generate their samples (GRPO, RLOO) cannot be used."
                )


class _Updated(AcceleratedOptimizer):
    """The optimizer that the `Trainer` steps; `Step` has already made the update by then."""

    @classmethod
    def of(cls, optimizer: Any) -> _Updated:
        return optimizer if isinstance(optimizer, cls) else cls(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Does nothing."""
