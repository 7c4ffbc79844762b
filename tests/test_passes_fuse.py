"""Rule 3: metadata, shuffle and quant become one call; in every form, with what forbids it, and unchanged bytes."""

import io
import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from moe_graphs import (
    TOKENS,
    TOPK,
    Compiled,
    E,
    K,
    N,
    counts,
    inputs,
    metadata_buffers,
    ops,
    quant_buffers,
    reasons,
    same_bytes,
    show,
    write_metadata,
)
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import mxfp4_ops
from mxfp4_ops import passes
from mxfp4_ops.compat import vllm
from mxfp4_ops.passes.calls import Call

FORMS = ("dynamo", "auto_v1", "auto_v2")
RULES = ("merge_metadata", "sorted_expert_ids", "fuse_permute")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # of torch about itself, in export
    pytest.mark.usefixtures("compile_anew"),
]


def data_of(topk_ids: Tensor, **options: object) -> mxfp4_ops.MoEMetadata:
    return mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, **options)


def after_first_quant(quantized: tuple, offsets: Tensor, scale_offsets: Tensor) -> tuple[Tensor, ...]:
    """What stands for the first GEMM, and the second quant."""
    gate_up = mxfp4_ops.mxfp4_dequantize(*quantized, offsets, scale_offsets, dtype=torch.bfloat16)
    activated = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(gate_up, offsets, scale_offsets, E)
    return *quantized, *activated


def functional(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    data = data_of(topk_ids)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)
    return *after_first_quant(quantized, data.expert_offsets, data.blockscale_offsets), data.output_permutation


def upstream(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    """As callers of compat.vllm write it: metadata in buffers, a quant that returns fresh tensors."""
    offsets, scale_offsets, _, _, permutation, outputs = write_metadata(topk_ids, metadata_buffers(topk_ids))
    rows = vllm.shuffle_rows(x, permutation)
    quantized = vllm.mxfp4_experts_quant(rows, offsets, scale_offsets, E, TOPK)
    return *after_first_quant(quantized, offsets, scale_offsets), outputs


def buffers(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    """All calls write buffers, the shuffle too."""
    offsets, scale_offsets, _, _, permutation, outputs = write_metadata(topk_ids, metadata_buffers(topk_ids))
    rows = mxfp4_ops.shuffle_rows(x, permutation, out=x.new_empty(topk_ids.numel(), K))
    out = quant_buffers(topk_ids, 7)
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, offsets, scale_offsets, E, out=out)
    return *after_first_quant(quantized, offsets, scale_offsets), outputs


def quant_buffers_alone(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    data = data_of(topk_ids)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    where = data.expert_offsets, data.blockscale_offsets
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, *where, E, out=quant_buffers(topk_ids, 7))
    return *after_first_quant(quantized, *where), data.output_permutation


LAYERS = {f.__name__: f for f in (functional, upstream, buffers, quant_buffers_alone)}


def each_on_its_own_ids(layer: Callable, layers: int) -> Callable:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        return [t for i in range(layers) for t in layer(x * (i + 1), (topk_ids + i) % E)]

    return model


def calls_in(text: str) -> dict[str, int]:
    names = ("get_cutlass_moe_mm_data", "shuffle_rows", "mxfp4_experts_quant", "moe_permute_mxfp4_quant")
    lines = [line.replace("silu_and_mul_mxfp4_experts_quant", "silu") for line in text.splitlines()]
    found = {name: sum(f"{name}." in line for line in lines) for name in names}
    return {name: count for name, count in found.items() if count}


# What is fused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_metadata_shuffle_and_quant_are_one_call(layer: str, form: str, dynamic: bool, device: str) -> None:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        torch._check(x.shape[0] == topk_ids.shape[0])  # as it is where a router makes the ids
        return each_on_its_own_ids(LAYERS[layer], 3)(x, topk_ids)

    args = inputs(device)
    compiled = Compiled(model, form, dynamic=None)
    for t in args:
        if dynamic:
            torch._dynamo.mark_dynamic(t, 0)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report) == {
        "merge_metadata": (0, 0, 0), "sorted_expert_ids": (6, 6, 0), "fuse_permute": (3, 3, 0)
    }  # fmt: skip
    assert counts(compiled.again)["fuse_permute"] == (0, 0, 0)
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 3}
    if dynamic:
        for tokens in (2, 9):
            args = torch.randn(tokens, K, device=device).bfloat16(), torch.randint(0, E, (tokens, TOPK), device=device)
            assert same_bytes(compiled(*args), model(*args))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_fp16_int32_and_an_expert_map(layer: str, form: str) -> None:
    def model(x: Tensor, topk_ids: Tensor, expert_map: Tensor) -> tuple[Tensor, ...]:
        data = data_of(topk_ids, expert_map=expert_map, is_gated=False)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        out = quant_buffers(topk_ids, 7) if "buffers" in layer else None
        quantized = mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E, out=out)
        return *quantized, *data

    x, topk_ids = inputs()
    args = x.half(), topk_ids.int(), torch.tensor([2, -1, 0, 1, 3], dtype=torch.int32)
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report)["fuse_permute"] == (1, 1, 0)
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 1}
    assert "is_gated=False" in compiled.after and "expert_map=in" in compiled.after


def test_functional_before_and_after() -> None:
    compiled = Compiled(functional)
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = get_cutlass_moe_mm_data.default(in0, 4, 32, 64)
%1 = shuffle_rows.default(in1, %0[4])
%2 = mxfp4_experts_quant.default(%1, %0[0], %0[1], 4)
%3 = mxfp4_dequantize.default(%2[0], %2[1], %0[0], %0[1], dtype=torch.bfloat16)
%4 = silu_and_mul_mxfp4_experts_quant.default(%3, %0[0], %0[1], 4)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = moe_permute_mxfp4_quant.default(in0, in1, 4, 32)
%1 = mxfp4_dequantize.default(%0[7], %0[8], %0[0], %0[1], dtype=torch.bfloat16)
%2 = silu_and_mul_mxfp4_experts_quant.default(%1, %0[0], %0[1], 4, sorted_expert_ids=%0[6])
""",
    )


def test_upstream_before_and_after() -> None:
    compiled = Compiled(upstream)
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = v2:get_cutlass_moe_mm_data.out(_all_bases=[buffer0, buffer1, buffer2, buffer3, buffer4, buffer5],
    _blockscale_offsets_base_index=1, _expert_offsets_base_index=0, _input_permutation_base_index=4,
    _output_permutation_base_index=5, k=64, n=32, num_experts=4, topk_ids=in0)
%1 = shuffle_rows.default(in1, %0[5])
%2 = mxfp4_experts_quant.default(%1, %0[1], %0[2], 4)
%3 = mxfp4_dequantize.default(%2[0], %2[1], %0[1], %0[2], dtype=torch.bfloat16)
%4 = silu_and_mul_mxfp4_experts_quant.default(%3, %0[1], %0[2], 4)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = moe_permute_mxfp4_quant.default(in0, in1, 4, 32)
%1 = mxfp4_dequantize.default(%0[7], %0[8], %0[0], %0[1], dtype=torch.bfloat16)
%2 = silu_and_mul_mxfp4_experts_quant.default(%1, %0[0], %0[1], 4, sorted_expert_ids=%0[6])
""",
    )


def test_auto_functionalized_before_and_after() -> None:
    compiled = Compiled(buffers, "auto_v1")
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = v1:get_cutlass_moe_mm_data.out(blockscale_offsets=buffer1, expert_offsets=buffer0,
    input_permutation=buffer4, k=64, n=32, num_experts=4, output_permutation=buffer5, problem_sizes1=buffer2,
    problem_sizes2=buffer3, topk_ids=in0)
%1 = v1:shuffle_rows.out(dst2src_map=%0[5], input=in1, output=new_empty.default(in1, [12, 64]))
%2 = v1:mxfp4_experts_quant.out(blockscale_offsets=%0[2], expert_offsets=%0[1], input=%1[1], n_experts=4,
    output=zeros.default([12, 32]), output_scale=full.default([512, 4], 7))
%3 = mxfp4_dequantize.default(%2[1], %2[2], %0[1], %0[2], dtype=torch.bfloat16)
%4 = silu_and_mul_mxfp4_experts_quant.default(%3, %0[1], %0[2], 4)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = v1:moe_permute_mxfp4_quant.out(blockscale_offsets=buffer1, expert_offsets=buffer0, hidden_states=in0,
    input_permutation=buffer4, n=32, num_experts=4, output=zeros.default([12, 32]),
    output_permutation=buffer5, output_scale=full.default([512, 4], 7), problem_sizes1=buffer2,
    problem_sizes2=buffer3, sorted_expert_ids=buffer6, topk_ids=in1)
%1 = mxfp4_dequantize.default(%0[8], %0[9], %0[1], %0[2], dtype=torch.bfloat16)
%2 = silu_and_mul_mxfp4_experts_quant.default(%1, %0[1], %0[2], 4, sorted_expert_ids=%0[7])
""",
    )


def test_auto_functionalized_v2_before_and_after() -> None:
    compiled = Compiled(buffers)
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = v2:get_cutlass_moe_mm_data.out(_all_bases=[buffer0, buffer1, buffer2, buffer3, buffer4, buffer5],
    _blockscale_offsets_base_index=1, _expert_offsets_base_index=0, _input_permutation_base_index=4,
    _output_permutation_base_index=5, k=64, n=32, num_experts=4, topk_ids=in0)
%1 = v2:shuffle_rows.out(_all_bases=[new_empty.default(in1, [12, 64])], _output_base_index=0,
    dst2src_map=%0[5], input=in1)
%2 = v2:mxfp4_experts_quant.out(_all_bases=[zeros.default([12, 32]), full.default([512, 4], 7)],
    _output_base_index=0, _output_scale_base_index=1, blockscale_offsets=%0[2], expert_offsets=%0[1],
    input=%1[1], n_experts=4)
%3 = mxfp4_dequantize.default(%2[1], %2[2], %0[1], %0[2], dtype=torch.bfloat16)
%4 = silu_and_mul_mxfp4_experts_quant.default(%3, %0[1], %0[2], 4)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = v2:moe_permute_mxfp4_quant.out(_all_bases=[buffer0, buffer1, buffer2, buffer3, buffer4, buffer5, buffer6,
    zeros.default([12, 32]), full.default([512, 4], 7)], _blockscale_offsets_base_index=1,
    _expert_offsets_base_index=0, _input_permutation_base_index=4, _output_base_index=7,
    _output_permutation_base_index=5, _output_scale_base_index=8, _sorted_expert_ids_base_index=6,
    hidden_states=in0, n=32, num_experts=4, topk_ids=in1)
%1 = mxfp4_dequantize.default(%0[8], %0[9], %0[1], %0[2], dtype=torch.bfloat16)
%2 = silu_and_mul_mxfp4_experts_quant.default(%1, %0[1], %0[2], 4, sorted_expert_ids=%0[7])
""",
    )


def test_raw_calls_before_and_after() -> None:
    compiled = Compiled(buffers, "dynamo")
    compiled(*inputs())
    assert_expected_inline(
        compiled.before,
        """\
%0 = get_cutlass_moe_mm_data.out(in0, 4, 32, 64, blockscale_offsets=buffer1, expert_offsets=buffer0,
    input_permutation=buffer4, output_permutation=buffer5, problem_sizes1=buffer2, problem_sizes2=buffer3)
%1 = shuffle_rows.out(in1, buffer4, output=new_empty(in1, 12, 64))
%2 = mxfp4_experts_quant.out(new_empty(in1, 12, 64), buffer0, buffer1, 4, None, output=zeros((12, 32)),
    output_scale=full((512, 4), 7))
%3 = mxfp4_dequantize.default(zeros((12, 32)), full((512, 4), 7), buffer0, buffer1, dtype=torch.bfloat16)
%4 = silu_and_mul_mxfp4_experts_quant.default(%3, buffer0, buffer1, 4, None)
""",
    )
    assert_expected_inline(
        compiled.after,
        """\
%0 = moe_permute_mxfp4_quant.out(in0, in1, 4, 32, blockscale_offsets=buffer1, expert_offsets=buffer0,
    input_permutation=buffer4, output=zeros((12, 32)), output_permutation=buffer5, output_scale=full((512, 4),
    7), problem_sizes1=buffer2, problem_sizes2=buffer3, sorted_expert_ids=buffer6)
%1 = mxfp4_dequantize.default(zeros((12, 32)), full((512, 4), 7), buffer0, buffer1, dtype=torch.bfloat16)
%2 = silu_and_mul_mxfp4_experts_quant.default(%1, buffer0, buffer1, 4, buffer6)
""",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_the_same_ids(layer: str, form: str) -> None:
    """The first quant takes the one metadata call over, the other computes the metadata anew."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        return [t for i in range(2) for t in LAYERS[layer](x * (i + 1), topk_ids)[:4]]

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report) == {
        "merge_metadata": (1, 1, 0), "sorted_expert_ids": (4, 4, 0), "fuse_permute": (2, 2, 0)
    }  # fmt: skip
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 2}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_metadata_that_is_read_early_stays(layer: str, form: str) -> None:
    """Hidden states that the metadata decides cannot be read before it."""

    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        if layer in ("upstream", "buffers"):
            made = write_metadata(topk_ids, metadata_buffers(topk_ids))
        else:
            made = data_of(topk_ids)
        hidden = x * made[0].sum()
        rows = mxfp4_ops.shuffle_rows(hidden.bfloat16(), made[4])
        out = quant_buffers(topk_ids, 7) if "buffers" in layer else None
        return *mxfp4_ops.mxfp4_experts_quant(rows, made[0], made[1], E, out=out), made[5]

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report)["fuse_permute"] == (1, 1, 0)
    assert calls_in(compiled.after) == {"get_cutlass_moe_mm_data": 1, "moe_permute_mxfp4_quant": 1}


def static_metadata(x: Tensor, topk_ids: Tensor, *static: Tensor) -> list[Tensor]:
    made = write_metadata(topk_ids, list(static[:6]))
    return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, made[4]), made[0], made[1], E, TOPK)


def static_quant(x: Tensor, topk_ids: Tensor, *static: Tensor) -> list[Tensor]:
    data = data_of(topk_ids)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E, out=static[6:])
    return [data.output_permutation, static[6] + 0]


def static_both(x: Tensor, topk_ids: Tensor, *static: Tensor) -> list[Tensor]:
    made = write_metadata(topk_ids, list(static[:6]))
    rows = vllm.shuffle_rows(x, made[4])
    mxfp4_ops.mxfp4_experts_quant(rows, made[0], made[1], E, out=static[6:])
    return [static[6] + 0]


def static_inputs(device: str = "cpu") -> tuple[Tensor, ...]:
    args = inputs(device)
    return *args, *(b.zero_() for b in metadata_buffers(args[1])), *quant_buffers(args[1], 7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layer", "metadata_calls"), [(static_metadata, 1), (static_quant, 0), (static_both, 0)],
    ids=["metadata", "quant", "both"],
)  # fmt: skip
def test_static_buffers(layer: Callable, metadata_calls: int, form: str, device: str) -> None:
    """Buffers of the caller hold what they would, padding included; a functional quant leaves them to the metadata."""

    def model(x: Tensor, topk_ids: Tensor, *static: Tensor) -> list[Tensor]:
        return [t for i in range(3) for t in layer(x * (i + 1), (topk_ids + i) % E, *static)]

    args = static_inputs(device)
    ours, eager = [a.clone() for a in args], [a.clone() for a in args]
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*ours), model(*eager))
    assert same_bytes(ours, eager)
    assert counts(compiled.report)["fuse_permute"] == (3, 3, 0)
    names = {"get_cutlass_moe_mm_data": 3 * metadata_calls, "moe_permute_mxfp4_quant": 3}
    assert calls_in(compiled.after) == {name: count for name, count in names.items() if count}


def test_views_of_one_workspace() -> None:
    def model(x: Tensor, topk_ids: Tensor, workspace: Tensor) -> tuple[Tensor, ...]:
        parts, at = [], 3
        for like in metadata_buffers(topk_ids):
            parts.append(workspace[at : at + like.numel()].view(like.shape))
            at += like.numel()
        made = write_metadata(topk_ids, parts)
        rows = vllm.shuffle_rows(x, made[4])
        out = quant_buffers(topk_ids, 7)
        return mxfp4_ops.mxfp4_experts_quant(rows, made[0], made[1], E, out=out)

    for form in ("dynamo", "auto_v2"):
        args = *inputs(), torch.zeros(100, dtype=torch.int32)
        ours, eager = [a.clone() for a in args], [a.clone() for a in args]
        compiled = Compiled(model, form)
        assert same_bytes([compiled(*ours), ours], [model(*eager), eager])
        assert counts(compiled.report)["fuse_permute"] == (1, 1, 0)
        assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 1}


@pytest.mark.parametrize("form", FORMS)
def test_through_views_of_the_rows(form: str) -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        data = data_of(topk_ids)
        rows = mxfp4_ops.shuffle_rows(x.view(1, TOKENS, K).view(TOKENS, K), data.input_permutation.view(-1))
        rows.view(-1)
        rows = rows.view(TOKENS, TOPK, K).reshape(-1, K).detach()
        return mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report)["fuse_permute"] == (1, 1, 0)
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 1}


@pytest.mark.parametrize("form", FORMS)
def test_rules_1_and_2_know_the_fused_call(form: str) -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        fused = mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N)
        data = data_of(topk_ids)
        return after_first_quant(fused[7:], fused.expert_offsets, data.blockscale_offsets)

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report) == {
        "merge_metadata": (1, 1, 0), "sorted_expert_ids": (1, 1, 0), "fuse_permute": (0, 0, 0)
    }  # fmt: skip
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 1}


@pytest.mark.parametrize("written_first", [False, True])
def test_raw_and_functional_metadata_merge(written_first: bool) -> None:
    """Else the functional call that takes the raw one over would merge in a second run."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        layers = (upstream, functional) if written_first else (functional, upstream)
        return [t for layer in layers for t in layer(x, topk_ids)[:4]]

    args = inputs()
    compiled = Compiled(model, "dynamo")
    assert same_bytes(compiled(*args), model(*args))
    assert counts(compiled.report)["merge_metadata"] == (1, 1, 0)
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 2}


def test_a_fused_call_gives_rows_to_another_quant() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        fused = mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N)
        rows = mxfp4_ops.shuffle_rows(x + 1, fused.input_permutation)
        return mxfp4_ops.mxfp4_experts_quant(rows, fused.expert_offsets, fused.blockscale_offsets, E)

    args = inputs()
    compiled = Compiled(model)
    assert same_bytes(compiled(*args), model(*args))
    assert calls_in(compiled.after) == {"moe_permute_mxfp4_quant": 2}


def test_switched_off() -> None:
    compiled = Compiled(functional, fuse_permute=False)
    assert same_bytes(compiled(*(args := inputs())), functional(*args))
    assert "fuse_permute" not in compiled.report.rules and "moe_permute" not in compiled.after


# What is not ----------------------------------------------------------------------------------------------------------


def quant_by(x, data, rows=None, **given):
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation) if rows is None else rows
    where = {"expert_offsets": data.expert_offsets, "blockscale_offsets": data.blockscale_offsets, "n_experts": E}
    return mxfp4_ops.mxfp4_experts_quant(rows, **where | given)


def rows_read_twice(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    return quant_by(x, data, rows), rows.sum()


def rows_returned(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    return quant_by(x, data, rows), rows


def two_quants_of_rows(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    return quant_by(x, data, rows).output.clone(), quant_by(x, data, rows).output_scale


def rows_written(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    rows.view(-1)[:3].fill_(1)
    return quant_by(x, data, rows)


def part_of_the_rows(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    return quant_by(x, data, rows[1:])


def rows_of_another_shape(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    return quant_by(x, data, rows.view(-1, K // 2))


def hidden_states_written(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    x.mul_(2)
    return quant_by(x, data, rows)


def ids_written(x, topk_ids):
    data = data_of(topk_ids)
    topk_ids.add_(1)
    return quant_by(x, data)


def offsets_written(x, topk_ids):
    rows = mxfp4_ops.shuffle_rows(x, (data := data_of(topk_ids)).input_permutation)
    data.expert_offsets.view(-1)[:1].add_(0)
    return quant_by(x, data, rows)


def permutation_written(x, topk_ids):
    data = data_of(topk_ids)
    data.input_permutation.view(-1).clamp_(0)
    return quant_by(x, data)


def another_map(x, topk_ids):
    data = data_of(topk_ids)
    return quant_by(x, data, mxfp4_ops.shuffle_rows(x, data.input_permutation.flip(0)))


def another_result_as_map(x, topk_ids):
    data = data_of(topk_ids)
    return quant_by(x, data, mxfp4_ops.shuffle_rows(x, data.output_permutation))


def map_of_another_call(x, topk_ids):
    return quant_by(x, data_of(topk_ids), mxfp4_ops.shuffle_rows(x, data_of(topk_ids.flip(0)).input_permutation))


def ids_of_another_call(x, topk_ids):
    return quant_by(x, data_of(topk_ids), sorted_expert_ids=data_of(topk_ids.flip(0)).sorted_expert_ids)


def ids_made_otherwise(x, topk_ids):
    data = data_of(topk_ids)
    return quant_by(x, data, sorted_expert_ids=data.sorted_expert_ids + 0)


def another_k(x, topk_ids):
    return quant_by(x, mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, 2 * K))


def more_hidden_states(x, topk_ids):
    return quant_by(torch.cat((x, x)), data_of(topk_ids))


def rows_in_a_used_buffer(x, topk_ids):
    data = data_of(topk_ids)
    rows = x.new_zeros(topk_ids.numel(), K)
    before = rows.view(-1)
    mxfp4_ops.shuffle_rows(x, data.input_permutation, out=rows)
    return quant_by(x, data, rows), before + 1


def codes_over_hidden_states(x, topk_ids):
    data = data_of(topk_ids)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    out = x.view(torch.uint8).view(-1)[: topk_ids.numel() * K // 2].view(-1, K // 2), quant_buffers(topk_ids)[1]
    return quant_by(x, data, rows, out=out)


REFUSALS = [
    (rows_read_twice, "its rows are read by sum.default, too"),
    (rows_returned, "its rows are read by output, too"),
    (two_quants_of_rows, "its rows are read by mxfp4_experts_quant.default, too"),
    (rows_written, "input is written after the shuffle, by fill_.Scalar"),
    (part_of_the_rows, "input passes through slice.Tensor"),
    (rows_of_another_shape, "its input [24, 32] is not the shuffled rows as they are"),
    (hidden_states_written, "hidden_states is written after the shuffle, by mul_.Tensor"),
    (ids_written, "topk_ids is written after the metadata call, by add_.Tensor"),
    (offsets_written, "expert_offsets is written after the metadata call, by add_.Tensor"),
    (permutation_written, "dst2src_map is written after the metadata call, by clamp_.default"),
    (another_map, "dst2src_map passes through flip.default"),
    (another_result_as_map, "dst2src_map is the metadata call's output_permutation"),
    (map_of_another_call, "expert_offsets and dst2src_map come from two metadata calls"),
    (ids_of_another_call, "expert_offsets and sorted_expert_ids come from two metadata calls"),
    (ids_made_otherwise, "sorted_expert_ids passes through add.Tensor"),
    (another_k, "hidden_states has 64 columns, k of the metadata call is 128"),
    (more_hidden_states, "hidden_states has 12 rows, topk_ids 6"),
    (rows_in_a_used_buffer, "its rows are in a buffer that is more than a fresh one"),
    (codes_over_hidden_states, "hidden_states is in the memory of a buffer that it writes"),
]


@pytest.mark.parametrize(("function", "reason"), REFUSALS, ids=[r[0].__name__ for r in REFUSALS])
def test_refusals(function: Callable, reason: str) -> None:
    args = inputs()
    module = make_fx(function, tracing_mode="fake")(*args)
    before = show(module.graph)
    report = passes.rewrite(module, sorted_expert_ids=False)
    assert set(reasons(report, "fuse_permute")) == {reason}
    assert show(module.graph) == before
    if function is not codes_over_hidden_states:  # where eager itself reads what it has written
        copies = [[a.clone() for a in args] for _ in range(2)]
        assert same_bytes([module(*copies[0]), copies[0]], [function(*copies[1]), copies[1]])


def graph_of(function: Callable) -> tuple[fx.GraphModule, dict[object, fx.Node]]:
    module = make_fx(function, tracing_mode="fake")(*inputs())
    return module, {node.target: node for node in module.graph.nodes}


def test_refuses_what_is_not_recorded() -> None:
    module, _ = graph_of(functional)
    for node in module.graph.nodes:
        node.meta.clear()
    reason = "the graph has no recorded values, which tell whose memory is whose"
    assert reasons(passes.rewrite(module), "fuse_permute") == [reason]


def test_refuses_what_the_fused_op_does_not_take() -> None:
    module, _ = graph_of(functional)
    x = next(node for node in module.graph.nodes if node.op == "placeholder")
    x.meta["val"] = x.meta["val"].float()
    reason = "hidden_states is torch.float32 with 2 dimensions"
    assert reasons(passes.rewrite(module), "fuse_permute") == [reason]


def test_refuses_another_number_of_experts() -> None:
    module, nodes = graph_of(functional)
    nodes[ops.mxfp4_experts_quant.default].update_arg(3, E + 1)
    assert reasons(passes.rewrite(module), "fuse_permute") == ["n_experts is 5, num_experts of the metadata call 4"]


def test_refuses_hidden_states_that_require_grad() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        data = data_of(topk_ids)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation).detach()
        return quant_by(x, data, rows)

    x, topk_ids = inputs()
    x.requires_grad_()
    torch._dynamo.reset()
    ours = passes.MXFP4Passes()
    compiled = mxfp4_ops.compile(model, passes=ours, backend="eager", fullgraph=True)
    assert same_bytes(compiled(x, topk_ids), model(x, topk_ids))
    assert reasons(ours.report, "fuse_permute") == ["hidden_states requires grad"]


def test_refuses_sizes_that_may_differ() -> None:
    """Nothing says that a hidden size that is no constant is k."""
    compiled = Compiled(functional, dynamic=True)
    compiled(*inputs())
    [reason] = reasons(compiled.report, "fuse_permute")
    assert reason.startswith("hidden_states has s") and reason.endswith("columns, k of the metadata call is 64")


def test_quants_without_a_shuffle_are_no_matches() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return quant_by(x, data_of(topk_ids), x.repeat(TOPK, 1))

    compiled = Compiled(model)
    compiled(*inputs())
    assert counts(compiled.report)["fuse_permute"] == (0, 0, 0)


@pytest.mark.parametrize("form", ["dynamo", "auto_v2"])
def test_subgraphs_are_not_crossed(form: str) -> None:
    @torch.compiler.nested_compile_region
    def outside(x: Tensor, offsets: Tensor, scale_offsets: Tensor, permutation: Tensor) -> Tensor:
        rows = mxfp4_ops.shuffle_rows(x, permutation)
        return mxfp4_ops.mxfp4_experts_quant(rows, offsets, scale_offsets, E).output

    @torch.compiler.nested_compile_region
    def inside(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return functional(x, topk_ids)

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        data = data_of(topk_ids)
        where = data.expert_offsets, data.blockscale_offsets, data.input_permutation
        apart = [outside(x + i, *where) for i in range(2)]
        return [*apart, *(t for i in range(2) for t in inside(x + i, topk_ids))]

    args = inputs()
    compiled = Compiled(model, form)
    assert same_bytes(compiled(*args), model(*args))
    rule = compiled.report.rules["fuse_permute"]
    # A region may be one graph or one for each call.
    assert rule.rewritten in (1, 2) and rule.matched == rule.rewritten + len(rule.skipped)
    assert set(rule.reasons()) == {"expert_offsets comes into the subgraph from outside"}


# Exported programs ----------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "decomposed"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layer", LAYERS)
def test_exported_programs(layer: str, dynamic: bool, decomposed: bool) -> None:
    args, model = inputs(), Module(each_on_its_own_ids(LAYERS[layer], 2))
    tokens = {0: torch.export.Dim("tokens", min=2)}
    program = torch.export.export(model, args, dynamic_shapes=((tokens, tokens),) if dynamic else None)
    program = program.run_decompositions({}) if decomposed else program
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for made in (program, torch.export.load(file)):
        report = passes.rewrite(made)
        assert counts(report)["fuse_permute"] == (2, 2, 0)
        assert calls_in(show(made.graph)) == {"moe_permute_mxfp4_quant": 2}
        made.validate()
        assert same_bytes(made.module()(*args), model(*args))
        assert counts(passes.rewrite(made))["fuse_permute"] == (0, 0, 0)
        again = io.BytesIO()
        torch.export.save(made, again)
        again.seek(0)
        assert same_bytes(torch.export.load(again).module()(*args), model(*args))


class Routing(torch.nn.Module):
    def forward(self, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(data_of(topk_ids))


class Experts(torch.nn.Module):
    def forward(self, x: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        return tuple(quant_by(x, mxfp4_ops.MoEMetadata(*data)))


class Scale(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Parts(torch.nn.Module):
    """Routing, what makes the hidden states, and experts, each in a module of its own; twice."""

    def __init__(self) -> None:
        super().__init__()
        self.routing, self.scale, self.experts = Routing(), Scale(), Experts()

    def forward(self, x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        data = self.routing(topk_ids)
        return [*data[:6], *self.experts(self.scale(x), *data)]


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Parts(), Parts()

    def forward(self, x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        return [*self.first(x, topk_ids), *self.second(x + 1, topk_ids.flip(0))]


@pytest.mark.parametrize(
    ("preserved", "fused", "left"),
    [((), 2, 0), (("first",), 2, 0), (("first.routing",), 1, 1), (("first.experts",), 1, 1), (("first.scale",), 2, 1)],
)
def test_modules_whose_signatures_are_preserved(preserved: tuple, fused: int, left: int) -> None:
    args, model = inputs(), Both()
    program = torch.export.export(model, args, preserve_module_call_signature=preserved)
    report = passes.rewrite(program)
    assert counts(report)["fuse_permute"] == (2, fused, 2 - fused)
    assert calls_in(show(program.graph)).get("get_cutlass_moe_mm_data", 0) == left
    assert set(reasons(report, "fuse_permute")) <= {
        "a module whose signature is preserved holds one of it and the metadata call and not the other"
    }
    program.validate()
    assert same_bytes(program.module()(*args), model(*args))
    assert same_bytes(torch.export.unflatten(program)(*args), model(*args))


# Inductor -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v2", [False, True], ids=["auto_v1", "auto_v2"])
@pytest.mark.parametrize("layer", LAYERS)
def test_inductor(layer: str, v2: bool, device: str) -> None:
    model, args, ours = each_on_its_own_ids(LAYERS[layer], 2), inputs(device), passes.MXFP4Passes()
    seen = []
    settings = {"enable_auto_functionalized_v2": v2, "post_grad_custom_post_pass": lambda g: seen.append(show(g))}
    with torch._inductor.config.patch(settings):
        compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
        for i in range(2):
            assert same_bytes(compiled(args[0] + i, args[1].roll(i, 0)), model(args[0] + i, args[1].roll(i, 0)))
    assert counts(ours.report)["fuse_permute"] == (2, 2, 0)
    assert calls_in(seen[0]) == {"moe_permute_mxfp4_quant": 2}


@pytest.mark.parametrize("layer", [static_metadata, static_quant, static_both])
def test_inductor_writes_static_buffers_in_place(layer: Callable, device: str) -> None:
    """No copies but for those that are there without the rule."""

    def model(x: Tensor, topk_ids: Tensor, *static: Tensor) -> list[Tensor]:
        return [t for i in range(2) for t in layer(x * (i + 1), (topk_ids + i) % E, *static)]

    args, copies = static_inputs(device), []
    eager = [a.clone() for a in args]
    expected = model(*eager)
    for fuse_permute in (True, False):
        seen = []

        def count(graph: fx.Graph, seen: list = seen) -> None:
            copying = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten.copy.default)
            seen.append(sum(node.target in copying for node in graph.nodes))

        torch._dynamo.reset()
        ours = [a.clone() for a in args]
        with torch._inductor.config.patch(post_grad_custom_post_pass=count):
            made = passes.MXFP4Passes(fuse_permute=fuse_permute)
            compiled = mxfp4_ops.compile(model, passes=made, fullgraph=True)
            assert same_bytes([compiled(*ours), ours], [expected, eager])
        copies += seen
    assert copies[0] <= copies[1]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_cuda_graphs(layer: str) -> None:
    model, args, ours = each_on_its_own_ids(LAYERS[layer], 2), inputs("cuda"), passes.MXFP4Passes()
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True, mode="reduce-overhead")
    for i in range(4):  # warm up, record, replay
        x, topk_ids = args[0] + i, args[1].roll(i, 0)
        torch.compiler.cudagraph_mark_step_begin()
        assert same_bytes([t.clone() for t in compiled(x, topk_ids)], model(x, topk_ids))
    assert counts(ours.report)["fuse_permute"] == (2, 2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [static_metadata, static_quant, static_both])
def test_static_buffers_in_a_cuda_graph(layer: Callable) -> None:
    args = static_inputs("cuda")
    compiled = mxfp4_ops.compile(layer, fullgraph=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            compiled(*args)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = compiled(*args)
    for i in range(3):
        x, topk_ids = inputs("cuda")
        args[0].copy_(x + i)
        args[1].copy_(topk_ids)
        eager = [a.clone() for a in args]
        graph.replay()
        expected = layer(*eager)
        assert same_bytes([results, args], [expected, eager])


# Meta data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_new_nodes_carry_meta_data(layer: str, form: str) -> None:
    compiled = Compiled(Module(Module(each_on_its_own_ids(LAYERS[layer], 1))), form)
    compiled(*inputs())
    found = 0
    for node in compiled.module.graph.nodes:
        if (call := Call.parse(node)) is None or call.op != "moe_permute_mxfp4_quant":
            continue
        found += 1
        for made in (node, *(user for user in node.users if user.target is operator.getitem)):
            assert layer in made.meta["stack_trace"] and "nn_module_stack" in made.meta
        recorded = node.meta.get("val", node.meta.get("example_value"))
        assert (recorded is None) == (form == "dynamo" and "buffers" in layer)
        for user in node.users:
            ours, theirs = user.meta.get("val", user.meta.get("example_value")), recorded[user.args[1]]
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if form != "dynamo":
            args, kwargs = node.meta["eager_input_vals"]
            assert len(args) == len(node.args) and kwargs.keys() == node.kwargs.keys()
            for given, kept in [*zip(node.args, args), *((node.kwargs[k], kwargs[k]) for k in kwargs)]:
                assert (kept is not None) == isinstance(given, (fx.Node, list))
                assert not isinstance(given, list) or len(given) == len(kept)
    assert found == 1


def test_a_row_buffer_of_several_shuffles() -> None:
    """Each overwrites the rows of the one before: fused from the last to the first, in one run."""

    class Layers(torch.nn.Module):
        def forward(self, x: Tensor, topk_ids: Tensor) -> list[Tensor]:
            data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
            rows, results = x.new_empty(TOKENS * TOPK, K), []
            for i in range(4):
                mxfp4_ops.shuffle_rows(x + i, data.input_permutation, out=rows)
                results += [*mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)]
            return results

    args = inputs()
    want = Layers()(*args)
    program = torch.export.export(Layers(), args).run_decompositions({})
    assert counts(passes.rewrite(program))["fuse_permute"] == (4, 4, 0)
    assert counts(passes.rewrite(program))["fuse_permute"] == (0, 0, 0)
    assert same_bytes(program.module()(*args), want)
    compiled = Compiled(Layers())  # which runs the passes twice
    assert same_bytes(compiled(*args), want)
    assert counts(compiled.report)["fuse_permute"] == (4, 4, 0)
