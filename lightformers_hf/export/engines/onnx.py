"""LightFormer → ONNX in the layout of optimum and transformers.js, and a loop that runs it with ONNX Runtime.

`onnx/encoder_model.onnx` turns ids into hidden states. `onnx/decoder_model_merged.onnx` turns target ids, hidden
states and caches into logits and longer caches. Its input `use_cache_branch` decides where keys and values of
cross-attention come from: computed from the hidden states at the first step, from the cache afterwards. File names end
in `_quantized` in int8 and in `_fp16` in 16 bits. Each graph holds all its weights, because transformers.js opens no
file for two graphs; weights that several layers share are stored once in a graph.

The loop of this package reads the same files. It resolves `use_cache_branch` when it loads them (`specialize`): one
graph computes the hidden states and the cross-attention's keys and values, the other one step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from ...files import write_json
from ...models.configuration_lightformer import RELATIVE_POSITIONS
from ..layers import Expansion, Layer, Linear, Stack, read_output, read_stack
from ..onnx_graph import ACTIVATIONS, Graph
from ..search import Search, Step, generate, log_softmax
from ..shortlist import Shortlist, narrow_search
from ..source import Source

NAME, LIBRARY = "ONNX Runtime", "transformers.js"
QUANTIZATIONS = ("float32", "int8", "float16")
BESIDE = ("float32", "float16")  # types that `export` writes before int8, in this order: `load` prefers the last
SHORTLIST = "shortlist.json"
FOLDER, ENCODER, DECODER = "onnx", "encoder_model", "decoder_model_merged"
# Ends of file names, that which `load` prefers first.
SUFFIXES = {"int8": "_quantized", "float16": "_fp16", "float32": ""}
SIDES = ("encoder", "decoder")
# {tokenizer: family} of those that optimum and transformers.js have classes for; another one is run as BART.
FAMILIES = {
    "MarianTokenizer": "marian",
    "M2M100Tokenizer": "m2m_100",
    "NllbTokenizer": "m2m_100",
    "MBartTokenizer": "mbart",
    "MBart50Tokenizer": "mbart",
}
LARGEST_FILE = 2**31 - 1  # limit of a message of protocol buffers
OUTPUT = "output"  # begins the names of the nodes of the output layer


def write(source: Source, folder: Path, quantization: str) -> Expansion:
    """Write both graphs to `folder`/onnx. Low-rank factors stay as they are.

    Raises:
        ValueError: an activation without an operator, or a graph of more than 2 GB.
    """
    activation = source.model.config.activation_function
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation_function is {activation!r}, which the export to ONNX does not support (supported: "
            f"{', '.join(ACTIVATIONS)}): train the model with one of these"
        )
    encoder, decoder = read_stack(source.model.model.encoder), read_stack(source.model.model.decoder)
    output, width = read_output(source.model), source.model.config.d_model
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, build in {
        ENCODER: partial(encoder_graph, encoder=encoder, width=width),
        DECODER: partial(
            decoder_graph, decoder=decoder, output=output, width=width, output_scale=source.model.output_scale
        ),
    }.items():
        graph = Graph(name.partition("_")[0], quantization, activation, source.model.config.normalize_before)
        build(graph)
        file = folder / FOLDER / f"{name}{SUFFIXES[quantization]}.onnx"
        if (size := sum(len(tensor.raw_data) for tensor in graph.constants.values())) > LARGEST_FILE:
            raise ValueError(
                f"{file.name} would have {size / 1e9:.1f} GB, and an ONNX file holds 2: give quantization int8 or "
                "float16 (--quantization int8), or export to ctranslate2"
            )
        onnx.save(graph.model(), file)
        onnx.checker.check_model(str(file))
    expansion = Expansion()
    for linear in (*encoder.linears, *decoder.linears):
        expansion.write(linear)
    return expansion


def write_shortlist(source: Source, folder: Path, quantization: str, shortlist: Shortlist) -> None:
    """Write which tokens can come. Only the loop of this package reads it; the graphs stay as they are."""
    shortlist.save(folder / SHORTLIST)


def write_config(source: Source, folder: Path, prefix: str) -> None:
    """Write the `config.json` by which optimum and transformers.js choose their classes.

    The family is that of the tokenizer. Sizes are those of the model, but for the width of heads, which both programs
    read from the graph.

    Args:
        prefix: prefix of every source, as T5 requires.
    """
    config, has_t5 = source.model.config, source.model.config.position_embedding_type in RELATIVE_POSITIONS
    family = "t5" if has_t5 else FAMILIES.get(type(source.tokenizer).__name__.removesuffix("Fast"), "bart")
    named = ("vocab_size", "d_model", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    fields = {name: getattr(config, name) for name in named}
    fields |= {"decoder_start_token_id": source.generation.decoder_start_token_id, "is_encoder_decoder": True}
    if has_t5:
        fields |= {"num_layers": config.encoder_layers, "num_decoder_layers": config.decoder_layers}
        fields |= {"num_heads": config.decoder_attention_heads, "d_ff": config.decoder_ffn_dim}
    else:
        sizes = ("layers", "attention_heads", "ffn_dim")
        fields |= {name: getattr(config, name) for side in SIDES for name in (f"{side}_{size}" for size in sizes)}
        fields |= {name: getattr(config, name) for name in ("decoder_vocab_size", "max_position_embeddings")}
    written = AutoConfig.for_model(family, **fields).to_dict()
    written["architectures"] = [MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[family]]
    written["decoder_vocab_size"] = config.decoder_vocab_size
    if prefix:
        written["prefix"] = prefix
    write_json(written, folder / "config.json")


def encoder_graph(graph: Graph, encoder: Stack, width: int) -> None:
    """Ids and mask (B, S) → hidden states (B, S, d)."""
    ids = graph.input("input_ids", TensorProto.INT64, ["batch_size", "encoder_sequence_length"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch_size", "encoder_sequence_length"])
    mask = graph.op("Cast", mask, to=TensorProto.INT32)
    zero, length = graph.constant([0]), graph.op("Shape", ids, start=1)
    places = graph.op("Range", graph.constant(0), graph.op("Squeeze", length), graph.constant(1))
    positions = (
        None if encoder.positions is None else graph.op("Slice", graph.constant(encoder.positions), zero, length)
    )
    states = graph.embed(encoder, ids, positions)
    for layer in encoder.layers:
        bias = "" if layer.biases is None else relative_bias(graph, layer, places, places)

        def attend(inner: str, layer: Layer = layer, bias: str = bias) -> str:
            attention = layer.attention
            (context,) = graph.attend(attention, graph.project_inputs(inner, attention), mask=mask, bias=bias)
            return graph.project_output(context, attention)

        states = graph.feed_forward(graph.sublayer(states, layer.attention_norm, attend), layer)
    states = graph.norm(states, encoder.final_norm)
    graph.output(states, "last_hidden_state", ["batch_size", "encoder_sequence_length", width])


def relative_bias(graph: Graph, layer: Layer, queries: str, keys: str) -> str:
    """Return the biases of scores by relative positions: places (T) and (S) → (1, H, T, S)."""
    zero, one = graph.constant([0]), graph.constant([1])
    distances = graph.op("Sub", graph.op("Unsqueeze", keys, zero), graph.op("Unsqueeze", queries, one))
    return graph.op("Unsqueeze", graph.relative(layer.biases, distances, 2, 0, 1), zero)


def past_names(depth: int, side: str) -> list[str]:
    """The inputs of keys and values of a depth; `side` is `decoder`, or `encoder` for cross-attention."""
    return [f"past_key_values.{depth}.{side}.{kind}" for kind in ("key", "value")]


def present_names(depth: int, side: str) -> list[str]:
    """The outputs that become the inputs `past_names`."""
    return [name.replace("past_key_values", "present") for name in past_names(depth, side)]


def decoder_graph(
    graph: Graph, decoder: Stack, output: Linear, width: int, *, output_scale: float | None = None
) -> None:
    """T tokens of each of N = B·K sequences (K beams) and caches → logits (N, T, V) and longer caches.

    The states get `output_scale` before the output layer. Beams of a sentence may read the same cross-attention, as if
    they were positions of one: the cache of cross-attention then has B rows.
    """
    ids = graph.input("input_ids", TensorProto.INT64, ["batch_size", "decoder_sequence_length"])
    hidden = graph.input("encoder_hidden_states", TensorProto.FLOAT, ["batch_size", "encoder_sequence_length", width])
    mask = graph.input("encoder_attention_mask", TensorProto.INT64, ["batch_size", "encoder_sequence_length"])
    mask = graph.op("Cast", mask, to=TensorProto.INT32)
    caches = read_caches(graph, decoder, ids, hidden)
    zero, shape = graph.constant([0]), graph.op("Shape", ids)
    past = graph.op("Shape", caches[0]["decoder"][0], start=2, end=3)
    end = graph.op("Add", past, graph.op("Shape", ids, start=1))
    positions = None
    if decoder.positions is not None:
        positions = graph.op("Slice", graph.constant(decoder.positions), past, end, zero)
    else:
        start, stop, step = graph.op("Squeeze", past), graph.op("Squeeze", end), graph.constant(1)
        places = [graph.op("Range", first, stop, step) for first in (start, graph.constant(0))]
    states = graph.embed(decoder, ids, positions)
    rows = graph.op("Shape", caches[0]["encoder"][0], start=0, end=1)
    for depth, layer in enumerate(decoder.layers):

        def attend(inner: str, depth: int = depth, layer: Layer = layer) -> str:
            attention = layer.attention
            bias = "" if layer.biases is None else relative_bias(graph, layer, *places)
            context, *present = graph.attend(
                attention, graph.project_inputs(inner, attention), bias=bias, past=caches[depth]["decoder"]
            )
            sizes = ["batch_size", attention.heads, "past_decoder_sequence_length + 1", attention.head_dim]
            for value, name in zip(present, present_names(depth, "decoder"), strict=True):
                graph.output(value, name, sizes)
            return graph.project_output(context, attention)

        def attend_cross(inner: str, layer: Layer = layer) -> str:
            attention = layer.cross
            query = graph.project(inner, list(attention.inputs[:1]))[0]
            inner_width = attention.heads * attention.head_dim
            query = graph.op("Reshape", query, graph.op("Concat", rows, graph.constant([-1, inner_width]), axis=0))
            (context,) = graph.attend(attention, [query, *caches[layer.cross_source]["encoder"]], mask=mask)
            context = graph.op("Reshape", context, graph.op("Concat", shape, graph.constant([inner_width]), axis=0))
            return graph.project_output(context, attention)

        states = graph.sublayer(states, layer.attention_norm, attend)
        states = graph.feed_forward(graph.sublayer(states, layer.cross_norm, attend_cross), layer)
    states = graph.norm(states, decoder.final_norm)
    output_logits(graph, states, output, output_scale)


def read_caches(graph: Graph, decoder: Stack, ids: str, hidden: str) -> list[dict[str, list[str]]]:
    """{side: keys and values} of every depth: the inputs where `use_cache_branch` is true, else the first step's.

    At the first step the decoder's cache is empty, and that of cross-attention is computed from the hidden states.
    """
    use_cache = graph.input("use_cache_branch", TensorProto.BOOL, [1])
    sides = [("decoder", "past_decoder_sequence_length"), ("encoder", "encoder_sequence_length_out")]
    pasts = []
    for depth in range(len(decoder.layers)):
        for side, length in sides:
            # At the first step optimum and transformers.js give empty caches of the shapes that they assume.
            shape: list = ["batch_size", "num_heads", length, "head_dim"]
            pasts += [graph.input(name, TensorProto.FLOAT, shape) for name in past_names(depth, side)]

    def compute() -> list[str]:
        sources = sorted({layer.cross_source for layer in decoder.layers})
        linears = [linear for depth in sources for linear in decoder.layers[depth].cross.inputs[1:]]
        parts, made = graph.project(hidden, linears), {}
        for depth in sources:
            cross = decoder.layers[depth].cross
            heads = [graph.reshape(parts.pop(0), 0, 0, cross.heads, cross.head_dim) for _ in range(2)]
            made[depth] = [graph.transpose(part, 0, 2, 1, 3) for part in heads]
        rows, values = graph.op("Shape", ids, start=0, end=1), []
        for layer in decoder.layers:
            empty = graph.constant([layer.attention.heads, 0, layer.attention.head_dim])
            values += [graph.op("ConstantOfShape", graph.op("Concat", rows, empty, axis=0)) for _ in range(2)]
            values += made[layer.cross_source]
        return values

    found = iter(graph.choose(use_cache, {"then_branch": lambda: pasts, "else_branch": compute}))
    caches = [{side: [next(found), next(found)] for side, _ in sides} for _ in decoder.layers]
    for depth, layer in enumerate(decoder.layers):
        for name, value in zip(present_names(depth, "encoder"), caches[depth]["encoder"], strict=True):
            shape = ["batch_size", layer.cross.heads, "encoder_sequence_length_out", layer.cross.head_dim]
            graph.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
            graph.nodes.append(helper.make_node("Identity", [value], [name]))
    return caches


def output_logits(graph: Graph, states: str, output: Linear, scale: float | None) -> None:
    """States (N, T, d), times `scale`, → logits (N, T, V). The nodes that compute them are named `OUTPUT`…"""
    if scale is not None:
        states = graph.op("Mul", states, graph.constant(scale))
    *projection, weight = output.factors
    for factor in projection:
        states = graph.matmul(states, factor)
    before = len(graph.nodes)
    logits = graph.matmul_rows(states, weight.T, output.bias)
    for node in graph.nodes[before:]:
        node.name = f"{OUTPUT}/{node.op_type}"
    graph.output(logits, "logits", ["batch_size", "decoder_sequence_length", weight.shape[1]])


def specialize(folder: Path, suffix: str, *, sliced: bool) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The two graphs of the loop: a sentence → cross-attention's caches; a token and all caches → logits and caches.

    Args:
        sliced: the second graph gets `candidates` (C), and computes logits of these tokens alone.
    """
    first, step = (onnx.load(folder / FOLDER / f"{name}{suffix}.onnx") for name in (ENCODER, DECODER))
    (choice,) = (node for node in step.graph.node if node.op_type == "If")
    step.graph.node.remove(choice)
    branches = {attribute.name: attribute.g for attribute in choice.attribute}
    cached, computed = branches["then_branch"], branches["else_branch"]
    is_cross = {value.name: ".encoder." in value.name for value in step.graph.output}

    known = {tensor.name for tensor in first.graph.initializer}
    first.graph.initializer.extend(tensor for tensor in step.graph.initializer if tensor.name not in known)
    first.graph.node.extend(node for node in step.graph.node if node.op_type == "Cast")
    first.graph.node.extend(computed.node)
    first.graph.node.extend(node for node in step.graph.node if is_cross.get(node.output[0]))
    outputs = [value for value in step.graph.output if is_cross[value.name]]
    found = {name: value.name for name, value in zip(choice.output, computed.output, strict=True)}
    narrow(first.graph, outputs, {"encoder_hidden_states": first.graph.output[0].name, **found})

    inputs = {node.output[0]: node.input[0] for node in cached.node}
    found = {name: inputs[value.name] for name, value in zip(choice.output, cached.output, strict=True)}
    if sliced:
        slice_output(step.graph)
    narrow(step.graph, [value for value in step.graph.output if not is_cross[value.name]], found)
    return first, step


def narrow(graph: onnx.GraphProto, outputs: list[onnx.ValueInfoProto], renamed: dict[str, str]) -> None:
    """Keep only the nodes that some outputs need, in place, after inputs of nodes were renamed."""
    needed = {value.name for value in outputs}
    kept = []
    for node in reversed(graph.node):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    parts = {
        "node": kept[::-1],
        "input": [value for value in graph.input if value.name in needed],
        "initializer": [tensor for tensor in graph.initializer if tensor.name in needed],
        "output": outputs,
    }
    for field, values in parts.items():
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        graph.ClearField(field)
        getattr(graph, field).extend(copies)


def slice_output(graph: onnx.GraphProto) -> None:
    """Make the output layer compute logits of the input `candidates` alone: some rows of its matrices."""
    (logits,) = (value for value in graph.output if value.name == "logits")
    size = logits.type.tensor_type.shape.dim[-1].dim_value
    rows = {tensor.name for tensor in graph.initializer if tensor.dims[:1] == [size]}
    rows |= {node.output[0] for node in graph.node if node.op_type == "Cast" and node.input[0] in rows}
    graph.input.append(helper.make_tensor_value_info("candidates", TensorProto.INT64, ["candidates"]))
    logits.type.tensor_type.shape.dim[-1].dim_param = "candidates"
    for node in [node for node in graph.node if node.name.startswith(OUTPUT)]:
        for place, name in enumerate(node.input):
            if name in rows:
                node.input[place] = f"{OUTPUT}/{name}"
                graph.node.insert(0, helper.make_node("Gather", [name, "candidates"], [f"{OUTPUT}/{name}"]))


class OnnxModel:
    """An exported folder, run by ONNX Runtime: see `load_engine`."""

    def __init__(self, folder: Path, search: Search, threads: int):
        self.search = search
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        is_sliced = (folder / SHORTLIST).is_file()
        self.shortlist = Shortlist.load(folder / SHORTLIST) if is_sliced else None
        found = [end for end in SUFFIXES.values() if (folder / FOLDER / f"{DECODER}{end}.onnx").is_file()]
        if not found:
            raise ValueError(
                f"{folder} has no {FOLDER}/{DECODER}*.onnx, so that an older version of this package wrote it, or the "
                "export is incomplete: export the checkpoint again"
            )
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            for model in specialize(folder, found[0], sliced=is_sliced)
        )
        self._present = [value for value in self.decoder.get_outputs() if value.name != "logits"]
        self._past = [value.name.replace("present", "past_key_values") for value in self._present]
        names = [value.name for value in self.decoder.get_inputs() if ".encoder." in value.name]
        self._cross = [name.replace("past_key_values", "present") for name in names]

    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        if self.shortlist is None:
            return generate(self.steps(batch, search.num_beams), len(batch), search)
        tokens = self.shortlist.candidates(batch)
        compute = self.steps(batch, search.num_beams, tokens)
        rows = generate(lambda some, order: compute(tokens[some], order), len(batch), narrow_search(search, tokens))
        return [tokens[row].tolist() for row in rows]

    def steps(self, batch: list[list[int]], num_beams: int = 1, candidates: np.ndarray | None = None) -> Step:
        """Encode a batch, and return the function that computes the logits step by step (`search.Step`).

        Args:
            candidates: tokens whose logits are needed, if the model computes some alone; `None`: all.
        """
        width = max(map(len, batch))
        ids = np.full((len(batch), width), self.search.pad, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, sentence in enumerate(batch):
            ids[row, : len(sentence)], mask[row, : len(sentence)] = sentence, 1
        cross = self.encoder.run(self._cross, {"input_ids": ids, "attention_mask": mask})
        feeds = dict(zip((name.replace("present", "past_key_values") for name in self._cross), cross, strict=True))
        feeds["encoder_attention_mask"] = mask
        for name, value in zip(self._past, self._present, strict=True):
            _, heads, _, head_dim = value.shape
            feeds[name] = np.zeros([len(batch) * num_beams, heads, 0, head_dim], dtype=np.float32)
        if self.shortlist is not None:
            feeds["candidates"] = np.arange(self.shortlist.vocabulary) if candidates is None else candidates
        outputs = ["logits", *(value.name for value in self._present)]
        same = np.arange(len(batch) * num_beams)

        def step(tokens: np.ndarray, order: np.ndarray | None) -> np.ndarray:
            if order is not None and not np.array_equal(order, same):
                for name in self._past:
                    feeds[name] = feeds[name][order]
            feeds["input_ids"] = np.ascontiguousarray(tokens)[:, None]
            logits, *caches = self.decoder.run(outputs, feeds)
            feeds.update(zip(self._past, caches, strict=True))
            return logits[:, 0]

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
    """Load the model that `write` wrote."""
    return OnnxModel(folder, search, threads)


def describe_loading(folder: Path) -> str:
    """How to run the folder without this package."""
    return (
        f"await pipeline('translation', {str(folder)!r}) of @huggingface/transformers (transformers.js), or optimum's "
        f"ORTModelForSeq2SeqLM.from_pretrained({str(folder)!r}, subfolder='onnx')"
    )
