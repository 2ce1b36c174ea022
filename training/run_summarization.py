#!/usr/bin/env python
"""Train a summarization model: a converted checkpoint, a dense one, or the same shapes from random weights.

    python training/run_summarization.py --model-name-or-path converted --teacher bart-large-cnn \
        --train-file train.jsonl --validation-file validation.jsonl --test-file test.jsonl \
        --text-column document --summary-column summary --output-dir recovered \
        --max-tokens 4096 --max-steps 30000 --label-smoothing-factor 0.1 --bf16 \
        --learning-rate 3e-5 --lr-scheduler-type polynomial --warmup-steps 500 \
        --num-beams 4 --length-penalty 2.0 --min-length 55 --max-length 140 --no-repeat-ngram-size 3

Data: JSON lines `{"document": "…", "summary": "…"}`, or two columns of a CSV or Parquet file or of a Hub dataset. The
other options are those of `run_translation.py`: all options of `Seq2SeqTrainingArguments` work, the teacher is
optional, and `--resume-from-checkpoint` resumes an interrupted run. The metrics are ROUGE-1, ROUGE-2, ROUGE-L
and ROUGE-Lsum (F1), or those of `--metric`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import seq2seq
from arguments import ModelArguments, parse_arguments
from common import run_script
from seq2seq import DistillationArguments, GenerationArguments, Task, TrainingArguments

from lightformers_hf.evaluation.quality import SUMMARIES


@dataclass(kw_only=True)
class DataArguments(seq2seq.DataArguments):
    """Options of the data."""

    text_column: str = field(default="document", metadata={"help": "Column of the text to summarize."})
    summary_column: str = field(default="summary", metadata={"help": "Column of its summary."})
    max_source_length: int = field(default=512, metadata={"help": "Tokens; longer texts are cut."})


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, test, save, summarize."""
    classes = (ModelArguments, GenerationArguments, DataArguments, DistillationArguments, TrainingArguments)
    arguments = parse_arguments(classes, argv)
    data = arguments[2]
    columns = (data.text_column, data.summary_column)
    seq2seq.run(Task(columns, outputs="summaries", default=SUMMARIES), *arguments)


if __name__ == "__main__":
    run_script(main)
