"""Every operation that autocast knows on Jittor: right in value, gradient, type and report."""

import numpy as np
import pytest
from chain import error, gradients, trained

import xmem
from xmem.operations import FLOAT32, HALF

WIDTH = 8


def modules():
    """Return what makes a module, the shape of its input, and its operation."""
    import jittor as jt
    from jittor import nn

    images, volumes = (2, WIDTH, 6, 6), (1, WIDTH, 4, 4, 4)
    rows, sequences = (3, WIDTH), (3, 5, WIDTH)

    def evaluating(module):
        module.eval()
        return module

    def attention(**options):
        inner = jt.attention.MultiheadAttention(WIDTH, 2)

        class Attention(nn.Module):
            def __init__(self):
                self.inner = inner

            def execute(self, x):
                return self.inner(x, x, x, **options)[0]

        return Attention()

    return {
        "Linear": (lambda: nn.Linear(WIDTH, 4), sequences, "linear"),
        "Linear without bias": (lambda: nn.Linear(WIDTH, 4, bias=False), rows, "linear"),
        "Conv": (lambda: nn.Conv(WIDTH, WIDTH, 3, 1, 1), images, "conv"),
        "Conv, strided": (lambda: nn.Conv(WIDTH, 4, 3, 2, 1, bias=False), images, "conv"),
        "Conv of groups": (lambda: nn.Conv(WIDTH, WIDTH, 3, 1, 1, groups=2), images, "conv"),
        "Conv, depthwise": (lambda: nn.Conv(WIDTH, WIDTH, 3, 1, 1, groups=WIDTH), images, "conv"),
        "Conv1d": (lambda: nn.Conv1d(WIDTH, 4, 3, padding=1), (2, WIDTH, 9), "conv"),
        "Conv1d_sp": (lambda: nn.Conv1d_sp(WIDTH, 4), (2, WIDTH, 9), "linear"),
        "Conv3d": (lambda: nn.Conv3d(WIDTH, 4, 3, 1, 1), volumes, "conv"),
        "ConvTranspose": (
            lambda: nn.ConvTranspose(WIDTH, 4, 2, stride=2), images, "conv_transpose",
        ),
        "ConvTranspose3d": (
            lambda: nn.ConvTranspose3d(WIDTH, 4, 2, stride=2), volumes, "conv_transpose",
        ),
        "MultiheadAttention": (lambda: attention(), sequences, "matmul"),
        "MultiheadAttention, fused": (
            lambda: attention(need_weights=False), sequences, "attention",
        ),
        "GELU": (nn.GELU, rows, "gelu"),
        "ReLU": (nn.ReLU, rows, "relu"),
        "SiLU": (nn.SiLU, rows, "silu"),
        "LeakyReLU": (lambda: nn.LeakyReLU(0.2), rows, "leaky_relu"),
        "LeakyReLU, falling": (lambda: nn.LeakyReLU(-0.2), rows, "leaky_relu"),
        "ELU": (nn.ELU, rows, "elu"),
        "Sigmoid": (nn.Sigmoid, rows, "sigmoid"),
        "Tanh": (nn.Tanh, rows, "tanh"),
        "Pool": (lambda: nn.Pool(2, 2, op="maximum"), images, "pool"),
        "Pool of means": (lambda: nn.Pool(2, 2, op="mean"), images, "pool"),
        "AvgPool2d": (lambda: nn.AvgPool2d(2, 2), images, "pool"),
        "Pool3d": (lambda: nn.Pool3d(2, 2, op="maximum"), volumes, "pool"),
        "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), images, "pool"),
        "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(2), images, "pool"),
        "Softmax": (lambda: nn.Softmax(dim=-1), rows, "softmax"),
        "LayerNorm": (lambda: nn.LayerNorm(WIDTH), sequences, "layer_norm"),
        "LayerNorm, plain": (
            lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), rows, "layer_norm",
        ),
        "BatchNorm": (lambda: nn.BatchNorm(WIDTH), images, "batch_norm"),
        "BatchNorm, evaluating": (lambda: evaluating(nn.BatchNorm(WIDTH)), images, "batch_norm"),
        "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH), images, "group_norm"),
        "InstanceNorm": (lambda: nn.InstanceNorm(WIDTH), images, "instance_norm"),
    }  # fmt: skip


MODULES = (
    "Linear", "Linear without bias", "Conv", "Conv, strided", "Conv of groups", "Conv, depthwise",
    "Conv1d", "Conv1d_sp", "Conv3d", "ConvTranspose", "ConvTranspose3d", "MultiheadAttention",
    "MultiheadAttention, fused", "GELU", "ReLU", "SiLU", "LeakyReLU", "LeakyReLU, falling", "ELU",
    "Sigmoid", "Tanh", "Pool", "Pool of means", "AvgPool2d", "Pool3d", "AdaptiveAvgPool2d",
    "AdaptiveMaxPool2d", "Softmax", "LayerNorm", "LayerNorm, plain", "BatchNorm",
    "BatchNorm, evaluating", "GroupNorm", "InstanceNorm",
)  # fmt: skip


def functions():
    """Return a function of tensors, their shapes, and its operation.

    Each looks for Jittor's function when it is called: by then it is another.
    """
    import jittor as jt
    from jittor import nn

    def attend(*args, **kwargs):
        return jt.attention.scaled_dot_product_attention(*args, **kwargs)

    batch, turned = (2, 4, 6), (2, 6, 4)
    images, rows = (2, WIDTH, 6, 6), (6, WIDTH)
    heads = (2, 2, 5, 4)
    classes = jt.array(np.arange(6, dtype=np.int32) % 5)
    signs = jt.array((np.arange(48) % 2).reshape(6, 8).astype(np.float32)).stop_grad()
    mask = jt.array(np.triu(np.full((5, 5), -1e4, np.float32), 1)).stop_grad()
    return {
        "matmul": (lambda *v: nn.matmul(*v), [(4, 6), (6, 3)], "matmul"),
        "jt.matmul": (lambda *v: jt.matmul(*v), [batch, (6, 3)], "matmul"),
        "Var.matmul": (lambda a, b: a.matmul(b), [batch, turned], "matmul"),
        "@": (lambda a, b: a @ b, [(2, 3, 4, 6), (2, 3, 6, 4)], "matmul"),
        "matmul, vector": (lambda *v: nn.matmul(*v), [(4, 6), (6,)], "matmul"),
        "matmul, broadcast": (lambda *v: nn.matmul(*v), [(3, 1, 4, 6), turned], "matmul"),
        "bmm": (lambda *v: nn.bmm(*v), [batch, turned], "matmul"),
        "jt.bmm": (lambda *v: jt.bmm(*v), [batch, turned], "matmul"),
        "bmm_transpose": (lambda *v: nn.bmm_transpose(*v), [batch, batch], "matmul"),
        "baddbmm": (lambda *v: jt.baddbmm(*v), [(2, 4, 4), batch, turned], "matmul"),
        "einsum": (lambda a, b: jt.linalg.einsum("bij,bjk->bik", a, b), [batch, turned], "matmul"),
        "matmul_transpose": (lambda *v: nn.matmul_transpose(*v), [(4, 6), (3, 6)], "linear"),
        "linear": (lambda *v: nn.linear(*v), [(4, 6), (3, 6), (3,)], "linear"),
        "conv2d": (lambda x, w, b: nn.conv2d(x, w, b, 1, 1), [images, (4, 8, 3, 3), (4,)], "conv"),
        "conv_transpose": (
            lambda x, w: nn.conv_transpose(x, w, stride=2), [images, (8, 4, 2, 2)],
            "conv_transpose",
        ),
        "attention": (attend, [heads] * 3, "attention"),
        "attention, causal": (
            lambda q, k, v: attend(q, k, v, is_causal=True), [heads] * 3, "attention",
        ),
        "attention, masked": (lambda q, k, v: attend(q, k, v, mask), [heads] * 3, "attention"),
        "relu": (lambda *v: nn.relu(*v), [rows], "relu"),
        "gelu": (lambda *v: nn.gelu(*v), [rows], "gelu"),
        "silu": (lambda *v: nn.silu(*v), [rows], "silu"),
        "leaky_relu": (lambda *v: nn.leaky_relu(*v), [rows], "leaky_relu"),
        "elu": (lambda *v: nn.elu(*v), [rows], "elu"),
        "sigmoid": (lambda *v: jt.sigmoid(*v), [rows], "sigmoid"),
        "Var.tanh": (lambda x: x.tanh(), [rows], "tanh"),
        "softmax": (lambda x: nn.softmax(x, dim=0), [rows], "softmax"),
        "Var.softmax": (lambda x: x.softmax(1), [rows], "softmax"),
        "layer_norm": (lambda x, w, b: nn.layer_norm(x, (8,), w, b), [rows, (8,), (8,)],
                       "layer_norm"),
        "group_norm": (lambda x, w, b: nn.group_norm(x, 2, w, b), [images, (8,), (8,)],
                       "group_norm"),
        "instance_norm": (
            lambda x, w, b: nn.instance_norm(x, weight=w, bias=b), [images, (8,), (8,)],
            "instance_norm",
        ),
        "batch_norm": (
            lambda x: nn.batch_norm(x, jt.zeros((8,)), jt.ones((8,)) * 2), [images], "batch_norm",
        ),
        "log_softmax": (lambda x: nn.log_softmax(x, dim=1), [rows], "softmax"),
        "Var.log_softmax": (lambda x: x.log_softmax(1), [rows], "softmax"),
        "cross_entropy_loss": (lambda x: nn.cross_entropy_loss(x, classes), [(6, 5)], "loss"),
        "CrossEntropyLoss": (lambda x: nn.CrossEntropyLoss()(x, classes), [(6, 5)], "loss"),
        "nll_loss": (lambda x: nn.nll_loss(x, classes), [(6, 5)], "loss"),
        "mse_loss": (lambda *v: nn.mse_loss(*v), [rows, rows], "loss"),
        "MSELoss": (lambda x: nn.MSELoss()(x, signs), [rows], "loss"),
        "l1_loss": (lambda *v: nn.l1_loss(*v), [rows, rows], "loss"),
        "L1Loss": (lambda x: nn.L1Loss()(x, signs), [rows], "loss"),
        "smooth_l1_loss": (lambda *v: nn.smooth_l1_loss(*v), [rows, rows], "loss"),
        "bce_loss": (lambda x: nn.bce_loss(x * 0.1 + 0.5, signs), [rows], "loss"),
        "BCELoss": (lambda x: nn.BCELoss()(x * 0.1 + 0.5, signs), [rows], "loss"),
        "bce with logits": (
            lambda x: nn.binary_cross_entropy_with_logits(x, signs), [rows], "loss",
        ),
        "BCEWithLogitsLoss": (lambda x: nn.BCEWithLogitsLoss()(x, signs), [rows], "loss"),
        "KLDivLoss": (lambda x: nn.KLDivLoss()(x, signs * 0.5 + 0.1), [rows], "loss"),
    }  # fmt: skip


FUNCTIONS = (
    "matmul", "jt.matmul", "Var.matmul", "@", "matmul, vector", "matmul, broadcast", "bmm",
    "jt.bmm", "bmm_transpose", "baddbmm", "einsum", "matmul_transpose", "linear", "conv2d",
    "conv_transpose", "attention", "attention, causal", "attention, masked", "relu", "gelu",
    "silu", "leaky_relu", "elu", "sigmoid", "Var.tanh", "softmax", "Var.softmax", "layer_norm",
    "group_norm", "instance_norm", "batch_norm", "log_softmax", "Var.log_softmax",
    "cross_entropy_loss", "CrossEntropyLoss", "nll_loss", "mse_loss", "MSELoss", "l1_loss",
    "L1Loss", "smooth_l1_loss", "bce_loss", "BCELoss", "bce with logits", "BCEWithLogitsLoss",
    "KLDivLoss",
)  # fmt: skip


def test_all_cases_are_run(backend):
    assert tuple(modules()) == MODULES
    assert tuple(functions()) == FUNCTIONS


def tensors(shapes):
    """Return tensors whose values float16 holds exactly."""
    import jittor as jt

    values = [np.random.randn(*shape).astype(np.float16).astype(np.float32) for shape in shapes]
    return [jt.array(v) for v in values]


def outcome(run, targets):
    """Return values and gradients with respect to some tensors, and the type of the output."""
    import jittor as jt

    y = run()
    weights = jt.array((np.arange(int(y.numel())) % 7 - 3).astype(np.float32).reshape(y.shape))
    found = gradients((y.float32() * (weights if y.numel() > 1 else 1)).sum(), targets)
    return [y.float32().numpy(), *found], str(y.dtype)


def check(run, targets, operation, given):
    """Compare `run(half)` under autocast with plain float32."""
    expected, _ = outcome(lambda: run(False), targets)
    with xmem.autocast("float16") as block:
        found, dtype = outcome(lambda: run(given == "float16"), targets)
    assert all(g.dtype == np.float32 for g in found)
    assert error(found, expected) <= 1e-2
    computed = "float16" if operation in HALF or given == "float16" else "float32"
    ran = "float32" if operation in FLOAT32 else computed
    assert ran in block.operations[operation], block.operations
    # A logarithm stays float32, and so does what a float32 tensor was added to.
    assert dtype == computed or operation in ("loss", "softmax", "matmul")
    return block, dtype


@pytest.mark.filterwarnings("ignore:autocast:xmem.XmemWarning")
@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_right(backend, name, given):
    make, shape, operation = modules()[name]
    [x] = tensors([shape])
    module = make()
    check(lambda half: module(x.float16() if half else x), [*trained(module), x], operation, given)


@pytest.mark.filterwarnings("ignore:autocast:xmem.XmemWarning")
@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_right(backend, name, given):
    function, shapes, operation = functions()[name]
    inputs = tensors(shapes)

    def run(half):
        return function(*(x.float16() if half else x for x in inputs))

    block, dtype = check(run, inputs, operation, given)
    assert sum(block.operations[operation].values()) == 1, block.operations
    if operation == "loss":
        assert dtype == "float32"


@pytest.mark.filterwarnings("ignore:autocast:xmem.XmemWarning")
@pytest.mark.parametrize("weight", ["float16", "float32"])
def test_an_embedding_stays_in_the_type_of_its_weight(backend, weight):
    import jittor as jt
    from jittor import nn

    ids = jt.array(np.arange(6, dtype=np.int32).reshape(2, 3))
    module = nn.Embedding(7, 4)
    module.weight = table = jt.array(np.random.randn(7, 4).astype(weight))
    for look_up in (module, lambda i: nn.embedding(i, table)):
        with xmem.autocast() as block:
            found = look_up(ids)
        assert block.operations == {"embedding": {weight: 1}}
        assert str(found.dtype) == weight
        with xmem.autocast(keep_fp32=("embedding",)):
            assert str(look_up(ids).dtype) == "float32"


def test_a_recurrent_cell_is_right(backend):
    from jittor import nn

    cell = nn.LSTMCell(WIDTH, WIDTH)
    [x] = tensors([(3, WIDTH)])
    targets = [*trained(cell), x]
    expected, _ = outcome(lambda: cell(cell(x)[0], cell(x))[0], targets)
    with xmem.autocast() as block:
        found, _ = outcome(lambda: cell(cell(x)[0], cell(x))[0], targets)
    assert block.operations["linear"]["float16"] > 0
    assert error(found, expected) <= 1e-2


def test_attention_with_dropout_is_differentiated_with_what_it_drew(backend):
    """Zeros stay zeros: where the value's gradient is 0, the weight was dropped."""
    import jittor as jt

    q, k = tensors([(1, 4, 4), (1, 6, 4)])
    v = jt.array(np.eye(6, dtype=np.float32)[None])
    with xmem.autocast() as block:
        y = jt.attention.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert block.operations["attention"] == {"float16": 1}
    [gradient] = gradients(y.float32().sum(), [v])
    dropped = y.float32().numpy()[0].sum(0)
    assert np.allclose(gradient[0, :, 0], dropped, atol=5e-3)
    assert (dropped == 0).sum() < 6


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_updated_once(backend, training):
    from jittor import nn

    norms = nn.BatchNorm(WIDTH), nn.BatchNorm(WIDTH)
    [x] = tensors([(4, WIDTH, 3, 3)])
    for norm, half in zip(norms, (False, True), strict=True):
        norm.train() if training else norm.eval()
        with xmem.autocast(enabled=half, keep_fp32=()):
            y = norm(x.float16() if half else x)
        norm.eval()  # backward runs it in the mode of forward
        gradients((y.float32() ** 2).sum(), [*trained(norm), x])
    for name in ("running_mean", "running_var"):
        found, expected = (getattr(norm, name).numpy() for norm in reversed(norms))
        assert np.allclose(found, expected, atol=1e-6)
        assert training == (np.abs(expected - (name == "running_var")).max() > 0.01)


def reductions():
    """Return what leaves half's range where its input does not: functions and methods."""
    import jittor as jt
    from jittor import nn

    cases = {}
    for name, args in (
        ("sum", ()), ("mean", ()), ("norm", ()), ("sqr", ()), ("pow", (2.5,)), ("exp", ()),
        ("log", ()), ("prod", (1,)), ("cumsum", ()), ("cumprod", (1,)), ("var", ()), ("std", ()),
        ("log2", ()), ("rsqrt", ()), ("reduce_add", ()), ("reduce_multiply", (1,)),
        ("__pow__", (3,)), ("logsumexp", (1,)), ("expm1", ()), ("softplus", ()),
    ):  # fmt: skip
        for owner in (jt, jt.Var, nn):
            if name in owner.__dict__:
                cases[f"{owner.__name__.rpartition('.')[2]}.{name}"] = (owner, name, args)
    return cases


REDUCTIONS = (
    "jittor.sum", "Var.sum", "jittor.mean", "Var.mean", "jittor.norm", "Var.norm", "jittor.sqr",
    "Var.sqr", "jittor.pow", "Var.pow", "jittor.exp", "Var.exp", "jittor.log", "Var.log",
    "jittor.prod", "Var.prod", "jittor.cumsum", "Var.cumsum", "jittor.cumprod", "Var.cumprod",
    "jittor.var", "Var.var", "jittor.std", "Var.std", "jittor.log2", "Var.log2", "jittor.rsqrt",
    "Var.rsqrt", "jittor.reduce_add", "Var.reduce_add", "jittor.reduce_multiply",
    "Var.reduce_multiply", "Var.__pow__", "Var.logsumexp", "nn.logsumexp", "jittor.expm1",
    "nn.softplus",
)  # fmt: skip


def test_all_reductions_are_run(backend):
    assert tuple(reductions()) == REDUCTIONS


@pytest.mark.filterwarnings("ignore:autocast:xmem.XmemWarning")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_leaves_halfs_range_is_computed_in_float32(backend, name):
    import jittor as jt

    owner, attribute, args = reductions()[name]
    original = owner.__dict__[attribute]
    # Sums, squares, powers and products of these pass 65504; exp only there.
    top = 12.0 if "exp" in name or "softplus" in name else 300.0
    numbers = np.linspace(top / 2, top, 3 * 400).reshape(400, 3).astype(np.float16)
    if "exp" in name:
        numbers = np.ascontiguousarray(numbers)
    runs = []
    for half in (False, True):
        x = jt.array(numbers.astype(np.float32))
        if half:
            x = x.float16().start_grad()
        with xmem.autocast(enabled=half):
            y = getattr(owner, attribute)(x, *args)
        assert str(y.dtype) == "float32"
        runs.append([y.numpy(), *gradients((y.log() if y.max().item() > 0 else y).sum(), [x])])
    assert owner.__dict__[attribute] is original
    for plain, found in zip(*runs, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-7)


def test_a_loss_of_large_sums_is_finite_and_has_gradients(backend):
    import jittor as jt
    from jittor import nn

    layer = nn.Linear(64, 64)
    runs = []
    for half in (False, True):
        with xmem.autocast(enabled=half):
            loss = layer(jt.ones((4096, 64)) * 3).sqr().sum().sqrt()
        runs.append([loss.numpy(), *gradients(loss, trained(layer))])
    for plain, found in zip(*runs, strict=True):
        assert np.abs(found - plain).max() <= 5e-3 * np.abs(plain).max()


@pytest.mark.parametrize("attribute", ["sum", "mean", "sqr", "exp"])
def test_a_reduction_keeps_no_float32_copy(backend, attribute):
    """It keeps its input in half, which the layer before it has made, or nothing."""
    import gc

    import jittor as jt
    from jittor import nn

    layer, x = nn.Linear(64, 64), jt.ones((4096, 64)).stop_grad()
    jt.sync([x, *layer.parameters()])

    def held(loss_of):
        gc.collect()
        jt.sync_all(True)
        before = backend.measure.counters().allocated_bytes
        with xmem.autocast():
            y = layer(x)
            loss = loss_of(y)
        jt.sync_all(True)
        loss.sync()
        del y
        gc.collect()
        return backend.measure.counters().allocated_bytes - before

    kept = held(lambda y: getattr(y, attribute)().sum())
    half = 4096 * 64 * 2
    # The layer's input in half, and for `sqr` and `exp` its output in half.
    assert kept <= (1 if attribute in ("sum", "mean") else 2) * half + 4096, (kept, half)
