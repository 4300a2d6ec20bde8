"""Models in half precision on Jittor 1.3.11, and optimizers that keep float32 masters for them.

Paulius Micikevicius et al., "Mixed Precision Training", ICLR 2018. `Module.float16` of Jittor casts
running statistics too and knows no masters; and on a CPU a half layer fails in backward as soon as
a float32 gradient reaches it, since oneDNN's matmul takes float32 only. So a cast model runs its
forward under autocast, on every device: its operations take half inputs and half weights.

An optimizer gets masters in `param_groups[i]["params"]`, and a `backward`, a `step` and an
`add_param_group` of its own as instance attributes, which `Optimizer.state_dict` leaves out.
`backward` differentiates with respect to the model's parameters and hands the gradients on in
float32, `step` rounds the masters into the parameters. All else works on masters: `zero_grad`,
clipping, loss scaling, accumulation. Numbers that are loaded or assigned into a parameter go into
its master before the next forward, backward or step, and the parameter is half again afterwards.

Limits: a block that is called without its model runs as Jittor runs it. Without masters, step by
`xmem.optimizer_step`: after Jittor's own step a half parameter that had a float32 gradient is
float32. On several ranks `data_parallel` comes first; what is sharded has no masters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import jittor as jt

from xmem import casting
from xmem.errors import CapabilityError, CompositionError, UsageError
from xmem.records import Cast
from xmem_jittor import averaging, gradients, halves
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.precision import Precision

# Updated by small steps in forward, which would be lost to rounding.
_STATISTICS = ("running_mean", "running_var")

_masters: WeakKeyDictionary[Any, Masters] = WeakKeyDictionary()


class Masters:
    """The float32 masters in an optimizer, and the model's parameters they stand for.

    Args:
        optimizer: its groups hold the model's parameters.
        masters: by the id of a parameter; those of parameters that are added later join them.
        dtype: of the parameters that have masters.

    Attributes:
        parameters: the model's, by group of the optimizer.
    """

    def __init__(self, optimizer: Any, masters: dict[int, Any], dtype: str) -> None:
        # Weak: the optimizer holds this object, by the methods it gets.
        self._optimizer: Callable[[], Any] = ref(optimizer)
        self._masters = masters
        self._dtype = dtype
        replaced = ("backward", "step", "add_param_group")
        self._before = {name: vars(optimizer).get(name) for name in replaced}
        self.parameters = [list(group["params"]) for group in optimizer.param_groups]
        # Of the tensor that a parameter stood for when it was rounded: another one is new values.
        self._numbers = {id(p): p.id for p, _ in self._held()}
        for group in optimizer.param_groups:
            group["params"] = [masters.get(id(p), p) for p in group["params"]]
        for name in replaced:
            setattr(optimizer, name, getattr(self, name))
        _masters[optimizer] = self

    def _held(self) -> list[tuple[Any, Any]]:
        """Return each parameter that was cast with its master, also if the optimizer is gone."""
        return [
            (p, self._masters[id(p)])
            for parameters in self.parameters
            for p in parameters
            if id(p) in self._masters
        ]

    def take_up(self) -> None:
        """Let masters follow what was loaded or assigned into their parameters.

        A parameter may stand for another tensor with the same numbers (`Var.start_grad`): where
        the master, rounded, is what the parameter holds, it keeps what rounding has cut off.
        """
        with gradients.updating():
            for parameter, master in self._held():
                if parameter.id == self._numbers[id(parameter)]:
                    continue
                value = parameter.detach()
                if str(value.dtype) == self._dtype:
                    kept = halves.to_half(master.detach(), self._dtype)
                    raised = halves.to_float32(value)
                    same = halves.to_float32(kept) == raised
                    master.update(jt.ternary(same, master.detach(), raised))
                else:
                    master.update(value.float32())
                    parameter.update(halves.to_half(master.detach(), self._dtype))
                self._numbers[id(parameter)] = parameter.id

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group, with masters for those of its parameters that were cast."""
        parameters = list(group["params"])
        for p in parameters:
            if id(p) not in self._masters and str(p.dtype) == self._dtype:
                self._masters[id(p)] = _master(p)
            if id(p) in self._masters:
                self._numbers.setdefault(id(p), p.id)
        group["params"] = [self._masters.get(id(p), p) for p in parameters]
        self._original("add_param_group")(group)
        self.parameters.append(parameters)
        grads = self._optimizer().param_groups[0].get("grads")
        if grads is not None and "grads" not in group:
            # Else a step before the next backward would miss them.
            group["grads"] = [jt.zeros(p.shape, p.dtype).stop_grad() for p in group["params"]]

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        """Compute gradients with respect to the parameters, for the masters."""
        self.take_up()
        optimizer = self._optimizer()
        pairs = list(zip(optimizer.param_groups, self.parameters, strict=False))
        masters = [group["params"] for group, _ in pairs]
        for group, parameters in pairs:
            group["params"] = parameters
        try:
            self._original("backward")(loss, retain_graph)
        finally:
            for (group, _), held in zip(pairs, masters, strict=True):
                group["params"] = held
        for group, parameters in pairs:
            for p, master, g in zip(parameters, group["params"], group["grads"], strict=True):
                if str(g.dtype) != str(master.dtype):
                    g.update(halves.cast(g, master.dtype))
                if p.is_stop_grad() != master.is_stop_grad():
                    (master.stop_grad if p.is_stop_grad() else master.start_grad)()
                optimizer._grad_map[id(p)] = g  # for Var.opt_grad, by the name that users have

    def step(self, loss: Any = None, retain_graph: bool = False) -> Any:
        """Update the masters and round them into the parameters."""
        self.take_up()
        with gradients.updating():
            result = self._original("step")(loss, retain_graph)
            for parameter, master in self.pairs():
                if not parameter.is_stop_grad():
                    parameter.update(halves.to_half(master.detach(), self._dtype))
                    self._numbers[id(parameter)] = parameter.id
        return result

    def _original(self, name: str) -> Any:
        optimizer = self._optimizer()
        return self._before[name] or getattr(type(optimizer), name).__get__(optimizer)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return each parameter that was cast with its master."""
        optimizer = self._optimizer()
        return [
            (parameter, master)
            for group, parameters in zip(optimizer.param_groups, self.parameters, strict=False)
            for parameter, master in zip(parameters, group["params"], strict=True)
            if parameter is not master
        ]

    def withdraw(self) -> None:
        """Give the optimizer the parameters back."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=False):
            group["params"] = parameters
        for name, before in self._before.items():
            if before is None:
                del vars(optimizer)[name]
            else:
                setattr(optimizer, name, before)
        _masters.pop(optimizer, None)


def masters_of(optimizer: Any) -> list[Any]:
    """Return the masters that an optimizer holds, or each of several."""
    if isinstance(optimizer, (list, tuple)):
        return [master for one in optimizer for master in masters_of(one)]
    masters = _masters.get(optimizer) if isinstance(optimizer, jt.optim.Optimizer) else None
    # Not `pairs`, which has none in backward, where the groups hold the parameters.
    return [] if masters is None else [master for _, master in masters._held()]


def pairs_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return each parameter that was cast with its master."""
    masters = _masters.get(optimizer) if isinstance(optimizer, jt.optim.Optimizer) else None
    return [] if masters is None else masters.pairs()


def round_again(optimizer: Any, is_lost: Callable[[Any], bool]) -> int:
    """Let parameters whose value is lost be their masters, rounded; returns how many were."""
    masters = _masters.get(optimizer)
    if masters is None:
        return 0
    lost = [(p, m) for p, m in masters._held() if is_lost(p) and not is_lost(m)]
    with gradients.updating():
        for parameter, master in lost:
            parameter.update(halves.to_half(master.detach(), masters._dtype))
            masters._numbers[id(parameter)] = parameter.id
    return len(lost)


def parameters_of(optimizer: Any) -> list[list[Any]]:
    """Return the model's parameters by group, also where the optimizer holds masters for them."""
    held = [group["params"] for group in optimizer.param_groups]
    masters = _masters.get(optimizer)
    if masters is not None:
        held[: len(masters.parameters)] = masters.parameters
    return held


def cast_model(model: Any, dtype: str, optimizer: Any) -> Cast:
    """Cast in place, each parameter behind its handle, so tied weights stay tied.

    See `xmem.protocols.Precision.cast_model`.
    """
    cast = _to_cast(model)
    optimizers = _each(optimizer)
    for one in optimizers:
        _check_optimizer(model, one)
    given = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    masters = {id(p): _master(p) for p in cast.values() if id(p) in given}
    with gradients.updating():
        for parameter in cast.values():
            parameter.update(halves.to_half(parameter.detach(), dtype))
    jt.sync([*cast.values(), *masters.values()])
    held = [Masters(one, masters, dtype) for one in optimizers]
    unwrap = Checkpoint().replace_forward(
        model, lambda forward: CastForward(forward, dtype, tuple(cast.values()))
    )
    master_bytes = sum(m.nbytes for m in masters.values())
    done = False

    def undo() -> None:
        nonlocal done
        if done:
            return
        done = True
        unwrap()
        for one in held:
            one.take_up()
        with gradients.updating():
            for parameter in cast.values():
                master = masters.get(id(parameter), parameter)
                parameter.update(halves.to_float32(master.detach()))
        for one in held:
            one.withdraw()
        masters.clear()

    return Cast(
        names=tuple(cast),
        saved_bytes=sum(p.nbytes for p in cast.values()),  # half of float32 is what is left
        master_bytes=master_bytes,
        undo=undo,
    )


def _each(optimizer: Any) -> list[Any]:
    """Return the optimizers that were given: none, one, or a list of them."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _to_cast(model: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        if str(parameter.dtype) in ("float16", "bfloat16"):
            raise UsageError(
                f"{name} is {parameter.dtype} already: cast_model takes a model in float32, from"
                " which masters can be made. Call model.float32() before it, or undo() of the"
                " receipt that an earlier cast_model gave"
            )
        if str(parameter.dtype) == "float32" and name.rpartition(".")[2] not in _STATISTICS:
            found[name] = parameter
    return found


def _check_optimizer(model: Any, optimizer: Any) -> None:
    if not isinstance(optimizer, jt.optim.Optimizer):
        raise UsageError(
            f"optimizer={optimizer!r}: give a jt.optim.Optimizer, a list of them, or None"
        )
    _check_ranks(optimizer)
    known = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(p) not in known for p in given)
    if strange:
        raise UsageError(
            f"{strange} of the optimizer's {len(given)} parameters are not the model's. Give the"
            " optimizer that was made from this model's parameters"
        )


def _check_ranks(optimizer: Any) -> None:
    from xmem_jittor import sharded_optimizers, shares

    held = [p for group in optimizer.param_groups for p in group["params"]]
    if shares.kinds(held) or sharded_optimizers.of(optimizer) is not None:
        raise CompositionError(
            "masters are not sharded: with shard_model, shard_optimizer or tensor_parallel train in"
            " float32 under xmem.autocast"
        )
    if jt.in_mpi and averaging.known(optimizer) is None:
        raise CapabilityError(
            "Jittor 1.3.11 averages no half gradients over ranks. Call"
            " xmem.distributed.data_parallel(model, optimizer) before cast_model"
        )


def _master(parameter: Any) -> Any:
    """Return what takes over the memory of a parameter in float32."""
    master = halves.cast(parameter.detach(), "float32")
    return master.stop_grad() if parameter.is_stop_grad() else master.start_grad()


@dataclass(frozen=True)
class CastForward:
    """What a cast model runs instead of its forward: the same under autocast.

    An object and not a closure, so that it is copied and pickled with its model: a copy of the
    model then computes with the copy's weights.

    Attributes:
        forward: the model's own forward, bound to it.
        dtype: the half type.
        parameters: those that were cast. What was loaded into them is rounded before they are used.
    """

    forward: Callable[..., Any]
    dtype: str
    parameters: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        self._round()
        now = casting.current()
        if now is not None and now.enabled:
            return self.forward(*args, **kwargs)
        with Precision().autocast(casting.Casting(self.dtype)):
            return self.forward(*args, **kwargs)

    def _round(self) -> None:
        if all(str(p.dtype) == self.dtype for p in self.parameters):
            return
        for masters in list(_masters.values()):
            masters.take_up()  # before anything is rounded away
        with gradients.updating():
            for p in self.parameters:
                if str(p.dtype) != self.dtype:
                    p.update(halves.to_half(p.detach(), self.dtype))
