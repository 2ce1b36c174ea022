"""Classifiers from the command line: folds, word vectors, converted encoders, a killed cross-validation, bad input."""

import collections
import gzip
import json
from statistics import fmean, stdev

import build_tokenizer
import numpy as np
import pytest
import run_classification as script
import torch
import word_vectors
from datasets import ClassLabel, Dataset, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import sizes
from training.scripts import command, killed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

import lightformers_hf
from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration

SHAPES = {
    "model_type": "lightformer", "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "max_position_embeddings": 32, "dropout": 0.0, "init_std": 0.25,
}  # fmt: skip
GOOD, BAD, REST = "good fine lovely".split(), "bad poor dull".split(), "the film was a story of some people".split()


@pytest.fixture
def base(tmp_path):
    """Options of a short cross-validation on sixty reviews: 24 good ones, 36 bad ones."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(60):
        words = [*random.choice(REST, 5), random.choice(GOOD if i % 5 < 2 else BAD)]
        rows.append({"text": " ".join(random.permutation(words)), "label": int(i % 5 < 2), "fold": i % 3})
    for name, part in {"all": rows, "train": rows[:40], "test": rows[40:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    words = ["--kind", "words", "--output", str(tmp_path / "words")]
    build_tokenizer.main([str(tmp_path / "all.jsonl"), *words])
    return {
        "config_name": tmp_path / "shapes.json", "tokenizer_name": tmp_path / "words",
        "train_file": tmp_path / "all.jsonl", "output_dir": tmp_path / "out", "max_length": 20,
        "per_device_train_batch_size": 10, "max_steps": 30, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip


def results(folder):
    return json.loads((folder / "test_results.json").read_text())


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=80), st.integers(2, 10), st.integers(0, 9))
def test_folds_are_stratified(labels, folds, seed):
    counts = collections.Counter(labels)
    if min(counts.values()) < folds:
        with pytest.raises(ValueError, match=f"num_folds is {folds}: expected from 2 to {min(counts.values())}"):
            script.stratified_folds(labels, folds, seed)
        return
    assigned = script.stratified_folds(labels, folds, seed)
    for chosen in (labels, *counts):
        of_class = [f for f, label in zip(assigned, labels, strict=True) if label in chosen]
        sizes = np.bincount(of_class, minlength=folds)
        assert len(sizes) == folds
        assert sizes.max() - sizes.min() <= 1
    assert np.array_equal(assigned, script.stratified_folds(labels, folds, seed))


def test_folds_of_a_run_that_is_written_over_are_not_the_next_ones(base, tmp_path, monkeypatch):
    script.main(command(base, fold_column="fold", max_steps=1))
    run, folds = script.run, []

    def first_alone(*args):
        folds.append(args)
        if len(folds) > 1:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(script, "run", first_alone)
    with pytest.raises(KeyboardInterrupt):
        script.main([*command(base, fold_column="fold", max_steps=2), "--overwrite-output"])
    found = [(tmp_path / "out" / f"fold-{fold}" / "test_results.json").is_file() for fold in range(3)]
    assert found == [True, False, False]
    assert not (tmp_path / "out" / "test_results.json").exists()  # of the run before, it would pass for this one's


def test_folds_are_not_put_beside_another_run(base, tmp_path):
    single = {"train_file": tmp_path / "train.jsonl", "test_file": tmp_path / "test.jsonl", "max_steps": 1}
    script.main(command(base | single))
    before = results(tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"holds other things than folds \(.*--overwrite-output"):
        script.main(command(base, num_folds=2, max_steps=1))
    assert results(tmp_path / "out") == before


def test_every_row_is_tested_once_and_never_trained_on(base, tmp_path):
    rows = script.load_labelled(str(tmp_path / "all.jsonl"), script.DataArguments(), max_samples=None)
    rows = rows.add_column("number", list(range(60)))
    folds = script.stratified_folds(rows["label"], 5, seed=0)
    tested = []
    for fold in range(5):
        parts = script.fold_parts(rows, fold, folds, validate=True)
        numbers = {name: part["number"][:] for name, part in parts.items()}
        assert sorted(number for part in numbers.values() for number in part) == list(range(60))
        assert set(folds[numbers["validation"]]) == {(fold + 1) % 5}
        tested += numbers["test"]
    assert sorted(tested) == list(range(60))


def test_cross_validation_learns_and_reports_mean_and_spread(base, tmp_path, capsys):
    script.main(command(base, fold_column="fold", eval_strategy="steps", eval_steps=15))
    out = tmp_path / "out"
    found = [results(out / f"fold-{fold}")["test_accuracy"] for fold in range(3)]
    assert min(found) > 90  # one word decides; chance is 60
    whole = results(out)
    assert whole["test_accuracies"] == found
    assert whole["test_accuracy"] == pytest.approx(fmean(found))
    assert whole["test_accuracy_std"] == pytest.approx(stdev(found))
    model = AutoModelForSequenceClassification.from_pretrained(out / "fold-0")
    assert model.config.id2label == {0: "0", 1: "1"}
    # the accuracy is that of the saved model on the rows of the fold
    tokenizer = AutoTokenizer.from_pretrained(out / "fold-0")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["fold"] == 0]
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False)
    hits = model(**batch).logits.argmax(dim=-1) == torch.tensor([row["label"] for row in rows])
    assert 100 * hits.float().mean().item() == pytest.approx(found[0])
    printed = capsys.readouterr().out
    for words in ("mean accuracy", "standard deviation", "fold 2 accuracy", "embedding matrix"):
        assert words in printed


def test_a_killed_cross_validation_goes_on(base, tmp_path):
    options = base | {"num_folds": 3, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    script.main(command(options, output_dir=tmp_path / "whole"))
    with killed(
        script.FiniteTrainer, lambda one: one.args.output_dir.endswith("fold-1") and one.state.global_step == 5
    ):
        script.main(command(options))
    with pytest.raises(FileExistsError, match=r"fold-0 is not empty.*resume-from-checkpoint"):
        script.main(command(options))
    with pytest.raises(ValueError, match=r"begun with learning_rate 0.01, not 0.1"):
        script.main([*command(options, learning_rate=0.1), "--resume-from-checkpoint"])
    kept = (tmp_path / "out" / "fold-0" / "test_results.json").stat().st_mtime_ns
    script.main([*command(options), "--resume-from-checkpoint"])
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    assert (tmp_path / "out" / "fold-0" / "test_results.json").stat().st_mtime_ns == kept


def test_train_and_test_files_and_names_of_classes(base, tmp_path):
    files = {}
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        lines = ["sentence\tclass\n", *(f"{row['text']}\t{['bad', 'good'][row['label']]}\n" for row in rows)]
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
        files[f"{name}_file"] = tmp_path / f"{name}.tsv"
    columns = {"text_column": "sentence", "label_column": "class"}
    script.main(command(base, **files, **columns))
    out = tmp_path / "out"
    assert results(out)["test_accuracy"] > 90
    assert AutoModelForSequenceClassification.from_pretrained(out).config.id2label == {0: "bad", 1: "good"}
    # a trained classifier alone is tested, by its own classes
    trained = {"model_name_or_path": out, "config_name": None, "tokenizer_name": None, "train_file": None}
    script.main(command(base, **columns, **trained, test_file=files["test_file"], output_dir=tmp_path / "again"))
    assert results(tmp_path / "again")["test_accuracy"] == results(out)["test_accuracy"]
    (tmp_path / "other.tsv").write_text("sentence\tclass\nthe film\tgood\na story\tfair\n")
    with pytest.raises(ValueError, match=r"row 2, is of class 'fair'; .*has 'bad', 'good'"):
        script.main(command(base, **columns, **trained, test_file=tmp_path / "other.tsv", output_dir=tmp_path / "no"))


def test_a_dense_classifier_becomes_a_light_one_fold_by_fold(base, tmp_path):
    folds = {"fold_column": "fold", "max_steps": 20}
    script.main(command(base, output_dir=tmp_path / "dense", **folds))
    for fold in range(3):
        places = [tmp_path / f"{kind}/fold-{fold}" for kind in ("dense", "light")]
        lightformers_hf.convert(*places, rank=6, method="paper", progress=False)
    light = {"model_name_or_path": tmp_path / "light/fold-{fold}", "config_name": None, "tokenizer_name": None}
    script.main(command(base, **folds | light | {"learning_rate": 1e-9, "max_steps": 1}))
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/fold-2").config
    assert config.ffn_rank == 6
    for fold in range(3):  # untrained, each is what was converted from its own fold
        one, other = (
            AutoModelForSequenceClassification.from_pretrained(folder / f"fold-{fold}").classifier.weight
            for folder in (tmp_path / "light", tmp_path / "out")
        )
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        reports = [(tmp_path / run / f"fold-{fold}/compression.json").read_text() for run in ("light", "out")]
        assert reports[0] == reports[1]


@pytest.mark.parametrize("shared", [True, False])
def test_the_encoder_of_a_translation_model(base, tmp_path, shared):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    fields = sizes(16, ffn=16, encoder_layers=2, vocab_size=len(tokenizer), dropout=0.0)
    ranks = {"encoder_groups": 1, "embedding_rank": 4, "attention_rank": 4}
    config = LightFormerConfig(**fields, **ranks, share_encoder_decoder_embeddings=shared)
    pair = LightFormerForConditionalGeneration(config)
    pair.save_pretrained(tmp_path / "pair")
    tokenizer.save_pretrained(tmp_path / "pair")
    args = script.ModelArguments(model_name_or_path=str(tmp_path / "pair"))
    model = script.build_classifier(args, tokenizer, ["no", "yes", "maybe"], None).eval()
    batch = tokenizer(["the film was good"], return_tensors="pt", return_token_type_ids=False)
    expected = pair.eval().model.encoder(**batch).last_hidden_state
    torch.testing.assert_close(model.encoder(**batch).last_hidden_state, expected)
    assert model(**batch).logits.shape == (1, 3)
    options = {"model_name_or_path": tmp_path / "pair", "config_name": None, "tokenizer_name": None}
    files = {f"{part}_file": tmp_path / f"{part}.jsonl" for part in ("train", "test")}
    files["validation_file"] = files["test_file"]
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps"}
    script.main(command(base, **options, **files, **best, eval_steps=5))
    trained, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert trained.config.id2label == {0: "0", 1: "1"}
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    best = AutoModelForSequenceClassification.from_pretrained(state["best_model_checkpoint"]).state_dict()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, best[name], rtol=0, atol=0)


def vectors_file(path, width=16):
    """Vectors of some of the words, by another scale than a fresh table's, in GloVe's form."""
    random = np.random.default_rng(1)
    vectors = {word: 3 * random.standard_normal(width).round(4) for word in [*GOOD, *BAD, "the", ". ."]}
    path.write_text("".join(f"{word} {' '.join(map(str, vector))}\n" for word, vector in vectors.items()))
    return vectors


def fresh(tokenizer, **fields):
    set_seed(0)
    config = LightFormerConfig(**SHAPES | {"vocab_size": len(tokenizer), "pad_token_id": 1} | fields)
    return AutoModelForSequenceClassification.from_config(config)


def test_word_vectors_start_the_table(base, tmp_path):
    vectors = vectors_file(tmp_path / "glove.txt")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    model, untouched = fresh(tokenizer), fresh(tokenizer)
    assert word_vectors.start_embedding(model, tokenizer, str(tmp_path / "glove.txt")) == 7
    table, before = (m.get_input_embeddings().weight for m in (model, untouched))
    factors = set()
    for word, row in tokenizer.get_vocab().items():
        if word in vectors:
            ratio = table[row].detach().numpy() / vectors[word]
            assert ratio == pytest.approx(ratio[0], rel=1e-4)
            factors.add(round(float(ratio[0]), 4))
        else:
            assert torch.equal(table[row], before[row])
    assert len(factors) == 1
    known = [tokenizer.get_vocab()[word] for word in vectors if word != ". ."]
    assert table[known].std().item() == pytest.approx(before.std().item(), rel=1e-4)
    assert not table[1].any()  # the pad row


def test_word_vectors_of_a_low_rank_table_are_the_best_approximation(base, tmp_path):
    vectors_file(tmp_path / "glove.txt")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    light, untouched = fresh(tokenizer, embedding_rank=4), fresh(tokenizer, embedding_rank=4)
    word_vectors.start_embedding(light, tokenizer, str(tmp_path / "glove.txt"))
    vectors = word_vectors.read_vectors(str(tmp_path / "glove.txt"), set(tokenizer.get_vocab()))
    with torch.no_grad():
        target = untouched.get_input_embeddings()(torch.arange(len(tokenizer)))
        known = np.stack(list(vectors.values()))
        factor = target.std() / known.std(ddof=1)
        for word, vector in vectors.items():
            target[tokenizer.get_vocab()[word]] = torch.from_numpy(vector) * factor
        u, s, v = torch.linalg.svd(target)
        best = u[:, :4] * s[:4] @ v[:4]
        table = light.get_input_embeddings()(torch.arange(len(tokenizer)))
        torch.testing.assert_close(table, best, rtol=1e-3, atol=1e-4)


def test_forms_of_word_vector_files(tmp_path):
    plain = "a 1 2 3\nof . 4 5 6\na 7 7 7\nunasked 0 0 0\n"
    (tmp_path / "glove.txt").write_text(plain)
    (tmp_path / "fasttext.vec.gz").write_bytes(gzip.compress(f"4 3\n{plain}".encode()))
    for name in ("glove.txt", "fasttext.vec.gz"):
        found = word_vectors.read_vectors(str(tmp_path / name), {"a", "of .", "missing"})
        assert {word: vector.tolist() for word, vector in found.items()} == {"a": [1, 2, 3], "of .": [4, 5, 6]}


def test_word_vectors_in_a_run(base, tmp_path):
    vectors_file(tmp_path / "glove.txt", width=12)
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES | {"embedding_dim": 12}))
    script.main(command(base, fold_column="fold", word_vectors=tmp_path / "glove.txt", max_steps=1))
    tables = [load_file(tmp_path / f"out/fold-{i}/model.safetensors")["encoder.embed_tokens.weight"] for i in range(3)]
    assert tables[0].shape[1] == 12
    # one step of Adam from the same vectors
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=0.021)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_column": "body"}, "no column 'body'; it has|no column 'body': it has"),
        ({"label_column": "class"}, "no column 'class'"),
        ({"train_file": "EMPTY"}, "holds no rows"),
        ({"train_file": "ONE"}, r"has 1 classes \(1\)"),
        ({"train_file": "GAP"}, "row 2, 'label': expected a number or a name, found None"),
        ({"train_file": "FOLDS", "fold_column": "fold"}, "row 2, 'fold': expected a whole number, found None"),
        (
            {"metric_for_best_model": "bleu"},
            "is 'bleu': expected a computed one, loss, accuracy",
        ),
        ({"max_train_samples": 0}, "max_samples is 0: expected 1 or more"),
        ({"num_folds": 1}, "num_folds is 1: expected from 2 to 24, the rows of class '1'"),
        ({"num_folds": 2, "eval_strategy": "epoch"}, "Three folds or more"),
        ({"num_folds": 4, "fold_column": "fold"}, "'fold' has 3 folds, num_folds is 4"),
        ({"num_folds": 3, "test_file": "ONE"}, "Folds are parts of the training data"),
        ({"train_file": "TRAIN", "test_file": "OTHER"}, "The test data, row 1, is of class '2'; .* has '0', '1'"),
        ({"model.num_labels": 3}, "has 2 classes .*: expected 3"),
        ({"eval_strategy": "epoch"}, "--validation-file"),
        ({"max_length": 99}, "32 positions"),
        ({"word_vectors": "none.txt"}, "No word vectors none.txt"),
        ({"word_vectors": "NARROW"}, "are 3 wide, the model's embedding matrix 16"),
        ({"word_vectors": "TORN"}, "line 2: expected a word and 3 numbers"),
        ({"word_vectors": "FOREIGN"}, "has none of the"),
        ({"model.model_type": "subformer"}, "is of a subformer, but"),
        ({"config_name": "SUBFORMER"}, "no classifier of type subformer"),
        ({"model.vocab_size": 5}, "belong together"),
    ],
)
def test_bad_input_ends_before_the_first_step(base, tmp_path, changes, message):
    files = {
        "EMPTY": ("empty.jsonl", ""),
        "ONE": ("one.jsonl", '{"text": "a", "label": 1}\n' * 3),
        "GAP": ("gap.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": null}\n'),
        "FOLDS": ("folds.jsonl", '{"text": "a", "label": 1, "fold": 0}\n{"text": "b", "label": 1, "fold": null}\n'),
        "OTHER": ("other.jsonl", '{"text": "a", "label": 2}\n'),
        "NARROW": ("narrow.txt", "the 1 2 3\n"),
        "TORN": ("torn.txt", "the 1 2 3\nfilm 1 x 3\n"),
        "FOREIGN": ("foreign.txt", "niemand 1 2 3\n"),
        "SUBFORMER": ("subformer.json", '{"model_type": "subformer"}'),
    }
    places = {"TRAIN": tmp_path / "train.jsonl"}
    for place, (name, content) in files.items():
        (tmp_path / name).write_text(content)
        places[place] = tmp_path / name
    changes = {name: places.get(value, value) for name, value in changes.items()}
    with pytest.raises((ValueError, OSError), match=message):
        script.main(command(base, **changes))
    assert not list(tmp_path.glob("out/fold*"))
    assert not list(tmp_path.glob("out/*.json"))


def test_hidden_labels_are_no_class(tmp_path):
    """As test splits on the Hub have them: −1 would be the last one."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=features).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"row 2, 'label': there is no class -1; .*--test-split ''"):
        script.load_labelled(str(tmp_path / "test.parquet"), script.DataArguments(), max_samples=None)
