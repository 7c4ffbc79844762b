"""torch.compile with the passes installed, beside those of other libraries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from .manager import MXFP4Passes, log

SLOT = "post_grad_custom_pre_pass"
TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")


class Chain(CustomGraphPass):
    """Passes one after the other in the one slot that Inductor has, where it takes no list."""

    def __init__(self, passes: list) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for custom_pass in self.passes:
            custom_pass(graph)

    def uuid(self) -> tuple | None:
        """The identities of all, or None if one has none: such a pass keeps its compilation out of the caches."""
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return tuple(ids) if all(ids) else None


def beside(existing: Any, ours: MXFP4Passes) -> Any:
    """What the slot is to hold for what it holds already (nothing, a pass, or a list of passes), and then ours."""
    others = [] if existing is None else list(existing) if isinstance(existing, (list, tuple)) else [existing]
    if not others or others == [ours]:
        return ours
    passes = [*(other for other in others if other is not ours), ours]
    return passes if TAKES_LISTS else Chain(passes)


def _cache_hits() -> int:
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


class _Inductor(torch._TorchCompileInductorWrapper):
    """Inductor with our pass added to the slot when a graph is compiled: what was installed meanwhile stays, too."""

    def __init__(self, ours: MXFP4Passes, mode: str | None, options: dict | None, dynamic: bool | None) -> None:
        super().__init__(mode, options, dynamic)
        self.ours = ours

    def __eq__(self, other: object) -> bool:
        # Dynamo gives what it compiled for one backend to all that are equal to it.
        return isinstance(other, _Inductor) and super().__eq__(other) and self.ours is other.ours

    def __call__(self, model_: fx.GraphModule, inputs_: list, **kwargs: Any) -> Callable:
        theirs = self.config.get(SLOT, getattr(torch._inductor.config, SLOT))
        config, graphs, hits = self.config, self.ours.report.graphs, _cache_hits()
        self.config = {**config, SLOT: beside(theirs, self.ours)}
        try:
            compiled = super().__call__(model_, inputs_, **kwargs)
        finally:
            self.config = config
        if self.ours.report.graphs == graphs and _cache_hits() > hits:
            self.ours.report.from_cache += 1
            log.info("mxfp4_ops passes: served from the cache, rewritten by an earlier run")
        return compiled


class _Rewriting:
    """Another backend, given what the rules make of Dynamo's graph."""

    def __init__(self, ours: MXFP4Passes, inner: Callable) -> None:
        self.ours, self.inner = ours, inner

    def __call__(self, module: fx.GraphModule, inputs: list, **kwargs: Any) -> Callable:
        self.ours.run(module.graph)
        module.recompile()
        return self.inner(module, inputs, **kwargs)


def compile(
    model: Callable | None = None,
    *,
    passes: MXFP4Passes | None = None,
    backend: str | Callable = "inductor",
    mode: str | None = None,
    options: dict | None = None,
    dynamic: bool | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """``torch.compile`` with the rewriting rules of this package.

    Args:
        model: a function or module; left away, ``compile`` is a decorator.
        passes: the MXFP4Passes to run, whose ``report`` says afterwards what they did; fresh ones if left away.
        backend: "inductor", where the rules run as a pass beside those installed already; with any other, they rewrite
            Dynamo's graph before the backend has it.
        mode, options, dynamic, torch_compile_kwargs: as for torch.compile.

    Returns:
        What torch.compile returns.

    Raises:
        RuntimeError: as torch.compile; e.g. mode and options together.

    Example:
        >>> import torch, mxfp4_ops
        >>> passes = mxfp4_ops.passes.MXFP4Passes()
        >>> @mxfp4_ops.compile(passes=passes, backend="eager", fullgraph=True)
        ... def experts(x, topk_ids):
        ...     data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, 4, 32, 64)
        ...     rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        ...     return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, 4)
        >>> result = experts(torch.randn(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]]))
        >>> passes.report.rules["sorted_expert_ids"].rewritten
        1
    """
    ours = passes or MXFP4Passes()
    if model is None:
        return lambda m: compile(
            m, passes=ours, backend=backend, mode=mode, options=options, dynamic=dynamic, **torch_compile_kwargs
        )
    if backend == "inductor":
        if mode is not None and options is not None:
            raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
        # Those are options of torch.compile and not of Inductor.
        frontend = {key: value for key, value in (options or {}).items() if key == "guard_filter_fn"}
        options = {key: value for key, value in (options or {}).items() if key not in frontend}
        inductor = _Inductor(ours, mode, options, dynamic)
        return torch.compile(model, backend=inductor, dynamic=dynamic, options=frontend or None, **torch_compile_kwargs)

    rewriting = _Rewriting(ours, torch._dynamo.lookup_backend(backend))
    return torch.compile(model, backend=rewriting, mode=mode, options=options, dynamic=dynamic, **torch_compile_kwargs)
