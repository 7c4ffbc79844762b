"""torch.library.opcheck of every overload on each device: schema, autograd registration, fake, AOT dispatch.

An `.out` call gets every optional buffer, and every buffer poisoned: a write that the schema does not declare shows
only where the buffer was not right before.
"""

import pytest
import torch
from samples import (
    CASES,
    METADATA_OP,
    PERMUTE_OP,
    QUANT_OPS,
    ROUTING_OPS,
    Sample,
    buffers,
    overload,
    results,
    sample,
)
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("one_thread")

_QUANT_NAMES = (
    *("R0", "R0_ids", "R1_K32", "R33_K96_E17", "R99_K2880_E20_fp16_ids", "R264_K160_E36_ids", "counts_0_1_128_129"),
    *("holes", "no_expert_at_all", "x_slice", "x_strided", "x_transposed", "x_expanded", "offsets_slice"),
    *("offsets_strided", "ids_slice", "ids_strided_holes"),
)

# opcheck compares with ops that torch does not have for 8-bit floats and fp4, and takes no NaN for equal.
OPCHECK = {
    METADATA_OP: (
        *("m0", "topk0", "m1_topk1_E1", "m33_topk3_E20", "m33_topk8_E256", "m17_E128", "not_gated", "minus_one"),
        *("beyond_E", "int64_beyond_2^32", "map", "map_strided", "map_expanded"),
        *("ids_slice_int64", "ids_transposed", "ids_expanded"),
    ),
    PERMUTE_OP: (
        *("m0", "topk0", "m1_topk1_E1_K32", "m33_topk2_E17_K160", "m33_topk3_E20_K160_fp16", "m33_topk8_E36_K32"),
        *("minus_one", "beyond_E", "no_expert_at_all", "int64_beyond_2^32", "not_gated", "map", "map_strided"),
        *("ids_transposed", "ids_expanded", "x_slice", "x_odd_rows", "x_strided", "x_transposed", "x_expanded"),
    ),
    "shuffle_rows": (
        *("uint8_20", "bool_5", "bf16_7", "int32_1", "int64_5", "fp64_3", "complex64_2", "bf16_2880_from_33_to_264"),
        *("empty_map", "empty_input", "no_columns", "slice", "padded_rows", "odd_rows", "strided", "transposed"),
        *("expanded", "map_slice", "map_strided_int64"),
    ),
    **dict.fromkeys(QUANT_OPS, _QUANT_NAMES),
    "mxfp4_dequantize": (
        *("R0", "R1_K32", "R33_K96_E17_bf16", "R99_K2880_E20", "R264_K160_E60_tail_fp16", "no_expert_at_all"),
        *("packed_slice", "packed_expanded", "packed_odd_rows", "packed_strided"),
        *("scale_strided", "scale_transposed", "offsets_strided"),
    ),
}


def without_nan(op: str, name: str, device: str) -> Sample:
    made = sample(op, name, device)
    x = made.args[0]
    if op == "shuffle_rows" and x.dtype.is_floating_point and x.isnan().any():
        x.nan_to_num_()
    elif op == "mxfp4_dequantize":
        made.args[1].clamp_(max=0xFE)
    return made


def arguments(op: str, name: str, kind: str, device: str, layout: str = "plain") -> tuple[tuple, dict[str, object]]:
    made = without_nan(op, name, device)
    if kind == "default":
        return made.args, made.kwargs
    return made.args, made.kwargs | {result: b.view for result, b in buffers(op, name, device, layout).items()}


@pytest.mark.parametrize("kind", ["default", "out"])
@pytest.mark.parametrize("op, name", [(op, name) for op, names in OPCHECK.items() for name in names])
def test_opcheck(op: str, name: str, kind: str, device: str) -> None:
    torch.library.opcheck(overload(op, kind), *arguments(op, name, kind, device))


@pytest.mark.parametrize("layout", ["slice", "strided"])
@pytest.mark.parametrize("op", OPCHECK)
def test_opcheck_of_other_buffers(op: str, layout: str, device: str) -> None:
    torch.library.opcheck(overload(op, "out"), *arguments(op, OPCHECK[op][3], "out", device, layout))


@pytest.mark.parametrize("op", ROUTING_OPS)
def test_opcheck_without_optional_buffers(op: str, device: str) -> None:
    made = sample(op, "map", device)
    views = {result: b.view for result, b in buffers(op, "map", device, optional=False).items()}
    torch.library.opcheck(overload(op, "out"), made.args, made.kwargs | views)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_with_a_gradient(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(3, 7, dtype=dtype, device=device, requires_grad=True)
    rows = torch.tensor([2, 0, 0, -1, 3, 1], device=device)
    torch.library.opcheck(overload("shuffle_rows", "default"), (x, rows))


@pytest.mark.parametrize("op, name", CASES)
def test_fake_matches_kernel(op: str, name: str, device: str) -> None:
    """Strides too, which opcheck does not compare on the CPU before torch 2.13."""
    made = sample(op, name, device)
    real = results(op, overload(op, "default")(*made.args, **made.kwargs))
    mode = FakeTensorMode()

    def fake(value: object) -> object:
        return mode.from_tensor(value) if torch.is_tensor(value) else value

    args, kwargs = tuple(map(fake, made.args)), {name: fake(value) for name, value in made.kwargs.items()}
    out = {result: fake(b.view) for result, b in buffers(op, name, device, "strided").items()}
    with mode:
        promised = results(op, overload(op, "default")(*args, **kwargs))
        assert overload(op, "out")(*args, **kwargs, **out) is None
    for result, tensor in real.items():
        for what in ("shape", "dtype", "device", "layout"):
            assert getattr(promised[result], what) == getattr(tensor, what), f"{result} {what}"
        assert promised[result].stride() == tensor.stride(), result
