"""The trainer's loss against its definition in plain arithmetic, however the batch is cut into pieces."""

import math
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import products
from lightformers_hf.recovery import (
    find_last_checkpoint,
    hidden_loss,
)


def log_softmax(logits):
    largest = max(logits)
    total = math.log(sum(math.exp(value - largest) for value in logits)) + largest
    return [value - total for value in logits]


def one_by_one(trainer, alpha, temperature, smoothing):
    """The mean loss of a token, from sentences without padding and sums written out."""
    total, count = 0.0, 0
    for row in trainer.train_dataset:
        ids, labels = torch.tensor([row["input_ids"]]), row["labels"]
        start = torch.tensor([[trainer.model.config.decoder_start_token_id, *labels[:-1]]])
        with torch.no_grad():
            student, teacher = (
                m.eval()(input_ids=ids, decoder_input_ids=start).logits[0].double()
                for m in (trainer.model, trainer.teacher)
            )
        for s, t, label in zip(student.tolist(), teacher.tolist(), labels, strict=True):
            log_p = log_softmax(s)
            label_loss = -(1 - smoothing) * log_p[label] - smoothing * sum(log_p) / len(log_p)
            log_s, log_t = (log_softmax([value / temperature for value in logits]) for logits in (s, t))
            divergence = sum(math.exp(b) * (b - a) for a, b in zip(log_s, log_t, strict=True))
            total += alpha * temperature**2 * divergence + (1 - alpha) * label_loss
            count += 1
    return total / count


@pytest.mark.parametrize(("alpha", "temperature", "smoothing"), [(0.7, 2.0, 0.1), (1.0, 1.0, 0.0), (0.0, 1.0, 0.1)])
def test_loss_is_its_definition(build_trainer, alpha, temperature, smoothing):
    trainer = build_trainer(
        with_teacher=True,
        distillation_alpha=alpha,
        distillation_temperature=temperature,
        label_smoothing_factor=smoothing,
        per_device_train_batch_size=8,
        max_steps=1,
    )
    expected = one_by_one(trainer, alpha, temperature, smoothing)
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-4)


def distances_one_by_one(trainer):
    """Mean over layers of the squared distance of unit vectors, a target token, from unpadded sentences."""
    total, count = 0.0, 0
    for row in trainer.train_dataset:
        start = torch.tensor([[trainer.model.config.decoder_start_token_id, *row["labels"][:-1]]])
        inputs = {"input_ids": torch.tensor([row["input_ids"]]), "decoder_input_ids": start}
        outputs = [m(**inputs, output_hidden_states=True) for m in (trainer.model.eval(), trainer.teacher)]
        for name in ("encoder_hidden_states", "decoder_hidden_states"):
            layers = [getattr(output, name)[1:] for output in outputs]
            assert len(layers[0]) == len(layers[1]) > 0
            for student, teacher in zip(*layers, strict=True):
                for s, t in zip(student[0], teacher[0].detach(), strict=True):
                    distance = (s / (s * s).sum() ** 0.5 - t / (t * t).sum() ** 0.5) ** 2
                    total = total + distance.sum() / len(layers[0])
        count += len(row["labels"])
    return total / count


def test_hidden_states_are_pulled_as_defined(build_trainer):
    """With no other loss: its value and its gradients, through padded batches in two pieces."""
    options = {"with_teacher": True, "distillation_alpha": 1.0, "max_steps": 1}
    plain, pulled = (
        build_trainer(per_device_train_batch_size=4, gradient_accumulation_steps=2, **options, **hidden)
        for hidden in ({}, {"hidden_weight": 0.7})
    )
    expected = distances_one_by_one(pulled)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in pulled.model.named_parameters() if p.grad is not None}
    pulled.model.zero_grad()
    losses = [trainer.train().training_loss for trainer in (plain, pulled)]
    assert expected.item() > 0.01
    assert losses[1] - losses[0] == pytest.approx(0.7 * expected.item(), rel=1e-4)
    # One step of plain descent at rate 1 from the same weights: the difference is the gradient.
    for (name, one), other in zip(plain.model.named_parameters(), pulled.model.parameters(), strict=True):
        torch.testing.assert_close(one - other, 0.7 * gradients.get(name, torch.zeros_like(one)), atol=2e-6, rtol=1e-3)


def test_hidden_states_in_half_precision(build_trainer):
    options = {"with_teacher": True, "distillation_alpha": 0.5, "hidden_weight": 1.0, "max_steps": 1}
    whole, half = (build_trainer(**options, bf16=bf16).train().training_loss for bf16 in (False, True))
    assert half == pytest.approx(whole, rel=0.05)


def test_stacks_of_unequal_depth_meet_where_both_are_equally_far():
    ours, theirs = ([torch.randn(2, 3, 5) for _ in range(depth + 1)] for depth in (6, 4))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    expected = 0.0
    for s, t in ((ours[3], theirs[2]), (ours[6], theirs[4])):
        for row, position in ((0, 0), (0, 1), (1, 0)):
            expected += (
                s[row, position] / s[row, position].norm() - t[row, position] / t[row, position].norm()
            ).norm() ** 2 / 2
    torch.testing.assert_close(hidden_loss(ours, theirs, mask), expected)
    with pytest.raises(ValueError, match="The teacher's states are 7 wide, the model's 5"):
        hidden_loss(ours, [torch.randn(2, 3, 7)] * 4, mask)


@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("model", ["marian", "lightformer"])
def test_accumulated_batches_equal_one_big_batch(build_trainer, model, smoothing, with_teacher):
    options = {"model": model, "with_teacher": with_teacher, "label_smoothing_factor": smoothing, "max_steps": 1}
    whole = build_trainer(per_device_train_batch_size=8, **options)
    before = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    pieces = build_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=4, **options)
    assert pieces.train().training_loss == pytest.approx(whole.train().training_loss, rel=1e-5)
    for (name, one), other in zip(whole.model.named_parameters(), pieces.model.parameters(), strict=True):
        # One step of plain descent at rate 1: the difference is the gradient.
        torch.testing.assert_close(before[name] - one, before[name] - other, atol=1e-6, rtol=1e-3)
    assert any(not torch.equal(before[name], p) for name, p in whole.model.named_parameters())


def test_the_teacher_learns_nothing_and_is_not_saved(build_trainer, tmp_path):
    trainer = build_trainer(with_teacher=True, max_steps=2, max_tokens=200)
    before = {name: p.clone() for name, p in trainer.teacher.named_parameters()}
    trainer.train()
    trainer.save_model()
    assert all(torch.equal(before[name], p) for name, p in trainer.teacher.named_parameters())
    assert not trainer.teacher.training
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in trainer.model.parameters())


def test_evaluation_leaves_the_teacher_out(build_trainer):
    with_teacher = build_trainer(with_teacher=True, distillation_alpha=1.0, per_device_eval_batch_size=10)
    without = build_trainer(per_device_eval_batch_size=10)
    assert with_teacher.evaluate()["eval_loss"] == pytest.approx(without.evaluate()["eval_loss"])


def test_epochs_of_token_batches_are_whole_and_differ(build_trainer):
    trainer = build_trainer(rows=10, max_tokens=60, num_train_epochs=3)
    seen = []
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: seen.append([tuple(row["input_ids"]) for row in rows]) or collate(rows)
    trainer.train()
    steps = trainer.state.global_step
    assert steps == len(seen)
    epochs = [seen[i : i + steps // 3] for i in range(0, steps, steps // 3)]
    expected = sorted(tuple(row["input_ids"]) for row in trainer.train_dataset)
    assert [sorted(row for batch in epoch for row in batch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_unfit_teachers_are_refused(build_trainer, tiny_marian):
    with pytest.raises(ValueError, match="distillation_alpha is 2"):
        build_trainer(with_teacher=True, distillation_alpha=2.0)
    with pytest.raises(ValueError, match="hidden_weight is -1"):
        build_trainer(with_teacher=True, hidden_weight=-1.0)
    with pytest.raises(ValueError, match=r"hidden_weight is 1\.0: expected 0 or more, and a teacher"):
        build_trainer(hidden_weight=1.0)
    with pytest.raises(ValueError, match="distillation_temperature is 0"):
        build_trainer(with_teacher=True, distillation_temperature=0)
    other = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian)
    other.resize_token_embeddings(200)
    with pytest.raises(ValueError, match="vocabulary has 120 entries, the model's 200"):
        build_trainer(model=other, with_teacher=True)


def test_max_tokens_needs_the_lengths(build_trainer):
    trainer = build_trainer(max_tokens=100)
    trainer.train_dataset = trainer.train_dataset.remove_columns("target_length")
    with pytest.raises(ValueError, match="target_length"):
        trainer.train()


def test_only_complete_checkpoints_are_found(tmp_path):
    def write(step, state="{}", leave_out=()):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        names = {"config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"}
        for name in names - set(leave_out):
            (folder / name).write_text(state)

    assert find_last_checkpoint(tmp_path) is None
    write(9)
    write(20)
    write(100, state='{"epoch": 1')  # torn
    write(110, leave_out=["trainer_state.json"])
    write(120, leave_out=["optimizer.pt"])
    (tmp_path / "checkpoint-best").mkdir()
    assert find_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")


@pytest.mark.parametrize("trains", [False, True])
def test_evaluation_on_a_cpu_is_in_float32(build_trainer, trains):
    """Of the model as it is, and within a training, in which it computes in bfloat16."""
    trainer = build_trainer(bf16=True, max_steps=1, eval_strategy="steps" if trains else "no", eval_steps=1)
    types = []
    layer = trainer.model.get_encoder().layers[0].fc1
    layer.register_forward_hook(lambda module, inputs, output: types.append((module.training, output.dtype)))
    if trains:
        trainer.train()
    else:
        trainer.evaluate()
    expected = {(False, torch.float32)} | ({(True, torch.bfloat16)} if trains else set())
    assert set(types) == expected


@pytest.mark.parametrize("before", [True, False])
def test_attention_is_planned_for_no_batch(build_trainer, before):
    """cuDNN's, which a GPU would take, is off while a model reads batches of many shapes, and then as it was."""
    trainer = build_trainer(max_steps=2, eval_strategy="steps", eval_steps=1)
    seen = set()
    trainer.model.register_forward_pre_hook(
        lambda model, inputs: seen.add((model.training, torch.backends.cuda.cudnn_sdp_enabled()))
    )
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        trainer.train()
        assert torch.backends.cuda.cudnn_sdp_enabled() is before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert seen == {(True, False), (False, False)}


def test_models_whose_layers_are_alike_multiply_as_ever(build_trainer):
    assert isinstance(build_trainer(bf16=True).even_products(), nullcontext)


def test_layers_that_are_computed_again_for_their_gradients(build_trainer, monkeypatch):
    """PyTorch compares what a forward pass keeps with what its repetition does."""
    monkeypatch.setattr(products, "MANY_SHAPES", 0)
    build_trainer("lightformer", max_steps=1, bf16=True, gradient_checkpointing=True).train()


@pytest.mark.parametrize("fails", [False, True])
def test_a_teacher_is_cast_once_and_given_back(build_trainer, monkeypatch, fails):
    """While a student learns, to the same outputs, whatever ends the training; tables stay."""
    trainer = build_trainer(with_teacher=True, max_tokens=64, max_steps=2, bf16=True, hidden_weight=1.0)
    before = {name: (parameter.dtype, parameter.data_ptr()) for name, parameter in trainer.teacher.named_parameters()}
    ask, seen = trainer.teacher.forward, []

    def forward(**inputs):
        cast = {name for name, parameter in trainer.teacher.named_parameters() if parameter.dtype == torch.bfloat16}
        outputs = ask(**inputs)
        with torch.no_grad():
            for parameter in trainer.teacher.parameters():
                parameter.data = parameter.data.float()
            expected = ask(**inputs)
        torch.testing.assert_close(outputs.logits, expected.logits, atol=1e-6, rtol=1e-6)
        seen.append(cast)
        if fails:
            raise RuntimeError("out of paper")
        return outputs

    monkeypatch.setattr(trainer.teacher, "forward", forward)
    with pytest.raises(RuntimeError, match="out of paper") if fails else nullcontext():
        trainer.train()
    matrices = {name for name in before if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))}
    assert seen[0] == matrices
    assert before == {name: (each.dtype, each.data_ptr()) for name, each in trainer.teacher.named_parameters()}


@pytest.mark.parametrize("model", ["marian", "lightformer"])
def test_a_training_is_the_same(build_trainer, monkeypatch, model):
    """In bfloat16, with a teacher and its states: the losses of plain autocast."""
    monkeypatch.setattr(products, "MANY_SHAPES", 0)

    def losses(even):
        if not even:
            monkeypatch.setattr("lightformers_hf.recovery.trainer.EvenProducts", nullcontext)
        options = {"with_teacher": True, "max_tokens": 64, "max_steps": 4, "bf16": True}
        trainer = build_trainer(model, rows=10, distillation_alpha=0.5, hidden_weight=1.0, **options)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    even = losses(True)
    assert even == pytest.approx(losses(False), rel=0.02)
