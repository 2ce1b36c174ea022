"""What a decoder starts from, and whether targets repeat it: compared with transformers' own `generate()`."""

from types import SimpleNamespace

import pytest
import torch
from conversion.vocabulary.checkpoints import make_checkpoint
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
)

from lightformers_hf.conversion.calibration_text import parallel_batches
from lightformers_hf.decoding import repeated_start
from lightformers_hf.engines.shortlist import read_ids
from lightformers_hf.languages import target_ids
from lightformers_hf.models.pipelines import first_token
from lightformers_hf.recovery import TokenizedPool

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghij"]
START = 1
ENCLOSED = "<s> $A </s>"


@pytest.fixture
def make():
    """Makes a random BART that starts from `<s>`, and a tokenizer of letters with a template."""

    def build(template, forced=None):
        letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
        letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        letters.decoder = decoders.Fuse()
        marks = [(word, WORDS.index(word)) for word in template.split() if word != "$A"]
        letters.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
        names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        size = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        size |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_model": 8, "vocab_size": len(WORDS)}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": START}
        torch.manual_seed(0)
        model = BartForConditionalGeneration(BartConfig(**size, **tokens)).eval()
        model.generation_config.forced_bos_token_id = forced
        model.final_logits_bias[:, START] = -100  # as of a model that was not trained to repeat it
        return model, PreTrainedTokenizerFast(tokenizer_object=letters, **names)

    return build


@pytest.mark.parametrize(("template", "forced"), [(ENCLOSED, None), (ENCLOSED, START), ("$A </s>", None)])
def test_targets_are_read_as_the_model_writes_them(make, template, forced):
    model, tokenizer = make(template, forced)
    source = tokenizer("abc", return_tensors="pt")["input_ids"]
    written = model.generate(source, max_new_tokens=8, num_beams=1, do_sample=False, min_new_tokens=3)
    pairs = {"source": ["abc"], "target": [tokenizer.decode(written[0], skip_special_tokens=True)]}
    batch = parallel_batches(model, tokenizer, Dataset.from_dict(pairs))[0]
    read = [START, *batch["labels"][0].tolist()]
    assert batch["decoder_input_ids"][0].tolist() == read[:-1]
    assert [token for token in read if token != 2] == [token for token in written[0].tolist() if token != 2]
    start = repeated_start(model, tokenizer)
    pool = TokenizedPool(pairs, tokenizer, longest=(20, 20), max_tokens=40, start=start)
    assert [START, *pool.labels[0].tolist()] == read
    source = SimpleNamespace(model=model, need_tokenizer=lambda: tokenizer)
    assert [START, *read_ids(source, pairs["target"], is_target=True)[0]] == read


def test_a_model_that_learned_to_repeat_its_start_is_asked(make):
    model, tokenizer = make(ENCLOSED)
    assert repeated_start(model, tokenizer) == START
    model.final_logits_bias[:, START] = 100
    assert repeated_start(model, tokenizer) is None


def test_a_target_without_tokens_loses_none(make):
    _, tokenizer = make("$A")
    assert target_ids(["", "a"], tokenizer, 9, START) == [[], [WORDS.index("a")]]


def test_targets_begin_with_the_language_where_a_tokenizer_puts_it_behind_them(tmp_path):
    model = make_checkpoint("nllb", tmp_path / "nllb")
    names = {"src_lang": "deu_Latn", "tgt_lang": "eng_Latn"}
    tokenizer = NllbTokenizer.from_pretrained(tmp_path / "nllb", legacy_behaviour=True, **names)
    source = tokenizer("ein Hund", return_tensors="pt")["input_ids"]
    written = model.generate(source, num_beams=1, **first_token(tokenizer, tokenizer.tgt_lang))[0].tolist()
    start = model.config.decoder_start_token_id
    (read,) = target_ids(["a dog"], tokenizer, 20, repeated_start(model, tokenizer))
    assert [start, read[0]] == written[:2]
    assert tokenizer.decode(read, skip_special_tokens=True) == "a dog"
    assert read[-1] == tokenizer.eos_token_id


def test_an_end_alone_is_no_start(tiny_marian):
    model, tokenizer = (kind.from_pretrained(tiny_marian) for kind in (MarianMTModel, MarianTokenizer))
    model.config.decoder_start_token_id = tokenizer.eos_token_id
    assert repeated_start(model, tokenizer) is None
