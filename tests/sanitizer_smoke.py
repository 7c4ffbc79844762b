"""Every op and overload on small inputs of odd sizes, checked against the oracle: what compute-sanitizer runs.

    compute-sanitizer --tool memcheck python tests/sanitizer_smoke.py

Without the caching allocator each tensor is an allocation of its own, so that the tool sees its real bounds.
"""

import argparse
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read when torch first allocates
os.environ.setdefault("MXFP4_OPS_CUDA_WITHOUT", "")  # and this at the first launch

import samples
import torch

import mxfp4_ops

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
LARGEST = 100_000  # elements of a sample: the tools slow every access down

# (expert_offsets, blockscale_offsets, sorted_expert_ids) that 40 rows of 4 experts, 512 scale rows, do not have.
GOOD, GOOD_SCALES = [0, 10, 10, 30, 40], [0, 128, 128, 256, 384]
BAD = (
    ([0, 10, 10, 30, 41], GOOD_SCALES, None),
    ([0, 10, 10, 30, INT32_MAX], GOOD_SCALES, None),
    ([0, INT32_MAX, INT32_MIN, 30, 40], GOOD_SCALES, None),
    ([-5, -10, 10, 30, 40], GOOD_SCALES, None),
    ([INT32_MIN] * 5, GOOD_SCALES, None),
    ([40, 30, 20, 10, 0], GOOD_SCALES, None),
    (GOOD, [-128, 128, 128, 256, 384], None),
    (GOOD, [INT32_MIN, 128, 128, 256, 384], None),
    (GOOD, [0, 130, 131, 257, 385], None),
    (GOOD, [0, 128, 128, 512, 640], None),
    (GOOD, [0, 128, 128, INT32_MAX - 127, INT32_MAX], None),
    (GOOD, GOOD_SCALES, [1, 3] * 20),
    (GOOD, GOOD_SCALES, [INT32_MAX, INT32_MIN, -1, 4] * 10),
    ([0, 0, 0, 0, INT32_MAX], [0, 0, 0, INT32_MAX, 0], [3] * 40),
)


def call_with_bad_offsets(op: str, bad: tuple, device: str) -> None:
    """Both overloads; what they compute has no meaning, but stays inside the tensors."""
    offsets = [torch.tensor(t, dtype=torch.int32, device=device) for t in bad[:2]]
    K = 96
    packed = torch.zeros(40, K // 2, dtype=torch.uint8, device=device)
    scale = torch.zeros(512, 4, dtype=torch.uint8, device=device)
    if op == "mxfp4_dequantize":
        args, kwargs = (packed, scale, *offsets), {"dtype": torch.float32}
        out = {"output": torch.zeros(40, K, device=device)}
    else:
        x = torch.ones(40, 2 * K if op == samples.SILU else K, dtype=torch.bfloat16, device=device)
        ids = None if bad[2] is None else torch.tensor(bad[2], dtype=torch.int32, device=device)
        args, kwargs = (x, *offsets, 4, ids), {}
        out = {"output": packed, "output_scale": scale}
    for overload, buffers in (("default", {}), ("out", out)):
        try:
            samples.overload(op, overload)(*args, **kwargs, **buffers)
        except RuntimeError as error:
            if device == "cuda" or "offsets" not in str(error) and "sorted_expert_ids" not in str(error):
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--every", type=int, default=1, help="take every n-th sample")
    args = parser.parse_args()
    torch.set_num_threads(1)

    cases = []
    for op, name in samples.CASES:
        made = samples.sample(op, name, "cpu")
        if sum(t.numel() for t in made.args if isinstance(t, torch.Tensor)) <= LARGEST:
            cases.append((op, name))
    for i, (op, name) in enumerate(cases[:: args.every]):
        samples.check_sample(op, name, samples.OUT_LAYOUTS[i % len(samples.OUT_LAYOUTS)], args.device)

    for bad in BAD:
        for op in (*samples.QUANT_OPS, "mxfp4_dequantize"):
            if op in samples.QUANT_OPS or bad[2] is None:
                call_with_bad_offsets(op, bad, args.device)
    # Small samples take the ways of many slots, too, when they must.
    routing = [case for case in cases if case[0] in (samples.METADATA_OP, samples.PERMUTE_OP)]
    for without in ("few_slots", "few_slots,clusters,dependent_launch"):
        os.environ["MXFP4_OPS_CUDA_WITHOUT"] = without
        for op, name in routing[:: 3 * args.every]:
            samples.check_sample(op, name, samples.OUT_LAYOUTS[0], args.device)
    os.environ["MXFP4_OPS_CUDA_WITHOUT"] = ""
    if args.device == "cuda":
        torch.cuda.synchronize()
    samples.check_sample(*cases[0], samples.OUT_LAYOUTS[0], args.device)
    print(f"OK: {len(cases[:: args.every])} samples, mxfp4_ops {mxfp4_ops.__version__} on {args.device}")


if __name__ == "__main__":
    main()
