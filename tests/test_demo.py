"""examples/decode.py: what it prints, its exit status, and that a mode which computes something else is found out."""

import importlib.util
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._inductor.config

import mxfp4_ops
from mxfp4_ops.passes import MXFP4Passes

SCRIPT = Path(__file__).parents[1] / "examples" / "decode.py"
SIZES = "--layers 1 --hidden 64 --intermediate 32 --heads 2 --experts 5 --topk 3 --batch 3 --prompt 20 --steps 6"
SMALL = SIZES.split()
RATES = ("prefill tok/s", "decode tok/s")
COLUMNS = (*RATES, "graph breaks", "recompiles", "captured graphs", "tokens agree", "bytes agree")


@pytest.fixture
def decode(monkeypatch):
    """The script as a module, whose settings of the process end with the test."""
    spec = importlib.util.spec_from_file_location("decode_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture
def no_inductor(monkeypatch):
    """Dynamo and AOTAutograd alone: what they trace is what counts, and Inductor takes most of the time."""
    for module in (torch, mxfp4_ops):
        monkeypatch.setattr(module, "compile", partial(module.compile, backend="aot_eager"))


@pytest.fixture
def few_timings(decode, monkeypatch):
    monkeypatch.setattr(decode, "PAIRS", 2)
    monkeypatch.setattr(decode, "SECONDS", 0.0)


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Mode -> column -> cell."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    assert tuple(re.split(r"\s{2,}", lines[start])) == ("mode", *COLUMNS)
    rows = [line.split() for line in lines[start + 2 : lines.index("", start)]]
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows}


def run_script(*args: str) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *SMALL, *args], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stderr, "a bar was drawn where there is no terminal"
    return done.stdout


def check_row(row: dict[str, str], breaks: str, recompiles: str, captured: str) -> None:
    assert all(float(row[rate].replace(",", "")) > 0 for rate in RATES)
    assert [row[column] for column in COLUMNS[2:]] == [breaks, recompiles, captured, "yes", "yes"]


def check_report(output: str, mode: str) -> None:
    """One layer's two quants, in the graphs of prefill and decode step, whether or not a cache has these already."""
    lines = output.splitlines()
    start = lines.index(f"FX passes in mode {mode}, on the graphs of prefill and decode step:") + 1
    assert [line.split() for line in lines[start : start + 4]] == [
        ["rule", "matched", "rewritten", "skipped"],
        ["merge_metadata", "0", "0", "0"],
        ["sorted_expert_ids", "4", "4", "0"],
        ["fuse_permute", "2", "2", "0"],
    ]


def check_ratio(output: str, experts: int, pairs: int) -> None:
    line = rf"(?m)^decode step, E = {experts}: (\S+) us with the passes, (\S+) us without: ratio (\S+) "
    line += rf"\(median of {pairs} pairs, spread (\S+) to (\S+)\)$"
    ours, theirs, ratio, low, high = (float(n.replace(",", "")) for n in re.search(line, output).groups())
    assert ours > 0 and theirs > 0 and 0 < low <= ratio <= high


def test_cpu_modes_agree():
    output = run_script("--device", "cpu")
    rows = read_table(output)
    assert list(rows) == ["eager", "compile", "passes"]
    check_row(rows["eager"], "-", "-", "-")
    check_row(rows["compile"], "0", "0", "-")
    check_row(rows["passes"], "0", "0", "-")
    check_report(output, "passes")
    assert "decode step, E" not in output


@pytest.mark.gpu
def test_gpu_modes_agree():
    output = run_script("--device", "cuda")
    rows = read_table(output)
    assert list(rows) == ["eager", "compile", "passes", "reduce-overhead", "reduce-overhead+passes", "cuda-graph"]
    check_row(rows["eager"], "-", "-", "-")
    check_row(rows["compile"], "0", "0", "-")
    check_row(rows["passes"], "0", "0", "-")
    check_row(rows["reduce-overhead"], "0", "0", "2")
    check_row(rows["reduce-overhead+passes"], "0", "0", "2")
    check_row(rows["cuda-graph"], "-", "-", "2")
    check_report(output, "passes")
    check_report(output, "reduce-overhead+passes")
    check_ratio(output, 256, 20)


def test_ratio_is_of_a_rewritten_and_an_unchanged_program(decode, few_timings, capsys):
    searching = []

    def count(graph: torch.fx.Graph) -> None:
        quants = [node for node in graph.nodes if "experts_quant" in str(node.target)]
        ids = [node.args[4] if len(node.args) > 4 else node.kwargs.get("sorted_expert_ids") for node in quants]
        searching.append((len(quants), ids.count(None)))

    args = [*SMALL, "--device", "cpu", "--modes", "eager", "--ratio-experts", "7"]
    with torch._inductor.config.patch(post_grad_custom_post_pass=count):
        assert decode.main(args) == 0
    assert searching == [(1, 0), (2, 2)]  # the other quant is in the fused op
    check_ratio(capsys.readouterr().out, 7, 2)


def test_quants_left_on_offset_search_are_found_out(decode, no_inductor, few_timings, monkeypatch, capsys):
    monkeypatch.setattr(decode, "MXFP4Passes", partial(MXFP4Passes, sorted_expert_ids=False))
    assert decode.main([*SMALL, "--device", "cpu", "--modes", "passes", "--ratio-experts", "5"]) == 1
    output = capsys.readouterr().out
    assert "DIFFERENT   passes: 0 of 4 quants were given sorted_expert_ids" in output
    assert "DIFFERENT   decode step, E = 5: 0 of 2 quants were given sorted_expert_ids" in output


def test_quants_that_are_not_fused_are_found_out(decode, no_inductor, monkeypatch, capsys):
    monkeypatch.setattr(decode, "MXFP4Passes", partial(MXFP4Passes, fuse_permute=False))
    assert decode.main([*SMALL, "--device", "cpu", "--modes", "passes"]) == 1
    assert "DIFFERENT   passes: 0 of 2 quants were fused with metadata and shuffle" in capsys.readouterr().out


def test_text_and_seed_decide_the_output(decode, tmp_path, capsys):
    def decoded(text: bytes, *args: str) -> str:
        file = tmp_path / "text"
        file.write_bytes(text)
        assert decode.main([*SMALL, "--device", "cpu", "--modes", "eager", "--text", str(file), *args]) == 0
        return re.search("decoded +(.*)", capsys.readouterr().out)[1]

    first = decoded(bytes(range(100)))
    assert decoded(bytes(range(100))) == first
    assert decoded(bytes(range(100, 200))) != first
    assert decoded(bytes(range(100)), "--seed", "1") != first


def corrupted(function, change):
    """A stand-in for an op whose result is changed where it is traced, and right where it is called eagerly."""

    def call(*args):
        result = function(*args)
        return change(result) if torch.compiler.is_compiling() else result

    return call


# What a compiled program might get wrong, and the first thing that the report must name.
CORRUPTIONS = {
    "quant code": (
        "mxfp4_experts_quant",
        lambda rows: rows._replace(output=rows.output ^ 1),
        "layer 0, quant_output (written by the op)",
    ),
    "silu quant scale": (
        "silu_and_mul_mxfp4_experts_quant",
        lambda rows: rows._replace(output_scale=rows.output_scale + 1),
        "layer 0, silu_quant_output_scale (written by the op)",
    ),
    "permutation": (
        "get_cutlass_moe_mm_data",
        lambda data: data._replace(output_permutation=data.output_permutation.flip(0)),
        "layer 0, output_permutation (written by the op)",
    ),
    "code before the ops": (
        "rms_norm",
        lambda x: -x,
        "layer 0, hidden_states (written by attention and norm)",
    ),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_wrong_compiled_program_is_found_out(decode, no_inductor, monkeypatch, capsys, case):
    name, change, report = CORRUPTIONS[case]
    monkeypatch.setattr(decode, name, corrupted(getattr(decode, name), change))
    assert decode.main([*SMALL, "--device", "cpu"]) == 1
    output = capsys.readouterr().out
    rows = read_table(output)
    assert (rows["eager"]["tokens agree"], rows["eager"]["bytes agree"]) == ("yes", "yes")
    for mode in ("compile", "passes"):
        assert rows[mode]["bytes agree"] == "NO"
        assert f"DIFFERENT   {mode}: bytes differ first in step 0, {report}" in output


def test_a_wrong_decode_step_is_not_compared_in_silence(decode, no_inductor, few_timings, monkeypatch, capsys):
    monkeypatch.setattr(decode, "rms_norm", corrupted(decode.rms_norm, lambda x: -x))
    assert decode.main([*SMALL, "--device", "cpu", "--modes", "eager", "--ratio-experts", "5"]) == 1
    output = capsys.readouterr().out
    for which in ("with", "without"):
        assert f"DIFFERENT   decode step, E = 5: tokens {which} the passes differ" in output


@pytest.mark.parametrize("timed", [False, True])
def test_a_wrong_token_is_found_out(decode, monkeypatch, capsys, timed):
    generate, calls = decode.generate, []

    def wrong_once(*args):
        tokens, seconds = generate(*args)
        calls.append(tokens)
        if len(calls) == (4 if timed else 3):  # eager's two passes, then the other mode's
            tokens = tokens.clone()
            tokens[4, 1] ^= 1
        return tokens, seconds

    monkeypatch.setattr(decode, "generate", wrong_once)
    monkeypatch.setitem(decode.PROGRAMS, "compile", decode.Program)
    assert decode.main([*SMALL, "--device", "cpu", "--modes", "compile"]) == 1
    output = capsys.readouterr().out
    row = read_table(output)["compile"]
    assert (row["tokens agree"], row["bytes agree"]) == ("NO", "yes")
    assert f"DIFFERENT   compile: tokens{' of the timed pass' if timed else ''} differ first in step 4" in output


def test_a_cache_that_a_mode_does_not_write_is_found_out(decode, monkeypatch, capsys):
    class Forgetful(decode.Program):
        def __init__(self, model, inputs):
            super().__init__(model, inputs)
            decode_step = self.decode_step

            def forget():
                model.clear()
                return decode_step()

            self.decode_step = forget

    monkeypatch.setitem(decode.PROGRAMS, "compile", Forgetful)
    assert decode.main([*SMALL, "--device", "cpu", "--modes", "compile"]) == 1
    assert "bytes differ first in step 1, layer 0, hidden_states" in capsys.readouterr().out


def test_recompiles_are_counted(decode, no_inductor):
    args, windows = decode.parse([*SMALL, "--device", "cpu"])
    position = torch.full((1,), args.prompt)
    inputs = decode.Inputs(windows, torch.zeros(args.batch, dtype=torch.int64), position)
    with torch.no_grad():
        program = decode.Compiled(decode.MoELanguageModel(args), inputs)
        program.prefill()
        for _ in range(3):
            program.decode_step()
            inputs.position += 1
        program.count()
        assert (program.graph_breaks, program.recompiles) == (0, 0)
        inputs.tokens = inputs.tokens.int()
        program.decode_step()
        program.count()
        assert (program.graph_breaks, program.recompiles) == (0, 1)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--text", "/no/such/file"], "--text: cannot read /no/such/file: No such file or directory"),
        (["--text", "EMPTY"], "has 0 bytes, fewer than --prompt 20"),
        (["--topk", "6"], "--topk must be at most --experts 5, got 6"),
        (["--hidden", "48"], "--hidden must be a multiple of 32, got 48"),
        (["--intermediate", "16"], "--intermediate must be a multiple of 32, got 16"),
        (["--heads", "3"], "--hidden must be a multiple of 6, got 64"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--steps", "1"], "--steps must be at least 2, got 1"),
        (["--device", "meta"], "--device must be cpu, cuda or cuda:INDEX, got meta"),
        (
            ["--device", "cpu", "--modes", "eager,cuda-graph"],
            "--modes must be of eager,compile,passes on cpu, got cuda-graph",
        ),
        (["--ratio-experts", "2"], "--ratio-experts must be 0 or at least --topk 3, got 2"),
        (["--ratio-experts", "-1"], "--ratio-experts must be 0 or at least --topk 3, got -1"),
    ],
)
def test_bad_arguments(decode, tmp_path, capsys, args, message):
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(SystemExit) as error:
        decode.main([*SMALL, *(str(empty) if arg == "EMPTY" else arg for arg in args)])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
