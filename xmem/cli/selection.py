"""What a command line selects: names are checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmem.plugins import BackendInfo

DEFAULT_WORLD = 2
HOW_TO_GET_ONE = (
    "Install a framework: pip install 'xmem-train[torch]' or pip install 'xmem-train[jittor]'"
)


def known_backends(names: Sequence[str]) -> list[BackendInfo]:
    """Return the installed backends.

    Raises:
        BackendNotFoundError: one of the names is not installed.
    """
    from xmem.errors import BackendNotFoundError, unknown
    from xmem.plugins import backend_infos

    infos = backend_infos()
    installed = [info.name for info in infos]
    for name in names:
        if name not in installed:
            raise BackendNotFoundError(unknown("backend", name, installed))
    return infos


def check_names(
    workloads: Sequence[str], techniques: Sequence[str], preset: str, device: str
) -> None:
    """See to it that every name exists.

    Raises:
        UsageError: one does not; it says which are valid.
    """
    from xmem.conformance.techniques import technique
    from xmem.errors import UsageError, unknown
    from xmem.plugins import DEVICES
    from xmem.workloads import PRESETS, workload

    if preset not in PRESETS:
        raise UsageError(unknown("preset", preset, PRESETS))
    if device not in DEVICES:
        raise UsageError(unknown("device", device, DEVICES))
    for name in workloads:
        workload(name, preset)
    for name in techniques:
        technique(name)


def choose_backends(names: Sequence[str]) -> tuple[list[BackendInfo], list[BackendInfo]]:
    """Return the backends to run, and those left out since they are not usable.

    A backend that was named is run though it is not usable: its rows say why.

    Raises:
        BackendNotFoundError: a name is not installed, or none was named and none is usable.
    """
    from xmem.errors import BackendNotFoundError

    infos = known_backends(names)
    if names:
        by_name = {info.name: info for info in infos}
        return [by_name[name] for name in dict.fromkeys(names)], []
    usable = [info for info in infos if info.usable]
    unusable = [info for info in infos if not info.usable]
    if not usable:
        reasons = "".join(f"\n  {info.name}: {info.reason}" for info in unusable)
        raise BackendNotFoundError(f"no backend is usable. {HOW_TO_GET_ONE}{reasons}")
    return usable, unusable


def choose_techniques(named: Sequence[str], world: int | None) -> tuple[list[str], int]:
    """Return which techniques to run, and on how many ranks those that run on several.

    Raises:
        UsageError: ranks are asked for, and no technique that is named runs on several.
    """
    from xmem.conformance.techniques import DISTRIBUTED_TECHNIQUES, TECHNIQUES
    from xmem.errors import UsageError

    if not named:
        several = ["baseline", *DISTRIBUTED_TECHNIQUES]
        return list(TECHNIQUES) if world is None else several, world or 1
    names = list(dict.fromkeys(named))
    if any(name in DISTRIBUTED_TECHNIQUES for name in names):
        return names, world or DEFAULT_WORLD
    if world is not None and world > 1:
        raise UsageError(
            f"--world {world}, but {', '.join(names)} run in one process. Techniques of several"
            f" ranks: {', '.join(DISTRIBUTED_TECHNIQUES)}"
        )
    return names, 1
