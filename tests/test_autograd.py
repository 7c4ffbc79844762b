"""Gradients: shuffle_rows has them to any order; the ops that quantise say that they have none."""

import functools
import textwrap
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from samples import assert_same
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mxfp4_ops

QUANT = (mxfp4_ops.mxfp4_experts_quant, mxfp4_ops.silu_and_mul_mxfp4_experts_quant, mxfp4_ops.moe_permute_mxfp4_quant)
each_quant = pytest.mark.parametrize("quant", QUANT, ids=lambda quant: quant.__name__)

MAPS = {
    "one_to_one": [2, 0, 4, 1, 3],
    "repeated": [4, 0, 0, 0, 4, 4, 0],
    "holes": [-1, 3, 5, 2**31 - 1, 3, -1, 0],  # 5 rows: 5 is outside too
    "no_row": [-1, -1],
    "empty": [],
}
each_map = pytest.mark.parametrize("rows", MAPS.values(), ids=MAPS)


def index(input: Tensor, dst2src_map: Tensor) -> Tensor:
    """What shuffle_rows computes, in ops that torch differentiates."""
    inside = (dst2src_map >= 0) & (dst2src_map < input.shape[0])
    zero_row = input.new_zeros(1, input.shape[1])
    return torch.cat((input, zero_row))[torch.where(inside, dst2src_map, input.shape[0]).long()]


def gradient(shuffle: Callable, input: Tensor, dst2src_map: Tensor) -> Tensor:
    input = input.detach().requires_grad_()
    output = shuffle(input, dst2src_map)
    # Small integers: their sums are exact in any order.
    weight = (torch.arange(output.numel(), device=input.device) % 7 - 3).to(input.dtype).view_as(output)
    (grad,) = torch.autograd.grad((output * weight).sum(), input)
    return grad


# shuffle_rows ---------------------------------------------------------------------------------------------------------


@each_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_gradient_is_that_of_indexing(
    rows: list[int], dtype: torch.dtype, map_dtype: torch.dtype, device: str
) -> None:
    input = torch.randn(5, 7, device=device).to(dtype)
    dst2src_map = torch.tensor(rows, dtype=map_dtype, device=device)
    want = gradient(index, input, dst2src_map)
    assert_same(gradient(mxfp4_ops.shuffle_rows, input, dst2src_map), want, "gradient")


@each_map
def test_first_and_second_derivatives(rows: list[int], device: str) -> None:
    input = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    dst2src_map = torch.tensor(rows, dtype=torch.int32, device=device)
    assert torch.autograd.gradcheck(mxfp4_ops.shuffle_rows, (input, dst2src_map))
    # A power, since the second derivative of a gather alone is zero.
    assert torch.autograd.gradgradcheck(lambda input: mxfp4_ops.shuffle_rows(input, dst2src_map) ** 3, input)


def test_gradient_through_strides(device: str) -> None:
    dst2src_map = torch.tensor([2, -1, 0, 2], device=device)
    input = torch.randn(6, 3, device=device).t()[:, ::2]
    want = gradient(index, input, dst2src_map)
    assert_same(gradient(mxfp4_ops.shuffle_rows, input, dst2src_map), want, "strided input")

    leaf = input.detach().requires_grad_()
    mxfp4_ops.shuffle_rows(leaf, dst2src_map).sum().backward()  # a gradient of strides (0, 0)
    assert_same(leaf.grad, torch.tensor([[1.0], [0.0], [2.0]], device=device).expand(3, 3), "expanded gradient")


def test_gradient_of_no_rows(device: str) -> None:
    dst2src_map = torch.tensor([-1, 0, 3], device=device)
    grad = gradient(mxfp4_ops.shuffle_rows, torch.zeros(0, 4, device=device), dst2src_map)
    assert grad.shape == (0, 4)


def test_gradient_is_deterministic_where_torch_is_asked_to_be(device: str) -> None:
    input = torch.randn(33, 64, device=device, requires_grad=True)
    dst2src_map = torch.randint(-1, 33, (2000,), device=device)
    weight = torch.randn(2000, 64, device=device)
    grads = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            grads += torch.autograd.grad((mxfp4_ops.shuffle_rows(input, dst2src_map) * weight).sum(), input)
    finally:
        torch.use_deterministic_algorithms(False)
    for grad in grads:
        assert_same(grad, grads[0], "gradient")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradient(backend: str, device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    shuffle = torch.compile(mxfp4_ops.shuffle_rows, backend=counter, fullgraph=True)
    for tokens, rows in ((33, 264), (5, 7), (300, 2)):
        input = torch.randn(tokens, 8, device=device)
        dst2src_map = torch.randint(-1, tokens + 1, (rows,), device=device)

        def marked(input: Tensor, dst2src_map: Tensor) -> Tensor:
            for t in (input, dst2src_map):
                torch._dynamo.mark_dynamic(t, 0)
            return shuffle(input, dst2src_map)

        want = gradient(index, input, dst2src_map)
        assert_same(gradient(marked, input, dst2src_map), want, f"{tokens} tokens")
    assert counter.frame_count == 1


def test_no_gradient_is_recorded_without_need() -> None:
    dst2src_map = torch.tensor([1, 0])
    leaf = torch.zeros(2, 3, requires_grad=True)
    assert not mxfp4_ops.shuffle_rows(leaf.detach(), dst2src_map).requires_grad
    with torch.no_grad():
        assert not mxfp4_ops.shuffle_rows(leaf, dst2src_map).requires_grad


# Ops without a backward -----------------------------------------------------------------------------------------------


def quant_arguments(quant: Callable, requires_grad: bool = True) -> tuple:
    input = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=requires_grad)
    if quant is mxfp4_ops.moe_permute_mxfp4_quant:
        return input, torch.tensor([[0], [1], [1]]), 2, 32
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    return input, offsets, torch.tensor([0, 128, 256], dtype=torch.int32), 2


def quant_out(quant: Callable) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(t) for t in quant(*quant_arguments(quant, requires_grad=False)))


def refusal(call: Callable, *args: object, **kwargs: object) -> str:
    with pytest.raises(RuntimeError) as error:
        call(*args, **kwargs)
    return str(error.value)


def test_quant_refuses_an_input_that_requires_grad() -> None:
    messages = (textwrap.fill(refusal(quant, *quant_arguments(quant)), 100) for quant in QUANT)
    assert_expected_inline("\n".join(messages), """\
mxfp4_experts_quant: input must not require grad, for there is no backward: call it under
torch.no_grad() or torch.inference_mode(), or on a detached tensor where no gradient is wanted
silu_and_mul_mxfp4_experts_quant: input must not require grad, for there is no backward: call it
under torch.no_grad() or torch.inference_mode(), or on a detached tensor where no gradient is wanted
moe_permute_mxfp4_quant: hidden_states must not require grad, for there is no backward: call it
under torch.no_grad() or torch.inference_mode(), or on a detached tensor where no gradient is wanted""")


@each_quant
def test_quant_into_buffers_refuses_it_too(quant: Callable) -> None:
    out = quant_out(quant)
    assert refusal(quant, *quant_arguments(quant), out=out) == refusal(quant, *quant_arguments(quant))
    assert not any(t.any() for t in out)


@each_quant
def test_compiled_quant_refuses_it_too(quant: Callable) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(quant, backend="aot_eager", fullgraph=True)
    assert refusal(quant, *quant_arguments(quant)) in refusal(compiled, *quant_arguments(quant))


@each_quant
def test_default_overload_refuses_it_too(quant: Callable) -> None:
    op = getattr(torch.ops.mxfp4_ops, quant.__name__)
    names = (result.name for result in op.default._schema.returns)
    into_buffers = functools.partial(op.out, **dict(zip(names, quant_out(quant), strict=True)))
    # In the same words as the function, leaf or not.
    assert refusal(op.default, *quant_arguments(quant)) == refusal(quant, *quant_arguments(quant))
    assert refusal(into_buffers, *quant_arguments(quant)) == refusal(quant, *quant_arguments(quant))
    input, *where = quant_arguments(quant)
    assert refusal(op.default, input * 1, *where) == refusal(quant, *quant_arguments(quant))


def test_raw_shuffle_into_a_buffer_refuses_it_too() -> None:
    input, dst2src_map, out = torch.ones(3, 2, requires_grad=True), torch.tensor([1, 0]), torch.zeros(2, 2)
    raw = functools.partial(torch.ops.mxfp4_ops.shuffle_rows.out, output=out)
    assert refusal(raw, input, dst2src_map) == refusal(mxfp4_ops.shuffle_rows, input, dst2src_map, out=out)


@each_quant
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_quant_where_no_gradient_is_wanted(quant: Callable, mode: Callable) -> None:
    input, *where = quant_arguments(quant)
    want = quant(input.detach(), *where)
    out = quant_out(quant)
    with mode():
        for got in (quant(input, *where), quant(input, *where, out=out)):
            for g, w in zip(got, want):
                assert_same(g, w, quant.__name__)


def test_shuffle_rows_into_a_buffer_refuses_it() -> None:
    input, dst2src_map, out = torch.ones(3, 2, requires_grad=True), torch.tensor([1, 0]), torch.zeros(2, 2)
    message = textwrap.fill(refusal(mxfp4_ops.shuffle_rows, input, dst2src_map, out=out), 80)
    assert_expected_inline(message, """\
shuffle_rows: input must not require grad, for there is no backward: call it
under torch.no_grad() or torch.inference_mode(), or on a detached tensor where
no gradient is wanted""")
    assert not out.any()
    with torch.no_grad():
        mxfp4_ops.shuffle_rows(input, dst2src_map, out=out)
    assert out.all()


# Buffers that autograd knows ------------------------------------------------------------------------------------------


def write_shuffled(out: Tensor) -> None:
    mxfp4_ops.shuffle_rows(torch.ones(3, 32), torch.tensor([1, 0]), out=out)


def write_dequantized(out: Tensor) -> None:
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    packed, scale = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
    mxfp4_ops.mxfp4_dequantize(packed, scale, offsets, 64 * offsets, dtype=torch.float32, out=out)


each_write = pytest.mark.parametrize("write", [write_shuffled, write_dequantized], ids=lambda write: write.__name__)


@each_write
@pytest.mark.parametrize("leaf", [True, False])
def test_buffer_that_requires_grad_is_refused(write: Callable, leaf: bool) -> None:
    """As torch's own out= does: else its gradient would be that of the values before the write."""
    out = torch.zeros(2, 32, requires_grad=True)
    assert "grad" in refusal(write, out if leaf else out * 1)
    with torch.no_grad():
        write(out)


@each_write
def test_write_over_a_saved_tensor_is_noticed(write: Callable) -> None:
    weight, buffer = torch.ones(2, 32, requires_grad=True), torch.full((2, 32), 5.0)
    product = (weight * buffer).sum()  # saves the buffer for the gradient of the weight
    write(buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_overwritten_routing_is_noticed() -> None:
    """Two layers that share the static buffers of one routing: the first layer's gradient must not use the second's."""
    buffers = [torch.zeros(s, dtype=torch.int32) for s in ((5,), (5,), (4, 3), (4, 3), (4,), (4,), (4,))]
    x = torch.randn(2, 8, requires_grad=True)
    data = mxfp4_ops.get_cutlass_moe_mm_data(torch.tensor([[0, 1], [2, 3]]), 4, 32, 32, out=buffers)
    loss = mxfp4_ops.shuffle_rows(x, data.input_permutation).sum()
    mxfp4_ops.get_cutlass_moe_mm_data(torch.tensor([[3, 2], [1, 0]]), 4, 32, 32, out=buffers)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
