"""The rules in their order, on a graph, a module, an exported program, or inside Inductor."""

import hashlib
import logging
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import fuse_permute, merge_metadata, sorted_ids
from .effects import nested_module
from .exported import Exported
from .provenance import GRAPH_INPUT, SUBGRAPH_INPUT, Tensors
from .report import Report, Skipped

log = logging.getLogger("mxfp4_ops.passes")

# Merging comes first: offsets of two identical calls are then offsets of one. Fusing comes last, for what is left of a
# metadata call that it takes the place of, such as ids for other quants, is then known.
RULES = (merge_metadata, sorted_ids, fuse_permute)

SOURCES = Path(__file__).parent


def _schemas() -> list[str]:
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mxfp4_ops::"))
    return [str(torch._C._get_schema(name.partition(".")[0], name.partition(".")[2])) for name in names]


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    """Of all that decides what the rules do, options aside: their sources, the schemas, and torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    for schema in _schemas():
        digest.update(schema.encode())
    return digest.hexdigest()


class MXFP4Passes(CustomGraphPass):
    """The rewriting rules as a custom graph pass of Inductor, and the report of what they did.

    Args:
        sorted_expert_ids: rule 1, a quant on offset search takes the sorted_expert_ids of its metadata call.
        merge_metadata: rule 2, metadata calls with equal arguments become one.
        fuse_permute: rule 3, shuffle and quant, and the metadata call where it can go, become moe_permute_mxfp4_quant.
        log_graphs: log each graph before and after at INFO.

    Put an instance into ``torch._inductor.config.post_grad_custom_pre_pass``, or let ``mxfp4_ops.compile`` do it beside
    whatever is there. Its ``uuid`` covers sources, schemas, options and the torch version, so Inductor's caches stay
    valid. ``TORCH_LOGS=mxfp4_ops.passes`` shows a line for each graph.
    """

    def __init__(
        self,
        *,
        sorted_expert_ids: bool = True,
        merge_metadata: bool = True,
        fuse_permute: bool = True,
        log_graphs: bool = False,
    ) -> None:
        self.options = {
            "merge_metadata": merge_metadata,
            "sorted_expert_ids": sorted_expert_ids,
            "fuse_permute": fuse_permute,
        }
        self.log_graphs = log_graphs
        self.report = Report()
        self._skipped: WeakKeyDictionary[fx.Graph, list[Skipped]] = WeakKeyDictionary()

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite one graph, as Inductor asks for it: nested graphs first, each by a call of its own."""
        self._finish(self._rewrite(graph))
        for module in _nested_modules(graph):
            for skipped in self._skipped.pop(module.graph, []):
                skipped.reason = skipped.reason.replace(GRAPH_INPUT, SUBGRAPH_INPUT)

    def __getstate__(self) -> dict:
        # Graphs are not copied with the pass, and so neither is what is known of them.
        return {**self.__dict__, "_skipped": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _skipped=WeakKeyDictionary())

    def uuid(self) -> tuple:
        """Identity for caches: equal where the rules would do the same."""
        return (_fingerprint(), *sorted(self.options.items()))

    def run(self, graph: fx.Graph, exported: Exported | None = None) -> Report:
        """Rewrite a graph and the graphs nested in it; returns their report and adds it to ``self.report``.

        ``exported`` is what is known of the exported program that the graph is of.
        """
        report, seen, nested = Report(), set(), False
        pending = [graph]
        while pending:
            report.add(self._rewrite(pending[0], nested, exported))
            for module in _nested_modules(pending.pop(0)):
                if module not in seen:
                    seen.add(module)
                    pending.append(module.graph)
            nested = True
        for module in seen:
            module.recompile()
        return self._finish(report)

    def _rewrite(self, graph: fx.Graph, nested: bool = False, exported: Exported | None = None) -> Report:
        report = Report(graphs=1)
        if self.log_graphs:
            log.info("before:\n%s", str(graph))
        for rule in RULES:
            if self.options[rule.NAME]:
                rule.apply(Tensors(graph, nested, exported), report.rule(rule.NAME))
        if any(rule.rewritten for rule in report.rules.values()):
            graph.lint()
        if self.log_graphs:
            log.info("after:\n%s", str(graph))
        self._skipped[graph] = [skipped for rule in report.rules.values() for skipped in rule.skipped]
        return report

    def _finish(self, report: Report) -> Report:
        self.report.add(report)
        log.info("mxfp4_ops passes: %s", report.summary())
        return report


def _nested_modules(graph: fx.Graph) -> list[fx.GraphModule]:
    """The subgraphs of higher-order ops, each once."""
    modules = (nested_module(node) for node in graph.nodes)
    return list(dict.fromkeys(module for module in modules if module is not None))


def rewrite(program: "fx.GraphModule | torch.export.ExportedProgram", **options: bool) -> Report:
    """Run the rules on a graph module or an exported program, in place.

    Args:
        program: a GraphModule (of Dynamo, AOT, export or your own tracing) or an ExportedProgram.
        options: those of MXFP4Passes.

    Returns:
        Report; ``print`` it for a table.

    Raises:
        TypeError: program is neither, or an option is unknown.

    Example:
        >>> import torch, mxfp4_ops
        >>> class Experts(torch.nn.Module):
        ...     def forward(self, x, topk_ids):
        ...         data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, 4, 32, 64)
        ...         rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        ...         return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, 4)
        >>> inputs = torch.randn(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]])
        >>> program = torch.export.export(Experts(), inputs)
        >>> print(mxfp4_ops.passes.rewrite(program))
        rule               matched  rewritten  skipped
        merge_metadata           0          0        0
        sorted_expert_ids        1          1        0
        fuse_permute             1          1        0
    """
    if isinstance(program, fx.GraphModule):
        module, exported = program, None
    elif isinstance(program, torch.export.ExportedProgram):
        module, exported = program.graph_module, Exported.of(program)
    else:
        accepted = "a torch.fx.GraphModule or a torch.export.ExportedProgram"
        raise TypeError(f"rewrite: program must be {accepted}, got {type(program).__name__}")
    report = MXFP4Passes(**options).run(module.graph, exported)
    module.recompile()
    if module is not program:
        _rename_outputs(program)
    return report


def _rename_outputs(program: torch.export.ExportedProgram) -> None:
    """Outputs of an exported program are known by the names of their nodes, and a merge leaves another node there."""
    renamed = {}
    for spec, node in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(node, fx.Node) and spec.arg.name != node.name:
            renamed[spec.arg.name] = spec.arg.name = node.name
    for entry in program.module_call_graph:
        for argument in entry.signature.outputs if entry.signature is not None else ():
            if (name := getattr(argument, "name", None)) in renamed:
                argument.name = renamed[name]
