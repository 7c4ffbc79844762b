"""The faults that packages like this one were reported with, each as the smallest input that shows it."""

import ctypes
import mmap

import pytest
import reference
import torch
from samples import (
    BF16,
    CASES,
    GUARD,
    I32,
    INT32_MAX,
    METADATA_OP,
    OUTPUT_POISON,
    PERMUTE_OP,
    QUANT_OPS,
    ROUTING_OPS,
    SAMPLES,
    assert_same,
    buffer,
    capture,
    expected,
    oracle,
    overload,
    place,
    poisoned_allocator,
    results,
    run_python,
    sample,
)
from torch import Tensor

import mxfp4_ops
from mxfp4_ops import layout, meta

QUANT_OP, SILU_OP = QUANT_OPS
OPS = tuple(SAMPLES)


def run(op: str, device: str, *args: object, **kwargs: object) -> dict[str, Tensor]:
    """The functional overload, its tensors moved to the device first."""
    args = [a.to(device) if torch.is_tensor(a) else a for a in args]
    return results(op, overload(op, "default")(*args, **kwargs))


def metadata_buffers(R: int, E: int, device: str) -> dict[str, Tensor]:
    """Filled with 0x7fffffff."""
    shapes = zip(mxfp4_ops.MoEMetadata._fields, meta.metadata_shapes(R, 1, E))
    return {name: torch.full(shape, INT32_MAX, dtype=I32, device=device) for name, shape in shapes}


def one_expert(R: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    offsets = torch.tensor([[0, R], [0, (R + 127) // 128 * 128]], dtype=I32, device=device)
    return offsets[0], offsets[1]


# Routing --------------------------------------------------------------------------------------------------------------


def test_slots_of_invalid_ids_are_written(device: str) -> None:
    ids, out = torch.tensor([[0, -1], [-1, -1]], device=device), metadata_buffers(4, 2, device)
    overload(METADATA_OP, "out")(ids, 2, 32, 32, **out)
    assert out["input_permutation"].tolist() == [0, -1, -1, -1]
    assert out["output_permutation"].tolist() == [0, -1, -1, -1]
    x = torch.ones(2, 8, device=device)
    for rows in (out["input_permutation"], out["output_permutation"]):
        assert mxfp4_ops.shuffle_rows(x, rows).sum(dim=1).tolist() == [8, 0, 0, 0]


def test_id_beyond_the_experts_is_no_index(device: str) -> None:
    data = mxfp4_ops.get_cutlass_moe_mm_data(torch.tensor([[5, 1]], device=device), 4, 32, 32)
    assert data.expert_offsets.tolist() == [0, 0, 1, 1, 1]
    assert data.output_permutation.tolist() == [-1, 0]
    assert data.sorted_expert_ids.tolist() == [1, -1]


def test_tail_of_sorted_expert_ids_is_not_stale(device: str) -> None:
    ids, out = torch.tensor([[0, -1], [1, -1]], device=device), metadata_buffers(4, 2, device)
    out["sorted_expert_ids"].fill_(4500)
    overload(METADATA_OP, "out")(ids, 2, 32, 32, **out)
    assert out["sorted_expert_ids"].tolist() == [0, 1, -1, -1]


def test_order_does_not_differ_from_run_to_run(device: str) -> None:
    ids = torch.randint(0, 128, (4097, 16), dtype=I32)
    want, on_device = reference.metadata(ids, 128, 32, 32), ids.to(device)
    for i in range(100):
        for name, got in run(METADATA_OP, device, on_device, 128, 32, 32).items():
            assert torch.equal(got.cpu(), want[name]), f"run {i}, {name}"


def route(topk_ids: Tensor, x: Tensor, E: int) -> dict[str, Tensor]:
    """Every op, one after the other."""
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, 32, x.shape[1])
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    offsets = data.expert_offsets, data.blockscale_offsets
    all_results = {**data._asdict(), "rows": rows}
    for op in QUANT_OPS:
        for ids in (None, data.sorted_expert_ids):
            quantized = getattr(mxfp4_ops, op)(rows, *offsets, E, ids)
            all_results |= {f"{op} {name} {ids is None}": t for name, t in quantized._asdict().items()}
    permuted = mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, 32)
    all_results |= {f"{PERMUTE_OP} {name}": t for name, t in permuted._asdict().items()}
    all_results["values"] = mxfp4_ops.mxfp4_dequantize(*quantized, *offsets, dtype=torch.float32)
    return all_results


def ids_of_active(active: int) -> Tensor:
    """[64, 4] ids of so many of 32 experts; where they are few, 24 tokens have none."""
    ids = torch.randperm(32)[:active][torch.randint(0, active, (64, 4))]
    if active < 10:
        ids[40:] = -1
    return ids


@pytest.mark.gpu
def test_graph_captured_with_many_experts_replayed_with_few() -> None:
    x, ids = torch.randn(64, 192).bfloat16().cuda(), ids_of_active(11).cuda()
    graph, held = capture(lambda: route(ids, x, 32))
    for active in (11, 9, 1, 11):
        ids.copy_(ids_of_active(active))
        graph.replay()
        for name, want in route(ids, x, 32).items():
            assert_same(held[name], want, f"{active} active experts, {name}", any_nan=name == "values")


@pytest.mark.parametrize("op", ROUTING_OPS)
def test_buffers_filled_for_many_experts_are_reused_for_few(op: str, device: str) -> None:
    x, out = torch.randn(64, 192).bfloat16(), metadata_buffers(256, 32, device)
    if op == PERMUTE_OP:
        shapes = zip(("output", "output_scale"), meta.experts_quant_shapes(256, 192, 32))
        out |= {name: torch.full(shape, OUTPUT_POISON, dtype=torch.uint8, device=device) for name, shape in shapes}
    for active in (11, 9, 1, 11):
        ids = ids_of_active(active)
        args = (x, ids, 32, 32) if op == PERMUTE_OP else (ids, 32, 32, 32)
        scale_before = out["output_scale"].cpu() if op == PERMUTE_OP else None
        overload(op, "out")(*(a.to(device) if torch.is_tensor(a) else a for a in args), **out)
        for name, want in oracle(op, args, {}, scale_before).items():
            assert_same(out[name], want, f"{active} active experts, {name}")


def test_buffers_are_sized_for_local_experts(device: str) -> None:
    ids = torch.randint(0, 256, (8192, 8), dtype=I32)
    expert_map = torch.full((256,), -1, dtype=I32)
    expert_map[100:132] = torch.arange(32, dtype=I32)
    got = run(METADATA_OP, device, ids, 32, 64, 32, expert_map=expert_map.to(device))
    for name, want in reference.metadata(ids, 32, 64, 32, expert_map=expert_map).items():
        assert_same(got[name], want, name)
    assert got["expert_offsets"].shape == (33,) and got["problem_sizes1"].shape == (32, 3)
    x = torch.zeros(65536, 32, dtype=BF16)
    quantized = run(QUANT_OP, device, x, got["expert_offsets"], got["blockscale_offsets"], 32)
    assert quantized["output_scale"].shape == ((65536 + 127 * 32) // 128 * 128, 4)


def test_every_row_is_routed(device: str) -> None:
    ids = torch.randint(0, 128, (17, 1))
    got = run(METADATA_OP, device, ids, 128, 32, 32)
    assert got["expert_offsets"][-1].item() == 17
    assert sorted(got["output_permutation"].tolist()) == list(range(17))
    assert got["sorted_expert_ids"].tolist() == sorted(ids.flatten().tolist())


EMPTY = dict(zip(OPS, ("m0", "m0", "empty_map", "R0", "R0", "R0"), strict=True))


def test_nothing_routed(device: str) -> None:
    ids, x = torch.zeros(0, 2, dtype=I32, device=device), torch.zeros(0, 64, dtype=BF16, device=device)
    empty = route(ids, x, 4)
    assert all(t.numel() == 0 for name, t in empty.items() if "offsets" not in name and "sizes" not in name)
    assert empty["expert_offsets"].tolist() == empty["blockscale_offsets"].tolist() == [0] * 5
    assert empty["problem_sizes1"].tolist() == [[0, 64, 64]] * 4
    for op in OPS:
        made = sample(op, EMPTY[op], device)
        out = {result: torch.zeros_like(t, device=device) for result, t in expected(op, EMPTY[op]).items()}
        overload(op, "out")(*made.args, **made.kwargs, **out)
    if device == "cuda":
        torch.cuda.synchronize()
    x = torch.ones(1, 3, device=device)
    assert torch.equal(mxfp4_ops.shuffle_rows(x, torch.tensor([0], device=device)), x)


@pytest.mark.gpu
def test_nothing_routed_in_a_graph() -> None:
    ids, x = torch.zeros(0, 2, dtype=I32, device="cuda"), torch.zeros(0, 64, dtype=BF16, device="cuda")
    graph, held = capture(lambda: route(ids, x, 4))
    graph.replay()
    torch.cuda.synchronize()
    assert held["expert_offsets"].tolist() == [0] * 5


@pytest.mark.parametrize("width", [*range(1, 35), 47, 63, 65])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, BF16, I32, torch.float64], ids=str)
def test_shuffle_rows_of_every_width(dtype: torch.dtype, width: int, device: str) -> None:
    x = torch.randint(0, 256, (3, width * dtype.itemsize)).to(torch.uint8).view(dtype)
    rows = torch.tensor([2, 0, 1, 1, -1])
    for form in ("plain", "slice"):
        got = mxfp4_ops.shuffle_rows(place(x, form, device), rows.to(device))
        assert_same(got, reference.shuffle_rows(x, rows), f"{dtype} {width} {form}")


# Quantisation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", (*QUANT_OPS, "mxfp4_dequantize"))
@pytest.mark.parametrize("E", [17, 20, 36, 60])
def test_nothing_is_read_behind_the_offsets(op: str, E: int, device: str) -> None:
    made = sample(op, "R8_K7168_E256", "cpu")
    counts = torch.tensor([0, *torch.bincount(torch.randint(0, E, (8,)), minlength=E).tolist()])
    pair = []
    for offsets in (counts.cumsum(0), ((counts + 127) // 128 * 128).cumsum(0)):
        behind = torch.cat((offsets, torch.tensor([0, 10**6]))).to(I32)
        pair.append(behind.to(device)[: E + 1])
    if op == "mxfp4_dequantize":
        tensors, more = made.args[:2], ()
    else:
        tensors, more = made.args[:1], (E,)
    got = run(op, device, *tensors, *pair, *more, **made.kwargs)
    want = oracle(op, (*tensors, *(t.cpu() for t in pair), *more), made.kwargs)
    for result in want:
        assert_same(got[result], want[result], f"{op} {E} {result}", any_nan=op == "mxfp4_dequantize")


def fenced(t: Tensor, at_end: bool) -> Tensor:
    """A copy whose memory has a page that faults when touched right behind it, or right before it."""
    extent = 0 if t.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    if extent == 0:
        return t
    libc, page, used = ctypes.CDLL(None), mmap.PAGESIZE, extent * t.element_size()
    size = (used + page - 1) // page * page
    memory = mmap.mmap(-1, size + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (begin, begin + page + size):
        assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
    offset = page + (size - used if at_end else 0)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=used, offset=offset)
    copy.copy_(t.as_strided((extent,), (1,)).view(torch.uint8))
    return copy.view(t.dtype).as_strided(t.shape, t.stride())


def run_fenced() -> None:
    torch.set_num_threads(1)
    for op, name in CASES:
        made, want = sample(op, name, "cpu"), expected(op, name)
        for at_end in (True, False):
            args = [fenced(a, at_end) if torch.is_tensor(a) else a for a in made.args]
            kwargs = {k: fenced(a, at_end) if torch.is_tensor(a) else a for k, a in made.kwargs.items()}
            out = {result: fenced(torch.zeros_like(t), at_end) for result, t in want.items()}
            print(op, name, at_end, flush=True)
            overload(op, "default")(*args, **kwargs)
            overload(op, "out")(*args, **kwargs, **out)
            for result in want:
                assert_same(out[result], want[result], f"{op} {name} {result}", any_nan=op == "mxfp4_dequantize")


def test_no_byte_beside_a_tensor_is_touched_on_the_cpu() -> None:
    done = run_python("import test_pitfalls; test_pitfalls.run_fenced()")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"died with {done.returncode} in {lines[-1:]}\n{done.stderr}"
    assert len(lines) == 2 * len(CASES)


@pytest.mark.parametrize("op", QUANT_OPS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_row_of_no_expert_does_not_write_a_scale(op: str, with_ids: bool, device: str) -> None:
    x = torch.ones(3, 64 if op == SILU_OP else 32, dtype=BF16)
    x[2] = 1e30
    offsets, scale_offsets = torch.tensor([0, 1, 2], dtype=I32), torch.tensor([0, 128, 256], dtype=I32)
    ids = torch.tensor([0, 1, -1], dtype=I32, device=device) if with_ids else None
    got = run(op, device, x, offsets, scale_offsets, 2, ids)
    _, scale = reference.quantize_blocks(reference.silu_and_mul(x) if op == SILU_OP else x)
    flat = got["output_scale"].flatten().tolist()
    assert (flat.pop(512), flat.pop(0)) == (scale[1].item(), scale[0].item())
    assert not any(flat) and not got["output"][2].any()


@pytest.mark.parametrize("op", QUANT_OPS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_rows_of_no_expert_do_not_change_the_others(op: str, with_ids: bool, device: str) -> None:
    x = torch.randn(40, 192).bfloat16()
    offsets, scale_offsets = torch.tensor([0, 3, 8], dtype=I32), torch.tensor([0, 128, 256], dtype=I32)
    ids = torch.tensor([0] * 3 + [1] * 5 + [-1] * 32, dtype=I32, device=device) if with_ids else None
    want = run(op, device, x, offsets, scale_offsets, 2, ids)
    x[8:] = torch.nan
    got = run(op, device, x, offsets, scale_offsets, 2, ids)
    for result in want:
        assert_same(got[result], want[result], result)


def test_token_of_no_expert_changes_nothing(device: str) -> None:
    """Nor does its NaN, nor what lies between the tokens."""
    x, ids = torch.randn(9, 192).bfloat16(), torch.randint(0, 4, (9, 3))
    ids[[0, 4, 8]] = torch.tensor([-1, 4, 99])
    want = run(PERMUTE_OP, device, x, ids, 4, 32)
    x[[0, 4, 8]] = torch.nan
    got = results(PERMUTE_OP, overload(PERMUTE_OP, "default")(place(x, "odd_rows", device), ids.to(device), 4, 32))
    for result in want:
        assert_same(got[result], want[result].cpu(), result)
    assert not got["output"][18:].any()


@pytest.mark.parametrize("op", QUANT_OPS)
def test_padding_is_not_stale_nan(op: str, device: str) -> None:
    x = torch.ones(1, 64 if op == SILU_OP else 32, dtype=BF16, device=device)
    with poisoned_allocator(device, [16, 512]):
        scale = results(op, overload(op, "default")(x, *one_expert(1, device), 1))["output_scale"]
    assert scale.shape == (128, 4) and scale[0, 0] != 0
    assert not scale.flatten()[1:].any()


@pytest.mark.parametrize("op", QUANT_OPS)
def test_padding_is_zeroed_at_the_tiled_address(op: str, device: str) -> None:
    x = torch.ones(33, 320 if op == SILU_OP else 160, dtype=BF16, device=device)
    want = reference.swizzle(torch.ones(33, 5, dtype=torch.uint8), *one_expert(33), 33, 1, 160).bool()
    with poisoned_allocator(device, [33 * 80, 128 * 8]):
        got = results(op, overload(op, "default")(x, *one_expert(33, device), 1))
    assert torch.equal(got["output_scale"].cpu() != 0, want)
    out = {"output": got["output"], "output_scale": torch.full_like(got["output_scale"], OUTPUT_POISON)}
    overload(op, "out")(x, *one_expert(33, device), 1, **out)
    assert torch.equal(out["output_scale"].cpu() != OUTPUT_POISON, want)


@pytest.mark.parametrize("K, columns", [(32, 4), (96, 4), (128, 4), (160, 8), (2880, 92), (7168, 224)])
def test_width_of_the_scales_is_computed_in_one_way(K: int, columns: int, device: str) -> None:
    x, offsets = torch.ones(3, K, dtype=BF16, device=device), one_expert(3, device)
    assert 4 * meta.scale_tiles(K) == 4 * layout.scale_tiles(K) == columns
    assert meta.experts_quant_shapes(3, K, 1) == ((3, K // 2), (128, columns))
    got = results(QUANT_OP, overload(QUANT_OP, "default")(x, *offsets, 1))
    assert got["output_scale"].shape == (128, columns)
    assert torch.equal(mxfp4_ops.mxfp4_dequantize(*got.values(), *offsets, dtype=BF16), x)
    for wrong in (K // 32, K // 32 + 1, columns + 4):
        if wrong == columns:
            continue
        scale = torch.zeros(128, wrong, dtype=torch.uint8, device=device)
        with pytest.raises(RuntimeError, match="output_scale must have shape"):
            overload(QUANT_OP, "out")(x, *offsets, 1, output=got["output"], output_scale=scale)
        with pytest.raises(RuntimeError, match="scale must have shape"):
            mxfp4_ops.mxfp4_dequantize(got["output"], scale, *offsets, dtype=BF16)


@pytest.mark.parametrize(
    "amax, scale, code",
    [
        (1.0, 125, 6),
        (1.5, 125, 7),
        (1.75, 126, 6),
        (6.0, 127, 7),
        (6.5, 127, 7),
        (7.0, 128, 6),
        (2.0**-127, 0, 0),
        (torch.finfo(BF16).max, 253, 6),
    ],
)
def test_scales_are_rounded_by_one_rule(amax: float, scale: int, code: int, device: str) -> None:
    x = torch.zeros(1, 32, dtype=BF16)
    x[0, 3], x[0, 4] = amax, -amax
    got = run(QUANT_OP, device, x, *one_expert(1), 1)
    assert got["output_scale"][0, 0].item() == scale
    assert got["output"][0, 1].item() >> 4 == code and got["output"][0, 2].item() == code | 8


@pytest.mark.parametrize("op", QUANT_OPS)
def test_rows_of_a_wider_buffer(op: str, device: str) -> None:
    x = torch.randn(4, 128).bfloat16().to(device)[:, :64]
    assert not x.is_contiguous()
    got = run(op, device, x, *one_expert(4), 1)
    want = oracle(op, (x.cpu().contiguous(), *one_expert(4), 1), {})
    for result in want:
        assert_same(got[result], want[result], result)


def test_scale_rows_come_from_the_shapes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "163840")
    ids = torch.randint(0, 256, (8192, 8), dtype=I32, device=device)
    data = mxfp4_ops.get_cutlass_moe_mm_data(ids, 256, 32, 32)
    x = torch.zeros(65536, 32, dtype=BF16, device=device)
    _, scale = mxfp4_ops.mxfp4_experts_quant(x, data.expert_offsets, data.blockscale_offsets, 256)
    assert scale.shape == (98048, 4)


def test_build_without_cuda_says_what_is_missing() -> None:
    """As on a torch with CUDA: it imports, and what would run on a GPU names the reason."""
    if mxfp4_ops._library.cuda.loaded:
        pytest.skip("this build has CUDA kernels")
    code = """
import torch
torch.version.cuda = torch.version.cuda or "13.0"
import mxfp4_ops
op = torch.ops.mxfp4_ops.shuffle_rows.default
try:
    op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), torch.ones(1, 1), torch.tensor([0]))
except RuntimeError as error:
    print(error)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mxfp4_ops: no CUDA kernels: "), done.stdout


# Schemas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_write_is_declared(op: str) -> None:
    functional, out = (overload(op, kind)._schema for kind in ("default", "out"))
    assert all(a.alias_info is None for a in (*functional.arguments, *functional.returns))
    sets = [next(iter(a.alias_info.before_set)) for a in out.arguments if a.alias_info and a.alias_info.is_write]
    written = [a.name for a in out.arguments if a.alias_info and a.alias_info.is_write]
    assert len(set(sets)) == len(sets), "two buffers in one alias set"
    assert written == list(expected(op, next(iter(SAMPLES[op]))))
    assert written == [a.name for a in out.arguments if a.name not in {a.name for a in functional.arguments}]
    assert not out.returns


@pytest.mark.parametrize("op", OPS)
def test_no_overload_promises_to_write_every_byte(op: str) -> None:
    for kind in ("default", "out"):
        assert "out" not in {tag.name for tag in overload(op, kind).tags}  # torch 2.11 has no torch.Tag.out


def test_scales_are_uint8(device: str) -> None:
    x, offsets = torch.ones(3, 32, dtype=BF16, device=device), one_expert(3, device)
    output, scale = mxfp4_ops.mxfp4_experts_quant(x, *offsets, 1)
    assert scale.dtype == output.dtype == torch.uint8
    e8m0 = layout.as_e8m0(scale)
    with pytest.raises(RuntimeError, match="output_scale must have dtype torch.uint8, got torch.float8_e8m0fnu"):
        overload(QUANT_OP, "out")(x, *offsets, 1, output=output, output_scale=e8m0)
    with pytest.raises(RuntimeError, match="scale must have dtype torch.uint8, got torch.float8_e8m0fnu"):
        mxfp4_ops.mxfp4_dequantize(output, e8m0, *offsets, dtype=BF16)


def test_buffers_may_be_views_of_one(device: str) -> None:
    ids = torch.randint(-1, 17, (33, 3))
    want = reference.metadata(ids, 17, 32, 64)
    whole = buffer((sum(t.numel() + GUARD for t in want.values()),), I32, "plain", device)
    begin, out = 0, {}
    for name, t in want.items():
        out[name] = whole.view[begin : begin + t.numel()].view(t.shape)
        begin += t.numel() + GUARD
    overload(METADATA_OP, "out")(ids.to(device), 17, 32, 64, **out)
    expected_whole = torch.full_like(whole.view, 0x7F7F7F7F, device="cpu")
    begin = 0
    for t in want.values():
        expected_whole[begin : begin + t.numel()] = t.flatten()
        begin += t.numel() + GUARD
    assert_same(whole.view, expected_whole, "the buffer that holds all results")


# More than 2^31 elements ----------------------------------------------------------------------------------------------

GB = 10**9
LONG = 65537  # rows of 32768 elements: the last one starts at 2^31


def needs_memory(device: str, needed: float) -> None:
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    if free < needed:
        pytest.skip(f"needs {needed / GB:.0f} GB of memory, {free / GB:.0f} GB are free")


def long_input(columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Zeros (which cost no memory on the CPU) and three rows of values."""
    x = torch.zeros(LONG, columns, dtype=dtype, device=device)
    for row in (0, LONG // 2, LONG - 1):
        if dtype == torch.uint8:
            x[row] = torch.randint(0, 256, (columns,)).to(device, dtype)
        else:
            x[row] = torch.randn(columns).to(device, dtype)
    return x


@pytest.mark.slow
def test_shuffle_rows_to_2_31_elements(device: str) -> None:
    needs_memory(device, 6 * GB)
    x = torch.randn(1, 32768).to(device, BF16)
    got = mxfp4_ops.shuffle_rows(x, torch.zeros(LONG, dtype=I32, device=device))
    assert got.shape == (LONG, 32768)
    for row in (0, 1, 32767, 32768, LONG - 2, LONG - 1):
        assert torch.equal(got[row], x[0]), row


@pytest.mark.slow
def test_shuffle_rows_from_2_31_elements(device: str) -> None:
    needs_memory(device, 6 * GB)
    x = long_input(32768, BF16, device)
    rows = torch.tensor([LONG - 1, LONG // 2, LONG, 0], device=device)
    got = mxfp4_ops.shuffle_rows(x, rows)
    for i, row in enumerate((LONG - 1, LONG // 2, None, 0)):
        assert torch.equal(got[i], x[row] if row is not None else torch.zeros_like(x[0])), row


@pytest.mark.slow
@pytest.mark.parametrize("op", QUANT_OPS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_quant_of_2_31_elements(op: str, with_ids: bool, device: str) -> None:
    needs_memory(device, 8 * GB)
    x, offsets = long_input(32768, BF16, device), one_expert(LONG, device)
    ids = torch.zeros(LONG, dtype=I32, device=device) if with_ids else None
    output, scale = getattr(mxfp4_ops, op)(x, *offsets, 1, ids)
    blocks = output.shape[1] // 16
    for row in (0, 1, LONG // 2, LONG - 2, LONG - 1):
        values = x[row : row + 1].cpu()
        codes, scales = reference.quantize_blocks(reference.silu_and_mul(values) if op == SILU_OP else values)
        assert_same(output[row : row + 1], codes, f"{op} codes of row {row}")
        places = reference.scale_byte(0, row, torch.arange(blocks), scale.shape[1] // 4)
        assert_same(scale.flatten()[places.to(device)], scales[0], f"{op} scales of row {row}")


@pytest.mark.slow
@pytest.mark.parametrize("m, topk", [(LONG, 1), (1, LONG)])
def test_permute_of_2_31_elements(m: int, topk: int, device: str) -> None:
    needs_memory(device, 8 * GB)
    x = long_input(32768, BF16, device) if m == LONG else torch.randn(1, 32768).to(device, BF16)
    rows = mxfp4_ops.moe_permute_mxfp4_quant(x, torch.zeros(m, topk, dtype=I32, device=device), 1, 32)
    blocks = rows.output.shape[1] // 16
    for row in (0, 1, LONG // 2, LONG - 2, LONG - 1):
        codes, scales = reference.quantize_blocks(x[row // topk : row // topk + 1].cpu())
        assert_same(rows.output[row : row + 1], codes, f"codes of row {row}")
        places = reference.scale_byte(0, row, torch.arange(blocks), rows.output_scale.shape[1] // 4)
        assert_same(rows.output_scale.flatten()[places.to(device)], scales[0], f"scales of row {row}")


@pytest.mark.slow
def test_dequantize_to_2_31_elements(device: str) -> None:
    needs_memory(device, 8 * GB)
    packed, offsets = long_input(16384, torch.uint8, device), one_expert(LONG, device)
    scale = torch.full((reference.scale_rows(LONG, 1), 1024), 127, dtype=torch.uint8, device=device)
    got = mxfp4_ops.mxfp4_dequantize(packed, scale, *offsets, dtype=BF16)
    for row in (0, 1, LONG // 2, LONG - 2, LONG - 1):
        want = reference.dequantize(packed[row : row + 1].cpu(), scale[:128].cpu(), *one_expert(1), BF16)
        assert_same(got[row : row + 1], want, f"row {row}")
