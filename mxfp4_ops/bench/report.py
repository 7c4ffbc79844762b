"""Results: JSON as they are saved, a table for the terminal, a plot.

A result is a dict of plain values, as JSON has them: ``format``, ``about`` (what ran where), ``options``, ``floors`` and
``jobs``. A job has its size, ``bytes``, and timings by name in ``variants``, ``peers`` and ``floors``; ``wrong`` has what
was not timed and why; with --host, ``host`` has the times of the calls on the host and of ``add``, torch.add.
"""

import json
from collections.abc import Callable
from pathlib import Path

from .._terminal import table as format_table
from .floors import LARGE_BYTES
from .timing import Timing

FORMAT = 1
SIZES = ("E", "m", "topk", "K")


def timing_entry(timing: Timing) -> dict:
    """A timing as JSON has it."""
    return {
        "median_us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "calls_per_sample": timing.calls,
        "samples_us": list(timing.samples_us),
    }


def save(result: dict, path: Path) -> None:
    """Write a result."""
    path.write_text(json.dumps(result, indent=1) + "\n")


_KEYS = {"about", "options", "floors", "jobs"}


def load(path: Path) -> dict:
    """Read a result.

    Raises:
        ValueError: the file is not a result; the text says why.
        OSError: the file cannot be read.
    """
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT or not _KEYS <= result.keys():
        raise ValueError(f"{path} is not a result of this bench (format {FORMAT})")
    return result


def copy_floor_us(job: dict) -> float:
    """The faster of the copies of the job's bytes."""
    return min(floor["median_us"] for floor in job["floors"].values())


def number(value: float) -> str:
    """Three digits at least, no more decimals than mean something."""
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def table(result: dict) -> str:
    """What ran, the floors, and a row for each variant and peer of each job at each size."""
    peers = list(dict.fromkeys(name for job in result["jobs"] for name in job["peers"]))
    host = any("host" in job for job in result["jobs"])
    heading = ["job", "variant", *SIZES, "us", "p10", "p90", "copy us", "/ copy", *(f"vs {peer}" for peer in peers)]
    rows = [heading + ["host us", "/ add"] * host]
    for job in result["jobs"]:
        start = [str(job[name]) for name in SIZES]
        floor = copy_floor_us(job)
        for name, timing in (job["variants"] | job["peers"]).items():
            us = timing["median_us"]
            row = [job["job"], name, *start, *(number(timing[key]) for key in ("median_us", "p10_us", "p90_us"))]
            row += [number(floor), number(us / floor)]
            row += [
                f"{number(job['peers'][peer]['median_us'] / us)}x" if peer in job["peers"] else "-" for peer in peers
            ]
            if host:
                times = job.get("host", {})
                spent = times[name]["median_us"] if name in times else None
                row += ["-", "-"] if spent is None else [number(spent), number(spent / times["add"]["median_us"])]
            rows.append(row)
        rows += [[job["job"], name, *start, "WRONG"] + ["-"] * (len(rows[0]) - 7) for name in job["wrong"]]
    lines = [*_header(result), "", format_table(rows, left=2), "", *_legend(result, bool(peers), host)]
    lines += [
        f"WRONG  {job['job']} {' '.join(f'{name}={job[name]}' for name in SIZES)}: {name}: {reason}"
        for job in result["jobs"]
        for name, reason in job["wrong"].items()
    ]
    return "\n".join(lines)


def _header(result: dict) -> list[str]:
    about, options, floors = result["about"], result["options"], result["floors"]
    commit = f" ({about['commit']})" if about["commit"] else ""
    overload = "functional (padding zeroed)" if options["functional"] else ".out (padding left alone)"
    without = f", {options['no_expert']:.0%} of the ids -1" if options["no_expert"] else ""
    large = LARGE_BYTES[about["device_type"]]
    rate = large / floors["large copy"]["median_us"] / 1e3
    return [
        f"mxfp4_ops {about['mxfp4_ops']}{commit}, torch {about['torch']}: {about['device']}",
        f"{overload}, {options['dtype']}, {options['routings']} {options['routing']} routings in turn{without}",
        f"empty {floors['empty']['median_us']:.2f} us; a copy of {large >> 20} MiB read and written: {rate:,.0f} GB/s",
    ]


def _legend(result: dict, peers: bool, host: bool) -> list[str]:
    cuda = result["about"]["device_type"] == "cuda"
    lines = [
        "us: median of a call, p10 and p90 over samples"
        + (", CUDA-graph replays, launch of the graph subtracted" if cuda else ", wall clock"),
        "copy: the faster of copy_ and an elementwise kernel that read and write as many bytes as the job must, together",
        "empty: " + ("a graph node that fills" if cuda else "a call that fills") + " one element (torch fill_)",
    ]
    if peers:
        lines.append("vs: how many times as long the same job takes in plain torch, eager and compiled")
    if host:
        lines.append("host: the time of an eager call on the host, / add: over that of torch.add on the job's input")
    if not cuda:
        lines.append("threads: --threads sets how many there are; how many share a call depends on its size")
    return lines


def plot(result: dict, path: Path) -> None:
    """Write a figure: for each job, time against E for each m, and fraction of the copy floor against m for each E."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple, list[dict]] = {}
    for job in result["jobs"]:
        groups.setdefault((job["job"], job["topk"], job["K"]), []).append(job)
    columns = max(len({job[key] for job in jobs}) for jobs in groups.values() for key in ("m", "E"))
    figure, axes = pyplot.subplots(
        2 * len(groups), columns, figsize=(4 * columns, 6.5 * len(groups)), squeeze=False, layout="constrained"
    )
    colors: dict[str, str] = {}

    def draw(ax, x: str, jobs: list[dict], of: Callable[[dict, float], float]) -> None:
        names = dict.fromkeys(name for job in jobs for name in job["variants"] | job["peers"])
        for name in names:
            points = [(job[x], (job["variants"] | job["peers"]).get(name), job) for job in jobs]
            points = [(at, of(job, timing["median_us"])) for at, timing, job in points if timing]
            color = colors.setdefault(name, f"C{len(colors)}")
            ax.plot(*zip(*sorted(points)), marker="o", markersize=4, label=name, color=color)
        ticks = sorted({job[x] for job in jobs})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.set_xlabel(x)

    for row, ((name, topk, K), jobs) in enumerate(groups.items()):
        for (key, x), line in zip((("m", "E"), ("E", "m")), axes[2 * row : 2 * row + 2]):
            values = sorted({job[key] for job in jobs})
            for ax, value in zip(line, values):
                chosen = sorted((job for job in jobs if job[key] == value), key=lambda job: job[x])
                if x == "E":
                    draw(ax, x, chosen, lambda job, us: us)
                    floors = [(job["E"], copy_floor_us(job)) for job in chosen]
                    ax.plot(*zip(*floors), color="0.5", linestyle="--", label="copy of the bytes")
                    ax.set_yscale("log")
                    ax.set_ylabel("us")
                else:
                    draw(ax, x, chosen, lambda job, us: copy_floor_us(job) / us)
                    ax.axhline(1.0, color="0.5", linestyle="--")
                    ax.set_ylim(bottom=0)
                    ax.set_ylabel("fraction of the copy floor")
                ax.set_title(f"{name}, topk {topk}, K {K}, {key} {value}", fontsize="medium")
                ax.grid(alpha=0.3)
            for ax in line[len(values) :]:
                ax.axis("off")
            line[0].legend(fontsize="small")
    figure.suptitle("\n".join(_header(result)[:2]), fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
