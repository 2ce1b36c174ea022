"""The papers' printed parameter counts come out of the configurations, and the command says whether they do."""

import json

import count_parameters as script
import pytest
import torch
from count_parameters import ParameterCount, ParameterRow, count_parameters, parameter_rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import models
from lightformers_hf.loading import unique_parameters

pytestmark = pytest.mark.quick


# Several tables print the same model.
DISTINCT = {f"{row.model} {row.config} {row.millions}": row for row in parameter_rows()}.values()


@pytest.mark.parametrize("row", DISTINCT, ids=[row.table for row in DISTINCT])
def test_printed_count(row):
    model_class = getattr(models, row.model)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**row.config))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6  # parameters() counts tied ones once
    last_digit = 10.0 ** -len(str(row.millions).partition(".")[2])
    assert millions == pytest.approx(row.millions, abs=max(row.tolerance * row.millions, last_digit / 2))


def test_every_architecture_has_rows():
    names = [row.table for row in parameter_rows()]
    assert len(set(names)) == len(names) >= 145
    assert {name.split()[0] for name in names} == {"LightFormer", "PartialFormer", "Subformer"}


def test_a_wide_tolerance_has_its_reason():
    assert not [row.table for row in parameter_rows() if row.tolerance >= 0.05 and "tolerance: " not in row.note]


@pytest.mark.parametrize(
    ("printed", "tolerance", "ours", "within"),
    [
        (36.8, 0.0, 36.849, True),  # rounds to what is printed
        (36.8, 0.0, 36.851, False),
        (63, 0.0, 63.4, True),
        (63, 0.0, 62.4, False),
        (100, 0.02, 101.9, True),
        (100, 0.02, 97.9, False),
    ],
)
def test_within(printed, tolerance, ours, within):
    assert ParameterCount(ParameterRow("row", "Model", printed, tolerance, {}), ours).within is within


def test_the_script_counts_the_rows_asked_for(run_script):
    code, shown, _ = run_script(script, "--table", "subformer t2")
    assert code == 0
    assert "7 of 7 rows within their tolerance" in shown
    assert "+2.3%" in shown  # 38.86M of 38M
    (row,) = json.loads(run_script(script, "--table", "t6 r4", "--json", "-")[1])
    assert row["table"] == "LightFormer T6 r4"
    assert row["within"] is True
    assert row["ours"] == pytest.approx(14.6, abs=0.05)


def test_a_recipe_and_a_model_are_counted_without_weights(run_script, tmp_path, tiny_marian):
    shapes = "d_model: 8, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16, decoder_ffn_dim: 16"
    shapes += ", encoder_attention_heads: 2, decoder_attention_heads: 2, max_position_embeddings: 64"
    recipe = tmp_path / "small.yaml"
    recipe.write_text(f"# A head (vocabulary 40).\nmodel: {{model_type: lightformer, {shapes}}}\n")
    attention, network, norm = 4 * (8 * 8 + 8), 2 * 8 * 16 + 8 + 16, 2 * 8
    layers = 3 * attention + 2 * network + 5 * norm

    def count(*words):
        code, out, err = run_script(script, *words, "--json", "-")
        return json.loads(out) if code == 0 else err

    marian = unique_parameters(AutoModelForSeq2SeqLM.from_pretrained(tiny_marian))
    assert count(recipe, tiny_marian) == {str(recipe): layers + 40 * 8, str(tiny_marian): marian}
    assert count(recipe, "--vocab-size", 50) == {str(recipe): layers + 50 * 8}
    recipe.write_text(f"tokenizer_name: {tiny_marian}\nmodel: {{model_type: lightformer, {shapes}}}\n")
    assert count(recipe) == {str(recipe): layers + 8 * len(AutoTokenizer.from_pretrained(tiny_marian))}
    head = "# python training/run_clm.py\n"
    recipe.write_text(f"{head}model: {{model_type: lightformer, {shapes}}}\n")
    assert "vocab_size" in count(recipe)
    decoder = 2 * attention - attention + network + 2 * norm
    assert count(recipe, "--vocab-size", 50) == {str(recipe): decoder + 50 * 8}
    recipe.write_text("model: {model_type: lightformer, d_modle: 8}\n")
    assert "'d_modle'; did you mean d_model" in count(recipe)
    recipe.write_text("model: {model_type: lightformer, vocab_size: 5, d_model: wide}\n")
    assert "'d_model' expected int, got str" in count(recipe)
    assert "No recipe none.yaml" in count("none.yaml")
    assert "Write them below model: in a copy of the recipe" in count(f"{recipe},d_model=8")
    for place in ("./none", "training/none/model", "a b"):
        assert f"{place} is no folder: expected the folder of a checkpoint" in count(place)
    (tmp_path / "export.json").write_text("{}")
    assert "give the checkpoint that it was exported from" in count(tmp_path)
    for words in (["--vocab-size", 5], [tiny_marian, "--vocab-size", 5], [tiny_marian, "--table", "T2"]):
        assert "remove" in count(*words) or "name a recipe" in count(*words)


def test_the_script_fails_where_a_row_is_out_of_tolerance(run_script, monkeypatch):
    row = next(row for row in parameter_rows() if row.table == "LightFormer T6 r4")
    wrong = ParameterRow("wrong", row.model, 14.0, 0.01, row.config)
    monkeypatch.setattr(script, "parameter_rows", lambda: (row, wrong))
    code, out, _ = run_script(script)
    assert code == 1
    assert "1 of 2 rows within their tolerance" in out


def test_no_such_row():
    with pytest.raises(ValueError, match=r"'T99'.*LightFormer T6.*Subformer T5"):
        count_parameters("T99")
