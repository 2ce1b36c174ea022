"""BART's noise against its definition; the stream; whole runs, killed ones, two processes, bad input."""

import gzip
import itertools
import json
import math

import build_tokenizer
import numpy as np
import pytest
import run_denoising as script
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, poisson
from tiny import sizes
from training.scripts import command, losses, run_on_two
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

MASK = -1


def spans_of(ids, noised):
    """Lengths of the spans that masks stand for, in order; fails where `noised` is no infilling of distinct `ids`."""
    lengths, position = [], 0
    for token, behind in zip(noised, [*noised[1:], None], strict=True):
        if token == MASK:
            assert behind != MASK
            end = len(ids) if behind is None else ids.index(behind)
            lengths.append(end - position)
            position = end
        else:
            assert ids[position] == token
            position += 1
    assert position == len(ids)
    return lengths


@settings(max_examples=150)
@given(st.integers(1, 120), st.floats(0.05, 0.45), st.floats(1.0, 5.0), st.integers(0, 2**32 - 1))
def test_infilling_replaces_spans_that_hold_the_share(size, share, mean, seed):
    ids = list(range(100, 100 + size))
    noised = script.infill(ids, MASK, share=share, mean=mean, random=np.random.default_rng(seed))
    lengths = spans_of(ids, noised)
    assert sum(lengths) == round(share * size)
    assert len(noised) <= size


def test_spans_are_poisson_and_anywhere():
    random, ids = np.random.default_rng(1), list(range(3000))
    counts, masked = np.zeros(11), np.zeros(3000)
    for _ in range(60):
        noised = script.infill(ids, MASK, share=0.3, mean=3.0, random=random)
        lengths = spans_of(ids, noised)
        counts += np.bincount(np.minimum(lengths, 10), minlength=11)
        masked[list(set(ids) - set(noised))] += 1
    expected = np.append(poisson.pmf(range(10), 3), poisson.sf(9, 3)) * counts.sum()
    assert counts[0] > 500  # insertions
    assert chisquare(counts, expected).pvalue > 1e-3
    thirds = masked.reshape(3, -1).mean(axis=1) / 60
    assert thirds == pytest.approx([0.3] * 3, abs=0.01)
    assert masked[:3].mean() / 60 == pytest.approx(0.3, abs=0.2)  # the ends too
    assert masked[-3:].mean() / 60 == pytest.approx(0.3, abs=0.2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, parallel_sentences):
    """A folder with 40 lines of two sentences and empty ones between, and a tokenizer without a mask."""
    folder = tmp_path_factory.mktemp("corpus")
    sentences = [pair["en"] for pair in parallel_sentences]
    lines = [f"{a} {b}\n\n" for a, b in itertools.islice(itertools.permutations(sentences, 2), 40)]
    for name, part in {"a": lines[:20], "b": lines[20:]}.items():
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress("".join(part).encode()))
    (folder / "held_out.txt").write_text("".join(lines[:8]))
    options = ["--kind", "bpe", "--vocab-size", "160", "--output", str(folder / "tokenizer")]
    build_tokenizer.main([str(folder / "held_out.txt"), *options])
    return folder


@pytest.fixture
def noised(corpus):
    """Makes blocks of the corpus."""

    def make(repeat=False, shuffle=0, seed=0, **options):
        data = script.DataArguments(block_size=40, **options)
        files = [str(corpus / f"{name}.txt.gz") for name in "ab"]
        texts = script.load_stream(files, "text")
        texts = texts.shuffle(seed=seed, buffer_size=shuffle) if shuffle else texts
        tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        return script.NoisedBlocks(texts, tokenizer, data, seed, repeat)

    return make


def test_blocks_hold_the_whole_text_once_and_their_noise(noised, corpus):
    stream = noised()
    tokenizer, mask = stream.tokenizer, stream.tokenizer.mask_token_id
    blocks = list(stream)
    whole = "".join(gzip.decompress((corpus / f"{name}.txt.gz").read_bytes()).decode() for name in "ab")
    labels = [block["labels"] for block in blocks]
    assert {ids[-1] for ids in labels} == {tokenizer.eos_token_id}
    assert tokenizer.decode([token for ids in labels for token in ids[:-1]]).split() == whole.split()
    assert 30 < np.mean([len(ids) for ids in labels]) <= max(len(ids) for ids in labels) <= 40
    for block, sentences in zip(blocks, stream.blocks(), strict=True):
        source, kept = block["input_ids"], [token for token in block["input_ids"][:-1] if token != mask]
        assert source[-1] == tokenizer.eos_token_id
        assert len(block["labels"]) - 1 - len(kept) == round(0.3 * (len(block["labels"]) - 1))
        assert mask in source
        assert mask not in block["labels"]
        orders = itertools.permutations(sentences)
        assert any(is_subsequence(kept, itertools.chain.from_iterable(order)) for order in orders)


def is_subsequence(tokens, text):
    text = iter(text)
    return all(token in text for token in tokens)


def test_sentences_are_permuted_whole(noised):
    stream = noised(mask_share=1e-9)
    orders = set()
    for block, sentences in zip(stream, stream.blocks(), strict=True):
        matching = [
            order
            for order in itertools.permutations(range(len(sentences)))
            if [token for i in order for token in sentences[i]] == block["input_ids"][:-1]
        ]
        assert matching
        orders.update(matching)
    assert {(0, 1, 2), (2, 1, 0), (1, 0, 2)} <= orders
    for block in noised(mask_share=1e-9, permute_sentences=False):
        assert block["input_ids"] == block["labels"]


def test_the_same_seed_gives_the_same_noise_and_another_pass_other(noised):
    assert list(noised(shuffle=7)) == list(noised(shuffle=7))
    size = len(list(noised()))
    assert list(noised(seed=1)) != list(noised())
    passes = list(itertools.islice(noised(repeat=True), 2 * size))
    first, second = passes[:size], passes[size:]
    assert first == list(noised())
    assert [block["labels"] for block in first] == [block["labels"] for block in second]
    assert [block["input_ids"] for block in first] != [block["input_ids"] for block in second]
    several = torch.utils.data.DataLoader(noised(), batch_size=None, num_workers=2, collate_fn=lambda block: block)
    assert sorted(block["input_ids"] for block in several) == sorted(block["input_ids"] for block in noised())


def test_the_corpus_is_read_as_it_is_needed(noised):
    """A stream of rows without end."""
    read = []

    def rows():
        for i in itertools.count():
            read.append(i)
            yield {"text": "A man is walking."}

    from datasets import IterableDataset

    stream = noised()
    stream.texts = IterableDataset.from_generator(rows)
    assert len(list(itertools.islice(stream, 5))) == 5
    assert len(read) <= script.ROWS + 1


@pytest.mark.parametrize("name", ["facebook", "marian"])
def test_ends_of_other_tokenizers(name, tiny_marian, corpus):
    if name == "marian":
        assert script.end_tokens(AutoTokenizer.from_pretrained(tiny_marian)) == ([], [0])
        return
    from tokenizers import processors

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")  # as BART's: <s> text </s>
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    assert script.end_tokens(tokenizer) == ([0], [2])


@pytest.fixture
def base(corpus, tmp_path):
    """Options of a short run."""
    (tmp_path / "shapes.json").write_text(json.dumps(sizes(16, layers=2, ffn=16, model_type="lightformer")))
    return {
        "config_name": tmp_path / "shapes.json",
        "tokenizer_name": corpus / "tokenizer",
        "train_files": [corpus / "a.txt.gz", corpus / "b.txt.gz"],
        "output_dir": tmp_path / "out",
        "block_size": 40,
        "shuffle_buffer": 10,
        "per_device_train_batch_size": 2,
        "max_steps": 30,  # the second pass
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def test_a_run_and_a_resumed_one(base, corpus, tmp_path, capsys):
    held_out = {"validation_file": corpus / "held_out.txt", "max_eval_samples": 5}
    script.main(command(base, **held_out))
    out = tmp_path / "out"
    assert np.mean(losses(out)[-5:]) < np.mean(losses(out)[:5]) - 0.3
    results = json.loads((out / "eval_results.json").read_text())
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert "validation perplexity" in capsys.readouterr().out
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert tokenizer.mask_token_id == model.config.vocab_size - 1

    # the same run, first until step 22, in the middle of the second pass
    cut = base | {"output_dir": tmp_path / "cut", "save_strategy": "steps", "save_steps": 22}
    script.main(command(cut, max_steps=22, lr_scheduler_type="constant"))
    script.main([*command(cut, lr_scheduler_type="constant"), "--resume-from-checkpoint"])
    script.main(command(base, output_dir=tmp_path / "whole", lr_scheduler_type="constant"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.usefixtures("warm_python")
def test_two_processes_share_the_blocks(base, tmp_path):
    base = base | {"model.dropout": 0.0}
    script.main(command(base, per_device_train_batch_size=4, max_steps=6))
    halves = command(base, per_device_train_batch_size=2, max_steps=6, output_dir=tmp_path / "two")
    run_on_two(script.__file__, halves)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "out"), rel=1e-4)


def test_the_files_that_are_named_are_streamed(tmp_path):
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    assert list(script.load_stream([str(tmp_path / "a[1].txt")], "text")) == [{"text": "a[1].txt"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_files": ["none.txt"]}, "No data file none.txt"),
        ({"train_files": None}, "one of --train-files and --dataset-name"),
        ({"train_files": ["EMPTY"]}, "no rows"),
        ({"train_files": ["ROWS"], "text_column": "body"}, "no column 'body'; there are 'text', 'number'"),
        ({"train_files": ["ROWS"], "text_column": "number"}, "expected text, found 3"),
        ({"train_files": ["ROWS", "EMPTY"]}, "files of one kind"),
        ({"max_steps": -1}, "give --max-steps"),
        ({"mask_share": 1.0}, "mask_share is 1.0"),
        ({"mean_span": 0}, "mean_span is 0"),
        ({"metric_for_best_model": "perplexity"}, "expected a computed one, loss"),
        ({"label_smoothing_factor": 0.1}, "perplexity is of the text as it is"),
        ({"block_size": 2000}, "1024 positions: lower --block-size from 2000"),
        ({"eval_strategy": "steps"}, "--validation-file"),
        ({"config_name": None, "model_name_or_path": "TINY", "tokenizer_name": None}, "no mask token"),
    ],
)
def test_bad_input_ends_before_the_first_step(base, tmp_path, tiny_marian, changes, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "A dog.", "number": 3}\n')
    places = {"EMPTY": tmp_path / "empty.txt", "ROWS": tmp_path / "rows.jsonl", "TINY": tiny_marian}

    def place(value):
        return [places.get(name, name) for name in value] if isinstance(value, list) else places.get(value, value)

    with pytest.raises((ValueError, OSError), match=message):
        script.main(command(base, **{name: place(value) for name, value in changes.items()}))
    assert not list(tmp_path.glob("out/*"))


def test_text_without_words_does_not_run_for_ever(noised):
    stream = noised(repeat=True)
    stream.texts = Dataset.from_dict({"text": [" ", ""]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="no words"):
        next(iter(stream))
