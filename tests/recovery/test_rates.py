"""Queries of scores that nothing divides learn as those of divided scores do: the same steps, the same answers."""

import copy

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, MarianTokenizer, Seq2SeqTrainingArguments

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf.recovery import RecoveryTrainer
from lightformers_hf.text import tokenize_pairs

HEAD = 8


def undivided(model):
    """The same model with scores that nothing divides, their divisor in the queries' matrices."""
    config = copy.deepcopy(model.config)
    config.scale_attention = False
    other = LightFormerForConditionalGeneration(config)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if ".q_proj." in name:
            weight *= HEAD ** (-0.5 if name.endswith("q_proj.weight") else -0.25)
    other.load_state_dict(weights)
    return other


@pytest.mark.parametrize("rank", [None, 6])
def test_steps_are_those_of_divided_scores(rank, tiny_marian, parallel_sentences, tmp_path):
    from datasets import Dataset

    tokenizer = MarianTokenizer.from_pretrained(tiny_marian)
    pairs = Dataset.from_list([{"source": pair["de"], "target": pair["en"]} for pair in parallel_sentences])
    tokens = tokenize_pairs(pairs, tokenizer, max_source_length=64, max_target_length=64)
    torch.manual_seed(0)
    config = LightFormerConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        attention_rank=rank,
        dropout=0.0,
        use_bias=False,
        position_embedding_type="relative",
    )
    divided = LightFormerForConditionalGeneration(config)
    models, batch = (
        (divided, undivided(divided)),
        DataCollatorForSeq2Seq(tokenizer)(
            [{name: tokens[row][name] for name in ("input_ids", "attention_mask", "labels")} for row in range(4)]
        ),
    )
    logits = []
    for number, model in enumerate(models):
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path / f"{number}"),
            use_cpu=True,
            max_steps=4,
            learning_rate=3e-3,
            max_grad_norm=0.0,
            adam_epsilon=1e-16,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        before = model.eval()(**batch).logits
        trainer = RecoveryTrainer(
            model, args, train_dataset=tokens, data_collator=DataCollatorForSeq2Seq(tokenizer, model)
        )
        trainer.train()
        logits.append([before, model.eval()(**batch).logits])
    torch.testing.assert_close(logits[1][0], logits[0][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[1][1], logits[0][1], atol=1e-3, rtol=0)
    assert (logits[0][1] - logits[0][0]).abs().max() > 0.1
