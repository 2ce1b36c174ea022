"""The trainer and its losses against their definitions in plain arithmetic, however a batch is cut into pieces."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SIZES
from transformers import AutoModelForSeq2SeqLM

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration
from lightformers_hf import processors as products
from lightformers_hf.recovery import find_last_checkpoint, hidden_loss, training_loss


def in_functions(logits, labels, teacher, alpha, temperature, smoothing):
    """The definition."""
    kept = labels != -100
    logits, labels = logits[kept], labels[kept]
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    if teacher is None:
        return loss
    student, teacher = ((x / temperature).log_softmax(-1) for x in (logits, teacher[kept]))
    divergence = F.kl_div(student, teacher, log_target=True, reduction="sum")
    return alpha * temperature**2 * divergence + (1 - alpha) * loss


def draw(seed, sentences=3, length=5, size=11):
    """Logits of student and teacher, and labels with padding."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (4 * torch.randn(sentences, length, size, generator=generator).double() for _ in range(2))
    labels = torch.randint(0, size, (sentences, length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return student, labels, teacher


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    taught=st.booleans(),
    alpha=st.floats(0, 1),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_value_and_gradient_are_those_of_the_definition(seed, taught, alpha, temperature, smoothing):
    student, labels, teacher = draw(seed)
    theirs = teacher if taught else None
    expected = student.clone().requires_grad_()
    value = in_functions(expected, labels, theirs, alpha, temperature, smoothing)
    value.backward()
    ours = student.float().requires_grad_()
    loss = training_loss(ours, labels, theirs, alpha=alpha, temperature=temperature, smoothing=smoothing)
    (3 * loss).backward()
    torch.testing.assert_close(loss.double(), value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad.double(), 3 * expected.grad, rtol=1e-4, atol=1e-5)
    assert not ours.grad[labels == -100].any()


def test_equals_have_no_divergence_and_no_gradient():
    student, labels, _ = draw(1)
    logits = student.float().requires_grad_()
    loss = training_loss(logits, labels, logits.detach(), alpha=1.0, temperature=3.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert logits.grad.abs().max() < 1e-6
    assert training_loss(logits, labels, logits.detach().flip(-1), alpha=1.0, temperature=3.0).item() > 0.1


def test_half_precision_is_summed_in_single():
    student, labels, teacher = draw(2, 40, 20, 300)
    expected = in_functions(student.bfloat16().double(), labels, teacher.bfloat16().double(), 0.7, 1.0, 0.0)
    logits = student.bfloat16().requires_grad_()
    loss = training_loss(logits, labels, teacher.bfloat16(), alpha=0.7)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert logits.grad.dtype == torch.bfloat16


def test_of_padding_alone_there_is_no_loss():
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = training_loss(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_tokens_that_cannot_be_are_no_harm():
    student, labels, _ = draw(3)
    student[..., 4], labels[labels == 4] = -torch.inf, 5
    logits = student.float().requires_grad_()
    loss = training_loss(logits, labels)
    loss.backward()
    assert loss.item() == pytest.approx(in_functions(student, labels, None, 0, 1, 0).item(), rel=1e-5)
    assert logits.grad.isfinite().all()


@torch.no_grad()
def one_by_one(trainer, *settings):
    """The mean loss of a token, from sentences without padding."""
    total, count = 0.0, 0
    for row in trainer.train_dataset:
        labels = torch.tensor(row["labels"])
        start = torch.tensor([[trainer.model.config.decoder_start_token_id, *row["labels"][:-1]]])
        inputs = {"input_ids": torch.tensor([row["input_ids"]]), "decoder_input_ids": start}
        logits = [model.eval()(**inputs).logits[0].double() for model in (trainer.model, trainer.teacher)]
        total, count = total + in_functions(logits[0], labels, logits[1], *settings).item(), count + len(labels)
    return total / count


@pytest.mark.parametrize(("alpha", "temperature", "smoothing"), [(0.7, 2.0, 0.1), (1.0, 1.0, 0.0), (0.0, 1.0, 0.1)])
def test_loss_is_its_definition(build_trainer, alpha, temperature, smoothing):
    trainer = build_trainer(
        with_teacher=True, distillation_alpha=alpha, distillation_temperature=temperature,
        label_smoothing_factor=smoothing, per_device_train_batch_size=8, max_steps=1,
    )  # fmt: skip
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
    trainer = build_trainer(rows=10, max_tokens=60, num_train_epochs=3, learning_rate=0.01)
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


@pytest.mark.parametrize("steps", [0, 1])
def test_a_training_ends_at_the_first_loss_that_is_nan(build_trainer, steps):
    trainer = build_trainer(max_steps=3, per_device_train_batch_size=4, logging_steps=500)
    weight = trainer.model.get_encoder().layers[0].fc1.weight

    def damage(model, inputs):
        if trainer.state.global_step == steps:
            weight.data.fill_(float("nan"))

    trainer.model.register_forward_pre_hook(damage)
    with pytest.raises(ValueError, match=f"the loss of step {steps + 1} is NaN.*learning_rate"):
        trainer.train()
    assert trainer.state.global_step == steps


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


def test_layers_that_are_computed_again_for_their_gradients(build_trainer, monkeypatch):
    """PyTorch compares what a forward pass keeps with what its repetition does."""
    monkeypatch.setattr(products, "MANY_SHAPES", 0)
    build_trainer("lightformer", max_steps=1, bf16=True, gradient_checkpointing=True).train()


@pytest.mark.parametrize("fails", [False, True])
def test_a_teacher_is_cast_once_and_given_back(build_trainer, monkeypatch, fails):
    """While a student learns, to the same outputs, whatever ends the training."""
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
    assert seen[0] == matrices | {"lm_head.weight"}  # a copy: the table of the embeddings stays
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


HEAD = 8


def undivided(model):
    """The same model with scores that nothing divides, their divisor in the queries' matrices."""
    config = copy.deepcopy(model.config)
    config.scale_attention = False
    other = LightFormerForConditionalGeneration(config)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if ".q_proj." in name:
            weight *= HEAD ** (-0.5 if name.endswith("q_proj.weight") else -0.25)
    other.load_state_dict(weights)
    return other


@pytest.mark.parametrize("rank", [None, 6])
def test_steps_are_those_of_divided_scores(rank, tiny_marian, build_trainer):
    """Queries of scores that nothing divides learn as those of divided scores do: the same steps, the same answers."""
    teacher = AutoModelForSeq2SeqLM.from_pretrained(tiny_marian).config
    names = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    torch.manual_seed(0)
    relative = {"use_bias": False, "position_embedding_type": "relative", "attention_rank": rank}
    config = LightFormerConfig(**{name: getattr(teacher, name) for name in names}, **SIZES, **relative)
    divided = LightFormerForConditionalGeneration(config)
    adam = {"optim": "adamw_torch", "learning_rate": 3e-3, "adam_epsilon": 1e-16, "max_steps": 4}
    logits = []
    for model in (divided, undivided(divided)):
        trainer = build_trainer(model, rows=10, **adam)
        names = ("input_ids", "attention_mask", "labels")
        batch = trainer.data_collator([{name: trainer.train_dataset[row][name] for name in names} for row in range(4)])
        before = model.eval()(**batch).logits
        trainer.train()
        logits.append([before, model.eval()(**batch).logits])
    torch.testing.assert_close(logits[1][0], logits[0][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[1][1], logits[0][1], atol=1e-3, rtol=0)
    assert (logits[0][1] - logits[0][0]).abs().max() > 0.1


def test_validation_leaves_settings_of_generation_as_they_are(build_trainer):
    """Seq2SeqTrainer writes its defaults into them: a length of 20 tokens, which then cut all outputs."""
    trainer = build_trainer(predict_with_generate=True, generation_max_length=30)
    trainer.model.generation_config.max_length = None
    before = trainer.model.generation_config.to_dict()
    trainer.predict(trainer.eval_dataset)
    assert trainer.model.generation_config.to_dict() == before
