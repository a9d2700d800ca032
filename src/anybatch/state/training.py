"""Training state: the state of a run that a checkpoint keeps, as named tensors and plain facts, and its
restoration.

    weights/NAME         parameters (float32 masters if there are any) and buffers of the model
    optimizer/I/KEY      optimizer state of parameter number I
    optimizer/I/KEY/PART if that is several tensors in one: 8-bit codes and their scales, for example
    parameters/I         parameters that the optimizer trains and the model does not have
    exchange/KEY         state of the exchange between ranks

The names do not depend on ranks, precision or plan, so a run can be resumed under any of them. If ranks
take steps independently, their optimizers differ, and names begin with `rank-N.`.

State that can be derived is not saved: random state, the order of samples and the learning rate are
functions of the step (and of the losses of evaluations). Of the options of an optimizer, only those
that training has changed are saved: the task determines the others.

Parameters that are not trained are rebuilt by the task, if it has a function for that: see `base.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.low_bit_optimizers import fresh_state, is_compiled, parts_of, state_kinds
from anybatch.compute.multi_optimizer import parts_of as optimizers_of
from anybatch.data import identity_of_batch, num_samples_of
from anybatch.engine import LearningRate
from anybatch.errors import InputError, kind_of
from anybatch.parallel import Group
from anybatch.state.base import Base
from anybatch.state.checkpoints import Content, Found
from anybatch.task import Task

Plain = bool | int | float | str | None


class Facts(BaseModel):
    """The facts that a checkpoint holds in addition to its tensors.

    Attributes:
        format: version of the format of these facts.
        task: settings of the task, by name, that must be equal for the samples and their weights to be
            equal.
        step, samples_seen, epoch: progress of training.
        num_skipped: number of samples that were left out so far.
        evaluated: losses of the evaluations on which the learning rate depends.
        groups: for each parameter group, the options that training has changed.
        states: for each parameter, the optimizer state other than tensors.
        scaler: state of loss scaling.
        shares: shares of the ranks.
        plan: the plan that was followed.
        versions: versions of the software.
        base: checksums, by name, of the parameters that are left out since the task builds them.
        aliases: additional names of weights in the model's `state_dict`, for example of tied weights,
            and the names that they refer to.
        transient: names of weights that are not in the `state_dict`: buffers that are not persistent.
        trained: names of the parameters that the optimizer trains, in the order of their numbers; empty
            for those that the model does not have.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=True)

    format: Literal[1] = 1
    task: dict[str, Plain]
    step: int = Field(ge=0)
    samples_seen: int = Field(ge=0)
    epoch: int = Field(ge=0)
    num_skipped: int = Field(default=0, ge=0)
    evaluated: list[float] = []
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    scaler: dict[str, int | float] = {}
    shares: list[float] = []
    plan: dict[str, Any] = {}
    versions: dict[str, str] = {}
    base: dict[str, int] = {}
    aliases: dict[str, str] = {}
    transient: list[str] = []
    trained: list[str] = []

    @classmethod
    def of(cls, found: Found) -> Facts:
        """Returns the facts of a checkpoint. Raises `InputError` if they do not have the format of this
        version of anybatch."""
        try:
            return cls.model_validate(dict(found.facts))
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"])) or "the facts"
            raise InputError(
                f"the checkpoint {found.folder} cannot be resumed from: {place}: {fault['msg']}; it was"
                " written by another version of anybatch, or has been changed."
            ) from None


@final
class TrainingState:
    """The state of one rank's training.

    Args:
        task: the task that is trained.
        replica: replica of the model, adopted by `group`, before its first step.
        group: the ranks.
        rates: learning rate of its optimizer.
        built: `frozen_checksums` of the model as built, on rank 0.
    """

    def __init__(
        self,
        task: Task,
        replica: Replica,
        group: Group,
        rates: LearningRate,
        built: Mapping[str, int],
    ) -> None:
        self._task = task
        self._base = Base(task, replica, group, built)
        self._replica = replica
        self._group = group
        self._rates = rates
        self._aliases, self._transient = _names_in_state_dict(replica.model)
        self._options = [_options(group) for group in replica.optimizer.param_groups]
        self._group_of = {
            param: group for group in replica.optimizer.param_groups for param in group["params"]
        }

    def content(self, facts: Mapping[str, Any]) -> Content:
        """Returns the whole state. The tensors are those in use, not copies. Must be called between two
        steps, after they are settled, by all ranks. `facts` are further fields of `Facts`.

        Raises `InputError` if the optimizer state contains something that cannot be saved.
        """
        mine, states = self._optimizer()
        own = f"rank-{self._group.rank}." if self._group.diverges else ""
        if own and states:
            raise InputError(
                "the optimizer remembers plain values, and each rank others, since they take steps by"
                " themselves: a checkpoint holds only tensors of each rank."
            )
        base = self._base.left_out()
        tensors = self._weights(base)
        tensors |= {f"{own}optimizer/{name}": tensor for name, tensor in mine.items()}
        tensors |= self._others()
        groups = [
            {
                name: _plain(name, value)
                for name, value in _options(group).items()
                if value != was[name]
            }
            for was, group in zip(self._options, self._replica.optimizer.param_groups, strict=True)
        ]
        known = Facts(
            task=self._identity(),
            groups=groups,
            states=states,
            scaler=self._replica.scaler_state(),
            evaluated=self._rates.evaluated,
            shares=list(self._group.shares),
            base=base,
            aliases=self._aliases,
            transient=self._transient,
            trained=self._trained(),
            **facts,
        )
        return Content(tensors, known.model_dump(mode="json"))

    def destinations(self, found: Found) -> dict[str, Tensor]:
        """Returns the tensors to be filled, for the names in the checkpoint. Creates the optimizer
        state that the checkpoint holds.

        Raises `InputError` if the checkpoint is of another task, model or optimizer, or of another
        base.
        """
        facts = Facts.of(found)
        self._check_task(found, facts)
        self._base.check(facts.base, found.folder, facts.versions)
        tensors = self._weights(facts.base)
        tensors |= self._others(found)
        self._check_model(found, tensors, facts.base, "weights/", "parameters/")
        parameters = self._in_order(found, facts.trained)
        self._check_optimizer(found, parameters)
        for name, (shape, dtype) in found.tensors.items():
            kind, _, rest = self._of_this_rank(name, found).partition("/")
            if kind != "optimizer":
                continue
            number, _, key = rest.partition("/")
            if not number.isdecimal() or int(number) >= len(parameters):
                raise InputError(
                    f"the checkpoint {found.folder} is of another optimizer: it remembers {name!r},"
                    f" and there are {len(parameters)} parameters to train."
                )
            param = parameters[int(number)]
            if "/" in key or is_compiled(self._replica.optimizer):
                tensors[name] = self._part(param, key, found, (shape, dtype))
                continue
            made = self._made(param, key, shape, dtype)
            self._replica.optimizer.state[param][key] = made
            tensors[name] = made
        for number, state in facts.states.items():
            if number < len(parameters):
                self._replica.optimizer.state[parameters[number]].update(state)
        return tensors

    def weights_in(self, found: Found) -> dict[str, Tensor]:
        """Returns the tensors of `destinations` that belong to the model: for an evaluation, which does
        not depend on the training samples or the optimizer. `filled` must be called afterwards.

        Raises `InputError` if the checkpoint is of another model, or of another base.
        """
        facts = Facts.of(found)
        self._base.check(facts.base, found.folder, facts.versions)
        tensors = self._weights(facts.base)
        self._check_model(found, tensors, facts.base, "weights/")
        return tensors

    def filled(self, found: Found) -> Facts:
        """Must be called after the tensors of `weights_in` have been filled. Returns the facts."""
        self._replica.filled()
        return Facts.of(found)

    def restored(self, found: Found) -> Facts:
        """Restores everything else after the destinations have been filled. Returns the facts."""
        facts = Facts.of(found)
        self._replica.filled()
        self._replica.load_scaler_state(facts.scaler)
        self._rates.skip(facts.step, facts.epoch, facts.evaluated)
        for options, group in zip(facts.groups, self._replica.optimizer.param_groups, strict=False):
            for name, value in options.items():
                _set_option(group, name, value)
        self._replica.switch_optimizer(training=True)
        if len(facts.shares) == self._group.size:
            self._group.shares = tuple(facts.shares)
        self._group.restored()
        return facts

    def _trained(self) -> list[str]:
        names = {id(tensor): name for name, tensor in self._replica.weights.items()}
        return [names.get(id(param), "") for param in self._replica.parameters]

    def _in_order(self, found: Found, saved: Sequence[str]) -> Sequence[nn.Parameter]:
        """Returns the parameters in the order in which the checkpoint numbers them, which had the names
        `saved` (empty: not known, by an earlier version). Raises `InputError` if the checkpoint has
        states of parameters that are not trained now."""
        now, parameters = self._trained(), self._replica.parameters
        if not saved or saved == now[: len(saved)] or "" in saved:
            return parameters
        known = dict(zip(now, parameters, strict=True))
        if gone := [name for name in saved if name not in known]:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise InputError(
                f"the checkpoint {found.folder} is of another optimizer: it trained {gone[0]!r}{more},"
                " which the optimizer is not given now. Train on as before, or begin anew (from its"
                " weights, if you like) in another folder."
            )
        rest = [param for name, param in known.items() if name not in saved]
        return [*(known[name] for name in saved), *rest]

    def _check_optimizer(self, found: Found, parameters: Sequence[nn.Parameter]) -> None:
        """Raises `InputError` if the checkpoint lacks states that the optimizer keeps: it is of another
        optimizer, or of other options."""
        optimizer = self._replica.optimizer
        saved: dict[int, set[str]] = {}
        for name in found.tensors:
            kind, _, rest = self._of_this_rank(name, found).partition("/")
            if kind == "optimizer":
                number, _, key = rest.partition("/")
                if number.isdecimal():
                    saved.setdefault(int(number), set()).add(key.partition("/")[0])
        kinds: dict[int, list[str]] = {}  # by group
        for number, keys in saved.items():
            if number >= len(parameters):
                continue
            group = self._group_of.get(parameters[number])
            if group is None or not parameters[number].dim():
                continue
            if id(group) not in kinds:
                kinds[id(group)] = []
                with suppress(Exception):  # whatever an update of the user's optimizer raises
                    kinds[id(group)] = state_kinds(optimizer, group)
            missing = [kind for kind in kinds[id(group)] if kind not in keys]
            if missing:
                names = [type(part).__name__ for part in optimizers_of(optimizer)]
                raise InputError(
                    f"the checkpoint {found.folder} is of another optimizer: its states are"
                    f" {', '.join(sorted(keys))}, and {' and '.join(names)} needs {missing[0]!r}."
                    " Train on with the optimizer and the options that it was begun with, or begin"
                    " anew (from its weights, if you like) in another folder."
                )

    def _identity(self) -> dict[str, Plain]:
        task = self._task
        return {
            "global_batch": identity_of_batch(task),
            "seed": task.seed,
            "shuffle": task.shuffle,
            "last": task.last,
            "ghost_batch": task.ghost_batch,
            "the number of training samples": num_samples_of(task.train),
        }

    def _check_task(self, found: Found, facts: Facts) -> None:
        differing = [
            f"{name} was {facts.task.get(name)!r} and is {value!r}"
            for name, value in self._identity().items()
            if facts.task.get(name) != value
        ]
        if differing:
            raise InputError(
                f"the checkpoint {found.folder} is of another task: {'; '.join(differing)}. Train on as"
                " before, or begin anew (from its weights, if you like) in another folder."
            )

    def _check_model(
        self,
        found: Found,
        tensors: Mapping[str, Tensor],
        base: Iterable[str],
        *kinds: str,
    ) -> None:
        saved = {name for name in found.tensors if name.startswith(kinds)}
        faults = [f"{_short(name)} is missing" for name in tensors if name not in found.tensors]
        faults += [f"{_short(name)} is not in the model" for name in saved if name not in tensors]
        known = self._replica.weights
        faults += [f"{name!r} is not in the model" for name in base if name not in known]
        faults += [
            f"{_short(name)} has the shape {found.tensors[name][0]} there and {tuple(tensor.shape)} in"
            " the model"
            for name, tensor in tensors.items()
            if name in saved and found.tensors[name][0] != tuple(tensor.shape)
        ]
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise InputError(
                f"the checkpoint {found.folder} is of another model: {'; '.join(faults[:3])}{more}."
            )

    def _weights(self, base: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the weights of the model except the `base`."""
        own = self._replica.weights
        return {f"weights/{name}": one for name, one in own.items() if name not in base}

    def _optimizer(self) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
        tensors: dict[str, Tensor] = {}
        plain: dict[int, dict[str, Any]] = {}
        for number, param in enumerate(self._replica.parameters):
            for key, value in self._replica.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    for part, tensor in parts_of(value).items():
                        tensors[f"{number}/{key}/{part}" if part else f"{number}/{key}"] = tensor
                else:
                    plain.setdefault(number, {})[key] = _plain(key, value)
        return tensors, plain

    def _others(self, found: Found | None = None) -> dict[str, Tensor]:
        """Returns the parameters that are not part of the model, and the state of the exchange, if
        `found` is given only what it holds: another exchange has another state."""
        known = {id(tensor) for tensor in self._replica.weights.values()}
        tensors: dict[str, Tensor] = {
            f"parameters/{number}": param
            for number, param in enumerate(self._replica.parameters)
            if id(param) not in known
        }
        for name, tensor in self._group.state().items():
            stored = None if found is None else found.tensors.get(f"exchange/{name}")
            if found is None or (stored and stored[0] == tuple(tensor.shape)):
                tensors[f"exchange/{name}"] = tensor
        return tensors

    def _of_this_rank(self, name: str, found: Found) -> str:
        """Returns `name` without its rank prefix; an empty string if it is for another rank."""
        if not name.startswith("rank-"):
            return name
        rank, _, rest = name.partition(".")
        mine = f"rank-{self._group.rank if self._group.diverges else 0}"
        if not any(other.startswith(f"{mine}.") for other in found.tensors):
            mine = "rank-0"  # the checkpoint has fewer ranks
        return rest if rank == mine else ""

    def _made(
        self, param: nn.Parameter, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Returns a tensor of zeros for the optimizer state `key` of `param`."""
        if shape == tuple(param.shape) and key != "step":
            # The dtype of the parameters may have changed with the precision.
            kind = param.dtype if dtype.is_floating_point else dtype
            on_host = self._replica.updater.states_on == "host"
            return torch.zeros_like(
                param,
                dtype=kind,
                device="cpu" if on_host else param.device,
                pin_memory=on_host and param.is_cuda,
                requires_grad=False,
            )
        options = self._group_of[param]
        on_device = shape or options.get("fused") or options.get("capturable")
        return torch.zeros(shape, dtype=dtype, device=param.device if on_device else "cpu")

    def _part(
        self,
        param: nn.Parameter,
        name: str,
        found: Found,
        kind: tuple[tuple[int, ...], torch.dtype],
    ) -> Tensor:
        """Returns the tensor for a part of optimizer state that only the optimizer can create. Raises
        `InputError` if it has different state."""
        optimizer = self._replica.optimizer
        if is_compiled(optimizer) and not optimizer.state[param]:
            optimizer.state[param] = fresh_state(optimizer, param)
        key, _, part = name.partition("/")
        whole = optimizer.state[param].get(key)
        here = parts_of(whole).get(part) if isinstance(whole, Tensor) else None
        shape, dtype = kind
        alike = (
            here is not None
            and tuple(here.shape) == shape
            and here.dtype.is_floating_point == dtype.is_floating_point
        )
        if here is None or not alike:
            raise InputError(
                f"the checkpoint {found.folder} is of another optimizer: it remembers {name!r} of shape"
                f" {shape} in {str(dtype).removeprefix('torch.')}, which {type(optimizer).__name__}"
                " does not have. Resume with the optimizer that it was trained with, or begin anew from"
                " its weights in another folder."
            )
        return here


def _names_in_state_dict(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Returns the additional names of parameters and buffers in the `state_dict` of `model`, with the
    names that they refer to; and the names of parameters and buffers that are not in it."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    names = {id(tensor): name for name, tensor in own.items()}
    state = model.state_dict(keep_vars=True)
    found = {name: names[id(value)] for name, value in state.items() if id(value) in names}
    aliases = {name: first for name, first in found.items() if name != first}
    return aliases, [name for name in own if name not in state]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group, except the learning rate, which the task determines."""
    return {
        name: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name not in ("params", "lr", "initial_lr")
    }


def _set_option(group: dict[str, Any], name: str, value: Any) -> None:
    here = group.get(name)
    if isinstance(here, Tensor):
        here.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(here, tuple) else value


def _plain(name: str, value: Any) -> Any:
    """Returns `value` in a form that JSON can represent. Raises `InputError` if there is none."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise InputError(
        f"the optimizer remembers {name!r}, {kind_of(value)}, which a checkpoint cannot hold: it holds"
        " tensors and plain values."
    )


def _short(name: str) -> str:
    return repr(name.partition("/")[2])
