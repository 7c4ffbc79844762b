"""Every op, overload and device against the oracle on every sample: bytes, strides, and the memory around buffers."""

from collections.abc import Iterator

import pytest
import reference
import torch
from expecttest import assert_expected_inline
from samples import (
    CASES,
    GLIBC,
    I32,
    INT32_MAX,
    METADATA_OP,
    OPTIONAL,
    OUT_LAYOUTS,
    OUTPUT_POISON,
    PERMUTE,
    PERMUTE_OP,
    QUANT,
    QUANT_OPS,
    ROUTING_OPS,
    SAMPLES,
    Buffer,
    assert_same,
    buffer,
    buffers,
    expected,
    overload,
    place,
    poisoned_allocator,
    results,
    sample,
)
from torch import Tensor

import mxfp4_ops

pytestmark = pytest.mark.usefixtures("one_thread")


def any_nan(op: str) -> bool:
    # Which NaN a product has is the processor's choice.
    return op == "mxfp4_dequantize"


# Functional -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not GLIBC, reason="malloc is poisoned through glibc")
def test_poisoned_allocator(device: str) -> None:
    sizes = [40_000, 3_000_000]  # glibc 2.39 hands small blocks out again as they are
    with poisoned_allocator(device, sizes):
        tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for tensor in tensors:
        assert (tensor == OUTPUT_POISON).all(), tensor.numel()


@pytest.mark.parametrize("op, name", CASES)
def test_functional(op: str, name: str, device: str) -> None:
    """Right in every byte, though the memory of the results was not zero."""
    made, want = sample(op, name, device), expected(op, name)
    with poisoned_allocator(device, [t.nbytes for t in want.values()]):
        got = results(op, overload(op, "default")(*made.args, **made.kwargs))
    for result in want:
        assert_same(got[result], want[result], f"{op} {name} {result}", any_nan(op))
        assert got[result].device.type == device, f"{op} {name} {result}"
        assert got[result].stride() == want[result].stride(), f"{op} {name} {result}: {got[result].stride()}"


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", CASES)
def test_devices_agree(op: str, name: str) -> None:
    cpu, cuda = (sample(op, name, device) for device in ("cpu", "cuda"))
    want = results(op, overload(op, "default")(*cpu.args, **cpu.kwargs))
    got = results(op, overload(op, "default")(*cuda.args, **cuda.kwargs))
    for result in want:
        assert_same(got[result], want[result], f"{op} {name} {result}", any_nan(op))


@pytest.mark.parametrize("op", SAMPLES)
def test_same_bytes_every_time(op: str, device: str) -> None:
    name = max(SAMPLES[op], key=lambda name: sum(t.nbytes for t in expected(op, name).values()))
    made = sample(op, name, device)
    first, *others = (results(op, overload(op, "default")(*made.args, **made.kwargs)) for _ in range(10))
    for run, other in enumerate(others):
        for result in first:
            assert_same(other[result], first[result], f"{op} {name} {result}, run {run}", any_nan(op))


@pytest.mark.parametrize("op", SAMPLES)
def test_threads_change_nothing(op: str) -> None:
    torch.set_num_threads(2)
    try:
        for name in SAMPLES[op]:
            made, want = sample(op, name, "cpu"), expected(op, name)
            for result, got in results(op, overload(op, "default")(*made.args, **made.kwargs)).items():
                assert_same(got, want[result], f"{op} {name} {result}", any_nan(op))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("op", QUANT_OPS)
@pytest.mark.parametrize("name", [name for name, spec in QUANT.items() if spec.ids is None])
def test_sorted_ids_give_the_same_bytes(op: str, name: str, device: str) -> None:
    made, want = sample(op, name, device), expected(op, name)
    x, offsets, _, E = made.args
    ids = reference.row_experts(x.shape[0], offsets.cpu(), E).to(I32)
    got = results(op, overload(op, "default")(*made.args, place(ids, "slice", device)))
    for result in want:
        assert_same(got[result], want[result], f"{op} {name} {result}")


@pytest.mark.parametrize("name", PERMUTE)
def test_permute_is_three_ops_in_one(name: str, device: str) -> None:
    made = sample(PERMUTE_OP, name, device)
    x, ids, E, n = made.args
    data = mxfp4_ops.get_cutlass_moe_mm_data(ids, E, n, x.shape[1], **made.kwargs)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, *data[:2], E, data.sorted_expert_ids)
    got = mxfp4_ops.moe_permute_mxfp4_quant(*made.args, **made.kwargs)._asdict()
    for result, want in {**data._asdict(), **quantized._asdict()}.items():
        assert_same(got[result], want.cpu(), f"{name} {result}")


# .out -----------------------------------------------------------------------------------------------------------------


def call_out(op: str, name: str, device: str, out: dict[str, Buffer]) -> None:
    made, want = sample(op, name, device), expected(op, name, out=True)
    views = {result: b.view for result, b in out.items()}
    # Not the poison of the buffers, which a copy of a buffer has to bring along.
    with poisoned_allocator(device, [view.nbytes for view in views.values()], poison=0x3C):
        assert overload(op, "out")(*made.args, **made.kwargs, **views) is None
    for result, written in out.items():
        written.check(want[result], f"{op} {name} {result}", any_nan(op))


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize("op, name", CASES)
def test_out(op: str, name: str, layout: str, device: str) -> None:
    """Writes what means something, leaves scale padding as it was, and nothing around the buffer is touched."""
    call_out(op, name, device, buffers(op, name, device, layout))


@pytest.mark.parametrize("absent", [OPTIONAL, *((name,) for name in OPTIONAL)], ids=" and ".join)
@pytest.mark.parametrize("op, name", [(op, name) for op in ROUTING_OPS for name in SAMPLES[op]])
def test_out_without_optional_buffers(op: str, name: str, absent: tuple[str, ...], device: str) -> None:
    out = buffers(op, name, device, "slice")
    call_out(op, name, device, {result: b for result, b in out.items() if result not in absent})


@pytest.mark.parametrize("op, name", [(METADATA_OP, "m33_topk8_E60"), (PERMUTE_OP, "m33_topk8_E60_K96_fp16")])
def test_out_layouts_may_differ(op: str, name: str, device: str) -> None:
    out = {
        result: buffer(want.shape, want.dtype, OUT_LAYOUTS[i % 3], device)
        for i, (result, want) in enumerate(expected(op, name).items())
    }
    call_out(op, name, device, out)


TWICE = dict.fromkeys(QUANT_OPS, "R264_K160_E256_ids_tail") | {PERMUTE_OP: "m33_topk8_E60_K96_fp16"}


@pytest.mark.parametrize("op", TWICE)
def test_out_written_twice_is_right(op: str, device: str) -> None:
    """A buffer that was zeroed once serves call after call of the same routing."""
    want = expected(op, TWICE[op])
    made = sample(op, TWICE[op], device)
    out = {result: torch.zeros_like(t, device=device) for result, t in want.items()}
    for _ in range(2):
        overload(op, "out")(*made.args, **made.kwargs, **out)
        for result in want:
            assert_same(out[result], want[result], f"{op} {result}")


# Python functions -----------------------------------------------------------------------------------------------------

PYTHON_RESULTS = {
    METADATA_OP: mxfp4_ops.MoEMetadata,
    PERMUTE_OP: mxfp4_ops.PermutedQuantizedRows,
    **dict.fromkeys(QUANT_OPS, mxfp4_ops.QuantizedRows),
}
PYTHON_SAMPLES = [
    *((op, name) for op in ROUTING_OPS for name in ("map", "not_gated")),
    ("shuffle_rows", "bf16_7"),
    *((op, name) for op in QUANT_OPS for name in ("R33_K96_E17", "holes")),
    ("mxfp4_dequantize", "R33_K96_E17_bf16"),
]


@pytest.mark.parametrize("op, name", PYTHON_SAMPLES)
def test_python_function(op: str, name: str, device: str) -> None:
    made, want = sample(op, name, device), expected(op, name)
    returned = getattr(mxfp4_ops, op)(*made.args, **made.kwargs)
    assert type(returned) is PYTHON_RESULTS.get(op, Tensor)
    if op in PYTHON_RESULTS:
        assert returned._fields == tuple(want)
    for result, tensor in results(op, returned).items():
        assert_same(tensor, want[result], f"{op} {name} {result}", any_nan(op))


@pytest.mark.parametrize("op, name", PYTHON_SAMPLES)
def test_python_function_with_out(op: str, name: str, device: str) -> None:
    made, want = sample(op, name, device), expected(op, name, out=True)
    out = buffers(op, name, device, "slice")
    views = tuple(b.view for b in out.values())
    returned = getattr(mxfp4_ops, op)(*made.args, **made.kwargs, out=views if op in PYTHON_RESULTS else views[0])
    assert type(returned) is PYTHON_RESULTS.get(op, Tensor)
    for (result, tensor), view in zip(results(op, returned).items(), views):
        assert tensor is view, result
        out[result].check(want[result], f"{op} {name} {result}", any_nan(op))


@pytest.mark.parametrize("op", ROUTING_OPS)
def test_python_function_without_optional_buffers(op: str, device: str) -> None:
    made, out = sample(op, "map", device), buffers(op, "map", device)
    views = tuple(None if result in OPTIONAL else b.view for result, b in out.items())
    returned = getattr(mxfp4_ops, op)(*made.args, **made.kwargs, out=views)
    for (result, written), tensor in zip(out.items(), returned, strict=True):
        if result in OPTIONAL:
            assert tensor is None
        else:
            written.check(expected(op, "map", out=True)[result], result)


def test_keyword_arguments(device: str) -> None:
    for op, name in PYTHON_SAMPLES:
        made = sample(op, name, device)
        arguments = [a.name for a in overload(op, "default")._schema.arguments]
        by_name = dict(zip(arguments, made.args)) | made.kwargs
        for function in (overload(op, "default"), getattr(mxfp4_ops, op)):
            for result, tensor in results(op, function(**by_name)).items():
                assert_same(tensor, expected(op, name)[result], f"{op} {name} {result}", any_nan(op))


@pytest.mark.parametrize("layout", ["plain", "strided"])
def test_shuffle_rows_gradient(layout: str, device: str) -> None:
    """That of indexing: a row's gradient is the sum over the rows it went to."""
    x = place(torch.randn(5, 6, dtype=torch.float64), layout, device).requires_grad_()
    rows = torch.tensor([2, 0, 0, -1, 5, 4, 2**32, 2], device=device)
    valid = (rows >= 0) & (rows < 5)
    weight = torch.randn(8, 6, dtype=torch.float64, device=device)
    (got,) = torch.autograd.grad((mxfp4_ops.shuffle_rows(x, rows) * weight).sum(), x)
    (want,) = torch.autograd.grad((x[rows[valid]] * weight[valid]).sum(), x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: mxfp4_ops.shuffle_rows(x, rows), x)


# Bad offsets and ids --------------------------------------------------------------------------------------------------

GOOD_OFFSETS, GOOD_SCALE_OFFSETS = [0, 10, 10, 30, 35], [0, 128, 128, 256, 384]
GOOD_IDS = [0] * 10 + [2] * 20 + [3] * 5 + [-1] * 5

# name: (expert_offsets, blockscale_offsets, sorted_expert_ids) of 40 rows, 4 experts and 512 scale rows
BAD = {
    "not from 0": ([1, 10, 10, 30, 35], GOOD_SCALE_OFFSETS, None),
    "negative": ([0, -10, 10, 30, 35], GOOD_SCALE_OFFSETS, None),
    "descending": ([0, 20, 10, 30, 35], GOOD_SCALE_OFFSETS, None),
    "beyond the rows": ([0, 10, 10, 30, 41], GOOD_SCALE_OFFSETS, None),
    "far beyond": ([0, 10, 10, 30, INT32_MAX], GOOD_SCALE_OFFSETS, None),
    "scales not at a multiple of 128": (GOOD_OFFSETS, [0, 128, 130, 258, 386], None),
    "scales before the buffer": (GOOD_OFFSETS, [-128, 128, 128, 256, 384], None),
    "scales of two experts in one place": (GOOD_OFFSETS, [0, 128, 0, 256, 384], None),
    "scales beyond the buffer": (GOOD_OFFSETS, [0, 128, 128, 512, 640], None),
    "scales far beyond the buffer": (GOOD_OFFSETS, [0, 128, 128, 2**31 - 128, 0], None),
    "id of another expert": (GOOD_OFFSETS, GOOD_SCALE_OFFSETS, [1, *GOOD_IDS[1:]]),
    "id without an expert": (GOOD_OFFSETS, GOOD_SCALE_OFFSETS, [*GOOD_IDS[:-1], 3]),
}
BAD_OPS = (*QUANT_OPS, "mxfp4_dequantize")
K = 96


def call_bad(op: str, bad: tuple, device: str, out: bool) -> dict[str, Buffer]:
    offsets, scale_offsets, ids = (None if t is None else torch.tensor(t, dtype=I32) for t in bad)
    offsets, scale_offsets = (place(t, "slice", device) for t in (offsets, scale_offsets))
    if op == "mxfp4_dequantize":
        args = [torch.ones(40, K // 2, dtype=torch.uint8), torch.ones(512, 4, dtype=torch.uint8)]
        args = (*(place(t, "slice", device) for t in args), offsets, scale_offsets)
        kwargs, out_shapes = {"dtype": torch.float32}, {"output": ((40, K), torch.float32)}
    else:
        columns = 2 * K if op == QUANT_OPS[1] else K
        x = place(torch.ones(40, columns).bfloat16(), "slice", device)
        args = (x, offsets, scale_offsets, 4, None if ids is None else place(ids, "slice", device))
        kwargs, out_shapes = {}, {"output": ((40, K // 2), torch.uint8), "output_scale": ((512, 4), torch.uint8)}
    written = {result: buffer(shape, dtype, "slice", device) for result, (shape, dtype) in out_shapes.items()}
    views = {result: b.view for result, b in written.items()} if out else {}
    try:
        overload(op, "out" if out else "default")(*args, **kwargs, **views)
    except RuntimeError as error:
        for b in written.values():
            b.check_untouched(f"{op} {error}")
        raise
    return written


def bad_of(op: str) -> dict[str, tuple]:
    return {name: bad for name, bad in BAD.items() if op in QUANT_OPS or bad[2] is None}


def cpu_message(op: str, bad: tuple) -> str:
    """The error of both overloads."""
    messages = set()
    for out in (False, True):
        with pytest.raises(RuntimeError) as error:
            call_bad(op, bad, "cpu", out)
        messages.add(str(error.value).splitlines()[0])
    assert len(messages) == 1
    return messages.pop()


def test_bad_offsets_on_the_cpu() -> None:
    table = "\n".join(f"{name}: {cpu_message(QUANT_OPS[0], bad)}" for name, bad in BAD.items())
    assert_expected_inline(
        table.replace("mxfp4_experts_quant: ", ""),
        """\
not from 0: expert_offsets[0] must be 0, got 1
negative: expert_offsets[1] must be from expert_offsets[0] (0) to the number of rows (40), got -10
descending: expert_offsets[2] must be from expert_offsets[1] (20) to the number of rows (40), got 10
beyond the rows: expert_offsets[4] must be from expert_offsets[3] (30) to the number of rows (40), got 41
far beyond: expert_offsets[4] must be from expert_offsets[3] (30) to the number of rows (40), got 2147483647
scales not at a multiple of 128: blockscale_offsets[2] must be a multiple of 128 from 128 up, got 130
scales before the buffer: blockscale_offsets[0] must be a multiple of 128 from 0 up, got -128
scales of two experts in one place: blockscale_offsets[2] must be a multiple of 128 from 128 up, got 0
scales beyond the buffer: blockscale_offsets[3] must leave 128 scale rows below S (512), got 512
scales far beyond the buffer: blockscale_offsets[3] must leave 128 scale rows below S (512), got 2147483520
id of another expert: sorted_expert_ids[0] must be the expert whose expert_offsets hold the row, or none, got 1
id without an expert: sorted_expert_ids[39] must be the expert whose expert_offsets hold the row, or none, got 3""",
    )


@pytest.mark.parametrize("op", BAD_OPS[1:])
def test_bad_offsets_give_every_op_the_same_error(op: str) -> None:
    for name, bad in bad_of(op).items():
        want = cpu_message(QUANT_OPS[0], bad).replace(QUANT_OPS[0], op)
        assert cpu_message(op, bad) == want, name


@pytest.mark.parametrize("op", BAD_OPS)
def test_bad_offsets_of_no_rows_on_the_cpu(op: str) -> None:
    offsets, scale_offsets = torch.tensor([0, 5], dtype=I32), torch.tensor([0, 128], dtype=I32)
    args = (torch.zeros(0, 64, dtype=torch.bfloat16), offsets, scale_offsets, 1)
    if op == "mxfp4_dequantize":
        args = (torch.zeros(0, 32, dtype=torch.uint8), torch.zeros(0, 4, dtype=torch.uint8), offsets, scale_offsets)
    with pytest.raises(RuntimeError, match=r"expert_offsets\[1\] must be from .* to the number of rows \(0\), got 5"):
        overload(op, "default")(*args, **({"dtype": torch.float32} if op == "mxfp4_dequantize" else {}))


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", [(op, name) for op in BAD_OPS for name in bad_of(op)])
def test_bad_offsets_on_the_gpu(op: str, name: str) -> None:
    """No write outside the buffers, and the next call is right."""
    call_bad(op, BAD[name], "cuda", out=False)
    for result, written in call_bad(op, BAD[name], "cuda", out=True).items():
        written.check(written.view.clone(), f"{op} {name} {result}")
    torch.cuda.synchronize()
    good = call_bad(op, (GOOD_OFFSETS, GOOD_SCALE_OFFSETS, None), "cuda", out=True)
    want = call_bad(op, (GOOD_OFFSETS, GOOD_SCALE_OFFSETS, None), "cpu", out=True)
    for result, written in good.items():
        written.check(want[result].view, f"{op} after {name}, {result}")


@pytest.mark.parametrize("op", BAD_OPS)
@pytest.mark.parametrize("scale_offsets", [[0, -128, 128, 256, 384], [0, 5, 128, 256, INT32_MAX]])
def test_scale_offsets_of_no_rows_are_not_read(op: str, scale_offsets: list[int], device: str) -> None:
    good, other = (
        call_bad(op, (GOOD_OFFSETS, t, None), device, out=True) for t in (GOOD_SCALE_OFFSETS, scale_offsets)
    )
    for result, written in other.items():
        written.check(good[result].view, f"{op} {result}")


# Shared memory --------------------------------------------------------------------------------------------------------


SHARED_SAMPLES = {
    **dict.fromkeys(ROUTING_OPS, "map"),
    "shuffle_rows": "bf16_8_int64",
    **dict.fromkeys(QUANT_OPS, "holes"),
    "mxfp4_dequantize": "R33_K96_E17_bf16",
}


def shared_pairs() -> Iterator[tuple[str, str, str]]:
    for op in SHARED_SAMPLES:
        tensors = [a for a in overload(op, "out")._schema.arguments if "Tensor" in str(a.type)]
        written = [a.name for a in tensors if a.alias_info and a.alias_info.is_write]
        read = [a.name for a in tensors if a.name not in written]
        for i, output in enumerate(written):
            for other in (*read, *written[:i]):
                yield op, output, other


def call_in_one_pool(op: str, output: str, other: str, device: str, overlap: bool) -> dict[str, Tensor]:
    """`other` at the start of a pool of memory, `output` where its last 16 bytes are, or right behind it."""
    made, want = sample(op, SHARED_SAMPLES[op], device), expected(op, SHARED_SAMPLES[op], out=True)
    names = [a.name for a in overload(op, "default")._schema.arguments]
    tensors = dict(zip(names, made.args)) | made.kwargs
    tensors |= {r: b.view for r, b in buffers(op, SHARED_SAMPLES[op], device).items()}
    size = 32 + 2 * max(t.nbytes for t in tensors.values() if torch.is_tensor(t))
    pool = torch.empty(size, dtype=torch.uint8, device=device)
    pieces = (tensors[other].nbytes + 15) // 16
    for name, begin in ((output, 16 * (pieces - 1 if overlap else pieces)), (other, 0)):
        t = tensors[name]
        tensors[name] = pool[begin : begin + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
    overload(op, "out")(**tensors)
    return {result: tensors[result] for result in want}


@pytest.mark.parametrize("op, output, other", list(shared_pairs()))
def test_out_refuses_shared_memory(op: str, output: str, other: str, device: str) -> None:
    message = f"{op}: {output} must not share memory with {other}, got buffers that overlap"
    with pytest.raises(RuntimeError, match=message):
        call_in_one_pool(op, output, other, device, overlap=True)


@pytest.mark.parametrize("op, output, other", list(shared_pairs()))
def test_out_takes_neighbours_in_one_buffer(op: str, output: str, other: str, device: str) -> None:
    got, want = call_in_one_pool(op, output, other, device, overlap=False), expected(op, SHARED_SAMPLES[op], out=True)
    for result in want:
        assert_same(got[result], want[result], f"{op} {result}", any_nan(op))


def test_out_between_the_rows_of_an_input(device: str) -> None:
    big = torch.arange(40, dtype=torch.float32, device=device).view(4, 10)
    x, flip = big[:, :5], torch.tensor([3, 2, 1, 0], device=device)
    with pytest.raises(RuntimeError, match="output must not share memory with input"):
        overload("shuffle_rows", "out")(input=x, dst2src_map=flip, output=big.view(-1)[:20].view(4, 5))
    with pytest.raises(RuntimeError, match="output must not share memory with input"):
        overload("shuffle_rows", "out")(input=x, dst2src_map=flip[:1], output=big.view(-1)[34:39].view(1, 5))
    # In the gap between two rows there is nothing to share.
    gap = big.view(-1)[25:30].view(1, 5)
    overload("shuffle_rows", "out")(input=x, dst2src_map=flip[:1], output=gap)
    assert gap.tolist() == [[30, 31, 32, 33, 34]]
