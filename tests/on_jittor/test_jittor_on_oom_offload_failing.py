"""`on_oom="offload"`: bytes that do not come back, and memory of which only a part is noted."""

import gc

import pytest
from chain import MIB, chain, error, normal, trained
from test_jittor_on_oom_offload import limit_of, moved, noted, put_back, stepped

import xmem

__all__ = ["put_back"]  # the fixture


def test_bytes_that_do_not_come_back_are_an_offload_error(backend):
    import jittor as jt
    from xmem_jittor.late import late

    net, x = chain(12), normal(2048, 256)
    plain, _ = stepped(net, x)
    xmem.pool.configure(limit=limit_of(16 * MIB), on_oom="offload")
    loss = (net(x) ** 2).mean()
    loss.sync()
    assert noted()[1] > 0
    [depot] = late()._depots.values()
    for number in range(1, 1000):
        depot.drop(number)
    with pytest.raises(xmem.OffloadError, match=r"2\.00 MiB could not be read back") as told:
        jt.sync(jt.grad(loss, trained(net), retain_graph=False))
    assert isinstance(told.value.__cause__, RuntimeError)
    del loss, told, depot
    gc.collect()
    xmem.pool.configure(limit=None, on_oom="raise")
    xmem.active().pool.recover()
    assert noted() == (0, 0)
    assert error(stepped(net, x)[0], plain) <= 1e-6


def test_of_an_allocation_whose_part_is_noted_the_part_leaves(backend):
    """Jittor lets a slice share the memory that it is cut from, all of which is free then."""
    import jittor as jt
    from jittor import nn

    class Half(nn.Module):
        def __init__(self):
            self.wide, self.narrow = nn.Linear(256, 256), nn.Linear(256, 256)

        def execute(self, x):
            y = self.wide(x)
            end = y[y.shape[0] // 2 :]
            return jt.concat([self.narrow(end * end), self.narrow(jt.sin(end))], 0)

    net, x = nn.Sequential(*[Half() for _ in range(6)]), normal(2048, 256)
    plain, _ = stepped(net, x)
    xmem.pool.configure(limit="1TiB", on_oom="offload")
    _, peak = stepped(net, x)
    least = int(peak / 1.6)
    xmem.pool.configure(limit=limit_of(least))
    before = moved()
    found, reached = stepped(net, x)
    assert error(found, plain) <= 1e-6
    assert reached <= least
    # Of the first layers' outputs, 2 MiB each, half.
    assert 0 < moved() - before <= 0.8 * (peak - reached), (moved() - before, peak, reached)
    assert noted() == (0, 0)
