"""Adafactor on Jittor (1.3.11): the second moment of a matrix in one number per row and column.

Noam Shazeer and Mitchell Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
ICML 2018.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jittor as jt

from xmem import optim_rules as rules
from xmem.codec import DTYPES
from xmem.native import optimizers as kernels
from xmem_jittor import native, states
from xmem_jittor.donating import update_in_place
from xmem_jittor.few_bits import Optimizer

_EPSILON = 2.0**-23
"""What PyTorch takes for eps where none is given: float32's."""
_ADAFACTOR = """
    using Step = void (*)(void*, const void*, int, int64_t, int64_t, float*, float*, void*, int,
                          uint32_t, int, double, double, double, double, double, double, double);
    ((Step)(size_t)data["step"])(out0->mem_ptr, {gradient}, (int)data["dtype"],
        (int64_t)data["rows"], out0->num / (int64_t)data["rows"], {row}, {column}, {first},
        (int)data["bits"], (uint32_t)data["seed"], (int)data["flags"], data["beta1"], data["rest2"],
        data["eps1"], data["eps2"], data["keep"], data["rate"], data["clip"]);
"""


class Adafactor(Optimizer):
    """Adam's second moment as a row and a column, and updates relative to the parameter's size.

    A parameter is seen as a matrix: its first axis, and all others.
    """

    moments: ClassVar[Mapping[str, rules.Moment]] = {"m": "first"}
    factors: ClassVar[tuple[str, ...]] = ("row", "column")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        beta1: float | None = None,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        super().__init__(params, lr, state_bits=state_bits, min_elements=min_elements)
        self.beta1 = beta1
        self.beta2_decay = beta2_decay
        self.eps = eps
        self.d = d
        self.weight_decay = weight_decay
        self.maximize = maximize

    def _update(self, group: dict[str, Any], i: int, p: Any, g: Any, seed: int) -> None:
        step, lr = group["steps"][i], self._option(group, "lr")
        least, beta1 = self._option(group, "eps"), self._option(group, "beta1")
        rows = p.shape[0] if p.ndim > 1 else 1
        targets = [p]
        names = ["column"] + ["row"] * (p.ndim > 1)
        for name, size in zip(names, (p.numel() // rows, rows), strict=False):
            if group[name][i] is None:
                group[name][i] = jt.zeros((size,), "float32").stop_grad()
            targets.append(group[name][i])
        bits = 32
        if beta1 is not None:
            targets.append(self._state(group, "m", i))
            bits = states.bits_of(targets[-1], self.state_bits)
        data = {
            "step": native.address_of(kernels.load().xmem_optim_adafactor),
            "dtype": DTYPES.index(str(p.dtype)),
            "rows": rows,
            "bits": bits,
            "seed": seed,
            "flags": rules.MAXIMIZE if self._option(group, "maximize") else 0,
            "beta1": beta1 or 0.0,
            "rest2": step ** self._option(group, "beta2_decay"),
            "eps1": _EPSILON if least[0] is None else least[0],
            "eps2": least[1],
            "keep": 1 - lr * self._option(group, "weight_decay"),
            "rate": min(lr, step**-0.5),
            "clip": self._option(group, "d"),
        }
        memory = [f"out{k}->mem_ptr" for k in range(len(targets))]
        source = _ADAFACTOR.format(
            gradient=f"in{len(targets)}->mem_ptr",
            column=f"(float*){memory[1]}",
            row=f"(float*){memory[2]}" if p.ndim > 1 else "nullptr",
            first=memory[-1] if beta1 is not None else "nullptr",
        )
        update_in_place(targets, [g], source, data)
