import subprocess
import sys

import pytest
import torch

from mxfp4_ops import __main__ as cli
from mxfp4_ops import _library

ALL = ("compute_80", "sm_80", "sm_90a", "sm_100a", "sm_120a")


@pytest.mark.parametrize(
    "archs, capability, expected",
    [
        (ALL, (8, 0), "sm_80"),
        (ALL, (8, 9), "sm_80"),
        (ALL, (9, 0), "sm_90a"),
        (ALL, (10, 0), "sm_100a"),
        (ALL, (10, 3), "PTX of compute_80, compiled when it loads"),
        (ALL, (12, 0), "sm_120a"),
        (ALL, (7, 5), None),
        (("sm_86",), (9, 0), None),
        (("sm_86",), (8, 0), None),
        (("sm_90a", "compute_90a"), (10, 0), None),
    ],
)
def test_which_code_a_gpu_runs(archs, capability, expected):
    assert cli._covers(archs, capability) == expected


def test_info_says_what_is_used_and_why():
    out = subprocess.run([sys.executable, "-m", "mxfp4_ops", "info"], capture_output=True, text=True, check=True).stdout
    assert f"torch          {torch.__version__}" in out
    assert f"CPU kernels    {_library.cpu_capability()}" in out
    if not _library.cuda.loaded:
        assert _library.cuda.reason in out
    elif torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in out and "runs sm_" in out


def test_unknown_command_is_refused():
    result = subprocess.run([sys.executable, "-m", "mxfp4_ops", "nonsense"], capture_output=True, text=True)
    assert result.returncode == 2 and "invalid choice" in result.stderr
