"""LightFormer → two ONNX graphs over one file of weights, and the loop that runs them with ONNX Runtime.

`encoder.onnx` turns a sentence into keys and values of cross-attention, `decoder.onnx` turns one token and the cache
into logits and the longer cache. Factorized layers stay pairs; what several layers, or both graphs, use (shared
layers, the tied token table) stands once in `weights.bin`, found by its content. In int8 every matrix, the token table
included, is stored in 8 bits with a scale for each output, and activations are quantized as they come.
"""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from .layers import Attention, Expansion, Linear, Stack, read_output, read_stack
from .search import Search, generate, log_softmax
from .source import Source

QUANTIZATIONS = ("float32", "int8")
WEIGHTS = "weights.bin"
INLINE_BYTES = 512  # smaller tensors stand in the graph itself
ALIGNMENT = 64
OPSET, IR_VERSION = 20, 9  # of ONNX Runtime 1.17 on
EPSILON = 1e-5
# Turns weights into unsigned ones when a session starts: slower, but their products are added in 32 bits everywhere.
EXACT_INT8 = ("session.x64quantprecision", "1")
MASKED = float(np.finfo(np.float32).min) / 2
GELU_TANH = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "gelu_python", *GELU_TANH, "silu", "swish", "quick_gelu")


def write(source: Source, folder: Path, quantization: str | None) -> Expansion:
    """Write `encoder.onnx`, `decoder.onnx` and their weights to `folder`. Nothing is multiplied out.

    Raises:
        ValueError: an activation or a quantization that is not among those above.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization is {quantization!r}; for ONNX it is {' or '.join(QUANTIZATIONS)}")
    activation = source.model.config.activation_function
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation_function is {activation!r}, which the export to ONNX does not know (it knows "
            f"{', '.join(ACTIVATIONS)}): train the model with one of these"
        )
    encoder, decoder = read_stack(source.model.model.encoder), read_stack(source.model.model.decoder)
    output, normalize_before = read_output(source.model), source.model.config.normalize_before
    with (folder / WEIGHTS).open("wb") as file:
        weights = Weights(file)
        graphs = {
            "encoder": (encoder_graph, (encoder, decoder)),
            "decoder": (decoder_graph, (decoder, output)),
        }
        for name, (build, parts) in graphs.items():
            graph = Graph(weights, quantization == "int8", activation, normalize_before)
            build(graph, *parts)
            model = graph.model(name)
            onnx.save(model, folder / f"{name}.onnx")
    for name in graphs:
        onnx.checker.check_model(str(folder / f"{name}.onnx"))
    return Expansion()


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

    def op(self, kind: str, *inputs: str, count: int = 1, name: str | None = None, domain: str = "", **attributes):
        """A node; its result, or a list of `count` of them. `name` is a single result's."""
        names = [name or f"{kind}_{len(self.nodes)}_{index}" for index in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names[0] if count == 1 else names

    def constant(self, values: Tensor | np.ndarray | list | int | float) -> str:
        """A constant; integers are int64, fractions fp32. Equal ones are one."""
        if isinstance(values, Tensor):
            array = values.detach().float().numpy()
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

    def output(self, value: str, name: str, shape: list) -> None:
        self.op("Identity", value, name=name)
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lightformers_hf")

    def matmul(self, states: str, matrix: Tensor, bias: Tensor | None = None) -> str:
        """states·matrix + bias. (…, m) → (…, n)."""
        if self.quantize:
            values, scales = quantized(matrix.T)
            return self._matmul_int8(
                states, self.constant(np.ascontiguousarray(values.T)), self.constant(scales), bias
            )
        product = self.op("MatMul", states, self.constant(matrix))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def matmul_rows(self, states: str, table: Tensor, bias: Tensor | None = None) -> str:
        """states·tableᵀ + bias, for a table that is also looked up, and is stored once. (…, m), (n, m) → (…, n)."""
        if self.quantize:
            values, scales = quantized(table)
            rows = self.op("Transpose", self.constant(values), perm=[1, 0])
            return self._matmul_int8(states, rows, self.constant(scales), bias)
        product = self.op("MatMul", states, self.op("Transpose", self.constant(table), perm=[1, 0]))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def _matmul_int8(self, states: str, matrix: str, scales: str, bias: Tensor | None) -> str:
        inputs = [states, matrix, scales] + ([] if bias is None else ["", self.constant(bias)])
        return self.op("DynamicQuantizeMatMul", *inputs, domain="com.microsoft")

    def lookup(self, table: Tensor, ids: str) -> str:
        """Rows of a table. Ids (…) → (…, m)."""
        if not self.quantize:
            return self.op("Gather", self.constant(table), ids)
        values, scales = quantized(table)
        rows = self.op("Cast", self.op("Gather", self.constant(values), ids), to=TensorProto.FLOAT)
        return self.op("Mul", rows, self.op("Gather", self.constant(scales[:, None]), ids))

    def project(self, states: str, linears: list[Linear]) -> list[str]:
        """What several layers make of the same states: their first factors are one product. (…, m) → (…, nᵢ) each."""
        terms = [(linear, chain) for linear in linears for chain in linear.chains]
        in_first = [linear.bias if len(chain) == 1 and chain is linear.chains[0] else None for linear, chain in terms]
        widths = [chain[0].shape[1] for _, chain in terms]
        bias = None
        if any(part is not None for part in in_first):
            zeros = [
                torch.zeros(width) if part is None else part for part, width in zip(in_first, widths, strict=True)
            ]
            bias = torch.cat(zeros)
        first = self.matmul(states, torch.cat([chain[0] for _, chain in terms], dim=1), bias)
        parts = self.split(first, widths)
        outputs = []
        for linear in linears:
            total = None
            for chain in linear.chains:
                part = parts.pop(0)
                for factor in chain[1:]:
                    part = self.matmul(part, factor, linear.bias if chain is linear.chains[0] else None)
                total = part if total is None else self.op("Add", total, part)
            outputs.append(total)
        return outputs

    def split(self, states: str, widths: list[int]) -> list[str]:
        """Cut the last axis."""
        if len(widths) == 1:
            return [states]
        return self.op("Split", states, self.constant(widths), count=len(widths), axis=-1)

    def reshape(self, states: str, *shape: int) -> str:
        """0 keeps a dimension, −1 is what is left."""
        return self.op("Reshape", states, self.constant(list(shape)))

    def transpose(self, states: str, *axes: int) -> str:
        return self.op("Transpose", states, perm=list(axes))

    def norm(self, states: str, norm: tuple[Tensor, Tensor] | None) -> str:
        if norm is None:
            return states
        return self.op("LayerNormalization", states, *map(self.constant, norm), axis=-1, epsilon=EPSILON)

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

    def sublayer(self, states: str, norm: tuple[Tensor, Tensor], compute) -> str:
        """Residual connection and LayerNorm around `compute`."""
        if self.normalize_before:
            return self.op("Add", states, compute(self.norm(states, norm)))
        return self.norm(self.op("Add", states, compute(states)), norm)

    def feed_forward(self, states: str, layer) -> str:
        def compute(inner: str) -> str:
            return self.project(self.activate(self.project(inner, [layer.fc1])[0]), [layer.fc2])[0]

        return self.sublayer(states, layer.ffn_norm, compute)

    def embed(self, stack: Stack, ids: str, positions: str) -> str:
        table, *basis = stack.embedding.chains[0]
        vectors = self.lookup(table, ids)
        for factor in basis:
            vectors = self.matmul(vectors, factor)
        if stack.scale != 1:
            vectors = self.op("Mul", vectors, self.constant(stack.scale))
        return self.norm(self.op("Add", vectors, positions), stack.embedding_norm)


def content_hash(array: np.ndarray) -> str:
    """The same for arrays of equal type, shape and values."""
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def quantized(table: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in int8 with a scale for each row: values (n×m) and scales (n), so that values·scale ≈ table."""
    rows = table.detach().float().numpy()
    largest = np.abs(rows).max(axis=1)
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(rows / scales[:, None]).astype(np.int8), scales


def scaled_inputs(attention: Attention) -> list[Linear]:
    """The input projections with the scale of q·k in that of the queries."""
    query, *others = attention.inputs
    width = query.out_features // 3 if not others else query.out_features
    scale = torch.ones(query.out_features)
    scale[:width] = attention.scale
    chains = tuple((*chain[:-1], chain[-1] * scale) for chain in query.chains)
    return [replace(query, chains=chains, bias=None if query.bias is None else query.bias * scale), *others]


def output_of(graph: Graph, attention: Attention, context: str) -> str:
    """The heads' outputs, mixed. (…, H·d_k) → (…, d)."""
    return context if attention.output is None else graph.project(context, [attention.output])[0]


def cross_sources(decoder: Stack) -> list[int]:
    """The depths whose cross-attention has keys and values of its own."""
    return sorted({layer.cross_source for layer in decoder.layers})


def encoder_graph(graph: Graph, encoder: Stack, decoder: Stack) -> None:
    """Ids and mask (B, S) → keys (B, H, d_k, S) and values (B, H, S, d_k) of cross-attention, and its mask."""
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "source"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "source"])
    absent = graph.op("Sub", graph.constant(1.0), graph.op("Cast", mask, to=TensorProto.FLOAT))
    bias = graph.op("Mul", absent, graph.constant(MASKED))
    bias = graph.op("Unsqueeze", bias, graph.constant([1, 2]))
    length = graph.op("Shape", ids, start=1)
    zero = graph.constant([0])
    positions = graph.op("Slice", graph.constant(encoder.positions), zero, length, zero)
    states = graph.embed(encoder, ids, positions)
    for layer in encoder.layers:
        attention = layer.attention
        shape = (0, 0, attention.heads, attention.head_dim)

        def attend(inner: str, attention=attention, shape=shape) -> str:
            parts = graph.project(inner, scaled_inputs(attention))
            inputs = graph.split(parts[0], [attention.heads * attention.head_dim] * 3) if len(parts) == 1 else parts
            query, key, value = (graph.reshape(part, *shape) for part in inputs)
            scores = graph.op("MatMul", graph.transpose(query, 0, 2, 1, 3), graph.transpose(key, 0, 2, 3, 1))
            weights = graph.op("Softmax", graph.op("Add", scores, bias), axis=-1)
            context = graph.op("MatMul", weights, graph.transpose(value, 0, 2, 1, 3))
            context = graph.reshape(graph.transpose(context, 0, 2, 1, 3), 0, 0, attention.heads * attention.head_dim)
            return output_of(graph, attention, context)

        states = graph.feed_forward(graph.sublayer(states, layer.attention_norm, attend), layer)
    states = graph.norm(states, encoder.final_norm)

    sources = cross_sources(decoder)
    linears = [linear for depth in sources for linear in decoder.layers[depth].cross.inputs[1:]]
    parts = graph.project(states, linears)
    for depth in sources:
        cross = decoder.layers[depth].cross
        for name, axes in (("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
            heads = graph.reshape(parts.pop(0), 0, 0, cross.heads, cross.head_dim)
            graph.output(graph.transpose(heads, *axes), f"cross_{name}_{depth}", ["batch", cross.heads, None, None])
    graph.output(bias, "cross_bias", ["batch", 1, 1, "source"])


def decoder_graph(graph: Graph, decoder: Stack, output: Linear) -> None:
    """One token of each of N = B·K sequences (K beams), its position, and caches → logits (N, V) and longer caches.

    Beams of a sentence read the same cross-attention, as if they were positions of one.
    """
    ids = graph.input("input_ids", TensorProto.INT64, ["rows"])
    position = graph.input("position", TensorProto.INT64, [])
    bias = graph.input("cross_bias", TensorProto.FLOAT, ["batch", 1, 1, "source"])
    batch = graph.op("Shape", bias, start=0, end=1)
    for depth in cross_sources(decoder):
        heads, width = decoder.layers[depth].cross.heads, decoder.layers[depth].cross.head_dim
        graph.input(f"cross_key_{depth}", TensorProto.FLOAT, ["batch", heads, width, "source"])
        graph.input(f"cross_value_{depth}", TensorProto.FLOAT, ["batch", heads, "source", width])
    states = graph.embed(decoder, ids, graph.op("Gather", graph.constant(decoder.positions), position))
    for depth, layer in enumerate(decoder.layers):

        def attend(inner: str, depth=depth, layer=layer) -> str:
            attention = layer.attention
            H, width = attention.heads, attention.head_dim
            parts = graph.project(inner, scaled_inputs(attention))
            query, key, value = graph.split(parts[0], [H * width] * 3) if len(parts) == 1 else parts
            past = {
                "key": graph.input(f"past_key_{depth}", TensorProto.FLOAT, ["rows", H, width, "past"]),
                "value": graph.input(f"past_value_{depth}", TensorProto.FLOAT, ["rows", H, "past", width]),
            }
            keys = graph.op("Concat", past["key"], graph.reshape(key, 0, H, width, 1), axis=3)
            values = graph.op("Concat", past["value"], graph.reshape(value, 0, H, 1, width), axis=2)
            graph.output(keys, f"key_{depth}", ["rows", H, width, None])
            graph.output(values, f"value_{depth}", ["rows", H, None, width])
            weights = graph.op("Softmax", graph.op("MatMul", graph.reshape(query, 0, H, 1, width), keys), axis=-1)
            return output_of(graph, attention, graph.reshape(graph.op("MatMul", weights, values), 0, H * width))

        def attend_cross(inner: str, layer=layer) -> str:
            attention = layer.cross
            H, width = attention.heads, attention.head_dim
            query = graph.project(inner, scaled_inputs(attention)[:1])[0]
            shape = graph.op("Concat", batch, graph.constant([-1, H, width]), axis=0)
            query = graph.transpose(graph.op("Reshape", query, shape), 0, 2, 1, 3)
            scores = graph.op("Add", graph.op("MatMul", query, f"cross_key_{layer.cross_source}"), bias)
            context = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), f"cross_value_{layer.cross_source}")
            return output_of(graph, attention, graph.reshape(graph.transpose(context, 0, 2, 1, 3), -1, H * width))

        states = graph.sublayer(states, layer.attention_norm, attend)
        states = graph.feed_forward(graph.sublayer(states, layer.cross_norm, attend_cross), layer)
    states = graph.norm(states, decoder.final_norm)
    *projection, weight = output.chains[0]
    for factor in projection:
        states = graph.matmul(states, factor)
    logits = graph.matmul_rows(states, weight.T, output.bias)
    graph.output(logits, "logits", ["rows", weight.shape[1]])


@functools.cache
def overflows() -> bool:
    """Whether int8 products overflow on this processor: x86 without VNNI adds pairs of them in 16 bits."""
    graph = Graph(Weights(io.BytesIO()), True, "relu", False)
    states = graph.input("states", TensorProto.FLOAT, [1, 2])
    graph.output(graph.matmul(states, torch.ones(2, 1)), "sum", [1, 1])
    session = onnxruntime.InferenceSession(
        graph.model("probe").SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return abs(float(session.run(None, {"states": np.ones((1, 2), dtype=np.float32)})[0].item()) - 2) > 0.01


class OnnxModel:
    """An exported folder, run by ONNX Runtime: see `load_engine`."""

    def __init__(self, folder: Path, search: Search, threads: int):
        self.search = search
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        if overflows():
            options.add_session_config_entry(*EXACT_INT8)
        try:
            self.encoder, self.decoder = (
                onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
                for name in ("encoder", "decoder")
            )
        except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
            if not overflows():
                raise
            raise ValueError(
                f"{folder}: int8 products overflow on this processor, and ONNX Runtime cannot avoid that where layers "
                "are shared: export without quantization, or to ctranslate2"
            ) from error
        self._past = [value for value in self.decoder.get_inputs() if value.name.startswith("past_")]
        self._cross = [value.name for value in self.encoder.get_outputs()]

    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        return generate(self.steps(batch, search.num_beams), len(batch), search)

    def steps(self, batch: list[list[int]], num_beams: int = 1):
        """Encode a batch; what comes back computes the logits of one step after the other (`search.Step`)."""
        width = max(map(len, batch))
        ids = np.full((len(batch), width), self.search.pad, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, sentence in enumerate(batch):
            ids[row, : len(sentence)], mask[row, : len(sentence)] = sentence, 1
        cross = self.encoder.run(self._cross, {"input_ids": ids, "attention_mask": mask})
        feeds = dict(zip(self._cross, cross, strict=True))
        for value in self._past:
            feeds[value.name] = np.zeros(
                [len(batch) * num_beams, *(0 if isinstance(size, str) else size for size in value.shape[1:])],
                dtype=np.float32,
            )
        outputs = ["logits", *(value.name.removeprefix("past_") for value in self._past)]
        same = np.arange(len(batch) * num_beams)
        position = 0

        def step(tokens: np.ndarray, order: np.ndarray | None) -> np.ndarray:
            nonlocal position
            if order is not None and not np.array_equal(order, same):
                for value in self._past:
                    feeds[value.name] = feeds[value.name][order]
            feeds["input_ids"], feeds["position"] = np.ascontiguousarray(tokens), np.array(position)
            logits, *caches = self.decoder.run(outputs, feeds)
            for value, cache in zip(self._past, caches, strict=True):
                feeds[value.name] = cache
            position += 1
            return logits

        return step

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """log p of every token of `targets`, and of the end behind them, given `sources`."""
        end, start = self.search.ends[0] if self.search.ends else self.search.pad, self.search.start
        step = self.steps(sources)
        rows = [[start, *target, end] for target in targets]
        scores: list[list[float]] = [[] for _ in rows]
        for position in range(max(map(len, rows)) - 1):
            tokens = np.array([row[min(position, len(row) - 1)] for row in rows])
            logits = step(tokens, None)
            logits[:, self.search.suppressed] = -np.inf
            log_p = log_softmax(logits)
            for row, ids in enumerate(rows):
                if position + 1 < len(ids):
                    scores[row].append(float(log_p[row, ids[position + 1]]))
        return scores


def load(folder: Path, search: Search, threads: int) -> OnnxModel:
    """What `write` wrote, ready to run."""
    return OnnxModel(folder, search, threads)
