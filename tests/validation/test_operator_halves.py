"""The two halves of an operator's backward: what comes before inputs and weights part is computed once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

import torch.nn.functional as F  # noqa: E402, N812

from validation.execution.operator_call import Call, call, find_partings  # noqa: E402


class Counted(torch.autograd.Function):
    """Multiplies by three, and counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Counted.passes += 1
        return 3 * gradients[0]


def loss_like(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Call:
    def forward(inputs: Any, parameters: Any) -> tuple[torch.Tensor, ...]:
        return (Counted.apply(F.linear(inputs[0], parameters[0], parameters[1])).sum(dim=1),)

    return call(forward, [x], [weight, bias], needs_gradient=[True])[1]


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(4, 5, 6), torch.randn(7, 6), torch.randn(7)
    return x, weight.requires_grad_(), bias.requires_grad_(), torch.randn(4, 7)


@pytest.mark.parametrize(("shares", "passes"), [(True, 1), (False, 2)])
def test_halves_give_the_gradients_of_the_whole(tensors: Any, shares: bool, passes: int) -> None:
    x, weight, bias, gradient = tensors
    whole_inputs, whole_weights = loss_like(x, weight, bias).backward([gradient], inputs=True, weights=True)
    record = loss_like(x, weight, bias)
    Counted.passes = 0
    inputs, none = record.backward([gradient], inputs=True, weights=False, shares=shares)
    nothing, weights = record.backward([gradient], inputs=False, weights=True, shares=shares)
    assert none == [None, None] and nothing == [None]
    assert Counted.passes == passes
    for found, wanted in zip([*inputs, *weights], [*whole_inputs, *whole_weights], strict=True):
        assert found is not None and torch.allclose(found, wanted)


def test_a_parameter_on_a_way_of_its_own_has_no_parting(tensors: Any) -> None:
    x, weight, bias, _ = tensors

    def forward(inputs: Any, parameters: Any) -> tuple[torch.Tensor, ...]:
        return F.linear(inputs[0], parameters[0]), parameters[1] * 2

    record = call(forward, [x], [weight, bias], needs_gradient=[True])[1]
    edges = [edge for edge in record.inputs if edge is not None]
    assert find_partings(record.outputs, edges, record.parameters) is None
