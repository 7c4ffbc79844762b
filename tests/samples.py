"""One list of sample inputs per op, for correctness, opcheck and both devices, and the buffers of `.out` calls.

Samples and buffers lie in memory that is poisoned around and between their elements, so that a read beside a tensor
changes a result and a write beside one is seen.
"""

import ctypes
import functools
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import reference
import torch
from torch import Tensor

T = TypeVar("T")

BF16, FP16, I32, I64 = torch.bfloat16, torch.float16, torch.int32, torch.int64
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)

INPUT_POISON = 0x7F  # as a byte: huge as an integer, huge or NaN as a float
OUTPUT_POISON = 0xA5


@dataclass(frozen=True)
class Sample:
    name: str
    args: tuple
    kwargs: dict[str, object]


# Memory ---------------------------------------------------------------------------------------------------------------

GUARD = 33  # odd, so that what follows it is aligned to one element and no more


def _geometry(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int, int]:
    """(strides, offset, elements of the memory)."""
    columns = shape[-1]
    if layout == "expanded":
        strides = (0, 1) if len(shape) == 2 else (0,)
    elif layout == "transposed":
        strides = (1, max(shape[0], 1))
    elif layout == "padded_rows":  # aligned as well as the memory is
        strides = (columns + 128, 1)
    elif layout == "odd_rows":
        strides = (columns + 1 - columns % 2, 1)
    else:
        step = 2 if layout == "strided" else 1
        strides = (max(columns, 1) * step, step) if len(shape) == 2 else (step,)
    offset = 0 if layout in ("plain", "padded_rows") else GUARD
    guards = 0 if layout == "plain" else 2 * GUARD
    extent = sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides)) + 1
    return strides, offset, (0 if 0 in shape else extent) + guards


def _poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str, poison: int
) -> tuple[Tensor, Tensor]:
    """(the memory, uint8; the tensor in it)."""
    strides, offset, elements = _geometry(shape, layout)
    memory = torch.full((elements * dtype.itemsize,), poison, dtype=torch.uint8, device=device)
    return memory, memory.view(dtype).as_strided(shape, strides, offset)


def _as_integers(t: Tensor) -> Tensor:
    # Copies and comparisons of integers are there for every dtype, and exact.
    t = torch.view_as_real(t) if t.dtype == torch.complex128 else t
    return t.view({1: torch.uint8, 2: torch.int16, 4: I32, 8: I64}[t.element_size()])


def place(values: Tensor, layout: str, device: str) -> Tensor:
    """A copy of `values` in memory of its own.

    Layouts: plain; slice (aligned to one element); strided; transposed; padded_rows and odd_rows (columns next to each
    other, rows aligned as well as memory is, or not at all); expanded (the first row again and again, at stride 0).
    """
    _, view = _poisoned(tuple(values.shape), values.dtype, layout, device, INPUT_POISON)
    target, values = (t[:1] if layout == "expanded" else t for t in (view, values))
    _as_integers(target).copy_(_as_integers(values))
    return view


@dataclass(frozen=True)
class Buffer:
    """A result's buffer for an `.out` call, and the memory around it."""

    view: Tensor
    memory: Tensor

    def check(self, want: Tensor, case: str, any_nan: bool = False) -> None:
        """Raises unless the view holds `want` and all around it is poison still; then the view is poison again."""
        assert_same(self.view, want, case, any_nan=any_nan)
        integers = _as_integers(self.view)
        integers.copy_(torch.full((8,), _output_poison(want.dtype), dtype=torch.uint8).view(integers.dtype)[0])
        self.check_untouched(f"{case}, memory around the buffer")

    def check_untouched(self, case: str) -> None:
        assert_same(self.memory, torch.full_like(self.memory, _output_poison(self.view.dtype)), case)


OUT_LAYOUTS = ("plain", "slice", "strided")
OPTIONAL = ("blockscale_offsets", "sorted_expert_ids")


def _output_poison(dtype: torch.dtype) -> int:
    return INPUT_POISON if dtype in (I32, I64) else OUTPUT_POISON


def buffer(shape: Iterable[int], dtype: torch.dtype, layout: str, device: str) -> Buffer:
    memory, view = _poisoned(tuple(shape), dtype, layout, device, _output_poison(dtype))
    return Buffer(view, memory)


def buffers(op: str, name: str, device: str, layout: str = "plain", optional: bool = True) -> dict[str, Buffer]:
    """Poisoned buffers of every result of a sample by argument name; the optional ones left out if not `optional`."""
    return {
        result: buffer(want.shape, want.dtype, layout, device)
        for result, want in expected(op, name).items()
        if optional or result not in OPTIONAL
    }


GLIBC = platform.libc_ver()[0] == "glibc"


@contextmanager
def poisoned_allocator(device: str, sizes: list[int], poison: int = OUTPUT_POISON) -> Iterator[None]:
    """New tensors hold poison: on the CPU all (with glibc), on a GPU those of these sizes in bytes, each once."""
    if device == "cpu":
        mallopt, M_PERTURB = ctypes.CDLL(None).mallopt if GLIBC else lambda *_: None, -6
        mallopt(M_PERTURB, 0xFF ^ poison)  # malloc fills with the complement
        try:
            yield
        finally:
            mallopt(M_PERTURB, 0)
    else:
        torch.cuda.empty_cache()
        blocks = [torch.full((size,), poison, dtype=torch.uint8, device=device) for size in sizes if size]
        del blocks
        yield


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """A fresh Python that imports what this one can, the tests' modules too."""
    path = os.pathsep.join((os.path.dirname(__file__), *sys.path))
    environment = os.environ | {"PYTHONPATH": path} | env
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


# Comparison -----------------------------------------------------------------------------------------------------------


def assert_same(got: Tensor, want: Tensor, case: str, any_nan: bool = False) -> None:
    """Same dtype, shape and bytes; with `any_nan`, any NaN is as good as another."""
    assert got.dtype == want.dtype, f"{case}: {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{case}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got_bits, want_bits = (_as_integers(t).cpu() for t in (got, want))
    differs = got_bits != want_bits
    if any_nan:
        differs &= ~(got.isnan().cpu() & want.isnan().cpu())
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{case}: {int(differs.sum())} of {differs.numel()} elements differ, the first at {first}: "
            f"{got_bits[first].item():#x}, want {want_bits[first].item():#x}"
        )


# Values ---------------------------------------------------------------------------------------------------------------


def _patterns(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=rng).to(torch.uint16).view(dtype)


def _floats(rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator, exponents: int = 12) -> Tensor:
    """[rows, columns] of 16-bit floats: blocks of every magnitude, some of zeros, subnormals or any bit patterns."""
    shape = (rows, columns // 32, 32)
    scale = torch.randint(-exponents, exponents + 1, (*shape[:2], 1), generator=rng).float().exp2()
    x = (torch.randn(shape, generator=rng) * scale).to(dtype)
    kind = torch.randint(0, 20, (*shape[:2], 1), generator=rng)
    sign = torch.where(torch.rand(shape, generator=rng) < 0.5, -1.0, 1.0).to(dtype)
    subnormal = _patterns(1, {BF16: 0x80, FP16: 0x400}[dtype], shape, dtype, rng)
    x = torch.where(kind == 0, 0 * sign, x)
    x = torch.where(kind == 1, subnormal * sign, x)
    x = torch.where((kind == 2) | (kind == 3), _patterns(0, 1 << 16, shape, dtype, rng), x)
    return x.reshape(rows, columns)


def _rng(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


# Metadata -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Routing:
    m: int = 0
    topk: int = 1
    E: int = 4
    ids: list | None = None  # else random
    low: int = 0  # of the random ids, up to E
    global_experts: int | None = None
    expert_map: list[int] | None = None
    id_dtype: torch.dtype = I32
    layout: str = "plain"
    map_layout: str = "plain"
    is_gated: bool = True
    n: int = 96
    k: int = 64

    def build(self, name: str, device: str) -> Sample:
        if self.ids is None:
            high = self.E if self.global_experts is None else self.global_experts
            ids = torch.randint(self.low, high, (self.m, self.topk), generator=_rng(name))
        else:
            ids = torch.tensor(self.ids, dtype=I64)
        ids = ids.to(self.id_dtype)
        kwargs = {} if self.is_gated else {"is_gated": False}
        if self.expert_map is not None:
            kwargs["expert_map"] = place(torch.tensor(self.expert_map, dtype=I32), self.map_layout, device)
        return Sample(name, (place(ids, self.layout, device), self.E, self.n, self.k), kwargs)


def _ids_with_counts(*counts: int) -> list[list[int]]:
    """[R, 1] ids that give expert e counts[e] rows, in mixed order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=_rng(str(counts)))].unsqueeze(1).tolist()


_HALF_LOCAL = [e - 30 if 30 <= e < 60 else -1 for e in range(60)]
_BEYOND_INT32 = [[2**32, 2**32 + 1], [-(2**32), 2**63 - 1], [0, 1], [-(2**63), 3 + 2**40], [2**31, -(2**31) - 1]]

METADATA = {
    "m0": _Routing(m=0, topk=8),
    "m0_int64_E256": _Routing(m=0, topk=2, E=256, id_dtype=I64),
    "topk0": _Routing(m=3, topk=0, E=2),
    "m1_topk1_E1": _Routing(m=1, topk=1, E=1),
    "m1_topk3_E17": _Routing(m=1, topk=3, E=17, id_dtype=I64),
    "m1_topk8_E256": _Routing(m=1, topk=8, E=256),
    "m33_topk1_E1": _Routing(m=33, topk=1, E=1, id_dtype=I64),
    "m33_topk3_E20": _Routing(m=33, topk=3, E=20),
    "m33_topk8_E36": _Routing(m=33, topk=8, E=36, id_dtype=I64),
    "m33_topk8_E60": _Routing(m=33, topk=8, E=60, low=-5),
    "m33_topk8_E256": _Routing(m=33, topk=8, E=256),
    "m17_E128": _Routing(m=17, E=128),
    "m129_topk8_E512": _Routing(m=129, topk=8, E=512, low=-100),
    "m40_topk8_E1300": _Routing(m=40, topk=8, E=1300),
    "m2000_topk1_E3": _Routing(m=2000, topk=1, E=3, low=-1),
    "m4097_topk8_E256": _Routing(m=4097, topk=8, E=256, low=-20, id_dtype=I64),
    "not_gated": _Routing(m=33, topk=3, E=17, is_gated=False),
    "largest_sizes": _Routing(m=2, E=3, n=INT32_MAX // 2, k=INT32_MAX),
    "largest_n_not_gated": _Routing(m=2, E=3, n=INT32_MAX, k=1, is_gated=False),
    "counts_0_1_128_129": _Routing(E=5, ids=_ids_with_counts(0, 1, 128, 129, 0)),
    "all_to_the_last": _Routing(E=36, ids=[[35, 35, 35]] * 50),
    "minus_one": _Routing(E=2, ids=[[0, -1], [1, -1], [-1, -1]]),
    "beyond_E": _Routing(E=4, ids=[[5, 1], [4, 3], [INT32_MAX, INT32_MIN], [-7, 0]]),
    "no_expert_at_all": _Routing(E=17, ids=[[17, -1, 1000]] * 40),
    "int64_beyond_2^32": _Routing(E=4, ids=_BEYOND_INT32, id_dtype=I64),
    "map": _Routing(m=33, topk=8, E=30, global_experts=60, expert_map=_HALF_LOCAL),
    "map_int64": _Routing(m=33, topk=8, E=30, global_experts=60, expert_map=_HALF_LOCAL, id_dtype=I64),
    "map_longer_than_the_ids_need": _Routing(E=2, ids=[[0, 1], [2, 0]], expert_map=[1, 0, -1, 1, 0, 1, 0, 1]),
    "map_shorter_than_the_ids_need": _Routing(E=2, ids=[[0, 1], [2, 3], [-1, 4]], expert_map=[1, -1]),
    "map_empty": _Routing(E=2, ids=[[0, 1], [1, -1]], expert_map=[]),
    "map_to_beyond_E": _Routing(E=3, ids=[[0, 1], [2, 3]], expert_map=[3, 2, INT32_MAX, INT32_MIN]),
    "map_int64_beyond_2^32": _Routing(E=4, ids=_BEYOND_INT32, expert_map=[3, 2, 1, 0], id_dtype=I64),
    "map_of_m0": _Routing(m=0, topk=2, expert_map=[0, 1, 2, 3]),
    "map_slice": _Routing(
        m=33, topk=3, E=30, low=-2, global_experts=62, expert_map=_HALF_LOCAL, map_layout="slice"
    ),
    "map_expanded": _Routing(E=1, ids=[[0, 1], [2, -1]], expert_map=[0, 0, 0], map_layout="expanded"),
    "map_strided": _Routing(
        m=33, topk=3, E=30, low=-2, global_experts=62, expert_map=_HALF_LOCAL, map_layout="strided"
    ),
    "ids_slice": _Routing(m=33, topk=3, E=17, layout="slice"),
    "ids_slice_int64": _Routing(m=33, topk=3, E=17, layout="slice", id_dtype=I64),
    "ids_strided": _Routing(m=33, topk=3, E=17, low=-1, layout="strided"),
    "ids_transposed": _Routing(m=33, topk=8, E=20, layout="transposed", id_dtype=I64),
    "ids_padded_rows": _Routing(m=33, topk=8, E=36, layout="padded_rows"),
    "ids_expanded": _Routing(E=60, ids=[[7, 3, -1, 59]] * 33, layout="expanded"),
}


# The same with hidden states ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Permute(_Routing):
    K: int = 96
    dtype: torch.dtype = BF16
    x_layout: str = "plain"

    def build(self, name: str, device: str) -> Sample:
        routing = super().build(name, device)
        ids, E, n, _ = routing.args
        x = _floats(ids.shape[0], self.K, self.dtype, _rng(f"{name} x"))
        return Sample(name, (place(x, self.x_layout, device), ids, E, n), routing.kwargs)


PERMUTE = {
    "m0": _Permute(m=0, topk=8, K=64),
    "topk0": _Permute(m=3, topk=0, E=2, K=64, dtype=FP16),
    "m1_topk1_E1_K32": _Permute(m=1, topk=1, E=1, K=32),
    "m33_topk2_E17_K160": _Permute(m=33, topk=2, E=17, K=160, id_dtype=I64),
    "m0_int64_E256": _Permute(m=0, topk=2, E=256, K=7168, id_dtype=I64),
    "m1_topk3_E17_K2880_fp16": _Permute(m=1, topk=3, E=17, K=2880, dtype=FP16, id_dtype=I64),
    "m1_topk8_E256_K7168": _Permute(m=1, topk=8, E=256, K=7168),
    "m33_topk1_E1_K2880": _Permute(m=33, topk=1, E=1, K=2880),
    "m33_topk3_E20_K160_fp16": _Permute(m=33, topk=3, E=20, K=160, dtype=FP16),
    "m33_topk8_E36_K32": _Permute(m=33, topk=8, E=36, K=32, low=-3, id_dtype=I64),
    "m33_topk8_E60_K96_fp16": _Permute(m=33, topk=8, E=60, low=-5, dtype=FP16),
    "m33_topk2_E256_K7168_fp16": _Permute(m=33, topk=2, E=256, K=7168, dtype=FP16),
    "m300_topk3_E2_K1056": _Permute(m=300, topk=3, E=2, K=1056),
    "m129_topk8_E1300": _Permute(m=129, topk=8, E=1300, low=-100),
    "m3_topk2_E3000_K1024": _Permute(m=3, topk=2, E=3000, K=1024, low=-100),
    "m20_topk40_E60_K1056": _Permute(m=20, topk=40, E=60, K=1056, low=-9, id_dtype=I64),
    "m4097_topk8_E128_K32": _Permute(m=4097, topk=8, E=128, K=32, low=-10, id_dtype=I64),
    "m5000_topk1_E3": _Permute(m=5000, topk=1, E=3, low=-1),
    "m80_topk2_E20_K7168": _Permute(m=80, topk=2, E=20, K=7168, low=-2),
    "m525_topk8_E17_K1056": _Permute(m=525, topk=8, E=17, K=1056, low=-2, id_dtype=I64),
    "counts_0_1_128_129": _Permute(E=5, ids=_ids_with_counts(0, 1, 128, 129, 0), K=160),
    "one_expert_thrice": _Permute(E=36, ids=[[35, 35, 35]] * 50),
    "minus_one": _Permute(E=2, ids=[[0, -1], [1, -1], [-1, -1]]),
    "beyond_E": _Permute(E=4, ids=[[5, 1], [4, 3], [INT32_MAX, INT32_MIN], [-7, 0]], dtype=FP16),
    "first_slots_have_none": _Permute(E=3, ids=[[-1, 3, 2], [-1, -1, -1], [9, 0, 1]] * 11, K=160),
    "no_expert_at_all": _Permute(E=17, ids=[[17, -1, 1000]] * 40),
    "int64_beyond_2^32": _Permute(E=4, ids=_BEYOND_INT32, id_dtype=I64),
    "not_gated": _Permute(m=33, topk=3, E=17, is_gated=False),
    "map": _Permute(m=33, topk=8, E=30, global_experts=60, expert_map=_HALF_LOCAL, K=160),
    "map_int64": _Permute(m=33, topk=8, E=30, global_experts=60, expert_map=_HALF_LOCAL, id_dtype=I64),
    "map_empty": _Permute(E=2, ids=[[0, 1], [1, -1]], expert_map=[]),
    "map_to_beyond_E": _Permute(E=3, ids=[[0, 1], [2, 3]], expert_map=[3, 2, INT32_MAX, INT32_MIN]),
    "map_strided": _Permute(
        m=33, topk=3, E=30, low=-2, global_experts=62, expert_map=_HALF_LOCAL, map_layout="strided"
    ),
    "ids_slice": _Permute(m=33, topk=3, E=17, layout="slice"),
    "ids_strided": _Permute(m=33, topk=3, E=17, low=-1, layout="strided", id_dtype=I64),
    "ids_transposed": _Permute(m=33, topk=8, E=20, layout="transposed"),
    "ids_expanded": _Permute(E=60, ids=[[7, 3, -1, 59]] * 33, layout="expanded"),
    "x_slice": _Permute(m=33, topk=3, E=17, K=160, x_layout="slice"),
    "x_padded_rows": _Permute(m=33, topk=3, E=17, x_layout="padded_rows"),
    "x_odd_rows": _Permute(m=33, topk=2, E=17, x_layout="odd_rows", dtype=FP16),
    "x_strided": _Permute(m=33, topk=3, E=17, x_layout="strided"),
    "x_transposed": _Permute(m=33, topk=2, E=17, K=160, x_layout="transposed", dtype=FP16),
    "x_expanded": _Permute(m=33, topk=3, E=17, K=160, x_layout="expanded"),
    "x_one_padded_row": _Permute(m=1, topk=3, E=17, x_layout="padded_rows"),
}


# shuffle_rows ---------------------------------------------------------------------------------------------------------

_MAP = [2, 0, 0, -1, 3, 1, INT32_MAX, INT32_MIN]
_MAP_INT64 = [*_MAP, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)]


@dataclass(frozen=True, kw_only=True)
class _Shuffle:
    dtype: torch.dtype
    rows: int = 3
    width: int = 8
    map: list[int] | None = None  # else _MAP
    map_rows: int | None = None  # else random with so many rows
    map_dtype: torch.dtype = I32
    layout: str = "plain"
    map_layout: str = "plain"

    def build(self, name: str, device: str) -> Sample:
        rng = _rng(name)
        row_bytes = self.width * self.dtype.itemsize
        values = torch.randint(0, 2 if self.dtype == torch.bool else 256, (self.rows, row_bytes), generator=rng)
        values = values.to(torch.uint8).view(-1).view(self.dtype).reshape(self.rows, self.width)
        if self.map_rows is not None:
            rows = torch.randint(-1, self.rows + 1, (self.map_rows,), generator=rng)
        else:
            rows = torch.tensor(self.map or (_MAP_INT64 if self.map_dtype == I64 else _MAP))
        dst2src_map = place(rows.to(self.map_dtype), self.map_layout, device)
        return Sample(name, (place(values, self.layout, device), dst2src_map), {})


SHUFFLE = {
    "uint8_20": _Shuffle(dtype=torch.uint8, width=20),
    "uint8_1": _Shuffle(dtype=torch.uint8, width=1, map_dtype=I64),
    "int8_33": _Shuffle(dtype=torch.int8, width=33),
    "bool_5": _Shuffle(dtype=torch.bool, width=5),
    "fp8_e4m3_8": _Shuffle(dtype=torch.float8_e4m3fn, width=8),
    "fp8_e5m2_9": _Shuffle(dtype=torch.float8_e5m2, width=9, map_dtype=I64),
    "e8m0_3": _Shuffle(dtype=torch.float8_e8m0fnu, width=3),
    "fp4_16": _Shuffle(dtype=torch.float4_e2m1fn_x2, width=16),
    "fp4_5": _Shuffle(dtype=torch.float4_e2m1fn_x2, width=5, map_dtype=I64),
    "int16_3": _Shuffle(dtype=torch.int16, width=3),
    "bf16_7": _Shuffle(dtype=BF16, width=7),
    "bf16_8_int64": _Shuffle(dtype=BF16, width=8, map_dtype=I64),
    "fp16_32": _Shuffle(dtype=FP16, width=32),
    "int32_1": _Shuffle(dtype=I32, width=1),
    "fp32_6": _Shuffle(dtype=torch.float32, width=6),
    "int64_5": _Shuffle(dtype=I64, width=5, map_dtype=I64),
    "fp64_3": _Shuffle(dtype=torch.float64, width=3),
    "complex64_2": _Shuffle(dtype=torch.complex64, width=2),
    "complex128_1": _Shuffle(dtype=torch.complex128, width=1),
    "bf16_2880_from_33_to_264": _Shuffle(dtype=BF16, rows=33, width=2880, map_rows=264),
    "bf16_7168_from_5_to_40": _Shuffle(dtype=BF16, rows=5, width=7168, map_rows=40, map_dtype=I64),
    "uint8_48_from_300_to_7": _Shuffle(dtype=torch.uint8, rows=300, width=48, map_rows=7),
    "uint8_3_to_70000": _Shuffle(dtype=torch.uint8, width=3, map_rows=70_000),
    "empty_map": _Shuffle(dtype=BF16, width=64, map_rows=0),
    "empty_input": _Shuffle(dtype=BF16, rows=0, width=64),
    "both_empty": _Shuffle(dtype=torch.uint8, rows=0, width=20, map_rows=0, map_dtype=I64),
    "no_columns": _Shuffle(dtype=BF16, width=0),
    "one_row": _Shuffle(dtype=BF16, rows=1, width=40, layout="padded_rows"),
    "slice": _Shuffle(dtype=torch.uint8, width=32, layout="slice"),
    "slice_bf16": _Shuffle(dtype=BF16, width=64, layout="slice"),
    "padded_rows": _Shuffle(dtype=BF16, rows=33, width=64, map_rows=64, layout="padded_rows"),
    "odd_rows": _Shuffle(dtype=torch.float32, rows=33, width=96, map_rows=64, layout="odd_rows"),
    "strided": _Shuffle(dtype=FP16, width=48, layout="strided"),
    "strided_fp4": _Shuffle(dtype=torch.float4_e2m1fn_x2, width=16, layout="strided"),
    "strided_bool": _Shuffle(dtype=torch.bool, width=6, layout="strided"),
    "transposed": _Shuffle(dtype=I32, rows=5, width=12, layout="transposed"),
    "expanded": _Shuffle(dtype=BF16, rows=9, width=40, map_rows=30, layout="expanded"),
    "map_slice": _Shuffle(dtype=BF16, width=16, map_layout="slice"),
    "map_slice_int64": _Shuffle(dtype=BF16, width=16, map_layout="slice", map_dtype=I64),
    "map_strided": _Shuffle(dtype=BF16, width=16, map_layout="strided"),
    "map_expanded": _Shuffle(dtype=BF16, width=16, map_layout="expanded"),
    "map_strided_int64": _Shuffle(dtype=BF16, width=16, map_layout="strided", map_dtype=I64),
}


# Quantisation ---------------------------------------------------------------------------------------------------------


def _random_counts(R: int, E: int) -> tuple[int, ...]:
    return tuple(torch.bincount(torch.randint(0, E, (R,), generator=_rng(f"{R} {E}")), minlength=E).tolist())


def _offsets(counts: tuple[int, ...], skipped: int = 0) -> tuple[Tensor, Tensor]:
    """int32 [E + 1] each, the scales starting after `skipped` rows that no expert has."""
    count = torch.tensor((0, *counts))
    return count.cumsum(0).to(I32), (skipped + ((count + 127) // 128 * 128).cumsum(0)).to(I32)


@dataclass(frozen=True, kw_only=True)
class _Quant:
    counts: tuple[int, ...]
    K: int = 32
    tail: int = 0  # rows that have no expert
    dtype: torch.dtype = BF16
    ids: str | None = None  # sorted_expert_ids: "all", or "holes"
    layout: str = "plain"
    offsets_layout: str = "plain"
    ids_layout: str = "plain"
    skipped: int = 0

    def build(self, name: str, device: str, silu: bool) -> Sample:
        rng = _rng(name)
        valid, E = sum(self.counts), len(self.counts)
        R = valid + self.tail
        x = _floats(R, self.K, self.dtype, rng)
        if silu:
            x = torch.cat((_floats(R, self.K, self.dtype, rng, exponents=3), x), dim=1)
        _as_integers(x)[valid:] = 0x7F7F
        x = place(x, self.layout, device)
        offsets, scale_offsets = _offsets(self.counts, self.skipped)
        args = [x, *(place(t, self.offsets_layout, device) for t in (offsets, scale_offsets)), E]
        if self.ids is not None:
            ids = reference.row_experts(R, offsets, E).to(I32)
            if self.ids == "holes":
                none = torch.tensor([-1, E, 4500, INT32_MIN, INT32_MAX], dtype=I32)
                ids = torch.where(torch.arange(R) % 3 == 1, none[torch.arange(R) % 5], ids)
            args.append(place(ids, self.ids_layout, device))
        return Sample(name, tuple(args), {})


_EDGE_COUNTS = (0, 1, 128, 129, 0)

QUANT = {
    "R0": _Quant(counts=(0, 0), K=64),
    "R0_ids": _Quant(counts=(0,), K=96, ids="all"),
    "R1_K32": _Quant(counts=(1,)),
    "R1_K160_fp16_ids": _Quant(counts=(0, 1), K=160, dtype=FP16, ids="all"),
    "R33_K96_E17": _Quant(counts=_random_counts(33, 17), K=96),
    "R99_K2880_E20": _Quant(counts=_random_counts(99, 20), K=2880),
    "R99_K2880_E20_fp16_ids": _Quant(counts=_random_counts(99, 20), K=2880, dtype=FP16, ids="all"),
    "R264_K160_E36_ids": _Quant(counts=_random_counts(264, 36), K=160, ids="all"),
    "R264_K96_E60_tail_fp16": _Quant(counts=_random_counts(200, 60), tail=64, K=96, dtype=FP16),
    "R264_K160_E256_ids_tail": _Quant(counts=_random_counts(250, 256), tail=14, K=160, ids="all"),
    "R8_K7168_E256": _Quant(counts=_random_counts(8, 256), K=7168),
    "R24_K7168_E64_fp16_ids": _Quant(counts=_random_counts(24, 64), K=7168, dtype=FP16, ids="all"),
    "R1025_K160_E3": _Quant(counts=(513, 0, 512), K=160),
    "R4096_K32_E17_ids": _Quant(counts=_random_counts(4000, 17), tail=96, ids="all"),
    "R300_K1056_E1_fp16": _Quant(counts=(300,), K=1056, dtype=FP16),
    "R300_K96_E1300": _Quant(counts=_random_counts(300, 1300), K=96),
    "counts_0_1_128_129": _Quant(counts=_EDGE_COUNTS, K=96, tail=3),
    "counts_0_1_128_129_ids_fp16": _Quant(counts=_EDGE_COUNTS, K=128, tail=3, ids="all", dtype=FP16),
    "holes": _Quant(counts=(9, 0, 20, 4), K=96, tail=5, ids="holes"),
    "holes_fp16": _Quant(counts=_EDGE_COUNTS, K=160, ids="holes", dtype=FP16),
    "no_expert_at_all": _Quant(counts=(0,) * 17, tail=33, K=160),
    "no_expert_at_all_ids": _Quant(counts=(0,) * 17, tail=33, K=160, ids="all"),
    "scales_start_late": _Quant(counts=(3, 0, 2), K=96, tail=1, skipped=128),
    "scales_start_late_ids": _Quant(counts=(3, 0, 2), K=96, tail=1, skipped=128, ids="all"),
    "x_slice": _Quant(counts=(5, 28), K=160, layout="slice"),
    "x_padded_rows": _Quant(counts=(5, 28), K=96, layout="padded_rows", ids="all"),
    "x_odd_rows": _Quant(counts=(5, 28), K=96, layout="odd_rows"),
    "x_strided": _Quant(counts=(5, 28), K=96, layout="strided", dtype=FP16),
    "x_transposed": _Quant(counts=(5, 28), K=160, layout="transposed", ids="all"),
    "x_expanded": _Quant(counts=(5, 28), K=160, layout="expanded"),
    "x_one_padded_row": _Quant(counts=(1,), K=96, layout="padded_rows"),
    "offsets_slice": _Quant(counts=_random_counts(33, 17), K=96, offsets_layout="slice"),
    "offsets_slice_ids": _Quant(counts=_random_counts(33, 20), K=96, offsets_layout="slice", ids="all"),
    "offsets_strided": _Quant(counts=_random_counts(33, 60), K=96, offsets_layout="strided", tail=2),
    "ids_slice": _Quant(counts=_random_counts(33, 36), K=96, ids="all", ids_layout="slice"),
    "ids_expanded": _Quant(counts=(33,), K=96, ids="all", ids_layout="expanded"),
    "ids_strided_holes": _Quant(counts=_random_counts(33, 36), K=96, ids="holes", ids_layout="strided", tail=2),
}


# Dequantisation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Dequant:
    counts: tuple[int, ...]
    K: int = 32
    tail: int = 0
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    scale_layout: str = "plain"
    offsets_layout: str = "plain"
    skipped: int = 0
    more_scale_rows: int = 0

    def build(self, name: str, device: str) -> Sample:
        rng = _rng(name)
        R, E = sum(self.counts) + self.tail, len(self.counts)
        S = reference.scale_rows(R, E) + self.more_scale_rows
        packed, scale = (
            torch.randint(0, 256, shape, generator=rng).to(torch.uint8)
            for shape in ((R, self.K // 2), (S, 4 * reference.scale_tiles(self.K)))
        )
        offsets = (place(t, self.offsets_layout, device) for t in _offsets(self.counts, self.skipped))
        args = (place(packed, self.layout, device), place(scale, self.scale_layout, device), *offsets)
        return Sample(name, args, {"dtype": self.dtype})


DEQUANT = {
    "R0": _Dequant(counts=(0, 0), K=64),
    "R0_bf16": _Dequant(counts=(0,), K=96, dtype=BF16),
    "R1_K32": _Dequant(counts=(1,)),
    "R1_K160_fp16": _Dequant(counts=(0, 1), K=160, dtype=FP16),
    "R33_K96_E17_bf16": _Dequant(counts=_random_counts(33, 17), K=96, dtype=BF16),
    "R99_K2880_E20": _Dequant(counts=_random_counts(99, 20), K=2880),
    "R99_K2880_E36_bf16": _Dequant(counts=_random_counts(99, 36), K=2880, dtype=BF16),
    "R264_K160_E60_tail_fp16": _Dequant(counts=_random_counts(200, 60), tail=64, K=160, dtype=FP16),
    "R264_K96_E256_tail_bf16": _Dequant(counts=_random_counts(250, 256), tail=14, K=96, dtype=BF16),
    "R8_K7168_E256": _Dequant(counts=_random_counts(8, 256), K=7168, dtype=BF16),
    "R2000_K32_E3_fp16": _Dequant(counts=(1000, 0, 900), tail=100, dtype=FP16),
    "counts_0_1_128_129": _Dequant(counts=_EDGE_COUNTS, K=96, tail=3),
    "no_expert_at_all": _Dequant(counts=(0,) * 17, tail=33, K=160, dtype=BF16),
    "scales_start_late": _Dequant(counts=(3, 0, 2), K=96, tail=1, skipped=128),
    "more_scale_rows": _Dequant(counts=(3, 0, 2), K=96, more_scale_rows=256, skipped=384, dtype=FP16),
    "packed_slice": _Dequant(counts=(5, 28), K=160, layout="slice"),
    "packed_padded_rows": _Dequant(counts=(5, 28), K=96, layout="padded_rows", dtype=BF16),
    "packed_odd_rows": _Dequant(counts=(5, 28), K=96, layout="odd_rows"),
    "packed_strided": _Dequant(counts=(5, 28), K=96, layout="strided", dtype=FP16),
    "packed_transposed": _Dequant(counts=(5, 28), K=160, layout="transposed"),
    "packed_expanded": _Dequant(counts=(5, 28), K=160, layout="expanded"),
    "scale_slice": _Dequant(counts=(5, 28), K=160, scale_layout="slice"),
    "scale_strided": _Dequant(counts=(5, 28), K=96, scale_layout="strided", dtype=BF16),
    "scale_transposed": _Dequant(counts=(5, 28), K=160, scale_layout="transposed"),
    "offsets_slice": _Dequant(counts=_random_counts(33, 17), K=96, offsets_layout="slice"),
    "offsets_strided": _Dequant(counts=_random_counts(33, 20), K=96, offsets_layout="strided", tail=2),
}


# All ops --------------------------------------------------------------------------------------------------------------

METADATA_OP = "get_cutlass_moe_mm_data"
PERMUTE_OP = "moe_permute_mxfp4_quant"
SILU = "silu_and_mul_mxfp4_experts_quant"
QUANT_OPS = ("mxfp4_experts_quant", SILU)
ROUTING_OPS = (METADATA_OP, PERMUTE_OP)

SAMPLES: dict[str, dict[str, object]] = {
    METADATA_OP: METADATA,
    PERMUTE_OP: PERMUTE,
    "shuffle_rows": SHUFFLE,
    "mxfp4_experts_quant": QUANT,
    SILU: QUANT,
    "mxfp4_dequantize": DEQUANT,
}
CASES = [(op, name) for op, by_name in SAMPLES.items() for name in by_name]


def sample(op: str, name: str, device: str) -> Sample:
    """A sample of the op, made anew."""
    spec = SAMPLES[op][name]
    return spec.build(name, device, op == SILU) if op in QUANT_OPS else spec.build(name, device)


def oracle(op: str, args: tuple, kwargs: dict[str, object], output_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The results by name that tests/reference.py gives; `output_scale` as in reference.experts_quant."""
    if op == METADATA_OP:
        return reference.metadata(*args, **kwargs)
    if op == PERMUTE_OP:
        return reference.moe_permute_mxfp4_quant(*args, **kwargs, output_scale=output_scale)
    if op == "shuffle_rows":
        return {"output": reference.shuffle_rows(*args)}
    if op == "mxfp4_dequantize":
        return {"output": reference.dequantize(*args, **kwargs)}
    results = reference.experts_quant(*args, silu=op == SILU, output_scale=output_scale)
    return dict(zip(("output", "output_scale"), results))


@functools.cache
def expected(op: str, name: str, out: bool = False) -> dict[str, Tensor]:
    """The oracle's results of a sample; with `out`, what an `.out` call leaves in poisoned buffers."""
    made = sample(op, name, "cpu")
    if not out or op not in (*QUANT_OPS, PERMUTE_OP):
        return oracle(op, made.args, made.kwargs)
    padding = torch.full_like(expected(op, name)["output_scale"], OUTPUT_POISON)
    return oracle(op, made.args, made.kwargs, padding)


def overload(op: str, name: str) -> Callable:
    """torch.ops.mxfp4_ops.<op>.<name>"""
    return getattr(getattr(torch.ops.mxfp4_ops, op), name)


def results(op: str, returned: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What a functional overload returned, by name."""
    values = (returned,) if isinstance(returned, Tensor) else returned
    return dict(zip((r.name or "output" for r in overload(op, "default")._schema.returns), values, strict=True))


def check_sample(op: str, name: str, layout: str, device: str) -> None:
    """Both overloads against the oracle; the buffers of `.out` are laid out as `layout` says."""
    any_nan = op == "mxfp4_dequantize"
    made, want = sample(op, name, device), expected(op, name)
    got = results(op, overload(op, "default")(*made.args, **made.kwargs))
    for result, t in want.items():
        assert_same(got[result], t, f"{op} {name} {result}", any_nan)

    want = expected(op, name, out=True)
    out = buffers(op, name, device, layout)
    overload(op, "out")(*made.args, **made.kwargs, **{result: b.view for result, b in out.items()})
    for result, b in out.items():
        b.check(want[result], f"{op} {name} {result} into a {layout} buffer", any_nan)


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of `call`, warmed up on a side stream, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results
