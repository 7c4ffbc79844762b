"""Build of mxfp4_ops: one abi3 wheel on the libtorch stable ABI, for every Python from 3.10 and torch from 2.11.

Environment:
  MXFP4_OPS_CUDA       1: build the CUDA kernels wherever nvcc is; 0: never; unset: where torch has CUDA.
  TORCH_CUDA_ARCH_LIST architectures of the CUDA kernels, "8.0+PTX;9.0a;10.0a;12.0a" when unset.
  MAX_JOBS             compilers at a time.
"""

import glob
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"mxfp4_ops builds against torch's headers; install torch>=2.11, then build with --no-build-isolation ({error})"
    )

ROOT = os.path.dirname(os.path.abspath(__file__))
ALL_ARCHS = "8.0+PTX;9.0a;10.0a;12.0a"  # PTX of the oldest: what comes after these compiles it when it loads
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]


def sources(folder: str, *extensions: str) -> list[str]:
    found = [path for ext in extensions for path in glob.glob(os.path.join(ROOT, "csrc", folder, f"*.{ext}"))]
    return sorted(os.path.relpath(path, ROOT) for path in found)


def headers() -> list[str]:
    return sorted(
        p for ext in ("h", "cuh") for p in glob.glob(os.path.join(ROOT, "csrc", "**", f"*.{ext}"), recursive=True)
    )


def find_cuda() -> tuple[str | None, str]:
    """The CUDA toolkit to build with, or None, and the reason."""
    asked = os.environ.get("MXFP4_OPS_CUDA", "")
    if asked not in ("", "0", "1"):
        sys.exit(f"MXFP4_OPS_CUDA must be 0, 1 or unset, got {asked!r}")
    if asked == "0":
        return None, "MXFP4_OPS_CUDA=0"
    if asked == "" and torch.version.cuda is None:
        return None, f"torch {torch.__version__} has no CUDA (MXFP4_OPS_CUDA=1 builds them all the same)"
    for home in cuda_homes():
        if os.path.exists(os.path.join(home, "bin", "nvcc")) and find_cudart(home):
            return home, "MXFP4_OPS_CUDA=1" if asked else f"torch has CUDA {torch.version.cuda}"
    missing = f"no nvcc with its runtime library in {', '.join(cuda_homes())}; set CUDA_HOME"
    if asked == "1":
        sys.exit(f"MXFP4_OPS_CUDA=1, but there is {missing}")
    return None, f"torch has CUDA {torch.version.cuda}, but there is {missing}"


def cuda_homes() -> list[str]:
    """Where a CUDA toolkit may be, the likeliest first."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), cpp_extension.CUDA_HOME, "/usr/local/cuda"]
    homes.append(nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc))))
    return list(dict.fromkeys(home for home in homes if home))


def find_cudart(home: str) -> str | None:
    """CUDA's runtime library, the static one where there is one: then torch may have another."""
    folders = [
        os.path.join(home, folder) for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    ]
    found = [
        path
        for name in ("libcudart_static.a", "libcudart.so*")
        for f in folders
        for path in glob.glob(os.path.join(f, name))
    ]
    return found[0] if found else None


def generate_silu_table(folder: Path) -> Path:
    """silu_table.inc in a folder, printed by a program of the project that is compiled for it (see there)."""
    asked = (os.environ.get("CXX") or "").strip() or "c++"
    compiler = [asked] if shutil.which(asked) else shlex.split(asked)
    source = os.path.join(ROOT, "csrc", "tools", "silu_table.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        program = os.path.join(scratch, "silu_table")
        subprocess.run([*compiler, "-std=c++17", "-O1", "-ffp-contract=off", source, "-o", program], check=True)
        printed = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
    table = folder / "silu_table.inc"
    if not table.exists() or table.read_text() != printed:  # unchanged, it compiles nothing again
        folder.mkdir(parents=True, exist_ok=True)
        new = table.with_suffix(f".{os.getpid()}")
        new.write_text(printed)
        new.replace(table)
    return table


def extensions() -> list:
    cxx = [
        "-O3",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-g0",
        *STABLE_ABI,
        *WARNINGS,
    ]
    cpu = cpp_extension.CppExtension(
        "mxfp4_ops._C",
        ["csrc/schemas.cpp", *sources("cpu", "cpp")],
        extra_compile_args={"cxx": cxx},
        depends=headers(),
        py_limited_api=True,
    )
    home, reason = find_cuda()
    if home is None:
        print(f"mxfp4_ops: building CPU kernels only: {reason}")
        return [cpu]
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or ALL_ARCHS
    # By torch's own reading of the list, names such as Hopper included: "sm_90a", or "compute_80" for PTX.
    codes = [flag.rsplit("code=", 1)[1] for flag in cpp_extension._get_cuda_arch_flags()]
    archs = " ".join(sorted(codes, key=lambda code: (int("".join(filter(str.isdigit, code))), code)))
    print(f"mxfp4_ops: building CPU and CUDA kernels ({reason}) with {home}/bin/nvcc for {archs}")
    # A torch without CUDA leaves CUDA_HOME unset; the stable ABI needs nothing else of a CUDA torch to compile.
    cpp_extension.CUDA_HOME = home
    # Nothing of torch's CUDA runtime is linked, so that nvcc and torch may differ in their CUDA version.
    cpp_extension._check_cuda_version = lambda *_: None
    archs_macro = f'-DMXFP4_OPS_CUDA_ARCHS="{archs}"'
    cuda = cpp_extension.CppExtension(
        "mxfp4_ops._C_cuda",
        sources("cuda", "cpp", "cu"),
        include_dirs=[os.path.join(home, "include")],
        extra_objects=[find_cudart(home)],
        libraries=["dl", "rt", "pthread"],
        extra_compile_args={
            "cxx": [*cxx, "-DUSE_CUDA", archs_macro],
            "nvcc": [
                "-O3",
                "-DUSE_CUDA",
                "-lineinfo",
                *STABLE_ABI,
                archs_macro,
                "-Xcompiler",
                "-fvisibility=hidden",
                "--threads",
                "2",
            ],
        },
        # The symbol of the current stream lives in torch's CUDA library, which only libtorch.so pulls in.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", "-Wl,--exclude-libs,ALL"],
        depends=headers(),
        py_limited_api=True,
    )
    return [cpu, cuda]


class BuildExtension(cpp_extension.BuildExtension):
    """Torch's, which also makes what is compiled in, and takes away CUDA kernels that an earlier build left in the
    source folder.
    """

    def build_extensions(self) -> None:
        for extension in self.extensions:
            if extension.name == "mxfp4_ops._C_cuda":
                table = generate_silu_table(Path(self.build_temp).resolve() / "generated")
                extension.include_dirs.append(str(table.parent))
                extension.depends.append(str(table))
        super().build_extensions()

    def run(self) -> None:
        super().run()
        stale = os.path.join(ROOT, "mxfp4_ops", "_C_cuda.abi3.so")
        in_place = self.inplace or getattr(self, "editable_mode", False)
        if in_place and os.path.exists(stale) and not any(e.name.endswith("_C_cuda") for e in self.extensions):
            os.remove(stale)


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
    package_dir={"mxfp4_ops": "mxfp4_ops", "mxfp4_ops.meta": "meta"},
    packages=["mxfp4_ops", "mxfp4_ops.bench", "mxfp4_ops.compat", "mxfp4_ops.meta", "mxfp4_ops.passes"],
    package_data={"mxfp4_ops": ["py.typed"]},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
