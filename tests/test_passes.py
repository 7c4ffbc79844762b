"""The passes on graphs of every form: counts, graphs before and after, refusals with reasons, and unchanged bytes."""

import copy
import gc
import logging
import operator
import pickle
import time
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from moe_graphs import (
    TOPK,
    Compiled,
    E,
    K,
    N,
    counts,
    functional_layer,
    inputs,
    metadata_buffers,
    ops,
    reasons,
    same_bytes,
    show,
    stack,
    upstream_layer,
    write_metadata,
)
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mxfp4_ops
from mxfp4_ops import passes
from mxfp4_ops.compat import vllm
from mxfp4_ops.passes import manager
from mxfp4_ops.passes.inductor import TAKES_LISTS, Chain, beside

FORMS = ("dynamo", "auto_v1", "auto_v2")
LAYERS = {"functional": functional_layer, "upstream": upstream_layer}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself, in export


def traced(function: Callable, *args: object) -> fx.GraphModule:
    """A graph of aten calls with its writes in place, traced without running anything."""
    return make_fx(function, tracing_mode="fake")(*args)


# What is rewritten ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_quant_of_every_layer(layer: str, form: str, dynamic: bool, device: str) -> None:
    model, args = stack(LAYERS[layer], 3), inputs(device)
    compiled = Compiled(model, form, dynamic)
    assert same_bytes(compiled(*args), model(*args))
    unfused = {"fuse_permute": (3, 0, 3)}
    assert counts(compiled.report) == {"merge_metadata": (2, 2, 0), "sorted_expert_ids": (6, 6, 0), **unfused}
    assert counts(compiled.again) == {"merge_metadata": (0, 0, 0), "sorted_expert_ids": (6, 0, 6), **unfused}
    assert set(reasons(compiled.again)) == {"has sorted_expert_ids already"}


@pytest.mark.parametrize("layer", LAYERS)
def test_without_merging_every_layer_keeps_its_own(layer: str) -> None:
    model, args = stack(LAYERS[layer], 3), inputs()
    compiled = Compiled(model, merge_metadata=False)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report) == {"sorted_expert_ids": (6, 6, 0), "fuse_permute": (3, 0, 3)}
    assert compiled.after.count("get_cutlass_moe_mm_data") == 3


def test_merging_alone() -> None:
    model, args = stack(upstream_layer, 3), inputs()
    compiled = Compiled(model, sorted_expert_ids=False, fuse_permute=False)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report) == {"merge_metadata": (2, 2, 0)}
    assert "sorted_expert_ids" not in compiled.after


def test_functional_before_and_after() -> None:
    compiled = Compiled(stack(functional_layer, 2))
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = get_cutlass_moe_mm_data.default(in1, 4, 32, 64)
%1 = shuffle_rows.default(add.Tensor(in0, 0), %0[4])
%2 = mxfp4_experts_quant.default(%1, %0[0], %0[1], 4)
%3 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%1, %1], 1), %0[0], %0[1], 4)
%4 = get_cutlass_moe_mm_data.default(in1, 4, 32, 64)
%5 = shuffle_rows.default(add.Tensor(in0, 1), %4[4])
%6 = mxfp4_experts_quant.default(%5, %4[0], %4[1], 4)
%7 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%5, %5], 1), %4[0], %4[1], 4)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = get_cutlass_moe_mm_data.default(in1, 4, 32, 64)
%1 = shuffle_rows.default(add.Tensor(in0, 0), %0[4])
%2 = mxfp4_experts_quant.default(%1, %0[0], %0[1], 4, sorted_expert_ids=%0[6])
%3 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%1, %1], 1), %0[0], %0[1], 4,
    sorted_expert_ids=%0[6])
%4 = shuffle_rows.default(add.Tensor(in0, 1), %0[4])
%5 = mxfp4_experts_quant.default(%4, %0[0], %0[1], 4, sorted_expert_ids=%0[6])
%6 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%4, %4], 1), %0[0], %0[1], 4,
    sorted_expert_ids=%0[6])
""",
    )


def test_auto_functionalized_v2_before_and_after() -> None:
    compiled = Compiled(upstream_layer)
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = v2:get_cutlass_moe_mm_data.out(_all_bases=[buffer0, buffer1, buffer2, buffer3, buffer4, buffer5],
    _blockscale_offsets_base_index=1, _expert_offsets_base_index=0, _input_permutation_base_index=4,
    _output_permutation_base_index=5, k=64, n=32, num_experts=4, topk_ids=in0)
%1 = shuffle_rows.default(in1, %0[5])
%2 = mxfp4_experts_quant.default(%1, %0[1], %0[2], 4)
%3 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%1, %1], 1), %0[1], %0[2], 4)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = v2:get_cutlass_moe_mm_data.out(_all_bases=[buffer0, buffer1, buffer2, buffer3, buffer4, buffer5,
    buffer6], _blockscale_offsets_base_index=1, _expert_offsets_base_index=0, _input_permutation_base_index=4,
    _output_permutation_base_index=5, _sorted_expert_ids_base_index=6, k=64, n=32, num_experts=4,
    topk_ids=in0)
%1 = shuffle_rows.default(in1, %0[5])
%2 = mxfp4_experts_quant.default(%1, %0[1], %0[2], 4, sorted_expert_ids=%0[7])
%3 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%1, %1], 1), %0[1], %0[2], 4,
    sorted_expert_ids=%0[7])
""",
    )


def test_auto_functionalized_before_and_after() -> None:
    compiled = Compiled(upstream_layer, "auto_v1")
    compiled(*inputs())
    assert_expected_inline(
        compiled.after,
        """\
%0 = v1:get_cutlass_moe_mm_data.out(blockscale_offsets=buffer1, expert_offsets=buffer0,
    input_permutation=buffer4, k=64, n=32, num_experts=4, output_permutation=buffer5, problem_sizes1=buffer2,
    problem_sizes2=buffer3, sorted_expert_ids=buffer6, topk_ids=in0)
%1 = shuffle_rows.default(in1, %0[5])
%2 = mxfp4_experts_quant.default(%1, %0[1], %0[2], 4, sorted_expert_ids=%0[7])
%3 = silu_and_mul_mxfp4_experts_quant.default(cat.default([%1, %1], 1), %0[1], %0[2], 4,
    sorted_expert_ids=%0[7])
""",
    )


def test_raw_calls_before_and_after() -> None:
    compiled = Compiled(stack(upstream_layer, 2), "dynamo")
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = get_cutlass_moe_mm_data.out(in1, 4, 32, 64, blockscale_offsets=buffer1, expert_offsets=buffer0,
    input_permutation=buffer4, output_permutation=buffer5, problem_sizes1=buffer2, problem_sizes2=buffer3)
%1 = shuffle_rows.default(add(in0, 0), buffer4)
%2 = mxfp4_experts_quant.default(%1, buffer0, buffer1, 4, None)
%3 = silu_and_mul_mxfp4_experts_quant.default(cat((%1, %1), 1), buffer0, buffer1, 4, None)
%4 = get_cutlass_moe_mm_data.out(in1, 4, 32, 64, blockscale_offsets=buffer7, expert_offsets=buffer6,
    input_permutation=buffer10, output_permutation=buffer11, problem_sizes1=buffer8, problem_sizes2=buffer9)
%5 = shuffle_rows.default(add(in0, 1), buffer10)
%6 = mxfp4_experts_quant.default(%5, buffer6, buffer7, 4, None)
%7 = silu_and_mul_mxfp4_experts_quant.default(cat((%5, %5), 1), buffer6, buffer7, 4, None)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = get_cutlass_moe_mm_data.out(in1, 4, 32, 64, blockscale_offsets=buffer1, expert_offsets=buffer0,
    input_permutation=buffer4, output_permutation=buffer5, problem_sizes1=buffer2, problem_sizes2=buffer3,
    sorted_expert_ids=buffer6)
%1 = shuffle_rows.default(add(in0, 0), buffer4)
%2 = mxfp4_experts_quant.default(%1, buffer0, buffer1, 4, buffer6)
%3 = silu_and_mul_mxfp4_experts_quant.default(cat((%1, %1), 1), buffer0, buffer1, 4, buffer6)
%4 = shuffle_rows.default(add(in0, 1), buffer4)
%5 = mxfp4_experts_quant.default(%4, buffer0, buffer1, 4, buffer6)
%6 = silu_and_mul_mxfp4_experts_quant.default(cat((%4, %4), 1), buffer0, buffer1, 4, buffer6)
""",
    )


def test_dynamic_sizes_size_the_added_buffer() -> None:
    compiled = Compiled(upstream_layer, dynamic=True)
    compiled(*inputs())
    added = [n for n in compiled.module.graph.nodes if n.target is torch.ops.aten.empty.memory_format][-1]
    size = added.args[0][0]
    assert size.target is operator.mul and {a.target for a in size.args} == {torch.ops.aten.sym_size.int}
    for tokens in (1, 9):
        args = torch.randn(tokens, K).bfloat16(), torch.randint(0, E, (tokens, TOPK))
        assert same_bytes(compiled(*args), upstream_layer(*args))


@pytest.mark.parametrize("form", FORMS)
def test_quants_that_write_buffers(form: str) -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        fresh = mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)
        out = tuple(torch.zeros_like(t) for t in fresh)
        return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E, out=out)

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    # What makes only the shapes is dead in AOT's graph and gone.
    assert counts(compiled.report)["sorted_expert_ids"] in ((1, 1, 0), (2, 2, 0))


@pytest.mark.parametrize("form", FORMS)
def test_static_buffers(form: str, device: str) -> None:
    """CUDA-graph callers keep buffers, which are then inputs of the graph, and all layers share them."""
    args = inputs(device)

    def layer(x: Tensor, topk_ids: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        offsets, scale_offsets, _, _, permutation, _ = write_metadata(topk_ids, list(buffers))
        return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, permutation), offsets, scale_offsets, E, TOPK)

    def model(x: Tensor, topk_ids: Tensor, *buffers: Tensor) -> list[Tensor]:
        return [t for i in range(3) for t in layer(x + i, topk_ids, *buffers)]

    eager, ours = metadata_buffers(args[1]), metadata_buffers(args[1])
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args, *ours), model(*args, *eager))
    assert same_bytes(ours, eager)
    assert counts(compiled.report) == {
        "merge_metadata": (2, 2, 0),
        "sorted_expert_ids": (3, 3, 0),
        "fuse_permute": (3, 3, 0),
    }


@pytest.mark.parametrize("form", FORMS)
def test_given_sorted_ids_are_used(form: str) -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        buffers = [*metadata_buffers(topk_ids), topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32)]
        offsets, scale_offsets, sizes1, sizes2, permutation, outputs, sorted_ids = buffers
        vllm.get_cutlass_moe_mm_data(
            topk_ids, offsets, sizes1, sizes2, permutation, outputs, E, N, K, scale_offsets, True, sorted_ids
        )
        return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, permutation), offsets, scale_offsets, E, TOPK)

    args = inputs()
    compiled = Compiled(model, form, fuse_permute=False)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report)["sorted_expert_ids"] == (1, 1, 0)
    allocations = compiled.before.count("buffer"), compiled.after.count("buffer")
    assert allocations[0] in (allocations[1], allocations[1] - 1)  # none was added


def views_of_one_buffer(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    rows, sizes = topk_ids.numel(), 2 * (E + 1)
    buffer = torch.empty(sizes + 3 * rows, dtype=torch.int32, device=x.device)
    parts = buffer[: E + 1], buffer[E + 1 : sizes], *buffer[sizes:].view(3, rows).unbind(0)
    offsets, scale_offsets, permutation, outputs, sorted_ids = parts
    _, _, sizes1, sizes2, *_ = metadata_buffers(topk_ids)
    vllm.get_cutlass_moe_mm_data(
        topk_ids, offsets, sizes1, sizes2, permutation, outputs, E, N, K, scale_offsets, True, sorted_ids
    )
    shuffled = vllm.shuffle_rows(x, permutation)
    results = [vllm.mxfp4_experts_quant(shuffled + i, offsets, scale_offsets, E, TOPK) for i in range(2)]
    return *results[0], *results[1]


@pytest.mark.parametrize("form", ["dynamo", "auto_v2"])
def test_views_of_one_buffer(form: str) -> None:
    args = inputs()
    compiled = Compiled(views_of_one_buffer, form)
    assert same_bytes(compiled(*args), views_of_one_buffer(*args))
    assert counts(compiled.report)["sorted_expert_ids"] == (2, 2, 0)


def test_sorted_ids_that_are_looked_at_later() -> None:
    """The view of a larger buffer that the program makes of its ids may stand behind the quant."""

    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        offsets, scale_offsets, sizes1, sizes2, permutation, outputs = metadata_buffers(topk_ids)
        sorted_ids = torch.empty(3 * topk_ids.numel(), dtype=torch.int32)[3 : 3 + topk_ids.numel()]
        vllm.get_cutlass_moe_mm_data(
            topk_ids, offsets, sizes1, sizes2, permutation, outputs, E, N, K, scale_offsets, True, sorted_ids
        )
        rows = vllm.shuffle_rows(x, permutation)
        return *vllm.mxfp4_experts_quant(rows, offsets, scale_offsets, E, TOPK), sorted_ids

    for form in FORMS:
        args = inputs()
        compiled = Compiled(model, form)
        assert same_bytes(compiled(*args), model(*args))
        assert counts(compiled.report)["sorted_expert_ids"] == (1, 1, 0)


def test_through_views_of_the_offsets() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        scale_offsets = torch.ops.aten.alias(data.blockscale_offsets).contiguous()
        return mxfp4_ops.mxfp4_experts_quant(
            rows, data.expert_offsets.view(1, -1).reshape(-1).detach(), scale_offsets, E
        )

    for form in ("dynamo", "auto_v2"):
        args = inputs()
        compiled = Compiled(model, form)
        assert same_bytes(compiled(*args), model(*args))
        assert counts(compiled.report)["sorted_expert_ids"] == (1, 1, 0)
    module = traced(model, *args)
    assert counts(passes.rewrite(module))["sorted_expert_ids"] == (1, 1, 0)
    assert same_bytes(module(*args), model(*args))


def test_unused_scales_and_dead_outputs() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> Tensor:
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        dead = mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)
        assert dead.output.shape[0] == topk_ids.numel()
        return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E).output

    args = inputs()
    module = traced(model, *args)
    assert counts(passes.rewrite(module))["sorted_expert_ids"] == (2, 2, 0)
    assert torch.equal(module(*args), model(*args))


def test_ids_of_each_layer_of_its_own() -> None:
    def model(x: Tensor, *topk_ids: Tensor) -> list[Tensor]:
        return [t for ids in topk_ids for t in upstream_layer(x, ids)]

    x, ids = inputs()
    args = (x, ids, ids.flip(0), ids.roll(1, 0))
    compiled = Compiled(model)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report)["merge_metadata"] == (0, 0, 0)
    assert counts(compiled.report)["sorted_expert_ids"] == (6, 6, 0)


def test_a_metadata_call_of_two_forms() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return *upstream_layer(x, topk_ids), *functional_layer(x, topk_ids), *upstream_layer(x, topk_ids)

    for form in ("auto_v1", "auto_v2"):
        args = inputs()
        compiled = Compiled(model, form)
        assert same_bytes(compiled(*args), model(*args))
        assert counts(compiled.report)["merge_metadata"] == (2, 2, 0)
        assert counts(compiled.report)["sorted_expert_ids"] == (6, 6, 0)


# What is not ---------------------------------------------------------------------------------------------------------


def _data(topk_ids: Tensor, experts: int = E) -> mxfp4_ops.MoEMetadata:
    return mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, experts, N, K)


def _quant(x: Tensor, data: mxfp4_ops.MoEMetadata, *changed: Tensor | None) -> mxfp4_ops.QuantizedRows:
    """A quant with other offsets, where they are given."""
    offsets, scale_offsets, *_ = [*changed, None, None]
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    return mxfp4_ops.mxfp4_experts_quant(
        rows,
        data.expert_offsets if offsets is None else offsets,
        data.blockscale_offsets if scale_offsets is None else scale_offsets,
        E,
    )


def cast(x, topk_ids):
    data = _data(topk_ids)
    return _quant(x, data, data.expert_offsets.long().int())


def arithmetic(x, topk_ids):
    data = _data(topk_ids)
    return _quant(x, data, data.expert_offsets, data.blockscale_offsets + 0)


def copied(x, topk_ids):
    data = _data(topk_ids)
    return _quant(x, data, data.expert_offsets.clone())


def bits_of_another_dtype(x, topk_ids):
    data = _data(topk_ids)
    return _quant(x, data, data.expert_offsets.view(torch.float32).view(torch.int32))


def two_calls(x, topk_ids):
    data, other = _data(topk_ids), _data(topk_ids.flip(0).contiguous())
    return _quant(x, data, data.expert_offsets, other.blockscale_offsets)


def fewer_rows(x, topk_ids):
    data = _data(topk_ids)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)[:-1]
    return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)


def exchanged(x, topk_ids):
    data = _data(topk_ids)
    return _quant(x, data, data.blockscale_offsets, data.expert_offsets)


def offsets_written(x, topk_ids):
    data = _data(topk_ids)
    data.expert_offsets.mul_(1)
    return _quant(x, data)


def view_of_offsets_written(x, topk_ids):
    data = _data(topk_ids)
    torch.narrow(data.blockscale_offsets, 0, 1, 2).copy_(data.blockscale_offsets[1:3].clone())
    return _quant(x, data)


def offsets_written_as_out(x, topk_ids):
    data = _data(topk_ids)
    torch.add(data.blockscale_offsets.clone(), 0, out=data.blockscale_offsets)
    return _quant(x, data)


def item_written(x, topk_ids):
    data = _data(topk_ids)
    data.expert_offsets[0] = 0
    return _quant(x, data)


def ids_written(x, topk_ids):
    data = _data(topk_ids)
    data.sorted_expert_ids.neg_()
    return _quant(x, data)


def has_ids(x, topk_ids):
    data = _data(topk_ids)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E, data.sorted_expert_ids)


def buffer_written(x, topk_ids):
    buffers = write_metadata(topk_ids, metadata_buffers(topk_ids))
    buffers[0].add_(0)
    return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, buffers[4]), buffers[0], buffers[1], E, TOPK)


def buffers_written_again(x, topk_ids):
    buffers = write_metadata(topk_ids, metadata_buffers(topk_ids))
    rows = vllm.shuffle_rows(x, buffers[4])
    other = [*metadata_buffers(topk_ids)]
    write_metadata(topk_ids.flip(0), [buffers[0], *other[1:]])
    return vllm.mxfp4_experts_quant(rows, buffers[0], buffers[1], E, TOPK)


def copied_before_the_call(x, topk_ids):
    buffers = metadata_buffers(topk_ids)
    spread = torch.zeros(E + 1, 2, dtype=torch.int32)[:, 0]
    offsets = spread.contiguous()
    write_metadata(topk_ids, [spread, *buffers[1:]])
    return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, buffers[4]), offsets, buffers[1], E, TOPK)


REFUSALS = [
    (cast, "expert_offsets passes through a cast (_to_copy.default)", "expert_offsets passes through a cast (int)"),
    (arithmetic, "blockscale_offsets passes through add.Tensor", "blockscale_offsets passes through add"),
    (copied, "expert_offsets passes through clone.default", "expert_offsets passes through clone"),
    (
        bits_of_another_dtype,
        "expert_offsets passes through a cast (view.dtype)",
        "expert_offsets passes through a cast (view)",
    ),
    (two_calls, "expert_offsets and blockscale_offsets come from two metadata calls", None),
    (fewer_rows, "its rows are not known to be those of topk_ids (input [11, 64], topk_ids [6, 2])", None),
    (exchanged, "expert_offsets is the metadata call's blockscale_offsets", None),
    (offsets_written, "expert_offsets is written by mul_.Tensor",
     "expert_offsets is written after the metadata call, by mul_"),
    (view_of_offsets_written, "blockscale_offsets is written after the metadata call, by copy_.default",
     "blockscale_offsets is written after the metadata call, by copy_"),
    (offsets_written_as_out, "blockscale_offsets is written by add.out",
     "blockscale_offsets is written after the metadata call, by add"),
    (item_written, "expert_offsets is written after the metadata call, by copy_.default",
     "expert_offsets is written after the metadata call, by setitem"),
    (ids_written, "sorted_expert_ids is written after the metadata call, by neg_.default",
     "sorted_expert_ids is written after the metadata call, by neg_"),
    (has_ids, "has sorted_expert_ids already", None),
    (buffer_written, "expert_offsets is written after the metadata call, by add_.Tensor",
     "expert_offsets is written after the metadata call, by add_"),
    (buffers_written_again, "expert_offsets and blockscale_offsets come from two metadata calls", None),
    (copied_before_the_call, "expert_offsets passes through clone.default",
     "expert_offsets passes through contiguous, of what is not contiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "reason", "_"), REFUSALS, ids=[r[0].__name__ for r in REFUSALS])
def test_refusals(function: Callable, reason: str, _: str | None) -> None:
    module = traced(function, *inputs())
    before = show(module.graph)
    report = passes.rewrite(module, fuse_permute=False)
    assert reasons(report) == [reason]
    assert show(module.graph) == before


@pytest.mark.parametrize(("function", "aten_reason", "reason"), REFUSALS, ids=[r[0].__name__ for r in REFUSALS])
def test_refusals_in_dynamo_graphs(function: Callable, aten_reason: str, reason: str | None) -> None:
    graphs = []

    def backend(module: fx.GraphModule, inputs: list) -> Callable:
        graphs.append((show(module.graph), module, passes.rewrite(module, fuse_permute=False)))
        raise RuntimeError("seen")

    torch._dynamo.reset()
    with pytest.raises(Exception, match="seen"):
        torch.compile(function, backend=backend, fullgraph=True)(*inputs())
    [(before, module, report)] = graphs
    assert reasons(report) == [reason or aten_reason]
    assert show(module.graph) == before


def test_refuses_graph_inputs_and_constants() -> None:
    x, topk_ids = inputs()
    data = _data(topk_ids)

    def model(x: Tensor, offsets: Tensor) -> mxfp4_ops.QuantizedRows:
        return mxfp4_ops.mxfp4_experts_quant(x.repeat(TOPK, 1), offsets, data.blockscale_offsets, E)

    module = make_fx(model)(x, data.expert_offsets)
    assert reasons(passes.rewrite(module)) == ["expert_offsets is a graph input"]
    module = make_fx(lambda x: model(x, data.expert_offsets))(x)
    assert reasons(passes.rewrite(module)) == ["expert_offsets is a constant"]


def test_refuses_another_number_of_experts() -> None:
    """The checks of the ops forbid it in a call, so a graph is made wrong."""
    module = traced(lambda x, topk_ids: _quant(x, _data(topk_ids)), *inputs())
    quant = next(n for n in module.graph.nodes if n.target is ops.mxfp4_experts_quant.default)
    quant.update_arg(3, E + 1)
    assert reasons(passes.rewrite(module)) == ["n_experts is 5, num_experts of the metadata call 4"]


def test_refuses_what_is_not_recorded() -> None:
    """A graph without values: that the rows are those of topk_ids is not known."""
    module = traced(lambda x, topk_ids: _quant(x, _data(topk_ids)), *inputs())
    for node in module.graph.nodes:
        node.meta.clear()
    assert reasons(passes.rewrite(module)) == [
        "its rows are not known to be those of topk_ids (input None, topk_ids None)"
    ]


@pytest.mark.parametrize("form", ["dynamo", "auto_v2"])
def test_refuses_across_a_subgraph(form: str) -> None:
    """Regions are called twice, for Dynamo inlines what is called once."""

    @torch.compiler.nested_compile_region
    def outside(x: Tensor, offsets: Tensor, scale_offsets: Tensor) -> Tensor:
        return mxfp4_ops.mxfp4_experts_quant(x, offsets, scale_offsets, E).output

    @torch.compiler.nested_compile_region
    def inside(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return upstream_layer(x, topk_ids)

    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        data = _data(topk_ids)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        apart = [outside(rows + i, data.expert_offsets, data.blockscale_offsets) for i in range(2)]
        return *apart, *inside(x, topk_ids), *inside(x + 1, topk_ids), *_quant(x, data)

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    assert set(reasons(compiled.report)) == {"expert_offsets comes into the subgraph from outside"}
    # A region may be one graph or one for each call.
    matched, rewritten, skipped = counts(compiled.report)["sorted_expert_ids"]
    assert compiled.report.graphs == 1 + rewritten // 2 + skipped
    assert rewritten in (3, 5) and matched == rewritten + skipped


def test_refuses_what_comes_from_a_subgraph() -> None:
    @torch.compiler.nested_compile_region
    def inside(topk_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(_data(topk_ids))

    def model(x: Tensor, topk_ids: Tensor) -> list[mxfp4_ops.QuantizedRows]:
        return [_quant(x, mxfp4_ops.MoEMetadata(*inside(topk_ids + i))) for i in range(2)]

    compiled = Compiled(model, "auto_v2")
    compiled(*inputs())
    assert reasons(compiled.report) == ["expert_offsets passes through invoke_subgraph"] * 2


# Merging -------------------------------------------------------------------------------------------------------------


def other_arguments(x, topk_ids):
    calls = [(E, N, K), (E + 1, N, K), (E, N + 32, K), (E, N, K + 32)]
    more = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, is_gated=False)
    return [mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, *call).problem_sizes1 for call in calls], more.problem_sizes1


def result_written(x, topk_ids):
    first, second = _data(topk_ids).expert_offsets, _data(topk_ids).expert_offsets
    second.add_(1)
    return first + second + _data(topk_ids).expert_offsets


def first_result_written(x, topk_ids):
    first, second = _data(topk_ids).expert_offsets, _data(topk_ids).expert_offsets
    first.add_(1)
    return first + second


def outputs_of_both(x, topk_ids):
    return _data(topk_ids).expert_offsets, _data(topk_ids).expert_offsets.view(-1)


def outputs_of_each(x, topk_ids):
    return _data(topk_ids).expert_offsets, _data(topk_ids).blockscale_offsets


def buffers_of_the_caller(x, topk_ids, *buffers):
    write_metadata(topk_ids, list(buffers))
    return write_metadata(topk_ids, metadata_buffers(topk_ids))


def buffer_seen_before(x, topk_ids):
    buffers = metadata_buffers(topk_ids)
    view = buffers[0].view(-1)
    first = write_metadata(topk_ids, metadata_buffers(topk_ids))[0]
    return first + write_metadata(topk_ids, buffers)[0] + view


def raw_outputs_of_both(x, topk_ids):
    return [write_metadata(topk_ids, metadata_buffers(topk_ids))[0] for _ in range(2)]


MERGES = [
    (other_arguments, (0, 0, 0), None),
    (result_written, (2, 1, 1), "a result is written later, by add_.Tensor"),
    (first_result_written, (1, 0, 1), "a result of the first call is written later, by add_.Tensor"),
    (outputs_of_both, (1, 0, 1), "expert_offsets of both calls is seen outside of the graph"),
    (outputs_of_each, (1, 1, 0), None),
    (buffer_seen_before, (1, 0, 1), "the calls write different buffers, and expert_offsets is more than a fresh one"),
    (raw_outputs_of_both, (1, 0, 1), "expert_offsets of both calls is seen outside of the graph"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "count", "reason"), MERGES, ids=[m[0].__name__ for m in MERGES])
def test_merges(function: Callable, count: tuple, reason: str | None) -> None:
    args = inputs()
    copies = [a.clone() for a in args], [a.clone() for a in args]
    module = traced(function, *args)
    report = passes.rewrite(module)
    assert counts(report)["merge_metadata"] == count
    assert reasons(report, "merge_metadata") == ([reason] if reason else [])
    assert same_bytes(module(*copies[0]), function(*copies[1]))


def test_buffers_of_the_caller_are_not_merged_away() -> None:
    args = inputs()
    ours, eager = metadata_buffers(args[1]), metadata_buffers(args[1])
    module = traced(buffers_of_the_caller, *args, *ours)
    report = passes.rewrite(module)
    assert reasons(report, "merge_metadata") == [
        "the calls write different buffers, and expert_offsets is more than a fresh one"
    ]
    assert same_bytes(module(*args, *ours), buffers_of_the_caller(*args, *eager)) and same_bytes(ours, eager)


def test_ids_written_between_calls_are_not_those_of_both() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> Tensor:
        first = _data(topk_ids).expert_offsets
        topk_ids.add_(1)
        return first + _data(topk_ids).expert_offsets + _data(topk_ids).expert_offsets

    x, topk_ids = inputs()
    compiled = Compiled(model, "dynamo")
    assert same_bytes(compiled(x, topk_ids.clone()), model(x, topk_ids.clone()))
    assert reasons(compiled.report, "merge_metadata") == ["topk_ids is written between the calls, by add_"]
    assert counts(compiled.report)["merge_metadata"] == (2, 1, 1)


def test_expert_map_and_symbolic_arguments_are_compared() -> None:
    def model(topk_ids: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        maps = (None, a, b, a)
        return [
            mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, expert_map=m).expert_offsets + i
            for i, m in enumerate(maps)
        ]

    args = inputs()[1].clamp(0, E - 1), torch.arange(E).int(), torch.arange(E).int().flip(0)
    module = traced(model, *args)
    assert counts(passes.rewrite(module))["merge_metadata"] == (1, 1, 0)
    assert same_bytes(module(*args), model(*args))


# Exported programs ---------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("offsets", torch.zeros(E + 1, dtype=torch.int32))

    def forward(self, x: Tensor, topk_ids: Tensor) -> object:
        return self.function(x, topk_ids)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "decomposed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_exported_programs(layer: str, decomposed: bool, dynamic: bool) -> None:
    model, args = Model(stack(LAYERS[layer], 2)), inputs()
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(model, args, dynamic_shapes=({0: tokens}, {0: tokens}) if dynamic else None)
    program = program.run_decompositions() if decomposed else program
    report = passes.rewrite(program)
    unfused = {"fuse_permute": (2, 0, 2)}
    assert counts(report) == {"merge_metadata": (1, 1, 0), "sorted_expert_ids": (4, 4, 0), **unfused}
    program.validate()
    assert same_bytes(program.module()(*args), model(*args))
    assert counts(passes.rewrite(program)) == {"merge_metadata": (0, 0, 0), "sorted_expert_ids": (4, 0, 4), **unfused}


@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "decomposed"])
def test_outputs_of_exported_programs_keep_their_names_right(decomposed: bool) -> None:
    """An output that came from the call that is gone comes from the one that is left; so does a mutated buffer."""

    class Stateful(Model):
        def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
            first, second = _data(topk_ids), _data(topk_ids)
            self.offsets.copy_(second.expert_offsets)
            return second.blockscale_offsets, first.input_permutation, *_quant(x, second)

    args = inputs()
    model = Stateful(None)
    program = torch.export.export(model, args)
    program = program.run_decompositions() if decomposed else program
    assert counts(passes.rewrite(program)) == dict.fromkeys(
        ("merge_metadata", "sorted_expert_ids", "fuse_permute"), (1, 1, 0)
    )
    program.validate()
    module = program.module()
    assert same_bytes(module(*args), model(*args))
    assert torch.equal(module.offsets, model.offsets)
    produced = [spec.arg.name for spec in program.graph_signature.output_specs]
    assert produced == [node.name for node in program.graph.output_node().args[0]]


class Block(torch.nn.Module):
    def forward(self, x: Tensor, topk_ids: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, ...]:
        data = _data(topk_ids)
        quantized = _quant(x, data, *([] if offsets is None else [offsets]))
        return x + quantized.output.float().mean().bfloat16(), *quantized


class Blocks(torch.nn.Module):
    """Two blocks, the first of which makes what the second repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.outer = Block(), Block(), torch.nn.Identity()

    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        x, *first = self.first(x, topk_ids)
        return *first, *self.second(x, topk_ids)


PARTED = "a module whose signature is preserved holds one of the calls and not the other"


@pytest.mark.parametrize(
    ("preserved", "merges"), [((), 1), (("first", "second"), 0), (("first",), 0), (("second",), 0), (("outer",), 1)]
)
def test_modules_whose_signatures_are_preserved(preserved: tuple, merges: int) -> None:
    args, model = inputs(), Blocks()
    program = torch.export.export(model, args, preserve_module_call_signature=preserved)
    report = passes.rewrite(program)
    both = dict.fromkeys(("sorted_expert_ids", "fuse_permute"), (2, 2, 0))
    assert counts(report) == {"merge_metadata": (1, merges, 1 - merges), **both}
    assert reasons(report, "merge_metadata") == [PARTED] * (1 - merges)
    assert same_bytes(program.module()(*args), model(*args))
    assert same_bytes(torch.export.unflatten(program)(*args), model(*args))


def test_ids_do_not_leave_a_module_whose_signature_is_preserved() -> None:
    class Routing(torch.nn.Module):
        def forward(self, topk_ids: Tensor) -> tuple[Tensor, ...]:
            return _data(topk_ids)[:5]

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.routing = Routing()

        def forward(self, x: Tensor, topk_ids: Tensor) -> mxfp4_ops.QuantizedRows:
            offsets, scale_offsets, _, _, permutation = self.routing(topk_ids)
            return mxfp4_ops.mxfp4_experts_quant(mxfp4_ops.shuffle_rows(x, permutation), offsets, scale_offsets, E)

    args, model = inputs(), Routed()
    program = torch.export.export(model, args, preserve_module_call_signature=("routing",))
    assert reasons(passes.rewrite(program)) == [
        "a module whose signature is preserved holds one of it and the metadata call and not the other"
    ]
    assert same_bytes(torch.export.unflatten(program)(*args), model(*args))


# Meta data and the report ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_new_nodes_carry_meta_data(form: str, dynamic: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
            return upstream_layer(x, topk_ids)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Layer()

        def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
            return self.moe(x, topk_ids)

    compiled = Compiled(Outer(), form, dynamic)
    compiled(*inputs())
    quant = next(n for n in compiled.module.graph.nodes if n.target is ops.mxfp4_experts_quant.default)
    ids = (*quant.args, *quant.kwargs.values())[-1]
    call = ids if ids.target is not operator.getitem else ids.args[0]
    recorded = ids.meta.get("val", ids.meta.get("example_value"))
    assert recorded.dtype is torch.int32 and recorded.dim() == 1 and recorded.is_contiguous()
    pending = [ids]
    while pending:  # the added buffer, its size, and the item
        node = pending.pop()
        if node.op == "placeholder":
            continue
        assert "upstream_layer" in node.meta["stack_trace"]
        assert any("moe" in str(entry) for entry in node.meta["nn_module_stack"].values())
        assert node.meta.get("val", node.meta.get("example_value")) is not None
        pending += [] if node is call and call is not ids else node.all_input_nodes


def test_eager_values_follow_the_arguments() -> None:
    """Inductor lays arguments out by what is kept of eager mode, in the structure of the arguments."""
    for form in ("auto_v1", "auto_v2"):
        compiled = Compiled(upstream_layer, form, dynamic=True)
        compiled(*inputs())
        for node in compiled.module.graph.nodes:
            if "eager_input_vals" in node.meta:
                args, kwargs = node.meta["eager_input_vals"]
                assert len(args) == len(node.args) and kwargs.keys() == node.kwargs.keys()
                for name, given in node.kwargs.items():
                    if isinstance(given, list):
                        assert len(given) == len(kwargs[name]) and None not in kwargs[name]
                    assert not isinstance(given, fx.Node) or kwargs[name] is not None


def test_report_is_a_table_with_source_lines() -> None:
    compiled = Compiled(lambda x, topk_ids: (cast(x, topk_ids), arithmetic(x, topk_ids)))
    compiled(*inputs())
    line = _quant.__code__.co_firstlineno + 4
    place = f"test_passes.py:{line} in _quant"
    expected = f"""\
rule               matched  rewritten  skipped
merge_metadata           1          1        0
sorted_expert_ids        2          0        2
fuse_permute             2          0        2
  sorted_expert_ids: {place} (%mxfp4_experts_quant): expert_offsets passes through a cast (_to_copy.default)
  sorted_expert_ids: {place} (%mxfp4_experts_quant_1): blockscale_offsets passes through add.Tensor
  fuse_permute: {place} (%mxfp4_experts_quant): expert_offsets passes through a cast (_to_copy.default)
  fuse_permute: {place} (%mxfp4_experts_quant_1): blockscale_offsets passes through add.Tensor"""
    assert str(compiled.report) == expected
    rule = compiled.report.rules["sorted_expert_ids"]
    assert rule.reasons() == dict.fromkeys(reasons(compiled.report), 1)


def test_reports_add_up() -> None:
    total = passes.MXFP4Passes()
    for _ in range(2):
        total.run(traced(functional_layer, *inputs()).graph)
    rules = {"merge_metadata": (0, 0, 0), "sorted_expert_ids": (4, 4, 0), "fuse_permute": (2, 0, 2)}
    assert counts(total.report) == rules
    assert total.report.summary() == "2 graphs: merge_metadata 0 of 0, sorted_expert_ids 4 of 4, fuse_permute 0 of 2"


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mxfp4_ops.passes"):
        passes.rewrite(traced(functional_layer, *inputs()))
    rules = "merge_metadata 0 of 0, sorted_expert_ids 2 of 2, fuse_permute 0 of 1"
    assert caplog.messages == [f"mxfp4_ops passes: 1 graphs: {rules}"]


def test_graphs_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mxfp4_ops.passes"):
        passes.rewrite(traced(functional_layer, *inputs()), log_graphs=True)
    before, after, _ = caplog.messages
    ids = "sorted_expert_ids: %"
    assert before.startswith("before:\ngraph()") and ids not in before
    assert after.startswith("after:\ngraph()") and after.count(ids) == 2


# The pass as an object ------------------------------------------------------------------------------------------------


def test_uuid_changes_with_options_only() -> None:
    make = passes.MXFP4Passes
    assert make().uuid() == make().uuid() == make(log_graphs=True).uuid()
    options = [{}, {"sorted_expert_ids": False}, {"merge_metadata": False}, {"fuse_permute": False}]
    options += [options[1] | options[2], options[1] | options[3]]
    assert len({make(**o).uuid() for o in options}) == 6


@pytest.mark.parametrize("changed", ["sources", "schemas", "torch"])
def test_uuid_changes_with_what_decides(changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    manager._fingerprint.cache_clear()
    before = passes.MXFP4Passes().uuid()
    if changed == "sources":
        for source in manager.SOURCES.glob("*.py"):
            (tmp_path / source.name).write_bytes(source.read_bytes())
        monkeypatch.setattr(manager, "SOURCES", tmp_path)
        manager._fingerprint.cache_clear()
        assert passes.MXFP4Passes().uuid() == before
        (tmp_path / "sorted_ids.py").write_text("changed")
    elif changed == "schemas":
        monkeypatch.setattr(manager, "_schemas", lambda: ["mxfp4_ops::another(Tensor a) -> Tensor"])
    else:
        monkeypatch.setattr(torch, "__version__", "3.0.0")
    manager._fingerprint.cache_clear()
    assert passes.MXFP4Passes().uuid() != before
    monkeypatch.undo()
    manager._fingerprint.cache_clear()
    assert passes.MXFP4Passes().uuid() == before


def test_unknown_options_and_backends_raise() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        passes.rewrite(traced(functional_layer, *inputs()), nonsense=True)
    with pytest.raises(RuntimeError, match="Either mode or options"):
        mxfp4_ops.compile(functional_layer, mode="default", options={"max_autotune": False})
    with pytest.raises(Exception, match="no_such_backend"):
        mxfp4_ops.compile(functional_layer, backend="no_such_backend")


@pytest.mark.parametrize("wrong", [functional_layer, None, torch.nn.Linear(1, 1), fx.Graph()])
def test_what_is_no_program_raises(wrong: object) -> None:
    accepted = "a torch.fx.GraphModule or a torch.export.ExportedProgram"
    with pytest.raises(TypeError, match=f"program must be {accepted}, got {type(wrong).__name__}$"):
        passes.rewrite(wrong)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_of_the_pass(duplicate: Callable) -> None:
    ours = passes.MXFP4Passes(merge_metadata=False)
    ours(traced(lambda x, topk_ids: cast(x, topk_ids), *inputs()).graph)
    other = duplicate(ours)
    assert other.uuid() == ours.uuid() and other.report == ours.report and other.report is not ours.report
    other(traced(functional_layer, *inputs()).graph)
    assert other.report.graphs == 2 and ours.report.graphs == 1


@pytest.mark.parametrize("backend", ["inductor", "eager", "aot_eager"])
def test_compiled_modules_are_pickled_where_torch_compile_is(backend: str) -> None:
    torch._dynamo.reset()
    args = inputs()
    compiled = mxfp4_ops.compile(Picklable(), backend=backend, fullgraph=True)
    for module in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert same_bytes(module(*args), Picklable()(*args))


class Picklable(torch.nn.Module):
    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return functional_layer(x, topk_ids)


class Other(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "other"


def test_beside_other_passes() -> None:
    ours, other = passes.MXFP4Passes(), Other()
    assert beside(None, ours) is ours and beside(ours, ours) is ours and beside([], ours) is ours
    both = beside(other, ours)
    assert (both if TAKES_LISTS else both.passes) == [other, ours]
    three = beside([ours, other, print], ours)
    assert (three if TAKES_LISTS else three.passes) == [other, print, ours]


def test_chain_runs_all_and_names_all() -> None:
    ours, other = passes.MXFP4Passes(), Other()
    chain = Chain([other, ours])
    chain(traced(functional_layer, *inputs()).graph)
    assert other.graphs == ours.report.graphs == 1
    assert chain.uuid() == ("other", ours.uuid()) != Chain([ours, other]).uuid()
    assert Chain([print, ours]).uuid() is None  # what has no identity is compiled anew


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layer", LAYERS)
def test_compile_with_other_backends(backend: str, layer: str) -> None:
    torch._dynamo.reset()
    ours, args = passes.MXFP4Passes(), inputs()
    model = stack(LAYERS[layer], 2)
    compiled = mxfp4_ops.compile(passes=ours, backend=backend, fullgraph=True)(model)
    assert same_bytes(compiled(*args), model(*args))
    rules = {"merge_metadata": (1, 1, 0), "sorted_expert_ids": (4, 4, 0), "fuse_permute": (2, 0, 2)}
    assert counts(ours.report) == rules


# Time -----------------------------------------------------------------------------------------------------------------


def _stacked_by_hand(layers: int, upstream: bool) -> fx.GraphModule:
    """Many layers, each on ids of its own, made without tracing; all layers write the same buffers."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:

        def add(target: Callable, *args: object, **kwargs: object) -> fx.Node:
            node = graph.call_function(target, args, kwargs)
            node.meta["val"] = target(*fx.node.map_arg(args, lambda a: a.meta["val"]),
                                      **fx.node.map_arg(kwargs, lambda a: a.meta["val"]))  # fmt: skip
            return node

        x, topk_ids = graph.placeholder("x"), graph.placeholder("topk_ids")
        x.meta["val"], topk_ids.meta["val"] = map(mode.from_tensor, inputs())
        buffers, results = [], []
        for like in metadata_buffers(torch.empty(inputs()[1].shape, device="meta")):
            buffers.append(graph.placeholder(f"buffer{len(buffers)}"))
            buffers[-1].meta["val"] = torch.empty(like.shape, dtype=like.dtype)
        for layer in range(layers):
            ids = add(torch.ops.aten.add.Tensor, topk_ids, layer)
            if upstream:
                names = ("expert_offsets", "blockscale_offsets", "problem_sizes1", "problem_sizes2")
                names = dict(zip((*names, "input_permutation", "output_permutation"), buffers, strict=True))
                add(ops.get_cutlass_moe_mm_data.out, ids, E, N, K, **names)
                offsets, scale_offsets, permutation = buffers[0], buffers[1], buffers[4]
            else:
                data = add(ops.get_cutlass_moe_mm_data.default, ids, E, N, K)
                again = add(ops.get_cutlass_moe_mm_data.default, ids, E, N, K)
                offsets = add(operator.getitem, data, 0)
                scale_offsets, permutation = (add(operator.getitem, again, i) for i in (1, 4))
            rows = add(ops.shuffle_rows.default, x, permutation)
            results.append(add(ops.mxfp4_experts_quant.default, rows, offsets, scale_offsets, E))
        graph.output([add(operator.getitem, result, 0) for result in results])
    return fx.GraphModule({}, graph)


@pytest.mark.slow
@pytest.mark.parametrize("upstream", [False, True], ids=["functional", "upstream"])
def test_time_is_linear_in_layers(upstream: bool) -> None:
    def seconds(layers: int, graphs: int) -> float:
        made = [_stacked_by_hand(layers, upstream).graph for _ in range(graphs)]
        ours = passes.MXFP4Passes()
        gc.collect()
        gc.disable()  # its time goes with the whole heap, most of which is not of the graph
        try:
            start = time.process_time()
            for graph in made:
                ours.run(graph)
            taken = time.process_time() - start
        finally:
            gc.enable()
        total, merged = layers * graphs, 0 if upstream else layers * graphs
        both = dict.fromkeys(("sorted_expert_ids", "fuse_permute"), (total, total, 0))
        assert counts(ours.report) == {"merge_metadata": (merged, merged, 0), **both}
        return taken / graphs

    assert any(seconds(1000, 1) <= 12 * seconds(100, 10) for _ in range(3))
