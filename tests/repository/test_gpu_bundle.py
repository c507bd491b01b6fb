"""What goes to a GPU machine without network arrives there as it was packed, or not at all."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_bundle.py"
_SPEC: Any = spec_from_file_location(SCRIPT.stem, SCRIPT)
bundle = module_from_spec(_SPEC)
_SPEC.loader.exec_module(bundle)
MOST = 1000


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of packages that random bytes keep from being packed small."""
    folder = tmp_path / "site"
    (folder / "package" / "__pycache__").mkdir(parents=True)
    (folder / "package" / "__pycache__" / "module.pyc").touch()
    (folder / "package" / "kernel.so").write_bytes(random.Random(0).randbytes(3500))
    (folder / "package" / "run").write_text("text")
    (folder / "package" / "run").chmod(0o755)
    return folder


def test_parts_are_small_and_bring_the_files_back(site: Path, tmp_path: Path) -> None:
    parts = bundle.pack(site, tmp_path / "parts", MOST)
    assert [part.parent.name for part in parts] == ["1", "2", "3", "4"]
    assert all(part.stat().st_size <= MOST for part in parts)
    there = tmp_path / "there"
    subprocess.run([sys.executable, SCRIPT, "unpack", tmp_path / "parts", there], check=True)
    found = {path.relative_to(there): path for path in there.rglob("*") if path.is_file()}
    assert {*map(str, found)} == {"package/kernel.so", "package/run"}
    assert all(path.read_bytes() == (site / name).read_bytes() for name, path in found.items())
    assert found[Path("package/run")].stat().st_mode & 0o111


@pytest.mark.parametrize("fault", ["missing", "changed", "of another", "none"])
def test_nothing_is_unpacked_of_parts_that_are_not_whole(
    fault: str, site: Path, tmp_path: Path
) -> None:
    parts = bundle.pack(site, tmp_path / "parts", MOST)
    if fault == "missing":
        parts[-1].unlink()
    elif fault == "changed":
        parts[1].write_bytes(parts[1].read_bytes()[::-1])
    elif fault == "of another":
        parts[1].rename(parts[1].with_name(f"2-of-4-{'0' * 64}"))
    else:
        shutil.rmtree(tmp_path / "parts")
    with pytest.raises(ValueError, match="parts"):
        bundle.unpack(tmp_path / "parts", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_modules_come_to_where_flashinfer_looks_for_built_ones(tmp_path: Path) -> None:
    library = tmp_path / "cached" / "kernel.so"
    library.parent.mkdir()
    library.touch()
    module = SimpleNamespace(
        name="kernel", spec=lambda: SimpleNamespace(get_library_path=lambda: library)
    )
    bundle.keep([module], tmp_path / "flashinfer")
    assert (tmp_path / "flashinfer" / "data" / "aot" / "kernel" / "kernel.so").exists()
