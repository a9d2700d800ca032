"""Lightning strategy for a global batch of any size, for modules with automatic optimization.

    trainer = L.Trainer(strategy=AnyBatch(global_batch=512, memory="22GiB"), devices=2)
    trainer.fit(module, loader)

The loader yields one batch per optimizer step, this rank's share of the global batch. A `Step` calls
`training_step` for each micro-batch of it. When `on_after_backward` and later hooks are called,
gradients are those of the whole batch, clipped once, and the update has already been made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from anybatch.data import batch_size
from anybatch.errors import InputError
from anybatch.events import Sink
from anybatch.integrations.batches import CollateOrNone, PaddingCut, Shares, presented_as
from anybatch.step import Step
from anybatch.task import Loss
from anybatch.units import check_count

ClosureResult: Any = import_module("lightning.pytorch.loops.optimization.automatic").ClosureResult

if TYPE_CHECKING:  # checks run without Lightning

    class DDPStrategy:
        """Placeholder for Lightning's `DDPStrategy`."""

        distributed_sampler_kwargs: Any
        setup: Any
        process_dataloader: Any
        teardown: Any

        def __init__(self, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    from lightning.pytorch.strategies import DDPStrategy

_REMEDY = " In Lightning, count_items says what the loss is a mean over."
_PRECISIONS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}


class AnyBatch(DDPStrategy):
    """Strategy for any number of ranks, each with the whole model, like `DDPStrategy`.

    The `batch_size` of a training `DataLoader` is replaced by this rank's share of the global batch.
    The last batch of an epoch contains the remaining samples. Loaders of an `IterableDataset` or with a
    custom batch sampler have to yield the batches of this rank, which are not changed.

    Values that `training_step` logs with `self.log` are logged once per step, as means over all ranks.

    Args:
        global_batch: samples per optimizer step, over all ranks.
        memory: budget per rank, see `Step`; None: plan for the free memory.
        count_items: maps a batch to the number of items that its loss is a mean over; None: the number
            of samples.
        micro_batch, sinks: see `Step`.
        options: options of `DDPStrategy`.

    Raises `InputError` in `fit` if the trainer accumulates gradients or clips by value, or if the
    module optimizes manually.
    """

    strategy_name = "anybatch"

    def __init__(
        self,
        global_batch: int,
        memory: str | int | None = None,
        *,
        count_items: Callable[[Any], Tensor | float] | None = None,
        micro_batch: int | None = None,
        sinks: Sequence[Sink] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_count(global_batch, "global_batch")
        self.global_batch = global_batch
        self._options: Any = {"memory": memory, "micro_batch": micro_batch, "sinks": sinks}
        self._count_items = count_items or batch_size
        self._step: Step | None = None
        self._cut = PaddingCut()
        self._logged: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._beside: dict[str, Any] = {}
        self._gradients: list[Tensor | None] = []

    # --------------------------------------------------------------------- called by Lightning

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        whole = {"num_replicas": 1, "rank": 0}  # Shares divides each batch
        return whole if self._trains else super().distributed_sampler_kwargs

    def configure_ddp(self) -> None:
        """Does not wrap the model: Step exchanges the gradients."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not self._trains:
            return
        module = self.lightning_module
        for said, remedy in (
            (trainer.accumulate_grad_batches != 1, "leave accumulate_grad_batches out"),
            (trainer.gradient_clip_algorithm == "value", "clip by norm"),
            (not module.automatic_optimization, "call anybatch.Step in training_step instead"),
        ):
            if said:
                raise InputError(
                    "the strategy AnyBatch makes each update by itself, of the whole global batch,"
                    f" which the trainer or the module does not leave to it: {remedy}."
                )

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        if not self._trains or type(getattr(loader, "batch_sampler", None)) is not BatchSampler:
            return loader
        whole = BatchSampler(loader.sampler, self.global_batch, loader.drop_last)
        return DataLoader(
            loader.dataset,
            batch_sampler=Shares(whole, self.global_rank, self.world_size),
            num_workers=loader.num_workers,
            collate_fn=CollateOrNone(loader.collate_fn, ()),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def training_step(self, batch: Any, *args: Any) -> dict[str, Any]:
        step = self._step = self._step or self._make_step()
        self._place = args
        self._cut.expect(batch)
        self._logged.clear()
        outcome = step(None if isinstance(batch, tuple) and not batch else batch)
        self._gradients = [p.grad for p in self.lightning_module.parameters()]
        for name, (value, options) in self._logged.items():
            size = max(1, round(outcome.weight))
            options = {"batch_size": size, "sync_dist": self.world_size > 1, **options}
            self.lightning_module.log(name, outcome.metrics.get(name, value), **options)
        loss = torch.tensor(outcome.loss, device=self.root_device)
        return {**self._beside, "loss": loss}

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Lightning has set them to None in the meantime.
        for parameter, gradient in zip(module.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        module = model or self.lightning_module
        return self.precision_plugin._wrap_closure(module, optimizer, closure)

    def teardown(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None
        super().teardown()

    # -------------------------------------------------------------------------- called by Step

    @property
    def _trains(self) -> bool:
        module = self.lightning_module
        return module is not None and bool(module.trainer.training)

    def _make_step(self) -> Step:
        return Step(
            self.lightning_module,
            self.optimizers[0],
            presented_as(type(self.lightning_module).training_step, self._loss, _REMEDY),
            precision=_PRECISIONS.get(self.precision_plugin.precision, "fp32"),
            clip_norm=self.lightning_module.trainer.gradient_clip_val or None,
            keep_grad=True,  # hooks may read it
            count_samples=batch_size,
            slice_batch=self._cut,
            **self._options,
        )

    def _loss(self, module: nn.Module, batch: Any) -> Loss:
        """Returns the module's loss of one micro-batch, as a sum over its items, with the logged
        metrics."""
        items, metrics = self._count_items(batch), {}

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            self._logged[name] = value, options
            if isinstance(value, Tensor | float | int):
                metrics[name] = (torch.as_tensor(value).detach() * items, items)

        own: Any = module
        own.log = log
        try:
            output = own.training_step(batch, *self._place)
        finally:
            del own.log
        result = ClosureResult.from_training_step_output(output)
        if result.closure_loss is None:
            raise InputError(
                "training_step returned None, but every rank takes part in every step: return a loss."
            )
        self._beside = result.extra
        return Loss(result.closure_loss * items, items, metrics)
