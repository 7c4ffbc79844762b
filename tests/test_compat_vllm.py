"""mxfp4_ops.compat.vllm: vLLM's own calls, unchanged, give what the ops give."""

import inspect
import textwrap
from collections.abc import Callable

import pytest
import reference
import torch
from expecttest import assert_expected_inline
from samples import assert_same
from torch import Tensor

import mxfp4_ops
from mxfp4_ops.compat import vllm as ops

E, TOPK, N, K = 17, 4, 96, 192
POISON = 4500

QUANT = (ops.mxfp4_experts_quant, ops.silu_and_mul_mxfp4_experts_quant)


def inputs(m: int, device: str, id_dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    a = torch.randn(m, K, dtype=torch.bfloat16, device=device)
    return a, torch.randint(-1, E, (m, TOPK), device=device).to(id_dtype)


def poisoned(*shape: int, device: str) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=device)


def assert_metadata(got: dict[str, Tensor], topk_ids: Tensor, is_gated: bool = True) -> None:
    want = reference.metadata(topk_ids.cpu(), E, N, K, is_gated)
    for name, t in got.items():
        assert_same(t, want[name], name)


def metadata_buffers(m: int, device: str) -> dict[str, Tensor]:
    shapes = [(E + 1,), (E + 1,), (E, 3), (E, 3), (m * TOPK,), (m * TOPK,), (m * TOPK,)]
    names = mxfp4_ops.MoEMetadata._fields
    return {name: poisoned(*shape, device=device) for name, shape in zip(names, shapes)}


def test_signatures() -> None:
    lines = []
    for f in (ops.get_cutlass_moe_mm_data, ops.shuffle_rows, *QUANT):
        parameters = inspect.signature(f).parameters.values()
        names = (str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)
        lines.append(textwrap.fill(f"{f.__name__}({', '.join(names)})", 110))
    assert_expected_inline("\n".join(lines), """\
get_cutlass_moe_mm_data(topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation,
output_permutation, num_experts, n, k, blockscale_offsets=None, is_gated=True, sorted_expert_ids=None)
shuffle_rows(input_tensor, dst2src_map)
mxfp4_experts_quant(input_tensor, expert_offsets, blockscale_offsets, n_experts, topk, sorted_expert_ids=None)
silu_and_mul_mxfp4_experts_quant(input_tensor, expert_offsets, blockscale_offsets, n_experts, topk,
sorted_expert_ids=None)""")


# Metadata -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1, 33])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_metadata_with_every_buffer(m: int, id_dtype: torch.dtype, device: str) -> None:
    _, topk_ids = inputs(m, device, id_dtype)
    b = metadata_buffers(m, device)
    returned = ops.get_cutlass_moe_mm_data(
        topk_ids,
        b["expert_offsets"],
        b["problem_sizes1"],
        b["problem_sizes2"],
        b["input_permutation"],
        b["output_permutation"],
        E,
        N,
        K,
        b["blockscale_offsets"],
        True,
        b["sorted_expert_ids"],
    )
    assert returned is None
    assert_metadata(b, topk_ids)


def test_metadata_without_the_optional_buffers(device: str) -> None:
    _, topk_ids = inputs(33, device)
    b = metadata_buffers(33, device)
    del b["blockscale_offsets"], b["sorted_expert_ids"]
    eo, ps1, ps2, a_map, c_map = b.values()
    ops.get_cutlass_moe_mm_data(topk_ids, eo, ps1, ps2, a_map, c_map, E, N, K)
    assert_metadata(b, topk_ids)


@pytest.mark.parametrize("is_gated", [True, False])
def test_metadata_as_the_mxfp4_moe_calls_it(is_gated: bool, device: str) -> None:
    _, topk_ids = inputs(33, device)
    b = metadata_buffers(33, device)
    del b["sorted_expert_ids"]
    eo, bo, ps1, ps2, a_map, c_map = b.values()
    ops.get_cutlass_moe_mm_data(topk_ids, eo, ps1, ps2, a_map, c_map, E, N, K, bo, is_gated=is_gated)
    assert_metadata(b, topk_ids, is_gated)


def test_maps_that_share_a_workspace(device: str) -> None:
    _, topk_ids = inputs(33, device)
    b = metadata_buffers(33, device)
    R = topk_ids.numel()
    workspace = poisoned(2 * R + 1, device=device)[1:]
    a_map, c_map = b["input_permutation"], b["output_permutation"] = workspace[:R], workspace[R:]
    sizes = (b["problem_sizes1"], b["problem_sizes2"])
    ops.get_cutlass_moe_mm_data(
        topk_ids, b["expert_offsets"], *sizes, a_map, c_map, E, N, K, b["blockscale_offsets"],
        sorted_expert_ids=b["sorted_expert_ids"],
    )
    assert_metadata(b, topk_ids)


# Rows -----------------------------------------------------------------------------------------------------------------


def test_shuffle_rows(device: str) -> None:
    a, topk_ids = inputs(33, device)
    a_map = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K).input_permutation
    assert_same(ops.shuffle_rows(a, a_map), reference.shuffle_rows(a.cpu(), a_map.cpu()), "rows")
    assert_same(ops.shuffle_rows(input_tensor=a, dst2src_map=a_map), ops.shuffle_rows(a, a_map), "keywords")


@pytest.mark.parametrize("quant", QUANT, ids=lambda quant: quant.__name__)
def test_quant(quant: Callable, device: str) -> None:
    a, topk_ids = inputs(33, device)
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
    rows = mxfp4_ops.shuffle_rows(a, data.input_permutation)
    eo, bo, ids = data.expert_offsets, data.blockscale_offsets, data.sorted_expert_ids
    silu = quant is ops.silu_and_mul_mxfp4_experts_quant
    want = reference.experts_quant(rows.cpu(), eo.cpu(), bo.cpu(), E, silu=silu)
    for got in (
        quant(rows, eo, bo, E, TOPK),
        quant(rows, eo, bo, E, topk=1),
        quant(rows, eo, bo, E, TOPK, ids),
        quant(rows, eo, bo, E, TOPK, sorted_expert_ids=ids),
    ):
        assert type(got) is tuple
        for g, w, name in zip(got, want, ("output", "output_scale"), strict=True):
            assert_same(g, w, name)


def test_weights_as_experts(device: str) -> None:
    """vLLM's tests quantise the weights of E experts as rows, 128 and more of them each."""
    experts, rows = 3, 256
    weights = torch.randn(experts * rows, K, dtype=torch.bfloat16, device=device)
    offsets = torch.arange(0, (experts + 1) * rows, rows, dtype=torch.int32, device=device)
    output, scale = ops.mxfp4_experts_quant(weights, offsets, offsets, experts, topk=1)
    want = reference.experts_quant(weights.cpu(), offsets.cpu(), offsets.cpu(), experts)
    assert_same(output, want[0], "output")
    assert_same(scale, want[1], "output_scale")


# A layer --------------------------------------------------------------------------------------------------------------


def run_layer(a: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
    """The calls of vLLM's run_cutlass_moe_mxfp4 around the two GEMMs, for which the rows themselves stand in."""
    m, device = a.shape[0], a.device
    expert_offsets = torch.empty((E + 1), dtype=torch.int32, device=device)
    blockscale_offsets = torch.empty((E + 1), dtype=torch.int32, device=device)
    problem_sizes1 = torch.empty((E, 3), dtype=torch.int32, device=device)
    problem_sizes2 = torch.empty((E, 3), dtype=torch.int32, device=device)
    a_map = torch.empty((topk_ids.numel()), dtype=torch.int32, device=device)
    c_map = torch.empty((topk_ids.numel()), dtype=torch.int32, device=device)
    ops.get_cutlass_moe_mm_data(
        topk_ids, expert_offsets, problem_sizes1, problem_sizes2, a_map, c_map, E, N, K, blockscale_offsets,
        is_gated=True,
    )
    rows = ops.shuffle_rows(a, a_map)
    rep_a = ops.mxfp4_experts_quant(rows, expert_offsets, blockscale_offsets, E, TOPK)
    inter = ops.silu_and_mul_mxfp4_experts_quant(rows, expert_offsets, blockscale_offsets, E, TOPK)
    return *rep_a, *inter, problem_sizes1, problem_sizes2, ops.shuffle_rows(rows, c_map).view(m, TOPK, K)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layer(backend: str, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(run_layer, backend=backend, fullgraph=True, dynamic=True)
    for m in (33, 2, 1, 0):
        a, topk_ids = inputs(m, device)
        for i, (got, want) in enumerate(zip(compiled(a, topk_ids), run_layer(a, topk_ids), strict=True)):
            assert_same(got, want, f"m = {m}: result {i}")
