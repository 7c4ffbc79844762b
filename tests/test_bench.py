"""python -m mxfp4_ops bench: its peers and reference, routings, clocks, checks, table, JSON, plot and options."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import reference
import torch

from mxfp4_ops.__main__ import main
from mxfp4_ops.bench import floors, jobs, plain, report, routing, timing

TINY = "--E 5 --m 3,20 --topk 2 --K 96 --samples 3 --threads 1 --device cpu --no-expert 0.2"
KERNEL_VARIANTS = {
    "metadata": ["op"],
    "shuffle": ["op"],
    "quant": ["search", "sorted ids"],
    "silu_quant": ["search", "sorted ids"],
    "fused": ["fused"],
}
PIPELINE_VARIANTS = {"pipeline": ["search", "sorted ids", "fused"]}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """No time is spent on precision, and the settings of the process end with the test."""
    monkeypatch.setitem(timing.SAMPLE_US, "cpu", 100)
    monkeypatch.setitem(floors.LARGE_BYTES, "cpu", 1 << 20)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_inductor(monkeypatch):
    """Dynamo and AOTAutograd alone: what they trace is what counts, and Inductor takes most of the time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def bench(*args: str) -> int:
    """The exit status of the command with these arguments, each of which may be several."""
    return main(["bench", *" ".join(args).split()])


def read_table(text: str) -> list[dict[str, str]]:
    """A dict of heading -> cell for each row."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("job "))
    heading, *rows = (re.split(r"\s{2,}", line) for line in lines[start : lines.index("", start)] if line[0] != "-")
    return [dict(zip(heading, row, strict=True)) for row in rows]


# Peers and reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_quant_of_every_value(dtype):
    every = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    mixed = every[torch.randint(1 << 16, (300, 96))]
    for x in (every.view(-1, 64), mixed):
        for got, want in zip(plain.quantize_blocks(x), reference.quantize_blocks(x), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_silu_of_every_gate(dtype):
    gate = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    got, want = plain.exact_silu(gate.float()), reference._silu_of_every(dtype)
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    assert same.all()
    x = torch.cat((gate.view(-1, 32), torch.randn(2048, 32).to(dtype)), 1)
    got, want = plain.exact_silu_and_mul(x), reference.silu_and_mul(x)
    assert torch.equal(got.nan_to_num(), want.nan_to_num()) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("name", routing.ROUTINGS)
@pytest.mark.parametrize("E", [4, 33])
def test_plain_ops_equal_the_oracle(name, E):
    ids = routing.topk_ids(name, 150, 3, E, 0.2, torch.Generator().manual_seed(0))
    ids[0, 0] = E  # no expert, as -1
    x = torch.randn(150, 160).bfloat16()
    want = reference.metadata(ids, E, 96, 160)
    rows = reference.shuffle_rows(x, want["input_permutation"])
    where = (want["expert_offsets"], want["blockscale_offsets"])
    codes, scales = reference.experts_quant(rows, *where, E, want["sorted_expert_ids"])

    data = plain.metadata(ids, E, 96, 160)
    for field, expected in want.items():
        got = getattr(data, field)
        assert got.dtype == torch.int32 and torch.equal(got, expected), field
    assert torch.equal(plain.shuffle_rows(x, data.input_permutation), rows)
    for got in (
        plain.experts_quant(rows, *where, want["sorted_expert_ids"]),
        plain.moe_permute_quant(x, ids, E, 96)[7:],
    ):
        assert torch.equal(got[0], codes) and torch.equal(got[1], scales)

    flat = torch.full((scales.numel() + 1,), 77, dtype=torch.uint8)
    kept = reference.experts_quant(rows, *where, E, output_scale=torch.full_like(scales, 77))[1]
    assert torch.equal(plain.moe_permute_quant(x, ids, E, 96, flat)[8], kept)


# Routings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_experts_of_a_token_are_distinct_and_in_range(name):
    for m, topk, E in ((1, 1, 1), (40, 8, 8), (200, 3, 17)):
        ids = routing.topk_ids(name, m, topk, E, 0.0, torch.Generator().manual_seed(1))
        assert ids.shape == (m, topk) and ids.dtype == torch.int32
        assert all(len(set(row)) == topk and 0 <= min(row) <= max(row) < E for row in ids.tolist())


@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_a_seed_decides_the_ids_and_a_fraction_is_without_expert(name):
    def ids(seed: int, no_expert: float) -> torch.Tensor:
        return routing.topk_ids(name, 100, 4, 32, no_expert, torch.Generator().manual_seed(seed))

    assert torch.equal(ids(0, 0.1), ids(0, 0.1)) and not torch.equal(ids(0, 0.1), ids(1, 0.1))
    for fraction in (0.0, 0.1, 1.0):
        assert int((ids(0, fraction) == -1).sum()) == round(fraction * 400)


def test_how_even_routings_are():
    def shares(name: str) -> list[float]:
        ids = routing.topk_ids(name, 2000, 2, 16, 0.0, torch.Generator().manual_seed(2))
        return [count / 2000 for _, count in Counter(ids.flatten().tolist()).most_common()]

    uniform, skewed, hot = map(shares, ("uniform", "skewed", "hot"))
    assert uniform[0] < 0.16 and uniform[-1] > 0.09  # 2 / 16 each
    assert 0.4 < skewed[0] < 0.7 and skewed == sorted(skewed, reverse=True) and skewed[-1] < 0.06
    assert hot[0] == 1.0 and hot[1] < 0.1  # 1 / 15 each


# Clocks ---------------------------------------------------------------------------------------------------------------


class FakeCuda:
    """torch.cuda on which a call takes 3 us, and a launch of a graph 11 us."""

    now = 0.0
    captured: list | None = None

    class Stream:
        def wait_stream(self, other):
            pass

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = FakeCuda.now

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) / 1000

    class CUDAGraph:
        def pool(self):
            return (0, 0)

        def replay(self):
            FakeCuda.now += 11 + 3 * len(self.calls)

    @staticmethod
    def call(name):
        if FakeCuda.captured is not None:
            FakeCuda.captured.append(name)

    @staticmethod
    @contextmanager
    def graph(graph, pool=None):
        FakeCuda.captured = graph.calls = []
        yield
        FakeCuda.captured = None

    @staticmethod
    @contextmanager
    def stream(stream):
        yield

    current_stream = Stream


def test_graph_clock_subtracts_what_a_launch_costs(monkeypatch):
    for name in ("Stream", "Event", "CUDAGraph", "graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(FakeCuda, name))
    calls = tuple(functools.partial(FakeCuda.call, i) for i in range(8))
    clock = timing.GraphClock(calls)
    short, long = (graph.calls for graph in clock.graphs)
    assert len(long) == 2 * len(short) and short == list(range(8)) * (len(short) // 8) and 8 <= len(short) <= 128
    assert 3 * len(short) > timing.GRAPH_US / 2
    assert clock.sample() == pytest.approx(3)
    times = timing.measure({"a": calls, "b": calls[:1]}, timing.GraphClock, 4)
    assert {name: pytest.approx(3) for name in "ab"} == {name: time.median_us for name, time in times.items()}


def test_subjects_are_timed_in_turns_and_slow_ones_less_often(monkeypatch):
    order = []

    class Clock:
        def __init__(self, calls):
            self.name, self.calls = calls[0](), 1

        def sample(self):
            order.append(self.name)
            return float(len(order))

    monkeypatch.setattr(timing, "_seconds", lambda sample: {1.0: 0.01, 2.0: timing.BUDGET_S / 6}[sample()])
    ticks = []
    times = timing.measure({"a": (lambda: "a",), "b": (lambda: "b",)}, Clock, 12, lambda: ticks.append(0))
    assert "".join(order[2:]) == "aba" * 6 and len(ticks) == 12
    assert len(times["a"].samples_us) == 12 and len(times["b"].samples_us) == 6


def test_timing_percentiles():
    time = timing.Timing(tuple(map(float, range(11))), 1)
    assert (time.p10_us, time.median_us, time.p90_us) == (1.0, 5.0, 9.0)


@pytest.mark.parametrize("clock", [timing.WallClock, timing.HostClock])
def test_clocks_of_the_cpu_call_in_turns(clock):
    called = []
    times = timing.measure({"a": tuple(functools.partial(called.append, i) for i in range(3))}, clock, 3)
    assert times["a"].median_us > 0 and times["a"].calls % 3 == 0
    assert len(set(Counter(called).values())) == 1


# The command ----------------------------------------------------------------------------------------------------------


def check_result(path: Path, table: list[dict[str, str]], variants: dict[str, list[str]], peers: list[str]) -> dict:
    result = report.load(path)
    rows = iter(table)
    for job in result["jobs"]:
        assert list(job["variants"]) == variants[job["job"]] and list(job["peers"]) == peers and job["wrong"] == {}
        assert job["bytes"] > 0 and set(job["floors"]) == {"copy", "copy kernel"}
        for name, time in (job["variants"] | job["peers"]).items():
            assert 0 < time["p10_us"] <= time["median_us"] <= time["p90_us"]
            assert len(time["samples_us"]) == 3 and time["calls_per_sample"] % 8 == 0
            row = next(rows)
            assert [row[key] for key in ("job", "variant", "E", "m", "topk", "K")] == [
                job["job"],
                name,
                *(str(job[key]) for key in report.SIZES),
            ]
            assert row["us"] == report.number(time["median_us"])
            assert row["/ copy"] == report.number(time["median_us"] / report.copy_floor_us(job))
            for peer in peers:
                ratio = job["peers"][peer]["median_us"] / time["median_us"]
                assert row[f"vs {peer}"] == report.number(ratio) + "x"
    assert next(rows, None) is None
    return result


@pytest.mark.parametrize("overload", [[], ["--functional"]], ids=["out", "functional"])
@pytest.mark.parametrize("mode, variants", [("kernel", KERNEL_VARIANTS), ("pipeline", PIPELINE_VARIANTS)])
def test_table_and_json(tmp_path, capsys, mode, variants, overload):
    file = tmp_path / "result.json"
    args = ["--mode", mode, "--peers", "torch", "--host", "--commit", "abc", "--json", str(file), *overload]
    assert bench(TINY, *args) == 0
    printed = capsys.readouterr()
    result = check_result(file, read_table(printed.out), variants, ["torch"])
    assert "\r" not in printed.err, "a bar was drawn where there is no terminal"
    assert "pipeline E=5 m=20 topk=2 K=96: timing" in printed.err or mode == "kernel"

    assert [(job["job"], job["m"]) for job in result["jobs"]] == [(name, m) for m in (3, 20) for name in variants]
    about, options = result["about"], result["options"]
    assert (about["torch"], about["commit"], about["device_type"], about["threads"]) == (
        torch.__version__,
        "abc",
        "cpu",
        1,
    )
    assert options["functional"] == bool(overload) and options["dtype"] == "bf16" and options["no_expert"] == 0.2
    assert set(result["floors"]) == {"empty", "large copy"}
    for job in result["jobs"]:
        assert list(job["host"]) == [*variants[job["job"]], "add"]
    for row in read_table(printed.out):
        assert (row["/ add"] == "-") == (row["variant"] == "torch")

    assert bench("--from-json", str(file)) == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize("dtype", jobs.DTYPES)
@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_every_routing_and_dtype_is_right(capsys, name, dtype):
    options = f"--E 20 --m 1,150 --topk 3 --K 160 --routing {name} --dtype {dtype} --peers torch --routings 3"
    every = ",".join(sum(jobs.MODES.values(), ()))
    assert bench(TINY, options, "--jobs", every) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_compiled_peers_are_one_graph_and_right(tmp_path, capsys, no_inductor):
    for mode, variants in (("kernel", KERNEL_VARIANTS), ("pipeline", PIPELINE_VARIANTS)):
        file = tmp_path / "result.json"
        assert bench(TINY, "--mode", mode, "--json", str(file)) == 0
        check_result(file, read_table(capsys.readouterr().out), variants, ["torch", "compile"])


@pytest.mark.slow
def test_peers_compiled_by_inductor_are_right(compile_anew):
    assert bench(TINY, "--m", "20", "--jobs", "metadata,shuffle,quant,silu_quant,pipeline") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("overload", [[], ["--functional"]], ids=["out", "functional"])
def test_gpu_times_are_of_graphs(tmp_path, capsys, overload):
    file = tmp_path / "result.json"
    args = "--E 16 --topk 8 --K 256 --samples 3 --device cuda --host"
    both = (("pipeline", "1,8", PIPELINE_VARIANTS, ["torch", "compile"]), ("kernel", "8", KERNEL_VARIANTS, ["torch"]))
    for mode, m, variants, peers in both:
        assert bench(args, "--m", m, "--mode", mode, "--peers", ",".join(peers), "--json", str(file), *overload) == 0
        printed = capsys.readouterr().out
        result = check_result(file, read_table(printed), variants, peers)
        assert result["about"]["device"] == torch.cuda.get_device_name(0) and "CUDA-graph replays" in printed
        # Faster than a graph's node would mean that something was not captured; a launch takes at least 2 us.
        assert all(time["median_us"] > 0.2 for job in result["jobs"] for time in job["variants"].values())
        assert result["floors"]["empty"]["median_us"] < 2
    torch._dynamo.reset()


def test_bytes_are_what_a_job_must_move(tmp_path):
    def nbytes(*args: str) -> dict[str, int]:
        file = tmp_path / "result.json"
        sizes = "--E 4 --m 10 --topk 2 --K 96 --no-expert 0 --routings 2 --peers none --jobs metadata,shuffle,quant,silu_quant,fused"
        assert bench(TINY, sizes, "--json", str(file), *args) == 0
        return {job["job"]: job["bytes"] for job in report.load(file)["jobs"]}

    ids, hidden, rows, codes, scales = 80, 10 * 96 * 2, 20 * 96 * 2, 20 * 48, 20 * 3
    arrays = 4 * (5 + 5 + 12 + 12 + 3 * 20)
    want = {
        "metadata": ids + arrays,
        "shuffle": hidden + 80 + rows,
        "quant": rows + 40 + codes + scales,
        "silu_quant": 2 * rows + 40 + codes + scales,
        "fused": hidden + ids + arrays + codes + scales,
    }
    assert nbytes() == want
    padded = (20 + 127 * 4) // 128 * 128 * 4
    of_quant = ("quant", "silu_quant", "fused")
    assert nbytes("--functional") == {k: v + (padded - scales) * (k in of_quant) for k, v in want.items()}


# What is wrong is not timed -------------------------------------------------------------------------------------------


def flip(results, index):
    results[index].view(-1)[-1] ^= 1
    return results


# name of the op, how its results are changed, what the report must name
BROKEN = {
    "code": ("moe_permute_mxfp4_quant", lambda r: flip(r, 7), {"fused": "output differs in 1 of 1920 bytes"}),
    "padding": ("moe_permute_mxfp4_quant", lambda r: flip(r, 8), {"fused": "output_scale differs in 1 of"}),
    "permutation": (
        "get_cutlass_moe_mm_data",
        lambda r: flip(r, 5),
        {"search": "output_permutation differs in 1 of 160", "sorted ids": "output_permutation differs in 1 of 160"},
    ),
    "unwritten": (
        "moe_permute_mxfp4_quant",
        lambda r: [t.fill_(jobs.POISON) for t in r[:1]] and r,
        {"fused": "expert_off"},
    ),
}


@pytest.mark.parametrize("overload", [[], ["--functional"]], ids=["out", "functional"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_op_is_not_timed(tmp_path, monkeypatch, capsys, case, overload):
    op, change, reasons = BROKEN[case]
    original = jobs._Builder.op

    def broken(self, name, spec):
        call = original(self, name, spec)
        return (lambda *args: change(call(*args))) if name == op else call

    monkeypatch.setattr(jobs._Builder, "op", broken)
    file = tmp_path / "result.json"
    args = ["--m", "20", "--no-expert", "0", "--peers", "torch", "--json", str(file), *overload]
    assert bench(TINY, *args) == 1
    printed = capsys.readouterr().out
    table = {row["variant"]: row for row in read_table(printed)}
    (job,) = report.load(file)["jobs"]
    assert set(table) == {"search", "sorted ids", "fused", "torch"} and set(job["wrong"]) == set(reasons)
    for name, row in table.items():
        assert (row["us"] == "WRONG") == (name in reasons) == (name not in job["variants"] | job["peers"])
    for name, reason in reasons.items():
        assert job["wrong"][name].startswith(reason)
        assert f"WRONG  pipeline E=5 m=20 topk=2 K=96: {name}: {reason}" in printed
    assert bench("--from-json", str(file)) == 1


def test_a_wrong_peer_is_not_timed(monkeypatch, capsys):
    original = plain.moe_permute_quant
    monkeypatch.setattr(plain, "moe_permute_quant", lambda *args: flip(original(*args), 7))
    assert bench(TINY, "--peers", "torch") == 1
    rows = read_table(capsys.readouterr().out)
    assert [row["variant"] for row in rows if row["us"] == "WRONG"] == ["torch", "torch"]


def test_a_peer_that_does_not_compile_is_left_out(monkeypatch, capsys):
    def fails(*args):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: fails)
    assert bench(TINY) == 1
    assert "compile: RuntimeError: no compiler\n" in capsys.readouterr().out


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, message",
    [
        (["--mode", "both"], "invalid choice: 'both'"),
        (["--E", "4,0"], "--E: must be whole numbers, with commas between, from 1 to 2147483647, got '4,0'"),
        (["--m", "x"], "--m: must be whole numbers, with commas between, from 1 to 2147483647, got 'x'"),
        (["--K", "64,48"], "--K: must be multiples of 32, got 48"),
        (["--E", "8,4", "--topk", "5"], "--topk: must be at most --E 4, got 5"),
        (["--no-expert", "1.5"], "--no-expert: must be a number from 0 to 1, got '1.5'"),
        (["--no-expert", "nan"], "--no-expert: must be a number from 0 to 1, got 'nan'"),
        (["--peers", "torch,jax"], "--peers: must be of torch, compile or none, got 'jax'"),
        (["--jobs", "gemm"], "--jobs: must be of metadata, shuffle, quant, silu_quant, fused, pipeline, got 'gemm'"),
        (["--dtype", "fp32"], "invalid choice: 'fp32'"),
        (["--samples", "2"], "--samples: must be a whole number from 3 to 2147483647, got '2'"),
        (["--device", "meta"], "--device: must be cpu, cuda or cuda:INDEX, got 'meta'"),
        (["--json", "/no/such/folder/x.json"], "--json: there is no folder /no/such/folder"),
        (["--json", "FOLDER"], "--json: FOLDER is a folder"),
        (["--plot", "x.pdf"], "--plot: must end in .png, got 'x.pdf'"),
        (["--from-json", "/no/such/file"], "--from-json: cannot read /no/such/file: No such file or directory"),
        (["--from-json", "TEXT"], "--from-json: TEXT is not JSON"),
        (["--from-json", "OTHER"], "--from-json: OTHER is not a result of this bench (format 1)"),
        (["--from-json", "PART"], "--from-json: PART is not a result of this bench (format 1)"),
        (["--from-json", "PART", "--E", "4"], "--E: not allowed with --from-json, with which nothing is timed"),
    ],
)
def test_bad_arguments(tmp_path, capsys, args, message):
    (tmp_path / "TEXT").write_text("text")
    (tmp_path / "OTHER").write_text("{}")
    (tmp_path / "PART").write_text('{"format": 1, "options": {}, "floors": {}, "jobs": []}')
    (tmp_path / "FOLDER").mkdir()
    places = {name: str(tmp_path / name) for name in ("TEXT", "OTHER", "PART", "FOLDER")}
    with pytest.raises(SystemExit) as error:
        bench(*(places.get(arg, arg) for arg in args))
    assert error.value.code == 2
    assert message in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def test_ctrl_c_shows_what_had_ended(capsys, monkeypatch, tmp_path):
    from mxfp4_ops.bench import cli

    run_job, calls = cli._run_job, []

    def interrupted(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return run_job(*args)

    monkeypatch.setattr(cli, "_run_job", interrupted)
    file = tmp_path / "result.json"
    options = ("--E", "4", "--m", "2,3", "--topk", "1", "--K", "64", "--peers", "none", "--device", "cpu")
    assert bench(*options, "--json", str(file)) == 130
    printed = capsys.readouterr()
    assert "interrupted" in printed.err and len(json.loads(file.read_text())["jobs"]) == 1
    assert bench("--from-json", str(file)) == 0
    assert capsys.readouterr().out == printed.out


def test_presets(capsys):
    from mxfp4_ops.bench import cli

    def sizes(*args: str) -> list[tuple]:
        parser = cli.argparse.ArgumentParser()
        cli.add_arguments(parser)
        return [(s.E, s.m, s.topk, s.K) for s in cli._all_sizes(parser, parser.parse_args(args))]

    decode = [(E, m, 8, 7168) for E in (16, 64, 256, 512) for m in (1, 8, 32, 128)]
    assert sizes() == sizes("--preset", "decode") == decode
    assert sizes("--preset", "prefill") == [(E, m, 8, 7168) for E in (64, 256) for m in (512, 4096, 8192)]
    assert sizes("--preset", "prefill", "--E", "4", "--m", "1,2", "--topk", "2") == [(4, 1, 2, 7168), (4, 2, 2, 7168)]


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "result.json", tmp_path / "plot.png"
    sizes = "--E 4,5 --peers torch"
    assert bench(TINY, sizes, "--json", str(file), "--plot", str(plot)) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    plot.unlink()
    assert bench("--from-json", str(file), "--plot", str(plot)) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench(TINY, "--plot", "x.png")
    assert "argument --plot: needs matplotlib: pip install 'mxfp4_ops[bench]'" in capsys.readouterr().err


def test_the_package_does_not_import_the_bench():
    code = "import sys, mxfp4_ops; sys.exit(any('bench' in name for name in sys.modules if 'mxfp4' in name))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert importlib.util.find_spec("mxfp4_ops.bench") is not None
