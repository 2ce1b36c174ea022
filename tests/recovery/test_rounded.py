"""Training with the rounding of an export: its values, its gradients, and what the exported model then loses."""

import copy

import numpy as np
import onnx
import pytest
import torch
from models.cases import make_model
from onnx import numpy_helper
from tiny import restore_rows

from lightformers_hf import export
from lightformers_hf.rounding import (
    RoundedRows,
    bits_of,
    collate,
    is_rounded,
    round_matrix,
    round_model,
    rounded_matrices,
)

VARIANTS = [
    "lightformer-low-rank",
    "lightformer-joint-qkv",
    "lightformer-pre-norm",
    "lightformer-t5-low-rank",
    "lightformer-two-vocabularies",
]


def as_bytes(row):
    return np.trim_zeros(row.astype(np.float32) + 0.0, "b").tobytes()


def read_matrices(folder, suffix):
    """The rows of the matrices of exported files, as bytes without the zeros at their end."""
    found = set()
    for name in ("encoder_model", "decoder_model_merged"):
        graph = onnx.load(folder / "onnx" / f"{name}{suffix}.onnx").graph
        branches = [attribute.g for node in graph.node for attribute in node.attribute if attribute.g.node]
        values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        producers = {output: node for part in (graph, *branches) for node in part.node for output in node.output}

        def value_of(name, values=values, producers=producers):
            while name not in values:
                name = producers[name].input[0]
            return values[name]

        for node in [node for part in (graph, *branches) for node in part.node]:
            if node.op_type == "MatMulNBits":
                width = next(a.i for a in node.attribute if a.name == "K")
                rows, scales = value_of(node.input[1]), value_of(node.input[2])
                matrix = restore_rows(RoundedRows(rows, scales, width)).numpy()
            elif node.op_type == "GatherBlockQuantized":
                rows, scales = value_of(node.input[0]), value_of(node.input[2])
                matrix = restore_rows(RoundedRows(rows, scales, 2 * rows.shape[1])).numpy()
            elif node.op_type == "DynamicQuantizeMatMul":
                rows = value_of(node.input[1])
                matrix = rows.T if node.input[1] in values else rows
                matrix = matrix * value_of(node.input[2])[:, None]
            elif node.op_type == "Mul" and producers[node.input[0]].op_type == "Cast":  # a lookup alone
                matrix = value_of(node.input[0]) * value_of(node.input[1])
            else:
                continue
            for row in matrix:
                found.add(as_bytes(row))
    return found


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_are_those_of_the_export(variant, quantization, tmp_path):
    """Every row that a rounded model multiplies with is in the files of its export, in whatever type it was saved."""
    model = make_model("ConditionalGeneration", variant).eval()
    assert not is_rounded(model)
    round_model(model, quantization)
    assert is_rounded(model) == is_rounded(copy.deepcopy(model).bfloat16()) == (quantization == "int4")
    model.save_pretrained(tmp_path / "light")
    export(tmp_path / "light", tmp_path / "out", to="onnx", quantization=quantization)
    exported = read_matrices(tmp_path / "out", "_q4" if quantization == "int4" else "_quantized")
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    kinds = set()
    with rounded_matrices(model, quantization):
        for module in model.modules():
            for name, tensor in vars(module).items():
                if isinstance(tensor, torch.Tensor):
                    rows = tensor.T if name == "basis" and isinstance(module, torch.nn.Embedding) else tensor
                    kinds.add(bits_of(quantization, rows.shape[1]))
                    for row in rows.detach().numpy():
                        assert as_bytes(row) in exported
    assert kinds == ({8} if quantization == "int8" else {4, 8})
    assert [*before] == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(*before[name])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_gradients_are_those_at_the_rounded_weights(quantization):
    """Also of layers and tables that are shared: their stored matrices get the sum."""
    model = make_model("ConditionalGeneration", "lightformer-groups").eval()
    other = make_model("ConditionalGeneration", "lightformer-groups").eval()
    batch = collate([[5, 6, 7, 2], [8, 2]], [[6, 2], [9, 5, 2]], model.config.pad_token_id)
    with rounded_matrices(model, quantization):
        loss = model(**batch).loss
        loss.backward()
    with torch.no_grad():
        for module in {id(matrix): matrix for matrix in other.parameters() if matrix.dim() == 2}.values():
            module.copy_(round_matrix(module, quantization))
    expected = other(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, its.grad)


def test_a_training_that_rounds_loses_less_by_the_rounding(build_trainer):
    """Evaluations are of rounded weights in both, until they are not asked for."""
    lost = {}
    for first in (80, 120):
        trainer = build_trainer(
            "lightformer", quantization="int4", max_steps=120, learning_rate=0.01, optim="adamw_torch",
            lr_scheduler_type="linear",
        )  # fmt: skip
        trainer.rounds = lambda trainer=trainer, first=first: trainer.state.global_step >= first
        trainer.train()
        lost[first] = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        trainer.quantization = None
        lost[first] -= trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert lost[120] > 0
    assert lost[80] < 0.5 * lost[120]
