"""``python -m mxfp4_ops info``: versions, what was compiled, and which kernels will be used here and why.

``python -m mxfp4_ops bench``: times; see ``mxfp4_ops.bench``.
"""

import argparse
import platform
import sys

import torch

import mxfp4_ops
from mxfp4_ops import _library
from mxfp4_ops.bench import cli as bench


def _covers(archs: tuple[str, ...], capability: tuple[int, int]) -> str | None:
    """Which of the compiled codes ("sm_90a", "compute_80") a GPU of this compute capability runs, or None."""
    ptx = None
    for arch in archs:
        kind, _, number = arch.partition("_")
        version = int(number.rstrip("af"))
        major, minor = version // 10, version % 10
        specific = number[-1:] in ("a", "f")
        if kind == "sm":
            if (major, minor) == capability or (not specific and major == capability[0] and minor <= capability[1]):
                return arch
        elif not specific and (major, minor) <= capability:
            ptx = f"PTX of {arch}, compiled when it loads"
    return ptx


def _gpu_lines() -> list[str]:
    cuda = _library.cuda
    if not cuda.loaded:
        return [f"CUDA kernels   not used: {cuda.reason}"]
    lines = [f"CUDA kernels   compiled for {' '.join(cuda.archs)}"]
    if not torch.cuda.is_available():
        return [*lines, "GPU            none visible: CPU kernels will be used"]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        code = _covers(cuda.archs, capability)
        use = f"runs {code}" if code else "no compiled architecture fits: set TORCH_CUDA_ARCH_LIST and build again"
        lines.append(
            f"GPU {index}          {torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}: {use}"
        )
    return lines


def info() -> str:
    """The text that ``python -m mxfp4_ops info`` prints."""
    lines = [
        f"mxfp4_ops      {mxfp4_ops.__version__}",
        f"Python         {platform.python_version()}",
        f"torch          {torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        f"CPU kernels    {_library.cpu_capability()} ({platform.machine()}), {torch.get_num_threads()} threads",
        *_gpu_lines(),
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mxfp4_ops", description="MXFP4 ops for MoE models")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, compiled architectures and the kernels that will be used here")
    bench_parser = commands.add_parser("bench", help="times of the ops, of plain torch and of copies")
    bench.add_arguments(bench_parser)
    args = parser.parse_args(argv)
    try:
        if args.command == "bench":
            return bench.run(bench_parser, args)
        print(info())
    except BrokenPipeError:  # the reader had enough
        sys.stderr.close()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
