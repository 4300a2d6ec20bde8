"""The pytest plugin of the suite: `-p xmem.conformance.plugin`, never a `pytest11` entry point.

It adds the options that choose backends, workloads and techniques, and hands out results: each
case runs once per session, in a process of its own, when the first test asks for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import xmem
from xmem.conformance import runner
from xmem.conformance.techniques import TECHNIQUES, technique
from xmem.report.model import Case, Result
from xmem.workloads import workload
from xmem.workloads.catalog import WORKLOADS

if TYPE_CHECKING:
    from xmem.backend import Backend

Results = Callable[[Case], Result]

_LOG_LINES = 80

# How a test ends that is about what the backend does not offer: skipped, or with --no-gaps failed.
_gap: Callable[[str], NoReturn] = pytest.skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("xmem", "xmem conformance")
    group.addoption("--backend", action="append", default=[], help="backend; may be repeated")
    group.addoption("--workload", action="append", default=[], help="workload; may be repeated")
    group.addoption("--technique", action="append", default=[], help="technique; may be repeated")
    group.addoption("--preset", default="quick", help="how large: quick, standard or paper")
    group.addoption("--no-gaps", action="store_true", help="what is not offered is a failure")
    group.addoption("--device", default="auto", help="auto, cpu or cuda")
    group.addoption("--threads", type=int, default=2, help="CPU threads; peaks depend on them")
    group.addoption("--results", default=None, help="keep the cases' files in this folder")
    group.addoption("--resume-results", action="store_true", help="take results that lie there")
    group.addoption(
        "--case-timeout", type=float, default=runner.TIMEOUT_SECONDS, help="seconds for one case"
    )
    group.addoption(
        "--retries", type=int, default=0, help="run a case that ended as an error so often again"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the suite's marker, and check the options before anything runs."""
    config.addinivalue_line("markers", "technique(*names): only for cases of these techniques")
    global _gap
    if not backends(config):
        from xmem.plugins import backend_infos

        names = ", ".join(info.name for info in backend_infos())
        raise pytest.UsageError(f"name what to test: --backend NAME. Installed: {names}.")
    try:
        chosen_cases(config)
    except xmem.XmemError as error:
        raise pytest.UsageError(str(error)) from error
    _gap = pytest.fail if config.getoption("--no-gaps") else pytest.skip


def backends(config: pytest.Config) -> list[str]:
    """Return the backends that were asked for."""
    return list(dict.fromkeys(config.getoption("--backend")))


def chosen_cases(config: pytest.Config) -> list[Case]:
    """Return the matrix that was asked for; baselines come with whatever needs them."""
    techniques = config.getoption("--technique") or list(TECHNIQUES)
    for name in techniques:
        technique(name)
    workloads = config.getoption("--workload") or list(WORKLOADS)
    for name in workloads:
        workload(name, config.getoption("--preset"))
    return runner.matrix(
        backends(config),
        list(dict.fromkeys(workloads)),
        list(dict.fromkeys(["baseline", *techniques])),
        preset=config.getoption("--preset"),
        device=config.getoption("--device"),
        threads=config.getoption("--threads"),
        save_gradients=True,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests that ask for `case` or `backend_name` one run for each."""
    config = metafunc.config
    if "case" in metafunc.fixturenames:
        cases = chosen_cases(config)
        only = metafunc.definition.get_closest_marker("technique")
        if only is not None:
            cases = [c for c in cases if c.technique in only.args]
        metafunc.parametrize("case", cases, ids=[c.name for c in cases])
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends(config))
    if "pair" in metafunc.fixturenames:
        names = backends(config)
        pairs = [
            (a, b)
            for a in chosen_cases(config)
            for b in chosen_cases(config)
            if a.technique == b.technique == "baseline"
            and a.workload == b.workload
            and names.index(a.backend) < names.index(b.backend)
        ]
        metafunc.parametrize("pair", pairs, ids=[f"{a.name}-{b.backend}" for a, b in pairs])


@pytest.fixture(scope="session")
def results_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Where the cases' files lie."""
    chosen = request.config.getoption("--results")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("xmem-results")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, results_folder: Path) -> Results:
    """Return the result of a case, running it if this session has not."""
    known: dict[Case, Result] = {}
    timeout = request.config.getoption("--case-timeout")
    resume = request.config.getoption("--resume-results")
    retries = request.config.getoption("--retries")

    def result(case: Case) -> Result:
        if case not in known:
            [known[case]] = runner.run_cases(
                [case], results_folder, resume=resume, timeout_seconds=timeout, retries=retries
            )
            again = [told for told in known[case].warnings if told.startswith("it was run again")]
            if again:
                warnings.warn(f"{case.name}: {again[0]}", xmem.XmemWarning, stacklevel=1)
            if known[case].status not in ("ok", "unsupported"):
                _print_log(runner.result_path(case, results_folder).with_suffix(".log"))
        return known[case]

    return result


def _print_log(path: Path) -> None:
    """Show what a worker printed last, with the first test that asked for its case."""
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(["what the worker printed last:", *lines[-_LOG_LINES:]]))


@pytest.fixture
def result(case: Case, results: Results) -> Result:
    """The result of the test's own case; skips what the backend declares it does not offer."""
    found = results(case)
    return ok(found)


@pytest.fixture
def baseline(case: Case, results: Results) -> Result:
    """The result of the same backend and workload without any technique."""
    import msgspec

    return ok(results(msgspec.structs.replace(case, technique="baseline")))


@pytest.fixture
def backend(backend_name: str, request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend in use in this process; one that cannot run fails the test."""
    chosen = xmem.use(backend_name, device=request.config.getoption("--device"))
    yield chosen
    if chosen.offers("measure") and "limit" not in chosen.measure.gaps:
        chosen.measure.set_limit(None)


def gap(reason: str) -> NoReturn:
    """End a test that is about what the backend does not offer."""
    _gap(reason)


def ok(result: Result) -> Result:
    """Return a result that ended well; what the backend does not offer is a gap, all else fails."""
    if result.status == "unsupported":
        gap(result.reason)
    if result.status != "ok":
        pytest.fail(f"{result.case.name} ended as {result.status}: {result.reason}")
    return result


def need(backend: Backend, *capabilities: str) -> None:
    """End a test as a gap if the backend does not offer what it is about."""
    for capability in capabilities:
        if not backend.offers(capability):
            gap(f"{backend.name} does not offer {capability}")


def refuse_gap(capability: Any, feature: str) -> None:
    """End a test about a feature that the capability declares missing as a gap."""
    if feature in capability.gaps:
        gap(f"declared gap: {feature}: {capability.gaps[feature]}")
