"""A trainer of few sentences."""

import pytest
import torch
from tiny import SIZES
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, MarianTokenizer, Seq2SeqTrainingArguments

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf.recovery import RecoveryTrainer
from lightformers_hf.text import tokenize_pairs


@pytest.fixture
def tokens(tiny_marian, parallel_sentences):
    from datasets import Dataset

    pairs = Dataset.from_list([{"source": pair["de"], "target": pair["en"]} for pair in parallel_sentences])
    tokenizer = MarianTokenizer.from_pretrained(tiny_marian)
    return tokenize_pairs(pairs, tokenizer, max_source_length=64, max_target_length=64)


@pytest.fixture
def build_trainer(tiny_marian, tmp_path, tokens):
    def build(model="marian", rows=8, with_teacher=False, **options):
        """A trainer of `rows` sentences, its model a little away from the trained one, without dropout."""
        torch.manual_seed(1)
        teacher = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
        if model == "lightformer":
            names = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
            fields = SIZES | {name: getattr(teacher.config, name) for name in names}
            light = LightFormerConfig(**fields, encoder_groups=1, attention_rank=8, embedding_rank=8)
            model = LightFormerForConditionalGeneration(light)
        elif model == "marian":
            model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        recovery = {
            k: options.pop(k)
            for k in list(options)
            if k.startswith(("max_tokens", "distillation", "hidden", "quantization"))
        }
        plain = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        quiet = {"use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "seed": 0}
        args = Seq2SeqTrainingArguments(str(tmp_path / "out"), **(plain | quiet | options))
        tokenizer = MarianTokenizer.from_pretrained(tiny_marian)
        return RecoveryTrainer(
            model,
            args,
            train_dataset=tokens.select(range(rows)),
            eval_dataset=tokens,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            teacher=teacher if with_teacher else None,
            **recovery,
        )

    return build
