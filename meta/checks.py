"""Argument checks of the fakes: the same checks, in the same order, with the same words as csrc/host/checks.h.

They run under symbolic shapes, so a condition goes through ``torch._check``, which turns one on sizes into a guard or a
runtime assertion instead of a branch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def _sizes(sizes: Sequence[int | torch.SymInt]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


class Checks:
    """The checks of one call of ``op``; a failed one raises RuntimeError: argument, what it must be, what it was."""

    def __init__(self, op: str) -> None:
        self.op = op

    def require(self, condition: "bool | torch.SymBool", arg: str, must: str, got: object) -> None:
        torch._check(condition, lambda: f"{self.op}: {arg} must {must}, got {got}")

    def given(self, arg: str, t: Tensor | None) -> None:
        self.require(t is not None, arg, "be a tensor", None)

    def dtype(self, arg: str, t: Tensor, *allowed: torch.dtype) -> None:
        self.given(arg, t)
        self.one_of(arg, t.dtype, *allowed, must="have dtype")

    def one_of(self, arg: str, dtype: torch.dtype, *allowed: torch.dtype, must: str = "be") -> None:
        self.require(dtype in allowed, arg, f"{must} " + " or ".join(str(a) for a in allowed), dtype)

    def dims(self, arg: str, t: Tensor, dim: int, layout: str) -> None:
        self.given(arg, t)
        self.require(t.dim() == dim, arg, f"be {dim}-dimensional {layout}", f"shape {_sizes(t.shape)}")

    def shape(self, arg: str, t: Tensor, sizes: Sequence[int | torch.SymInt], layout: str) -> None:
        must, got = f"have shape {layout} = {_sizes(sizes)}", f"shape {_sizes(t.shape)}"
        self.require(t.dim() == len(sizes), arg, must, got)
        for actual, expected in zip(t.shape, sizes, strict=True):
            self.require(actual == expected, arg, must, got)

    def device(self, arg: str, t: Tensor, like_arg: str, like: Tensor) -> None:
        self.require(t.device == like.device, arg, f"be on the device of {like_arg} ({like.device})", t.device)

    def at_least(self, arg: str, value: "int | torch.SymInt", low: int) -> None:
        self.require(value >= low, arg, f"be at least {low}", value)

    def at_most(self, arg: str, value: "int | torch.SymInt", high: int) -> None:
        self.require(value <= high, arg, f"be at most {high}", value)

    def columns(self, arg: str, width: "int | torch.SymInt", unit: int, layout: str) -> None:
        must = f"have a positive multiple of {unit} columns {layout}"
        self.require(width > 0, arg, must, width)
        self.require(width % unit == 0, arg, must, width)

    def column_count(self, arg: str, width: "int | torch.SymInt") -> None:
        if isinstance(width, int):  # as in row_count
            self.require(width <= INT32_MAX, arg, "have fewer than 2^31 columns", width)

    def row_count(self, arg: str, rows: "int | torch.SymInt", scale_rows: "int | torch.SymInt") -> None:
        # A bound on a symbolic batch would narrow the range that the user declared for it; the kernel checks it anyway.
        if isinstance(rows, int):
            self.require(rows <= INT32_MAX, arg, "have fewer than 2^31 routed rows", rows)
        if isinstance(scale_rows, int):
            self.require(scale_rows <= INT32_MAX, arg, "need fewer than 2^31 scale rows", scale_rows)

    def writable(self, arg: str, t: Tensor) -> None:
        for i, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if isinstance(stride, int) and stride == 0:
                self.require(size <= 1, arg, "not be expanded", f"stride 0 in dimension {i}")

    def exact(self, arg: str, t: Tensor, dtype: torch.dtype, sizes, layout: str, like_arg: str, like: Tensor) -> None:
        self.dtype(arg, t, dtype)
        self.shape(arg, t, sizes, layout)
        self.device(arg, t, like_arg, like)

    def buffer(self, arg: str, t: Tensor, dtype: torch.dtype, sizes, layout: str, like_arg: str, like: Tensor) -> None:
        self.exact(arg, t, dtype, sizes, layout, like_arg, like)
        self.writable(arg, t)
