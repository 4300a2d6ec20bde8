"""Optimizers whose states take few bits, in the manner of `jt.optim` (Jittor 1.3.11).

The rules are those of `xmem.optim_rules`, with the same states, bit for bit, as on every backend;
one native kernel updates a parameter and its states in place (`donating.py`). Differences from
`jt.optim`:

* A state is made with its parameter's first update, and bias corrections count a parameter's own
  updates, not the calls of `backward`.
* A step drops the gradients, which Jittor keeps until the next backward. So in a lazy graph each
  gradient lives from where it is computed to its update, which comes next: they are never all there
  at once, unless something needs all of them (clipping, a scaler, a `sync` before the step).
* What `state_dict` returns is a snapshot; `jt.optim` returns the living states.

Limit: a CPU only. For CUDA the kernels would have to be `cuda_src` of the same operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from xmem import optim_rules as rules
from xmem.errors import CapabilityError, UsageError, unknown
from xmem.receipts import Receipt
from xmem_jittor.donating import update_in_place
from xmem_jittor.factored import Adafactor
from xmem_jittor.few_bits import Optimizer
from xmem_jittor.quantize import IN_BACKWARD

_DESCEND = """
    auto* p = (decltype(out0_p + 0))out0->mem_ptr;
    const float rate = data["rate"], l2 = data["l2"];
    #pragma omp parallel for if (out0->num > 100000)
    for (int64 i = 0; i < out0->num; i++) p[i] = p[i] - rate * (in1_p[i] + l2 * p[i]);
"""


class AdamW(Optimizer):
    """Adam with decoupled weight decay, as in PyTorch; or coupled, with `decoupled=False`.

    Attributes:
        eps_first: eps is added before the bias correction, as `jt.optim.Adam` does.
    """

    moments: ClassVar[Mapping[str, rules.Moment]] = {"m": "first", "values": "second"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        decoupled: bool = True,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        super().__init__(params, lr, state_bits=state_bits, min_elements=min_elements)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.maximize = maximize
        self.decoupled = decoupled
        self.eps_first = False

    def _update(self, group: dict[str, Any], i: int, p: Any, g: Any, seed: int) -> None:
        numbers = rules.adam_numbers(
            group["steps"][i],
            lr=self._option(group, "lr"),
            betas=self._option(group, "betas"),
            eps=self._option(group, "eps"),
            weight_decay=self._option(group, "weight_decay"),
            decoupled=self.decoupled,
        )
        if self.eps_first:
            numbers = replace(numbers, eps=numbers.eps * numbers.root)
        held = [self._state(group, name, i) for name in self.moments]
        flags = rules.MAXIMIZE if self._option(group, "maximize") else 0
        self._step_in_few_bits("adam", [p, *held], g, numbers, seed, flags)


class Lion(Optimizer):
    """The sign of a mixture of gradient and momentum."""

    moments: ClassVar[Mapping[str, rules.Moment]] = {"m": "first"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        super().__init__(params, lr, state_bits=state_bits, min_elements=min_elements)
        self.betas = betas
        self.weight_decay = weight_decay
        self.maximize = maximize

    def _update(self, group: dict[str, Any], i: int, p: Any, g: Any, seed: int) -> None:
        numbers = rules.lion_numbers(
            lr=self._option(group, "lr"),
            betas=self._option(group, "betas"),
            weight_decay=self._option(group, "weight_decay"),
        )
        flags = rules.MAXIMIZE if self._option(group, "maximize") else 0
        self._step_in_few_bits("lion", [p, self._state(group, "m", i)], g, numbers, seed, flags)


class SGD(Optimizer):
    """Stochastic gradient descent; without momentum it holds nothing, unlike `jt.optim.SGD`.

    Attributes:
        dampen_first: the first momentum is dampened too, as `jt.optim.SGD` does.
    """

    moments: ClassVar[Mapping[str, rules.Moment]] = {"values": "first"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        super().__init__(params, lr, state_bits=state_bits, min_elements=min_elements)
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self.maximize = maximize
        self.dampen_first = False

    def _update(self, group: dict[str, Any], i: int, p: Any, g: Any, seed: int) -> None:
        numbers = rules.sgd_numbers(
            lr=self._option(group, "lr"),
            momentum=self._option(group, "momentum"),
            dampening=self._option(group, "dampening"),
            weight_decay=self._option(group, "weight_decay"),
        )
        maximize, nesterov = (self._option(group, name) for name in ("maximize", "nesterov"))
        if not numbers.beta1:
            sign = -1 if maximize else 1
            data = {"rate": sign * numbers.rate, "l2": sign * numbers.l2}
            update_in_place([p], [g], _DESCEND, data)
            return
        flags = rules.MAXIMIZE * maximize + rules.NESTEROV * nesterov
        if group["values"][i] is None and not self.dampen_first:
            flags += rules.FIRST_STEP
        held = self._state(group, "values", i)
        self._step_in_few_bits("sgd", [p, held], g, numbers, seed, flags)


RULES = {"adamw": AdamW, "adafactor": Adafactor, "lion": Lion, "sgd": SGD}


def make_optimizer(
    rule: str, parameters: Iterable[Any], options: Mapping[str, Any], *, state_bits: int
) -> Any:
    """See `xmem.quantizing.Quantize`."""
    if rule not in RULES:
        raise UsageError(unknown("update rule", rule, RULES))
    own = dict(options)
    engine = own.pop("engine", "xmem")
    if engine != "xmem":
        raise UsageError(f"engine={engine!r}: on Jittor there is xmem's own. Leave engine out")
    return RULES[rule](parameters, **own, state_bits=state_bits)


def quantize_optimizer(optimizer: Any, bits: int, *, min_elements: int) -> Any:
    """See `xmem.quantizing.Quantize`."""
    from xmem_jittor.conversion import go_on

    return go_on(optimizer, bits, min_elements=min_elements)


def optimizer_in_backward(model: Any, optimizer: Any) -> Receipt:
    """Refuse, and say what does the same here; see `xmem.quantizing.Quantize`."""
    raise CapabilityError(IN_BACKWARD)
