"""What every backend must offer, whatever its gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from xmem import protocols
from xmem.backend import CAPABILITIES
from xmem.conformance.plugin import chosen_cases

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.conformance.plugin import Results

_PROTOCOLS: dict[str, Any] = {
    "measure": protocols.Measure,
    "checkpoint": protocols.Checkpoint,
    "precision": protocols.Precision,
    "training": protocols.Training,
    "models": protocols.Models,
}


@pytest.mark.parametrize("capability", ["measure", "training", "models"])
def test_it_offers_what_the_suite_stands_on(backend: Backend, capability: str) -> None:
    """Without these nothing can be compared: a backend that lacks one does not conform."""
    assert backend.offers(capability)


def test_what_it_offers_has_every_method_of_its_protocol(backend: Backend) -> None:
    """And says what is missing inside a capability, with a reason."""
    for name in set(backend.capabilities) & set(_PROTOCOLS):
        capability = getattr(backend, name)
        assert isinstance(capability, _PROTOCOLS[name]), name
        assert all(reason for reason in capability.gaps.values()), name
    assert set(backend.capabilities) <= set(CAPABILITIES)


def test_at_least_one_workload_runs(
    backend_name: str, request: pytest.FixtureRequest, results: Results
) -> None:
    """A suite in which everything is unsupported has shown nothing."""
    cases = [
        c
        for c in chosen_cases(request.config)
        if c.backend == backend_name and c.technique == "baseline"
    ]
    found = {c.workload: results(c) for c in cases}
    assert "ok" in {r.status for r in found.values()}, {w: r.reason for w, r in found.items()}
