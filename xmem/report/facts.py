"""What a report says besides its figures: where it was made, how bytes were counted, what failed.

As in `xmem.report.tables`, everything here is text that its renderer has yet to make harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmem.report.compare import LONG_RUN_LOSS_TOLERANCE, compare_techniques, final_loss
from xmem.report.model import Report, Result, Status
from xmem.report.tables import (
    Cell,
    Table,
    case_label,
    format_seconds,
    loss_cell,
    status_cell,
    technique_label,
)
from xmem.sizes import format_size

MEANING = (
    "Peak is the most memory that live tensors held at once inside one training step, counted"
    " from what the framework's allocator was asked for; static is what was already there before"
    " the step (parameters, optimizer state, the batch).",
    "Techniques change what lies above static, so compare that between techniques on one backend;"
    " absolute bytes of two frameworks differ also because their kernels need different scratch.",
)
SOURCES = {
    "allocator": "every request to the framework's allocator; exact, not sampled",
    "cuda": "the framework's own counters of its CUDA allocator; exact, not sampled",
    "profiler": "the framework's profiler events, where no compiler was there for the allocator",
}


@dataclass(frozen=True)
class Failure:
    """Cases that ended the same way for the same reason."""

    status: Status
    cases: tuple[str, ...]
    reason: str


def failures(report: Report) -> tuple[Failure, ...]:
    """Gather what did not end well, once for each reason."""
    groups: dict[tuple[Status, str], list[str]] = {}
    for result in report.results:
        if result.status != "ok":
            groups.setdefault((result.status, result.reason), []).append(case_label(result))
    return tuple(Failure(s, tuple(cases), reason) for (s, reason), cases in groups.items())


def warnings(report: Report) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Gather each warning with the cases that gave it, and doubts about the report itself."""
    groups: dict[str, list[str]] = {}
    for result in report.results:
        for message in result.warnings:
            groups.setdefault(message, []).append(case_label(result))
    for backend, results in _by_backend(report).items():
        versions = sorted({r.framework_version for r in results if r.framework_version})
        if len(versions) > 1:
            groups[
                f"results of {backend} come from different versions ({', '.join(versions)});"
                " run the comparison again without --resume"
            ] = [case_label(r) for r in results]
    return tuple((message, tuple(dict.fromkeys(cases))) for message, cases in groups.items())


def _by_backend(report: Report) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in report.results:
        found.setdefault(result.case.backend, []).append(result)
    return found


def curves_table(report: Report) -> Table | None:
    """Where the losses of long trainings go; None where there are none."""
    rows = [r for r in report.results if r.status == "ok" and r.case.steps is not None]
    if not rows:
        return None
    differences = {id(c.result): c for c in compare_techniques(report)}
    return Table(
        title="Loss curves",
        columns=(
            "Workload", "Technique", "Backend", "Half type", "Steps", "First", "At a quarter",
            "At half", "At three quarters", "At the end", "End vs baseline",
        ),
        numeric=7,
        rows=tuple(
            (
                Cell(r.case.workload),
                Cell(technique_label(r.case)),
                Cell(r.case.backend),
                Cell(r.dtype or "-"),
                Cell(str(len(r.losses))),
                _loss_cell(r.losses[0]),
                *(
                    _loss_cell(final_loss(r.losses[: max(1, len(r.losses) * part // 4)]))
                    for part in (1, 2, 3, 4)
                ),
                loss_cell(differences[id(r)].loss_difference, differences[id(r)].losses_agree),
            )
            for r in rows
        ),
        note=(
            "Every step has data of its own, the same for all. After the first step, a loss is the"
            " mean of the last tenth of the steps up to there; the ends may be apart by"
            f" {LONG_RUN_LOSS_TOLERANCE:.0%}."
        ),
    )  # fmt: skip


def _loss_cell(loss: float | None) -> Cell:
    return Cell("not finite", "bad") if loss is None else Cell(f"{loss:.4f}")


def counts_table(report: Report) -> Table | None:
    """Allocated, reserved and process bytes side by side, and what a technique was applied to."""
    rows = [r for r in report.results if r.status == "ok"]
    if not rows:
        return None
    return Table(
        title="Allocated, reserved, process",
        columns=(
            "Workload", "Technique", "Backend", "Half type", "Applied to", "Block forwards",
            "Allocations", "Peak allocated", "Peak reserved", "Process peak", "GPU process",
        ),
        numeric=7,
        rows=tuple(
            (
                Cell(r.case.workload),
                Cell(technique_label(r.case)),
                Cell(r.case.backend),
                Cell(r.dtype or "-"),
                Cell(_count(r.applied_to)),
                Cell(_block_forwards(r)),
                Cell(_count(r.allocation_count)),
                Cell(format_size(r.peak_allocated_bytes)),
                Cell(format_size(r.peak_reserved_bytes)),
                Cell(format_size(r.peak_process_bytes)),
                Cell(format_size(r.gpu_process_bytes)),
            )
            for r in rows
        ),
        note=(
            "Allocated: asked for by live tensors. Reserved: held by the framework's pool, cached"
            " blocks included. Process: the resident high-water mark of the whole process, with"
            " the interpreter and the framework's libraries; it does not fall when tensors are"
            " freed. Block forwards: calls in one step over blocks; recomputation doubles them."
        ),
    )  # fmt: skip


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _block_forwards(result: Result) -> str:
    if result.block_forward_calls is None:
        return "-"
    return f"{result.block_forward_calls} / {_count(result.block_count)}"


def machine_table(report: Report) -> Table:
    """Where the report was made, and with what."""
    cases = [r.case for r in report.results]
    total = [r.seconds for r in report.results if r.seconds is not None]
    limits = {c.limit_bytes for c in cases}
    facts = [
        ("Machine", report.machine.system),
        ("Processors", str(report.machine.processor_count)),
        ("Memory", format_size(report.machine.memory_bytes)),
        ("Python", report.machine.python),
        ("xmem", report.xmem_version),
        ("Made", report.created),
        ("Preset", _listed({c.preset for c in cases})),
        ("Device asked for", _listed({c.device for c in cases})),
        ("CPU threads", _listed({str(c.threads) for c in cases})),
        ("Ranks", _listed({str(c.world) for c in cases})),
        ("Cases", f"{len(cases)}, {format_seconds(sum(total))} in all"),
    ]
    if limits - {None}:
        facts.append(("Memory limit", _listed({format_size(limit) for limit in limits})))
    return Table("Machine", ("What", "Value"), 0, tuple((Cell(a), Cell(b)) for a, b in facts))


def backends_table(report: Report) -> Table:
    """The backends with their versions, and how each counted bytes."""
    rows = []
    for name, results in _by_backend(report).items():
        sources = sorted({r.source for r in results if r.source})
        rows.append(
            (
                Cell(name),
                Cell(_listed({r.framework_version for r in results})),
                Cell(_listed({r.distribution for r in results})),
                Cell(_listed({r.device for r in results})),
                Cell("; ".join(f"{s}: {SOURCES.get(s, 'as the backend says')}" for s in sources)),
            )
        )
    return Table(
        "Backends and how bytes were counted",
        ("Backend", "Framework version", "Distribution", "Device", "Bytes counted by"),
        0,
        tuple(rows),
    )


def statuses_table(report: Report) -> Table:
    """How many cases of each backend ended how."""
    rows = []
    for name, results in _by_backend(report).items():
        for status in dict.fromkeys(r.status for r in results):
            count = sum(r.status == status for r in results)
            rows.append((Cell(name), status_cell(status), Cell(str(count))))
    return Table("How cases ended", ("Backend", "Status", "Cases"), 1, tuple(rows))


def settings_table(report: Report) -> Table | None:
    """The framework flags that change memory or time; None where none is known."""
    rows = []
    for name, results in _by_backend(report).items():
        keys = dict.fromkeys(key for r in results for key in r.settings)
        for key in keys:
            values = {r.settings[key] for r in results if key in r.settings}
            rows.append((Cell(name), Cell(key), Cell(_listed(values))))
    if not rows:
        return None
    return Table("Framework settings", ("Backend", "Setting", "Value"), 0, tuple(rows))


def _listed(values: set[str | None] | set[str]) -> str:
    return ", ".join(sorted(v for v in values if v)) or "-"
