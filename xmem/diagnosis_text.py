"""Diagnoses for people: the message of the error, and the Markdown page of a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xmem.diagnosis import Advice, Diagnosis

_OWNERS_IN_TEXT = 5
_ADVICE_IN_TEXT = 6
_UPDATED = "Some parameters may have been updated and others not: go on from a checkpoint of yours."


def text(diagnosis: Diagnosis) -> str:
    """Return some lines; the first says what happened and contains "out of memory"."""
    return "\n".join(_text(diagnosis))


def _text(diagnosis: Diagnosis) -> Iterator[str]:
    yield headline(diagnosis)
    if diagnosis.may_be_updated:
        yield _UPDATED
    categories = sorted((diagnosis.by_category or {}).items(), key=lambda item: -item[1])
    if categories:
        listed = ", ".join(f"{name} {format_size(size)}" for name, size in categories if size)
        yield f"Allocated: {listed}."
    if diagnosis.owners:
        yield "Largest owners:"
        for owner in diagnosis.owners[:_OWNERS_IN_TEXT]:
            yield f"  {format_size(owner.size_bytes):>11}  {owner.name} ({owner.category})"
    if diagnosis.advice:
        yield "What to try, by expected saving:"
        for advice in diagnosis.advice[:_ADVICE_IN_TEXT]:
            yield f"  {_saving(advice):>11}  {advice.call}  # {advice.why}"


def headline(diagnosis: Diagnosis) -> str:
    """Return the first line."""
    # Other libraries look for " out of memory." in the text of an error.
    parts = [f"{diagnosis.device.upper()} out of memory."]
    where = _where(diagnosis)
    if diagnosis.requested_bytes is None:
        parts.append(f"A request in {where} was refused; how much it asked for is not known.")
        if diagnosis.allocated_bytes is not None:
            parts.append(f"{format_size(diagnosis.allocated_bytes)} are allocated.")
        return " ".join(parts)
    parts.append(f"{format_size(diagnosis.requested_bytes)} were requested in {where};")
    parts.append(f"{format_size(diagnosis.allocated_bytes)} are allocated")
    if diagnosis.limit_bytes is None:
        parts.append("and the system has no more.")
    else:
        missing = format_size(diagnosis.missing_bytes)
        parts.append(f"and the limit is {format_size(diagnosis.limit_bytes)}: {missing} too few.")
    return " ".join(parts)


def _where(diagnosis: Diagnosis) -> str:
    phase = {"optimizer": "the optimizer's step", "outside": "no phase of a step"}
    where = phase.get(diagnosis.phase, diagnosis.phase)
    return f"{where} of {diagnosis.module}" if diagnosis.module else where


def _saving(advice: Advice) -> str:
    if not advice.expected_bytes:
        return "?" if advice.expected_bytes is None else "-"
    return format_size(advice.expected_bytes)


def markdown(diagnosis: Diagnosis) -> str:
    """Return a page: what happened, where the bytes were, what to try, and the settings."""
    parts = [
        ["# Out of memory", "", _escaped(headline(diagnosis))],
        [_UPDATED] if diagnosis.may_be_updated else [],
        _table(("what", "value"), _figures(diagnosis)),
    ]
    if diagnosis.by_category is not None:
        rows = sorted(diagnosis.by_category.items(), key=lambda item: -item[1])
        shown = [(name, _exact(size), _share(size, diagnosis)) for name, size in rows if size]
        parts.append(["## By category", "", *_table(("category", "size", "share"), shown)])
    if diagnosis.owners:
        owners = [
            (o.name, o.category, str(o.block_count), _exact(o.size_bytes)) for o in diagnosis.owners
        ]
        parts.append(
            ["## Largest owners", "", *_table(("owner", "category", "blocks", "size"), owners)]
        )
    if diagnosis.advice:
        tried = [(f"`{a.call}`", a.why, _saving(a), _enough(a)) for a in diagnosis.advice]
        parts.append(
            ["## What to try", "", *_table(("call", "what it does", "saves", "enough"), tried)]
        )
    if diagnosis.stack:
        inward = ["From the block inward:", "", *(f"- `{line}`" for line in diagnosis.stack)]
        parts.append(["## Where", "", *inward])
    if diagnosis.message:
        said = [f"    {line}" for line in diagnosis.message.splitlines()]
        parts.append(["## What the framework said", "", *said])
    if diagnosis.settings:
        parts.append(["## Settings", "", *_table(("setting", "value"), diagnosis.settings.items())])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _figures(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    sizes = {
        "requested": diagnosis.requested_bytes,
        "allocated": diagnosis.allocated_bytes,
        "limit": diagnosis.limit_bytes,
        "missing": diagnosis.missing_bytes,
        "reserved by the pool": diagnosis.reserved_bytes,
        "largest free piece": diagnosis.largest_free_bytes,
        "process": diagnosis.process_bytes,
    }
    share = diagnosis.fragmentation
    return [
        ("backend", f"{diagnosis.backend} ({diagnosis.framework_version}), {diagnosis.device}"),
        ("xmem", diagnosis.xmem_version),
        ("phase", diagnosis.phase),
        ("module", diagnosis.module or "-"),
        *((name, _exact(size)) for name, size in sizes.items()),
        ("fragmentation", "-" if share is None else f"{share:.1%}"),
    ]


def _exact(size_bytes: int | None) -> str:
    if size_bytes is None or size_bytes < 1024:
        return format_size(size_bytes)
    return f"{format_size(size_bytes)} ({size_bytes:,} B)"


def _share(size_bytes: int, diagnosis: Diagnosis) -> str:
    return f"{size_bytes / diagnosis.allocated_bytes:.1%}" if diagnosis.allocated_bytes else "-"


def _enough(advice: Advice) -> str:
    return {True: "yes", False: "no", None: "?"}[advice.is_enough]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(map(_escaped, row)) for row in rows]
    return [f"| {line} |" for line in lines]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
