"""Half precision on Jittor 1.3.11: operations of `jittor.nn` replaced inside a `with` block.

Paulius Micikevicius et al., "Mixed Precision Training", ICLR 2018: compute in half, keep masters in
float32. Jittor's own levels (`auto_mixed_precision_level`) do not serve: 1 to 3 change nothing, and
4 to 6 fail on a CPU with oneDNN, whose matmul takes float32 only.

What an operation here keeps for backward is its input in half; the operation itself runs in float32
on a CPU (numbers rounded to half are multiplied by oneDNN, which has no half arithmetic there)
and in half on CUDA. Backward builds the operation again on what was kept and differentiates that;
of matmul and convolution only the gradients run then, since nothing reads their output.
Normalisations and losses run in float32. Parameters and their gradients stay float32.

Replaced are attributes of `jittor.nn`, `jittor.pool` and classes in them, so a function that user
code has imported by name (`from jittor.nn import relu`) is not. Outside of a block nothing is
replaced, and a recomputed region enters the block again that it was first run in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jittor as jt
from jittor import nn, pool

from xmem.errors import CapabilityError, CompositionError, UsageError, unknown
from xmem.operations import OPERATIONS
from xmem_jittor import halves

_BFLOAT16 = (
    "matmul and convolution in bfloat16 are off by 0.12 to 0.24 on a CPU in Jittor 1.3.11, which"
    " adds up in bfloat16. Use 'float16', or another backend."
)
# What a name of `xmem.operations` means where Jittor has no operation of its own for it.
_PARTS = {"attention": ("matmul", "softmax")}


@dataclass(frozen=True)
class _Region:
    """The precision in force.

    Attributes:
        dtype: the half type.
        kept: operations that stay in float32.
    """

    dtype: str
    kept: frozenset[str]


_current: _Region | None = None
_entered_regions = 0
_undo: list[tuple[Any, str, Any]] = []


class Precision:
    """Compute in half precision; see `xmem.protocols.Precision`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {"bfloat16": _BFLOAT16}

    def default_dtype(self) -> str:
        """Return float16, the only half type."""
        return "float16"

    def autocast(
        self, dtype: str, *, keep_fp32: Sequence[str] = (), enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Replace operations inside a block; gradients may be asked for after it."""
        if dtype == "auto":
            dtype = self.default_dtype()
        if dtype == "bfloat16":
            raise CapabilityError(f"Jittor offers no bfloat16: {_BFLOAT16}")
        if dtype != "float16":
            raise UsageError(unknown("dtype", dtype, ("auto", "bfloat16", "float16")))
        for name in keep_fp32:
            if name not in OPERATIONS:
                raise UsageError(unknown("operation in keep_fp32", name, OPERATIONS))
        kept = frozenset(part for name in keep_fp32 for part in _PARTS.get(name, (name,)))
        return _entered(_Region(dtype, kept) if enabled else None)


def capture() -> Callable[[], AbstractContextManager[None]]:
    """Return what enters the precision that is in force now."""
    region = _current

    def again() -> AbstractContextManager[None]:
        return _entered(region)

    return again


def rounded(x: Any, operation: str) -> Any:
    """Return what an operation would keep of its input, for inputs that several of them read."""
    if _current is None or operation in _current.kept or not _is_float(x):
        return x
    return _round(x, _current.dtype)


@contextmanager
def _entered(region: _Region | None) -> Iterator[None]:
    global _current, _entered_regions
    before = _current
    _current = region
    if region is not None:
        if _entered_regions == 0:
            _replace()
        _entered_regions += 1
    try:
        yield
    finally:
        _current = before
        if region is not None:
            _entered_regions -= 1
            if _entered_regions == 0:
                _restore()


def _replace() -> None:
    try:
        for operation, owner, name, make in _replacements():
            original = owner.__dict__[name]
            _undo.append((owner, name, original))
            setattr(owner, name, make(operation, original))
    except BaseException:
        _restore()
        raise


def _restore() -> None:
    while _undo:
        owner, name, original = _undo.pop()
        setattr(owner, name, original)


def _is_float(x: Any) -> bool:
    return isinstance(x, jt.Var) and x.dtype.is_float()


def _round(x: Any, dtype: str) -> Any:
    """Return x in half; unfused, or what reads it would keep the float32 alive instead."""
    return x if str(x.dtype) == dtype else x.cast(dtype).stop_fuse()


class _Half(jt.Function):
    """An operation that keeps its inputs in half.

    Args:
        operation: takes tensors only.
        region: the precision in force.
        weights: the inputs that are kept as they are, and rounded whenever they are used.
    """

    def __init__(
        self, operation: Callable[..., Any], region: _Region, weights: tuple[int, ...]
    ) -> None:
        self.operation = operation
        self.region = region
        self.weights = weights

    def execute(self, *inputs: Any) -> Any:
        """Run the operation on rounded inputs."""
        dtype = self.region.dtype
        self.dtypes = [x.dtype for x in inputs]
        self.kept = [
            x.detach() if i in self.weights else halves.to_half(x.detach(), dtype)
            for i, x in enumerate(inputs)
        ]
        with _entered(None):
            return halves.to_half(self.operation(*self._working()), dtype)

    def _working(self) -> list[Any]:
        """Return the inputs, rounded, in the type that operations run in."""
        half = [halves.to_half(x, self.region.dtype) for x in self.kept]
        return half if jt.flags.use_cuda else [halves.to_float32(x) for x in half]

    def grad(self, gradient: Any) -> list[Any]:
        """Differentiate the operation, built again on what was kept."""
        if not self.kept:
            raise CompositionError(
                "gradients were asked for twice through an operation that ran under autocast. It"
                " gives its inputs back in the first backward; compute the loss again, or call"
                " jt.grad once for all targets."
            )
        with jt.flag_scope(no_grad=0), _entered(None):
            inputs = [x.detach().start_grad() for x in self._working()]
            output = self.operation(*inputs)
            feed = Feed([halves.cast(gradient, output.dtype)])
            found = jt.grad(feed(output), inputs, retain_graph=False)
        self.kept = []
        if not jt.flags.use_cuda:
            # Jittor takes a gradient of another type than its tensor's. In float32 small ones do
            # not vanish without a loss scale: BERT's gradients are off by 0.13, not 0.65 %.
            return found
        return [halves.cast(g, dtype) for g, dtype in zip(found, self.dtypes, strict=True)]


class Feed(jt.Function):
    """Stands for a loss whose gradient with respect to the outputs is known; never executed."""

    def __init__(self, gradients: list[Any]) -> None:
        self.gradients = gradients

    def execute(self, *_: Any) -> Any:
        """Return something to differentiate."""
        return jt.zeros((1,))

    def grad(self, _: Any) -> tuple[Any, ...]:
        """Hand over the gradients."""
        return tuple(self.gradients)


def _apply(name: str, operation: Callable[..., Any], inputs: Sequence[Any], **options: Any) -> Any:
    """Run an operation in the precision in force."""
    region = _current
    if region is None or not all(_is_float(x) for x in inputs):
        return operation(*inputs)
    if name in region.kept:
        with _entered(None):
            return operation(*(x.float32() for x in inputs))
    return _Half(operation, region, options.get("weights", ()))(*inputs)


def _elementwise(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the input in half where it is in half already; float32 stays float32."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is None or not _is_float(x) or x.dtype == "float32":
            return original(x, *args, **kwargs)
        return _apply(name, lambda v: original(v, *args, **kwargs), [x])

    return run


def _product(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        return _apply(name, original, [a, b])

    return run


def _weighted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace operation(x, weight, bias=None, ...)."""

    def run(x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return original(x, weight, bias, *args, **kwargs)
        tensors = [x, weight] if bias is None else [x, weight, bias]
        return _apply(
            name,
            lambda v, w, b=None: original(v, w, b, *args, **kwargs),
            tensors,
            weights=(1, 2),
        )

    return run


def _matmul_transpose(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        return _apply(name, original, [a, b], weights=(1,))

    return run


def _module(function: str, *options: str) -> Callable[[str, Any], Callable[..., Any]]:
    """Let a module's execute go through the replaced function of `jittor.nn`."""

    def make(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(self: Any, x: Any) -> Any:
            if _current is None:
                return original(self, x)
            values = [getattr(self, option) for option in options]
            return getattr(nn, function)(x, self.weight, self.bias, *values)

        return execute

    return make


def _unary_module(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(self: Any, x: Any) -> Any:
        return _elementwise(name, lambda v: original(self, v))(x)

    return execute


def _softmax(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    halved = _elementwise(name, original)

    def run(x: Any, dim: Any = None, log: bool = False) -> Any:
        if log and _current is not None:
            return original(x.float32(), dim, log)  # logarithms near 0 need more than 11 bits
        return halved(x, dim, log)

    return run


def _normalisation(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Run in float32, give back what came in; the cast is fused and keeps nothing."""

    def execute(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is None or x.dtype == "float32":
            return original(self, x, *args, **kwargs)
        return original(self, x.float32(), *args, **kwargs).cast(x.dtype)

    return execute


def _loss(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(output: Any, *args: Any, **kwargs: Any) -> Any:
        return original(output.float32() if _is_float(output) else output, *args, **kwargs)

    return run


def _replacements() -> Iterator[tuple[str, Any, str, Callable[[str, Any], Callable[..., Any]]]]:
    """Yield operation, owner, attribute and what makes the replacement."""
    yield "linear", nn, "matmul_transpose", _matmul_transpose
    yield "linear", nn, "linear", _weighted
    yield "linear", nn.Linear, "execute", _module("linear")
    for owner, name in (
        (nn, "matmul"), (jt, "matmul"), (jt.Var, "matmul"), (jt.Var, "__matmul__"),
    ):  # fmt: skip
        yield "matmul", owner, name, _product
    for name in ("conv2d", "conv", "conv3d"):
        yield "conv", nn, name, _weighted
    yield "conv", nn.Conv, "execute", _module("conv2d", "stride", "padding", "dilation", "groups")
    for name in ("conv_transpose", "conv_transpose2d", "conv_transpose3d"):
        yield "conv_transpose", nn, name, _weighted
    transpose = ("stride", "padding", "output_padding", "groups", "dilation")
    yield (
        "conv_transpose", nn.ConvTranspose, "execute", _module("conv_transpose", *transpose),
    )  # fmt: skip
    yield "gelu", nn, "gelu", _elementwise
    yield "gelu", nn.GELU, "execute", _unary_module
    yield "relu", nn, "relu", _elementwise
    yield "relu", nn.ReLU, "execute", _unary_module
    yield "softmax", nn, "softmax", _softmax
    yield "softmax", jt.Var, "softmax", _softmax
    # Jittor's pools do not compile in half on a CPU.
    yield "pool", pool.Pool, "execute", _unary_module
    yield "pool", pool.Pool3d, "execute", _unary_module
    yield "layer_norm", nn.LayerNorm, "execute", _normalisation
    yield "batch_norm", nn.BatchNorm, "execute", _normalisation
    yield "group_norm", nn.GroupNorm, "execute", _normalisation
    for name in ("cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "bce_loss",
                 "nll_loss", "binary_cross_entropy_with_logits"):  # fmt: skip
        yield "loss", nn, name, _loss
