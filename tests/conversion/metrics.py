"""What a metric is, by its definition: the matrix that errors are measured by, whole; and what a model loses."""

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.conversion.statistics.calibration import token_mask
from lightformers_hf.conversion.statistics.metric import Damped
from lightformers_hf.conversion.statistics.synthesis import synthetic_batches
from lightformers_hf.conversion.teacher import Teacher


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


@torch.no_grad()
def distance(light, teacher, folder) -> float:
    """Mean square of the differences of two models' logits, on text that the checkpoint in `folder` makes."""
    author, differences = Teacher(folder, "t"), []
    for batch in synthetic_batches(author.load(), author, 64, 7, progress=False):
        kept = token_mask(batch, "target")
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        differences.append((light(**inputs).logits[kept] - teacher(**inputs).logits[kept]).flatten())
    return torch.cat(differences).square().mean().item()
