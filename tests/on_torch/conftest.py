"""PyTorch in one process: one backend, fixed threads."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def backend():
    import xmem

    torch.set_num_threads(2)
    return xmem.use("torch", device="cpu")


@pytest.fixture(autouse=True)
def _in_use(backend):
    import xmem

    xmem.use("torch", device="cpu")
    torch.manual_seed(0)
    yield
    backend.measure.set_limit(None)
