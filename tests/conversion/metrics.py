"""What a metric is, by its definition: the matrix that errors are measured by, whole; and what a model loses."""

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.conversion.statistics.metric import Damped


def weigh(metric, matrix):
    """Lᵀ W R, float64."""
    rows = metric.left.T if isinstance(metric.rows, Damped) else metric.left.diag()
    return rows @ matrix.double() @ metric.right


def loss(folder, teacher, parallel_sentences) -> float:
    """Cross-entropy of the sentences, nats a token."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    german, english = ([pair[language] for pair in parallel_sentences] for language in ("de", "en"))
    batch = tokenizer(german, text_target=english, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    with torch.no_grad():
        return model(**batch).loss.item()
