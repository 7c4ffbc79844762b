"""``python -m mxfp4_ops bench``: its options, and the run."""

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

import mxfp4_ops

from .. import _library
from .._terminal import Progress
from . import floors, jobs, report
from .routing import ROUTINGS
from .timing import GraphClock, HostClock, Timing, WallClock, measure

DESCRIPTION = """\
Times the ops (medians of many samples, CUDA-graph replays on a GPU) beside the same job in plain torch, eager and
compiled, and beside a copy of the same bytes. Every result is checked byte for byte first: nothing wrong is timed."""

PRESETS = {
    "decode": {"E": [16, 64, 256, 512], "m": [1, 8, 32, 128], "topk": [8], "K": [7168]},
    "prefill": {"E": [64, 256], "m": [512, 4096, 8192], "topk": [8], "K": [7168]},
}
SAMPLES = {"cuda": 30, "cpu": 10}
HOST_SAMPLES = 10  # times as many: they are short


LARGEST = 2**31 - 1


def _whole(least: int, many: bool = False) -> Callable[[str], int | list[int]]:
    """Parses a whole number, or a list of them."""

    def parse(text: str) -> int | list[int]:
        parts = text.split(",") if many else [text]
        if not all(part.isascii() and part.isdecimal() and least <= int(part) <= LARGEST for part in parts):
            numbers = "whole numbers, with commas between," if many else "a whole number"
            raise argparse.ArgumentTypeError(f"must be {numbers} from {least} to {LARGEST}, got {text!r}")
        return list(dict.fromkeys(map(int, parts))) if many else int(text)

    return parse


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def _names(*known: str, none: bool = False) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        if none and text == "none":
            return ()
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            choice = ", ".join(known) + " or none" * none
            raise argparse.ArgumentTypeError(f"must be of {choice}, got {', '.join(map(repr, unknown))}")
        return tuple(name for name in known if name in names)

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of the bench."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    what = parser.add_argument_group("what is timed")
    what.add_argument(
        "--mode",
        choices=jobs.MODES,
        default="pipeline",
        help="kernel: each op alone; pipeline: metadata, shuffle and quant, as three ops and as one (the default)",
    )
    all_jobs = tuple(itertools.chain(*jobs.MODES.values()))
    what.add_argument(
        "--jobs", type=_names(*all_jobs), metavar="LIST", help=f"instead of a mode: of {','.join(all_jobs)}"
    )
    what.add_argument("--functional", action="store_true", help="the functional overloads, which zero the padding")
    peers = jobs.PEERS
    what.add_argument(
        "--peers",
        type=_names(*peers, none=True),
        default=peers,
        metavar="LIST",
        help=f"the same job in plain torch: {','.join(peers)} (the default) or none",
    )
    what.add_argument("--host", action="store_true", help="also the host's time of a call, beside that of torch.add")

    sizes = parser.add_argument_group("sizes", "lists have commas between; every combination is timed")
    sizes.add_argument("--preset", choices=PRESETS, default="decode", help="sizes that are not given (decode)")
    sizes.add_argument("--E", type=_whole(1, many=True), metavar="LIST", help="experts")
    sizes.add_argument("--m", type=_whole(1, many=True), metavar="LIST", help="tokens")
    sizes.add_argument("--topk", type=_whole(1, many=True), metavar="LIST", help="experts of a token")
    sizes.add_argument("--K", type=_whole(1, many=True), metavar="LIST", help="quantised columns, a multiple of 32")
    sizes.add_argument("--n", type=_whole(1), default=2048, help="intermediate size, which no time depends on (2048)")
    sizes.add_argument("--dtype", choices=jobs.DTYPES, default="bf16", help="of the hidden states (bf16)")

    routing = parser.add_argument_group("routing")
    routing.add_argument("--routing", choices=ROUTINGS, default="uniform", help="how tokens choose (uniform)")
    routing.add_argument(
        "--no-expert", type=_fraction, default=0.0, metavar="X", help="fraction of ids that are -1 (0)"
    )
    routing.add_argument("--routings", type=_whole(1), default=8, metavar="N", help="different ones, in turn (8)")
    routing.add_argument("--seed", type=_whole(0), default=0, help="of ids and values (0)")

    how = parser.add_argument_group("how")
    how.add_argument("--device", help="cpu, cuda or cuda:INDEX (the GPU, where there is one)")
    how.add_argument("--threads", type=_whole(1), metavar="N", help="CPU threads (torch's choice)")
    how.add_argument("--samples", type=_whole(3), metavar="N", help="of each time (30 on a GPU, 10 on a CPU)")

    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    out.add_argument("--commit", metavar="HASH", help="the commit that is timed, for the record")
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (needs matplotlib)")
    out.add_argument("--from-json", type=Path, metavar="FILE", help="show results that --json wrote; nothing is timed")


def _device(parser: argparse.ArgumentParser, name: str | None) -> torch.device:
    has_gpu = _library.cuda.loaded and torch.cuda.is_available()
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        parser.error(f"argument --device: must be cpu, cuda or cuda:INDEX, got {name!r}")
    if device.type == "cuda":
        if not has_gpu:
            parser.error(f"argument --device: {name!r}: {_library.cuda.reason or 'no CUDA device'}")
        if (device.index or 0) >= torch.cuda.device_count():
            parser.error(f"argument --device: {name!r}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def _all_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[jobs.Size]:
    lists = {name: getattr(args, name) or values for name, values in PRESETS[args.preset].items()}
    for K in lists["K"]:
        if K % 32:
            parser.error(f"argument --K: must be multiples of 32, got {K}")
    if max(lists["topk"]) > min(lists["E"]):
        parser.error(f"argument --topk: must be at most --E {min(lists['E'])}, got {max(lists['topk'])}")
    return [
        jobs.Size(E, m, topk, K)
        for K, topk, E, m in itertools.product(*(lists[name] for name in ("K", "topk", "E", "m")))
    ]


def _check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and not path.parent.is_dir():
            parser.error(f"argument --{name}: there is no folder {path.parent}")
        if path and path.is_dir():
            parser.error(f"argument --{name}: {path} is a folder")
    if args.plot and args.plot.suffix != ".png":
        parser.error(f"argument --plot: must end in .png, got {str(args.plot)!r}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: needs matplotlib: pip install 'mxfp4_ops[bench]'")


def _check_nothing_is_timed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for action in parser._actions:
        if action.dest in ("help", "from_json", "plot") or getattr(args, action.dest) == action.default:
            continue
        parser.error(f"argument {action.option_strings[0]}: not allowed with --from-json, with which nothing is timed")


def _about(device: torch.device, commit: str | None) -> dict:
    cuda = device.type == "cuda"
    threads = torch.get_num_threads()
    cpu = f"CPU, {_library.cpu_capability()} kernels, {threads} thread{'s' * (threads > 1)}"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu,
        "device_type": device.type,
        "threads": threads,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mxfp4_ops": mxfp4_ops.__version__,
        "commit": commit,
    }


def _entries(timings: dict[str, Timing]) -> dict[str, dict]:
    return {name: report.timing_entry(timing) for name, timing in timings.items()}


def _run_job(job: jobs.Job, args: argparse.Namespace, device: torch.device, progress: Progress) -> dict:
    label = f"{job.name} {job.size}"
    progress.show(f"{label}: checking")
    wrong = job.verify()
    right = [variant for variant in job.variants if variant.name not in wrong]
    copies = floors.copies(job.nbytes, device)
    subjects = {variant.name: variant.calls for variant in right} | {name: (call,) for name, call in copies.items()}
    progress.show(f"{label}: timing")
    clock = GraphClock if device.type == "cuda" else WallClock
    times = _entries(measure(subjects, clock, args.samples, progress.advance))
    entry = {
        "job": job.name,
        **vars(job.size),
        "bytes": job.nbytes,
        "variants": {variant.name: times[variant.name] for variant in right if not variant.is_peer},
        "peers": {variant.name: times[variant.name] for variant in right if variant.is_peer},
        "floors": {name: times[name] for name in copies},
        "wrong": wrong,
    }
    if args.host:
        progress.show(f"{label}: host")
        subjects = {variant.name: variant.calls for variant in right if not variant.is_peer} | {"add": (job.add,)}
        entry["host"] = _entries(measure(subjects, HostClock, HOST_SAMPLES * args.samples))
    return entry


def _run(args: argparse.Namespace, device: torch.device, sizes: list[jobs.Size]) -> tuple[dict, bool]:
    """The result, of the jobs that ended before Ctrl-C where that came, and whether it came."""
    settings = jobs.Settings(
        device=device,
        dtype=jobs.DTYPES[args.dtype],
        functional=args.functional,
        routing=args.routing,
        no_expert=args.no_expert,
        routings=args.routings,
        n=args.n,
        seed=args.seed,
        peers=args.peers,
    )
    names = args.jobs or jobs.MODES[args.mode]
    progress = Progress((len(sizes) * len(names) + 1) * args.samples)
    progress.show("floors")
    clock = GraphClock if device.type == "cuda" else WallClock
    subjects = {name: (call,) for name, call in (floors.empty(device) | floors.large_copy(device)).items()}
    result = {
        "format": report.FORMAT,
        "about": _about(device, args.commit),
        "options": {
            "mode": None if args.jobs else args.mode,
            "jobs": list(names),
            "samples": args.samples,
            **vars(settings),
            "device": str(device),
            "dtype": args.dtype,
            "peers": list(args.peers),
        },
        "floors": _entries(measure(subjects, clock, args.samples, progress.advance)),
        "jobs": [],
    }
    interrupted = False
    try:
        for size in sizes:
            if "compile" in args.peers:
                torch.compiler.reset()  # each size is a compilation of its own, and Dynamo stops after a few
            inputs = jobs.Inputs(size, settings)
            for name in names:
                result["jobs"].append(_run_job(jobs.build(name, inputs), args, device, progress))
                if args.json:
                    report.save(result, args.json)  # each time, so that nothing measured is lost with a run that fails
    except KeyboardInterrupt:
        interrupted = True
    progress.close()
    return result, interrupted


@torch.no_grad()
def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """The bench, by its parsed options: 0, 1 where something was wrong and not timed, or 130 after Ctrl-C."""
    _check_files(parser, args)
    interrupted = False
    if args.from_json:
        _check_nothing_is_timed(parser, args)
        try:
            result = report.load(args.from_json)
        except OSError as error:
            parser.error(f"argument --from-json: cannot read {args.from_json}: {error.strerror}")
        except ValueError as error:
            parser.error(f"argument --from-json: {error}")
    else:
        device = _device(parser, args.device)
        sizes = _all_sizes(parser, args)
        args.samples = args.samples or SAMPLES[device.type]
        if args.threads:
            torch.set_num_threads(args.threads)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            result, interrupted = _run(args, device, sizes)
    if args.plot:
        report.plot(result, args.plot)
    print(report.table(result))
    wrong = any(job["wrong"] for job in result["jobs"])
    if wrong:
        print("mxfp4_ops bench: not everything was right", file=sys.stderr)
    if interrupted:
        print("mxfp4_ops bench: interrupted; what is above had ended", file=sys.stderr)
        return 130
    return 1 if wrong else 0
