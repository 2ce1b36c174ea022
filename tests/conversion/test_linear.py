"""Whether tensors hold numbers."""

import pytest
import torch

from lightformers_hf.conversion.linear import all_finite

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_that_is_none_is_found(dtype, bad):
    tensor = torch.full((30, 50), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    assert all_finite(tensor)
    assert all_finite(tensor[:0])
    tensor[29, 49] = bad
    assert not all_finite(tensor)
    assert not all_finite(tensor.T)
