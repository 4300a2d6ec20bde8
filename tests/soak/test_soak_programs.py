"""Long campaigns of random programs, new ones in each run; a failure prints the smallest found."""

import importlib.util

import pytest
from hypothesis import given, settings
from programs import QUIET, programs

import xmem

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::xmem.XmemWarning")]

CAMPAIGN = settings(QUIET, max_examples=200, print_blob=True)


def needs(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    xmem.use(framework, device="cpu")


def test_200_random_programs_on_pytorch_give_the_same_gradients():
    needs("torch")
    from on_torch.test_torch_programs import SIZES, difference

    @CAMPAIGN
    @given(programs(SIZES))
    def campaign(program):
        assert difference(program) == []

    campaign()


def test_200_random_programs_on_jittor_give_the_same_gradients():
    """Compiles new kernels in each run: 25 minutes."""
    needs("jittor")
    from on_jittor.test_jittor_programs import SIZES, difference

    @CAMPAIGN
    @given(programs(SIZES))
    def campaign(program):
        assert difference(program) == []

    campaign()
