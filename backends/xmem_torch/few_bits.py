"""What optimizers with states in few bits share on PyTorch (2.13).

They are `torch.optim.Optimizer`s: groups, hooks, schedulers, scalers and pickling are
PyTorch's own. Differences from its other optimizers:

* `state["step"]` is an int of each parameter; moments are packed (`states.py`).
* `load_state_dict` keeps packed states as they are (PyTorch's would turn them into the parameter's
  type) and takes a state of the plain optimizer too; `plain_state_dict` gives one.
* A step works on contiguous memory: a parameter or a gradient that is not is copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xmem import optim_rules as rules
from xmem.errors import UsageError
from xmem.optim import check_options
from xmem_torch import states, updates

Place = tuple[dict[str, Any], Any, int]
"""A group, one of its parameters, and the parameter's number in the optimizer."""


class Optimizer(torch.optim.Optimizer):
    """Keeps moments in few bits.

    Attributes:
        rule: one of `optim_rules.RULES`.
        moments: the names of the states that are packed, and what they are.
        plain_options: what the plain optimizer's groups have beside those here.
    """

    rule: ClassVar[str] = ""
    moments: ClassVar[Mapping[str, rules.Moment]] = {}
    plain_options: ClassVar[Mapping[str, Any]] = {}

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters.

        Raises:
            UsageError: an option or a parameter that the rule cannot take.
        """
        if isinstance(group, dict):
            check_group({**self.defaults, **group}, self)
        super().add_param_group(group)
        for p in self.param_groups[-1]["params"]:
            try:
                check_parameter(p)
            except UsageError:
                del self.param_groups[-1]
                raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Raises:
            UsageError: a parameter or a gradient is of a kind that the rule cannot take.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [place for place in self.places() if place[1].grad is not None]
        for _, p, _ in found:
            check_parameter(p)
            check_gradient(p)
        self.update(found)
        return loss

    def places(self) -> Iterator[Place]:
        """Yield all parameters with their groups and numbers."""
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p, index
                index += 1

    def update(self, found: Sequence[Place]) -> None:
        """Step parameters whose gradients are there and have been checked."""
        todo, copies = [], []
        numbers: dict[tuple[int, int], rules.Numbers] = {}
        for group, p, index in found:
            state = self.state[p]
            flags = self.flags(group, state)
            held = tuple(self.held(group, p, name) for name in self.moments)
            step = state["step"] = state.get("step", 0) + 1
            key = (id(group), step)
            if key not in numbers:
                numbers[key] = self.numbers(group, step)
            parameter, gradient = contiguous(p)
            if parameter is not p:
                copies.append((p, parameter))
            seed, bits = rules.seed_of(step, index), group["state_bits"]
            todo.append(updates.Update(parameter, gradient, held, bits, numbers[key], seed, flags))
        updates.apply(self.rule, todo)
        for p, parameter in copies:
            p.copy_(parameter)

    def held(self, group: Mapping[str, Any], p: Any, name: str) -> torch.Tensor:
        """Return a packed moment, made now if this is the first update."""
        state = self.state[p]
        found = state.get(name)
        if found is None:
            bits = states.bits_for(p, group["state_bits"], group["min_elements"])
            found = state[name] = states.empty(p, bits)
        return found

    def numbers(self, group: Mapping[str, Any], step: int) -> rules.Numbers:
        """Return what a group's step needs."""
        raise NotImplementedError

    def flags(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> int:
        """Return the flags of a parameter's step."""
        return rules.MAXIMIZE if group["maximize"] else 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state of this optimizer in the same bits, or of the plain one in float32.

        Raises:
            UsageError: it is in other bits, of other parameters, or of another kind of optimizer.
        """
        from xmem_torch import conversion

        # The last hook before PyTorch reads the state, and the first behind it.
        hooks = (
            self.register_load_state_dict_pre_hook(conversion.hide),
            self.register_load_state_dict_post_hook(conversion.show, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state as PyTorch's own optimizer of this kind loads it: in float32."""
        from xmem_torch import conversion

        return conversion.plain(self)


def contiguous(p: Any) -> tuple[Any, torch.Tensor]:
    """Return a parameter and its gradient in memory that a kernel can walk along."""
    gradient = p.grad
    if gradient.is_neg():
        gradient = gradient.resolve_neg()
    if gradient.dtype != p.dtype:
        gradient = gradient.to(p.dtype)
    return (p if p.is_contiguous() else p.contiguous()), gradient.contiguous()


def check_parameter(p: Any) -> None:
    """Refuse what the rules cannot update.

    Raises:
        UsageError: says what it is.
    """
    if type(p) not in (torch.nn.Parameter, torch.Tensor):
        if torch.nn.parameter.is_lazy(p):
            raise UsageError(
                "a parameter of the optimizer is lazy, and has no size yet: run the model once"
            )
        if is_traceable_wrapper_subclass(p):
            raise UsageError(
                f"a parameter of the optimizer is a {type(p).__name__}, which holds its elements"
                " elsewhere; give the optimizer plain tensors"
            )
    if p.dtype not in updates.DTYPE_CODES or p.layout is not torch.strided:
        raise UsageError(
            f"a parameter of shape {tuple(p.shape)} is {p.dtype}, {p.layout}; the rules take dense"
            " float32, float16 and bfloat16. Keep others in an optimizer of torch.optim"
        )


def check_gradient(p: Any) -> None:
    """Refuse gradients that the rules cannot read.

    Raises:
        UsageError: says what it is.
    """
    gradient = p.grad
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {gradient.layout}; the rules"
            " take dense ones. Build its layer with sparse=False, or step it by"
            " torch.optim.SparseAdam"
        )
    if type(gradient) is not torch.Tensor and is_traceable_wrapper_subclass(gradient):
        raise UsageError(
            f"a gradient is a {type(gradient).__name__}, which holds its elements elsewhere"
        )


def check_group(group: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse options that the rules do not have, or out of their range.

    Raises:
        UsageError: names the option.
    """
    for name in ("amsgrad", "differentiable", "capturable"):
        if group.get(name):
            raise UsageError(
                f"{name}=True has no update rule in few bits; make the optimizer without it"
            )
    options = {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name != "params"
    }
    check_options(options)
