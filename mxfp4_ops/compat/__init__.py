"""The signatures of other libraries, on the ops of this one."""

from . import vllm

__all__ = ["vllm"]
