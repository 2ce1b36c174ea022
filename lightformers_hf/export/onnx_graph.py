"""Building blocks of ONNX graphs over one file of weights, in fp32 or int8."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from .int8 import quantize_rows
from .layers import Biases, Layer, Linear, Norm, Stack

WEIGHTS = "weights.bin"
INLINE_BYTES = 512  # smaller tensors stand in the graph itself
ALIGNMENT = 64
OPSET, IR_VERSION = 20, 9  # of ONNX Runtime 1.17 on
GELU_TANH = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "gelu_python", *GELU_TANH, "silu", "swish", "quick_gelu")


@dataclass
class Weights:
    """One file of tensors: what is added again is found by its content."""

    file: BinaryIO
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, array: np.ndarray) -> tuple[str, int, int]:
        """A name that the content alone decides, and the place (offset, bytes) in the file."""
        key, data = content_hash(array), array.tobytes()
        if key not in self.places:
            self.file.write(b"\0" * (-self.file.tell() % ALIGNMENT))
            self.places[key] = (self.file.tell(), len(data))
            self.file.write(data)
        return f"w{key}", *self.places[key]


@dataclass
class Graph:
    """An ONNX graph under construction. Values are named by strings, as ONNX does it."""

    weights: Weights
    quantize: bool
    activation: str
    normalize_before: bool
    nodes: list = field(default_factory=list)
    constants: dict = field(default_factory=dict)
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return its result. The attribute `domain` says whose operator it is."""
        return self.add_node(kind, *inputs, count=1, **attributes)[0]

    def add_node(self, kind: str, *inputs: str, count: int, **attributes: Any) -> list[str]:
        """As `op`, of `count` results."""
        names = [f"{kind}_{len(self.nodes)}_{index}" for index in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def constant(self, values: Tensor | np.ndarray | list | int | float) -> str:
        """A constant; integers are int64, fractions fp32. Equal ones are one."""
        if isinstance(values, Tensor):
            array = as_array(values)
        else:
            array = values if isinstance(values, np.ndarray) else np.array(values)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        if array.nbytes <= INLINE_BYTES:
            key = f"c{content_hash(array)}"
            tensor = helper.make_tensor(key, dtype, array.shape, array.tobytes(), raw=True)
        else:
            key, offset, length = self.weights.add(array)
            tensor = TensorProto(name=key, data_type=dtype, dims=array.shape, data_location=TensorProto.EXTERNAL)
            for field_, value in {"location": WEIGHTS, "offset": offset, "length": length}.items():
                tensor.external_data.add(key=field_, value=str(value))
        self.constants[tensor.name] = tensor
        return tensor.name

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

    def model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lightformers_hf")

    def matmul(self, states: str, matrix: Tensor, bias: Tensor | None = None) -> str:
        """states·matrix + bias. (…, m) → (…, n)."""
        if self.quantize:
            values, scales = quantize_rows(as_array(matrix.T))
            return self._matmul_int8(
                states, self.constant(np.ascontiguousarray(values.T)), self.constant(scales), bias
            )
        product = self.op("MatMul", states, self.constant(matrix))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def matmul_rows(self, states: str, table: Tensor, bias: Tensor | None = None) -> str:
        """states·tableᵀ + bias, for a table that is also looked up, and is stored once. (…, m), (n, m) → (…, n)."""
        if self.quantize:
            values, scales = quantize_rows(as_array(table))
            rows = self.op("Transpose", self.constant(values), perm=[1, 0])
            return self._matmul_int8(states, rows, self.constant(scales), bias)
        product = self.op("MatMul", states, self.op("Transpose", self.constant(table), perm=[1, 0]))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def matmul_chosen(self, states: str, table: Tensor, chosen: str, bias: Tensor | None = None) -> str:
        """As `matmul_rows` of some rows alone. (…, m), (n, m), ids (c) → (…, c)."""
        part = None if bias is None else self.op("Gather", self.constant(bias), chosen)
        if self.quantize:
            values, scales = quantize_rows(as_array(table))
            rows = self.op("Transpose", self.op("Gather", self.constant(values), chosen), perm=[1, 0])
            found = self._matmul_int8(states, rows, self.op("Gather", self.constant(scales), chosen), None)
        else:
            rows = self.op("Transpose", self.op("Gather", self.constant(table), chosen), perm=[1, 0])
            found = self.op("MatMul", states, rows)
        return found if part is None else self.op("Add", found, part)

    def _matmul_int8(self, states: str, matrix: str, scales: str, bias: Tensor | None) -> str:
        inputs = [states, matrix, scales] + ([] if bias is None else ["", self.constant(bias)])
        return self.op("DynamicQuantizeMatMul", *inputs, domain="com.microsoft")

    def lookup(self, table: Tensor, ids: str) -> str:
        """Rows of a table. Ids (…) → (…, m)."""
        if not self.quantize:
            return self.op("Gather", self.constant(table), ids)
        values, scales = quantize_rows(as_array(table))
        rows = self.op("Cast", self.op("Gather", self.constant(values), ids), to=TensorProto.FLOAT)
        return self.op("Mul", rows, self.op("Gather", self.constant(scales[:, None]), ids))

    def project(self, states: str, linears: list[Linear]) -> list[str]:
        """What several layers make of the same states: their first factors are one product. (…, m) → (…, nᵢ) each."""
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
        """What relative positions add to scores: the biases of distances (…) → (…, H), its axes in another order."""
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
