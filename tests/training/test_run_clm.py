"""Language models from the command line: exact perplexity, resume, other architectures, processes, bad input."""

import json
import math

import build_tokenizer
import numpy as np
import pytest
import run_clm as script
import torch
from training.scripts import command, losses, run_on_two
from transformers import AutoModelForCausalLM, AutoTokenizer

LIGHTFORMER = {
    "model_type": "lightformer", "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32, "max_position_embeddings": 12, "dropout": 0.0,
}  # fmt: skip
SHAPES = {
    "lightformer": LIGHTFORMER,
    # with labels it returns a loss and no logits
    "adaptive": LIGHTFORMER | {"embedding": "adaptive", "adaptive_cutoffs": [10, 20], "adaptive_factor": 2},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
BLOCK, CONTEXT = 12, 5


@pytest.fixture
def base(tmp_path, parallel_sentences):
    """Options of a short run on ten lines, an empty one between them; three to test on."""
    lines = [f"{pair['en']}\n" for pair in parallel_sentences]
    (tmp_path / "train.txt").write_text("".join([*lines, "\n"] * 3))
    (tmp_path / "test.txt").write_text("".join([lines[0], "\n", *lines[1:3]]))
    for name, shapes in SHAPES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(shapes))
    words = ["--kind", "words", "--vocab-size", "30", "--output", str(tmp_path / "words")]
    build_tokenizer.main([str(tmp_path / "train.txt"), *words])
    return {
        "config_name": tmp_path / "lightformer.json", "tokenizer_name": tmp_path / "words",
        "train_file": tmp_path / "train.txt", "test_file": tmp_path / "test.txt", "output_dir": tmp_path / "out",
        "block_size": BLOCK, "context_size": CONTEXT, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip


def results(folder):
    return json.loads((folder / "test_results.json").read_text())


def slow_perplexity(folder, text, block_size, context):
    """One token at a time: a forward pass over exactly what comes before it in its block, no labels, no batch."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    stream = [2]
    for line in text.removesuffix("\n").split("\n"):
        stream += [vocabulary.get(word, 3) for word in line.split()] + [2]
    total, start = 0.0, 0
    with torch.no_grad():
        for position in range(1, len(stream)):
            if position - start == block_size:
                start = position - context
            logits = model(torch.tensor([stream[start:position]])).logits[0, -1].double()
            total -= logits.log_softmax(-1)[stream[position]].item()
    return math.exp(total / (len(stream) - 1)), len(stream) - 1


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("context", [1, CONTEXT])
def test_perplexity_is_that_of_every_token_once(base, tmp_path, architecture, context):
    evaluation = {"validation_file": tmp_path / "test.txt", "eval_strategy": "steps", "eval_steps": 2}
    script.main(command(base | evaluation, config_name=tmp_path / f"{architecture}.json", context_size=context))
    expected, tokens = slow_perplexity(tmp_path / "out", (tmp_path / "test.txt").read_text(), BLOCK, context)
    assert results(tmp_path / "out")["test_tokens"] == tokens
    assert results(tmp_path / "out")["test_perplexity"] == pytest.approx(expected, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    config = model.config
    assert (config.vocab_size, config.bos_token_id, config.pad_token_id, config.eos_token_id) == (
        len(tokenizer), 0, 1, 2
    )  # fmt: skip


@pytest.mark.parametrize("context", [1, 4, 9])
@pytest.mark.parametrize("length", [2, 9, 10, 11, 19, 40])
def test_every_token_is_a_label_once_behind_its_context(length, context):
    stream = np.arange(100, 100 + length)
    blocks = script.Blocks(stream, 10, context=context, pad=0, multiple=4)
    labels = []
    for index in range(len(blocks)):
        block = blocks[index]
        kept = (block["labels"] != -100).nonzero().flatten().tolist()
        assert torch.equal(block["input_ids"][kept], block["labels"][kept])
        assert not kept or kept[0] == (context if index else 1)
        if kept:  # what is read before is the text before
            first = block["labels"][kept[0]].item()
            assert block["input_ids"][: kept[0]].tolist() == list(range(first - kept[0], first))
        labels += block["labels"][kept].tolist()
    assert labels == stream[1:].tolist()
    assert len(blocks) % 4 == 0
    assert blocks.labels == len(labels)


@pytest.mark.parametrize("architecture", SHAPES)
def test_accumulated_batches_train_as_one(base, tmp_path, architecture):
    options = base | {"config_name": tmp_path / f"{architecture}.json", "learning_rate": 0.1, "nesterov_momentum": 0.9}
    script.main(command(options))
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    script.main(command(options, output_dir=tmp_path / "other"))
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "out"), rel=1e-5)
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0]


def test_nesterov_is_torchs(base, tmp_path, monkeypatch):
    seen = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a, **k: (seen.append(self.defaults), step(self))[1])
    script.main(command(base, nesterov_momentum=0.9, max_steps=1, test_file=None))
    assert (seen[0]["momentum"], seen[0]["nesterov"], seen[0]["lr"]) == (0.9, True, 1e-2)


def test_a_run_goes_on_from_its_checkpoint(base, tmp_path):
    options = base | {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    script.main(command(options))
    part = options | {"output_dir": tmp_path / "cut"}
    script.main(command(part))
    (tmp_path / "cut" / "checkpoint-6" / "trainer_state.json").unlink()  # as if killed while saving
    script.main([*command(part), "--resume-from-checkpoint"])
    assert losses(tmp_path / "cut") == losses(tmp_path / "out")
    assert results(tmp_path / "cut")["test_loss"] == results(tmp_path / "out")["test_loss"]


def test_a_training_that_diverges_ends_and_saves_nothing(base, tmp_path):
    with pytest.raises(ValueError, match=r"the loss of step \d is (NaN|infinite).*learning_rate"):
        script.main(command(base, learning_rate=1e30))
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_tests_are_no_checks_of_early_stopping(base, tmp_path, caplog):
    options = {"validation_file": tmp_path / "test.txt", "eval_strategy": "steps", "eval_steps": 1}
    options |= {
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "early_stopping_patience": 1,
    }
    script.main(command(base | options))
    assert "early stopping" not in caplog.text
    assert "test_perplexity" in results(tmp_path / "out")


@pytest.mark.usefixtures("warm_python")
def test_two_processes_measure_what_one_does(base, tmp_path):
    script.main(command(base))
    evaluation = command(base, config_name=None, train_file=None, model_name_or_path=tmp_path / "out")
    evaluation[evaluation.index("--output-dir") + 1] = str(tmp_path / "two")
    printed = run_on_two(script.__file__, evaluation)
    assert results(tmp_path / "two")["test_loss"] == pytest.approx(results(tmp_path / "out")["test_loss"], rel=1e-6)
    assert printed.count("Summary") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": "none.txt"}, "No data file none.txt"),
        ({"train_file": None, "test_file": None}, "No data"),
        ({"metric_for_best_model": "bleu"}, "expected a computed one, loss, perplexity"),
        ({"block_size": 13}, "12 positions"),
        ({"context_size": 12}, "context_size is 12"),
        ({"eval_strategy": "epoch"}, "--validation-file"),
        ({"tokenizer_name": None}, "give --tokenizer-name"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"nesterov_momentum": 1.5}, "nesterov_momentum is 1.5"),
        ({"config_name": "small"}, "belong together"),
        ({"config_name": "untyped"}, "no model_type"),
    ],
)
def test_bad_input_ends_before_the_first_step(base, tmp_path, changes, message):
    configs = {"small": LIGHTFORMER | {"vocab_size": 10}, "untyped": {"d_model": 16}}
    if name := configs.get(changes.get("config_name")):
        (tmp_path / "bad.json").write_text(json.dumps(name))
        changes = {"config_name": tmp_path / "bad.json"}
    with pytest.raises((ValueError, OSError), match=message):
        script.main(command(base, **changes))
    assert not list(tmp_path.glob("out/*"))
