"""What a training loads."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from lightformers_hf.recovery import load_trainable

KINDS = ("dropout", "activation_dropout", "attention_dropout")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True])
def test_without_dropout_two_passes_in_training_are_equal(tiny_marian, tmp_path, kind, given):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    for one in KINDS:
        setattr(model.config, one, 0.5 if one == kind else 0.0)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path) if given else None
    ids = torch.tensor([[5, 6, 7, 8]])
    equal = {}
    for dropout in (False, True):
        loaded = load_trainable(str(tmp_path), config=config, dropout=dropout).train()
        equal[dropout] = torch.equal(*(loaded(input_ids=ids, labels=ids).logits for _ in range(2)))
    assert equal == {False: True, True: False}
    assert config is None or getattr(config, kind) == 0.5
