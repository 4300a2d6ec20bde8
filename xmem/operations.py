"""The names of operations, the same on every framework: what `keep_fp32` takes and reports name."""

HALF: tuple[str, ...] = ("linear", "matmul", "conv", "conv_transpose", "attention")
"""Computed in half precision under autocast."""

FOLLOWING: tuple[str, ...] = (
    "embedding",
    "gelu",
    "relu",
    "silu",
    "leaky_relu",
    "elu",
    "sigmoid",
    "tanh",
    "pool",
)
"""Computed in what their input is in."""

FLOAT32: tuple[str, ...] = (
    "softmax",
    "layer_norm",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "loss",
)
"""Computed in float32 under autocast."""

OPERATIONS: tuple[str, ...] = (*HALF, *FOLLOWING, *FLOAT32)
