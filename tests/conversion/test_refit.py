"""Regressions and balancing, against their definitions on whole matrices, and what they keep."""

import copy
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conversion.metrics import loss
from tiny import sizes
from torch import nn

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration, StudyOptions, convert
from lightformers_hf.conversion import refit as module
from lightformers_hf.conversion.moments import PairMoments, TensorStore
from lightformers_hf.conversion.refit import BALANCING, SMOOTHING, WORTH_BALANCING, Regression, bridge


def make_teacher(**fields):
    """Of three layers in each stack, with biases and norms that are not those of a start."""
    torch.manual_seed(0)
    shapes = sizes(16, layers=3, ffn=24, vocab_size=30, max_position_embeddings=16)
    config = LightFormerConfig(**shapes, **fields)
    teacher = LightFormerForConditionalGeneration(config).eval().requires_grad_(False)
    for name, weight in teacher.named_parameters():
        if "q_proj" in name:  # attention that tells tokens apart
            weight.mul_(10)
        elif name.endswith("bias"):
            weight.normal_(std=0.1)
        elif "layer_norm" in name:
            weight.uniform_(0.5, 1.5)
    return teacher


def shorten(teacher, **depths):
    """The teacher with these of its layers alone."""
    counts = {f"{stack}_layers": len(kept) for stack, kept in depths.items()}
    shorter = LightFormerForConditionalGeneration(
        type(teacher.config)(**{**teacher.config.to_dict(), **counts})
    ).eval()
    state = teacher.state_dict()
    for name in shorter.state_dict():
        parts = name.split(".")
        if parts[2:3] == ["layers"]:
            parts[3] = str(depths[parts[1]][int(parts[3])])
        shorter.state_dict()[name].copy_(state[".".join(parts)])
    return shorter.requires_grad_(False)


def make_batches():
    """Pairs without and with padding."""
    torch.manual_seed(1)
    batches = []
    for lengths in ((9, 9, 9), (8, 5, 3)):
        ids = torch.randint(4, 30, (2, 3, max(lengths)))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        labels, inputs = ids[0].masked_fill(~mask, -100), ids[1].masked_fill(~mask, 1)
        batches.append(
            {
                "input_ids": inputs,
                "attention_mask": mask.long(),
                "labels": labels,
                "decoder_input_ids": ids[0].roll(1, 1),
            }
        )
    return batches


def inputs_of(model, batches, *names):
    """What goes into modules at target tokens, in double precision."""
    seen = {name: [] for name in names}
    for batch in batches:
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name, kept=batch["labels"] != -100: seen[name].append(args[0][kept].double())
            )
            for name in names
        ]
        model(**{name: value for name, value in batch.items() if name != "labels"})
        for hook in hooks:
            hook.remove()
    return [torch.cat(seen[name]) for name in names]


def solve(x, y, own):
    """W* and its bias, by the definition."""
    centred = x - x.mean(0)
    covariance = centred.T @ centred / len(x)
    ridge = module.RIDGE * covariance.diagonal().mean() * torch.eye(x.shape[1]).double()
    weight = torch.linalg.inv(covariance + ridge) @ (centred.T @ (y - y.mean(0)) / len(x) + ridge @ own.T.double())
    return weight.T, y.mean(0) - x.mean(0) @ weight


def in_float32(monkeypatch):
    for place, name in ((module, "fast_passes"), (module, "cast_weights")):
        monkeypatch.setattr(place, name, lambda _: nullcontext())


class ExactMoments(PairMoments):
    """Sums in float64: where inputs hardly vary, what float32 rounds decides, otherwise on every processor."""

    def add(self, left, right):
        assert torch.equal(left.roots, torch.ones(len(left.rows)))
        self.count += left.count
        left, right = left.rows.double(), right.rows.double()
        self.left += left.sum(0)
        self.right += right.sum(0)
        self.product = self.product + left.T @ right


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("end", "norm"),
    [
        ("self_attn.out_proj", "self_attn_layer_norm"),
        ("encoder_attn.out_proj", "encoder_attn_layer_norm"),
        ("fc2", "final_layer_norm"),
    ],
)
def test_a_sublayer_makes_up_for_what_states_lack(before, end, norm, monkeypatch):
    """Of two decoder layers, the second of which stands for two: the regression that its outputs come from."""
    in_float32(monkeypatch)
    monkeypatch.setattr(module, "PairMoments", ExactMoments)
    teacher, batches = make_teacher(normalize_before=before), make_batches()
    depths = {"encoder": [0, 1, 2], "decoder": [0, 2]}
    shorter = shorten(teacher, **depths)
    untouched = {name: tensor.clone() for name, tensor in shorter.state_dict().items() if ".encoder." in name}
    bridge(shorter, teacher, depths, batches)
    own, theirs = (f"model.decoder.layers.{depth}.{{}}".format for depth in (1, 2))
    found, aimed = shorter.get_submodule(own(end)), teacher.get_submodule(theirs(end))
    x, normed = inputs_of(shorter, batches, own(end), own(norm))
    their_x, their_normed = inputs_of(teacher, batches, theirs(end), theirs(norm))
    outputs, their_outputs = (
        inputs @ layer.weight.T.double() + layer.bias.double() for layer, inputs in ((found, x), (aimed, their_x))
    )
    # What is normed is what the output is added to, or the sum of the two.
    aim = their_normed + their_outputs - normed if before else their_normed - (normed - outputs)
    weight, bias = solve(x, aim, aimed.weight)
    torch.testing.assert_close(found.weight.double(), weight, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.bias.double(), bias, atol=1e-4, rtol=1e-3)
    assert all(torch.equal(shorter.state_dict()[name], tensor) for name, tensor in untouched.items())


@pytest.mark.parametrize(
    ("fields", "name", "is_last"),
    [
        ({}, "layers.{}.self_attn_layer_norm", False),
        ({}, "layers.{}.final_layer_norm", True),
        ({"normalize_before": True}, "layers.{}.encoder_attn_layer_norm", False),
        ({"normalize_before": True, "final_layer_norm": True}, "layer_norm", True),
        ({"normalize_before": True, "final_layer_norm": True, "normalization": "rms_norm"}, "layer_norm", True),
        ({"normalize_before": True, "normalization": "rms_norm"}, "layers.{}.final_layer_norm", False),
    ],
)
@pytest.mark.parametrize("share", [0.5, 1])
def test_norms_give_what_the_teachers_give(fields, name, is_last, share, monkeypatch):
    """Their gains by regression, feature by feature; RMSNorm has no bias, and nothing is centred there."""
    in_float32(monkeypatch)
    changed_by = lambda *args, **options: Regression(*args, **options | {"share": share})  # noqa: E731
    monkeypatch.setattr(module, "Regression", changed_by)
    teacher, batches = make_teacher(**fields), make_batches()
    depths = {"encoder": [0, 1, 2], "decoder": [0, 2]}
    shorter = shorten(teacher, **depths)
    own, theirs = (f"model.decoder.{name.format(depth)}" for depth in (1, 2))
    norm, aimed = shorter.get_submodule(own), teacher.get_submodule(theirs)
    before = copy.deepcopy(norm)
    bridge(shorter, teacher, depths, batches)
    (x,), (their_x,) = inputs_of(shorter, batches, own), inputs_of(teacher, batches, theirs)
    x, y = before(x.float()).double(), aimed(their_x.float()).double()
    centred = hasattr(norm, "bias")
    mean_x, mean_y = (x.mean(0), y.mean(0)) if centred else (0, 0)
    slope = ((x - mean_x) * (y - mean_y)).mean(0) / (x - mean_x).square().mean(0)
    slope = 1 + share * ((slope + module.RIDGE) / (1 + module.RIDGE) - 1)
    if is_last and share < 1:  # before the output layer
        slope, mean_x, mean_y = torch.ones_like(slope), 0, 0
    torch.testing.assert_close(norm.weight.double(), before.weight * slope, atol=1e-4, rtol=1e-3)
    if centred:
        bias = before.bias * slope + mean_y - mean_x * slope
        torch.testing.assert_close(norm.bias.double(), bias, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("rank", [None, 6])
@pytest.mark.parametrize("stacks", [("encoder",), ("decoder",), ("encoder", "decoder")])
def test_layers_that_do_nothing_are_not_missed(stacks, rank):
    """Low-rank matrices stay what they are."""
    teacher, batches = make_teacher(normalize_before=True, attention_rank=rank, ffn_rank=rank), make_batches()
    depths = {"encoder": [0, 1, 2], "decoder": [0, 1, 2]} | {stack: [0, 2] for stack in stacks}
    for stack in stacks:
        for name, weight in getattr(teacher.model, stack).layers[1].named_parameters():
            if "out_proj" in name or "fc2" in name:
                weight.zero_()
    shorter = shorten(teacher, **depths)
    bridge(shorter, teacher, depths, batches)
    for batch in batches:
        kept = batch["labels"] != -100
        torch.testing.assert_close(shorter(**batch).logits[kept], teacher(**batch).logits[kept], atol=1e-3, rtol=1e-3)


def test_layers_stay_where_all_inputs_are_equal():
    """A teacher that ends every output at once shows one input of its decoder: other inputs give what they gave."""
    teacher, depths = make_teacher(normalize_before=True), {"encoder": [0, 1, 2], "decoder": [1, 2]}
    for name, weight in teacher.model.decoder.layers[0].named_parameters():
        if "out_proj" in name or "fc2" in name:
            weight.zero_()
    shorter = shorten(teacher, **depths)
    batches = [
        {name: part[:, :1] if name == "labels" else part for name, part in batch.items()} for batch in make_batches()
    ]
    ends = [batch | {"decoder_input_ids": torch.full_like(batch["labels"], 5)} for batch in 40 * batches]
    bridge(shorter, teacher, depths, ends)
    for name, weight in shorter.named_parameters():
        if "decoder.layers.0.self_attn" in name and "weight" in name:
            torch.testing.assert_close(
                weight, teacher.get_parameter(name.replace("layers.0", "layers.1")), atol=2e-3, rtol=0.01
            )


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_bridged_teacher_is_left_as_it_was(stack):
    """Its tensors are those of its file."""
    teacher, depths = make_teacher(), {"encoder": [0, 1, 2], "decoder": [0, 1, 2]} | {stack: [2]}
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    shorter = shorten(teacher, **depths)
    for name, tensor in shorter.named_parameters():  # the same memory
        parts = name.split(".")
        if parts[2:3] == ["layers"]:
            parts[3] = str(depths[parts[1]][int(parts[3])])
        tensor.data = teacher.get_parameter(".".join(parts)).data
    bridge(shorter, teacher, depths, make_batches())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_what_is_bridged_is_balanced():
    """The tokens' mean probabilities come closer to the teacher's."""
    teacher, batches = make_teacher(), make_batches()
    teacher.model.decoder.layers[2].final_layer_norm.weight.mul_(20)  # so that probabilities differ
    depths = {"encoder": [0, 1, 2], "decoder": [2]}
    shorter = shorten(teacher, **depths)
    bridge(shorter, teacher, depths, batches)

    def means(model):
        return torch.cat([model(**batch).logits[batch["labels"] != -100] for batch in batches]).softmax(-1).mean(0)

    balanced = means(shorter)
    shorter.final_logits_bias = teacher.final_logits_bias
    distances = [(found - means(teacher)).abs().sum() for found in (balanced, means(shorter))]
    assert distances[0] < 0.8 * distances[1]


@pytest.mark.parametrize("options", [{}, {"ratio": 1.5}])
def test_fewer_layers_keep_more_when_they_are_bridged(options, tiny_marian, parallel_sentences, tmp_path):
    """Without and with smaller matrices, by the loss on the text."""
    text = tmp_path / "pairs.jsonl"
    text.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in parallel_sentences))
    losses = []
    for name, refit in (("cut", False), ("bridged", None)):
        asked = {"decoder_layers": 1, "study": StudyOptions(refit=refit), **options}
        if options or refit is None:  # layers that are left as they are need no text
            asked["calibration"] = str(text)
        report = convert(tiny_marian, tmp_path / name, **asked, progress=False)
        losses.append(loss(tmp_path / name, tiny_marian, parallel_sentences))
    assert report.layers["decoder"] == [1, 2]
    assert report.calibrated_on
    assert losses[1] < losses[0] - 0.5


TOKENS, SIZE, WIDTH = 90, 37, 8


def output_layer(seed, spread):
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, SIZE, bias=False).requires_grad_(False)
    layer = SimpleNamespace(lm_head=head, final_logits_bias=torch.randn(1, SIZE) * spread, device=torch.device("cpu"))
    layer.logits_of = lambda states: head(states) + layer.final_logits_bias
    return layer


def by_definition(logits, teacher, bias):
    """The bias after all steps, and the cross-entropy before and after each, in double precision."""
    logits, wanted, bias = logits.double(), teacher.double().softmax(-1), bias.double().clone()
    target, losses = wanted.sum(0), []
    for step in range(BALANCING + 1):
        losses.append(-(wanted * (logits + bias).log_softmax(-1)).sum().item() / len(logits))
        if step < BALANCING:
            bias += ((target + SMOOTHING) / ((logits + bias).softmax(-1).sum(0) + SMOOTHING)).log()
    return bias, losses


@pytest.mark.parametrize(("spread", "step"), [(0.05, 1), (2.0, 1), (2.0, 3)])
def test_balance_is_what_its_definition_says(spread, step, monkeypatch):
    """At all tokens or every third."""
    monkeypatch.setattr(module, "LOGIT_ROWS", 16)
    monkeypatch.setattr(module, "BALANCED", 2 * TOKENS // step)
    student, teacher = output_layer(0, spread), output_layer(1, spread)
    labels = torch.zeros(3, TOKENS // 2, dtype=torch.long)
    labels[2, :] = -100  # padding
    store = TensorStore()
    states = {who: torch.randn(2, 3, TOKENS // 2, WIDTH) for who in ("student", "teacher")}
    for who, parts in states.items():
        for index, part in enumerate(parts):
            store[who, "decoder", index] = part
    kept = {who: parts[:, :2].reshape(2, -1, WIDTH)[:, ::step].flatten(0, 1) for who, parts in states.items()}
    before = student.final_logits_bias.clone()
    wanted = teacher.lm_head(kept["teacher"]) + teacher.final_logits_bias
    expected, losses = by_definition(student.lm_head(kept["student"]), wanted, before)
    batches = [{"labels": labels}, {"labels": labels}]
    passes, probabilities = [], module._probabilities
    monkeypatch.setattr(module, "_probabilities", lambda *args: passes.append(args[0]) or probabilities(*args))
    module.balance(student, teacher, batches, store)
    won = losses[0] - losses[-1] >= WORTH_BALANCING
    assert won == (spread > 1)
    if not won:  # which is known by the first of the steps: two passes
        assert passes.count("student") <= 2 * passes.count("teacher")
    torch.testing.assert_close(student.final_logits_bias.double(), expected if won else before.double())
