"""LightFormer → two ONNX graphs over one file of weights, and the loop that runs them with ONNX Runtime.

`encoder.onnx` turns a sentence into keys and values of cross-attention, `decoder.onnx` turns one token and the cache
into logits and the longer cache. Factorized layers stay pairs; what several layers, or both graphs, use (shared
layers, the tied token table) stands once in `weights.bin`, found by its content. In int8 every matrix, the token table
included, is stored in 8 bits with a scale for each output, and activations are quantized as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto

from ..layers import Attention, Expansion, Layer, Linear, Stack, read_output, read_stack
from ..onnx_graph import ACTIVATIONS, WEIGHTS, Graph, Weights
from ..search import Search, Step, generate, log_softmax
from ..shortlist import Shortlist, narrow_search
from ..source import Source

NAME = "ONNX Runtime"
QUANTIZATIONS = ("float32", "int8")
SHORTLIST = "shortlist.json"
MASKED = float(np.finfo(np.float32).min) / 2


def write(source: Source, folder: Path, quantization: str | None, *, sliced: bool = False) -> Expansion:
    """Write `encoder.onnx`, `decoder.onnx` and their weights to `folder`, all factors as they are.

    Args:
        sliced: let the decoder compute logits of some tokens alone, its input `candidates`.

    Raises:
        ValueError: an activation that the graphs do not know.
    """
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
        graphs: dict[str, Callable[[Graph], None]] = {
            "encoder": partial(encoder_graph, encoder=encoder, decoder=decoder),
            "decoder": partial(
                decoder_graph, decoder=decoder, output=output, sliced=sliced, output_scale=source.model.output_scale
            ),
        }
        for name, build in graphs.items():
            graph = Graph(weights, quantization == "int8", activation, normalize_before)
            build(graph)
            model = graph.model(name)
            onnx.save(model, folder / f"{name}.onnx")
    for name in graphs:
        onnx.checker.check_model(str(folder / f"{name}.onnx"))
    expansion = Expansion()
    for linear in (*encoder.linears, *decoder.linears):
        expansion.write(linear)
    return expansion


def write_shortlist(source: Source, folder: Path, quantization: str | None, shortlist: Shortlist) -> None:
    """Write the graphs anew, the decoder's with the tokens that can come as an input, and which these are."""
    write(source, folder, quantization, sliced=True)
    shortlist.save(folder / SHORTLIST)


def scaled_inputs(attention: Attention) -> list[Linear]:
    """The input projections with the scale of q·k in that of the queries."""
    query, *others = attention.inputs
    width = query.out_features // 3 if not others else query.out_features
    scale = torch.ones(query.out_features)
    scale[:width] = attention.scale
    factors = (*query.factors[:-1], query.factors[-1] * scale)
    return [replace(query, factors=factors, bias=None if query.bias is None else query.bias * scale), *others]


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
    zero, positions = graph.constant([0]), None
    if encoder.positions is not None:
        positions = graph.op("Slice", graph.constant(encoder.positions), zero, length, zero)
    else:
        places = graph.op("Range", graph.constant(0), graph.op("Squeeze", length), graph.constant(1))
        distances = graph.op(
            "Sub", graph.op("Unsqueeze", places, zero), graph.op("Unsqueeze", places, graph.constant([1]))
        )
    states = graph.embed(encoder, ids, positions)
    for layer in encoder.layers:
        attention = layer.attention
        shape = (0, 0, attention.heads, attention.head_dim)
        added = bias
        if layer.biases is not None:
            added = graph.op("Add", graph.relative(layer.biases, distances, 2, 0, 1), bias)

        def attend(
            inner: str, attention: Attention = attention, shape: tuple[int, ...] = shape, added: str = added
        ) -> str:
            parts = graph.project(inner, scaled_inputs(attention))
            inputs = graph.split(parts[0], [attention.heads * attention.head_dim] * 3) if len(parts) == 1 else parts
            query, key, value = (graph.reshape(part, *shape) for part in inputs)
            scores = graph.op("MatMul", graph.transpose(query, 0, 2, 1, 3), graph.transpose(key, 0, 2, 3, 1))
            weights = graph.op("Softmax", graph.op("Add", scores, added), axis=-1)
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


def decoder_graph(
    graph: Graph, decoder: Stack, output: Linear, *, output_scale: float | None = None, sliced: bool = False
) -> None:
    """One token of each of N = B·K sequences (K beams), its position, and caches → logits (N, V) and longer caches.

    The states get `output_scale` before the output layer. Sliced, the graph also gets C of the V tokens, and gives
    logits (N, C) of these.

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
    place = None
    if decoder.positions is not None:
        place = graph.op("Gather", graph.constant(decoder.positions), position)
    else:
        distances = graph.op("Range", graph.op("Neg", position), graph.constant(1), graph.constant(1))
    states = graph.embed(decoder, ids, place)
    for depth, layer in enumerate(decoder.layers):

        def attend(inner: str, depth: int = depth, layer: Layer = layer) -> str:
            attention = layer.attention
            H, width = attention.heads, attention.head_dim
            parts = graph.project(inner, scaled_inputs(attention))
            query, key, value = graph.split(parts[0], [H * width] * 3) if len(parts) == 1 else parts
            past = {
                "key": graph.input(f"past_key_{depth}", TensorProto.FLOAT, ["rows", H, width, "past"]),
                "value": graph.input(f"past_value_{depth}", TensorProto.FLOAT, ["rows", H, "past", width]),
            }
            keys = graph.op("Concat", past["key"], graph.reshape(key, 0, H, width, 1), axis=3)
            keys = graph.output(keys, f"key_{depth}", ["rows", H, width, None])
            values = graph.op("Concat", past["value"], graph.reshape(value, 0, H, 1, width), axis=2)
            values = graph.output(values, f"value_{depth}", ["rows", H, None, width])
            scores = graph.op("MatMul", graph.reshape(query, 0, H, 1, width), keys)
            if layer.biases is not None:
                biases = graph.relative(layer.biases, distances, 1, 0)
                scores = graph.op("Add", scores, graph.op("Unsqueeze", biases, graph.constant([1])))
            weights = graph.op("Softmax", scores, axis=-1)
            return output_of(graph, attention, graph.reshape(graph.op("MatMul", weights, values), 0, H * width))

        def attend_cross(inner: str, layer: Layer = layer) -> str:
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
    output_logits(graph, states, output, output_scale, sliced=sliced)


def output_logits(graph: Graph, states: str, output: Linear, scale: float | None, *, sliced: bool) -> None:
    """States (N, d), times `scale`, → logits of all tokens (N, V), or `sliced` of those that the graph gets (N, C)."""
    if scale is not None:
        states = graph.op("Mul", states, graph.constant(scale))
    *projection, weight = output.factors
    for factor in projection:
        states = graph.matmul(states, factor)
    if sliced:
        candidates = graph.input("candidates", TensorProto.INT64, ["candidates"])
        logits = graph.matmul_chosen(states, weight.T, candidates, output.bias)
    else:
        logits = graph.matmul_rows(states, weight.T, output.bias)
    graph.output(logits, "logits", ["rows", "candidates" if sliced else weight.shape[1]])


class OnnxModel:
    """An exported folder, run by ONNX Runtime: see `load_engine`."""

    def __init__(self, folder: Path, search: Search, threads: int):
        self.search = search
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
            for name in ("encoder", "decoder")
        )
        self._past = [value for value in self.decoder.get_inputs() if value.name.startswith("past_")]
        is_sliced = any(value.name == "candidates" for value in self.decoder.get_inputs())
        self.shortlist = Shortlist.load(folder / SHORTLIST) if is_sliced else None
        self._cross = [value.name for value in self.encoder.get_outputs()]

    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        if self.shortlist is None:
            return generate(self.steps(batch, search.num_beams), len(batch), search)
        tokens = self.shortlist.candidates(batch)
        compute = self.steps(batch, search.num_beams, tokens)
        rows = generate(lambda some, order: compute(tokens[some], order), len(batch), narrow_search(search, tokens))
        return [tokens[row].tolist() for row in rows]

    def steps(self, batch: list[list[int]], num_beams: int = 1, candidates: np.ndarray | None = None) -> Step:
        """Encode a batch; what comes back computes the logits of one step after the other (`search.Step`).

        Args:
            candidates: tokens whose logits are wanted, where the model computes some alone; `None`: all.
        """
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
        if self.shortlist is not None:
            feeds["candidates"] = np.arange(self.shortlist.vocabulary) if candidates is None else candidates
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


def describe_loading(folder: Path) -> None:
    """The graphs are no program: the loop around them is this package's."""
