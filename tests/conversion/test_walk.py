"""Hidden states on their way through a layer, sublayer by sublayer."""

import pytest
import torch
from models.cases import TINY

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf.conversion.walk import _sublayers


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_sublayers_one_after_the_other_are_the_layer(stack, before):
    torch.manual_seed(0)
    config = LightFormerConfig(**TINY["lightformer"], normalize_before=before)
    layer = getattr(LightFormerForConditionalGeneration(config).eval().model, stack).layers[0]
    states, encoded = torch.randn(2, 5, config.d_model), torch.randn(2, 7, config.d_model)
    memory = {"encoder_hidden_states": encoded} if stack == "decoder" else {}
    whole = layer(states, None, **memory)
    count = 3 if memory else 2
    for place, sublayer in enumerate(_sublayers(layer, None, *memory.values())):
        states = sublayer(states)
        assert torch.equal(states, whole) == (place == count - 1)
