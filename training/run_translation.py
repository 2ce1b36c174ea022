#!/usr/bin/env python
"""Train a translation model: a converted checkpoint, a dense one, or the same shapes from random weights.

    python training/run_translation.py --model-name-or-path converted --teacher opus-mt-de-en \
        --train-file train.jsonl --validation-file validation.jsonl --test-file test.jsonl \
        --source-lang de --target-lang en --output-dir recovered \
        --max-tokens 4096 --num-train-epochs 3 --label-smoothing-factor 0.1 --bf16 \
        --learning-rate 3e-4 --lr-scheduler-type inverse_sqrt --warmup-steps 500 --eval-strategy epoch \
        --save-strategy epoch --load-best-model-at-end --metric-for-best-model bleu

The data decide the steps: training, evaluation, test. Outputs are scored by metrics that fit the data, or by
those that `--metric multi-bleu chrf` names. All options of `Seq2SeqTrainingArguments` work.
An interrupted run resumes with `--resume-from-checkpoint` added to the same command.

Any architecture trains from random weights: `--config-name shapes.json --tokenizer-name opus-mt-de-en`, where the file
holds `{"model_type": "lightformer", "d_model": 192, …}`. The tokenizer gives the token fields that the file lacks:
`vocab_size`, the ids of pad, bos and eos, and `decoder_start_token_id` (bos, or pad without one, as in Marian).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import seq2seq
from arguments import ModelArguments, parse_arguments
from common import run_script
from seq2seq import DistillationArguments, GenerationArguments, Task, TrainingArguments

from lightformers_hf.languages import named_columns, set_languages


@dataclass(kw_only=True)
class DataArguments(seq2seq.DataArguments):
    """Options of the data."""

    source_lang: str = field(
        metadata={
            "help": "Column, or language within a column 'translation', to translate from. Multilingual tokenizers "
            "have a code for it: de, or de=de_DE if the column has another name."
        }
    )
    target_lang: str = field(metadata={"help": "The same for the target: en, or en=en_XX."})


ARGUMENTS = (ModelArguments, GenerationArguments, DataArguments, DistillationArguments, TrainingArguments)


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, test, save, summarize."""
    arguments = parse_arguments(ARGUMENTS, argv)
    data = arguments[2]
    task = Task(
        columns=named_columns(data.source_lang, data.target_lang),
        outputs="translations",
        prepare=partial(set_languages, source=data.source_lang, target=data.target_lang),
    )
    seq2seq.run(task, *arguments)


if __name__ == "__main__":
    run_script(main)
