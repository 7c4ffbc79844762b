"""The C++ checks and the fakes' checks are held to each other: the same bad input, the same words."""

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from samples import ROUTING_OPS
from torch._subclasses import FakeTensorMode

import mxfp4_ops

ops = torch.ops.mxfp4_ops
INT32_MAX = 2**31 - 1


def i32(*shape, device="cpu"):
    return torch.zeros(*shape, dtype=torch.int32, device=device)


def good(op: str) -> dict:
    """Valid arguments of each op, m = 2, topk = 2, E = 3, K = 64."""
    offsets = torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    scales = torch.tensor([0, 128, 256, 384], dtype=torch.int32)
    rows = dict(
        expert_offsets=offsets,
        blockscale_offsets=scales,
        n_experts=3,
        sorted_expert_ids=i32(4) + torch.tensor([0, 1, 1, 2], dtype=torch.int32),
    )
    match op:
        case "get_cutlass_moe_mm_data":
            return dict(topk_ids=torch.zeros(2, 2, dtype=torch.int64), num_experts=3, n=32, k=64, expert_map=i32(5))
        case "moe_permute_mxfp4_quant":
            routing = good("get_cutlass_moe_mm_data")
            return dict(hidden_states=torch.zeros(2, routing.pop("k"), dtype=torch.bfloat16)) | routing
        case "shuffle_rows":
            return dict(input=torch.zeros(2, 3), dst2src_map=i32(4))
        case "mxfp4_experts_quant":
            return dict(input=torch.zeros(4, 64, dtype=torch.bfloat16), **rows)
        case "silu_and_mul_mxfp4_experts_quant":
            return dict(input=torch.zeros(4, 128, dtype=torch.float16), **rows)
        case "mxfp4_dequantize":
            return dict(
                packed=torch.zeros(4, 32, dtype=torch.uint8),
                scale=torch.zeros(384, 4, dtype=torch.uint8),
                expert_offsets=offsets,
                blockscale_offsets=scales,
                dtype=torch.bfloat16,
            )
    raise AssertionError(op)


def buffers(op: str) -> dict:
    """Valid buffers of each .out overload for good(op)."""
    u8 = dict(dtype=torch.uint8)
    match op:
        case "get_cutlass_moe_mm_data":
            names = ("expert_offsets", "blockscale_offsets", "problem_sizes1", "problem_sizes2")
            names += ("input_permutation", "output_permutation", "sorted_expert_ids")
            return dict(zip(names, (i32(4), i32(4), i32(3, 3), i32(3, 3), i32(4), i32(4), i32(4))))
        case "moe_permute_mxfp4_quant":
            return buffers("get_cutlass_moe_mm_data") | buffers("mxfp4_experts_quant")
        case "shuffle_rows":
            return dict(output=torch.zeros(4, 3))
        case "mxfp4_dequantize":
            return dict(output=torch.zeros(4, 64, dtype=torch.bfloat16))
        case _:
            return dict(output=torch.zeros(4, 32, **u8), output_scale=torch.zeros(384, 4, **u8))


OPS = [
    *ROUTING_OPS,
    "shuffle_rows",
    "mxfp4_experts_quant",
    "silu_and_mul_mxfp4_experts_quant",
    "mxfp4_dequantize",
]
DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64,
    torch.complex128,
]  # fmt: skip


def bad_values(value) -> list:
    """Variations of one argument; some are valid for some arguments, and then both sides must take them."""
    if isinstance(value, torch.Tensor):
        shapes = [(), (1,), (0,), (3,), (5,), (4, 4), (2, 2), (0, 2), (4, 33), (4, 0), (1, 2, 3), (512, 4), (384, 8)]
        return [value.to(dtype) for dtype in DTYPES] + [torch.zeros(shape, dtype=value.dtype) for shape in shapes]
    if isinstance(value, torch.dtype):
        return DTYPES
    return [-1, 0, 1, 2, 4, INT32_MAX // 2, INT32_MAX // 2 + 1, INT32_MAX, INT32_MAX + 1]


CASES = [
    pytest.param(op, overload, name, id=f"{op}.{overload}-{name}")
    for op in OPS
    for overload in ("default", "out")
    for name in good(op) | (buffers(op) if overload == "out" else {})
]


def outcome(call, arguments) -> str:
    try:
        call(**arguments)
    except RuntimeError as error:
        return str(error).split("\n")[0]
    return "accepted"


@pytest.mark.parametrize("op, overload, name", CASES)
def test_fake_and_kernel_say_the_same(op, overload, name):
    call = getattr(getattr(ops, op), overload)
    arguments = good(op) | (buffers(op) if overload == "out" else {})
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    refused = 0
    for value in bad_values(arguments[name]):
        if isinstance(value, int) and value > 10**6 and name == "num_experts":
            continue  # valid, and gigabytes
        kernel = outcome(call, arguments | {name: value})
        with mode:
            fake = outcome(call, fakes | {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value})
        assert kernel == fake, (
            f"{name} = {value if not isinstance(value, torch.Tensor) else (value.dtype, value.shape)}"
        )
        refused += kernel != "accepted"
    assert refused > 0, f"no bad {name} was refused"


@pytest.mark.gpu
@pytest.mark.parametrize("op, overload, name", CASES)
def test_other_device_is_refused_alike(op, overload, name):
    arguments = good(op) | (buffers(op) if overload == "out" else {})
    if not isinstance(arguments[name], torch.Tensor):
        pytest.skip("not a tensor")
    call = getattr(getattr(ops, op), overload)
    mixed = {k: v.cuda() if isinstance(v, torch.Tensor) and k != name else v for k, v in arguments.items()}
    kernel = outcome(call, mixed)
    assert kernel.startswith(f"{op}: ") and "must be on the device of" in kernel
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in mixed.items()}
        assert outcome(call, fakes) == kernel


def test_messages_name_argument_requirement_and_value():
    messages = []

    def bad(op, **changes):
        messages.append(outcome(getattr(ops, op), good(op) | changes))

    bad("get_cutlass_moe_mm_data", topk_ids=torch.zeros(2, 2))
    bad("get_cutlass_moe_mm_data", topk_ids=i32(2))
    bad("get_cutlass_moe_mm_data", num_experts=0)
    bad("moe_permute_mxfp4_quant", hidden_states=torch.zeros(2, 64))
    bad("moe_permute_mxfp4_quant", hidden_states=torch.zeros(3, 64, dtype=torch.bfloat16))
    bad("moe_permute_mxfp4_quant", hidden_states=torch.zeros(2, 48, dtype=torch.bfloat16))
    bad("moe_permute_mxfp4_quant", n=0)
    bad("shuffle_rows", input=torch.zeros(3))
    bad("mxfp4_experts_quant", input=torch.zeros(4, 33, dtype=torch.bfloat16))
    bad("mxfp4_experts_quant", expert_offsets=i32(3))
    bad("silu_and_mul_mxfp4_experts_quant", input=torch.zeros(4, 96, dtype=torch.bfloat16))
    bad("mxfp4_dequantize", scale=torch.zeros(100, 4, dtype=torch.uint8))
    bad("mxfp4_dequantize", dtype=torch.float64)
    assert_expected_inline(
        "\n".join(messages),
        """\
get_cutlass_moe_mm_data: topk_ids must have dtype torch.int32 or torch.int64, got torch.float32
get_cutlass_moe_mm_data: topk_ids must be 2-dimensional [m, topk], got shape [2]
get_cutlass_moe_mm_data: num_experts must be at least 1, got 0
moe_permute_mxfp4_quant: hidden_states must have dtype torch.bfloat16 or torch.float16, got torch.float32
moe_permute_mxfp4_quant: hidden_states must have shape [m, K] = [2, 64], got shape [3, 64]
moe_permute_mxfp4_quant: hidden_states must have a positive multiple of 32 columns (K), got 48
moe_permute_mxfp4_quant: n must be at least 1, got 0
shuffle_rows: input must be 2-dimensional [rows, width], got shape [3]
mxfp4_experts_quant: input must have a positive multiple of 32 columns (K), got 33
mxfp4_experts_quant: expert_offsets must have shape [n_experts + 1] = [4], got shape [3]
silu_and_mul_mxfp4_experts_quant: input must have a positive multiple of 64 columns (2K), got 96
mxfp4_dequantize: scale must have a multiple of 128 rows (S), got 100
mxfp4_dequantize: dtype must be torch.float32 or torch.bfloat16 or torch.float16, got torch.float64""",
    )


@pytest.mark.parametrize("op, overload, name", CASES)
def test_none_for_a_tensor(op, overload, name):
    arguments = good(op) | (buffers(op) if overload == "out" else {})
    optional = ["expert_map", "sorted_expert_ids"]
    if op in ROUTING_OPS:
        optional.append("blockscale_offsets")
    if not isinstance(arguments[name], torch.Tensor) or name in optional:
        pytest.skip("None is a value that it may have, or it is no tensor")
    call = getattr(getattr(ops, op), overload)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    for given in (arguments, meta):
        assert outcome(call, given | {name: None}) != "accepted"


@pytest.mark.parametrize("op", OPS)
def test_expanded_buffer_is_refused_before_anything_is_written(op):
    for name, buffer in buffers(op).items():
        given = buffers(op)
        given[name] = buffer[:1].expand(buffer.shape)
        before = {k: v.clone() for k, v in given.items()}
        message = f"{op}: {name} must not be expanded, got stride 0 in dimension 0"
        assert outcome(getattr(ops, op).out, good(op) | given) == message
        assert all(torch.equal(given[k], before[k]) for k in given)
        meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in (good(op) | given).items()}
        meta[name] = meta[name][:1].expand(buffer.shape)
        assert outcome(getattr(ops, op).out, meta) == message


@pytest.mark.parametrize("op", ROUTING_OPS)
def test_what_int32_cannot_count(op):
    ids = torch.empty(1, 2**31, dtype=torch.int32, device="meta")
    more = dict(k=32) if op == "get_cutlass_moe_mm_data" else dict(hidden_states=torch.empty(1, 32, device="meta"))
    message = f"{op}: topk_ids must have fewer than 2^31 routed rows, got 2147483648"
    assert outcome(getattr(ops, op), dict(topk_ids=ids, num_experts=4, n=1) | more) == message
    one = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**31 - 1)
    for device in ("cpu", "meta"):
        message = f"{op}: topk_ids must need fewer than 2^31 scale rows, got 2148003712"
        arguments = dict(topk_ids=one.to(device) if device == "cpu" else ids[:, 1:], num_experts=4096, n=1)
        more = {name: torch.zeros(1, 32, device=device) if name == "hidden_states" else 32 for name in more}
        assert outcome(getattr(ops, op), arguments | more) == message


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_columns_that_int32_cannot_count(device):
    row = torch.zeros(1, 1, dtype=torch.bfloat16, device=device).expand(1, 2**31)
    arguments = dict(hidden_states=row, topk_ids=i32(1, 1, device=device), num_experts=4, n=1)
    message = "moe_permute_mxfp4_quant: hidden_states must have fewer than 2^31 columns, got 2147483648"
    assert outcome(ops.moe_permute_mxfp4_quant, arguments) == message


@pytest.mark.parametrize("op", ROUTING_OPS)
def test_two_results_in_one_strided_buffer(op):
    wide = torch.zeros(8, dtype=torch.int32)
    given = good(op) | buffers(op)
    given |= dict(input_permutation=wide[::2], output_permutation=wide[::2])
    message = "output_permutation must not share memory with input_permutation, got buffers that overlap"
    assert message in outcome(getattr(ops, op).out, given)


def test_strided_results_may_interleave_but_not_overlap() -> None:
    """Every pair of strided buffers of one pool, judged by the elements that they hold."""
    op, counts = ROUTING_OPS[0], {True: 0, False: 0}
    pool, other = torch.zeros(24, dtype=torch.int32), buffers(op)
    rows = other["input_permutation"].numel()
    views = [(begin, step) for step in (1, 2, 3) for begin in range(0, 24 - (rows - 1) * step, 2 if step == 1 else 1)]
    for (b1, s1), (b2, s2) in itertools.product(views, views):
        first, second = (pool[b : b + (rows - 1) * s + 1 : s] for b, s in ((b1, s1), (b2, s2)))
        overlap = not {b1 + i * s1 for i in range(rows)}.isdisjoint(b2 + i * s2 for i in range(rows))
        given = good(op) | other | dict(input_permutation=first, output_permutation=second)
        said = outcome(getattr(ops, op).out, given)
        assert ("overlap" in str(said)) == overlap, (b1, s1, b2, s2, said)
        counts[overlap] += 1
    assert min(counts.values()) > 20, counts


def test_two_dimensional_results_that_overlap() -> None:
    op, pool = "mxfp4_experts_quant", torch.zeros(1 << 14, dtype=torch.uint8)
    given = good(op) | buffers(op)
    (r, c), (scale_rows, width) = given["output"].shape, given["output_scale"].shape
    between = pool.as_strided((scale_rows, width), (c + width + 3, 1), c + 1)
    beside = dict(output=pool.as_strided((r, c), (c + width + 3, 1)), output_scale=between)
    assert "overlap" not in str(outcome(getattr(ops, op).out, given | beside))
    one_byte = dict(beside, output_scale=pool.as_strided((scale_rows, width), (c + width + 3, 1), c - 1))
    message = "output_scale must not share memory with output, got buffers that overlap"
    assert message in outcome(getattr(ops, op).out, given | one_byte)


def test_a_buffer_of_inference_mode_outside_it_is_not_written() -> None:
    with torch.inference_mode():
        output = torch.zeros(2, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="torch refuses to write an out buffer.*inference_mode"):
        ops.shuffle_rows.out(torch.ones(2, 8), torch.arange(2), output=output)
    assert not output.any()
    with torch.inference_mode():
        ops.shuffle_rows.out(torch.ones(2, 8), torch.arange(2), output=output)
    assert output.all()


@pytest.mark.parametrize("op, count", [(ROUTING_OPS[0], 7), (ROUTING_OPS[1], 9), ("mxfp4_experts_quant", 2)])
def test_wrong_number_of_buffers(op, count):
    with pytest.raises(RuntimeError, match=f"{op}: out must have {count} buffers .*, got 3"):
        getattr(mxfp4_ops, op)(**good(op), out=(None, None, None))
