"""Rewriting rules for graphs that hold our ops: wherever routing is in a graph, the fast forms are used.

``sorted_expert_ids``: a quant on offset search takes the sorted_expert_ids of the metadata call that made its offsets.
``merge_metadata``: metadata calls with equal arguments become one, unless that is seen outside of the graph.
``fuse_permute``: a shuffle that only a quant reads becomes one call with it, and with the metadata call where that can go.

``mxfp4_ops.compile`` installs them in torch.compile; ``rewrite`` runs them on a graph module or an exported program;
``MXFP4Passes`` is the pass itself. A ``Report`` says what each rule matched, rewrote and skipped, and why.
"""

from .manager import MXFP4Passes, rewrite
from .report import Report, RuleReport, Skipped

__all__ = ["MXFP4Passes", "Report", "RuleReport", "Skipped", "rewrite"]
