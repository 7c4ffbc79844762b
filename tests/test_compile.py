"""torch.compile: one graph, the bytes of eager, one compilation for every batch size."""

from collections.abc import Callable

import pytest
import reference
import sympy
import torch
from expecttest import assert_expected_inline
from samples import assert_same
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map

import mxfp4_ops
from mxfp4_ops import layout
from mxfp4_ops.compat import vllm

E, TOPK, N, K = 16, 4, 64, 192
BF16 = torch.bfloat16
POISON = 77

ops = torch.ops.mxfp4_ops

pytestmark = [
    pytest.mark.usefixtures("compile_anew"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]


# Every op in each of its forms: f(x, topk_ids, out) -> results; `out` has the structure of the results ---------------


def functional(x: Tensor, topk_ids: Tensor, out: tuple | None = None) -> tuple:
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
    where = (data.expert_offsets, data.blockscale_offsets, E)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, *where, data.sorted_expert_ids)
    activated = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(rows, *where)
    values = mxfp4_ops.mxfp4_dequantize(*quantized, *where[:2], dtype=BF16)
    permuted = mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N)
    return data, rows, quantized, activated, values, permuted


def out_keyword(x: Tensor, topk_ids: Tensor, out: tuple) -> tuple:
    data, rows, quantized, activated, values, permuted = out
    where = (data.expert_offsets, data.blockscale_offsets, E)
    mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, out=data)
    mxfp4_ops.shuffle_rows(x, data.input_permutation, out=rows)
    mxfp4_ops.mxfp4_experts_quant(rows, *where, data.sorted_expert_ids, out=quantized)
    mxfp4_ops.silu_and_mul_mxfp4_experts_quant(rows, *where, out=activated)
    mxfp4_ops.mxfp4_dequantize(*quantized, *where[:2], dtype=BF16, out=values)
    mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N, out=permuted)
    return out


def out_overload(x: Tensor, topk_ids: Tensor, out: tuple) -> tuple:
    data, rows, quantized, activated, values, permuted = out
    where = (data.expert_offsets, data.blockscale_offsets, E)
    ops.get_cutlass_moe_mm_data.out(topk_ids, E, N, K, **data._asdict())
    ops.shuffle_rows.out(x, data.input_permutation, output=rows)
    ops.mxfp4_experts_quant.out(rows, *where, data.sorted_expert_ids, **quantized._asdict())
    ops.silu_and_mul_mxfp4_experts_quant.out(rows, *where, **activated._asdict())
    ops.mxfp4_dequantize.out(*quantized, *where[:2], dtype=BF16, output=values)
    ops.moe_permute_mxfp4_quant.out(x, topk_ids, E, N, **permuted._asdict())
    return out


def compat_vllm(x: Tensor, topk_ids: Tensor, out: tuple) -> tuple:
    data = out[0]
    where = (data.expert_offsets, data.blockscale_offsets, E, TOPK)
    sizes = (data.problem_sizes1, data.problem_sizes2)
    permutations = (data.input_permutation, data.output_permutation)
    vllm.get_cutlass_moe_mm_data(
        topk_ids, where[0], *sizes, *permutations, E, N, K, where[1], True, data.sorted_expert_ids
    )
    rows = vllm.shuffle_rows(x, data.input_permutation)
    quantized = vllm.mxfp4_experts_quant(rows, *where, data.sorted_expert_ids)
    activated = vllm.silu_and_mul_mxfp4_experts_quant(rows, *where)
    return data, rows, quantized, activated


FORMS = (functional, out_keyword, out_overload, compat_vllm)
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
each_backend = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def call_arguments(m: int, device: str = "cpu", ids_from: int = -1) -> tuple[Tensor, Tensor, tuple]:
    """(x, topk_ids, poisoned buffers of every result)."""
    x = torch.randn(m, K, dtype=BF16, device=device)
    topk_ids = torch.randint(ids_from, E, (m, TOPK), device=device)
    return x, topk_ids, tree_map(lambda t: torch.full_like(t, POISON), functional(x, topk_ids))


def batched(x: Tensor, topk_ids: Tensor, out: tuple) -> list[Tensor]:
    """The arguments whose first dimension grows with the batch."""
    return [x, topk_ids, *out[0][4:], *tree_leaves(out[1:5]), *out[5][4:]]


def assert_trees_same(got: object, want: object, case: str) -> None:
    got, want = tree_leaves(got), tree_leaves(want)
    assert len(got) == len(want), case
    for i, (g, w) in enumerate(zip(got, want)):
        assert g.stride() == w.stride() or g.numel() == 0, f"{case}: strides of {i}"
        assert_same(g, w, f"{case}: {i}")


def assert_equals_eager(compiled: Callable, form: Callable, arguments: tuple, case: str = "") -> None:
    """Results and buffers after a compiled and an eager call on the same arguments."""
    x, topk_ids, out = arguments
    eager_out = tree_map(torch.clone, out)
    assert_trees_same(compiled(x, topk_ids, out), form(x, topk_ids, eager_out), case)
    assert_trees_same(out, eager_out, f"{case} out")


# Bytes ----------------------------------------------------------------------------------------------------------------


@each_form
@each_backend
def test_equals_eager(form: Callable, backend: str, device: str) -> None:
    compiled = torch.compile(form, backend=backend, fullgraph=True)
    assert_equals_eager(compiled, form, call_arguments(33, device))


@each_form
def test_inference_mode(form: Callable) -> None:
    with torch.inference_mode():
        assert_equals_eager(torch.compile(form, fullgraph=True), form, call_arguments(33))


def test_neighbours_that_inductor_fuses(device: str) -> None:
    def layer(x: Tensor, topk_ids: Tensor) -> tuple:
        # Exact in bf16 and float32, so that fusing them changes no byte; transposed, so that strides are not plain.
        x = (x.t() * 2).t()
        data, rows, quantized, activated, values, permuted = functional(x, topk_ids + 1)
        sums = data.expert_offsets * 2, rows.float() + 1, quantized.output_scale + 1, values * 0.5, permuted.output + 1
        return *sums, activated, permuted

    x, topk_ids, _ = call_arguments(33, device)
    compiled = torch.compile(layer, fullgraph=True)
    for g, w in zip(tree_leaves(compiled(x, topk_ids)), tree_leaves(layer(x, topk_ids))):
        assert_same(g, w, "layer")


@each_backend
@pytest.mark.parametrize("made", ["inside", "outside"])
def test_poisoned_optional_buffers(made: str, backend: str) -> None:
    """Readers of an optional buffer whose write is not declared get what the graph knows of it: the poison."""

    def use(topk_ids: Tensor, data: mxfp4_ops.MoEMetadata) -> tuple[mxfp4_ops.MoEMetadata, Tensor, Tensor]:
        if made == "inside":
            data = mxfp4_ops.MoEMetadata(*(torch.full_like(t, POISON) for t in data))
        ops.get_cutlass_moe_mm_data.out(topk_ids, E, N, K, **data._asdict())
        return data, data.blockscale_offsets * 2, data.sorted_expert_ids + 1

    _, topk_ids, out = call_arguments(33)
    want = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
    got = torch.compile(use, backend=backend, fullgraph=True)(topk_ids, out[0])
    assert_trees_same(got, (want, want.blockscale_offsets * 2, want.sorted_expert_ids + 1), "results")
    if made == "outside":
        assert_trees_same(out[0], want, "buffers")


@each_backend
@pytest.mark.parametrize("sliced", ["inside", "outside"])
def test_mutated_views_of_one_buffer(sliced: str, backend: str) -> None:
    x, topk_ids, out = call_arguments(33)
    sizes = [t.numel() for t in out[0]]
    shapes = [t.shape for t in out[0]]

    def views(memory: Tensor) -> mxfp4_ops.MoEMetadata:
        return mxfp4_ops.MoEMetadata(*(t.view(shape) for t, shape in zip(memory.split(sizes), shapes)))

    def inside(topk_ids: Tensor, memory: Tensor) -> Tensor:
        mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, out=views(memory))
        return memory + 1

    def outside(topk_ids: Tensor, data: mxfp4_ops.MoEMetadata) -> Tensor:
        mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, out=data)
        return data.sorted_expert_ids + data.input_permutation

    form, argument = (inside, lambda t: t) if sliced == "inside" else (outside, views)
    got, want = (torch.full((sum(sizes),), POISON, dtype=torch.int32) for _ in range(2))
    returned = torch.compile(form, backend=backend, fullgraph=True)(topk_ids, argument(got))
    assert_same(returned, form(topk_ids, argument(want)), "returned")
    assert_same(got, want, "memory")


@each_backend
def test_out_keeps_the_padding_of_the_scales(backend: str) -> None:
    x, topk_ids, out = call_arguments(33)
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    where = (data.expert_offsets, data.blockscale_offsets, E)
    want = reference.experts_quant(rows, *where, output_scale=out[2].output_scale)

    def quant(rows: Tensor, buffers: mxfp4_ops.QuantizedRows) -> Tensor:
        return mxfp4_ops.mxfp4_experts_quant(rows, *where, out=buffers).output_scale + 1

    read = torch.compile(quant, backend=backend, fullgraph=True)(rows, out[2])
    assert_trees_same(out[2], want, "buffers")
    assert_same(read, want[1] + 1, "reader")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_views_in_torch_dtypes(dtype: torch.dtype, backend: str, device: str) -> None:
    def view(x: Tensor, topk_ids: Tensor) -> Tensor:
        quantized = functional(x, topk_ids)[2]
        if dtype == torch.float8_e8m0fnu:
            return layout.as_e8m0(quantized.output_scale)
        return layout.as_float4(quantized.output)

    x, topk_ids, _ = call_arguments(33, device)
    got = torch.compile(view, backend=backend, fullgraph=True)(x, topk_ids)
    assert got.dtype == dtype
    assert_same(got, view(x, topk_ids), "view")


def test_caches_take_the_ops() -> None:
    x, topk_ids, _ = call_arguments(33)
    with torch._inductor.config.patch(force_disable_caches=False), fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            got = torch.compile(functional, fullgraph=True)(x, topk_ids)
            assert_trees_same(got, functional(x, topk_ids), "cached")
    cache = counters["aot_autograd"]
    assert (cache["autograd_cache_miss"], cache["autograd_cache_hit"], cache["autograd_cache_bypass"]) == (1, 1, 0)


# Graphs ---------------------------------------------------------------------------------------------------------------


@each_form
def test_no_graph_breaks(form: Callable) -> None:
    explained = torch._dynamo.explain(form)(*call_arguments(33))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


def _shape(t: Tensor, batch: object) -> str:
    """The sizes of `t`, m for the batch and S for any other symbol."""
    sizes = []
    for size in t.shape:
        if isinstance(size, torch.SymInt):
            expr = size.node.expr
            size = expr.xreplace({s: sympy.Symbol("m" if s == batch else "S") for s in expr.free_symbols})
        sizes.append(str(size))
    return f"[{', '.join(sizes)}]"


def picture(graph: torch.fx.Graph, value: str) -> str:
    """Each node of ours, and the shapes of the fakes that node.meta[value] holds."""
    inputs = (node.meta[value] for node in graph.find_nodes(op="placeholder"))
    symbolic_inputs = (t for t in inputs if isinstance(t, Tensor) and isinstance(t.shape[0], torch.SymInt))
    batch = next(symbolic_inputs).shape[0].node.expr
    lines = []
    for node in graph.nodes:
        op, called = node.target, str(node.target)
        if called == "auto_functionalized_v2":
            op, called = node.args[0], f"{called}({node.args[0]})"
        if getattr(op, "namespace", None) == "mxfp4_ops":
            shapes = [_shape(t, batch) for t in tree_leaves(node.meta[value]) if isinstance(t, Tensor)]
            lines.append(f"{called}: {' '.join(shapes)}")
    return "\n".join(lines)


def captured(form: Callable, stage: str) -> str:
    pictures = []

    def dynamo(gm: torch.fx.GraphModule, _: list) -> Callable:
        pictures.append(picture(gm.graph, "example_value"))
        return gm.forward

    def aot(gm: torch.fx.GraphModule, _: list) -> Callable:
        pictures.append(picture(gm.graph, "val"))
        return gm.forward

    arguments = call_arguments(33)
    for t in batched(*arguments):
        torch._dynamo.mark_dynamic(t, 0)
    backend = dynamo if stage == "dynamo" else aot_autograd(fw_compiler=aot)
    torch.compile(form, backend=backend, fullgraph=True)(*arguments)
    return "\n".join(pictures)


def test_graph_of_the_functional_ops() -> None:
    assert captured(functional, "dynamo") == captured(functional, "aot")
    assert_expected_inline(captured(functional, "aot"), """\
mxfp4_ops.get_cutlass_moe_mm_data.default: [17] [17] [16, 3] [16, 3] [4*m] [4*m] [4*m]
mxfp4_ops.shuffle_rows.default: [4*m, 192]
mxfp4_ops.mxfp4_experts_quant.default: [4*m, 96] [128*(((4*m + 127*Min(16, 4*m))//128)), 8]
mxfp4_ops.silu_and_mul_mxfp4_experts_quant.default: [4*m, 48] [128*(((4*m + 127*Min(16, 4*m))//128)), 4]
mxfp4_ops.mxfp4_dequantize.default: [4*m, 192]
mxfp4_ops.moe_permute_mxfp4_quant.default: [17] [17] [16, 3] [16, 3] [4*m] [4*m] [4*m] [4*m, 96]\
 [128*(((4*m + 127*Min(16, 4*m))//128)), 8]""")


def test_graph_of_the_out_overloads() -> None:
    assert_expected_inline(captured(out_overload, "aot"), """\
auto_functionalized_v2(mxfp4_ops.get_cutlass_moe_mm_data.out): [17] [17] [16, 3] [16, 3] [4*m] [4*m] [4*m]
auto_functionalized_v2(mxfp4_ops.shuffle_rows.out): [4*m, 192]
auto_functionalized_v2(mxfp4_ops.mxfp4_experts_quant.out): [4*m, 96] [S, 8]
auto_functionalized_v2(mxfp4_ops.silu_and_mul_mxfp4_experts_quant.out): [4*m, 48] [S, 4]
auto_functionalized_v2(mxfp4_ops.mxfp4_dequantize.out): [4*m, 192]
auto_functionalized_v2(mxfp4_ops.moe_permute_mxfp4_quant.out): [17] [17] [16, 3] [16, 3] [4*m] [4*m] [4*m]\
 [4*m, 96] [S, 8]""")


# Dynamic shapes -------------------------------------------------------------------------------------------------------


def compilations(form: Callable, backend: str, batches: tuple[int, ...], mark: Callable, device: str) -> list[int]:
    """How often `form` has been compiled after a call with each batch size, every call checked against eager."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(form, backend=counter, fullgraph=True)
    counts = []
    for m in batches:
        arguments = call_arguments(m, device)
        for t in batched(*arguments):
            mark(t, m)
        assert_equals_eager(compiled, form, arguments, f"m = {m}")
        counts.append(counter.frame_count)
    return counts


def mark_dynamic(t: Tensor, m: int) -> None:
    # A batch of 0 or 1 is specialised; to ask for the opposite is an error.
    if m > 1:
        torch._dynamo.mark_dynamic(t, 0)


def mark_unbacked(t: Tensor, m: int) -> None:
    torch._dynamo.decorators.mark_unbacked(t, 0)


def mark_nothing(t: Tensor, m: int) -> None:
    pass


@each_form
@each_backend
@pytest.mark.parametrize("batches", [(2, 8, 33, 300), (300, 33, 8, 2)], ids=["growing", "shrinking"])
def test_one_compilation_serves_every_batch(
    form: Callable, backend: str, batches: tuple[int, ...], device: str
) -> None:
    assert compilations(form, backend, batches, mark_dynamic, device) == [1, 1, 1, 1]


@each_form
def test_batches_of_one_and_of_none_compile_once_each(form: Callable) -> None:
    """The batch sizes 1 and 0 are specialised by torch.compile: one compilation more for each, then none."""
    batches = (8, 1, 0, 33, 1, 0, 2)
    assert compilations(form, "aot_eager", batches, mark_dynamic, "cpu") == [1, 2, 3, 3, 3, 3, 3]


@each_form
@each_backend
def test_one_compilation_serves_an_unbacked_batch(form: Callable, backend: str) -> None:
    assert compilations(form, backend, (8, 1, 0, 300), mark_unbacked, "cpu") == [1, 1, 1, 1]


@each_form
def test_unmarked_batches_compile_twice(form: Callable) -> None:
    """Static first, dynamic once the batch size changes."""
    assert compilations(form, "aot_eager", (8, 2, 33, 300), mark_nothing, "cpu") == [1, 2, 2, 2]


@each_backend
def test_one_compilation_serves_every_width(backend: str) -> None:
    def quant(rows: Tensor, topk_ids: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor) -> tuple:
        where = (expert_offsets, blockscale_offsets)
        permuted = mxfp4_ops.moe_permute_mxfp4_quant(rows, topk_ids, 3, N)
        quantized = mxfp4_ops.mxfp4_experts_quant(rows, *where, 3)
        activated = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(rows, *where, 3)
        return permuted, quantized, activated, mxfp4_ops.mxfp4_dequantize(*quantized, *where, dtype=torch.float32)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(quant, backend=counter, fullgraph=True)
    where = (torch.tensor([0, 1, 1, 5], dtype=torch.int32), torch.tensor([0, 128, 128, 256], dtype=torch.int32))
    for R, width in ((7, 64), (5, 320), (150, 2880), (6, 128)):
        rows, topk_ids = torch.randn(R, width, dtype=BF16), torch.randint(-1, 3, (R, 2))
        for t, dim in ((rows, 0), (rows, 1), (topk_ids, 0)):
            torch._dynamo.mark_dynamic(t, dim)
        arguments = (rows, topk_ids, *where)
        assert_trees_same(compiled(*arguments), quant(*arguments), f"R = {R}, width = {width}")
    assert counter.frame_count == 1


@pytest.mark.parametrize("mark", [mark_nothing, mark_dynamic, mark_unbacked], ids=lambda mark: mark.__name__)
def test_buffer_sizes_are_computed_in_the_graph(mark: Callable) -> None:
    def allocate(x: Tensor) -> Tensor:
        return x.new_zeros(layout.scale_rows(x.shape[0], E), 4 * layout.scale_tiles(x.shape[1]))

    compiled = torch.compile(allocate, backend="aot_eager", fullgraph=True)
    for m in (8, 33):
        x = torch.zeros(m, K)
        mark(x, m)
        assert compiled(x).shape == allocate(x).shape


# Fakes ----------------------------------------------------------------------------------------------------------------


def symbolic(mode: FakeTensorMode, t: Tensor, name: str) -> Tensor:
    """A fake of `t` with a symbol for its first dimension, the same one for the same size."""
    dims = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (t.dim() - 1)
    return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dims), source=ConstantSource(name))


def test_fakes_add_no_guards() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x, topk_ids, _ = call_arguments(33)
    x, topk_ids = symbolic(mode, x, "x"), symbolic(mode, topk_ids, "topk_ids")
    with mode:
        results = functional(x, topk_ids)
        out_overload(x, topk_ids, results)
    batch_sized = batched(x, topk_ids, results)
    assert all(isinstance(t.shape[0], torch.SymInt) for t in batch_sized), [t.shape for t in batch_sized]
    assert [guard.expr for guard in env.guards] == []


@each_form
def test_fake_tensors_and_the_meta_device(form: Callable) -> None:
    """The same shapes, dtypes and strides as of real results."""
    arguments = call_arguments(33)
    want = tree_leaves(form(*arguments))
    with FakeTensorMode() as mode:
        fake = tree_leaves(form(*tree_map(mode.from_tensor, arguments)))
    meta = tree_leaves(form(*tree_map(lambda t: t.to("meta"), arguments)))
    for got in (fake, meta):
        for g, w in zip(got, want, strict=True):
            assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())


# Errors ---------------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD_CALLS = (
    lambda: mxfp4_ops.get_cutlass_moe_mm_data(zeros(3, 2, dtype=torch.int16), 4, 64, 32),
    lambda: mxfp4_ops.get_cutlass_moe_mm_data(zeros(3, 2), 0, 64, 32),
    lambda: ops.get_cutlass_moe_mm_data.out(
        zeros(3, 2), 4, 64, 32, expert_offsets=zeros(5), problem_sizes1=zeros(4, 3), problem_sizes2=zeros(4, 3),
        input_permutation=zeros(6), output_permutation=zeros(5),
    ),
    lambda: mxfp4_ops.moe_permute_mxfp4_quant(zeros(3, 32, dtype=BF16), zeros(2, 2), 4, 64),
    lambda: mxfp4_ops.moe_permute_mxfp4_quant(zeros(2, 32, dtype=BF16), zeros(2, 2), 4, 64, expert_map=zeros(2, 2)),
    lambda: mxfp4_ops.shuffle_rows(zeros(3), zeros(2)),
    lambda: mxfp4_ops.shuffle_rows(zeros(3, 2), zeros(2), out=zeros(2, 2, dtype=BF16)),
    lambda: mxfp4_ops.mxfp4_experts_quant(zeros(3, 32), zeros(5), zeros(5), 4),
    lambda: mxfp4_ops.mxfp4_experts_quant(zeros(3, 48, dtype=BF16), zeros(5), zeros(5), 4),
    lambda: mxfp4_ops.mxfp4_experts_quant(zeros(3, 32, dtype=BF16), zeros(4), zeros(5), 4),
    lambda: mxfp4_ops.mxfp4_experts_quant(zeros(3, 32, dtype=BF16), zeros(5), zeros(5), 4, zeros(2)),
    lambda: mxfp4_ops.silu_and_mul_mxfp4_experts_quant(zeros(3, 32, dtype=BF16), zeros(5), zeros(5), 4),
    lambda: mxfp4_ops.mxfp4_dequantize(
        zeros(3, 16, dtype=torch.uint8), zeros(128, 8, dtype=torch.uint8), zeros(2), zeros(2), dtype=BF16
    ),
    lambda: mxfp4_ops.mxfp4_dequantize(
        zeros(3, 16, dtype=torch.uint8), zeros(128, 4, dtype=torch.uint8), zeros(2), zeros(2), dtype=torch.float64
    ),
)


def test_errors_say_what_eager_says() -> None:
    messages = []
    for call in BAD_CALLS:
        with pytest.raises(RuntimeError) as eager:
            call()
        with pytest.raises(RuntimeError) as compiled:
            torch.compile(call, backend="eager", fullgraph=True)()
        assert str(eager.value) in str(compiled.value)
        messages.append(str(eager.value))
    assert_expected_inline("\n".join(messages), """\
get_cutlass_moe_mm_data: topk_ids must have dtype torch.int32 or torch.int64, got torch.int16
get_cutlass_moe_mm_data: num_experts must be at least 1, got 0
get_cutlass_moe_mm_data: output_permutation must have shape [m * topk] = [6], got shape [5]
moe_permute_mxfp4_quant: hidden_states must have shape [m, K] = [2, 32], got shape [3, 32]
moe_permute_mxfp4_quant: expert_map must be 1-dimensional [global experts], got shape [2, 2]
shuffle_rows: input must be 2-dimensional [rows, width], got shape [3]
shuffle_rows: output must have dtype torch.int32, got torch.bfloat16
mxfp4_experts_quant: input must have dtype torch.bfloat16 or torch.float16, got torch.int32
mxfp4_experts_quant: input must have a positive multiple of 32 columns (K), got 48
mxfp4_experts_quant: expert_offsets must have shape [n_experts + 1] = [5], got shape [4]
mxfp4_experts_quant: sorted_expert_ids must have shape [R] = [3], got shape [2]
silu_and_mul_mxfp4_experts_quant: input must have a positive multiple of 64 columns (2K), got 32
mxfp4_dequantize: scale must have shape [S, 4T] = [128, 4], got shape [128, 8]
mxfp4_dequantize: dtype must be torch.float32 or torch.bfloat16 or torch.float16, got torch.float64""")


# CUDA graphs of Inductor ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_reduce_overhead_skips_no_graph() -> None:
    compiled = torch.compile(functional, mode="reduce-overhead", fullgraph=True)
    # Recorded in the second call; then replayed with other routings, fewer experts and none at all.
    for ids_from in (0, 0, -1, E - 1, -1, 0):
        x, topk_ids, _ = call_arguments(33, "cuda", ids_from)
        torch.compiler.cudagraph_mark_step_begin()
        assert_trees_same(compiled(x, topk_ids), functional(x, topk_ids), f"ids from {ids_from}")
    topk_ids = torch.full_like(topk_ids, -1)
    torch.compiler.cudagraph_mark_step_begin()
    assert_trees_same(compiled(x, topk_ids), functional(x, topk_ids), "no expert")
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert torch._inductor.cudagraph_trees.get_container(0).tree_manager is not None


@pytest.mark.gpu
@pytest.mark.parametrize("m", [0, 1, 2])
def test_reduce_overhead_of_small_batches(m: int) -> None:
    compiled = torch.compile(functional, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        x, topk_ids, _ = call_arguments(m, "cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert_trees_same(compiled(x, topk_ids), functional(x, topk_ids), f"m = {m}")
