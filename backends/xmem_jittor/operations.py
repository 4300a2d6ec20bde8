"""What autocast puts in the place of Jittor's operations, those of `jittor.nn` 1.3.11 and others.

See `precision.py`. Each maker gets an operation's name and the original, and returns what runs
instead: the original where no block is entered in this thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jittor as jt
from jittor import attention, misc, nn, pool

from xmem.casting import Casting, current, in_force
from xmem_jittor import derivatives
from xmem_jittor.kinds import Kind, apply, call, plain, reach
from xmem_jittor.ledger import tell
from xmem_jittor.regions import is_float, raised

Original = Callable[..., Any]
Maker = Callable[[str, Original], Original]
# What leaves half's range where its input does not; without names, since there is no choice.
_LINEAR = ("sum", "reduce_add", "mean", "cumsum", "numpy_cumsum")
_POWERS = (
    "sqr", "pow", "__pow__", "__rpow__", "exp", "expm1", "log", "log2", "safe_log",
    "rsqrt", "cosh", "sinh", "tan", "acos", "asin", "norm", "prod", "reduce_multiply", "cumprod",
    "numpy_cumprod", "var", "std", "logsumexp", "softplus",
)  # fmt: skip


def _function(activations: int = 1) -> Maker:
    """Replace operation(x, ...); floating-point tensors after the first few are weights."""

    def make(name: str, original: Original) -> Original:
        kind = Kind(name, activations)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if current() is None:
                return original(*args, **kwargs)
            return call(kind, original, args, kwargs)

        return run

    return make


def _elementwise(name: str, original: Original) -> Original:
    """Replace operation(x, ...); where its output tells the derivative, that is what is kept."""
    kind = Kind(name)

    @functools.wraps(original)
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is None or not is_float(x):
            return original(x, *args, **kwargs)
        derivative = derivatives.of(name, *args, **kwargs)
        return apply(kind, lambda v: original(v, *args, **kwargs), [x], derivative=derivative)

    return run


def _softmax(name: str, original: Original) -> Original:
    halved = _elementwise(name, original)
    logarithmic = Kind(name, raises=True)  # logarithms near 0 need more than 11 bits

    @functools.wraps(original)
    def run(x: Any, dim: Any = None, log: bool = False) -> Any:
        if log and current() is not None:
            return call(logarithmic, original, (x, dim, log), {})
        return halved(x, dim, log)

    return run


def _module(name: str, original: Original) -> Original:
    """Replace a module's execute(x); it runs with another weight and bias in their places."""

    def execute(self: Any, x: Any) -> Any:
        if current() is None or not is_float(x):
            return original(self, x)
        state = dict(self.__dict__)  # also its mode, which may be another one in backward
        weights = {n: w for n in ("weight", "bias") if is_float(w := state.get(n))}
        statistics = {
            n: v.detach().stop_grad()
            for n in ("running_mean", "running_var")
            if (v := state.get(n)) is not None
        }
        runs = itertools.count()

        def operation(v: Any, *values: Any) -> Any:
            changed = dict(zip(weights, values, strict=True))
            if next(runs):  # what a second run writes to running statistics is dropped unread
                changed |= statistics
            return original(_twin(self, {**state, **changed}), v)

        # Jittor's kernels for depthwise convolution on CUDA take float32.
        kind = Kind(name, upcasts="depthwise_conv" in state)
        return apply(kind, operation, [x, *weights.values()])

    return execute


def _twin(module: Any, attributes: dict[str, Any]) -> Any:
    """Return a module of the same type with given attributes."""
    twin = object.__new__(type(module))
    twin.__dict__.update(attributes)
    return twin


def _of_function(function: str) -> Maker:
    """Let a class that `jt.make_module` has made call the replaced function of `jittor.nn`."""

    def make(name: str, original: Original) -> Original:
        def execute(self: Any, *args: Any) -> Any:
            if current() is None:
                return original(self, *args)
            return getattr(nn, function)(*args, *self.args, **self.kw)

        return execute

    return make


def _pool(name: str, original: Original) -> Original:
    """Jittor's pools do not compile in half on a CPU."""
    kind = Kind(name)

    def execute(self: Any, x: Any) -> Any:
        casting = current()
        if casting is None or not is_float(x):
            return original(self, x)
        if not getattr(self, "return_indices", None):
            return apply(kind, lambda v: original(self, v), [x])
        tell(casting, name, "float32", whole=[x])
        with in_force(None):
            pooled, places = original(self, raised(x))
        return (pooled if plain(name) else pooled.cast(x.dtype)), places

    return execute


def _embedding(name: str, original: Original) -> Original:
    """Look up in what the weight is in; ids are no floating-point numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        casting = current()
        with in_force(None):
            found = original(*args, **kwargs)
        if casting is None:
            return found
        if not casting.enabled or not plain(name):
            tell(casting, name, str(found.dtype))
            return found
        tell(casting, name, "float32")
        return raised(found)

    return run


def _loss(name: str, original: Original) -> Original:
    """Compute in float32, and keep in half what came in half."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(*args, **kwargs)
        return call(Kind(name, len(args) + len(kwargs), raises=True), original, args, kwargs)

    return run


def _scaled_dot_product(name: str, original: Original) -> Original:
    """Keep query, key and value; without dropout, which would draw other numbers again."""
    kind = Kind(name, 3)

    @functools.wraps(original)
    def run(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        casting = current()
        if casting is None:
            return original(query, key, value, attn_mask, dropout_p, *rest, **options)
        given = (query, key, value, attn_mask, dropout_p, *rest)
        if not dropout_p or plain(name):
            return call(kind, original, given, options)
        tell(casting, name, casting.dtype)
        return original(*given, **options)

    return run


def _whole_attention(name: str, original: Original) -> Original:
    """Run projections and all in float32 if attention is kept; else its parts see to themselves."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        casting = current()
        if casting is None or not casting.enabled or not plain(name):
            return original(*args, **kwargs)
        with in_force(Casting("float32", log=casting.log)):
            return original(*map(raised, args), **{k: raised(v) for k, v in kwargs.items()})

    return run


def _reach(*, linear: bool) -> Maker:
    """Let what leaves half's range, sums and powers, be computed and given back in float32."""

    def make(name: str, original: Original) -> Original:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if current() is None:
                return original(*args, **kwargs)
            return reach(original, args, kwargs, linear=linear)

        return run

    return make


def replacements() -> Iterator[tuple[str, Any, str, Maker]]:
    """Yield operation, owner, attribute and what makes the replacement."""
    yield "linear", nn, "matmul_transpose", _function()
    for owner in (nn, attention):
        yield "linear", owner, "linear", _function()
    yield "linear", nn.Linear, "execute", _module
    for owner, attribute in (
        (nn, "matmul"), (jt, "matmul"), (jt.Var, "matmul"), (jt.Var, "__matmul__"),
        (nn, "bmm_transpose"), (jt, "bmm_transpose"),
    ):  # fmt: skip
        yield "matmul", owner, attribute, _function(2)
    for attribute in ("conv2d", "conv", "conv3d"):
        yield "conv", nn, attribute, _function()
    for owner in (nn.Conv, nn.Conv3d):
        yield "conv", owner, "execute", _module
    for attribute in ("conv_transpose", "conv_transpose2d", "conv_transpose3d"):
        yield "conv_transpose", nn, attribute, _function()
    for owner in (nn.ConvTranspose, nn.ConvTranspose3d):
        yield "conv_transpose", owner, "execute", _module
    yield "attention", attention, "scaled_dot_product_attention", _scaled_dot_product
    yield "attention", attention, "multi_head_attention_forward", _whole_attention
    yield "embedding", nn, "embedding", _embedding
    yield "embedding", nn.Embedding, "execute", _embedding
    for attribute, owner in (
        ("gelu", nn.GELU), ("relu", nn.ReLU), ("silu", nn.SiLU), ("leaky_relu", nn.LeakyReLU),
    ):  # fmt: skip
        yield attribute, nn, attribute, _elementwise
        yield attribute, owner, "execute", _of_function(attribute)
    yield "elu", nn, "elu", _elementwise
    for attribute in ("sigmoid", "tanh"):
        for owner in (jt, jt.Var):
            yield attribute, owner, attribute, _elementwise
    for owner in (nn, attention, jt.Var):
        yield "softmax", owner, "softmax", _softmax
    yield "softmax", nn.Softmax, "execute", _of_function("softmax")
    for owner in (
        pool.Pool, pool.Pool3d, pool.AdaptiveAvgPool2d, pool.AdaptiveAvgPool3d,
        pool.AdaptiveMaxPool2d, pool.AdaptiveMaxPool3d,
    ):  # fmt: skip
        yield "pool", owner, "execute", _pool
    for attribute, owner in (
        ("layer_norm", nn.LayerNorm), ("batch_norm", nn.BatchNorm), ("group_norm", nn.GroupNorm),
        ("instance_norm", nn.InstanceNorm),
    ):  # fmt: skip
        yield attribute, owner, "execute", _module
        yield attribute, nn, attribute, _function()
    for attribute in (
        "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "bce_loss", "nll_loss",
        "binary_cross_entropy_with_logits",
    ):  # fmt: skip
        yield "loss", nn, attribute, _loss
    yield "loss", nn.KLDivLoss, "execute", _loss
    for attribute in _LINEAR + _POWERS:
        maker = _reach(linear=attribute in _LINEAR)
        for owner in (jt, jt.Var, nn, misc):
            if attribute in owner.__dict__:
                yield attribute, owner, attribute, maker
