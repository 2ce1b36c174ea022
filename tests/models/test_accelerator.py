"""Every variant on a GPU, if there is one, against itself on the CPU."""

import copy

import pytest
import torch
from models.cases import GENERATING, every_attention, make_model, padded, run_model, sentences

if not torch.accelerator.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)


def on_accelerator(model):
    """A copy there, and the batch that all of these tests read, here and there."""
    device = torch.accelerator.current_accelerator()
    here = padded(sentences(), side="right" if model.config.is_encoder_decoder else "left")
    return copy.deepcopy(model).to(device), here, [tensor.to(device) for tensor in here]


@every_attention()
def test_logits_are_those_of_the_cpu(head, variant, attention):
    model = make_model(head, variant, attn_implementation=attention)
    moved, here, there = on_accelerator(model)
    with torch.no_grad():
        expected, found = run_model(model, *here)[0], run_model(moved, *there)[0].cpu()
    kept = here[1].bool()[:, : expected.shape[1]] if expected.dim() == 3 else slice(None)
    scale = max(1.0, expected[kept].abs().max().item())
    torch.testing.assert_close(found[kept], expected[kept], atol=1e-4 * scale, rtol=0)


@every_attention()
def test_gradients_are_numbers_in_bfloat16(head, variant, attention):
    moved, _, there = on_accelerator(make_model(head, variant, attn_implementation=attention))
    with torch.autocast(moved.device.type, torch.bfloat16):
        output = run_model(moved.train(), *there)[0]
    output.float().square().mean().backward()
    gradients = [parameter.grad for parameter in moved.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("how", [{"num_beams": 1}, {"num_beams": 3}])
@every_attention(heads=GENERATING)
def test_what_is_generated_is_that_of_the_cpu(head, variant, attention, how):
    model = make_model(head, variant, attn_implementation=attention)
    moved, here, there = on_accelerator(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, **how}
    expected, found = (
        one.generate(input_ids=ids, attention_mask=mask, **options).cpu()
        for one, (ids, mask) in ((model, here), (moved, there))
    )
    assert found.tolist() == expected.tolist()
