"""What the scripts share and no script's own test looks at."""

import common
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf.loading import unique_parameters


def test_positions_that_are_computed_are_no_parameters(tiny_marian):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    computed = 2 * model.config.max_position_embeddings * model.config.d_model  # Marian's sinusoids, in both stacks
    every = sum(parameter.numel() for parameter in model.parameters())
    assert common.parameter_count(model) == f"{every - computed:,}" == f"{unique_parameters(model):,}"
