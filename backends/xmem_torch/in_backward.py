"""Step each parameter inside backward, as soon as its gradient is there (PyTorch 2.13).

Relies on `Tensor.register_post_accumulate_grad_hook`, which runs when all of a parameter's uses in
the graph have given their part. The optimizer stays whole, with its groups and states: a hook steps
a shallow copy of it that has one parameter, shares the state, and reads the group's options as they
are by then, so schedules go on. xmem's own optimizers step one parameter by themselves, with the
number it has among all, so that the rounding of states is the same.

Kai Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO),
ACL 2024, for SGD; PyTorch has the hook since 2.1.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from xmem import accumulating
from xmem.errors import CompositionError, UsageError
from xmem.receipts import Receipt
from xmem_torch.data_parallel import is_averaged
from xmem_torch.few_bits import Optimizer, check_gradient, check_parameter
from xmem_torch.local_parts import is_spread
from xmem_torch.masters import master_of
from xmem_torch.states_streaming import is_own
from xmem_torch.streamed_parameters import brought_in

_TECHNIQUE = "optimizer_in_backward"
_HOLDER = "_xmem_in_backward"
_stepped: Any = WeakTensorKeyDictionary()


def step_in_backward(model: Any, optimizer: Any) -> Receipt:
    """Register the hooks.

    Raises:
        UsageError: the optimizer is of other parameters, or of a kind that sees all at once.
        CompositionError: something needs all gradients.
    """
    _check(model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    hooks, stepped, sizes = [], [], []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(parameters):
        if not p.requires_grad:
            continue
        hooks.append(p.register_post_accumulate_grad_hook(_hook(weakref.ref(optimizer), index)))
        _stepped[p] = True
        stepped.append(p)
        sizes.append(p.nbytes)

    holder = model.__dict__.setdefault(_HOLDER, _Holder())
    holder.optimizers.append(optimizer)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for p in stepped:
            _stepped.pop(p, None)
        holder.optimizers[:] = [held for held in holder.optimizers if held is not optimizer]

    return Receipt(
        technique=_TECHNIQUE,
        backend="torch",
        applied_to=len(hooks),
        names=tuple(names[id(p)] for p in stepped),
        expected_saving_bytes=sum(sizes) - max(sizes, default=0),
        note="" if hooks else "No parameter of the optimizer wants a gradient.",
        _undo=undo,
    )


class _Holder:
    """Keeps optimizers alive with their model, which a loop may have no other use for.

    A hook that held its optimizer would be a cycle through a tensor's hooks, which Python never
    frees (PyTorch 2.13). Copies of the model have no hooks, and hold nothing.
    """

    def __init__(self) -> None:
        self.optimizers: list[Any] = []

    def __deepcopy__(self, memo: Any) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def _hook(held: weakref.ref[Any], index: int) -> Callable[[Any], None]:
    def step(p: Any) -> None:
        optimizer = held()
        if p.grad is None:
            return
        if optimizer is None:
            raise UsageError(
                f"a parameter of shape {tuple(p.shape)} was to step in backward, and its optimizer"
                " went with the model that it was applied to: keep that model, or undo the receipt"
            )
        group = _group_of(optimizer, p)
        with torch.no_grad(), brought_in((p,)):
            if isinstance(optimizer, Optimizer):
                check_parameter(p)
                check_gradient(p)
                optimizer.update([(group, p, index)])
            else:
                _step_alone(optimizer, group, p)
        p.grad = None
        if "step" in optimizer.__dict__:  # a scheduler asks whether there was a step
            optimizer._opt_called = True

    return step


def _group_of(optimizer: Any, p: Any) -> dict[str, Any]:
    """Return a parameter's group as it is now: loading a state makes new ones."""
    for group in optimizer.param_groups:
        if any(p is own for own in group["params"]):
            found: dict[str, Any] = group
            return found
    raise UsageError(
        f"a parameter of shape {tuple(p.shape)} steps in backward, and is in no group of its"
        " optimizer any more: undo the receipt before groups are changed"
    )


def _step_alone(optimizer: Any, group: dict[str, Any], p: Any) -> None:
    alone = copy.copy(optimizer)
    alone.__dict__.update(optimizer.__dict__)
    alone.__dict__.pop("step", None)
    alone._optimizer_step_pre_hooks = OrderedDict()
    alone._optimizer_step_post_hooks = OrderedDict()
    alone.param_groups = [{**group, "params": [p]}]
    alone.state = optimizer.state
    # Unwrapped: hooks on every optimizer's step (a meter's) are for whole steps.
    inspect.unwrap(type(optimizer).step, stop=is_own)(alone)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{type(model).__name__} is no module: give the model")
    if any(master_of(p) is not p for p in model.parameters()):
        raise CompositionError(
            "the model has float32 masters (xmem.cast_model), which are rounded to its parameters"
            " after whole steps; undo that receipt, or step after backward"
        )
    if any(is_spread(p) or is_averaged(p) for p in model.parameters()):
        raise CompositionError(
            "gradients of the model's parameters are averaged over ranks (xmem.distributed), which"
            " ends after backward, and each parameter would step by this rank's own: step after"
            " backward"
        )
    _check_kind(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(p) for p in model.parameters()}
    for p in parameters:
        if id(p) not in held:
            raise UsageError(
                f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the model's"
            )
        if p.grad is not None:
            raise UsageError(
                "there are gradients already, which would be stepped with the next ones: call"
                " xmem.zero_grad(optimizer) first"
            )
        if p in _stepped:
            raise UsageError("a parameter steps in backward already; undo that receipt first")
    if callable(getattr(model, "no_sync", None)):
        raise CompositionError(
            f"{type(model).__name__} reduces gradients over processes after they are there, and a"
            " parameter would step by its own process's: step after backward"
        )
    if accumulating.current() is not None:
        raise CompositionError(
            "optimizer_in_backward inside xmem.accumulate: every backward would be a step. Apply"
            " it outside, and leave accumulate out"
        )


def _check_kind(optimizer: Any) -> None:
    kind = type(optimizer)
    known = isinstance(optimizer, Optimizer) or f"{kind.__module__}.".startswith("torch.optim.")
    if not known or kind is torch.optim.LBFGS:
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} may look at all parameters at once; in backward"
            " step torch.optim's optimizers (but LBFGS), and those of xmem.optim"
        )
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, hooks):
            raise CompositionError(
                "the optimizer has hooks on its step, and in backward there is no step of all"
                " parameters: remove them, or step after backward"
            )
