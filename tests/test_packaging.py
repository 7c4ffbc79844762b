"""What the build promises: one abi3 wheel, the stable ABI alone, and an import that works whatever is missing."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import mxfp4_ops
from mxfp4_ops import _library

PACKAGE = Path(mxfp4_ops.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("*.so"))


@pytest.fixture
def wheel() -> Path:
    path = os.environ.get("MXFP4_OPS_WHEEL")
    if not path:
        pytest.skip("MXFP4_OPS_WHEEL names no wheel (`.ci/run` builds one)")
    return Path(path)


def run(code: str, site: Path) -> subprocess.CompletedProcess:
    """Runs code with `site` as the only place that has the package."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    script = f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in str(f)]; {code}"
    return subprocess.run([sys.executable, "-c", script], env=env, cwd=site, capture_output=True, text=True)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_only_the_stable_abi_is_used(library):
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert "aoti_torch" in symbols
    for private in (r"\b_ZNK?2at", r"\b_ZNK?3c10", r"\b_ZNK?5torch", r"\bPy"):
        assert not re.findall(private + r"\w+", symbols), private


@pytest.mark.slow
def test_wheel_is_for_every_python_and_complete(wheel):
    assert "-cp310-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "_C.abi3.so",
        "_C_cuda.abi3.so",
        "py.typed",
        "meta/shapes.py",
        "meta/fakes.py",
        "compat/vllm.py",
        "bench/cli.py",
        "__main__.py",
    }
    assert {f"mxfp4_ops/{name}" for name in expected} <= names
    assert not [name for name in names if name.startswith(("tests", "meta", "csrc"))]


@pytest.mark.slow
def test_wheel_has_every_architecture(wheel, tmp_path):
    if shutil.which("cuobjdump") is None:
        pytest.skip("no cuobjdump")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    library = tmp_path / "mxfp4_ops" / "_C_cuda.abi3.so"
    code = subprocess.run(
        ["cuobjdump", "--list-elf", "--list-ptx", library], capture_output=True, text=True, check=True
    ).stdout
    assert {"sm_80", "sm_90a", "sm_100a", "sm_120a"} == set(re.findall(r"sm_\d+a?(?=\.cubin)", code))
    assert "sm_80.ptx" in code


@pytest.mark.slow
def test_wheel_runs_on_its_own(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    result = run(
        "import mxfp4_ops.__main__ as m; import mxfp4_ops.meta as meta; print(m.info()); print(meta.__file__)", tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout and f"torch {torch.__version__}"[:8] in result.stdout


def copy_package(tmp_path: Path, *left_out: str) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "mxfp4_ops", ignore=shutil.ignore_patterns("__pycache__", *left_out))
    if not (tmp_path / "mxfp4_ops" / "meta").exists():
        shutil.copytree(Path(mxfp4_ops.meta.__file__).parent, tmp_path / "mxfp4_ops" / "meta")
    return tmp_path


def test_import_without_the_libraries_says_how_to_install(tmp_path):
    result = run("import mxfp4_ops", copy_package(tmp_path, "*.so"))
    assert result.returncode != 0 and "_C.abi3.so is missing" in result.stderr and "pip install" in result.stderr


def test_a_build_without_cuda_kernels_imports(tmp_path):
    site = copy_package(tmp_path, "_C_cuda*")
    code = "import torch, mxfp4_ops; print(mxfp4_ops.shuffle_rows(torch.ones(1, 1), torch.tensor([0])).item())"
    result = run(code, site)
    assert result.returncode == 0 and result.stdout.strip() == "1.0", result.stderr


@pytest.mark.gpu
def test_a_call_without_cuda_kernels_says_what_is_missing(tmp_path):
    site = copy_package(tmp_path, "_C_cuda*")
    code = "import torch, mxfp4_ops; mxfp4_ops.shuffle_rows(torch.ones(1, 1).cuda(), torch.tensor([0]).cuda())"
    result = run(code, site)
    assert "no CUDA kernels: this build of mxfp4_ops has CPU kernels only" in result.stderr


def test_broken_cuda_library_does_not_break_the_import(tmp_path):
    site = copy_package(tmp_path, "_C_cuda*")
    (site / "mxfp4_ops" / "_C_cuda.abi3.so").write_bytes(b"not a library")
    result = run("from mxfp4_ops import _library; print(_library.cuda)", site)
    assert result.returncode == 0 and "loaded=False" in result.stdout, result.stderr
    if torch.version.cuda:
        assert "did not load" in result.stdout


def test_version_is_the_same_everywhere():
    root = Path(__file__).parents[1]
    version = re.search(r'^version = "(.*)"', (root / "pyproject.toml").read_text(), flags=re.M).group(1)
    assert version == mxfp4_ops.__version__
    assert f"## {version}" in (root / "CHANGELOG.md").read_text()


def test_cpu_capability_is_one_that_exists():
    assert _library.cpu_capability() in ("default", "avx2", "avx512")
