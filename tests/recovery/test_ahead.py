"""A teacher that is asked ahead: the same training as one that is asked in turn, and threads as they were."""

import threading

import pytest
import torch

from lightformers_hf.recovery.ahead import Ahead, take


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def watch(trainer):
    """The threads in which the teacher is asked, and what PyTorch may use of them, there and where is learnt."""
    asked, learnt = [], []

    def ask(*_):
        asked.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))

    trainer.teacher.register_forward_pre_hook(ask)
    trainer.model.register_forward_pre_hook(lambda *_: learnt.append(torch.get_num_threads()))
    return asked, learnt


def trained(build_trainer, threads, **options):
    torch.set_num_threads(threads)
    trainer = build_trainer(
        rows=10, with_teacher=True, max_tokens=64, distillation_alpha=0.5, hidden_weight=1.0, max_steps=4, **options
    )
    watched = watch(trainer)
    trainer.train()
    return trainer, *watched


def test_learns_the_same(build_trainer, two_threads):
    ahead, asked, learnt = trained(build_trainer, 2)
    assert asked[:4] == [(False, 1)] * 4
    assert learnt == [1] * 4
    assert torch.get_num_threads() == 2  # as before
    in_turn, asked, learnt = trained(build_trainer, 1)
    assert asked == [(True, 1)] * 4
    assert learnt == [1] * 4
    assert [entry["loss"] for entry in ahead.state.log_history[:4]] == pytest.approx(
        [entry["loss"] for entry in in_turn.state.log_history[:4]], rel=1e-6
    )
    for ours, theirs in zip(ahead.model.parameters(), in_turn.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_holds_one_answer_of_an_accumulated_step(build_trainer, two_threads):
    _, asked, _ = trained(build_trainer, 2, gradient_accumulation_steps=2)
    assert asked == [(True, 2)] * 8


def test_evaluation_has_all_threads_to_itself(build_trainer, two_threads):
    trainer = build_trainer(
        rows=10, with_teacher=True, max_tokens=64, max_steps=2, eval_strategy="steps", eval_steps=1
    )
    asked, learnt = watch(trainer)
    trainer.train()
    assert learnt.count(1) == 2
    assert learnt.count(2) == len(learnt) - 2 > 0
    assert len(asked) == 3  # by the last step a batch has been asked for that nobody trains on


def test_an_error_of_the_teacher_is_raised(build_trainer, two_threads):
    trainer = build_trainer(rows=10, with_teacher=True, max_tokens=64, max_steps=2)

    def fail(*args, **kwargs):
        raise RuntimeError("no teacher today")

    trainer.teacher.forward = fail
    with pytest.raises(RuntimeError, match="no teacher today"):
        trainer.train()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("threads", "teacher", "student"), [(1, None, 1), (2, 1, 1), (4, 1, 3), (9, 3, 6)])
def test_threads_are_shared(two_threads, threads, teacher, student):
    torch.set_num_threads(threads)
    ahead, batch = Ahead(lambda batch: (sorted(batch), torch.get_num_threads())), {"input_ids": 1}
    ahead.put(batch)
    with ahead.share():
        assert torch.get_num_threads() == student
    assert take(batch) == (None if teacher is None else (["input_ids"], teacher))
    assert torch.get_num_threads() == threads
    assert batch == {"input_ids": 1}


def test_casts_of_the_student_are_kept_while_the_teacher_answers(two_threads):
    """PyTorch holds a weight's cast to bfloat16, for all threads, until the outermost autocast of any of them ends."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)

    def cast():
        return (x @ weight).grad_fn.next_functions[1][0]

    def ask(batch):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return x @ x

    ahead = Ahead(ask)
    with torch.autocast("cpu", torch.bfloat16):
        first = cast()
        ahead.put({})
        with ahead.share():
            pass
        assert cast() is first
