"""What is timed: each job with our variants of it, its peers, the bytes that it must move and what it must give."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..meta.shapes import BLOCK, experts_quant_shapes, metadata_shapes
from ..ops import MoEMetadata, QuantizedRows
from . import plain
from .routing import topk_ids
from .timing import Call

POISON = 0xA5  # in every byte of the buffers of an `.out` call before it is checked
PEERS = ("torch", "compile")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Size:
    """Experts, tokens, experts a token, quantised columns."""

    E: int
    m: int
    topk: int
    K: int

    @property
    def R(self) -> int:
        """Routed rows."""
        return self.m * self.topk

    def __str__(self) -> str:
        return f"E={self.E} m={self.m} topk={self.topk} K={self.K}"


@dataclass(frozen=True)
class Settings:
    """What all jobs of a run share."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    functional: bool = False
    routing: str = "uniform"
    no_expert: float = 0.0
    routings: int = 8
    n: int = 2048
    seed: int = 0
    peers: tuple[str, ...] = PEERS


@dataclass(frozen=True)
class Variant:
    """One way to do a job."""

    name: str
    calls: tuple[Call, ...]
    """One for each routing."""
    is_peer: bool = False
    may_differ: float = 0.0
    """Fraction of the bytes that need not equal the reference."""


@dataclass(frozen=True)
class Job:
    """A job at a size."""

    name: str
    size: Size
    nbytes: int
    """The fewest that it can move: each input read once, each result written once."""
    results: tuple[str, ...]
    """Their names, in order."""
    variants: tuple[Variant, ...]
    expected: Callable[[int], tuple[Tensor, ...]]
    """The results under a routing, by the reference."""
    buffers: tuple[Tensor, ...]
    """What `.out` calls write."""
    add: Call
    """torch.add on the job's input."""

    def verify(self) -> dict[str, str]:
        """By variant, what is wrong with its results: empty when every byte is right under every routing."""
        wrong: dict[str, str] = {}
        for routing in range(len(self.variants[0].calls)):
            expected = self.expected(routing)
            for variant in self.variants:
                if variant.name in wrong:
                    continue
                self._poison(expected)
                try:
                    got = variant.calls[routing]()
                    got = got if isinstance(got, tuple) else (got,)
                except RuntimeError as error:
                    # A peer may not compile or may not fit. An error of ours is no result of a benchmark.
                    if not variant.is_peer:
                        raise
                    wrong[variant.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                    continue
                for name, g, e in zip(self.results, got, expected, strict=True):
                    if difference := _difference(g, e, variant.may_differ):
                        wrong[variant.name] = f"{name} {difference} (routing {routing})"
                        break
        return wrong

    def _poison(self, expected: tuple[Tensor, ...]) -> None:
        for buffer in self.buffers:
            _poison(buffer)
        # The allocator hands freed memory out again: what a call leaves unwritten there must not be an old right result.
        fresh = [_poison(torch.empty_like(t)) for t in expected]
        del fresh


def _poison(t: Tensor) -> Tensor:
    t.view(-1).view(torch.uint8).fill_(POISON)
    return t


def _difference(got: Tensor, expected: Tensor, may_differ: float) -> str | None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"must be {expected.dtype} {list(expected.shape)}, got {got.dtype} {list(got.shape)}"
    got, expected = (t.contiguous().view(-1).view(torch.uint8) for t in (got, expected))
    different = got != expected
    count = int(different.sum())
    if count <= math.ceil(may_differ * expected.numel()):
        return None
    first = int(different.int().argmax())
    return f"differs in {count} of {expected.numel()} bytes, first in byte {first}: {got[first]}, not {expected[first]}"


class Inputs:
    """The tensors of a size under each routing. Hidden states and rows are the same under all of them."""

    def __init__(self, size: Size, settings: Settings):
        self.size, self.settings = size, settings
        # Of the size alone, whatever else is run.
        generator = torch.Generator().manual_seed(settings.seed)
        ids = [
            topk_ids(settings.routing, size.m, size.topk, size.E, settings.no_expert, generator)
            for _ in range(settings.routings)
        ]
        self.topk_ids = [i.to(settings.device) for i in ids]
        self.metadata = [plain.metadata(i, size.E, settings.n, size.K) for i in self.topk_ids]
        self.hidden = self._random(size.m, size.K)

    @functools.cached_property
    def rows(self) -> Tensor:
        """[R, K], sorted rows."""
        return self._random(self.size.R, self.size.K)

    @functools.cached_property
    def gate_up(self) -> Tensor:
        """[R, 2K], sorted rows. Gates are tens at most, as in models: far beyond, silu is zero or the gate itself."""
        values = self._random(self.size.R, 2 * self.size.K)
        values[:, : self.size.K] *= 2**-3
        return values

    def _random(self, rows: int, columns: int) -> Tensor:
        """Normal values whose magnitude varies from block to block: were all scales alike, none could be misplaced."""
        device, dtype = self.settings.device, self.settings.dtype
        generator = torch.Generator(device).manual_seed(self.settings.seed)
        values = torch.randn(rows, columns // BLOCK, BLOCK, dtype=dtype, device=device, generator=generator)
        exponent = torch.randint(-6, 7, (rows, columns // BLOCK, 1), device=device, generator=generator)
        return values.mul_(exponent.to(dtype).exp2()).flatten(1)

    def rows_with_expert(self) -> float:
        """Mean over the routings."""
        return sum(int(data.expert_offsets[-1]) for data in self.metadata) / len(self.metadata)


Spec = dict[str, tuple[Sequence[int], torch.dtype]]
"""Results by name: shape and dtype."""


class _Builder:
    """Makes the jobs of a size."""

    def __init__(self, inputs: Inputs):
        self.inputs, self.size, self.settings = inputs, inputs.size, inputs.settings
        size = self.size
        self.metadata_spec: Spec = {
            name: (shape, torch.int32)
            for name, shape in zip(MoEMetadata._fields, metadata_shapes(size.m, size.topk, size.E), strict=True)
        }
        self.rows_spec: Spec = {"output": ((size.R, size.K), self.settings.dtype)}
        self.quant_spec: Spec = {
            name: (shape, torch.uint8)
            for name, shape in zip(QuantizedRows._fields, experts_quant_shapes(size.R, size.K, size.E), strict=True)
        }
        self.buffers: list[Tensor] = []

    # Calls

    def op(self, name: str, spec: Spec) -> Callable[..., object]:
        """An op in the overload that the run is about: functional, or `.out` into buffers of its own."""
        packet = getattr(torch.ops.mxfp4_ops, name)
        if self.settings.functional:
            return packet.default
        out = {result: self._buffer(shape, dtype) for result, (shape, dtype) in spec.items()}
        written = tuple(out.values())

        def call(*args: object) -> tuple[Tensor, ...]:
            packet.out(*args, **out)
            return written

        return call

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.empty(shape, dtype=dtype, device=self.settings.device))
        return self.buffers[-1]

    def peers(self, function: Callable, arguments: Sequence[tuple], may_differ: float = 0.0) -> list[Variant]:
        """The peers that were asked for: a function of `plain`, as it is and compiled."""
        made = {"torch": lambda: function, "compile": lambda: torch.compile(function, fullgraph=True, dynamic=False)}
        return [
            Variant(name, _calls(made[name](), arguments), is_peer=True, may_differ=may_differ)
            for name in self.settings.peers
        ]

    def flat_scale(self) -> Tensor | None:
        """The scale buffer of a peer: none in a functional call."""
        if self.settings.functional:
            return None
        return self._buffer((self._scale_bytes() + 1,), torch.uint8)

    # What is moved and what is expected

    def _scale_bytes(self) -> int:
        return math.prod(self.quant_spec["output_scale"][0])

    def written(self, spec: Spec) -> int:
        """Bytes of the results; of scales in an `.out` call, those of rows that have an expert."""
        total = 0
        for name, (shape, dtype) in spec.items():
            if name == "output_scale" and not self.settings.functional:
                total += round(self.inputs.rows_with_expert() * self.size.K / BLOCK)
            else:
                total += math.prod(shape) * dtype.itemsize
        return total

    def placed(self, codes: Tensor, scales: Tensor, data: MoEMetadata) -> QuantizedRows:
        """The reference: quantised rows where a routing has them, what `.out` leaves alone poisoned."""
        flat = None
        if not self.settings.functional:
            flat = _poison(scales.new_empty(self._scale_bytes() + 1))
        return plain.place(codes, scales, *_where(data), flat)

    def job(self, name: str, nbytes: int, results: Spec, variants: list[Variant], expected: Callable, x: Tensor) -> Job:
        return Job(
            name=name,
            size=self.size,
            nbytes=nbytes,
            results=tuple(results),
            variants=tuple(variants),
            expected=expected,
            buffers=tuple(self.buffers),
            add=functools.partial(torch.add, x, x),
        )

    # The jobs

    def metadata(self) -> Job:
        size, inputs = self.size, self.inputs
        arguments = [(ids, size.E, self.settings.n, size.K) for ids in inputs.topk_ids]
        op = self.op("get_cutlass_moe_mm_data", self.metadata_spec)
        ids = inputs.topk_ids[0]
        return self.job(
            "metadata",
            ids.nbytes + self.written(self.metadata_spec),
            self.metadata_spec,
            [Variant("op", _calls(op, arguments)), *self.peers(plain.metadata, arguments)],
            lambda routing: inputs.metadata[routing],
            ids,
        )

    def shuffle(self) -> Job:
        inputs = self.inputs
        arguments = [(inputs.hidden, data.input_permutation) for data in inputs.metadata]
        op = self.op("shuffle_rows", self.rows_spec)
        return self.job(
            "shuffle",
            inputs.hidden.nbytes + 4 * self.size.R + self.written(self.rows_spec),
            self.rows_spec,
            [Variant("op", _calls(op, arguments)), *self.peers(plain.shuffle_rows, arguments)],
            lambda routing: (plain.shuffle_rows(*arguments[routing]),),
            inputs.hidden,
        )

    def quant(self) -> Job:
        return self._quant("quant", "mxfp4_experts_quant", self.inputs.rows, plain.experts_quant, 0.0)

    def silu_quant(self) -> Job:
        # torch's silu has other last bits in float32, of which one in thousands turns a bit of the rounded product.
        name = "silu_and_mul_mxfp4_experts_quant"
        return self._quant("silu_quant", name, self.inputs.gate_up, plain.silu_experts_quant, 1e-3)

    def _quant(self, name: str, op_name: str, rows: Tensor, peer: Callable, may_differ: float) -> Job:
        size, data, flat = self.size, self.inputs.metadata, self.flat_scale()
        op = self.op(op_name, self.quant_spec)
        search = [(rows, d.expert_offsets, d.blockscale_offsets, size.E) for d in data]
        sorted_ids = [(*arguments, d.sorted_expert_ids) for arguments, d in zip(search, data)]

        @functools.cache
        def blocks() -> tuple[Tensor, Tensor]:
            return _quantized(rows, silu=name == "silu_quant")

        read = round(self.inputs.rows_with_expert() * rows.shape[1]) * rows.element_size() + 8 * (size.E + 1)
        return self.job(
            name,
            read + self.written(self.quant_spec),
            self.quant_spec,
            [
                Variant("search", _calls(op, search)),
                Variant("sorted ids", _calls(op, sorted_ids)),
                *self.peers(peer, [(rows, *_where(d), flat) for d in data], may_differ),
            ],
            lambda routing: self.placed(*blocks(), data[routing]),
            rows,
        )

    def fused(self) -> Job:
        return self._permute_quant("fused", [self._fused()])

    def pipeline(self) -> Job:
        return self._permute_quant("pipeline", [*self._separate(), self._fused()])

    def _fused(self) -> Variant:
        size, inputs = self.size, self.inputs
        op = self.op("moe_permute_mxfp4_quant", self.metadata_spec | self.quant_spec)
        return Variant("fused", _calls(op, [(inputs.hidden, ids, size.E, self.settings.n) for ids in inputs.topk_ids]))

    def _separate(self) -> list[Variant]:
        E, n, K, hidden = self.size.E, self.settings.n, self.size.K, self.inputs.hidden
        metadata = self.op("get_cutlass_moe_mm_data", self.metadata_spec)
        shuffle = self.op("shuffle_rows", self.rows_spec)
        quant = self.op("mxfp4_experts_quant", self.quant_spec)

        def run(ids: Tensor, sorted_ids: bool) -> tuple[Tensor, ...]:
            data = MoEMetadata(*metadata(ids, E, n, K))
            rows = shuffle(hidden, data.input_permutation)
            rows = rows[0] if isinstance(rows, tuple) else rows
            where = (data.expert_offsets, data.blockscale_offsets, E)
            return (*data, *quant(rows, *where, data.sorted_expert_ids if sorted_ids else None))

        return [
            Variant(name, _calls(run, [(ids, sorted_ids) for ids in self.inputs.topk_ids]))
            for name, sorted_ids in (("search", False), ("sorted ids", True))
        ]

    def _permute_quant(self, name: str, variants: list[Variant]) -> Job:
        size, inputs, flat = self.size, self.inputs, self.flat_scale()
        arguments = [(inputs.hidden, ids, size.E, self.settings.n, flat) for ids in inputs.topk_ids]
        tokens = functools.cache(lambda: _quantized(inputs.hidden))

        def expected(routing: int) -> tuple[Tensor, ...]:
            data = inputs.metadata[routing]
            codes, scales = (plain.shuffle_rows(t, data.input_permutation) for t in tokens())
            return (*data, *self.placed(codes, scales, data))

        results = self.metadata_spec | self.quant_spec
        return self.job(
            name,
            inputs.hidden.nbytes + inputs.topk_ids[0].nbytes + self.written(results),
            results,
            [*variants, *self.peers(plain.moe_permute_quant, arguments)],
            expected,
            inputs.hidden,
        )


MODES = {"kernel": ("metadata", "shuffle", "quant", "silu_quant", "fused"), "pipeline": ("pipeline",)}


def build(name: str, inputs: Inputs) -> Job:
    """A job of MODES at the size of these inputs."""
    return getattr(_Builder(inputs), name)()


def _calls(function: Callable, arguments: Sequence[tuple]) -> tuple[Call, ...]:
    return tuple(functools.partial(function, *a) for a in arguments)


def _where(data: MoEMetadata) -> tuple[Tensor, Tensor, Tensor]:
    return data.expert_offsets, data.blockscale_offsets, data.sorted_expert_ids


def _quantized(rows: Tensor, silu: bool = False) -> tuple[Tensor, Tensor]:
    """The reference: codes and flat scales, slice by slice, for plain torch needs 20 times the memory of its input."""
    parts = [plain.quantize_blocks(plain.exact_silu_and_mul(x) if silu else x) for x in rows.split(4096)]
    return tuple(torch.cat(t) for t in zip(*parts))
