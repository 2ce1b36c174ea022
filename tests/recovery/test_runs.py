"""What a training loads, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from lightformers_hf import PartialFormerConfig, PartialFormerForConditionalGeneration
from lightformers_hf.recovery import load_trainable, train
from lightformers_hf.recovery.runs import take_checkpoint

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


def test_nothing_is_dropped_by_whatever_name(tmp_path):
    """T5's rate, and that of PartialFormer's networks inside the heads."""
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8, "d_kv": 4, "decoder_start_token_id": 0}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, dropout_rate=0.5, **sizes))
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    config = PartialFormerConfig(vocab_size=20, decoder_attention_heads=2, dropout=0.0, ffn_dropout=0.5, **sizes)
    ids = torch.tensor([[5, 6, 7, 8]])
    for model in (t5, PartialFormerForConditionalGeneration(config)):
        model.save_pretrained(tmp_path / "model")
        loaded = load_trainable(str(tmp_path / "model"), dropout=False).train()
        first, second = (loaded(input_ids=ids, labels=ids).logits for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_one_process_alone_takes_itself_for_the_first(tiny_marian, tmp_path):
    """Whose state a checkpoint has."""
    folder = tmp_path / "checkpoint-1"
    AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).save_pretrained(folder)
    TrainerState(global_step=1, is_world_process_zero=True).save_to_json(folder / "trainer_state.json")
    trainer = Trainer(load_trainable(str(tiny_marian)), TrainingArguments(tmp_path, use_cpu=True, report_to="none"))
    trainer.is_world_process_zero = trainer.is_local_process_zero = lambda: False  # as another one's says
    take_checkpoint(trainer, str(folder))
    assert trainer.state.global_step == 1
    assert not trainer.state.is_world_process_zero
    assert not trainer.state.is_local_process_zero


def test_sharding_is_refused():
    with pytest.raises(ValueError, match="fsdp is not supported"):
        train(SimpleNamespace(args=None, is_fsdp_enabled=True))
