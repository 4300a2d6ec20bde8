"""From entry points to a frozen Backend.

One pluggy manager per backend: the backend's own module and whatever other distributions add to
it. Loading touches only the backend that was asked for, so a broken neighbour cannot get in the
way; the hooks are called once, here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from xmem import foreign, hookspecs
from xmem.backend import CAPABILITIES, Backend, MissingCapability
from xmem.errors import (
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    UsageError,
    unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xmem.protocols import Framework

GROUP = "xmem"
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class BackendInfo:
    """What is known of a backend without importing its framework.

    Attributes:
        name: the name for `xmem.use`.
        distribution: where it comes from, with version.
        usable: its framework is installed and its module loads.
        reason: why it is not usable, with the remedy; empty when it is.
        framework_version: the version of the framework, or None.
        framework: how its framework is recognised, or None if the module does not load.
    """

    name: str
    distribution: str
    usable: bool
    reason: str
    framework_version: str | None
    framework: Framework | None = None


def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points of each backend: the main one first, then its additions."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    seen: set[tuple[str, str, str]] = set()
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda p: ":" in p.name):
        # An editable install can show one distribution twice on sys.path.
        key = (point.name, point.value, _distribution(point))
        if key in seen:
            continue
        seen.add(key)
        found.setdefault(point.name.partition(":")[0], []).append(point)
    return found


def _distribution(point: metadata.EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version}" if dist is not None else "unknown distribution"


def _main_point(name: str, points: list[metadata.EntryPoint]) -> metadata.EntryPoint:
    mains = [p for p in points if p.name == name]
    if not mains:
        extras = ", ".join(f"{p.name} from {_distribution(p)}" for p in points)
        raise BackendNotFoundError(f"backend {name!r} has additions ({extras}) and no main module")
    if len(mains) > 1:
        owners = " and ".join(sorted(_distribution(p) for p in mains))
        raise BackendLoadError(
            f"two distributions offer a backend named {name!r}: {owners}. Uninstall one of them."
        )
    return mains[0]


def _load_manager(name: str) -> tuple[pluggy.PluginManager, metadata.EntryPoint]:
    points = _entry_points()
    if name not in points:
        raise BackendNotFoundError(unknown("backend", name, points))
    main = _main_point(name, points[name])
    manager = pluggy.PluginManager("xmem")
    manager.add_hookspecs(hookspecs.BackendSpec)
    for point in points[name]:
        try:
            module = point.load()
        except Exception as error:
            raise BackendLoadError(
                f"the module {point.value!r} of backend {name!r} ({_distribution(point)}) does not"
                f" load: {type(error).__name__}: {error}. This is a bug in that distribution."
            ) from error
        register(manager, module, point.name, origin=_distribution(point))
    return manager, main


def register(
    manager: pluggy.PluginManager, plugin: object, name: str, *, origin: str = "a plugin"
) -> None:
    """Register a plugin whole or not at all.

    pluggy keeps the name of a plugin whose registration failed, and lets a misspelt hook pass;
    here the name is freed again and the misspelt hook is named.

    Raises:
        BackendLoadError: a hook is misspelt or has the wrong arguments.
    """
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise BackendLoadError(f"{name!r} from {origin} is no valid plugin: {error}") from error


def _framework_of(manager: pluggy.PluginManager, name: str) -> Framework:
    framework: Framework | None = manager.hook.xmem_framework()
    if framework is None:
        raise BackendLoadError(f"backend {name!r} implements no xmem_framework hook")
    return framework


def _spec_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _require_framework(name: str, framework: Framework) -> None:
    if not _spec_exists(framework.module):
        raise BackendUnavailableError(
            f"backend {name!r} needs {framework.module!r}, which is not installed."
            f" Install it with: {framework.install_hint}"
        )


def backend_infos() -> list[BackendInfo]:
    """List the installed backends, usable or why not; imports no framework."""
    return [_info(name, points) for name, points in sorted(_entry_points().items())]


def _info(name: str, points: list[metadata.EntryPoint]) -> BackendInfo:
    owner = _distribution(points[0])
    version = None
    framework = None
    try:
        manager, main = _load_manager(name)
        owner = _distribution(main)
        framework = _framework_of(manager, name)
        _require_framework(name, framework)
    except BackendError as error:
        return BackendInfo(
            name,
            owner,
            usable=False,
            reason=str(error),
            framework_version=None,
            framework=framework,
        )
    try:
        version = metadata.version(framework.distribution)
    except metadata.PackageNotFoundError:
        version = None
    return BackendInfo(
        name, owner, usable=True, reason="", framework_version=version, framework=framework
    )


def load(name: str, device: str) -> Backend:
    """Load a backend, call its hooks once, and bind what they return.

    Raises:
        BackendNotFoundError: nothing installed offers this name.
        BackendUnavailableError: the framework or the device is missing.
        BackendLoadError: the backend's own code is broken.
        UsageError: the device is none of auto, cpu, cuda.
    """
    if device not in DEVICES:
        raise UsageError(unknown("device", device, DEVICES))
    foreign.warn_once()
    manager, main = _load_manager(name)
    framework = _framework_of(manager, name)
    _require_framework(name, framework)
    with _blame(name, framework, _distribution(main)):
        session = manager.hook.xmem_open(device=device)
        if session is None:
            raise BackendLoadError(f"backend {name!r} implements no xmem_open hook")
        bound = {c: getattr(manager.hook, f"xmem_{c}")(session=session) for c in CAPABILITIES}
    offered = tuple(c for c in CAPABILITIES if bound[c] is not None)
    parts: dict[str, Any] = {
        c: bound[c] if bound[c] is not None else MissingCapability(name, c, offered)
        for c in CAPABILITIES
    }
    return Backend(
        name=name,
        device=session.device,
        framework_version=str(session.framework_version),
        distribution=_distribution(main),
        capabilities=offered,
        **parts,
    )


def reopen(backend: Backend) -> None:
    """Switch the framework of a loaded backend to the backend's device again."""
    manager, _ = _load_manager(backend.name)
    manager.hook.xmem_open(device=backend.device)


@contextmanager
def _blame(name: str, framework: Framework, owner: str) -> Iterator[None]:
    """Tell a missing framework from a bug in a backend: only the first is "not installed"."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == framework.module:
            raise BackendUnavailableError(
                f"backend {name!r} needs {framework.module!r}, which cannot be imported."
                f" Install it with: {framework.install_hint}"
            ) from error
        raise BackendLoadError(
            f"backend {name!r} ({owner}) could not import {error.name!r}: {error}. Its framework"
            f" {framework.module!r} is installed, so this is a broken installation or a bug."
        ) from error
    except ImportError as error:
        if isinstance(error, BackendUnavailableError):
            raise
        raise BackendLoadError(f"backend {name!r} ({owner}) failed to load: {error}") from error


observers = pluggy.PluginManager("xmem")
observers.add_hookspecs(hookspecs.ObserverSpec)


def observe(plugin: object, *, name: str | None = None) -> Callable[[], None]:
    """Register an observer (see `xmem.hookspecs.ObserverSpec`); returns the way to stop it."""
    label = name or f"observer-{id(plugin)}"
    register(observers, plugin, label)

    def stop() -> None:
        if observers.has_plugin(label):
            observers.unregister(name=label)

    return stop
