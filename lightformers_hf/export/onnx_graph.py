"""Building blocks of ONNX graphs, with weights in 32, 16 or 8 bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from .int8 import quantize_rows
from .layers import Attention, Biases, Layer, Linear, Norm, Stack

OPSET, IR_VERSION = 20, 9  # supported by ONNX Runtime from 1.17
MICROSOFT = "com.microsoft"
MASKED = -1e30
GELU_TANH = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "gelu_python", *GELU_TANH, "silu", "swish", "quick_gelu")


@dataclass
class Graph:
    """An ONNX graph under construction. A value is named by a string, as in ONNX.

    Attributes:
        name: prefix of all values, so that two graphs can become one.
        quantization: `int8`: matrices have 8 bits and a scale for each output, and activations are quantized at run
            time. `float16`: tensors are stored in 16 bits and become fp32 when the graph is loaded.
    """

    name: str
    quantization: str
    activation: str
    normalize_before: bool
    nodes: list = field(default_factory=list)
    constants: dict = field(default_factory=dict)
    widened: dict = field(default_factory=dict)
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    values: int = 0

    @property
    def in_int8(self) -> bool:
        return self.quantization == "int8"

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return its result. The attribute `domain` names the owner of the operator."""
        return self.add_node(kind, *inputs, count=1, **attributes)[0]

    def add_node(self, kind: str, *inputs: str, count: int, **attributes: Any) -> list[str]:
        """As `op`, of `count` results."""
        names = [f"{self.name}/{kind}_{self.values}_{index}" for index in range(count)]
        self.values += 1
        self.nodes.append(helper.make_node(kind, list(inputs), names, names[0], **attributes))
        return names

    def constant(self, values: Tensor | np.ndarray | list | int | float) -> str:
        """A constant; integers are int64, fractions fp32. Equal ones are one."""
        if isinstance(values, Tensor):
            array = as_array(values)
        else:
            array = values if isinstance(values, np.ndarray) else np.array(values)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        if self.quantization != "float16" or array.dtype != np.float32 or array.ndim < 2:
            return self._store(array)
        name = self._store(array.astype(np.float16))
        self.widened[f"{name}_fp32"] = name
        return f"{name}_fp32"

    def _store(self, array: np.ndarray) -> str:
        key = f"w{content_hash(array)}"
        if key not in self.constants:
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            self.constants[key] = helper.make_tensor(key, dtype, array.shape, array.tobytes(), raw=True)
        return key

    def input(self, name: str, dtype: int, shape: list) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, value: str, name: str, shape: list) -> str:
        """Make `value` an output of the graph; gives its name from now on."""
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if other == value else other for other in names]
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def choose(self, condition: str, branches: dict[str, Callable[[], list[str]]]) -> list[str]:
        """The values of the branch `then_branch` where a condition is true, else of `else_branch`."""
        graphs = {}
        for key, build in branches.items():
            outer, self.nodes = self.nodes, []
            values = [self.op("Identity", value) for value in build()]
            infos = [helper.make_tensor_value_info(value, TensorProto.FLOAT, None) for value in values]
            graphs[key] = helper.make_graph(self.nodes, key, [], infos)
            self.nodes = outer
        return self.add_node("If", condition, count=len(values), **graphs)

    def model(self) -> onnx.ModelProto:
        casts = [helper.make_node("Cast", [old], [new], to=TensorProto.FLOAT) for new, old in self.widened.items()]
        graph = helper.make_graph(
            casts + self.nodes, self.name, self.inputs, self.outputs, list(self.constants.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lightformers_hf")

    def attend(
        self, attention: Attention, inputs: list[str], *, mask: str = "", bias: str = "", past: list[str] | None = None
    ) -> list[str]:
        """Multi-head attention.

        Args:
            inputs: queries (B, T, H·d_k), keys and values; these two may also be (B, H, S, d_k).
            mask: int32 (B, S), 0 for keys that are not attended to.
            bias: added to the scores, (1, H, T, S).
            past: keys and values (B, H, P, d_k) that come first. The attention is then causal, and all keys and values
                are returned, too.
        """
        return self.add_node(
            "MultiHeadAttention",
            *(*inputs, "", mask, bias, *(past or ())),
            count=3 if past else 1,
            domain=MICROSOFT,
            num_heads=attention.heads,
            scale=float(attention.scale),
            mask_filter_value=MASKED,
            unidirectional=int(past is not None),
        )

    def matmul(self, states: str, matrix: Tensor, bias: Tensor | None = None) -> str:
        """states·matrix + bias. (…, m) → (…, n)."""
        if self.in_int8:
            values, scales = quantize_rows(as_array(matrix.T))
            return self._matmul_int8(
                states, self.constant(np.ascontiguousarray(values.T)), self.constant(scales), bias
            )
        product = self.op("MatMul", states, self.constant(matrix))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def matmul_rows(self, states: str, table: Tensor, bias: Tensor | None = None) -> str:
        """states·tableᵀ + bias, for a table that is also looked up, and is stored once. (…, m), (n, m) → (…, n)."""
        if self.in_int8:
            values, scales = quantize_rows(as_array(table))
            rows = self.op("Transpose", self.constant(values), perm=[1, 0])
            return self._matmul_int8(states, rows, self.constant(scales), bias)
        product = self.op("MatMul", states, self.op("Transpose", self.constant(table), perm=[1, 0]))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def _matmul_int8(self, states: str, matrix: str, scales: str, bias: Tensor | None) -> str:
        inputs = [states, matrix, scales] + ([] if bias is None else ["", self.constant(bias)])
        return self.op("DynamicQuantizeMatMul", *inputs, domain=MICROSOFT)

    def lookup(self, table: Tensor, ids: str) -> str:
        """Rows of a table. Ids (…) → (…, m)."""
        if not self.in_int8:
            return self.op("Gather", self.constant(table), ids)
        values, scales = quantize_rows(as_array(table))
        rows = self.op("Cast", self.op("Gather", self.constant(values), ids), to=TensorProto.FLOAT)
        return self.op("Mul", rows, self.op("Gather", self.constant(scales[:, None]), ids))

    def project(self, states: str, linears: list[Linear]) -> list[str]:
        """Apply several layers to the same states: their first factors are one product. (…, m) → (…, nᵢ) each."""
        in_first = [linear.bias if linear.is_dense else None for linear in linears]
        widths = [linear.factors[0].shape[1] for linear in linears]
        bias = None
        if any(part is not None for part in in_first):
            zeros = [
                torch.zeros(width) if part is None else part for part, width in zip(in_first, widths, strict=True)
            ]
            bias = torch.cat(zeros)
        first = self.matmul(states, torch.cat([linear.factors[0] for linear in linears], dim=1), bias)
        parts = self.split(first, widths)
        outputs = []
        for linear, output in zip(linears, parts, strict=True):
            for factor in linear.factors[1:]:
                output = self.matmul(output, factor, linear.bias)
            outputs.append(output)
        return outputs

    def project_inputs(self, states: str, attention: Attention) -> list[str]:
        """Queries, keys and values of self-attention. (…, d) → three times (…, H·d_k)."""
        parts = self.project(states, list(attention.inputs))
        return parts if len(parts) == 3 else self.split(parts[0], [attention.heads * attention.head_dim] * 3)

    def project_output(self, context: str, attention: Attention) -> str:
        """The heads' outputs, mixed. (…, H·d_k) → (…, d)."""
        return context if attention.output is None else self.project(context, [attention.output])[0]

    def split(self, states: str, widths: list[int]) -> list[str]:
        """Cut the last axis."""
        if len(widths) == 1:
            return [states]
        return self.add_node("Split", states, self.constant(widths), count=len(widths), axis=-1)

    def reshape(self, states: str, *shape: int) -> str:
        """0 keeps a dimension, −1 is what is left."""
        return self.op("Reshape", states, self.constant(list(shape)))

    def transpose(self, states: str, *axes: int) -> str:
        return self.op("Transpose", states, perm=list(axes))

    def norm(self, states: str, norm: Norm | None) -> str:
        if norm is None:
            return states
        if norm.bias is not None:
            inputs = (states, self.constant(norm.weight), self.constant(norm.bias))
            return self.op("LayerNormalization", *inputs, axis=-1, epsilon=norm.epsilon)
        square = self.op("ReduceMean", self.op("Mul", states, states), self.constant([-1]), keepdims=1)
        length = self.op("Sqrt", self.op("Add", square, self.constant(norm.epsilon)))
        return self.op("Mul", self.op("Div", states, length), self.constant(norm.weight))

    def activate(self, states: str) -> str:
        name = self.activation
        if name in ("relu", "tanh", "sigmoid"):
            return self.op(name.capitalize(), states)
        if name in ("gelu", "gelu_python"):
            return self.op("Gelu", states)
        if name in GELU_TANH:
            return self.op("Gelu", states, approximate="tanh")
        gate = self.op("Mul", states, self.constant(1.702)) if name == "quick_gelu" else states
        return self.op("Mul", states, self.op("Sigmoid", gate))

    def sublayer(self, states: str, norm: Norm, compute: Callable[[str], str]) -> str:
        """Residual connection and LayerNorm around `compute`."""
        if self.normalize_before:
            return self.op("Add", states, compute(self.norm(states, norm)))
        return self.norm(self.op("Add", states, compute(states)), norm)

    def feed_forward(self, states: str, layer: Layer) -> str:
        def compute(inner: str) -> str:
            if layer.gate is None:
                hidden = self.activate(self.project(inner, [layer.fc1])[0])
            else:
                gate, value = self.project(inner, [layer.gate, layer.fc1])
                hidden = self.op("Mul", self.activate(gate), value)
            return self.project(hidden, [layer.fc2])[0]

        return self.sublayer(states, layer.ffn_norm, compute)

    def relative(self, biases: Biases, distances: str, *axes: int) -> str:
        """Return the biases of scores by distances (…) → (…, H), with the axes in another order."""
        furthest = self.constant(biases.furthest)
        clipped = self.op("Max", self.op("Min", distances, furthest), self.constant(-biases.furthest))
        rows = self.op("Gather", self.constant(biases.by_distance), self.op("Add", clipped, furthest))
        return self.transpose(rows, *axes)

    def embed(self, stack: Stack, ids: str, positions: str | None) -> str:
        table, *basis = stack.embedding.factors
        vectors = self.lookup(table, ids)
        for factor in basis:
            vectors = self.matmul(vectors, factor)
        if stack.scale != 1:
            vectors = self.op("Mul", vectors, self.constant(stack.scale))
        if positions is not None:
            vectors = self.op("Add", vectors, positions)
        return self.norm(vectors, stack.embedding_norm)


def as_array(tensor: Tensor) -> np.ndarray:
    """The same numbers, fp32."""
    return tensor.detach().float().numpy()


def content_hash(array: np.ndarray) -> str:
    """The same for arrays of equal type, shape and values."""
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]
