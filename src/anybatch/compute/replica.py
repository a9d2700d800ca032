"""Replica: one model and its optimizer on one device, under one choice of a plan.

The arithmetic of a step, without its transaction: the engine runs it on real tensors, the estimate on
fake ones, so what is predicted is what is run.

    accumulate(batch)  once per micro-batch: forward, loss, backward; gradients are sums
    finish(weight)     gradients become the mean over the global batch; unscaled, clipped
    apply()            the update

Gradients live where autograd puts them: the first micro-batch's are kept, not copied, and a parameter
that no micro-batch used has none, so that the optimizer passes it over as in a plain loop. After
`flatten` they live in buckets, for several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from anybatch.compute import chunked_loss, kernel_choices, recompute
from anybatch.compute.buckets import Buckets, check_dense, norm_of
from anybatch.compute.embedding_ids import naming_ids
from anybatch.compute.ghost_norm import GhostBatches, batch_norms
from anybatch.compute.joint import Ask, Comparison, Joint, naming_divided
from anybatch.compute.loss import (
    leaving_gradients_alone,
    naming_lost_graphs,
    read_loss,
    widened,
)
from anybatch.compute.loss_check import check_adds_up, comparable, rounding
from anybatch.compute.loss_reduction_check import (
    CountedMeans,
    warn_of,
    warn_of_hooks,
    warn_of_no_proportion,
    warn_of_reduction,
)
from anybatch.compute.low_bit_optimizers import check_whole, rehearse
from anybatch.compute.modes import with_modes
from anybatch.compute.optimizer_update import Updater
from anybatch.compute.outside_gradients import OutsideGradients
from anybatch.compute.parameter_writes import ParameterWrites
from anybatch.compute.precision import Numerics
from anybatch.compute.synchronised_norm import Exchange
from anybatch.data.batch_copies import copied
from anybatch.data.microbatch import map_leaves, samples_left
from anybatch.plans import Choice, KernelChoices
from anybatch.side_effects import code_of, untouched
from anybatch.task import JointLoss, Loss, LossFunction, parameters_in

_FEW = 4
"""Samples by which it is seen whether the gradient is proportional to the loss."""

_LARGER, _PROPORTIONAL = 2.0**10, 1e-4
"""A factor that changes no digit of what is multiplied by it, and what is equal: relative."""


class Replica:
    """See the module. `close` leaves model and process as they were found, but for the training.

    `host` is where what is kept in host memory goes; in a trace another device stands for it.

    Attributes:
        model: the user's module, with its own names and parameters.
        loss_as_given: the user's loss.
        optimizer: the user's optimizer.
        updater: runs its step.
        parameter_writes: frozen parameters that forward writes to.
        loss_scale: the factor of fp16 loss scaling, or None where there is none.
        phase: what is being done, for the report of a failure.
        keeps_gradients: those of an update are there until the next step begins.
    """

    keeps_gradients: bool = False

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[], Optimizer],
        loss: LossFunction,
        choice: Choice,
        device: torch.device,
        global_batch: int,
        loss_scaling: bool = True,
        kernels: KernelChoices | None = None,
        host: torch.device | None = None,
    ) -> None:
        self.model: nn.Module = model
        self.phase: str = "setup"
        self._is_mean = False  # the gradient is that of the mean already
        self._joint = Joint(loss) if isinstance(loss, JointLoss) else None
        self._loss: LossFunction = self._joint or loss
        self.loss_as_given: LossFunction = loss
        self._is_loss_known = self.is_joint  # whether what it returns was looked at
        self._is_told = self.is_joint  # that it does not add up, or need not
        self._means = CountedMeans()
        self._derives = False  # whether the loss needs gradients in evaluation
        self.parameter_writes: ParameterWrites = ParameterWrites(model)
        self._device = device
        self._host = host or torch.device("cpu")
        # Before there are any of anybatch's own.
        self.gradients_are_hooked: bool = warn_of_hooks(model, loss)
        with ExitStack() as undo:  # what was put on the model comes off if the rest fails
            self._numerics = Numerics(model, choice.precision, device, global_batch, loss_scaling)
            undo.callback(self._numerics.undo)
            scaler = self._numerics.scaler
            self.loss_scale: float | None = None if scaler is None else scaler.get_scale()
            self._ghosts = GhostBatches(model)
            undo.callback(self._ghosts.undo)
            undo.callback(_without_cache(model))
            self._kernels = kernels or KernelChoices()
            undo.callback(kernel_choices.install(model, self._kernels))
            self._install(choice)
            undo.callback(lambda: self._uninstall())
            self.optimizer: Optimizer = make_optimizer()
            if any(isinstance(param, DTensor) for param in model.parameters()):
                check_whole(self.optimizer)
            self._numerics.adopt(self.optimizer)
            self.switch_optimizer(training=True)
            self.updater: Updater = Updater(self.optimizer)
            undo.callback(self.updater.close)
            self.updater.take(choice.update, choice.optimizer_states)
            self._undo = undo.pop_all()
        self.parameters: list[nn.Parameter] = list(parameters_in(self.optimizer.param_groups))
        self._frozen = [param for param in self.parameters if not param.requires_grad]
        self._buckets: Buckets | None = None
        # A parameter that is trainable but in no group gathers a gradient too, which must not pile up.
        self._with_gradient = list(
            dict.fromkeys([*self.parameters, *(p for p in model.parameters() if p.requires_grad)])
        )
        self._loss = leaving_gradients_alone(self._loss, self._with_gradient)
        self._outside_gradients: OutsideGradients | None = None

    @property
    def is_joint(self) -> bool:
        """Whether the loss compares all samples of the global batch, see `joint`."""
        return self._joint is not None

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is trained and what forward keeps, by the model's own names, in full precision: the
        float32 masters where there are any. The tensors themselves."""
        masters = {param: master for master, param in self._numerics.leaves().items()}
        found: dict[str, Tensor] = {
            name: masters.get(param, param) for name, param in self.model.named_parameters()
        }
        return found | dict(self.model.named_buffers())

    def take_edits(self) -> None:
        """Between two steps: train on from the weights as the model has them, whoever wrote them."""
        self._numerics.take_edits()

    def filled(self) -> None:
        """`weights` were written to from outside: the model computes with them from now on."""
        self._numerics.publish()

    def switch_optimizer(self, training: bool) -> None:
        """Between two steps: bring the optimizer, where it has modes (schedule-free ones), and with it
        the weights, into training or evaluation mode."""
        parts = with_modes(self.optimizer)
        for part in parts:
            part.train() if training else part.eval()
        if parts:
            self._numerics.publish()

    @contextmanager
    def to_be_evaluated(self) -> Iterator[None]:
        """Between two steps: the weights are those of the optimizer's evaluation mode."""
        self.switch_optimizer(training=False)
        try:
            yield
        finally:
            self.switch_optimizer(training=True)

    @property
    def is_outdated(self) -> bool:
        """Whether the optimizer has other parameters by now than those whose gradients are added up and
        divided here: some came or went, or are no longer frozen and have no place in a bucket, or no
        master."""
        now = list(parameters_in(self.optimizer.param_groups))
        if list(map(id, now)) != list(map(id, self.parameters)):
            return True
        is_prepared = self._buckets is not None or self._numerics.is_halved
        return is_prepared and any(param.requires_grad for param in self._frozen)

    def scaler_state(self) -> dict[str, float]:
        """Of fp16 loss scaling; empty where there is none."""
        return self._numerics.scaler.state_dict() if self._numerics.scaler else {}

    def load_scaler_state(self, state: Mapping[str, float]) -> None:
        """Go on with the loss scale that `scaler_state` told. Empty: with that of a beginning."""
        if self._numerics.scaler is not None and state:
            self._numerics.scaler.load_state_dict(dict(state))
            self.loss_scale = self._numerics.scaler.get_scale()

    def flatten(self) -> Buckets:
        """Keep the gradients in buckets from now on, and return these.

        Raises `InputError` if a module makes sparse gradients.
        """
        check_dense(self.model)
        trained = [param for param in self.parameters if param.requires_grad]
        self._buckets = Buckets(trained, self._numerics.leaves())
        self._undo.callback(self._buckets.close)
        return self._buckets

    def guard_outside_gradients(self) -> None:
        """From now on what the loss uses beside the model and the optimizer has the gradients that a
        plain loop would leave. For steps that are committed or dropped."""
        # What a divided model computes with is made anew for each pass, and has no gradient to keep.
        if not any(isinstance(param, DTensor) for param in self.model.parameters()):
            self._outside_gradients = OutsideGradients(self._with_gradient)

    def synchronise(self, exchange: Exchange) -> None:
        """Normalise over ghost batches that are divided over ranks, which meet in `exchange`."""
        self._ghosts.exchange = exchange

    def loss_untouched(self) -> AbstractContextManager[None]:
        """Around passes that do not count: what the loss, the model's code and hooks keep is then as
        before them. Parameters, buffers and gradients are for the caller to put back."""
        model = self.model
        own = (*model.modules(), *model.parameters(), *model.buffers(), *self.parameters)
        return untouched(self.loss_as_given, *code_of(model), aside=True, but=own)

    @property
    def kernels(self) -> KernelChoices:
        """Which kernels compute the model now."""
        return self._kernels

    def switch(self, choice: Choice, kernels: KernelChoices | None = None) -> None:
        """Recompute what `choice` does from now on, take the loss in chunks where it does, and compile
        blocks or not, as `kernels` say; of both everything else stays as it was. None: kernels stay as
        they are."""
        changes = {} if kernels is None else {"compile": kernels.compile}
        wanted = self._kernels.model_copy(update=changes)
        if (choice.recompute, choice.chunked_head, wanted) != self._installed:
            self._uninstall()
            self._kernels = wanted
            self._install(choice)

    def expect(self, global_batch: int) -> None:
        """Between two steps: they are of so many samples from now on, about. What is computed stays the
        same, but for what the range of a half-precision format would cut off."""
        self._numerics.expect(global_batch)

    def _install(self, choice: Choice) -> None:
        """Recompute by `choice`, around blocks that are compiled where the plan says so, and leave out
        the logits of a head whose loss is to be taken in chunks."""
        self._recompute, self._chunked = choice.recompute, None
        self._installed = choice.recompute, choice.chunked_head, self._kernels
        with ExitStack() as undo:
            if choice.chunked_head:
                self._chunked, put_back = chunked_loss.install(self.model, choice.chunked_head)
                undo.callback(put_back)
            if self._kernels.compile:
                undo.callback(kernel_choices.compile_blocks(self.model, choice.recompute))
            undo.callback(recompute.install(self.model, choice.recompute))
            self._uninstall = undo.pop_all().close

    @torch.no_grad()
    def encode(self, batch: Any, num_samples: int, ghosts: Sequence[int] = ()) -> Any:
        """What a joint loss sees of one micro-batch. The arguments are those of `accumulate`.

        Raises `LossError` and `DataError`, as `accumulate` does.
        """
        assert self._joint is not None
        self.phase = "encoding"
        with naming_ids(self.model), self._ghosts.cut(ghosts), self._numerics.region():
            return self._joint.encode(self.model, batch, num_samples)

    def compare(self, encoded: Any, num_samples: int) -> Comparison:
        """A joint loss over all samples, which are `encoded`. Raises `LossError`."""
        assert self._joint is not None
        self.phase = "comparison"
        with naming_lost_graphs(), naming_divided(), self._numerics.region():
            return self._joint.compare(
                self.model, encoded, num_samples, self._with_gradient, self._gradient_scale
            )

    @torch.no_grad()
    def compare_held_out(self, encoded: Any, num_samples: int) -> Loss:
        """A joint loss over so many held-out samples. The model is in evaluation mode already. Raises
        `LossError`."""
        assert self._joint is not None
        self.phase = "evaluation"
        with self._numerics.region():
            return self._joint.evaluate(self.model, encoded, num_samples)

    def _scaled(self, factor: Tensor) -> Tensor:
        """`factor`, times the loss scale where there is one."""
        scaler = self._numerics.scaler
        return factor if scaler is None else scaler.scale(factor)

    def _gradient_scale(self, like: Tensor) -> Tensor:
        """What gradients of sums of losses are multiplied by; backward begins with it."""
        return self._scaled(torch.full_like(like, self._numerics.gradient_factor))

    def accumulate(
        self,
        batch: Any,
        num_samples: int,
        ghosts: Sequence[int] = (),
        ask: Ask | None = None,
        whole: bool = False,
    ) -> Loss:
        """Add the gradient of one micro-batch to the sums, and return its loss, detached.

        Args:
            batch: as `collate` made it, on the device; None for a pass that others make alone.
            num_samples: samples in it; 0: compute with it, and add nothing.
            ghosts: samples per ghost batch, in order.
            ask: of a joint loss, tells from the encodings of the batch what is its share. None: the
                batch is all there is.
            whole: the micro-batch is all of the step: then backward begins with the mean, so that the
                gradient has the bits of a plain loop.

        Raises:
            LossError: if the loss function returned something that is not a loss, or whose graph is
                gone already.
            DataError: if an embedding has no row for an id (on the CPU, where that is seen).
        """
        if batch is None:  # only other ranks have samples in this pass
            with self._ghosts.cut(()):
                return Loss(torch.zeros(()), 0)
        self.phase = "forward"
        # What is recomputed in backward has to find the head as forward found it.
        with (
            naming_lost_graphs(),
            recompute.naming_blocks(),
            self._ghosts.cut(ghosts),
            chunked_loss.active(self._chunked),
            nullcontext() if self._joint is None else self._joint.asking(ask, num_samples),
        ):
            with (
                naming_ids(self.model),
                self._numerics.region(),
                recompute.keeping(self._recompute, self.model, self._host),
                self._watched_writes(),
            ):
                returned = self._loss(self.model, batch)
                if not self._is_loss_known and num_samples > 1:
                    self._is_loss_known = True
                    self._is_told |= warn_of_reduction(self.loss_as_given, returned, num_samples)
                loss = read_loss(returned, partial(samples_left, batch, num_samples))
                is_real = not self.is_joint and detect_fake_mode() is None
                if num_samples and is_real and isinstance(returned, Tensor) and loss.weight:
                    self._means.note(returned, float(loss.weight))
                mean = returned if whole and isinstance(returned, Tensor) else None
                del returned  # or backward would hold what the loss has beside its sum
            self.phase = "backward"
            self._is_mean = whole and self._numerics.scaler is None
            if not self._is_mean:
                total = widened(loss.sum)
                seed = self._gradient_scale(total)
            else:
                total = widened(loss.sum if mean is None else mean)
                seed = (
                    torch.ones_like(total)
                    if mean is not None
                    else torch.ones_like(total) / loss.weight
                )
            del mean
            if self._outside_gradients is not None:
                self._outside_gradients.note(total)
            # A pass that is only run because other ranks run one adds nothing.
            total.backward(seed if num_samples else torch.zeros_like(seed))
        outputs = None if loss.outputs is None else map_leaves(loss.outputs, _detached)
        return Loss(loss.sum.detach(), loss.weight, loss.metrics, outputs)

    def _watched_writes(self) -> AbstractContextManager[None]:
        compiled = self._kernels.compile or kernel_choices.is_compiled(self.model)
        return nullcontext() if compiled else self.parameter_writes.watched()

    def region(self) -> AbstractContextManager[Any]:
        """Where forward passes run, in the precision of the plan."""
        return self._numerics.region()

    @torch.no_grad()
    def evaluate(self, loss: LossFunction, batch: Any, num_samples: int) -> Loss:
        """The loss of one batch without gradient, unless it is made of a gradient itself (forces that
        are derived from an energy). The model is in evaluation mode already."""
        self.phase = "evaluation"
        with (
            naming_ids(self.model),
            self._numerics.region(),
            chunked_loss.active(self._chunked),
        ):
            try:
                with torch.set_grad_enabled(self._derives):
                    returned = loss(self.model, batch)
            except RuntimeError as error:
                if self._derives or "does not require grad" not in str(error):
                    raise
                self._derives = True
                with torch.enable_grad():
                    returned = loss(self.model, batch)
            left = partial(samples_left, batch, num_samples)
            found = read_loss(returned, left, training=False)
        return replace(found, sum=found.sum.detach())

    def check_loss(
        self, take: Callable[[int, int], Any], num_samples: int, cut: int, fits: int
    ) -> bool:
        """Check that the loss is additive over samples; see `check_adds_up`. Returns whether the check
        was possible, or is not needed: joint losses need not be additive, and anybatch's own are. The
        caller restores buffers and random generators. With gradients no more than `fits` samples pass
        at once (of a loss that is not additive, two).

        Warns, or raises `LossError`, as `check_adds_up` does.
        """
        own = self.loss_as_given
        ours = (getattr(own, "__module__", None) or "").startswith("anybatch.")
        compiled = self._kernels.compile or kernel_choices.is_compiled(self.model)
        # Each new shape would be compiled.
        if self._joint is not None or ours or compiled:
            return True
        plain = False

        def noting(model: nn.Module, piece: Any) -> Any:
            nonlocal plain
            returned = own(model, piece)
            plain = isinstance(returned, Tensor)
            return returned

        norms = batch_norms(self.model).values()

        def evaluate(piece: Any, size: int) -> tuple[Loss, bool]:
            found = self.evaluate(noting, copied(piece), size)
            if any(norm.training for norm in norms):
                raise RuntimeError("the loss function has put BatchNorm into training mode")
            return found, plain

        def explained() -> bool:
            size = min(num_samples, max(2, fits))
            piece = take(0, size)
            with torch.enable_grad(), self._numerics.region(), chunked_loss.active(self._chunked):
                return warn_of_reduction(own, own(self.model, copied(piece)), size)

        with self._numerics.region():
            close = rounding(self.model, self._device)
        writes = self._watched_writes()
        with self.loss_untouched(), comparable(self.model) as are_comparable, writes:
            if not are_comparable:
                return True
            told = check_adds_up(own, evaluate, explained, take, num_samples, cut, close)
            self._is_loss_known |= bool(told)
            self._is_told |= bool(told)
            if told is False:
                self._check_proportional(partial(take, 0, min(num_samples, fits, _FEW)))
            return told is not None

    def _check_proportional(self, take: Callable[[], Any]) -> None:
        """Warn if a larger loss of a few samples has not a gradient that is larger in proportion."""
        if self._numerics.scaler is not None or (dist.is_available() and dist.is_initialized()):
            return  # float16 has no range for it; an autograd function may meet other ranks
        params = [param for param in self.model.parameters() if param.requires_grad]
        if any(param._backward_hooks for param in params):
            return  # which is said by itself
        with suppress(Exception), torch.enable_grad():  # the step itself meets what is wrong
            few = take()
            found: list[Tensor] = []
            totals: list[Tensor] = []
            for factor in (1.0, _LARGER):
                with self._numerics.region(), chunked_loss.active(self._chunked):
                    total = read_loss(self.loss_as_given(self.model, copied(few)), lambda: 1).sum
                seed = torch.full_like(total, factor)
                gradients = torch.autograd.grad(total, params, seed, allow_unused=True)
                totals.append(total.detach())
                prints = [_fingerprint(one) for one in gradients if one is not None]
                found.append(torch.tensor(prints, dtype=torch.float64) / factor)
            if not torch.isclose(*totals, rtol=_PROPORTIONAL):
                return  # the model keeps something between passes (a power iteration)
            norms = found[0][:, :1]
            rounding = _PROPORTIONAL * norms + _PROPORTIONAL**1.5 * norms.max()
            if ((found[1] - found[0]).abs() > rounding).any():
                warn_of_no_proportion(self.loss_as_given, total)

    def gradient_is_finite(self, loss: LossFunction, batch: Any) -> bool:
        """Whether that of one batch by itself is. The model is in evaluation mode already; the sums of
        gradients are not touched, nor does any rank hear of it."""
        self.phase = "evaluation"
        parameters = [param for param in self.model.parameters() if param.requires_grad]
        region = self._numerics.region()
        with torch.enable_grad(), region, chunked_loss.active(self._chunked):
            total = read_loss(loss(self.model, batch), lambda: 1).sum
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        values = [g.coalesce()._values() if g.is_sparse else g for g in found if g is not None]
        return all(bool(value.isfinite().all()) for value in values)

    def sum_norm(self) -> Tensor | None:
        """2-norm of the sums of gradients so far, of this rank alone, as they would be without any
        scale (scalar tensor on the device); None: there are none. Changes nothing, and waits for the
        device only where gradients are sparse."""
        own = self._buckets.own_norms if self._buckets is not None else []
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return None
        norm = norm_of(own or _values(gradients), wide=True)
        return norm / self._gradient_scale(norm)

    def finish(self, total_weight: float, clip_norm: float | None) -> Tensor:
        """Turn summed gradients into those of the mean over the global batch, in place.

        Returns their 2-norm before clipping (scalar tensor on the device). It is not finite if any of
        them is not.
        """
        self.phase = "update"
        if not self._is_told and (fault := self._means.fault()):
            self._is_told = True
            warn_of(self.loss_as_given, fault)
        if not self._has_gradients:
            return torch.zeros(())
        if self._numerics.scaler is not None:
            self._numerics.scaler.unscale_(self.updater)  # pyright: ignore[reportArgumentType]
        gradients = [_own(p.grad) for p in self.parameters if p.grad is not None]
        divisor = 1.0 if self._is_mean else total_weight * self._numerics.gradient_factor
        if self._outside_gradients is not None:
            whole = torch.full((), divisor, dtype=torch.float64, device=gradients[0].device)
            self._outside_gradients.divide(self._scaled(whole))
        if divisor != 1.0 and any(gradient.dtype == torch.float16 for gradient in gradients):
            torch._foreach_div_(gradients, divisor)  # else the norm might leave the range
            divisor = 1.0
        norm = self._norm(gradients) / divisor
        if clip_norm is None:
            if divisor != 1.0:
                torch._foreach_div_(gradients, divisor)
        else:  # in the same pass, and without waiting for the norm
            wide = norm.double() if norm.dtype == torch.float64 else norm.float()
            torch._foreach_mul_(gradients, (clip_norm / (wide + 1e-6)).clamp(max=1.0) / divisor)
        return norm

    def apply(self) -> bool:
        """Update the parameters and drop the gradients, or keep them until the next `drop`.

        Returns False, with every parameter as it was and the loss scale lowered, if gradients left
        the range of float16.
        """
        scaler = self._numerics.scaler
        if scaler is None or not self._has_gradients:  # a scaler takes that for a mistake
            self.updater.step()
        else:
            scaler.step(self.updater)  # pyright: ignore[reportArgumentType]
            scaler.update()
            # Read here alone, since that waits for the device.
            before, self.loss_scale = self.loss_scale, scaler.get_scale()
            if before is not None and self.loss_scale < before:
                self.drop()
                return False
        self._numerics.publish()
        if self._outside_gradients is not None:
            self._outside_gradients.keep()
        if not self.keeps_gradients:
            self.drop()
        return True

    @property
    def _has_gradients(self) -> bool:
        """Whether any parameter has one. None has where a rank takes a step without samples."""
        return any(param.grad is not None for param in self.parameters)

    def part_bytes(self) -> list[int]:
        """Bytes of each parameter, or of the part of it that is here."""
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters)
        return [part.nbytes for part in parts]

    def update_bytes(self) -> int:
        """About what the update allocates, where nobody has traced it: states that are not there yet,
        and working copies."""
        sizes = self.part_bytes()
        new = sum(s for p, s in zip(self.parameters, sizes, strict=True) if not self._has_state(p))
        at_once = self.optimizer.defaults.get("foreach")
        worked_on = sum(sizes) if at_once else max(sizes, default=0)
        return self._num_states() * new + 2 * worked_on

    def state_bytes(self) -> int:
        """What the optimizer's states take once they are there, where nobody has traced it: about."""
        return self._num_states() * sum(param.nbytes for param in self.parameters)

    def _num_states(self) -> int:
        """Tensors that the optimizer keeps for a parameter, as far as its class tells."""
        if isinstance(self.optimizer, torch.optim.SGD):
            return int(any(group["momentum"] for group in self.optimizer.param_groups))
        return 1 if isinstance(self.optimizer, torch.optim.RMSprop | torch.optim.Adagrad) else 2

    def _has_state(self, param: nn.Parameter) -> bool:
        return bool(self.optimizer.state.get(param))

    def rehearse(self) -> None:
        """Make what the first update would make, while that may fail: compiled kernels, room in host
        memory.

        Raises `InputError` if kernels cannot be compiled here, and what the allocator raises.
        """
        rehearse(self.optimizer)
        self.updater.reserve()

    def empty_mean(self) -> str:
        return self._means.empty()

    def begin_step(self) -> None:
        """The next pass is the first of a step, as far as warnings of further ones go."""
        self._means.begin()

    def drop(self) -> None:
        """Forget the gradients."""
        self.begin_step()
        for param in self._with_gradient:
            param.grad = None
        if self._outside_gradients is not None:
            self._outside_gradients.drop()
        if self._buckets is not None:
            self._buckets.drop()

    def close(self) -> None:
        """Take off the model whatever was put on it."""
        self._undo.close()
        self._buckets = None
        self.drop()

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """2-norm of all together, from what the buckets know of it where they do."""
        buckets = self._buckets
        known = buckets is not None and len(buckets.norms) == len(buckets.flats)
        if buckets is not None and known and self._numerics.scaler is None:
            return torch.linalg.vector_norm(torch.stack(buckets.norms))
        norm = norm_of(_values(gradients))
        first = next(param.grad for param in self.parameters if param.grad is not None)
        if not isinstance(first, DTensor):
            return norm
        squares = norm.square()  # of this rank's parts: one sum over the ranks, not one for each
        dist.all_reduce(squares, group=first.device_mesh.get_group())
        return squares.sqrt()


def _own(gradient: Tensor) -> Tensor:
    """This rank's part of it, where it is divided over ranks."""
    if not isinstance(gradient, DTensor):
        return gradient
    with torch.no_grad():
        return gradient.to_local()


def _values(gradients: Sequence[Tensor]) -> list[Tensor]:
    """What norms are of: a sparse gradient counts with the rows that came up several times added up."""
    return [g.coalesce()._values() if g.is_sparse else g for g in gradients]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _without_cache(model: nn.Module) -> Callable[[], None]:
    """Let models of transformers keep no keys and values for the next token: in training nobody reads
    them, and a block that is recomputed would add to them again. Returns what undoes it."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            configs[id(config)] = config
    for config in configs.values():
        config.use_cache = False

    def undo() -> None:
        for config in configs.values():
            config.use_cache = True

    return undo


def _fingerprint(gradient: Tensor) -> tuple[float, float]:
    """Its 2-norm and its sum, both of which are proportional to it."""
    (values,) = _values([gradient])
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = values.double()
    return float(wide.norm()), float(wide.sum())
