"""The names of operations, the same on every framework: what `keep_fp32` takes."""

OPERATIONS: tuple[str, ...] = (
    "linear",
    "matmul",
    "conv",
    "conv_transpose",
    "attention",
    "gelu",
    "relu",
    "softmax",
    "layer_norm",
    "batch_norm",
    "group_norm",
)
