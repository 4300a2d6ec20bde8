"""Another package named `xmem`: found by its files or its metadata, and named."""

import json
import re
import subprocess
import sys
import time
import warnings

import pytest
from click.testing import CliRunner
from distributions import make_distribution

from xmem import foreign
from xmem.cli import main
from xmem.errors import XmemWarning


def test_this_environment_has_no_foreign_xmem():
    assert foreign.find() == []


def test_an_installed_foreign_package_is_named_with_its_place_and_the_remedy(tmp_path):
    make_distribution(tmp_path, "xmem", modules={"xmem/__init__.py": ""}, version="0.3.1")
    (found,) = foreign.find([str(tmp_path)])
    assert found == foreign.Foreign("xmem 0.3.1", tmp_path)
    assert str(tmp_path) in found.message
    assert "pip uninstall xmem;" in found.message
    assert "pip install --force-reinstall --no-deps xmem-train" in found.message


def test_the_remedy_never_installs_the_foreign_package(tmp_path):
    make_distribution(tmp_path, "xmem", modules={"xmem.py": ""})
    (found,) = foreign.find([str(tmp_path)])
    assert re.search(r"(?<!un)install( -\S+)* xmem(\s|$)", found.message) is None


@pytest.mark.parametrize("module", ["xmem/__init__.py", "xmem.py"])
def test_a_distribution_of_another_name_that_brings_the_package_is_found(tmp_path, module):
    make_distribution(tmp_path, "x-memory-tools", modules={"a.py": "", module: ""})
    (found,) = foreign.find([str(tmp_path)])
    assert found.distribution == "x-memory-tools 1.0"


def test_an_old_egg_info_is_found_by_its_top_level(tmp_path):
    metadata = tmp_path / "offload_lib-2.0-py3.11.egg-info"
    metadata.mkdir()
    (metadata / "top_level.txt").write_text("offload\nxmem\n")
    (found,) = foreign.find([str(tmp_path)])
    assert found.distribution == "offload-lib 2.0"


def test_metadata_named_xmem_is_found_without_files(tmp_path):
    (tmp_path / "xmem-1.0.dist-info").mkdir()
    assert [f.distribution for f in foreign.find([str(tmp_path)])] == ["xmem 1.0"]


def test_files_without_a_distribution_are_found_and_told_apart(tmp_path):
    (tmp_path / "xmem").mkdir()
    (tmp_path / "xmem" / "__init__.py").write_text("")
    (found,) = foreign.find([str(tmp_path)])
    assert found.distribution is None
    assert "PYTHONPATH" in found.message


def test_a_plain_folder_named_xmem_is_no_package(tmp_path):
    (tmp_path / "xmem").mkdir()
    assert foreign.find([str(tmp_path)]) == []


def test_our_own_wheel_and_our_backends_are_not_foreign(tmp_path):
    ours = {f"xmem/{name}": "" for name in ("__init__.py", *foreign._OUR_FILES)}
    make_distribution(tmp_path, "xmem-train", modules={**ours, "xmem_torch/__init__.py": ""})
    make_distribution(tmp_path, "xmem-numpy", modules={"xmem_numpy/__init__.py": ""})
    assert foreign.find([str(tmp_path)]) == []


def test_a_copy_of_ours_without_metadata_is_not_foreign(tmp_path):
    (tmp_path / "xmem").mkdir()
    for name in ("__init__.py", *foreign._OUR_FILES):
        (tmp_path / "xmem" / name).write_text("")
    assert foreign.find([str(tmp_path)]) == []


def test_a_foreign_package_that_overwrote_ours_in_one_folder_is_found(tmp_path):
    ours = {f"xmem/{name}": "" for name in ("__init__.py", *foreign._OUR_FILES)}
    make_distribution(tmp_path, "xmem-train", modules=ours)
    make_distribution(tmp_path, "xmem", modules={"xmem/__init__.py": ""})
    assert [f.distribution for f in foreign.find([str(tmp_path)])] == ["xmem 1.0"]


def test_strange_search_paths_are_passed_over(tmp_path):
    archive = tmp_path / "lib.zip"
    archive.write_bytes(b"PK")
    assert foreign.find([str(archive), str(tmp_path / "missing"), ""]) == []


def test_the_search_is_cheap_and_imports_nothing():
    begin = time.perf_counter()
    foreign.find()
    assert time.perf_counter() - begin < 0.5
    code = "import sys, xmem.foreign as f; f.find(); print('importlib.metadata' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_process_is_warned_once(tmp_path, monkeypatch):
    make_distribution(tmp_path, "xmem", modules={"xmem/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    foreign.warn_once.cache_clear()
    with pytest.warns(XmemWarning, match="pip uninstall xmem"):
        foreign.warn_once()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foreign.warn_once()
    foreign.warn_once.cache_clear()


def test_the_command_line_warns_on_stderr_and_goes_on(tmp_path, monkeypatch):
    make_distribution(tmp_path, "xmem", modules={"xmem/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    ran = CliRunner().invoke(main, ["schema"])
    assert ran.exit_code == 0
    assert "warning: another package named 'xmem'" in ran.stderr
    assert json.loads(ran.stdout)
