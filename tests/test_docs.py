"""The examples in docstrings and README run as they stand."""

import doctest
import re
from pathlib import Path

import pytest
import torch

import mxfp4_ops.layout
import mxfp4_ops.ops
import mxfp4_ops.passes.inductor
import mxfp4_ops.passes.manager

README = Path(__file__).parents[1] / "README.md"


MODULES = [mxfp4_ops.ops, mxfp4_ops.layout, mxfp4_ops.passes.inductor, mxfp4_ops.passes.manager]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    result = doctest.testmod(module)
    torch._dynamo.reset()  # what an example compiled refers to its globals, which are gone now
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("name", [name for name in mxfp4_ops.__all__ if callable(getattr(mxfp4_ops, name))])
def test_every_public_name_says_what_it_is(name):
    assert (getattr(mxfp4_ops, name).__doc__ or "").strip()


def test_readme_examples():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
