"""Float32 masters of half parameters, in the optimizer (PyTorch 2.13).

A parameter stays the same object and gets half data; the master takes over the float32 storage and
the parameter's place in the optimizer. `register_post_accumulate_grad_hook` moves each gradient to
the master as soon as it is made, so that half gradients never add up; after a step the parameters
are the masters, rounded. Whoever changes a parameter in place (`load_state_dict`) changes its
master with the next step, where the master does not round to it. That is seen by `_version`, which
a write through `.data` does not move: the next step undoes it.

The optimizer's state_dict has the masters under "masters", and takes them up where the parameters
are what they round to, so that a run that is resumed goes on bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from xmem.errors import UsageError
from xmem_torch.left import HALF_TYPES

# The master of each parameter that has one.
_masters: Any = WeakTensorKeyDictionary()


def master_of(parameter: Any) -> Any:
    """Return the float32 master of a parameter; the parameter itself where it has none."""
    return _masters.get(parameter, parameter) if len(_masters) else parameter


def are_masters(parameters: Iterable[Any]) -> bool:
    """Say whether masters are among some parameters."""
    held = {id(master) for master in _masters.values()}
    return any(id(p) in held for p in parameters)


def check_gradients(optimizer: Any) -> None:
    """Refuse to go on without any gradient.

    Raises:
        UsageError: no parameter of the optimizer has one.
    """
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "no parameter of the optimizer has a gradient: call xmem.backward(loss, optimizer)"
            " first, and zero_grad only after the step"
        )


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield what is in an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def put(tensor: Any, data: Any, gradient: Any) -> None:
    """Give a tensor data that may be of another type, and a gradient of that type."""
    tensor.grad = None
    tensor.data = data
    tensor.grad = gradient


class Masters:
    """The float32 masters of a model's parameters, in their places in an optimizer.

    Attributes:
        size_bytes: what the masters take.
    """

    def __init__(self, model: Any, optimizer: Any, parameters: Iterable[Any]) -> None:
        self._model = model
        self._optimizer = optimizer
        held = set(map(id, parameters_of(optimizer)))
        self._parameters = [p for p in parameters if id(p) in held]
        self._masters = [torch.nn.Parameter(p.data, p.requires_grad) for p in self._parameters]
        self._versions: list[int | None] = [None] * len(self._parameters)
        self.size_bytes = sum(master.nbytes for master in self._masters)
        self._hooks: list[Any] = []
        self._loading: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Put the masters in their places, and follow gradients, steps, states and groups."""
        optimizer = self._optimizer
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            self._follow(parameter, master)
        self._exchange(self._parameters, self._masters)
        hold = self._hooks.append
        hold(optimizer.register_step_pre_hook(lambda *_: self._take_up()))
        hold(optimizer.register_step_post_hook(lambda *_: self._round()))
        hold(optimizer.register_state_dict_post_hook(lambda _, state: self._save(state)))
        hold(optimizer.register_load_state_dict_pre_hook(lambda _, state: self._expect(state)))
        hold(optimizer.register_load_state_dict_post_hook(lambda _: self._load()))
        self._add = optimizer.add_param_group
        optimizer.add_param_group = self._add_param_group  # no state of it, so never pickled

    def end(self) -> None:
        """Give the parameters the masters' data and gradients, and their places back."""
        self._take_up()
        self.withdraw()

    def withdraw(self) -> None:
        """Do so whatever the parameters are now, as far as `begin` has come."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer.__dict__.pop("add_param_group", None)
        self._exchange(self._masters, self._parameters)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if _masters.pop(parameter, None) is not None:
                put(parameter, master.data, master.grad)

    def _follow(self, parameter: Any, master: Any) -> None:
        hook = functools.partial(_move_gradient, master)
        wanted = parameter.requires_grad
        parameter.requires_grad_()  # a frozen one may be trained later, and takes no hook now
        try:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        finally:
            parameter.requires_grad_(wanted)
        gradient, parameter.grad = parameter.grad, None
        master.grad = None if gradient is None else gradient.to(master.dtype)
        _masters[parameter] = master

    def _exchange(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        instead = dict(zip(map(id, old), new, strict=True))
        for group in self._optimizer.param_groups:
            group["params"][:] = [instead.get(id(p), p) for p in group["params"]]
        state = self._optimizer.state
        for before, after in zip(old, new, strict=True):
            if before in state:
                state[after] = state.pop(before)

    def _take_up(self) -> None:
        """Let a master follow a parameter that has been changed in place since the last step.

        Where it rounds to the parameter it stays, as after loading a model's weights.
        """
        with torch.no_grad():
            for parameter, master, version in zip(
                self._parameters, self._masters, self._versions, strict=True
            ):
                if parameter._version != version:
                    rounds = master.to(parameter.dtype) == parameter
                    master.copy_(torch.where(rounds, master, parameter))

    def _round(self) -> None:
        if self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)
        self._versions = [p._version for p in self._parameters]

    def _numbered(self, state: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
        """Yield the masters with their numbers in a state_dict."""
        own = set(map(id, self._masters))
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        # Another number of parameters is PyTorch's to refuse, which it does after its hooks.
        for number, held in zip(numbers, parameters_of(self._optimizer), strict=False):
            if id(held) in own:
                yield number, held

    def _save(self, state: dict[str, Any]) -> None:
        state["masters"] = {number: master.detach() for number, master in self._numbered(state)}

    def _expect(self, state: Mapping[str, Any]) -> None:
        """Find what to load, before PyTorch loads the rest."""
        saved = state.get("masters", {})
        self._loading = [(m, saved[n]) for n, m in self._numbered(state) if n in saved]
        for master, found in self._loading:
            if found.shape != master.shape:
                raise UsageError(
                    f"the state has a master of shape {tuple(found.shape)} for a parameter of shape"
                    f" {tuple(master.shape)}: it is of another model"
                )

    def _load(self) -> None:
        """Copy; the next step compares with the parameters, loaded before or after."""
        loading, self._loading = self._loading, []
        with torch.no_grad():
            for master, saved in loading:
                master.copy_(saved)
        if loading:
            self._versions = [None] * len(self._parameters)

    def _add_param_group(self, group: Any) -> None:
        """Give half parameters masters; what has one here already is PyTorch's to refuse."""
        if not isinstance(group, dict) or isinstance(group.get("params"), (set, type(None))):
            return self._add(group)
        given = group["params"]
        made: dict[int, tuple[Any, Any]] = {}
        instead = [
            (p[0], self._in_place_of(p[1], made))
            if isinstance(p, tuple)
            else self._in_place_of(p, made)
            for p in ([given] if isinstance(given, torch.Tensor) else given)
        ]
        self._add({**group, "params": instead})
        for parameter, master in made.values():
            self._follow(parameter, master)
            self._parameters.append(parameter)
            self._masters.append(master)
            self._versions.append(parameter._version)
        return None

    def _in_place_of(self, parameter: Any, made: dict[int, tuple[Any, Any]]) -> Any:
        if not isinstance(parameter, torch.Tensor) or id(parameter) in made:
            return made.get(id(parameter), (None, parameter))[1]
        master = master_of(parameter)
        if master is not parameter:
            if not any(master is own for own in self._masters):
                raise UsageError("the parameter has its master in another optimizer")
            return master
        if parameter.dtype not in HALF_TYPES:
            return parameter
        if not any(parameter is own for own in self._model.parameters()):
            raise UsageError(
                f"a half parameter of shape {tuple(parameter.shape)} is not of the model that was"
                " cast for this optimizer, and would have no master"
            )
        made[id(parameter)] = (
            parameter,
            torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad),
        )
        return made[id(parameter)][1]


def moves_gradient(hook: Any) -> bool:
    """Say whether a hook on a parameter is the one that gives its master the gradient."""
    return isinstance(hook, functools.partial) and hook.func is _move_gradient


def _move_gradient(master: Any, parameter: Any) -> None:
    gradient, parameter.grad = parameter.grad.detach(), None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
