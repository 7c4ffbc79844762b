"""Graphs of MoE layers, in every form that tracing gives our ops, and their text, for the tests of the passes."""

import operator
import textwrap
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._pytree import tree_leaves

import mxfp4_ops
from mxfp4_ops import passes
from mxfp4_ops.compat import vllm

E, TOPK, TOKENS, N, K = 4, 2, 6, 32, 64

ops = torch.ops.mxfp4_ops


def inputs(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x [TOKENS, K] and topk_ids [TOKENS, TOPK], some of them of no expert."""
    x = torch.randn(TOKENS, K, device=device).bfloat16()
    return x, torch.randint(-1, E + 1, (TOKENS, TOPK), device=device)


def metadata_buffers(topk_ids: Tensor, num_experts: int = E) -> list[Tensor]:
    """What vLLM's callers allocate: all but sorted_expert_ids."""
    rows = topk_ids.numel()
    shapes = ((num_experts + 1,), (num_experts + 1,), (num_experts, 3), (num_experts, 3), (rows,), (rows,))
    return [torch.empty(shape, dtype=torch.int32, device=topk_ids.device) for shape in shapes]


def quant_buffers(topk_ids: Tensor, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Codes, and scales that hold ``padding`` where nothing is written."""
    rows, tiles = topk_ids.numel(), (K + 127) // 128
    scale_rows = (rows + 127 * min(rows, E)) // 128 * 128
    options = {"dtype": torch.uint8, "device": topk_ids.device}
    return torch.zeros((rows, K // 2), **options), torch.full((scale_rows, 4 * tiles), padding, **options)


def write_metadata(topk_ids: Tensor, buffers: list[Tensor]) -> list[Tensor]:
    offsets, scale_offsets, sizes1, sizes2, inputs, outputs = buffers
    vllm.get_cutlass_moe_mm_data(topk_ids, offsets, sizes1, sizes2, inputs, outputs, E, N, K, scale_offsets)
    return buffers


def functional_layer(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    """One layer of two quants on offset search."""
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    where = (data.expert_offsets, data.blockscale_offsets, E)
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, *where)
    activated = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(torch.cat((rows, rows), 1), *where)
    return *quantized, *activated


def upstream_layer(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    """The same, written as vLLM writes it."""
    offsets, scale_offsets, *_, permutation, _ = write_metadata(topk_ids, metadata_buffers(topk_ids))
    rows = vllm.shuffle_rows(x, permutation)
    quantized = vllm.mxfp4_experts_quant(rows, offsets, scale_offsets, E, TOPK)
    activated = vllm.silu_and_mul_mxfp4_experts_quant(torch.cat((rows, rows), 1), offsets, scale_offsets, E, TOPK)
    return *quantized, *activated


def stack(layer: Callable, layers: int) -> Callable:
    """A model of some layers, each on its own input and all on the same ids."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        return [result for i in range(layers) for result in layer(x + i, topk_ids)]

    return model


def same_bytes(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def counts(report: passes.Report) -> dict[str, tuple[int, int, int]]:
    """(matched, rewritten, skipped) of each rule."""
    return {rule.rule: (rule.matched, rule.rewritten, len(rule.skipped)) for rule in report.rules.values()}


def reasons(report: passes.Report, rule: str = "sorted_expert_ids") -> list[str]:
    return [skipped.reason for skipped in report.rules[rule].skipped]


class Compiled:
    """A function compiled with the passes on Dynamo's graph ("dynamo") or on AOT's ("auto_v1", "auto_v2").

    ``report`` is of the first run, ``again`` of a second one; ``before`` and ``after`` are the texts of the graph.
    """

    def __init__(self, function: Callable, form: str = "auto_v2", dynamic: bool = False, **options: bool) -> None:
        torch._dynamo.reset()
        self.form, self.options = form, options
        backend = self._rewrite
        if form != "dynamo":
            # As Inductor calls AOT: writes to graph inputs stay copies into these.
            backend = aot_autograd(fw_compiler=self._rewrite_boxed, keep_inference_input_mutations=True)
        self.function = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)

    def _rewrite(self, module: fx.GraphModule, inputs: list) -> Callable:
        self.module, self.before = module, show(module.graph)
        self.report = passes.rewrite(module, **self.options)
        self.after = show(module.graph)
        self.again = passes.rewrite(module, **self.options)
        assert show(module.graph) == self.after
        return module.forward

    def _rewrite_boxed(self, module: fx.GraphModule, inputs: list) -> Callable:
        return make_boxed_func(self._rewrite(module, inputs))

    def __call__(self, *args: object) -> object:
        v2 = torch._inductor.config.patch(enable_auto_functionalized_v2=self.form == "auto_v2")
        with torch.no_grad(), nullcontext() if self.form == "dynamo" else v2:
            return self.function(*args)


# Text ----------------------------------------------------------------------------------------------------------------


def _op(node: fx.Node) -> str | None:
    """The name of our op that a node calls, with the name of what wraps it."""
    target, prefix = node.target, ""
    if target in (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2):
        target, prefix = node.args[0], target._name.removeprefix("auto_functionalized") + ":"
        prefix = "v2:" if "v2" in prefix else "v1:"
    name = str(target)
    return prefix + name.removeprefix("mxfp4_ops.") if name.startswith("mxfp4_ops.") else None


def show(graph: fx.Graph) -> str:
    """A line for each call of our ops, with what its arguments are made of; the same for every torch version."""
    labels: dict[fx.Node, str] = {}
    lines, inputs, buffers = [], 0, 0

    def label(node: fx.Node) -> "Label":
        # Inputs by their first use: the order in which Dynamo takes them differs between Python versions.
        nonlocal inputs
        if node.op == "placeholder" and node not in labels:
            labels[node], inputs = f"in{inputs}", inputs + 1
        return Label(labels[node])

    def text(argument: object) -> str:
        return str(fx.node.map_arg(argument, label))

    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if (op := _op(node)) is not None:
            labels[node] = f"%{len(lines)}"
            args = [text(a) for a in node.args if not isinstance(a, torch._ops.OpOverload)]
            kwargs = [f"{k}={text(v)}" for k, v in sorted(node.kwargs.items()) if not _is_default(k, v)]
            line = f"%{len(lines)} = {op}({', '.join(args + kwargs)})"
            lines.append(textwrap.fill(line, 110, subsequent_indent="    ", break_long_words=False))
        elif node.target in (torch.empty, torch.ops.aten.empty.memory_format):
            labels[node], buffers = f"buffer{buffers}", buffers + 1
        elif node.target is operator.getitem:
            labels[node] = f"{label(node.args[0])}[{node.args[1]}]"
        else:
            name = getattr(node.target, "__name__", str(node.target))
            labels[node] = f"{name}({', '.join(map(text, node.args))})"
    return "\n".join(lines) + "\n"


def _is_default(name: str, given: object) -> bool:
    return given is None or (name == "is_gated" and given is True) or name.startswith("_problem_sizes")


class Label(str):
    """A string that prints without quotes inside of lists."""

    __repr__ = str.__str__
