"""What other tools of the ecosystem do with these models, as their users write it."""

import importlib.util
import re

import pytest
import torch
from datasets import Dataset
from models.cases import every, make_model, padded, run_model, sentences
from tiny import sizes
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from lightformers_hf import LightFormerConfig, convert

SHAPES = sizes(16, layers=2, vocab_size=60, max_position_embeddings=32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_marian):
    """The tiny teacher, a model compressed from it, and their tokenizer."""
    folder = tmp_path_factory.mktemp("ecosystem") / "light"
    convert(tiny_marian, folder, rank=8, method="paper", progress=False)
    models = [AutoModelForSeq2SeqLM.from_pretrained(place).eval() for place in (tiny_marian, folder)]
    return (*models, AutoTokenizer.from_pretrained(folder))


def config(**changes):
    return LightFormerConfig(**SHAPES, attention_rank=4, ffn_rank=4, **changes)


def arguments(folder, **changes):
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), disable_tqdm=True, save_strategy="no", **settings | changes)


def test_a_light_model_drafts_for_its_teacher(pair):
    """Assisted generation says what the teacher alone says."""
    teacher, light, tokenizer = pair
    inputs = tokenizer(["Zwei Hunde spielen im Schnee."], return_tensors="pt")
    settings = {"num_beams": 1, "do_sample": False, "max_new_tokens": 12}
    alone = teacher.generate(**inputs, **settings)
    assert torch.equal(teacher.generate(**inputs, assistant_model=light, **settings), alone)


def test_a_causal_language_model_trains_on_a_stream(tmp_path, tiny_marian):
    tokenizer = AutoTokenizer.from_pretrained(tiny_marian)
    model = AutoModelForCausalLM.from_config(config())
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8, 9]] * 8}).to_iterable_dataset()
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    before = {name: weight.clone() for name, weight in model.named_parameters() if "fc1" in name}
    trainer = Trainer(model, arguments(tmp_path, learning_rate=1e-2), train_dataset=rows, data_collator=collate)
    trainer.train()
    after = dict(model.named_parameters())
    assert before
    assert not any(torch.equal(weight, after[name]) for name, weight in before.items())


def test_a_classifier_trains_in_trainer(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config(num_labels=2, dropout=0.0))
    rows = [{"input_ids": [5 + label, 6, 7], "attention_mask": [1, 1, 1], "labels": label} for label in (0, 1)]
    training = arguments(tmp_path, max_steps=40, learning_rate=1e-2)
    Trainer(model, training, train_dataset=Dataset.from_list(rows * 4)).train()
    tokens = torch.tensor([row["input_ids"] for row in rows])
    assert model.eval()(input_ids=tokens).logits.argmax(-1).tolist() == [0, 1]


def test_label_smoothing_needs_a_collator_that_knows_the_model(pair, tmp_path):
    """The Trainer then takes the labels from the batch."""
    _, light, tokenizer = pair
    rows = Dataset.from_list([dict(tokenizer("Der Hund.", text_target="The dog."))] * 4)
    settings = arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    with pytest.raises(
        ValueError, match=r"decoder_input_ids is missing.*DataCollatorForSeq2Seq\(tokenizer, model=model\)"
    ):
        Trainer(light, settings, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()
    collator = DataCollatorForSeq2Seq(tokenizer, model=light)
    assert Trainer(light, settings, train_dataset=rows, data_collator=collator).train().training_loss > 0


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_adapters_of_peft_train_and_merge(pair, tmp_path):
    from peft import LoraConfig, get_peft_model

    light = AutoModelForSeq2SeqLM.from_config(pair[1].config)
    adapted = get_peft_model(light, LoraConfig(r=2, target_modules="all-linear"))
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [8, 9]}] * 4
    Trainer(adapted, arguments(tmp_path, learning_rate=1e-2), train_dataset=Dataset.from_list(rows)).train()
    tokens = torch.tensor([[5, 6, 7]])
    adapted.eval()
    expected = adapted(input_ids=tokens, decoder_input_ids=tokens).logits
    torch.testing.assert_close(
        adapted.merge_and_unload()(input_ids=tokens, decoder_input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-4
    )


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@every(("ConditionalGeneration", "CausalLM"))
def test_adapters_of_peft_on_attention(head, variant, tmp_path):
    """Those of docs/how-to/lora.md: gradients reach all of them. Merging and saving change nothing but rounding."""
    from peft import LoraConfig, get_peft_model

    model = make_model(head, variant, spread=0.3).double()
    projections = re.compile(r"\.(q_proj|v_proj|qkv_proj|in_proj|query_proj|memory_proj)(\.[uv])?$")
    targets = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and projections.search(name)
    ]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    ids, mask = padded(sentences())
    logits = run_model(adapted, ids, mask)[0]
    logits.square().mean().backward()
    assert all(weight.grad is not None for weight in adapted.parameters() if weight.requires_grad)
    with torch.no_grad(), adapted.disable_adapter():
        assert not torch.allclose(run_model(adapted, ids, mask)[0], logits, rtol=0.01)
    adapted.merge_and_unload().save_pretrained(tmp_path)
    merged = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(run_model(merged, ids, mask)[0], logits)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("variant", ["lightformer-low-rank", "subformer-low-rank"])
def test_an_adapter_on_a_low_rank_projection_is_told_where_to_go(variant):
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match="not supported") as error:
        get_peft_model(make_model("ConditionalGeneration", variant), LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert "target_modules are its layers u and v, as in 'q_proj.u'" in str(error.value)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_int8_weights_of_torchao_decode(pair):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    light = AutoModelForSeq2SeqLM.from_config(pair[1].config).eval()
    tokens = torch.tensor([[5, 6, 7]])
    expected = light(input_ids=tokens, decoder_input_ids=tokens).logits
    quantize_(light, Int8WeightOnlyConfig())
    found = light(input_ids=tokens, decoder_input_ids=tokens).logits
    assert (found - expected).abs().mean() < 0.1 * expected.std()
    assert light.generate(tokens, max_new_tokens=4, num_beams=1).shape[0] == 1
