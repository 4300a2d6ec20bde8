"""Dispatch: what `use` finds, what it refuses, and the traps of pluggy."""

import subprocess
import sys
import textwrap

import pluggy
import pytest
from distributions import make_distribution

import xmem
from xmem import api, hookspecs, plugins

PLUGIN = """
from xmem.hookspecs import hookimpl
from xmem.protocols import Framework, Session

@hookimpl
def xmem_framework():
    return Framework({module!r}, {module!r}, "pip install {module}")

@hookimpl
def xmem_open(device):
    import {module}
    return Session("7.0", "cpu")
"""


@pytest.fixture(autouse=True)
def _no_backend_left_in_use(monkeypatch):
    monkeypatch.setattr(api, "_active", None)
    monkeypatch.setattr(api, "_loaded", {})


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution for the duration of a test."""

    def do(name, entry_points, modules=None, **more):
        folder = make_distribution(tmp_path / name, name, entry_points, modules, **more)
        monkeypatch.syspath_prepend(str(folder))

    return do


def plugin_text(module="json", extra=""):
    return PLUGIN.format(module=module) + textwrap.dedent(extra)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_importing_xmem_and_listing_backends_imports_no_framework():
    code = (
        "import sys, xmem; xmem.backends();"
        "print([m for m in ('torch', 'jittor', 'plotly', 'rich', 'click') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_importing_xmem_takes_under_60_ms_more_than_python():
    code = "import time; t = time.perf_counter(); import xmem; print(time.perf_counter() - t)"
    fastest = min(float(run_python(code)) for _ in range(5))
    assert fastest < 0.060, f"{fastest * 1000:.0f} ms"


def test_a_call_before_use_says_what_to_do():
    with pytest.raises(xmem.NoActiveBackendError, match=r"xmem\.use"):
        xmem.checkpoint(print)


def test_an_unknown_backend_names_the_nearest_and_the_valid_ones():
    with pytest.raises(xmem.BackendNotFoundError, match=r"Did you mean 'torch'.*jittor.*torch"):
        xmem.use("troch")


def test_an_unknown_device_names_the_valid_ones(install):
    install("dist-a", {"aa": "aa_plugin"}, {"aa_plugin.py": plugin_text()})
    with pytest.raises(xmem.UsageError, match="auto, cpu, cuda"):
        xmem.use("aa", device="gpu")


def test_use_binds_once_and_later_calls_return_the_same_backend(install):
    extra = """
    calls = 0
    @hookimpl
    def xmem_checkpoint(session):
        global calls
        calls += 1
        class Offered:
            gaps = {}
            def checkpoint(self, function, args, kwargs, how):
                return function(*args, **kwargs) + 1
        return Offered()
    """
    install("dist-b", {"bb": "bb_plugin"}, {"bb_plugin.py": plugin_text(extra=extra)})
    backend = xmem.use("bb")
    assert xmem.use("bb") is backend is xmem.active()
    assert backend.capabilities == ("checkpoint",)
    assert xmem.checkpoint(lambda x: x * 2, 20) == 41
    import bb_plugin

    assert bb_plugin.calls == 1


def test_a_backend_is_frozen(install):
    install("dist-b", {"bb": "bb_frozen"}, {"bb_frozen.py": plugin_text()})
    with pytest.raises(AttributeError):
        xmem.use("bb").name = "other"


def test_a_missing_capability_raises_with_the_remedy_and_is_never_a_no_op(install):
    install("dist-c", {"cc": "cc_plugin"}, {"cc_plugin.py": plugin_text()})
    backend = xmem.use("cc")
    assert not backend.offers("checkpoint")
    with pytest.raises(xmem.CapabilityError, match=r"'cc' does not offer 'checkpoint'.*hook"):
        xmem.checkpoint(print)
    with pytest.raises(NotImplementedError):
        xmem.autocast()
    with pytest.raises(xmem.CapabilityError):
        xmem.measure()


def test_another_distribution_supplies_a_single_capability(install):
    install("dist-d", {"dd": "dd_plugin"}, {"dd_plugin.py": plugin_text()})
    extra = (
        "from xmem.hookspecs import hookimpl\n"
        "@hookimpl\ndef xmem_pool(session):\n    return 'a pool'\n"
    )
    install("dist-d-pool", {"dd:pool": "dd_pool"}, {"dd_pool.py": extra})
    backend = xmem.use("dd")
    assert backend.pool == "a pool"
    assert backend.capabilities == ("pool",)


def test_only_a_missing_framework_reads_as_not_installed(install):
    install("dist-e", {"ee": "ee_plugin"}, {"ee_plugin.py": plugin_text("no_such_framework")})
    with pytest.raises(xmem.BackendUnavailableError, match="pip install no_such_framework"):
        xmem.use("ee")
    [info] = [i for i in xmem.backends() if i.name == "ee"]
    assert not info.usable
    assert "pip install no_such_framework" in info.reason


@pytest.mark.parametrize(
    "broken",
    [
        "import no_such_module_of_mine",
        "from json import no_such_name",
        "raise RuntimeError('mine')",
        "1 / 0",
    ],
)
def test_any_other_import_error_is_a_bug_and_surfaces(install, broken):
    install("dist-f", {"ff": "ff_plugin"}, {"ff_plugin.py": plugin_text() + broken})
    with pytest.raises(xmem.BackendLoadError, match="dist-f") as caught:
        xmem.use("ff")
    assert caught.value.__cause__ is not None
    sys.modules.pop("ff_plugin", None)


def test_an_import_error_inside_a_hook_is_a_bug_too(install):
    extra = """
    @hookimpl
    def xmem_measure(session):
        import no_such_dependency
    """
    install("dist-g", {"gg": "gg_plugin"}, {"gg_plugin.py": plugin_text(extra=extra)})
    with pytest.raises(xmem.BackendLoadError, match="no_such_dependency"):
        xmem.use("gg")


def test_a_misspelt_hook_is_named(install):
    extra = """
    @hookimpl
    def xmem_chekpoint(session):
        return None
    """
    install("dist-h", {"hh": "hh_plugin"}, {"hh_plugin.py": plugin_text(extra=extra)})
    with pytest.raises(xmem.BackendLoadError, match="xmem_chekpoint"):
        xmem.use("hh")


def test_a_failed_registration_leaves_no_name_behind():
    class Misspelt:
        @hookspecs.hookimpl
        def xmem_mesure(self, session): ...

    class Right:
        @hookspecs.hookimpl
        def xmem_measure(self, session): ...

    class WrongArguments:
        @hookspecs.hookimpl
        def xmem_measure(self, session, more): ...

    manager = pluggy.PluginManager("xmem")
    manager.add_hookspecs(hookspecs.BackendSpec)
    for plugin in (Misspelt(), WrongArguments()):
        with pytest.raises(xmem.BackendLoadError):
            plugins.register(manager, plugin, "mine")
    plugins.register(manager, Right(), "mine")
    assert manager.has_plugin("mine")


def test_two_distributions_with_one_name_are_both_named(install):
    install("dist-i", {"ii": "ii_plugin"}, {"ii_plugin.py": plugin_text()})
    install("dist-j", {"ii": "jj_plugin"}, {"jj_plugin.py": plugin_text()})
    with pytest.raises(xmem.BackendLoadError, match=r"dist-i 1\.0 and dist-j 1\.0"):
        xmem.use("ii")


def test_a_broken_neighbour_does_not_get_in_the_way(install):
    install("dist-k", {"kk": "kk_plugin"}, {"kk_plugin.py": plugin_text()})
    install("dist-l", {"ll": "ll_plugin"}, {"ll_plugin.py": "raise SystemError('mine')"})
    assert xmem.use("kk").name == "kk"
    [info] = [i for i in xmem.backends() if i.name == "ll"]
    assert not info.usable
    assert "SystemError: mine" in info.reason


def test_the_conformance_plugin_is_no_pytest11_entry_point():
    from importlib.metadata import entry_points

    assert not [p for p in entry_points(group="pytest11") if p.value.startswith("xmem")]


def test_observers_are_told_what_happened_before_they_came():
    from xmem.receipts import Receipt, issue

    seen = []

    class Watcher:
        @hookspecs.hookimpl
        def xmem_applied(self, receipt):
            seen.append(receipt)

    issue(Receipt("checkpoint", "none", 3, names=("a-distinct-name",)))
    stop = xmem.observe(Watcher(), name="watcher")
    assert any(r.names == ("a-distinct-name",) for r in seen)
    before = len(seen)
    issue(Receipt("checkpoint", "none", 4))
    assert len(seen) == before + 1
    stop()
    issue(Receipt("checkpoint", "none", 5))
    assert len(seen) == before + 1


def test_what_observers_keep_does_not_keep_the_model():
    import gc
    import weakref

    from xmem.receipts import Receipt, issue

    class Model: ...

    model = Model()
    watched = weakref.ref(model)
    receipt = issue(Receipt("checkpoint", "none", 1, _undo=lambda kept=model: None))
    del receipt, model
    gc.collect()
    assert watched() is None


def test_protocols_document_every_method():
    from xmem import protocols

    for name in ("Measure", "Checkpoint", "Precision", "Training", "Models"):
        for member, value in vars(getattr(protocols, name)).items():
            if not member.startswith("_") and callable(value):
                assert value.__doc__, f"{name}.{member}"


def test_going_back_to_a_device_switches_the_framework_again(install):
    text = """
from xmem.hookspecs import hookimpl
from xmem.protocols import Framework, Session

opened = []

@hookimpl
def xmem_framework():
    return Framework("json", "json", "")

@hookimpl
def xmem_open(device):
    opened.append(device)
    return Session("1", device)
"""
    install("dist-m", {"mm": "mm_plugin"}, {"mm_plugin.py": text})
    first = xmem.use("mm", device="cpu")
    xmem.use("mm", device="cuda")
    import mm_plugin

    assert mm_plugin.opened == ["cpu", "cuda"]
    assert xmem.use("mm", device="cpu") is first
    assert mm_plugin.opened == ["cpu", "cuda", "cpu"]
    xmem.use("mm", device="cpu")
    assert mm_plugin.opened == ["cpu", "cuda", "cpu"]
