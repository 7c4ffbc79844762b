"""Fixtures and markers shared by all tests."""

import os

os.environ.setdefault("MXFP4_OPS_CUDA_WITHOUT", "")  # read from the first launch on only if it is there by then

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config

import mxfp4_ops
from mxfp4_ops import _library


def _no_gpu_reason() -> str | None:
    if not _library.cuda.loaded:
        return f"no CUDA kernels: {_library.cuda.reason}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


NO_GPU = _no_gpu_reason()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items):
    for item in items:
        if NO_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Each device of the package: "cpu", and "cuda" where there is one."""
    return request.param


@pytest.fixture(autouse=True)
def _no_sticky_cuda_error():
    yield
    if not NO_GPU:
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """For thousands of small ops: waiting for a second thread costs the oracle more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compile_anew():
    """No compilation of an earlier test, and counters from 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # A hit in the cache on disk would test what an earlier version of the package compiled to.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def pytest_report_header() -> str:
    return f"mxfp4_ops {mxfp4_ops.__version__}, torch {torch.__version__}, CUDA kernels: {NO_GPU or 'tested'}"
