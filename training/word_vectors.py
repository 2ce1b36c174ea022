"""Word vectors such as GloVe's as the start of a token table."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightformers_hf.conversion import decompose
from lightformers_hf.matrices import low_rank_state, product_of, rank_of

WORD_MARKS = ("▁", "Ġ")  # first character of the first piece of a word in a subword vocabulary


def read_vectors(path: str, wanted: set[str]) -> dict[str, np.ndarray]:
    """The vectors of the `wanted` words in a text file of GloVe's form, or fastText's (with a line of counts first).

    One line is in memory at a time. Raises `FileNotFoundError`, and `ValueError` for a line that has another form.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"No word vectors {path}: give a text file such as glove.6B.300d.txt.")
    found, width = {}, None
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            values = line.rstrip().split(" ")
            if number == 1 and len(values) == 2:
                continue
            width = width or len(values) - 1
            word = " ".join(values[:-width])  # some of GloVe's have spaces in them
            if len(values) <= width or width < 2:
                raise ValueError(f"{path}, line {number}: expected a word and {width} numbers.")
            if word in wanted and word not in found:
                try:
                    found[word] = np.array(values[-width:], dtype=np.float32)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: expected a word and {width} numbers.") from error
    return found


@torch.no_grad()
def start_embedding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> int:
    """Give the token table the vectors of the file `path`, and return how many words it has.

    All vectors are scaled by one factor, to the standard deviation of the random rows, which words that the file does
    not have keep: positions and LayerNorms then get inputs of the same size as from random weights. A word that the
    file has only in lower case gets that vector. In a subword vocabulary, pieces at the beginning of a word represent
    it. A low-rank table becomes the truncated SVD of the dense one.

    Raises `ValueError` if the widths differ, or the file has none of the words.
    """
    table = model.get_input_embeddings()
    dense, rank = product_of(table).clone(), rank_of(table)
    vocabulary = tokenizer.get_vocab()
    if any(token.startswith(WORD_MARKS) for token in vocabulary):
        vocabulary = {token[1:]: i for token, i in vocabulary.items() if token.startswith(WORD_MARKS)}
    vectors = read_vectors(path, {form for word in vocabulary for form in (word, word.lower())})
    rows = {i: vectors.get(word, vectors.get(word.lower())) for word, i in vocabulary.items()}
    rows = {i: vector for i, vector in rows.items() if vector is not None}
    if not rows:
        raise ValueError(f"{path} has none of the {len(vocabulary)} words of the tokenizer {tokenizer.name_or_path}.")
    known = torch.from_numpy(np.stack(list(rows.values())))
    if known.shape[1] != dense.shape[1]:
        raise ValueError(
            f"The vectors of {path} are {known.shape[1]} wide, the model's embedding matrix {dense.shape[1]}: set "
            f"embedding_dim to {known.shape[1]} in its configuration."
        )
    dense[list(rows)] = known * (dense.std() / known.std())
    state = {"weight": dense}
    if rank is not None:
        factors = decompose(dense, name="word vectors", rank=rank).truncate(rank, "balanced")
        state = low_rank_state(table, *factors)
    table.load_state_dict(state)
    if table.padding_idx is not None:
        table.weight[table.padding_idx] = 0
    return len(rows)
