"""A hundred steps of streamed states on PyTorch, of all kinds of optimizers, bit for bit."""

import pytest

pytest.importorskip("torch")

from on_torch.stepping import KINDS, assert_same, away, offload, parameters, step

import xmem

pytestmark = pytest.mark.soak


@pytest.mark.filterwarnings("ignore:.*on a CPU the device's memory")
@pytest.mark.parametrize("to", ["disk", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_steps_are_the_plain_ones(kind, to):
    xmem.use("torch")
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    offload(streamed, to=to)
    for number in range(100):
        step(plain, number)
        step(streamed, number)
    assert away(streamed)
    assert_same(plain, streamed)
