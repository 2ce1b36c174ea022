#!/usr/bin/env python
"""Train a tokenizer on text and save it as a folder that `AutoTokenizer.from_pretrained` loads.

    python training/build_tokenizer.py train.jsonl --columns de en --kind bpe --vocab-size 8000 --output tokenizer
    python training/build_tokenizer.py train.txt.gz --kind words --output words

`bpe` and `unigram` are subword vocabularies for sequence-to-sequence models, one for all columns. Text is in NFKC,
spaces become ▁ (Kudo & Richardson 2018), and `</s>` ends every text. `words` is for language models on text that is
split into words (WikiText). Each word is an entry, and ids follow falling frequency as adaptive softmax requires.
No token is added to a text.

The special tokens `<s> <pad> </s> <unk>` are the ids 0 to 3 in every kind; where a text has them, they are these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from arguments import ScriptParser
from common import load_texts, run_script
from datasets import Dataset, concatenate_datasets
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lightformers_hf.files import atomic_output

BOS, PAD, EOS, UNK = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
KINDS = ("bpe", "unigram", "words")
BATCH = 1000  # texts handed to the library at once


def train_tokenizer(texts: Dataset, kind: str, vocab_size: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of `kind` (`bpe`, `unigram`, `words`) trained on the column `text`.

    `vocab_size` counts the special tokens. `words` keeps the most frequent ones, `None` means all. A subword
    vocabulary comes out smaller where the text does not give so many pieces.

    Raises `ValueError` for an unknown kind, a missing or too small `vocab_size`, texts without a word.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: expected one of {', '.join(KINDS)}.")
    if vocab_size is None and kind != "words":
        raise ValueError(f"--kind {kind} needs --vocab-size, such as 8000.")
    if vocab_size is not None and vocab_size <= len(SPECIAL):
        raise ValueError(f"vocab_size is {vocab_size}: expected more than the {len(SPECIAL)} special tokens.")
    tokenizer = _word_level(texts, vocab_size) if kind == "words" else _subwords(texts, kind, vocab_size)
    if tokenizer.get_vocab_size() == len(SPECIAL):
        raise ValueError("The texts hold no words: expected at least one.")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _batches(texts: Dataset) -> Iterator[list[str]]:
    return (batch["text"] for batch in texts.iter(BATCH))


def _word_level(texts: Dataset, vocab_size: int | None) -> Tokenizer:
    counter = Tokenizer(models.WordLevel(unk_token=UNK))
    counter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    everything = trainers.WordLevelTrainer(vocab_size=2**31, special_tokens=[], show_progress=False)
    counter.train_from_iterator(_batches(texts), everything)
    found = counter.get_vocab()  # ids by falling frequency
    words = [word for word in sorted(found, key=found.get) if word not in SPECIAL]
    entries = chain(SPECIAL, words[: None if vocab_size is None else vocab_size - len(SPECIAL)])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, unk_token=UNK))
    tokenizer.pre_tokenizer = counter.pre_tokenizer
    return tokenizer


def _subwords(texts: Dataset, kind: str, vocab_size: int) -> Tokenizer:
    options = {"vocab_size": vocab_size, "special_tokens": list(SPECIAL), "show_progress": False}
    if kind == "bpe":
        tokenizer, trainer = Tokenizer(models.BPE(unk_token=UNK)), trainers.BpeTrainer(**options)
    else:
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token=UNK, **options)
    tokenizer.normalizer = normalizers.NFKC()
    # No piece reaches from a word into the punctuation behind it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(_batches(texts), trainer)
    end = [(EOS, tokenizer.token_to_id(EOS))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=end
    )
    return tokenizer


def main(argv: list[str] | None = None) -> None:
    """Read, train, save, report."""
    parser = ScriptParser(__doc__)
    parser.add_argument(
        "data",
        nargs="+",
        help=".txt, .json, .jsonl, .csv, .tsv (.gz), .parquet, or a Hub dataset (its training split)",
    )
    parser.add_argument("--columns", nargs="+", default=["text"], help="or languages within a column 'translation'")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--vocab-size", type=int, help="entries, the special ones too; words: default all")
    parser.add_argument("--output", required=True, help="folder to write; it must be new or empty")
    args = parser.parse_args(argv)
    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} is there already: choose another folder.")
    with atomic_output(output, inputs=args.data) as folder:
        texts = concatenate_datasets([load_texts(name, args.columns) for name in args.data])
        tokenizer = train_tokenizer(texts, args.kind, args.vocab_size)
        tokenizer.save_pretrained(folder)
    tokens = sum(len(ids) for batch in _batches(texts) for ids in tokenizer(batch)["input_ids"])
    Console().print(
        f"{len(tokenizer):,} entries, {tokens / len(texts):.1f} tokens a text, saved in {escape(str(output))}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    run_script(main)
