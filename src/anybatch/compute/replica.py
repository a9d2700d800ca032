"""Replica: one model and its optimizer on one device, under one choice of a plan.

This is the arithmetic of a step, without its transaction. The engine runs it on real tensors and the
estimate on fake ones, so the estimate predicts exactly the code that is run.

    accumulate(batch)  once per micro-batch: forward, loss, backward; gradients are sums
    finish(weight)     gradients become the mean over the global batch; unscaled, clipped
    apply()            the update

Gradients are stored where autograd puts them: those of the first micro-batch are kept, not copied, and
a parameter that no micro-batch used has no gradient, so the optimizer skips it as in a plain loop.
After `flatten`, gradients are stored in buckets, for several ranks.
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
from torch.optim import Optimizer

from anybatch.compute import chunked_loss, kernel_choices, recompute
from anybatch.compute.buckets import Buckets, check_dense, norm_of
from anybatch.compute.dtensor import is_dtensor, local_part
from anybatch.compute.embedding_ids import naming_ids
from anybatch.compute.ghost_norm import GhostBatches, batch_norms
from anybatch.compute.joint import Ask, Comparison, Joint, detached, naming_divided, tensors_in
from anybatch.compute.loss import (
    leaving_gradients_alone,
    naming_lost_graphs,
    read_loss,
    widened,
)
from anybatch.compute.loss_check import (
    check_adds_up,
    check_encode,
    comparable,
    rounding,
    rounding_inside,
)
from anybatch.compute.loss_reduction_check import (
    CountedMeans,
    warn_of,
    warn_of_detached,
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
from anybatch.data.batch_slices import map_leaves, samples_left
from anybatch.data.generators import seed_by
from anybatch.plans import Choice, KernelChoices
from anybatch.side_effects import untouched, used_by
from anybatch.task import JointLoss, Loss, LossFunction, parameters_in

_FEW = 4
"""Maximum number of samples used to check the gradient of the loss."""

_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_num_recorded: Callable[[], int] = _autograd._get_sequence_nr
"""Returns how many operations this thread has recorded for backward."""

_LARGER, _PROPORTIONAL = 2.0**10, 1e-4
"""A factor that multiplies without rounding, and the relative tolerance for proportionality."""


class Replica:
    """Computes the steps of one model; see the module docstring. `close` restores model and process,
    except for the effect of training.

    `host` is the device for tensors kept in host memory; in a trace, another device stands for it.

    Attributes:
        model: the user's module, with its own names and parameters.
        loss_as_given: the user's loss.
        optimizer: the user's optimizer.
        updater: runs the optimizer's step.
        parameter_writes: frozen parameters that forward writes to.
        loss_scale: the factor of fp16 loss scaling, or None without loss scaling.
        phase: the current phase of a step, for failure reports.
        keeps_gradients: whether the gradients of an update are kept until the next step begins.
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
        self._is_mean = False  # whether the gradient is already that of the mean
        self._joint = Joint(loss) if isinstance(loss, JointLoss) else None
        self._loss: LossFunction = self._joint or loss
        self.loss_as_given: LossFunction = loss
        self._is_loss_known = self.is_joint  # whether its return value was inspected
        self._has_warned = False  # whether a warning was issued
        self._means = CountedMeans()
        self._derives = False  # whether the loss needs gradients in evaluation
        self.parameter_writes: ParameterWrites = ParameterWrites(model)
        self._device = device
        self._host = host or torch.device("cpu")
        # Before anybatch registers its own hooks.
        self.gradients_are_hooked: bool = warn_of_hooks(model, loss)
        with ExitStack() as undo:  # undoes changes to the model if a later one fails
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
            if any(is_dtensor(param) for param in model.parameters()):
                check_whole(self.optimizer)
            self._numerics.adopt(self.optimizer)
            self.switch_optimizer(training=True)
            self.updater: Updater = Updater(self.optimizer)
            undo.callback(self.updater.close)
            self.updater.take(choice.update, choice.optimizer_states)
            self._undo = undo.pop_all()
        self.parameters: list[nn.Parameter] = list(parameters_in(self.optimizer.param_groups))
        self._frozen = [param for param in self.parameters if not param.requires_grad]
        self._first = next(model.parameters(), None)
        self._buckets: Buckets | None = None
        # A trainable parameter in no group gets a gradient too, which must not accumulate over steps.
        self._with_gradient = list(
            dict.fromkeys([*self.parameters, *(p for p in model.parameters() if p.requires_grad)])
        )
        self._loss = leaving_gradients_alone(self._loss, self._with_gradient)
        self._outside_gradients: OutsideGradients | None = None

    @property
    def is_joint(self) -> bool:
        """Whether the loss compares all samples of the global batch; see `joint`."""
        return self._joint is not None

    @property
    def has_warned(self) -> bool:
        """Whether a warning was issued that the loss depends on how a step is cut."""
        return self._has_warned

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by the model's own names, in full precision: the float32 masters where
        they exist. These are the tensors themselves, not copies."""
        masters = {param: master for master, param in self._numerics.leaves().items()}
        found: dict[str, Tensor] = {
            name: masters.get(param, param) for name, param in self.model.named_parameters()
        }
        return found | dict(self.model.named_buffers())

    def take_edits(self) -> None:
        """Continue training from the current weights of the model, including external changes. Called
        between two steps."""
        self._numerics.take_edits()

    def filled(self) -> None:
        """Make the model compute with `weights` after they were written to from outside."""
        self._numerics.publish()

    def switch_optimizer(self, training: bool) -> None:
        """Switch the optimizer, if it has modes (schedule-free optimizers), and with it the weights, to
        training or evaluation mode. Called between two steps."""
        parts = with_modes(self.optimizer)
        for part in parts:
            part.train() if training else part.eval()
        if parts:
            self._numerics.publish()

    @contextmanager
    def to_be_evaluated(self) -> Iterator[None]:
        """Context manager in which the weights are those of the optimizer's evaluation mode. Used
        between two steps."""
        self.switch_optimizer(training=False)
        try:
            yield
        finally:
            self.switch_optimizer(training=True)

    @property
    def is_outdated(self) -> bool:
        """Whether the optimizer's parameters are no longer those whose gradients are accumulated here:
        some were added or removed, or were unfrozen and have no place in a bucket, or no master; or the
        model has other parameters (`load_state_dict(..., assign=True)`)."""
        first = self._first
        is_gathered = first is not None and is_dtensor(first)  # and replaced for that time
        if not is_gathered and next(self.model.parameters(), None) is not first:
            return True
        now = list(parameters_in(self.optimizer.param_groups))
        if list(map(id, now)) != list(map(id, self.parameters)):
            return True
        is_prepared = self._buckets is not None or self._numerics.is_halved
        return is_prepared and any(param.requires_grad for param in self._frozen)

    def scaler_state(self) -> dict[str, float]:
        """State of fp16 loss scaling; empty without loss scaling."""
        return self._numerics.scaler.state_dict() if self._numerics.scaler else {}

    def load_scaler_state(self, state: Mapping[str, float]) -> None:
        """Continue with the loss scale from `scaler_state`. If `state` is empty, the scale is
        unchanged: a new replica starts with the initial one."""
        if self._numerics.scaler is not None and state:
            self._numerics.scaler.load_state_dict(dict(state))
            self.loss_scale = self._numerics.scaler.get_scale()

    @property
    def buckets(self) -> Buckets | None:
        """The buckets in which gradients are stored, once `flatten` was called."""
        return self._buckets

    def flatten(self) -> Buckets:
        """Store the gradients in buckets from now on, and return the buckets.

        Raises `InputError` if a module produces sparse gradients.
        """
        check_dense(self.model)
        trained = [param for param in self.parameters if param.requires_grad]
        self._buckets = Buckets(trained, self._numerics.leaves())
        self._undo.callback(self._buckets.close)
        return self._buckets

    def guard_outside_gradients(self) -> None:
        """From now on, give tensors that the loss uses besides the model and the optimizer the
        gradients that a plain loop would leave. For steps that are committed or dropped."""
        # A sharded model computes with tensors created for each pass, which have no gradient to keep.
        if not any(is_dtensor(param) for param in self.model.parameters()):
            self._outside_gradients = OutsideGradients(self._with_gradient)

    def synchronise(self, exchange: Exchange) -> None:
        """Normalize over ghost batches that are distributed over ranks, by means of `exchange`."""
        self._ghosts.exchange = exchange

    def alone(self, num_ranks: int) -> AbstractContextManager[None]:
        """Context manager for passes that this rank runs without the others; see `GhostBatches`."""
        return self._ghosts.alone(num_ranks)

    def loss_untouched(self) -> AbstractContextManager[None]:
        """Context manager around passes that are not part of training. Restores what the loss, the
        model's code and hooks keep. The caller has to restore parameters, buffers and gradients."""
        model = self.model
        own = (*model.modules(), *model.parameters(), *model.buffers(), *self.parameters)
        return untouched(self.loss_as_given, *used_by(model), aside=True, but=own)

    @property
    def kernels(self) -> KernelChoices:
        """The kernel choices that are currently in effect."""
        return self._kernels

    def switch(self, choice: Choice, kernels: KernelChoices | None = None) -> None:
        """From now on, recompute and compute the loss in chunks as in `choice`, and compile blocks or
        not as in `kernels`. All other settings of both are ignored. None leaves kernels unchanged."""
        changes = {} if kernels is None else {"compile": kernels.compile}
        wanted = self._kernels.model_copy(update=changes)
        if (choice.recompute, choice.chunked_head, wanted) != self._installed:
            self._uninstall()
            self._kernels = wanted
            self._install(choice)

    def expect(self, global_batch: int) -> None:
        """Expect steps of about `global_batch` samples from now on. Results are unchanged, except for
        values outside the range of a half-precision format. Called between two steps."""
        self._numerics.expect(global_batch)

    def _install(self, choice: Choice) -> None:
        """Install recompute as in `choice` around blocks that are compiled if the plan says so, and
        omit the logits of a head whose loss is computed in chunks."""
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
        """Compute the encodings of one micro-batch for a joint loss. The arguments are those of
        `accumulate`.

        Raises `LossError` and `DataError`, as `accumulate` does.
        """
        assert self._joint is not None
        self.phase = "encoding"
        with naming_ids(self.model), self._ghosts.cut(ghosts), self._numerics.region():
            return self._joint.encode(self.model, batch, num_samples)

    def compare(self, encoded: Any, num_samples: int) -> Comparison:
        """Compute a joint loss over all samples from their encodings, `encoded`. Raises `LossError`."""
        assert self._joint is not None
        self.phase = "comparison"
        with naming_lost_graphs(), naming_divided(), self._numerics.region():
            return self._joint.compare(
                self.model, encoded, num_samples, self._with_gradient, self._gradient_scale
            )

    @torch.no_grad()
    def compare_held_out(self, encoded: Any, num_samples: int) -> Loss:
        """Compute a joint loss over `num_samples` held-out samples from their encodings. The model must
        already be in evaluation mode. Raises `LossError`."""
        assert self._joint is not None
        self.phase = "evaluation"
        with self._numerics.region():
            return self._joint.evaluate(self.model, encoded, num_samples)

    def _scaled(self, factor: Tensor) -> Tensor:
        """`factor` multiplied by the loss scale, if there is one."""
        scaler = self._numerics.scaler
        return factor if scaler is None else scaler.scale(factor)

    def _gradient_scale(self, like: Tensor) -> Tensor:
        """The factor by which gradients of summed losses are multiplied; backward starts with it."""
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
            batch: as returned by `collate`, on the device; None for a pass in which only other ranks
                have samples.
            num_samples: number of samples in the batch. If 0, the pass is run but adds nothing.
            ghosts: samples per ghost batch, in order.
            ask: for a joint loss, maps the encodings of the batch to its share of the comparison. None
                if there are no other samples.
            whole: whether the micro-batch is the whole step. Backward then starts from the mean, so the
                gradient is identical to the bit to that of a plain loop.

        Raises:
            LossError: the loss function returned something that is not a loss, or a loss whose graph is
                already freed.
            DataError: an embedding has no row for an id (only detected on CPU).
        """
        if batch is None:  # only other ranks have samples in this pass
            with self._ghosts.cut(()):
                return Loss(torch.zeros(()), 0)
        self.phase = "forward"
        begun = _num_recorded()
        # Recompute in backward needs the head in the same state as in forward.
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
                    self._has_warned |= warn_of_reduction(self.loss_as_given, returned, num_samples)
                loss = read_loss(returned, partial(samples_left, batch, num_samples))
                counts = num_samples > 0 and not self.is_joint
                if (
                    isinstance(returned, Tensor)
                    and counts
                    and loss.weight
                    and detect_fake_mode() is None
                ):
                    self._means.note(returned, float(loss.weight))
                mean = returned if whole and isinstance(returned, Tensor) else None
                del returned  # otherwise backward would hold everything else that the loss returned
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
                from_gradients = any(tensor.requires_grad for tensor in tensors_in(batch))
                self._outside_gradients.note(total, _num_recorded() - begun, from_gradients)
            # A pass that runs only because other ranks run one adds nothing.
            total.backward(seed if num_samples else torch.zeros_like(seed))
        outputs = None if loss.outputs is None else map_leaves(loss.outputs, detached)
        return Loss(loss.sum.detach(), loss.weight, loss.metrics, outputs)

    def _watched_writes(self) -> AbstractContextManager[None]:
        writes = self.parameter_writes
        if writes.is_known or self._kernels.compile or kernel_choices.is_compiled(self.model):
            return nullcontext()
        return writes.watched()

    def region(self) -> AbstractContextManager[Any]:
        """Context manager in which forward passes run, in the precision of the plan."""
        return self._numerics.region()

    @torch.no_grad()
    def evaluate(
        self, loss: LossFunction, batch: Any, num_samples: int, phase: str = "evaluation"
    ) -> Loss:
        """Compute the loss of one batch, without gradients unless the loss itself is computed from a
        gradient (forces derived from an energy). The model must already be in evaluation mode."""
        self.phase = phase
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
        self,
        take: Callable[[int, int], Any],
        num_samples: int,
        cut: int,
        fits: int,
        with_gradient: bool = True,
    ) -> bool:
        """Check that the loss is additive over samples (see `check_adds_up`) or, for a joint loss, that
        samples are encoded independently (see `check_encode`). Returns whether the check was possible,
        or is not needed, since anybatch's own losses are additive. The caller has to restore buffers
        and random generators. With gradients, which are compared if `with_gradient`, at most `fits`
        samples are passed at once (at least two if the loss is not additive).

        Warns, or raises `LossError`, as `check_adds_up` does.
        """
        own = self.loss_as_given
        ours = (getattr(own, "__module__", None) or "").startswith("anybatch.")
        compiled = self._kernels.compile or kernel_choices.is_compiled(self.model)
        # Each new shape would be compiled.
        if (ours and self._joint is None) or compiled:
            return True
        plain = False

        def noting(model: nn.Module, piece: Any) -> Any:
            nonlocal plain
            returned = own(model, piece)
            plain = isinstance(returned, Tensor)
            return returned

        norms = batch_norms(self.model).values()

        def evaluate(piece: Any, size: int) -> tuple[Loss, bool]:
            found = self.evaluate(noting, copied(piece), size, phase="forward")
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
            if self._joint is not None:
                warned = self._check_joint(take, num_samples, cut, close)
                self._has_warned |= bool(warned)
                return warned is not None
            warned = check_adds_up(own, evaluate, explained, take, num_samples, cut, close)
            self._is_loss_known |= bool(warned)
            self._has_warned |= bool(warned)
            if warned is False and with_gradient:
                self._has_warned |= self._check_gradient(take, min(num_samples, fits, _FEW), close)
            return warned is not None

    @torch.no_grad()
    def _check_joint(
        self, take: Callable[[int, int], Any], num_samples: int, cut: int, close: float
    ) -> bool | None:
        """See `check_encode`."""
        own, joint = self.loss_as_given, self._joint
        assert isinstance(own, JointLoss)
        assert joint is not None

        def encode(batch: Any, size: int) -> Any:
            return joint.encode(self.model, copied(batch), size)

        def compare(encoded: Any, size: int) -> float:
            return float(joint.evaluate(self.model, encoded, size).sum)

        with self._numerics.region():
            return check_encode(own, encode, compare, take, num_samples, cut, close)

    def _check_gradient(self, take: Callable[[int, int], Any], few: int, close: float) -> bool:
        """Warn if scaling the loss of a few samples does not scale its gradient in proportion, or if
        their gradient is not the sum of the gradients of two parts. Returns whether a warning was
        issued."""
        if self._numerics.scaler is not None or (dist.is_available() and dist.is_initialized()):
            return False  # float16 lacks the range; a function may communicate with other ranks
        params = [param for param in self.model.parameters() if param.requires_grad]
        if any(param._backward_hooks for param in params):
            return False  # hooks have a separate warning

        def gradient(
            start: int, stop: int, factor: float = 1.0, key: int = 0
        ) -> tuple[Tensor, Tensor]:
            """The loss of some samples, and the norm and the sum of each gradient, divided by
            `factor`."""
            seed_by(key)
            batch, size = copied(take(start, stop)), stop - start
            with self._numerics.region(), chunked_loss.active(self._chunked):
                total = read_loss(self.loss_as_given(self.model, batch), lambda: size).sum
            seed = torch.full_like(total, factor)
            gradients = torch.autograd.grad(total, params, seed, allow_unused=True)
            prints = [(0.0, 0.0) if one is None else _fingerprint(one) for one in gradients]
            return total, torch.tensor(prints, dtype=torch.float64) / factor

        with suppress(Exception), torch.enable_grad():  # the step itself reports errors
            (total, once), (again, larger) = gradient(0, few), gradient(0, few, _LARGER)
            if not torch.isclose(total, again, rtol=_PROPORTIONAL):
                return False  # the model keeps state between passes (a power iteration)
            norms = once[:, :1]
            rounding = _PROPORTIONAL * norms + _PROPORTIONAL**1.5 * norms.max()
            if ((larger - once).abs() > rounding).any():
                warn_of_no_proportion(self.loss_as_given, total)
                return True
            counts = any(getattr(m, "scale_grad_by_freq", False) for m in self.model.modules())
            if few < 2 or counts:  # the latter has a separate warning
                return False
            (one, first), (rest, second) = gradient(0, 1), gradient(1, few)
            if not torch.isclose(total, one + rest, rtol=max(close, _PROPORTIONAL)):
                return False
            norms = once[:, 0] + first[:, 0] + second[:, 0]
            # Gradients that hardly change the loss (of what is normalized) consist of rounding errors.
            sizes = torch.stack([param.detach().norm().double() for param in params]).cpu()
            norms += total.detach().abs().cpu() / sizes
            differ = (once - first - second)[:, 1].abs() > 10 * max(close, _PROPORTIONAL) * norms
            if differ.any():
                inside = rounding_inside(lambda: gradient(0, few))
                differ = (once - first - second)[:, 1].abs() > 10 * inside * norms
            # What depends on random numbers of the samples may add up by chance.
            if differ.any() and all(gradient(0, few, key=k)[0] == total for k in (1, 2, 3)):
                warn_of_detached(self.loss_as_given)
                return True
        return False

    def gradient_is_finite(self, loss: LossFunction, batch: Any) -> bool:
        """Whether the gradient of a single batch is finite. The model must already be in evaluation
        mode. Accumulated gradients are unchanged, and there is no communication with other ranks."""
        self.phase = "evaluation"
        parameters = [param for param in self.model.parameters() if param.requires_grad]
        region = self._numerics.region()
        with torch.enable_grad(), region, chunked_loss.active(self._chunked):
            total = read_loss(loss(self.model, batch), lambda: 1).sum
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        values = [g.coalesce()._values() if g.is_sparse else g for g in found if g is not None]
        return all(bool(value.isfinite().all()) for value in values)

    def sum_norm(self) -> Tensor | None:
        """2-norm of the summed gradients of this rank so far, without any scale (scalar tensor on the
        device), or None if there are no gradients. Changes nothing, and synchronizes with the device
        only if gradients are sparse."""
        own = self._buckets.own_norms if self._buckets is not None else []
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return None
        norm = norm_of(own or _values(gradients), wide=True)
        return norm / self._gradient_scale(norm)

    @torch.no_grad()
    def finish(self, total_weight: float, clip_norm: float | None) -> Tensor:
        """Turn summed gradients into those of the mean over the global batch, in place, and clip them.

        Returns their 2-norm before clipping (scalar tensor on the device), which is not finite if any
        gradient is not finite.
        """
        self.phase = "update"
        if not self._has_warned and (fault := self._means.fault()):
            self._has_warned = True
            warn_of(self.loss_as_given, fault)
        if not self._has_gradients:
            return torch.zeros(())
        if self._numerics.scaler is not None:
            self._numerics.scaler.unscale_(self.updater)  # pyright: ignore[reportArgumentType]
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        divisor = 1.0 if self._is_mean else total_weight * self._numerics.gradient_factor
        if self._outside_gradients:
            whole = torch.full((), divisor, dtype=torch.float64, device=gradients[0].device)
            self._outside_gradients.divide(self._scaled(whole))
        if divisor != 1.0 and any(gradient.dtype == torch.float16 for gradient in gradients):
            torch._foreach_div_(gradients, divisor)  # otherwise the norm might overflow
            divisor = 1.0
        norm = self._norm(gradients) / divisor
        if clip_norm is None:
            if divisor != 1.0:
                torch._foreach_div_(gradients, divisor)
        else:  # clips in the same pass, without synchronizing to read the norm
            wide = norm.double() if norm.dtype == torch.float64 else norm.float()
            torch._foreach_mul_(gradients, (clip_norm / (wide + 1e-6)).clamp(max=1.0) / divisor)
        return norm

    def apply(self) -> bool:
        """Update the parameters and drop the gradients, or keep them until the next `drop` if
        `keeps_gradients`.

        Returns False, with unchanged parameters and a lower loss scale, if gradients exceeded the range
        of float16.
        """
        scaler = self._numerics.scaler
        if scaler is None or not self._has_gradients:  # a scaler raises an error without gradients
            self.updater.step()
        else:
            scaler.step(self.updater)  # pyright: ignore[reportArgumentType]
            scaler.update()
            # Read only here, since reading synchronizes with the device.
            before, self.loss_scale = self.loss_scale, scaler.get_scale()
            if before is not None and self.loss_scale < before:
                self.drop()
                return False
        self._numerics.publish()
        if self._outside_gradients:
            self._outside_gradients.keep()
        if not self.keeps_gradients:
            self.drop()
        return True

    @property
    def _has_gradients(self) -> bool:
        """Whether any parameter has a gradient. None has one if a rank runs a step without samples."""
        return any(param.grad is not None for param in self.parameters)

    def part_bytes(self) -> list[int]:
        """Bytes of each parameter, or of this rank's shard of it."""
        parts = (local_part(p) for p in self.parameters)
        return [part.nbytes for part in parts]

    def update_bytes(self) -> int:
        """Estimate of the bytes that an update allocates if it was not traced: missing states and
        working copies."""
        sizes = self.part_bytes()
        new = sum(s for p, s in zip(self.parameters, sizes, strict=True) if not self._has_state(p))
        at_once = self.optimizer.defaults.get("foreach")
        worked_on = sum(sizes) if at_once else max(sizes, default=0)
        return self._num_states() * new + 2 * worked_on

    def state_bytes(self) -> int:
        """Estimate of the bytes of all optimizer states if the update was not traced."""
        return self._num_states() * sum(param.nbytes for param in self.parameters)

    def _num_states(self) -> int:
        """Number of tensors that the optimizer keeps for each parameter, guessed from its class."""
        if isinstance(self.optimizer, torch.optim.SGD):
            return int(any(group["momentum"] for group in self.optimizer.param_groups))
        return 1 if isinstance(self.optimizer, torch.optim.RMSprop | torch.optim.Adagrad) else 2

    def _has_state(self, param: nn.Parameter) -> bool:
        return bool(self.optimizer.state.get(param))

    def rehearse(self) -> None:
        """Compile kernels and allocate host memory for the first update, while a failure is harmless.

        Raises `InputError` if kernels cannot be compiled on this machine. Allocation errors are
        propagated.
        """
        rehearse(self.optimizer)
        self.updater.reserve()

    def empty_mean(self) -> str:
        return self._means.empty()

    def begin_step(self) -> None:
        """Mark the next pass as the first of a step, for warnings that compare the passes of a step."""
        self._means.begin()

    def drop(self) -> None:
        self.begin_step()
        for param in self._with_gradient:
            param.grad = None
        if self._outside_gradients:
            self._outside_gradients.drop()
        if self._buckets is not None:
            self._buckets.drop()

    def close(self) -> None:
        """Undo all changes to the model."""
        self._undo.close()
        self._buckets = None
        self.drop()

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """2-norm of all gradients together, from the norms that the buckets have computed, if any."""
        buckets = self._buckets
        known = buckets is not None and len(buckets.norms) == len(buckets.flats)
        if buckets is not None and known and self._numerics.scaler is None:
            return torch.linalg.vector_norm(torch.stack(buckets.norms))
        norm = norm_of(_values(gradients))
        first = next(param.grad for param in self.parameters if param.grad is not None)
        if not is_dtensor(first):
            return norm
        squares = norm.square()  # of this rank's shards: one all-reduce, not one per parameter
        dist.all_reduce(squares, group=first.device_mesh.get_group())
        return squares.sqrt()


def _values(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The values that norms are computed from. In sparse gradients, repeated rows are summed first."""
    return [g.coalesce()._values() if g.is_sparse else g for g in gradients]


def _without_cache(model: nn.Module) -> Callable[[], None]:
    """Disable the key-value cache of transformers models: it is not used in training, and a recomputed
    block would append to it again. Returns a function that undoes this."""
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
    """The 2-norm and the sum of `gradient`, both of which are proportional to it."""
    (values,) = _values([gradient])
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = values.double()
    return float(wide.norm()), float(wide.sum())
