"""Lightning strategy for a global batch of any size, for modules with automatic optimization.

    trainer = L.Trainer(strategy=AnyBatch(global_batch=512, memory="22GiB"), devices=2)
    trainer.fit(module, loader)

The loader yields one batch per optimizer step, this rank's share of the global batch. A `Step` calls
`training_step` for each micro-batch of it. `on_after_backward`, `on_before_optimizer_step` and
`configure_gradient_clipping` are called right before the update, with the gradient of the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from anybatch.compute.ghost_norm import batch_norms
from anybatch.data import batch_size
from anybatch.errors import InputError
from anybatch.events import Sink
from anybatch.integrations.batches import CollateOrNone, PaddingCut, Shares, presented_as
from anybatch.step import Step
from anybatch.task import Loss
from anybatch.units import check_count

_LIGHTNING: Any = import_module("lightning.pytorch")
_CALLBACKS: Any = import_module("lightning.pytorch.callbacks")
ClosureResult: Any = import_module("lightning.pytorch.loops.optimization.automatic").ClosureResult
is_overridden: Any = import_module("lightning.pytorch.utilities.model_helpers").is_overridden

if TYPE_CHECKING:  # checks run without Lightning

    class DDPStrategy:
        """Placeholder for Lightning's `DDPStrategy`."""

        _ddp_kwargs: Any
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
_LOG_OPTIONS = [*inspect.signature(_LIGHTNING.LightningModule.log).parameters][3:]
"""Names of the arguments of `self.log` after name and value."""

_EXTREMES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("max", torch.max), torch.maximum),
    **dict.fromkeys(("min", torch.min), torch.minimum),
}
_OF_HOOKS = {
    *("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"),
}
"""Options of `DDPStrategy` that are, like those of `DistributedDataParallel`, about its reduction of
gradients."""
_SUMS = "sum", torch.sum
_NOT_LEFT = (
    "the strategy AnyBatch makes each update by itself, of the whole global batch, which the trainer,"
    " the module or a callback does not leave to it: {}."
)


class AnyBatch(DDPStrategy):
    """Strategy for any number of ranks, each with the whole model, like `DDPStrategy`.

    The `batch_size` of a training `DataLoader` is replaced by this rank's share of the global batch.
    The last batch of an epoch contains the remaining samples. Loaders of an `IterableDataset` or with a
    custom batch sampler have to yield the batches of this rank, which are not changed.

    Values that `training_step` logs with `self.log` are logged once per step, as means over all items
    of the global batch, or reduced by `reduce_fx` if that is "sum", "max" or "min". The value per step
    of a torchmetrics metric is that of the last micro-batch; that per epoch is over all samples.

    Args:
        global_batch: samples per optimizer step, over all ranks.
        memory: budget per rank, see `Step`; None: plan for the free memory.
        count_items: maps a batch to the number of items that its loss is a mean over; None: the number
            of samples.
        micro_batch, sinks: see `Step`.
        options: options of `DDPStrategy`, except those of its reduction of gradients.

    Raises `InputError` for these, and in `fit` if the trainer or a callback accumulates gradients, if
    the precision is that of transformer-engine, or if the module optimizes manually, overrides
    `backward`, or runs the closure of a step without the update.
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
        if ignored := sorted({*options} & _OF_HOOKS | {*self._ddp_kwargs}):
            raise InputError(_NOT_LEFT.format(f"leave out {', '.join(ignored)}"))
        check_count(global_batch, "global_batch")
        self.global_batch = global_batch
        self._options: Any = {"memory": memory, "micro_batch": micro_batch, "sinks": sinks}
        self._count_items = count_items or batch_size
        self._step: Step | None = None
        self._cut = PaddingCut()
        self._logged: dict[str, Any] = {}
        self._log_options: dict[str, dict[str, Any]] = {}
        self._beside: dict[str, Any] = {}
        self._gradients: list[Tensor | None] = []
        self._is_update_due = False

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

        def has(kind: type) -> bool:
            return any(isinstance(callback, kind) for callback in trainer.callbacks)

        for said, remedy in (
            (trainer.accumulate_grad_batches != 1, "leave accumulate_grad_batches out"),
            (not module.automatic_optimization, "call anybatch.Step in training_step instead"),
            (is_overridden("backward", module), "leave out backward of the module"),
            (
                self.precision_plugin.precision.startswith("transformer-engine"),
                "take precision='bf16-mixed', since transformer-engine computes its passes by itself",
            ),
            (
                has(_CALLBACKS.GradientAccumulationScheduler),
                "leave GradientAccumulationScheduler out",
            ),
            (
                has(_CALLBACKS.StochasticWeightAveraging) and any(batch_norms(module)),
                "use EMAWeightAveraging: StochasticWeightAveraging passes once more, for BatchNorm",
            ),
        ):
            if said:
                raise InputError(_NOT_LEFT.format(remedy))

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        is_plain = type(getattr(loader, "batch_sampler", None)) is BatchSampler
        if not self._trains or not is_plain or isinstance(loader.dataset, IterableDataset):
            return loader
        if getattr(loader.sampler, "num_replicas", 1) > 1:
            raise InputError(
                f"the training loader has a {type(loader.sampler).__name__}, which leaves this rank"
                " samples for batches of its own, and the strategy AnyBatch divides each global batch:"
                " leave the sampler out, or give a batch_sampler that yields the batches of this rank."
            )
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
        if not self._is_update_due:
            raise InputError(
                _NOT_LEFT.format(
                    "the closure of this step is run without optimizer.step(closure=closure), because"
                    " the module overrides optimizer_step, or a callback accumulates gradients"
                )
            )
        step = self._step = self._step or self._make_step()
        self._place = args
        self._cut.expect(batch)
        self._logged.clear()
        outcome = step(None if isinstance(batch, tuple) and not batch else batch)
        self._gradients = [p.grad for p in self.lightning_module.parameters()]
        # In the same order on all ranks, also on one that has no samples in this step.
        for name in {**outcome.metrics, **self._logged}:
            options = {
                **self._log_options.get(name, {}),
                "batch_size": max(1, round(outcome.weight)),
            }
            value = outcome.metrics.get(name)
            if value is None:
                value = self._logged[name]
            else:
                options["sync_dist"] = self.world_size > 1
                if options.get("reduce_fx") in _SUMS:  # the ranks are added up
                    value *= outcome.weight / self.world_size
            self.lightning_module.log(name, value, **options)
        loss = torch.tensor(outcome.loss, device=self.root_device)
        return {**self._beside, "loss": loss}

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Lightning has set them to None in the meantime.
        for parameter, gradient in zip(module.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []
        return closure_loss.detach()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        self._is_update_due = True
        try:
            return closure()
        finally:
            self._is_update_due = False

    def teardown(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None
            self._hook.remove()
        super().teardown()

    # -------------------------------------------------------------------------- called by Step

    @property
    def _trains(self) -> bool:
        module = self.lightning_module
        return module is not None and bool(module.trainer.training)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Calls the hooks that read or change the gradient, and clips it."""
        module = self.lightning_module
        self.precision_plugin.post_backward(torch.zeros(()), module)
        self.precision_plugin._after_closure(module, optimizer)

    def _make_step(self) -> Step:
        step = Step(
            self.lightning_module,
            self.optimizers[0],
            presented_as(type(self.lightning_module).training_step, self._loss, _REMEDY),
            precision=_PRECISIONS.get(self.precision_plugin.precision, "fp32"),
            keep_grad=True,  # hooks may read it
            count_samples=self._cut.count,
            slice_batch=self._cut,
            **self._options,
        )
        self._hook = self.optimizers[0].register_step_pre_hook(self._before_update)
        return step

    def _loss(self, module: nn.Module, batch: Any) -> Loss:
        """Returns the module's loss of one micro-batch, as a sum over its items, with the logged
        metrics."""
        items, metrics = self._count_items(batch), {}

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_OPTIONS, args, strict=False))
            fx, before = options.get("reduce_fx"), self._logged.get(name)
            self._log_options[name] = options
            if isinstance(value, Tensor | Number):
                value = torch.as_tensor(value).detach()
                if fx in _EXTREMES:
                    value = value if before is None else _EXTREMES[fx](before, value)
                else:
                    metrics[name] = (value if fx in _SUMS else value * items, items)
            self._logged[name] = value

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
