"""compute-sanitizer finds nothing in any kernel, and tests/sanitizer_smoke.py, which it runs, is right."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMOKE = Path(__file__).with_name("sanitizer_smoke.py")
SANITIZER = shutil.which("compute-sanitizer")

# tool: (options, options of the program, its last line when all is well)
TOOLS = {
    "memcheck": (["--padding", "512"], [], r"ERROR SUMMARY: 0 errors"),
    "racecheck": ([], ["--every", "3"], r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)"),
    "synccheck": ([], ["--every", "3"], r"ERROR SUMMARY: 0 errors"),
    "initcheck": ([], ["--every", "3"], r"ERROR SUMMARY: 0 errors"),
}


def run(*command: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_smoke_on_the_cpu() -> None:
    assert "OK: " in run(sys.executable, str(SMOKE), "--device", "cpu", "--every", "3")


@pytest.mark.gpu
def test_smoke_on_the_gpu() -> None:
    assert "OK: " in run(sys.executable, str(SMOKE))


@pytest.mark.gpu
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str) -> None:
    options, arguments, summary = TOOLS[tool]
    output = run(SANITIZER, "--tool", tool, "--error-exitcode", "1", *options, sys.executable, str(SMOKE), *arguments)
    assert "OK: " in output
    assert re.search(summary, output), output[-8000:]
