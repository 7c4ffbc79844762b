"""A small MoE language model whose expert blocks run on mxfp4_ops: eager, compiled, rewritten, captured; do they agree?

The model is plain torch: byte tokens, attention with a static KV cache, a router, and experts whose weights and
activations are MXFP4. It prefills windows of a text file and decodes greedily, once per mode:

    eager                   the ops as they are called below
    compile                 torch.compile(fullgraph=True)
    passes                  mxfp4_ops.compile(fullgraph=True): the same, with the FX passes
    reduce-overhead         compile with mode="reduce-overhead": Inductor captures CUDA graphs (GPU only)
    reduce-overhead+passes  passes with that mode (GPU only)
    cuda-graph              the eager code captured with torch.cuda.graph and replayed (GPU only)

The model is written as models are that do not know of sorted_expert_ids: its quants search the offsets for the expert
of each row. The passes hand them the ids of the metadata call, so the model's code need not, and make one op of the
metadata call, the shuffle and the first quant of each block.

A table then shows the speed of each mode, and whether its tokens and every byte that the ops read and wrote equal
eager's; a report, what the passes rewrote; and on a GPU a ratio, what that is worth in a decode step with 256 experts,
captured as a CUDA graph. The exit status is 1 if anything differs or a quant was not rewritten. The weights are random:
the text is gibberish, but each op decides it.

    python examples/decode.py --help
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo.utils
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

import mxfp4_ops
from mxfp4_ops import (
    MoEMetadata,
    QuantizedRows,
    _library,
    get_cutlass_moe_mm_data,
    mxfp4_dequantize,
    mxfp4_experts_quant,
    shuffle_rows,
    silu_and_mul_mxfp4_experts_quant,
)
from mxfp4_ops._terminal import Progress, table
from mxfp4_ops.passes import MXFP4Passes, Report

VOCABULARY = 256  # bytes
WARM_UP = 3  # reduce-overhead runs a function once, records it on the second call and replays it from the third
REPEATS = 3  # of the timed prefill
PAIRS = 20  # of timings, one with the passes and one without
SECONDS = 0.1  # of decode steps in each of them
CPU_MODES = ("eager", "compile", "passes")
GPU_MODES = (*CPU_MODES, "reduce-overhead", "reduce-overhead+passes", "cuda-graph")


# The model. Matmuls and ops take and give bfloat16; the arithmetic between them is float64, rounded to bfloat16 once,
# at their doors. Eager and Inductor sum in different orders, and a fused kernel skips the roundings between its parts.
# In float64 that is worth 1e-16, too little to turn a bit of a bfloat16: the modes can be compared bit for bit.


class OpBytes(NamedTuple):
    """What the ops of a MoE block read and wrote, in the order of the calls: the first difference names its cause.

    The rows between shuffle and quant are not among it: rows that are returned are a shuffle that the passes must keep.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    expert_offsets: Tensor
    blockscale_offsets: Tensor
    problem_sizes1: Tensor
    problem_sizes2: Tensor
    input_permutation: Tensor
    output_permutation: Tensor
    sorted_expert_ids: Tensor
    quant_output: Tensor
    quant_output_scale: Tensor
    gate_up: Tensor
    silu_quant_output: Tensor
    silu_quant_output_scale: Tensor
    down: Tensor
    slot_rows: Tensor


# Who wrote the fields that the quant, shuffle and metadata ops only read.
WRITERS = {
    "hidden_states": "attention and norm",
    "topk_ids": "the router",
    "gate_up": "mxfp4_dequantize and grouped_mm",
    "down": "mxfp4_dequantize and grouped_mm",
}


class Step(NamedTuple):
    """What a prefill or a decode step returns."""

    tokens: Tensor
    """int64 [B]: the greedy choice after the last position."""
    op_bytes: list[OpBytes]
    """Layer by layer."""


def random_weight(*shape: int) -> Tensor:
    """bfloat16 [..., out, in] that keeps the variance of what it multiplies."""
    return (torch.randn(shape) / math.sqrt(shape[-1])).to(torch.bfloat16)


def mxfp4_weight(weight: Tensor) -> Tensor:
    """bfloat16 [E, N, K] -> the same shape, as MXFP4 holds it: rows of a weight quantise as rows of tokens do."""
    E, N, K = weight.shape
    experts = torch.arange(E + 1, dtype=torch.int32)
    expert_offsets, blockscale_offsets = N * experts, math.ceil(N / 128) * 128 * experts
    stored = mxfp4_experts_quant(weight.view(E * N, K), expert_offsets, blockscale_offsets, E)
    # Dequantised here, once, and not in every step: grouped_mm reads bfloat16, which holds code * 2^e exactly.
    return mxfp4_dequantize(*stored, expert_offsets, blockscale_offsets, dtype=torch.bfloat16).view(E, N, K)


def rms_norm(x: Tensor) -> Tensor:
    """float64 [..., hidden] -> bfloat16."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)


class MoEBlock(nn.Module):
    """Router and experts: bfloat16 [m, hidden] -> float64 [m, hidden]."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.E, self.topk, self.n, self.k = args.experts, args.topk, args.intermediate, args.hidden
        self.register_buffer("router", random_weight(self.E, self.k))
        self.register_buffer("gate_up", mxfp4_weight(random_weight(self.E, 2 * self.n, self.k)))
        self.register_buffer("down", mxfp4_weight(random_weight(self.E, self.k, self.n)))

    def grouped_mm(self, rows: QuantizedRows, weight: Tensor, data: MoEMetadata) -> Tensor:
        """MXFP4 rows [R, K] times the weight of each row's expert, [E, N, K] -> bfloat16 [R, N]."""
        x = mxfp4_dequantize(*rows, data.expert_offsets, data.blockscale_offsets, dtype=torch.bfloat16)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=data.expert_offsets[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, OpBytes]:
        # The largest logits are the largest probabilities; their softmax is the renormalised softmax of all.
        logits, topk_ids = F.linear(x, self.router).topk(self.topk)
        topk_weights = logits.double().softmax(-1)

        data = get_cutlass_moe_mm_data(topk_ids, self.E, self.n, self.k)
        expert_rows = (data.expert_offsets, data.blockscale_offsets, self.E)  # no sorted_expert_ids: see the top

        sorted_rows = shuffle_rows(x, data.input_permutation)  # token order -> expert order
        quant = mxfp4_experts_quant(sorted_rows, *expert_rows)
        gate_up = self.grouped_mm(quant, self.gate_up, data)
        silu_quant = silu_and_mul_mxfp4_experts_quant(gate_up, *expert_rows)
        down = self.grouped_mm(silu_quant, self.down, data)
        slot_rows = shuffle_rows(down, data.output_permutation)  # expert order -> slot order

        y = (topk_weights[..., None] * slot_rows.view(-1, self.topk, self.k)).sum(1)
        return y, OpBytes(x, topk_ids, *data, *quant, gate_up, *silu_quant, down, slot_rows)


class Attention(nn.Module):
    """Causal attention over a static KV cache: bfloat16 [B, t, hidden] -> [B, t, hidden]."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.heads, width = args.heads, args.hidden // args.heads
        cache = (args.batch, self.heads, args.prompt + args.steps, width)
        self.register_buffer("qkv", random_weight(3 * args.hidden, args.hidden))
        self.register_buffer("out", random_weight(args.hidden, args.hidden))
        self.register_buffer("keys", torch.zeros(cache, dtype=torch.bfloat16))
        self.register_buffer("values", torch.zeros(cache, dtype=torch.bfloat16))

    def forward(self, x: Tensor, positions: Tensor, turn: Tensor, future: Tensor) -> Tensor:
        B, t, hidden = x.shape
        q, k, v = F.linear(x, self.qkv).view(B, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q.double(), turn), rotate(k.double(), turn)
        self.keys.index_copy_(2, positions, k.to(torch.bfloat16))
        self.values.index_copy_(2, positions, v)
        # Over the whole cache, so that a decode step has the same shapes at every position. Four times sharper than the
        # usual: random queries match no key well, and a plain average of the context has the text run in circles.
        scores = q @ self.keys.double().transpose(-1, -2) * (4 / math.sqrt(q.shape[-1]))
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ self.values.double()
        return F.linear(y.to(torch.bfloat16).transpose(1, 2).reshape(B, t, hidden), self.out)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: float64 [..., t, width] turned by the cosines and sines [2, t, width / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class MoELanguageModel(nn.Module):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        width, places = args.hidden // args.heads, torch.arange(args.prompt + args.steps)
        angles = places[:, None] / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        self.register_buffer("places", places)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())))
        self.register_buffer("embedding", torch.randn(VOCABULARY, args.hidden, dtype=torch.float64))
        self.register_buffer("head", random_weight(VOCABULARY, args.hidden))
        self.attention = nn.ModuleList(Attention(args) for _ in range(args.layers))
        self.moe = nn.ModuleList(MoEBlock(args) for _ in range(args.layers))

    def forward(self, tokens: Tensor, positions: Tensor) -> Step:
        """int64 [B, t] at the int64 positions [t] -> the next tokens."""
        turn, future = self.turns[:, positions], self.places > positions[:, None]
        x = self.embedding[tokens]
        op_bytes = []
        for attention, moe in zip(self.attention, self.moe):
            x = x + attention(rms_norm(x), positions, turn, future)
            y, layer_bytes = moe(rms_norm(x).flatten(0, 1))
            x = x + y.view_as(x)
            op_bytes.append(layer_bytes)
        logits = F.linear(rms_norm(x[:, -1]), self.head)
        return Step(logits.argmax(-1), op_bytes)

    def prefill(self, tokens: Tensor) -> Step:
        """The prompts, int64 [B, t], from position 0 on."""
        return self(tokens, self.places[: tokens.shape[1]])

    def decode_step(self, tokens: Tensor, position: Tensor) -> Step:
        """One token of each sequence, int64 [B], at the int64 position [1]. A tensor: a Python int would recompile."""
        return self(tokens[:, None], position)

    def clear(self) -> None:
        for attention in self.attention:
            attention.keys.zero_()
            attention.values.zero_()


# The modes


@dataclass
class Inputs:
    """The tensors that the program reads, always the same ones, so that a captured graph finds them."""

    prompt: Tensor
    tokens: Tensor
    position: Tensor


class Program:
    """A mode: two calls without arguments, and what making them took."""

    set_up = "first calls"
    graph_breaks: int | None = None
    recompiles: int | None = None
    captured_graphs: int | None = None
    report: Report | None = None

    def __init__(self, model: MoELanguageModel, inputs: Inputs):
        self.prefill: Callable[[], Step] = lambda: model.prefill(inputs.prompt)
        self.decode_step: Callable[[], Step] = lambda: model.decode_step(inputs.tokens, inputs.position)

    def count(self) -> None:
        """Read the counters; call it when the program has run."""


def compiled(function: Callable, passes: MXFP4Passes | None = None, mode: str | None = None) -> Callable:
    """By torch.compile or, with passes, by mxfp4_ops.compile; all else is the same."""
    compiler = partial(mxfp4_ops.compile, passes=passes) if passes else torch.compile
    return compiler(function, fullgraph=True, dynamic=False, mode=mode)


class Compiled(Program):
    set_up = "compiling"
    mode: str | None = None
    rewritten = False

    def __init__(self, model: MoELanguageModel, inputs: Inputs):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        passes = MXFP4Passes() if self.rewritten else None
        self.report = passes.report if passes else None
        prefill, decode_step = (compiled(f, passes, self.mode) for f in (model.prefill, model.decode_step))
        self.prefill = lambda: prefill(inputs.prompt)
        self.decode_step = lambda: decode_step(inputs.tokens, inputs.position)

    def count(self) -> None:
        counters = torch._dynamo.utils.counters
        self.graph_breaks = sum(counters["graph_break"].values())
        self.recompiles = counters["stats"]["unique_graphs"] - 2


class CompiledWithPasses(Compiled):
    rewritten = True


class ReduceOverhead(Compiled):
    set_up = "compiling and capturing"
    mode = "reduce-overhead"

    def __init__(self, model: MoELanguageModel, inputs: Inputs):
        super().__init__(model, inputs)
        prefill, decode_step = self.prefill, self.decode_step

        # Results lie in the graphs' own memory until the next step begins; generate() copies what it keeps before that.
        def as_step(function: Callable[[], Step]) -> Step:
            torch.compiler.cudagraph_mark_step_begin()
            return function()

        self.prefill, self.decode_step = lambda: as_step(prefill), lambda: as_step(decode_step)

    def count(self) -> None:
        super().count()
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        self.captured_graphs = sum(1 + root.num_descendants() for root in manager.get_roots()) if manager else 0


class ReduceOverheadWithPasses(ReduceOverhead):
    rewritten = True


def captured(function: Callable[[], Step]) -> Callable[[], Step]:
    """The function as a CUDA graph, whose results are always the same tensors."""
    # First outside the capture, on the side stream that it needs: libraries set themselves up, code is compiled.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Step:
        graph.replay()
        return result

    return replay


class Captured(Program):
    set_up = "capturing"
    captured_graphs = 2

    def __init__(self, model: MoELanguageModel, inputs: Inputs):
        super().__init__(model, inputs)
        self.prefill, self.decode_step = captured(self.prefill), captured(self.decode_step)


class OnlyDecodeStep(Program):
    """A compiled decode step of tokens alone, on a GPU as a CUDA graph, after an eager prefill."""

    def __init__(self, model: MoELanguageModel, inputs: Inputs, passes: MXFP4Passes | None = None):
        super().__init__(model, inputs)
        # Without the ops' bytes: Inductor need not keep what only a comparison reads.
        tokens = compiled(lambda *args: model.decode_step(*args).tokens, passes)

        def decode_step() -> Step:
            return Step(tokens(inputs.tokens, inputs.position), [])

        self.decode_step = captured(decode_step) if inputs.tokens.is_cuda else decode_step


PROGRAMS: dict[str, type[Program]] = {
    "eager": Program,
    "compile": Compiled,
    "passes": CompiledWithPasses,
    "reduce-overhead": ReduceOverhead,
    "reduce-overhead+passes": ReduceOverheadWithPasses,
    "cuda-graph": Captured,
}


# Running and comparing


@dataclass
class Run:
    """What a mode produced: tokens int64 [steps, B] of the recorded and of the timed pass, and the ops' bytes."""

    tokens: Tensor
    timed_tokens: Tensor
    op_bytes: list[list[OpBytes]]
    prefill_rate: float = 0.0
    decode_rate: float = 0.0

    def differing_tokens(self, reference: "Run") -> str | None:
        for name, tokens in (("", self.tokens), (" of the timed pass", self.timed_tokens)):
            for step, (ours, theirs) in enumerate(zip(tokens, reference.tokens)):
                if not torch.equal(ours, theirs):
                    return f"tokens{name} differ first in step {step}: {ours.tolist()}, eager {theirs.tolist()}"
        return None

    def differing_bytes(self, reference: "Run") -> str | None:
        for step, layers in enumerate(zip(self.op_bytes, reference.op_bytes)):
            for layer, (ours, theirs) in enumerate(zip(*layers)):
                for name, a, b in zip(OpBytes._fields, ours, theirs):
                    different = a.view(torch.uint8) != b.view(torch.uint8)
                    if different.any():
                        place = f"step {step}, layer {layer}, {name} (written by {WRITERS.get(name, 'the op')})"
                        return f"bytes differ first in {place}: {int(different.sum())} of {different.numel()}"
        return None


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def generate(program: Program, inputs: Inputs, steps: int, each: Callable[[Step], None]) -> tuple[Tensor, float]:
    """Prefill, then decode greedily: tokens [steps, B], the first the prefill's, and the seconds of the others."""
    device = inputs.tokens.device
    tokens = inputs.tokens.new_empty(steps, inputs.tokens.shape[0])
    inputs.position.fill_(inputs.prompt.shape[1])
    step = program.prefill()
    begin = now(device)
    for i in range(steps):
        tokens[i] = step.tokens
        each(step)
        if i + 1 < steps:
            inputs.tokens.copy_(step.tokens)
            step = program.decode_step()
            inputs.position += 1
    return tokens.cpu(), now(device) - begin


def run_mode(name: str, model: MoELanguageModel, inputs: Inputs, steps: int, progress: Progress) -> tuple[Program, Run]:
    device, B = inputs.tokens.device, inputs.tokens.shape[0]
    progress.show(f"{name}: {PROGRAMS[name].set_up}")
    inputs.position.fill_(inputs.prompt.shape[1])
    program = PROGRAMS[name](model, inputs)
    for _ in range(WARM_UP):
        program.prefill()
        program.decode_step()
        progress.advance()

    progress.show(f"{name}: recorded pass")
    op_bytes = []

    def record(step: Step) -> None:
        # Copied before the next step, which may write over them.
        op_bytes.append([OpBytes(*(t.to("cpu", copy=True) for t in layer)) for layer in step.op_bytes])
        progress.advance()

    model.clear()  # what another mode left there would hide a cache that this one does not write
    tokens, _ = generate(program, inputs, steps, record)

    progress.show(f"{name}: timed pass")
    model.clear()
    timed_tokens, seconds = generate(program, inputs, steps, lambda step: None)
    run = Run(tokens, timed_tokens, op_bytes, decode_rate=B * (steps - 1) / seconds)
    begin = now(device)
    for _ in range(REPEATS):
        program.prefill()
    run.prefill_rate = REPEATS * inputs.prompt.numel() / (now(device) - begin)
    progress.advance()
    program.count()
    return program, run


def not_rewritten(report: Report, quants: int) -> str | None:
    """What the passes left undone: every quant has sorted_expert_ids, every other one is fused with its shuffle."""
    rewritten, fused = (report.rule(name).rewritten for name in ("sorted_expert_ids", "fuse_permute"))
    if rewritten != quants:
        return f"{rewritten} of {quants} quants were given sorted_expert_ids"
    return None if fused == quants // 2 else f"{fused} of {quants // 2} quants were fused with metadata and shuffle"


def compare_decode_steps(args: argparse.Namespace, inputs: Inputs) -> list[str]:
    """Print the ratio of a decode step's time with the passes to that without; returns what differs."""
    name, device = f"decode step, E = {args.ratio_experts}", args.device
    progress = Progress(4 + PAIRS)
    progress.show(f"{name}: weights")
    torch.manual_seed(args.seed)
    model = MoELanguageModel(argparse.Namespace(**{**vars(args), "experts": args.ratio_experts})).to(device)
    progress.advance()

    progress.show(f"{name}: compiling and comparing")
    torch._dynamo.reset()  # not between the two: both stay in use
    inputs.position.fill_(inputs.prompt.shape[1])
    passes = MXFP4Passes()
    with_passes, without = OnlyDecodeStep(model, inputs, passes), OnlyDecodeStep(model, inputs)
    programs = {"of eager": Program(model, inputs), "with the passes": with_passes, "without the passes": without}
    tokens = {}
    for label, program in programs.items():
        model.clear()
        tokens[label], _ = generate(program, inputs, args.steps, lambda step: None)
        progress.advance()

    def seconds(program: Program, steps: int) -> float:
        begin = now(device)
        for _ in range(steps):
            program.decode_step()
        return (now(device) - begin) / steps

    progress.show(f"{name}: timing")
    steps = max(1, round(SECONDS / seconds(without, 10)))
    pairs = []
    for i in range(PAIRS):
        order = (with_passes, without) if i % 2 else (without, with_passes)  # what drifts favours neither
        took = {program: seconds(program, steps) for program in order}
        pairs.append((took[with_passes], took[without]))
        progress.advance()
    progress.close()

    ours, theirs = (statistics.median(times) * 1e6 for times in zip(*pairs))
    ratios = [a / b for a, b in pairs]
    print(
        f"\n{name}: {ours:,.0f} us with the passes, {theirs:,.0f} us without: ratio {statistics.median(ratios):.3f} "
        f"(median of {PAIRS} pairs, spread {min(ratios):.3f} to {max(ratios):.3f})"
    )
    differences = [f"tokens {label} differ" for label, t in tokens.items() if not torch.equal(t, tokens["of eager"])]
    if missing := not_rewritten(passes.report, 2 * args.layers):
        differences.append(missing)
    return [f"{name}: {difference}" for difference in differences]


def read_windows(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Tensor:
    """int64 [B, prompt]: windows of the text, spread over it."""
    try:
        text = args.text.read_bytes()
    except OSError as error:
        parser.error(f"--text: cannot read {args.text}: {error.strerror}")
    if len(text) < args.prompt:
        parser.error(f"--text: {args.text} has {len(text)} bytes, fewer than --prompt {args.prompt}")
    starts = torch.linspace(0, len(text) - args.prompt, args.batch).long().tolist()
    return torch.tensor([list(text[start : start + args.prompt]) for start in starts])


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Tensor]:
    has_gpu = _library.cuda.loaded and torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description="Decode with a small MoE model on mxfp4_ops: eager, compiled, rewritten, captured; compare them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--experts", type=int, default=8, metavar="E", help="experts of each layer")
    add("--topk", type=int, default=2, help="experts of each token")
    add("--layers", type=int, default=2, help="layers, each of attention and experts")
    add("--hidden", type=int, default=256, metavar="K", help="hidden size, a multiple of 32 and of twice --heads")
    add("--intermediate", type=int, default=256, metavar="N", help="intermediate size of an expert, a multiple of 32")
    add("--heads", type=int, default=4, help="attention heads")
    add("--batch", type=int, default=2, metavar="B", help="sequences decoded together, each with its part of the text")
    add("--prompt", type=int, default=128, metavar="TOKENS", help="bytes of the text in each prompt")
    add("--steps", type=int, default=64, help="tokens to generate, at least 2")
    add("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE", metavar="FILE", help="the text to read")
    add("--seed", type=int, default=0, help="seed of the weights")
    add("--device", default="cuda" if has_gpu else "cpu", help="cpu, cuda or cuda:INDEX")
    add("--threads", type=int, default=1, help="CPU threads; small sizes gain little from more")
    add("--modes", default="all", metavar="LIST", help=f"of {','.join(GPU_MODES)}; eager always runs, first")
    add(
        "--ratio-experts",
        type=int,
        default=argparse.SUPPRESS,
        metavar="E",
        help="experts of the model whose decode step is timed with and without the passes, or 0: no such timing "
        "(default: 256 on a GPU, 0 on the CPU)",
    )
    args = parser.parse_args(argv)

    for name in ("experts", "topk", "layers", "hidden", "intermediate", "heads", "batch", "prompt", "steps", "threads"):
        if getattr(args, name) < (least := 2 if name == "steps" else 1):
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.topk > args.experts:
        parser.error(f"--topk must be at most --experts {args.experts}, got {args.topk}")
    for name, divisor in (("hidden", 32), ("intermediate", 32), ("hidden", 2 * args.heads)):
        if getattr(args, name) % divisor:
            parser.error(f"--{name} must be a multiple of {divisor}, got {getattr(args, name)}")
    try:
        args.device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device must be cpu, cuda or cuda:INDEX, got {args.device}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be from 0 to 2^63 - 1, got {args.seed}")
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu, cuda or cuda:INDEX, got {args.device}")
    if args.device.type == "cuda" and not has_gpu:
        parser.error(f"--device cuda: {_library.cuda.reason or 'no CUDA device'}")
    if args.device.type == "cpu" and args.device.index:
        parser.error(f"--device must be cpu, cuda or cuda:INDEX, got {args.device}")
    if (args.device.index or 0) >= max(1, torch.cuda.device_count()):
        parser.error(f"--device {args.device}: there are {torch.cuda.device_count()} CUDA devices")
    available = GPU_MODES if args.device.type == "cuda" else CPU_MODES
    wanted = set(available) if args.modes == "all" else set(args.modes.split(","))
    if unknown := sorted(wanted - set(available)):
        parser.error(f"--modes must be of {','.join(available)} on {args.device.type}, got {','.join(unknown)}")
    args.modes = [mode for mode in available if mode == "eager" or mode in wanted]
    if "ratio_experts" not in args:
        args.ratio_experts = 256 if args.device.type == "cuda" else 0
    if args.ratio_experts and args.ratio_experts < args.topk:
        parser.error(f"--ratio-experts must be 0 or at least --topk {args.topk}, got {args.ratio_experts}")
    return args, read_windows(parser, args)


def show_results(results: dict[str, tuple[Program, Run]]) -> list[str]:
    """Print the table, and return what differs from eager."""

    def cell(count: int | None) -> str:
        return "-" if count is None else str(count)

    heading = "mode,prefill tok/s,decode tok/s,graph breaks,recompiles,captured graphs,tokens agree,bytes agree"
    rows, differences = [tuple(heading.split(","))], []
    reference = results["eager"][1]
    for mode, (program, run) in results.items():
        tokens_differ, bytes_differ = run.differing_tokens(reference), run.differing_bytes(reference)
        differences += [f"{mode}: {difference}" for difference in (tokens_differ, bytes_differ) if difference]
        rates = f"{run.prefill_rate:,.0f}", f"{run.decode_rate:,.0f}"
        counts = map(cell, (program.graph_breaks, program.recompiles, program.captured_graphs))
        rows.append((mode, *rates, *counts, "NO" if tokens_differ else "yes", "NO" if bytes_differ else "yes"))
    print(table(rows))
    compared = sum(t.nbytes for step in reference.op_bytes for layer in step for t in layer)
    print(f"\ncompared    {reference.tokens.numel()} tokens, {compared:,} bytes that the ops read and wrote")
    return differences


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args, windows = parse(argv)
    cuda = args.device.type == "cuda"
    if not cuda:
        torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name(args.device) if cuda else f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(
        f"torch {torch.__version__} on {args.device} ({where}): {args.layers} layers, {args.heads} heads, "
        f"E {args.experts}, topk {args.topk}, hidden {args.hidden}, intermediate {args.intermediate}\n"
        f"{args.batch} x {args.prompt} bytes of {args.text} as prompts, {args.steps} new tokens each",
        flush=True,
    )
    torch.manual_seed(args.seed)
    settings = torch._inductor.config.patch(
        shape_padding=False,  # padding a matmul lets the library choose another kernel, with other last bits than eager's
        fx_graph_cache=False,  # a hit would leave nothing to report: the graph in the cache is rewritten already
    )
    with settings, torch.cuda.device(args.device) if cuda else nullcontext():
        model = MoELanguageModel(args).to(args.device)
        tokens, position = torch.zeros(args.batch, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        inputs = Inputs(*(t.to(args.device) for t in (windows, tokens, position)))
        progress = Progress(len(args.modes) * (WARM_UP + args.steps + 1))
        results = {mode: run_mode(mode, model, inputs, args.steps, progress) for mode in args.modes}
        progress.close()

        differences = show_results(results)
        print(f"prompt      ...{bytes(windows[0, -48:].tolist())!r}")
        print(f"decoded     {bytes(results['eager'][1].tokens[:, 0].tolist())!r}  (random weights: gibberish)")
        for mode, (program, _) in results.items():
            if program.report:
                print(f"\nFX passes in mode {mode}, on the graphs of prefill and decode step:\n{program.report}")
                if missing := not_rewritten(program.report, 2 * 2 * args.layers):
                    differences.append(f"{mode}: {missing}")
        sys.stdout.flush()
        if args.ratio_experts:
            differences += compare_decode_steps(args, inputs)

    for difference in differences:
        print(f"DIFFERENT   {difference}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
