"""What the optimizers with states in few bits share, in the manner of `jt.optim` (Jittor 1.3.11).

Groups hold states beside the parameters, under the names of `jt.optim`; `n_step` goes on counting
calls of `backward`, and each parameter's own updates are counted in a group's "steps".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import jittor as jt

from xmem import optim_rules as rules
from xmem.codec import DTYPES
from xmem.errors import CapabilityError, UsageError
from xmem.native import optimizers as kernels
from xmem.optim import check_options
from xmem_jittor import gradients, halves, native, states
from xmem_jittor.donating import update_in_place
from xmem_jittor.quantize import NO_CUDA

_STEP = """
    using Step = void (*)(int, void*, const void*, int, int64_t, void*, void*, int, uint32_t, int,
                          double, double, double, double, double, double, double);
    ((Step)(size_t)data["step"])((int)data["rule"], out0->mem_ptr, {gradient}, (int)data["dtype"],
        out0->num, out1->mem_ptr, {second}, (int)data["bits"], (uint32_t)data["seed"],
        (int)data["flags"], data["beta1"], data["beta2"], data["eps"], data["keep"], data["l2"],
        data["rate"], data["root"]);
"""


class Optimizer(jt.optim.Optimizer):
    """What the optimizers here share.

    Attributes:
        moments: where a group holds packed states, and what they are; `jt.optim`'s names.
        factors: where it holds others, which are always float32.
        state_bits: 32, 8 or 4.
        min_elements: the states of smaller parameters are float32.
    """

    moments: ClassVar[Mapping[str, rules.Moment]] = {}
    factors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, params: Iterable[Any], lr: float, *, state_bits: int, min_elements: int
    ) -> None:
        rules.check_state_bits(state_bits)
        check_device()
        given = list(params)
        if not given:
            raise UsageError("params is empty: give the parameters to train, or groups of them")
        super().__init__(given, lr)
        self.state_bits = state_bits
        self.min_elements = min_elements
        for group in self.param_groups:
            self._add_states(group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters; a step before the next backward has gradients of zero for them."""
        self._add_states(group)
        if gradients.are_new(self):
            group["grads"] = [jt.zeros(p.shape, p.dtype).stop_grad() for p in group["params"]]
        super().add_param_group(group)

    def _add_states(self, group: dict[str, Any]) -> None:
        check_options({k: v for k, v in group.items() if k != "params"})
        group["params"] = list(group["params"])
        for p in group["params"]:
            if not p.is_stop_grad() and str(p.dtype) not in DTYPES:
                raise UsageError(
                    f"a parameter of shape {tuple(p.shape)} is {p.dtype}; the update rules take"
                    f" {', '.join(DTYPES)}"
                )
        for name in (*self.moments, *self.factors):
            group[name] = [None] * len(group["params"])
        group["steps"] = [0] * len(group["params"])

    def step(self, loss: Any = None, retain_graph: bool = False) -> None:
        """Update the parameters and drop the gradients, of `loss` where one is given.

        Raises:
            UsageError: no backward has come since the last step.
        """
        check_device()
        if loss is not None:
            self.backward(loss, retain_graph)
        gradients.of(self, before="step")
        self.pre_step(None)
        try:
            for index, (group, i) in enumerate(self._places()):
                p, g = group["params"][i], group["grads"][i]
                if p.is_stop_grad():
                    continue
                group["steps"][i] += 1
                seed = rules.seed_of(group["steps"][i], index)
                self._update(group, i, p, halves.cast(g, p.dtype), seed)
        finally:
            self.post_step()
        gradients.forget(self)

    def _places(self) -> Iterator[tuple[dict[str, Any], int]]:
        for group in self.param_groups:
            for i in range(len(group["params"])):
                yield group, i

    def _update(self, group: dict[str, Any], i: int, p: Any, g: Any, seed: int) -> None:
        raise NotImplementedError

    def _option(self, group: Mapping[str, Any], name: str) -> Any:
        return group.get(name, getattr(self, name))

    def _state(self, group: dict[str, Any], name: str, i: int) -> Any:
        """Return a state, made now if this is the first update."""
        if group[name][i] is None:
            p = group["params"][i]
            bits = states.bits_for(p, self.state_bits, self.min_elements)
            group[name][i] = states.empty(p, bits)
        return group[name][i]

    def find_grad(self, v: Any) -> Any:
        """Return a parameter's gradient, between backward and step."""
        if any("grads" not in group for group in self.param_groups):
            raise UsageError(
                "there are no gradients: a step drops them. Read them between backward and step"
            )
        return super().find_grad(v)

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of states and options, laid out as `jt.optim` does."""
        left_out = ("params", "grads")
        groups = [
            {name: held for name, held in group.items() if name not in left_out}
            for group in self.param_groups
        ]
        return {"defaults": states.snapshot({**self.defaults, "param_groups": groups})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state: an own one, in the same or other bits, or one of `jt.optim`'s.

        Raises:
            UsageError: it is of other parameters, or of another kind of optimizer.
        """
        from xmem_jittor.conversion import load

        load(self, state["defaults"])

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state as the optimizer of `jt.optim` loads it: in float32."""
        from xmem_jittor.conversion import plain

        return {"defaults": plain(self)}

    def _step_in_few_bits(
        self, rule: str, tensors: list[Any], g: Any, numbers: rules.Numbers, seed: int, flags: int
    ) -> None:
        """Update a parameter and its one or two states, `tensors`, in place."""
        p, first = tensors[:2]
        data = {
            "step": native.address_of(kernels.load().xmem_optim_step),
            "rule": rules.RULES.index(rule),
            "dtype": DTYPES.index(str(p.dtype)),
            "bits": states.bits_of(first, self.state_bits),
            "seed": seed,
            "flags": flags,
            **asdict(numbers),
        }
        second = "out2->mem_ptr" if len(tensors) > 2 else "nullptr"
        source = _STEP.format(gradient=f"in{len(tensors)}->mem_ptr", second=second)
        update_in_place(tensors, [g], source, data)


def check_device() -> None:
    """Refuse to run on CUDA.

    Raises:
        CapabilityError: says why.
    """
    if jt.flags.use_cuda:
        raise CapabilityError(NO_CUDA)
