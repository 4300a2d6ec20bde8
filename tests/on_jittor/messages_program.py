"""What ranks run in the tests of messages: tensors of all types, and what NumPy says of them."""

import numpy as np

TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
FLOATS = TYPES[9:]
SHAPES = ((0,), (1,), (3, 5), (1031,))


def values(rank, dtype, shape, seed=0):
    """Return numbers, float32 that holds bfloat16 exactly where that is the type."""
    drawn = np.random.default_rng([rank, seed, *shape])
    if dtype == "bool":
        return drawn.random(shape) > 0.7
    if dtype in FLOATS:
        x = (drawn.standard_normal(shape) * 3).astype("float64")
        return rounded(x, dtype)
    info = np.iinfo(dtype)
    return drawn.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def rounded(x, dtype):
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.astype("float32").view("uint32")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view("float32")


def combined(parts, op, dtype):
    """Return what ranks get: halves added up in float32, whole numbers wrapped around."""
    if dtype == "bool":
        return np.any(parts, axis=0)
    wide = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    total = parts[0].astype(wide)
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            part = part.astype(wide)
            total = np.maximum(total, part) if op == "max" else (total + part).astype(wide)
        if op == "mean":
            total = (total / np.asarray(len(parts), wide)).astype(wide)
    return rounded(total, dtype) if dtype in FLOATS else total


def to_tensor(x, dtype):
    """Return a tensor with the same bits; Jittor's own casts take no part in it."""
    import jittor as jt
    from xmem_jittor import message_nodes

    if dtype != "bfloat16":
        return jt.array64(x)
    halves = jt.array((x.astype("float32").view("uint32") >> 16).astype("uint16"))
    return message_nodes.operation([halves], x.shape, dtype, memory=message_nodes.SHARED)[0]


def to_numbers(tensor):
    from xmem_jittor import message_nodes

    if str(tensor.dtype) != "bfloat16":
        return tensor.numpy()
    [bits] = message_nodes.operation([tensor], tensor.shape, "uint16", memory=message_nodes.SHARED)
    return (bits.numpy().astype("uint32") << 16).view("float32")


def same(found, expected):
    return bool(
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


def check_types(rank, size, types=TYPES, shapes=SHAPES):
    """Run every kind of message with every type and shape; returns what was wrong."""
    wrong, count = [], 0

    def check(what, tensor, expected):
        nonlocal count
        count += 1
        if not same(to_numbers(tensor), expected):
            wrong.append(f"{what}: {to_numbers(tensor).ravel()[:5]}, not {expected.ravel()[:5]}")

    for dtype in types:
        for shape in shapes:
            check_one(rank, size, dtype, shape, check)
    return wrong, count


def check_one(rank, size, dtype, shape, check):
    from xmem_jittor import messages

    label = f"of {dtype} {shape}"
    parts = [values(r, dtype, shape) for r in range(size)]
    mine = to_tensor(parts[rank], dtype)
    for op in ("sum", "mean", "max") if dtype in FLOATS else ("sum", "max"):
        check(f"all_reduce {op} {label}", messages.all_reduce(mine, op), combined(parts, op, dtype))
    owner = size - 1
    reduced = messages.reduce(mine, owner)
    if rank == owner:
        check(f"reduce {label}", reduced, combined(parts, "sum", dtype))
    x = mine if rank == 1 else None
    check(f"broadcast {label}", messages.broadcast(x, 1, shape, dtype), parts[1])
    check(f"all_gather {label}", messages.all_gather(mine), np.stack(parts))
    many = [values(r, dtype, (size, *shape), 1) for r in range(size)]
    mine = to_tensor(many[rank], dtype)
    scattered = messages.reduce_scatter(mine, "max")
    check(f"reduce_scatter {label}", scattered, combined(many, "max", dtype)[rank])
    exchanged = np.stack([part[rank] for part in many])
    check(f"all_to_all {label}", messages.all_to_all(mine), exchanged)
    after, before = (rank + 1) % size, (rank - 1) % size
    sending = messages.send(mine, after)
    received = messages.receive((size, *shape), dtype, before)
    messages.wait(sending)
    check(f"receive {label}", received, many[before])
    messages.token().sync()
