"""Loads the compiled libraries and says what they can do here."""

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class CudaSupport:
    """Whether the CUDA kernels are loaded, for which architectures they were compiled, and why they are not loaded."""

    loaded: bool
    archs: tuple[str, ...]
    reason: str


def _text(library: Path, function: str) -> str:
    f = getattr(ctypes.CDLL(str(library)), function)
    f.restype = ctypes.c_char_p
    return f().decode()


def _load_cpu() -> Path:
    library = _FOLDER / "_C.abi3.so"
    missing = library.name if not library.exists() else None
    if importlib.util.find_spec("mxfp4_ops.meta") is None:
        missing = "mxfp4_ops.meta"
    if missing:
        raise ImportError(
            f"mxfp4_ops: {missing} is missing from {_FOLDER}; install the package (pip install --no-build-isolation .) "
            "or leave the source folder, where Python finds the sources first"
        )
    torch.ops.load_library(library)
    return library


def _load_cuda() -> CudaSupport:
    library = _FOLDER / "_C_cuda.abi3.so"
    if not library.exists():
        return CudaSupport(False, (), "this build of mxfp4_ops has CPU kernels only (build with MXFP4_OPS_CUDA=1)")
    if torch.version.cuda is None:
        return CudaSupport(False, (), f"torch {torch.__version__} was built without CUDA")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return CudaSupport(False, (), f"{library.name} did not load: {error}")
    return CudaSupport(True, tuple(_text(library, "mxfp4_ops_cuda_archs").split()), "")


_cpu_library = _load_cpu()
cuda = _load_cuda()
_without_cuda = None

if not cuda.loaded and torch.version.cuda is not None:
    # Tensors on a GPU can exist, and the dispatcher would answer for them with a text about backends.
    def _refuse(*args, **kwargs):
        raise RuntimeError(f"mxfp4_ops: no CUDA kernels: {cuda.reason}")

    _without_cuda = torch.library.Library("mxfp4_ops", "IMPL", "CUDA")
    for _name in torch._C._dispatch_get_all_op_names():
        if _name.startswith("mxfp4_ops::"):
            _without_cuda.impl(_name.removeprefix("mxfp4_ops::"), _refuse)


def cpu_capability() -> str:
    """Instruction set of the CPU kernels in use: "default", "avx2" or "avx512"."""
    return _text(_cpu_library, "mxfp4_ops_cpu_capability")
