"""torch.export and AOTInductor: a program exported at one batch size has the bytes of eager at every other."""

import inspect
import io
from pathlib import Path

import pytest
import torch
from samples import assert_same
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

import mxfp4_ops

E, TOPK, N, K = 16, 4, 64, 192
BATCHES = (0, 1, 2, 8, 33, 300)  # R < E and R > E

# Of torch: the executor of custom ops took dtype arguments for others (pytorch/pytorch#169157).
AOTI_TAKES_DTYPES = torch.__version__ >= torch.torch_version.TorchVersion("2.12")

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


class Quantize(torch.nn.Module):
    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        where = (data.expert_offsets, data.blockscale_offsets, E)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        quantized = mxfp4_ops.mxfp4_experts_quant(rows, *where, data.sorted_expert_ids)
        activated = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(rows, *where)
        return *data, *quantized, *activated


class QuantizeAndBack(Quantize):
    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        results = super().forward(x, topk_ids)
        values = mxfp4_ops.mxfp4_dequantize(*results[7:9], *results[:2], dtype=torch.float32)
        return *results, mxfp4_ops.shuffle_rows(values, results[5])


class QuantizeIntoBuffers(torch.nn.Module):
    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        R = topk_ids.numel()
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        where = (data.expert_offsets, data.blockscale_offsets, E)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation, out=x.new_empty(R, K))
        S, T = mxfp4_ops.layout.scale_rows(R, E), mxfp4_ops.layout.scale_tiles(K)
        buffers = tuple(torch.full(shape, 7, dtype=torch.uint8, device=x.device) for shape in ((R, K // 2), (S, 4 * T)))
        return tuple(mxfp4_ops.mxfp4_experts_quant(rows, *where, out=buffers))


class Permute(torch.nn.Module):
    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N))


class PermuteIntoBuffers(torch.nn.Module):
    def forward(self, x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        shapes = mxfp4_ops.meta.moe_permute_shapes(*topk_ids.shape, K, E)
        dtypes = 7 * [torch.int32] + 2 * [torch.uint8]
        buffers = tuple(torch.full(shape, 7, dtype=dtype, device=x.device) for shape, dtype in zip(shapes, dtypes))
        return tuple(mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N, out=buffers))


MODULES = (Quantize, QuantizeAndBack, QuantizeIntoBuffers, Permute, PermuteIntoBuffers)
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)


def inputs(m: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(m, K, dtype=torch.bfloat16, device=device)
    return x, torch.randint(-1, E, (m, TOPK), device=device)


def exported(module: torch.nn.Module, dim: object, device: str = "cpu", strict: bool = False) -> ExportedProgram:
    dynamic_shapes = None if dim is None else {"x": {0: dim}, "topk_ids": {0: dim}}
    return torch.export.export(module, inputs(8, device), dynamic_shapes=dynamic_shapes, strict=strict)


def check(program: object, module: torch.nn.Module, batches: tuple[int, ...], device: str = "cpu") -> None:
    for m in batches:
        arguments = inputs(m, device)
        got, want = tree_leaves(program(*arguments)), module(*arguments)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"m = {m}: result {i}")


@each_module
@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_static_batch(module: type, strict: bool, device: str) -> None:
    check(exported(module(), None, device, strict).module(), module(), (8,), device)


@each_module
@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("dim", [Dim("m"), Dim("m", min=0, max=4096)], ids=["m", "m_from_0"])
def test_dynamic_batch(module: type, dim: Dim, strict: bool, device: str) -> None:
    check(exported(module(), dim, device, strict).module(), module(), BATCHES, device)


@pytest.mark.parametrize("module", [QuantizeAndBack, Permute])
def test_range_of_the_batch_is_the_callers(module: type) -> None:
    """No check of ours narrows the range that the caller gave."""
    program = exported(module(), Dim("m", min=0, max=4096))
    assert [(r.lower, r.upper) for r in program.range_constraints.values()] == [(0, 4096)]


def test_ops_stay_whole() -> None:
    """Decomposition leaves one call per op and no assertion beside them."""

    def called(module: torch.nn.Module) -> list[str]:
        graph = exported(module, Dim("m")).run_decompositions().graph
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        return [name for name in names if "getitem" not in name]

    assert called(Permute()) == ["mxfp4_ops.moe_permute_mxfp4_quant.default"]
    assert called(QuantizeAndBack()) == [
        "mxfp4_ops.get_cutlass_moe_mm_data.default",
        "mxfp4_ops.shuffle_rows.default",
        "mxfp4_ops.mxfp4_experts_quant.default",
        "mxfp4_ops.silu_and_mul_mxfp4_experts_quant.default",
        "mxfp4_ops.mxfp4_dequantize.default",
        "mxfp4_ops.shuffle_rows.default",
    ]


@each_module
def test_decomposed(module: type) -> None:
    program = exported(module(), Dim("m", min=0)).run_decompositions()
    check(program.module(), module(), BATCHES)


@each_module
def test_saved_and_loaded(module: type, device: str) -> None:
    file = io.BytesIO()
    torch.export.save(exported(module(), Dim("m", min=0), device), file)
    file.seek(0)
    check(torch.export.load(file).module(), module(), BATCHES, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        Quantize,
        pytest.param(
            QuantizeAndBack,
            marks=pytest.mark.xfail(not AOTI_TAKES_DTYPES, reason="pytorch/pytorch#169157: wrong dtype argument"),
        ),
        QuantizeIntoBuffers,
        Permute,
        PermuteIntoBuffers,
    ],
    ids=lambda module: module.__name__,
)
def test_aot_inductor(module: type, tmp_path: Path, device: str) -> None:
    program = exported(module(), Dim("m", min=0, max=4096), device)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    check(torch._inductor.aoti_load_package(package), module(), BATCHES, device)


class Routing(torch.nn.Module):
    def forward(self, ids: Tensor) -> mxfp4_ops.MoEMetadata:
        return mxfp4_ops.get_cutlass_moe_mm_data(ids, 4, 64, 64)


class Dequantize(torch.nn.Module):
    def forward(self, rows: mxfp4_ops.QuantizedRows, data: mxfp4_ops.MoEMetadata) -> Tensor:
        return mxfp4_ops.mxfp4_dequantize(*rows, data.expert_offsets, data.blockscale_offsets, dtype=torch.bfloat16)


class DequantizePermuted(torch.nn.Module):
    def forward(self, rows: mxfp4_ops.PermutedQuantizedRows) -> tuple[Tensor, mxfp4_ops.PermutedQuantizedRows]:
        return mxfp4_ops.mxfp4_dequantize(*rows[-2:], *rows[:2], dtype=torch.bfloat16), rows


def test_named_results_are_saved_and_loaded() -> None:
    ids = torch.tensor([[0, 3], [1, 3]])
    data = mxfp4_ops.get_cutlass_moe_mm_data(ids, 4, 64, 64)
    rows = mxfp4_ops.mxfp4_experts_quant(torch.randn(4, 64).bfloat16(), data.expert_offsets, data.blockscale_offsets, 4)
    permuted = mxfp4_ops.moe_permute_mxfp4_quant(torch.randn(2, 64).bfloat16(), ids, 4, 64)
    for module, inputs in ((Routing(), (ids,)), (Dequantize(), (rows, data)), (DequantizePermuted(), (permuted,))):
        file = io.BytesIO()
        torch.export.save(torch.export.export(module, inputs), file)
        file.seek(0)
        loaded = torch.export.load(file)
        # The code that torch 2.13 writes to check inputs mistakes `rows.output` for the head of `rows.output_scale`.
        unchecked = {"check_guards": False} if "check_guards" in inspect.signature(loaded.module).parameters else {}
        got, want = loaded.module(**unchecked)(*inputs), module(*inputs)
        assert type(got) is type(want)
        assert all(map(torch.equal, torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)))

    file = io.BytesIO()
    torch.save((data, rows, permuted), file)
    file.seek(0)
    for got, want in zip(torch.load(file, weights_only=True), (data, rows, permuted), strict=True):
        assert type(got) is type(want) and all(map(torch.equal, got, want))
