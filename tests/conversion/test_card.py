"""The model card: what it says, what the Hub reads in it, and that no foreign text changes what it is."""

import json
import logging
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from conversion.cards import evaluation_of
from huggingface_hub import ModelCard, parse_eval_result_entries
from markdown_it import MarkdownIt

from lightformers_hf import convert, plan
from lightformers_hf.checkpoints.cards import inherited_metadata
from lightformers_hf.conversion.card import model_card, read_results, result_files
from lightformers_hf.conversion.report import ModelFacts
from lightformers_hf.engines.card import write_card

pytestmark = pytest.mark.quick

FACTS = ModelFacts(architecture="subformer", auto_class="AutoModelForCausalLM", parameters=1_234_567, bytes=4_938_268)


def blocks(card: ModelCard) -> list[str]:
    """The kinds of a card's blocks in order, as a Markdown parser finds them."""
    return [token.type for token in MarkdownIt("commonmark").enable("table").parse(card.text)]


def table_rows(card: ModelCard) -> list[list[str]]:
    """The cells of every row of every table."""
    rows = []
    for token in MarkdownIt("commonmark").enable("table").parse(card.text):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and token.level > 2:
            rows[-1].append(token.content)
    return rows


@pytest.fixture(scope="module")
def source(tmp_path_factory, tiny_marian):
    """The tiny Marian as an organization publishes it."""
    folder = tmp_path_factory.mktemp("card") / "opus-mt-de-en"
    shutil.copytree(tiny_marian, folder)
    card = "---\nlicense: other\nlicense_name: ours\nlicense_link: LICENSE\nlanguage:\n- de\n- no\n"
    (folder / "README.md").write_text(card + "pipeline_tag: translation\ntags: [marian]\n---\n# A teacher\n")
    return folder


def evaluated(folder, parameters, **options):
    file = folder / "results.json"
    file.write_text(json.dumps(evaluation_of("/home/someone/light", parameters, **options).to_dict()))
    return read_results(file, parameters)


def test_what_was_made_of_what(source, tmp_path):
    report = convert(
        source, tmp_path / "light", rank=5, pattern={"fc1|fc2": 3}, encoder_groups=1, method="paper", progress=False
    )
    card = ModelCard.load(tmp_path / "light" / "README.md")
    assert card.data.to_dict() == {
        "license": "other",
        "license_name": "ours",
        "license_link": "LICENSE",
        "language": ["de", "no"],  # which YAML takes for false
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["lightformer", "compression", "low-rank"],
    }
    assert "`opus-mt-de-en` (`marian`)" in card.text
    assert "its matrices made smaller and its 2 encoder layers sharing 1 stored ones" in card.text
    assert f"Of its {len(report.matrices)} matrices: {len(report.matrices)} low-rank (rank 3 to 5)." in card.text
    assert '"fc1|fc2": 3' in card.text
    rows = table_rows(card)
    counts = [f"{count:,}" for count in (report.parameters_before, report.parameters_after)]
    assert ["unique parameters", *counts, f"{report.parameters_before / report.parameters_after:.2f}"] in rows
    settings = {row[0].strip("`"): row[2] for row in rows if len(row) == 5}
    assert settings == {"matrix": "becomes"} | {matrix.name: f"rank {matrix.size}" for matrix in report.matrices}
    assert "fine-tune it before use" in card.text
    assert 'AutoModelForSeq2SeqLM.from_pretrained("light", trust_remote_code=True)' in card.text


@pytest.mark.parametrize(
    ("rank", "line"), [(3, "1 group of rank 6 has as"), (9, "1 group of dense matrices has at most as")]
)
def test_a_plan_prints_the_rank_that_sharing_allows(source, rank, line):
    report = plan(source, rank=rank, encoder_groups=1, method="paper", progress=False)
    text = f"In the encoder, {line} many parameters as 2 layers of rank {rank} (LightFormer, Eq. 6)."
    assert text in " ".join(str(report).split())


def test_the_hub_reads_the_results(source, tmp_path):
    report = plan(source, rank=5, method="paper", progress=False)
    first = evaluated(tmp_path, 5000, teacher="/home/someone/opus-mt-de-en")
    second = evaluated(tmp_path, 5000, data="/home/someone/other.jsonl")
    third = evaluated(tmp_path, 5000, data="owner/opus-100:de-en")
    card = ModelCard(model_card(FACTS, report, name="alice/light", steps=2000, results=[first, second, third]))
    assert card.data.model_name == "light"
    assert [(result.dataset_type, result.metric_type, result.metric_value) for result in card.data.eval_results] == [
        ("test.jsonl", "bleu", 41.25),
        ("test.jsonl", "chrf", 62.5),
        ("other.jsonl", "bleu", 41.25),
        ("other.jsonl", "chrf", 62.5),
        ("owner/opus-100", "bleu", 41.25),
        ("owner/opus-100", "chrf", 62.5),
    ]
    assert {result.task_type for result in card.data.eval_results} == {"translation"}
    rows = table_rows(card)
    assert ["BLEU", "41.2", "42.0"] in rows
    assert ["BLEU", "41.2"] in rows
    assert ["unique parameters", "5,000", "10,000"] in rows
    assert ["tokens/s, one core", "150.0 (1.50x)", "100.0"] in rows
    assert ["tokens/s, one core", "150.0"] in rows
    assert "someone" not in str(card)
    assert "It was trained for 2,000 steps after that." in card.text
    assert "fine-tune it" not in card.text


def test_results_on_data_sets_of_the_hub_are_files_for_their_leaderboards(tmp_path):
    """The Hub's client reads them back; a local file has no leaderboard."""
    local, shared = evaluation_of("light", 5000).to_dict(), evaluation_of("light", 5000).to_dict()
    shared["data"] = "owner/opus-100:de-en"
    files = result_files([local | {"data": "other.jsonl"}, shared])
    assert [*files] == [".eval_results/owner-opus-100-de-en.yaml"]
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/owner-opus-100-de-en.yaml"]))
    assert [(entry.dataset_id, entry.task_id, entry.value, entry.notes) for entry in entries] == [
        ("owner/opus-100", "de-en", 41.25, "BLEU"),
        ("owner/opus-100", "de-en", 62.5, "chrF"),
    ]


def test_results_name_the_metrics_that_were_chosen(tmp_path):
    measured = evaluation_of("light", 5000)
    measured.model.scores = {"multi-bleu": 38.5, "cer": 4.25, "comet": 83.94}
    measured.signatures = {"multi-bleu": "Moses tokens (sacremoses 0.2.0, lang:en)", "cer": "edits"}
    (tmp_path / "results.json").write_text(json.dumps(measured.to_dict()))
    card = ModelCard(model_card(FACTS, name="alice/light", results=[read_results(tmp_path / "results.json", 5000)]))
    assert [row[:2] for row in table_rows(card)][1:4] == [
        ["multi-bleu", "38.5"], ["CER", "4.2"], ["COMET", "83.9"]
    ]  # fmt: skip
    assert "multi-bleu: `Moses tokens (sacremoses 0.2.0, lang:en)`." in card.text
    assert [result.metric_name for result in card.data.eval_results] == ["multi-bleu", "CER", "COMET"]


def test_a_model_that_was_not_compressed():
    card = ModelCard(model_card(FACTS, name="alice/subformer", steps=3000))
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["subformer"],
    }
    assert "1,234,567 unique parameters in 4.9 megabytes, trained for 3,000 steps." in card.text
    assert 'AutoModelForCausalLM.from_pretrained("alice/subformer", trust_remote_code=True)' in card.text
    assert "compressed" not in card.text


@pytest.mark.parametrize(
    "text",
    [
        "`a` | b",
        "<script>alert(1)</script>",
        "x\n\n# A heading\n\n---\nlicense: mit\n---",
        "{{ 7 * 7 }}",
        "``` | ",
        "|",
    ],
)
def test_foreign_text_stays_text(source, tmp_path, text):
    """It neither ends what it stands in nor becomes markup, metadata or a template."""
    report = plan(source, rank=5, method="paper", progress=False)
    plain = model_card(FACTS, report, name="alice/light", results=[evaluated(tmp_path, 50, teacher="teacher")])
    foreign = {"license": text, "language": [text], "pipeline_tag": text, "base_model": text}
    report = replace(
        report,
        source=text,
        family=text,
        calibration=text,
        options={text: text},
        inherited=report.inherited | foreign,
        matrices=[replace(matrix, name=text, form=text, setting=text) for matrix in report.matrices],
    )
    hostile = [evaluated(tmp_path, 50, teacher=text, data=text)]
    hostile[0] |= {"source": text, "target": text, "generation": {text: text}}
    card = ModelCard(model_card(FACTS, report, name="alice/light", results=hostile))
    assert blocks(card) == blocks(ModelCard(plain))
    assert (card.data.license, card.data.language, card.data.base_model) == (text, [text], text)
    html = MarkdownIt("commonmark").enable("table").render(card.text)
    assert "<script" not in html
    assert "49" not in html.partition("Results")[0].partition("<table>")[0]


@pytest.mark.parametrize(
    "metadata", ["a: [1\n", "- a list\n", "license: {name: x}\nlanguage: [1, 2]\n", "license: 3\n", ""]
)
def test_a_card_that_cannot_be_read_gives_nothing(tmp_path, metadata, caplog):
    (tmp_path / "README.md").write_text(f"---\n{metadata}---\nText\n")
    with caplog.at_level(logging.WARNING, "lightformers_hf"):
        assert inherited_metadata(tmp_path, None) == {}
    warned = any("so nothing is inherited" in record.message for record in caplog.records)
    assert warned == metadata.startswith(("a", "-"))


def test_what_a_source_on_the_hub_adds(source, tmp_path):
    metadata = inherited_metadata(source, "org/model")
    assert metadata["base_model"] == "org/model"
    assert metadata["license_link"] == "https://huggingface.co/org/model/blob/main/LICENSE"
    assert inherited_metadata(source / "nowhere", "org/model") == {"base_model": "org/model"}
    recovered = tmp_path / "recovered"  # without a card, but with the report of the conversion
    recovered.mkdir()
    (recovered / "compression.json").write_text(json.dumps({"inherited": metadata}))
    assert inherited_metadata(recovered, None) == metadata


def test_results_of_another_model_are_refused(tmp_path):
    evaluated(tmp_path, 50)
    with pytest.raises(ValueError, match=r"results.json measures a model of 50 parameters, this one has 1,000"):
        read_results(tmp_path / "results.json", 1000)
    for content in ("{", "[]", "{}", '{"model": {"parameters": 50}}', '{"model": null}'):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match=r"results.json holds no results"):
            read_results(tmp_path / "results.json", 50)


def test_the_card_of_an_export_says_what_it_was_made_of(tmp_path):
    metadata = {"base_model": "someone/opus-mt-de-en", "license": "apache-2.0", "language": ["de", "en"]}
    source = SimpleNamespace(folder=tmp_path, hub_name=None)
    ModelCard(f"---\n{yaml.safe_dump(metadata)}---\n").save(tmp_path / "README.md")
    for form, relation in (("int8", "quantized"), ("float32", "finetune")):
        options = {"lines": ["`a` | b <b>c</b>."], "library": "ctranslate2", "example": "run()"}
        (tmp_path / form).mkdir()
        write_card(tmp_path / form, source, engine="ctranslate2", form=form, **options)
        card = ModelCard.load(tmp_path / form / "README.md")
        assert card.data.to_dict() == metadata | {
            "base_model_relation": relation,
            "library_name": "ctranslate2",
            "tags": ["ctranslate2", form],
        }
        assert "html_inline" not in str(MarkdownIt("commonmark").parse(card.text))
        assert blocks(card).count("list_item_open") == 1
        assert "```python\nrun()\n```" in card.text


def test_of_a_model_on_the_hub_the_card_says_how_it_comes_from_it(source):
    report = replace(plan(source, rank=5, method="paper", progress=False), inherited={"base_model": "someone/teacher"})
    data = ModelCard(model_card(FACTS, report)).data
    assert (data.base_model, data.base_model_relation) == ("someone/teacher", "finetune")
    assert 'from_pretrained("x", trust' in model_card(FACTS, report, folder='x"\n')


def test_without_a_card_the_tokenizer_names_the_languages(tiny_marian):
    assert plan(tiny_marian, rank=5, method="paper", progress=False).inherited["language"] == ["de", "en"]
