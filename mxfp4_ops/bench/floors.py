"""What no kernel beats: an empty call, a copy of the same bytes, and the rate of a large copy."""

import torch

from .timing import Call

LARGE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def empty(device: torch.device) -> dict[str, Call]:
    """The smallest call of torch: one element is filled. Captured, it is a node of a graph that does nothing else."""
    one = torch.zeros(1, device=device)
    return {"empty": lambda: one.fill_(1.0)}


def copies(nbytes: int, device: torch.device) -> dict[str, Call]:
    """Copies that read and write `nbytes` together: torch's copy_, on a GPU a memcpy node, and an elementwise kernel.

    Either may be the faster, by size and device; the floor is the faster one.
    """
    source, target = torch.randint(2**31 - 1, (2, max(1, nbytes // 8)), dtype=torch.int32, device=device)
    return {
        "copy": lambda: target.copy_(source),
        "copy kernel": lambda: torch.bitwise_not(source, out=target),
    }


def large_copy(device: torch.device) -> dict[str, Call]:
    """A copy far larger than any cache: LARGE_BYTES read and written together."""
    return {"large copy": copies(LARGE_BYTES[device.type], device)["copy"]}
