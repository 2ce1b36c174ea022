"""What a metric is, by its definition: the matrix that errors are measured by, whole; and what a model loses."""

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf.checkpoints.teacher import read
from lightformers_hf.conversion.calibration_text import synthetic_batches
from lightformers_hf.conversion.moments import Damped
from lightformers_hf.conversion.sensitivity import token_mask


def weigh(metric, matrix):
    """Lᵀ W R, float64."""
    rows = metric.left.T if isinstance(metric.rows, Damped) else metric.left.diag()
    return rows @ matrix.double() @ metric.right


# Unit roundoff of float32; matrix multiplications from the first layer of the tiny models to the last, forwards and
# backwards; terms of each of their sums at most; how many standard deviations of rounding are allowed.
ROUNDOFF, PRODUCTS, TERMS, DEVIATIONS = 2**-24, 2 * 2 * 10, 64, 4


def assert_sums_close(found, left, right):
    """Sums over tokens of products of two columns, `left.T @ right`, up to what float32 leaves of them.

    Rounding errors of a sum of n terms add up as a random walk does, to √n roundings (Higham and Mary 2019). So every
    number that a network of such sums computes has an error of `error` times the largest column's norm, and by Cauchy
    and Schwarz a sum of products one of that times the norms of both columns, on either side.
    """
    left, right = left.double(), right.double()
    error = DEVIATIONS * (PRODUCTS * TERMS + len(left)) ** 0.5 * ROUNDOFF
    norms, others = left.norm(dim=0), right.norm(dim=0)
    bound = error * (norms.max() * others + norms[:, None] * others.max())
    assert ((found - left.T @ right).abs() <= bound).all()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    """What a model with 21 tokens and more says about a fixed batch."""
    ids = torch.arange(1, 21).view(2, 10)
    return model(ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids[:, 3:9]).logits


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
    author, differences = read(folder), []
    for batch in synthetic_batches(author.model, author, 64, 7):
        kept = token_mask(batch, "target")
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        differences.append((light(**inputs).logits[kept] - teacher(**inputs).logits[kept]).flatten())
    return torch.cat(differences).square().mean().item()
