"""Systems of equations."""

import pytest
import torch

from lightformers_hf.conversion.linear import solved

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("definite", [True, False])
def test_several_right_sides_are_solved_one_by_one_and_let_go(definite):
    """Also where there is no Cholesky root; the covariance is what it was."""
    torch.manual_seed(0)
    factor = torch.randn(6, 6, dtype=torch.float64)
    covariance = factor @ factor.T if definite else factor + factor.T
    sides = {name: torch.randn(6, width, dtype=torch.float64) for name, width in (("a", 2), ("b", 5))}
    before, left = covariance.clone(), list(sides.items())
    for number, (name, solution) in enumerate(solved(covariance, 0.5, left), start=1):
        ridged = before + 0.5 * torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(ridged @ solution, sides[name], rtol=0, atol=1e-9)
        assert len(left) == len(sides) - number
    assert number == len(sides)
    assert torch.equal(covariance, before)
