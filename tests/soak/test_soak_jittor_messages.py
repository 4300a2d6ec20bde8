"""Tensors of more than 2^31 elements between two ranks on Jittor; takes 9 GB."""

import pytest
import ranks

pytestmark = pytest.mark.soak

PROGRAM = """
import jittor as jt
from xmem_jittor import messages

count = 2**31 + 1001
marks = [0, 1, 2**31 - 1, 2**31, count - 1]


def read(x):
    return [int(x.data[at]) for at in marks]


x = jt.ones((count,), "uint8")
x.sync()
x.data[marks] = [here.rank + 2, 3, 4, 5, 6 + here.rank]
found = {"before": read(x)}
y = messages.broadcast(x if here.rank == 1 else None, 1, x.shape, "uint8")
y.sync()
found["broadcast"] = read(y)
del y
if here.rank == 0:
    messages.wait(messages.send(x, 1))
    messages.token().sync()
else:
    y = messages.receive(x.shape, "uint8", 0)
    y.sync()
    found["received"] = read(y)
    del y
x = messages.all_reduce(x, in_place=True)
x.sync()
found["summed"] = read(x)
report(**found)
xd.destroy()
"""


def test_more_than_two_to_the_31_elements_arrive_whole(tmp_path):
    reports = ranks.run("jittor", PROGRAM, tmp_path, ranks=2, timeout=300.0, limit=900.0)
    zero, one = ([2 + rank, 3, 4, 5, 6 + rank] for rank in range(2))
    for report in reports:
        assert report["broadcast"] == one
        assert report["summed"] == [a + b for a, b in zip(zero, one, strict=True)]
    assert reports[1]["received"] == zero
