"""What is set before Jittor is imported; nothing here compiles Jittor's core."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from xmem_jittor import environment, onednn, workarounds

import xmem


@pytest.fixture
def clean(monkeypatch):
    """An environment in which nobody has chosen anything, put back afterwards."""
    for name in (
        "nvcc_path", "use_mpi", "FIX_TORCH_ERROR", "cache_name", "use_mkl", "mkl_include_path",
        "mkl_lib_path", "log_silent", "log_v", "OMPI_COMM_WORLD_SIZE", "conv_opt", "use_cutt",
        "use_cutlass", "use_nccl", "cuda_archs", "cc_flags", "NVCC_APPEND_FLAGS", "mpicc_path",
        "OMPI_MCA_mpi_yield_when_idle",
    ):  # fmt: skip
        # Set first, so that what the code under test sets is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def set_to(name):
    return os.environ.get(name, None)


def no_driver(monkeypatch):
    monkeypatch.setattr(environment, "find_driver", lambda: None)


def h200(monkeypatch):
    driver = environment.Driver(devices=1, capability=90)
    monkeypatch.setattr(environment, "find_driver", lambda: driver)


def test_without_a_driver_there_is_no_cuda_no_mpi_and_one_cache(clean):
    no_driver(clean)
    clean.setattr(onednn, "prepare", lambda: None)
    assert environment.prepare("auto") == "cpu"
    assert set_to("nvcc_path") == ""
    assert set_to("use_mpi") == "0"
    assert os.environ["FIX_TORCH_ERROR"] == "0"
    assert set_to("cache_name") == "default"


def test_what_the_user_has_set_stays(clean):
    no_driver(clean)
    clean.setattr(onednn, "prepare", lambda: None)
    chosen = {"use_mpi": "1", "FIX_TORCH_ERROR": "1", "cache_name": "mine", "nvcc_path": "/x/nvcc"}
    for name, value in chosen.items():
        clean.setenv(name, value)
    environment.prepare("cpu")
    assert {name: os.environ[name] for name in chosen} == chosen


def test_under_mpirun_mpi_stays_on(clean):
    no_driver(clean)
    clean.setattr(onednn, "prepare", lambda: None)
    clean.setenv("OMPI_COMM_WORLD_SIZE", "2")
    environment.prepare("cpu")
    assert "use_mpi" not in os.environ


def test_cuda_without_a_driver_or_a_compiler_says_what_to_do(clean):
    no_driver(clean)
    with pytest.raises(xmem.BackendUnavailableError, match="no usable NVIDIA driver"):
        environment.prepare("cuda")
    h200(clean)
    clean.setattr(environment, "_nvcc", lambda: "")
    with pytest.raises(xmem.BackendUnavailableError, match="no nvcc"):
        environment.prepare("cuda")
    clean.setattr(onednn, "prepare", lambda: None)
    assert environment.prepare("auto") == "cpu"


def fake_nvcc(folder, release):
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
    path.chmod(0o755)
    return str(path)


def test_cuda_13_gets_its_workarounds_and_cuda_12_does_not(clean, tmp_path):
    h200(clean)
    clean.setattr(onednn, "prepare", lambda: None)
    clean.setenv("nvcc_path", fake_nvcc(tmp_path / "12", "12.4"))
    assert environment.prepare("cuda") == "cuda"
    assert "cc_flags" not in os.environ
    assert set_to("cuda_archs") == "90"
    assert [os.environ[n] for n in ("use_cutt", "use_cutlass", "use_nccl")] == ["0", "0", "0"]
    clean.setenv("nvcc_path", fake_nvcc(tmp_path / "13", "13.0"))
    clean.setenv("cc_flags", "-DMINE")
    environment.prepare("cuda")
    environment.prepare("cuda")
    assert set_to("cc_flags").split().count("-DcomputeMode=major") == 1
    assert "-DMINE" in set_to("cc_flags")
    assert os.environ["NVCC_APPEND_FLAGS"].strip() == "-std=c++17"


def test_convolutions_fall_back_where_cudnn_8_is_missing(clean, tmp_path):
    nvcc = fake_nvcc(tmp_path, "12.4")
    clean.setattr(workarounds, "_has_cudnn8", lambda _: True)
    workarounds.set_cuda_environment(nvcc, 90)
    assert "conv_opt" not in os.environ
    clean.setattr(workarounds, "_has_cudnn8", lambda _: False)
    workarounds.set_cuda_environment(nvcc, 90)
    assert set_to("conv_opt") == "1"


def test_a_broken_nvcc_is_named(tmp_path):
    with pytest.raises(xmem.BackendUnavailableError, match="nvcc_path"):
        workarounds.toolkit_version(str(tmp_path / "nvcc"))


def wheels(folder):
    """Lay out what the two wheels install: one library under three names, headers in folders."""
    headers = {}
    for below in ("dnnl.hpp", "mkldnn.hpp", "oneapi/dnnl/dnnl.hpp"):
        path = folder / "include" / below
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(below)
        headers[below] = path
    libraries = []
    for name in ("libdnnl.so", "libdnnl.so.2", "libmkldnn.so", "libmkldnn.so.2"):
        path = folder / "lib" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"the library")
        libraries.append(path)
    return headers, libraries


def test_onednn_is_laid_out_as_jittor_looks_for_it(tmp_path):
    target = tmp_path / "mkl" / onednn.FOLDER
    target.mkdir(parents=True)
    (target / "half a download").touch()
    onednn.lay_out(target, *wheels(tmp_path / "wheel"))
    assert onednn.is_ready(target)
    assert (target / "include/oneapi/dnnl/dnnl.hpp").read_text() == "oneapi/dnnl/dnnl.hpp"
    assert (target / "include/mkldnn.hpp").is_file()
    assert (target / "examples").is_dir()
    assert (target / "lib/libmkldnn.so").read_bytes() == b"the library"
    files = [f for f in (target / "lib").iterdir() if not f.is_symlink()]
    assert len(files) == 1, "equal libraries are stored once"
    assert [f.name for f in target.parent.iterdir()] == [onednn.FOLDER]


def test_onednn_comes_from_the_installed_wheels(clean, tmp_path):
    clean.setenv("JITTOR_HOME", str(tmp_path))
    clean.setattr(onednn, "wheel_files", lambda: wheels(tmp_path / "wheel"))
    onednn.prepare()
    assert onednn.is_ready(tmp_path / ".cache/jittor/mkl" / onednn.FOLDER)
    assert "use_mkl" not in os.environ


def test_the_wheels_of_this_environment_are_complete():
    need_jittor()
    found = onednn.wheel_files()
    if found is None:
        pytest.skip("the oneDNN wheels are not installed")
    headers, libraries = found
    assert "mkldnn.hpp" in headers
    assert "oneapi/dnnl/dnnl.hpp" in headers
    assert {"libmkldnn.so", "libdnnl.so.2"} <= {f.name for f in libraries}


def test_without_wheels_and_network_jittor_goes_without_onednn_and_says_so(clean, tmp_path):
    clean.setenv("JITTOR_HOME", str(tmp_path))
    clean.setattr(onednn, "wheel_files", lambda: None)
    clean.setattr(onednn, "download_host_answers", lambda: False)
    with pytest.warns(xmem.XmemWarning, match="40 to 90 times slower"):
        onednn.prepare()
    assert set_to("use_mkl") == "0"


def test_with_a_network_the_download_is_jittors(clean, tmp_path):
    clean.setenv("JITTOR_HOME", str(tmp_path))
    clean.setattr(onednn, "wheel_files", lambda: None)
    clean.setattr(onednn, "download_host_answers", lambda: True)
    onednn.prepare()
    assert "use_mkl" not in os.environ


@pytest.mark.parametrize("name", ["use_mkl", "mkl_include_path"])
def test_whoever_chose_an_own_onednn_keeps_it(clean, tmp_path, name):
    clean.setenv("JITTOR_HOME", str(tmp_path))
    clean.setenv(name, "1")
    clean.setattr(onednn, "wheel_files", lambda: pytest.fail("looked for wheels"))
    onednn.prepare()


def test_the_status_line_counts():
    line = environment.status_line(40.2, 120)
    assert "40 s" in line
    assert "120 of about" in line
    assert "core" not in environment.status_line(40.2, None)


def need_jittor():
    # Not by importing it: jittor_utils chooses the cache for this process and its children.
    if importlib.util.find_spec("jittor") is None:
        pytest.skip("Jittor is not installed")


def run_python(code, **variables):
    environ = {k: v for k, v in os.environ.items() if k not in ("log_silent", "log_v")}
    environ["cache_name"] = "default"  # another one would be compiled
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**environ, **variables},
        timeout=300,
    )


def test_nothing_is_printed_and_warnings_stay():
    need_jittor()
    ran = run_python(
        "import os, xmem; b = xmem.use('jittor', device='cpu'); import jittor as jt;"
        "assert 'log_silent' not in os.environ;"
        "a, b = jt.ones(2), jt.ones(2); jt.grad(a.sum(), [b])"
    )
    assert ran.stdout == ""
    lines = [line for line in ran.stderr.splitlines() if "doesn't have gradient" not in line]
    assert lines == []
    assert "doesn't have gradient" in ran.stderr


def test_the_plugin_imports_neither_jittor_nor_numpy():
    run_python(
        "import sys, xmem_jittor.plugin as p; p.xmem_framework();"
        "assert not {'jittor', 'jittor_utils', 'numpy'} & set(sys.modules)"
    )


def test_a_jittor_that_is_imported_already_is_taken_as_it_is():
    need_jittor()
    run_python(
        "import jittor, xmem\n"
        "assert xmem.use('jittor').device == 'cpu'\n"
        "try: xmem.use('jittor', device='cuda')\n"
        "except xmem.BackendUnavailableError as e: assert 'fresh process' in str(e)\n"
        "else: raise SystemExit('no error')\n",
        nvcc_path="", use_mpi="0", FIX_TORCH_ERROR="0",
    )  # fmt: skip


def test_tensors_from_before_use_are_reported_as_untracked():
    need_jittor()
    run_python(
        "import warnings, jittor as jt, xmem\n"
        "old = jt.ones((1024,)).sync()\n"
        "xmem.use('jittor')\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "    with xmem.measure(inputs=[old, jt.zeros((4,))]) as m: pass\n"
        "assert m.untracked_bytes == 4096, m.untracked_bytes\n",
        nvcc_path="", use_mpi="0", FIX_TORCH_ERROR="0",
    )  # fmt: skip


def test_the_cache_is_where_jittor_keeps_it():
    assert Path(onednn.jittor_home()).is_absolute()


KILLED_WORKER = """
import ctypes, pathlib, sys
import xmem
from xmem.conformance.runner import run_case
from xmem.report.model import Case

def handler():
    buffer = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(17, None, buffer)
    return buffer.raw[:8]

plain = handler()
xmem.use("jittor", device="cpu")
jittors = handler()
assert jittors != plain, "Jittor no longer handles SIGCHLD: the runner's guard may go"
case = Case(workload="mlp", technique="baseline", backend="crashy")
result = run_case(case, pathlib.Path(sys.argv[1]))
assert handler() == jittors
print(result.status, result.reason)
"""


def test_a_killed_worker_does_not_end_a_process_that_has_loaded_jittor(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "SIGKILL"})
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_WORKER, str(tmp_path / "cases")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("error killed by SIGKILL")


def test_a_jittor_that_leaves_while_it_is_imported_is_an_error_and_not_a_success(tmp_path):
    """It does so, with status 0, when it has compiled its utilities again."""
    need_jittor()
    (tmp_path / "jittor.py").write_text("raise SystemExit(0)")
    ran = run_python(
        "import os, sys, xmem\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try: xmem.use('jittor', device='cpu')\n"
        "except xmem.BackendUnavailableError as e: print(e)\n"
        "assert 'log_silent' not in os.environ\n"
    )
    assert "Start the program once more" in ran.stdout
