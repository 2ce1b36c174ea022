"""The training loss and its gradient against the definition in double precision."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lightformers_hf.recovery import training_loss


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


@settings(deadline=None, max_examples=60)
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
