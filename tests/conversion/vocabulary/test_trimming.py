"""A checkpoint with fewer tokens computes what the source computes with the rest suppressed."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import ENGLISH, GERMAN
from conversion.teachers import batch, make_teacher
from conversion.vocabulary.checkpoints import NAMES, make_checkpoint
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert
from lightformers_hf.checkpoints.teacher import read, trim
from lightformers_hf.conversion.vocabulary import KeptTokens
from lightformers_hf.recovery import load_distiller
from lightformers_hf.vocabularies import keep_tokens, match_tokens

LANGUAGES = {"nllb": ["deu_Latn", "eng_Latn"], "mbart50": ["de_DE", "en_XX"], "m2m_100": ["de", "en"]}
KEPT = 6  # pairs whose tokens stay


@dataclasses.dataclass
class Case:
    """A source, and what is left of it with the tokens of six pairs."""

    name: str
    source: Path
    folder: Path
    options: dict

    def __post_init__(self):
        self.large, self.small = (
            AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (self.source, self.folder)
        )
        self.before, self.after = (AutoTokenizer.from_pretrained(path) for path in (self.source, self.folder))

    def old_ids(self, side="source"):
        """{new id: old id}."""
        old = ids_of(self.before, side)
        return {number: old[token] for token, number in ids_of(self.after, side).items()}


def ids_of(tokenizer, side):
    if side == "target" and getattr(tokenizer, "separate_vocabs", False):
        return tokenizer.target_encoder
    return tokenizer.get_vocab() | getattr(tokenizer, "lang_token_to_id", {})


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder / "source")
    (folder / "source" / "README.md").write_text("---\nlicense: mit\nlanguage: [af, de, en, fr, zu]\n---\n")
    data = folder / "text.jsonl"
    pairs = zip(GERMAN[:KEPT], ENGLISH[:KEPT], strict=True)
    data.write_text("".join(json.dumps({"de": german, "en": english}) + "\n" for german, english in pairs))
    sides = {"source_lang": "de", "target_lang": "en"} if request.param.startswith("marian") else {}
    options = {"languages": LANGUAGES.get(request.param), "vocabulary": str(data), **sides, "progress": False}
    convert(folder / "source", folder / "trimmed", **options)
    return Case(request.param, folder / "source", folder / "trimmed", options)


def test_ids_map_one_to_one(case):
    before, after = case.before, case.after
    assert case.small.config.vocab_size < case.large.config.vocab_size
    for side, texts in (("text", GERMAN[:KEPT]), ("text_target", ENGLISH[:KEPT])):
        old = case.old_ids("source" if side == "text" else "target")
        assert sorted(old) == list(range(len(old)))  # every row has a token
        for text in texts:
            ids = after(**{side: text})["input_ids"]
            assert [old[number] for number in ids] == before(**{side: text})["input_ids"]


def test_logits_and_outputs_are_the_sources_with_the_rest_suppressed(case):
    large, small = case.large, case.small
    old = case.old_ids("target")
    order = torch.tensor([old[number] for number in range(len(old))])
    rest = sorted({*range(large.get_output_embeddings().weight.shape[0])} - {*order.tolist()})
    assert old[small.config.decoder_start_token_id] == large.config.decoder_start_token_id
    for text in GERMAN[:3]:
        inputs, new_inputs = case.before(text, return_tensors="pt"), case.after(text, return_tensors="pt")
        labels = torch.tensor([case.after(text_target=ENGLISH[0])["input_ids"]])
        expected = large(**inputs, decoder_input_ids=order[labels]).logits[..., order]
        found = small(**new_inputs, decoder_input_ids=labels).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for beams in (1, 3):
            options = {"num_beams": beams, "max_new_tokens": 12, "max_length": None}
            # Suppressed tokens have a probability of 0 only if what is left is made to add up to 1 again.
            wanted = large.generate(**inputs, **options, suppress_tokens=rest or None, renormalize_logits=True)
            assert torch.equal(order[small.generate(**new_inputs, **options)], wanted)


def test_a_larger_teacher_predicts_these_tokens_alone(case):
    teacher = AutoModelForSeq2SeqLM.from_pretrained(case.source).eval()
    assert match_tokens(case.before, case.before) is None
    keep_tokens(teacher, **match_tokens(case.after, case.before))
    assert teacher.get_output_embeddings().weight.shape[0] == case.small.get_output_embeddings().weight.shape[0]
    inputs = case.after(GERMAN[0], return_tensors="pt")
    labels = torch.tensor([case.after(text_target=ENGLISH[0])["input_ids"]])
    found, expected = (model(**inputs, decoder_input_ids=labels).logits for model in (teacher, case.small))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    options = {"num_beams": 1, "max_new_tokens": 6, "max_length": None}
    assert torch.equal(teacher.generate(**inputs, **options), case.small.generate(**inputs, **options))
    with pytest.raises(ValueError, match=r"has another vocabulary than the model's tokenizer \(lacks"):
        match_tokens(case.before, case.after)


@pytest.mark.parametrize("name", ["t5", "m2m_100"])
def test_a_teacher_loses_rows_without_a_token_where_its_student_has_none(tmp_path, name):
    """As of a student whose vocabulary kept all tokens, but not the rows that make their number a round one."""
    whole = make_checkpoint(name, tmp_path / "teacher")
    tokenizer, config = AutoTokenizer.from_pretrained(tmp_path / "teacher"), copy.deepcopy(whole.config)
    config.vocab_size -= 8
    teacher = load_distiller(str(tmp_path / "teacher"), tokenizer, config=config)
    inputs = {"input_ids": torch.tensor([[9, 8, 7, 6]]), "decoder_input_ids": torch.tensor([[0, 9, 5]])}
    torch.testing.assert_close(teacher.eval()(**inputs).logits, whole(**inputs).logits[..., :-8])
    same = load_distiller(str(tmp_path / "teacher"), tokenizer, config=whole.config)
    assert same.config.vocab_size == whole.config.vocab_size


def test_every_text_can_still_be_written(case):
    def there_and_back(tokenizer, text):
        return tokenizer.decode(tokenizer(text_target=text)["input_ids"], skip_special_tokens=True)

    for text in (*GERMAN, *ENGLISH, "Xylophon 1984?!"):
        assert there_and_back(case.after, text) == there_and_back(case.before, text)


def test_languages_and_special_tokens_stay_right(case):
    before, after = case.before, case.after
    for token in ("pad_token", "eos_token", "unk_token"):
        assert getattr(after, token) == getattr(before, token)
        assert after.convert_ids_to_tokens(getattr(after, f"{token}_id")) == getattr(before, token)
    if case.name in LANGUAGES:
        assert (after.src_lang, after.tgt_lang) == (before.src_lang, before.tgt_lang)
        for side in ("text", "text_target"):
            kept = after.convert_ids_to_tokens(after(**{side: "Zwei"})["input_ids"])
            assert kept[0] == before.convert_ids_to_tokens(before(**{side: "Zwei"})["input_ids"])[0]
    if case.name == "nllb":  # two languages of two hundred
        assert "fra_Latn" not in after.get_vocab()


def test_the_card_and_the_report_say_it(case):
    report = json.loads((case.folder / "compression.json").read_text())
    kept, before = case.small.config.vocab_size, case.large.config.vocab_size
    assert report["vocabulary"]["source"] == [kept, before]
    assert report["options"]["vocabulary"] == ["text.jsonl"]
    assert report["parameters_after"] == case.small.num_parameters() == report["vocabulary"]["parameters"][0]
    card = (case.folder / "README.md").read_text()
    assert f"Its vocabulary keeps {kept:,} of {before:,} tokens" in card
    assert "fine-tune" not in card
    metadata = ModelCard.load(case.folder / "README.md").data
    assert metadata.license == "mit"
    if case.name in LANGUAGES:
        codes = LANGUAGES[case.name]
        assert report["languages"] == codes
        assert f"tokens, and the languages `{codes[0]}`, `{codes[1]}`: text" in card
        assert metadata.language == (["deu", "eng"] if case.name == "nllb" else ["de", "en"])
    else:
        assert report["languages"] == []
        assert metadata.language == ["af", "de", "en", "fr", "zu"]


@torch.no_grad()
def test_a_side_that_keeps_all_its_tokens_in_another_order(tmp_path):
    """Its tables are as large as before: sizes do not tell that rows move."""
    large = make_teacher("marian_two_vocabularies", tmp_path)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    kept = [49, 0, *range(3, 48)]
    inputs = batch(large)
    expected = large(**inputs).logits[..., kept]
    new = {name: torch.argsort(torch.tensor(ids)) for name, ids in (("source", order), ("target", kept))}
    new["target"] = torch.zeros(50, dtype=torch.long).index_copy(0, torch.tensor(kept), torch.arange(len(kept)))
    inputs["input_ids"] = new["source"][inputs["input_ids"]]
    inputs["decoder_input_ids"] = new["target"][inputs["decoder_input_ids"]]
    teacher = trim(read(tmp_path), KeptTokens(order, kept, tokenizer=None))
    for small in (teacher.model, keep_tokens(large, order, kept)):
        torch.testing.assert_close(small(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
