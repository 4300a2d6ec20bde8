"""Results as a run would give them, without a run."""

from xmem.report.model import Case, Machine, Report, Result

MACHINE = Machine(system="Linux x86_64", processor_count=2, memory_bytes=2**33, python="3.11.7")
MIB = 2**20


def make_result(workload="mlp", technique="baseline", backend="torch", **changes):
    """Return a result that ended well: static 10 MiB, above it 20 MiB, in half a second."""
    above = changes.pop("above_static_bytes", 20 * MIB)
    static = changes.pop("static_bytes", 10 * MIB)
    case = Case(workload=workload, technique=technique, backend=backend)
    fields = {
        "status": "ok",
        "device": "cpu",
        "losses": (2.0, 1.5, 1.25, 1.0, 0.5),
        "step_seconds": 0.5,
        "step_seconds_spread": 0.01,
        "static_bytes": static,
        "peak_allocated_bytes": static + above,
        "peak_above_static_bytes": above,
        "peaks_bytes": (static + above,) * 3,
        "by_category": {"parameter": static, "activation": above},
        "source": "allocator",
        "framework_version": "1.0",
        "distribution": "xmem-train 0.1.0",
        "settings": {"threads": "2"},
        "machine": MACHINE,
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 3.0,
    }
    return Result(case=changes.pop("case", case), **{**fields, **changes})


def make_bad(status, reason, **names):
    """Return a result that ended badly."""
    good = make_result(**names)
    return Result(case=good.case, status=status, reason=reason, machine=MACHINE, seconds=1.0)


def make_fake_report(*results):
    """Return a report of these results."""
    return Report(
        results=results,
        created="2026-01-01T00:00:00+00:00",
        xmem_version="0.1.0",
        machine=MACHINE,
    )
