"""Clocks. A sample is a mean over many calls with rotating arguments; what is reported is the median of many samples.

On a GPU a sample comes from two CUDA graphs, one of n calls and one of 2n. Each is replayed several times between two
events, and (time of 2n - time of n) / n is a call's time: what a launch of a graph costs whatever is in it cancels, what
every node costs stays in. On the CPU a sample is the wall clock over enough calls to fill milliseconds.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

GRAPH_US = 200  # about this much in the shorter graph: from too short ones the host cannot keep the GPU busy
GRAPH_CALLS = 128  # at most, where the routings are fewer
SAMPLE_US = {"cuda": 1000, "cpu": 2000}
BUDGET_S = 3.0  # of all samples of one subject, unless that were fewer than MIN_SAMPLES
MIN_SAMPLES = 5
HOST_CALLS = 32  # a GPU's queue holds 1024 launches: these never fill it, so the host never waits


@dataclass(frozen=True)
class Timing:
    """Samples of one subject, each the microseconds of one call."""

    samples_us: tuple[float, ...]
    calls: int
    """Calls in a sample."""

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def p10_us(self) -> float:
        return self._deciles()[0]

    @property
    def p90_us(self) -> float:
        return self._deciles()[8]

    def _deciles(self) -> list[float]:
        return statistics.quantiles(self.samples_us, n=10, method="inclusive")


class GraphClock:
    """Times calls on the current GPU, captured; they take turns, so a graph holds each as often as the others."""

    def __init__(self, calls: tuple[Call, ...]):
        # Once outside the capture, on a side stream: libraries set themselves up in their first call.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)

        short = self._capture(calls)
        self._replay_us(short, 3)
        rounds = math.ceil(GRAPH_US / max(self._replay_us(short, 3), 1e-3))
        rounds = max(1, min(rounds, GRAPH_CALLS // len(calls)))
        if rounds > 1:
            short = self._capture(calls * rounds)
        # No result outlives its call, so both graphs can work in the same memory.
        self.graphs = (short, self._capture(calls * rounds * 2, pool=short.pool()))
        self.calls = rounds * len(calls)
        replay_us = self._replay_us(short, 3)
        self._replay_us(self.graphs[1], 3)
        self.replays = max(1, min(math.ceil(SAMPLE_US["cuda"] / replay_us), 50))

    @staticmethod
    def _capture(calls: tuple[Call, ...], pool: tuple[int, int] | None = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for call in calls:
                call()
        return graph

    @staticmethod
    def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1000 * begin.elapsed_time(end) / replays

    def sample(self) -> float:
        """Microseconds of one call."""
        self.graphs[0].replay()  # after another subject the caches are cold, which would count against n and not 2n
        short, long = (self._replay_us(graph, self.replays) for graph in self.graphs)
        return (long - short) / self.calls


class WallClock:
    """Times calls on the CPU."""

    def __init__(self, calls: tuple[Call, ...]):
        self.once = self.turns = calls
        self.calls = len(calls)
        self.turns = calls * max(1, math.ceil(SAMPLE_US["cpu"] / (self.sample() * self.calls)))
        self.calls = len(self.turns)

    def sample(self) -> float:
        """Microseconds of one call."""
        for call in self.once:  # after another subject the caches are cold, and its threads may still spin
            call()
        begin = time.perf_counter()
        for call in self.turns:
            call()
        return 1e6 * (time.perf_counter() - begin) / self.calls


class HostClock:
    """Times what a call keeps the host busy; a GPU works behind it."""

    def __init__(self, calls: tuple[Call, ...]):
        self.turns = calls * math.ceil(HOST_CALLS / len(calls))
        self.calls = len(self.turns)

    def sample(self) -> float:
        """Microseconds of one call."""
        _synchronize()
        begin = time.perf_counter()
        for call in self.turns:
            call()
        spent = time.perf_counter() - begin
        _synchronize()
        return 1e6 * spent / self.calls


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


Clock = GraphClock | WallClock | HostClock


def measure(
    subjects: Mapping[str, tuple[Call, ...]],
    clock: type[Clock],
    samples: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time subjects in turns, so that a clock that drifts meets them all alike.

    Args:
        subjects: by name, calls that take turns.
        clock: GraphClock, WallClock or HostClock.
        samples: of each subject; fewer of a slow one.
        tick: called `samples` times.
    """
    clocks = {name: clock(calls) for name, calls in subjects.items()}
    wanted = {name: max(MIN_SAMPLES, int(BUDGET_S / _seconds(clocks[name].sample))) for name in subjects}
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for i in range(samples):
        for name in subjects:
            # Those of a slow one are spread over the rounds.
            if len(taken[name]) * samples <= i * min(samples, wanted[name]):
                taken[name].append(clocks[name].sample())
        tick()
    return {name: Timing(tuple(taken[name]), clocks[name].calls) for name in subjects}
