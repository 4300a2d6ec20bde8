"""Where the bytes were when memory ran out, as data: recorded first, rendered later.

`xmem.diagnosing` makes one, `xmem.diagnosis_text` renders it. No values of tensors are in it, no
contents of files, and of the environment only settings that change memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from xmem.errors import SchemaError

SCHEMA_VERSION = 1

Phase = Literal["forward", "backward", "optimizer", "outside"]


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds bytes.

    Attributes:
        name: a parameter, "gradient of" or "optimizer state of" one, or the path of a module.
        category: of the bytes; a module may own activations and temporaries.
        size_bytes: of all blocks together.
        block_count: how many there are.
    """

    name: str
    category: str
    size_bytes: int
    block_count: int = 1


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Something to try.

    Attributes:
        technique: its short name.
        call: the code to write.
        why: what it does here, for people.
        expected_bytes: what it should save of what was allocated; None where it cannot be told.
        is_enough: whether that would have let the request through; None where it cannot be told.
    """

    technique: str
    call: str
    why: str
    expected_bytes: int | None = None
    is_enough: bool | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What there was when a request was refused. Bytes as in DESIGN; unknown is null.

    Attributes:
        backend: the backend's name.
        device: "cpu" or "cuda".
        framework_version: the framework's own version.
        xmem_version: ours.
        phase: in which part of a step.
        module: the path of the module that asked, "" where none or not known.
        may_be_updated: some parameters or optimizer states may have been updated by then, and
            others not.
        requested_bytes: what was asked for.
        allocated_bytes: requested by live tensors then.
        reserved_bytes: held by the framework's pool then.
        limit_bytes: the limit that would have been passed; None: system or driver had no more.
        process_bytes: resident, of the whole process, or the driver's count on a GPU.
        largest_free_bytes: the largest request that the pool could have met from what it held.
        fragmentation: the share of what is reserved that no tensor asked for.
        by_category: live bytes by category; they sum to `allocated_bytes`.
        owners: who held them, largest first.
        advice: what to try, by expected saving.
        settings: the framework's and the pool's settings that change memory.
        stack: where the program was, innermost last: "train.py:12 in step".
        message: what the framework said.
    """

    backend: str
    device: str
    framework_version: str
    xmem_version: str
    phase: Phase
    module: str = ""
    may_be_updated: bool = False
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    process_bytes: int | None = None
    largest_free_bytes: int | None = None
    fragmentation: float | None = None
    by_category: dict[str, int] | None = None
    owners: tuple[Owner, ...] = ()
    advice: tuple[Advice, ...] = ()
    settings: dict[str, str] = {}
    stack: tuple[str, ...] = ()
    message: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def missing_bytes(self) -> int | None:
        """What had to be freed for the request to fit; all of it where no limit is known."""
        if self.requested_bytes is None:
            return None
        if self.limit_bytes is None or self.allocated_bytes is None:
            return self.requested_bytes
        return max(0, self.allocated_bytes + self.requested_bytes - self.limit_bytes)

    def __str__(self) -> str:
        from xmem.diagnosis_text import text

        return text(self)

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a diagnosis."""
    generated = msgspec.json.schema(Diagnosis)
    generated["$id"] = f"https://xmem-train.example/schema/diagnosis-{SCHEMA_VERSION}.json"
    return generated


def from_json(content: bytes) -> Diagnosis:
    """Read a diagnosis from JSON.

    Raises:
        SchemaError: it is no diagnosis, or of another version.
    """
    try:
        raw = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise SchemaError(f"a diagnosis is JSON, and this is not: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"the diagnosis has schema version {version!r}; this xmem reads {SCHEMA_VERSION}. Read"
            " it with the xmem that wrote it."
        )
    try:
        return msgspec.convert(raw, Diagnosis)
    except msgspec.ValidationError as error:
        raise SchemaError(f"this is no diagnosis: {error}") from error


def read(path: Path) -> Diagnosis:
    """Read a bundle's folder, or its diagnosis.json.

    Raises:
        SchemaError: there is none, or it is none of this version.
    """
    file = path / "diagnosis.json" if path.is_dir() else path
    try:
        return from_json(file.read_bytes())
    except OSError as error:
        raise SchemaError(f"{file} cannot be read: {error.strerror}") from error
