"""Jittor in one process: one backend, fixed threads and seeds."""

import gc
import os

import pytest

pytest.importorskip("xmem")
import importlib.util

if importlib.util.find_spec("jittor") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def backend():
    import xmem

    os.environ.setdefault("OMP_NUM_THREADS", "2")
    return xmem.use("jittor", device="cpu")


@pytest.fixture(autouse=True)
def _in_use(request):
    if "backend" not in request.fixturenames:
        yield
        return
    backend = request.getfixturevalue("backend")
    import jittor as jt
    import numpy as np

    import xmem

    xmem.use("jittor", device="cpu")
    jt.set_global_seed(0)
    np.random.seed(0)
    yield
    backend.measure.set_limit(None)
    gc.collect()
    jt.sync_all(True)


@pytest.fixture(params=["every", "mixed"])
def ops(request):
    """Return a schedule of four stages."""
    from plan_runs import PLANS, unit_chain

    from xmem.planner import parse_ops, simulate

    found = parse_ops(PLANS[request.param])
    simulate(unit_chain(4), found)
    return found
