"""Router ids: even, skewed and with one hot expert; as in a model, the experts of a token are distinct."""

from collections.abc import Callable

import torch
from torch import Tensor


def uniform(m: int, E: int, generator: torch.Generator) -> Tensor:
    """float32 [m, E]: scores of which every expert's is as likely to be high."""
    return torch.rand(m, E, generator=generator)


def skewed(m: int, E: int, generator: torch.Generator) -> Tensor:
    """float32 [m, E]: a token draws its experts without replacement, each with a chance of 1 / its rank (Zipf)."""
    rank = torch.randperm(E, generator=generator) + 1
    # Gumbel's trick: the largest of log(weight) + noise are a draw without replacement.
    noise = -torch.empty(m, E).exponential_(generator=generator).log()
    return noise - rank.log()


def hot(m: int, E: int, generator: torch.Generator) -> Tensor:
    """float32 [m, E]: one expert serves every token, the others of a token are uniform."""
    scores = uniform(m, E, generator)
    scores[:, torch.randint(E, (), generator=generator)] = 1.0
    return scores


ROUTINGS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "uniform": uniform,
    "skewed": skewed,
    "hot": hot,
}


def topk_ids(routing: str, m: int, topk: int, E: int, no_expert: float, generator: torch.Generator) -> Tensor:
    """int32 [m, topk] router ids, on the CPU.

    Args:
        routing: a name in ROUTINGS.
        m, topk, E: tokens, experts a token, experts; topk at most E.
        no_expert: fraction of the ids, from 0 to 1, that are -1, as of experts on other devices.
        generator: decides everything.
    """
    ids = ROUTINGS[routing](m, E, generator).topk(topk).indices.int()
    ids = ids.gather(1, torch.rand(m, topk, generator=generator).argsort(1))  # a hot expert is not always the first
    without = torch.randperm(ids.numel(), generator=generator)[: round(no_expert * ids.numel())]
    ids.view(-1)[without] = -1
    return ids
