import pytest
import reference
import torch

import mxfp4_ops
from mxfp4_ops import layout


@pytest.mark.parametrize("K", [32, 96, 160, 2880])
@pytest.mark.parametrize("counts", [[1], [0, 129, 0, 3], [128, 128], [0, 0]])
def test_swizzle_follows_the_byte_formula(K, counts, device):
    metadata = mxfp4_ops.get_cutlass_moe_mm_data(
        torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None].to(device),
        len(counts),
        32,
        32,
    )
    R, E = sum(counts), len(counts)
    flat = torch.randint(1, 255, (R, K // 32), dtype=torch.uint8)
    offsets, scale_offsets = metadata.expert_offsets, metadata.blockscale_offsets
    tiled = layout.swizzle(flat.to(device), offsets, scale_offsets)
    expected = reference.swizzle(flat, offsets.cpu(), scale_offsets.cpu(), R, E, K)
    assert tiled.device.type == device
    assert torch.equal(tiled.cpu(), expected)
    assert torch.equal(layout.unswizzle(tiled, R, K, offsets, scale_offsets).cpu(), flat)


def test_swizzle_agrees_with_the_quant_op(device):
    x = torch.randn(300, 160, dtype=torch.bfloat16, device=device)
    data = mxfp4_ops.get_cutlass_moe_mm_data(torch.randint(0, 3, (300, 1), device=device), 3, 32, 32)
    rows = mxfp4_ops.mxfp4_experts_quant(x, data.expert_offsets, data.blockscale_offsets, 3)
    flat = layout.unswizzle(rows.output_scale, 300, 160, data.expert_offsets, data.blockscale_offsets)
    _, expected = reference.quantize_blocks(x.cpu())
    assert torch.equal(flat.cpu(), expected)
    assert torch.equal(layout.swizzle(flat, data.expert_offsets, data.blockscale_offsets), rows.output_scale)


@pytest.mark.parametrize("E", [1, 3, 17])
def test_scale_rows_suffice_for_every_routing_and_no_less(E):
    for R in [0, 1, 2, 127, 128, 129, 300]:
        # Of all ways to spread R rows, one row an expert and the rest on the first needs most.
        spread = [1] * min(R, E)
        if spread:
            spread[0] += R - len(spread)
        needed = sum(-(-count // 128) * 128 for count in spread)
        assert needed <= layout.scale_rows(R, E) < needed + 128 * max(1, (R - len(spread)) % 128 != 0) + 1, (R, E)


def test_views_keep_the_shape():
    packed, scale = torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
    assert layout.as_float4(packed).dtype == torch.float4_e2m1fn_x2 and layout.as_float4(packed).shape == packed.shape
    assert layout.as_e8m0(scale).dtype == torch.float8_e8m0fnu and layout.as_e8m0(scale).shape == scale.shape
