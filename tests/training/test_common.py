"""What the scripts share and no script's own test looks at."""

import json

import common
import pytest
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf.loading import unique_parameters


def test_positions_that_are_computed_are_no_parameters(tiny_marian):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    computed = 2 * model.config.max_position_embeddings * model.config.d_model  # Marian's sinusoids, in both stacks
    every = sum(parameter.numel() for parameter in model.parameters())
    assert common.parameter_count(model) == f"{every - computed:,}" == f"{unique_parameters(model):,}"


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "texts.csv", "texts.tsv"])
def test_texts_are_the_same_from_every_kind_of_file(tmp_path, name):
    texts = ["Ein Hund.", "null", "1984"]
    lines = {".jsonl": [json.dumps({"text": text}) for text in texts], ".txt": texts}
    (tmp_path / name).write_text("\n".join(lines.get((tmp_path / name).suffix, ["text", *texts])) + "\n")
    assert common.load_texts(str(tmp_path / name), ["text"])["text"][:] == texts
