"""LightFormer → ONNX in the layout of optimum and transformers.js. `onnx_model` runs the result.

`onnx/encoder_model.onnx` turns ids, or the spectrogram of a sound, into hidden states.
`onnx/decoder_model_merged.onnx` turns target ids, hidden states and caches into logits and longer caches. Its input
`use_cache_branch` decides where keys and values of cross-attention come from: computed from the hidden states at the
first step, from the cache afterwards. File names end in `_quantized` in int8, in `_q4` in int4, and in `_fp16` in 16
bits. Each graph holds all its weights, because transformers.js opens no file for two graphs; weights that several
layers share are stored once in a graph.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from ..checkpoints.teacher import Teacher
from ..files import write_json
from ..matrices import STACKS, Weight
from ..models.configuration_lightformer import RELATIVE_POSITIONS
from ..rounding import (
    BLOCK,
    LOOKUPS,
    Moments,
    RoundedRows,
    bits_of,
    is_rounded,
    quantize_rows,
    rotate_factors,
    round_rows,
)
from ..speech import reads_sound
from .layers import Attention, Biases, Expansion, Layer, Source, Stack, model_type, read_output, read_stack
from .onnx_model import (
    DECODER,
    DTYPES,
    ENCODER,
    FOLDER,
    OUTPUT,
    SHORTLIST,
    SUFFIXES,
    OnnxModel,
    OnnxSpeech,
    stored_form,
)
from .shortlist import Shortlist

NAME, LIBRARY = "ONNX Runtime", "transformers.js"
QUANTIZATIONS = ("float32", "int8", "float16", "int4")
BESIDE = ("float32", "float16")  # types that `export` writes before int8, in this order: `load` prefers the last
SPEECH_SIZES = ("num_mel_bins", "max_source_positions", "max_target_positions", "median_filter_width")
LARGEST_FILE = 2**31 - 1  # limit of a message of protocol buffers
OPSET, IR_VERSION = 20, 9  # supported by ONNX Runtime from 1.17
MICROSOFT = "com.microsoft"
MASKED = -1e30
GELU_TANH = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "gelu_python", *GELU_TANH, "silu", "swish", "quick_gelu")


def write(source: Source, folder: Path, quantization: str) -> Expansion:
    """Write both graphs to `folder`/onnx. Low-rank factors stay as they are."""
    activation = source.model.config.activation_function
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation_function is {activation!r}, which the export to ONNX does not support (supported: "
            f"{', '.join(ACTIVATIONS)}): train the model with one of these"
        )
    model, moments = source.model, None
    if quantization == "int4" and not is_rounded(model):
        model = copy.deepcopy(model)
        rotate_factors(model)
        moments = Moments(model, source.calibration)
    encoder, decoder = read_stack(model.model.encoder), read_stack(model.model.decoder)
    (folder / FOLDER).mkdir(exist_ok=True)
    for name in (ENCODER, DECODER):
        graph = Graph(name.partition("_")[0], quantization, activation, model.config.normalize_before, moments)
        if name == ENCODER:
            encoder_graph(graph, encoder, model.model.encoder)
        else:
            states = decoder_graph(graph, decoder, model.config.d_model, is_speech=reads_sound(model.config))
            output_logits(graph, states, read_output(model), model.output_scale)
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


def write_shortlist(source: Teacher, folder: Path, quantization: str, shortlist: Shortlist) -> None:
    """Write which tokens can come. Only the loop of this package reads it; the graphs stay as they are."""
    shortlist.save(folder / SHORTLIST)


def write_config(source: Teacher, folder: Path, prefix: str) -> None:
    """Write the `config.json` by which optimum and transformers.js choose their classes.

    The family is that of the tokenizer. Sizes are those of the model, but for the width of heads, which both programs
    read from the graph.
    """
    config, has_t5 = source.model.config, source.model.config.position_embedding_type in RELATIVE_POSITIONS
    is_speech, family = reads_sound(config), model_type(source)
    named = ("vocab_size", "d_model", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    fields = {name: getattr(config, name) for name in named}
    fields |= {"decoder_start_token_id": source.generation_config.decoder_start_token_id, "is_encoder_decoder": True}
    if has_t5:
        fields |= {"num_layers": config.encoder_layers, "num_decoder_layers": config.decoder_layers}
        fields |= {"num_heads": config.decoder_attention_heads, "d_ff": config.decoder_ffn_dim}
    else:
        sizes = ("layers", "attention_heads", "ffn_dim")
        fields |= {name: getattr(config, name) for side in STACKS for name in (f"{side}_{size}" for size in sizes)}
        others = SPEECH_SIZES if is_speech else ("decoder_vocab_size", "max_position_embeddings")
        fields |= {name: getattr(config, name) for name in others}
    written = AutoConfig.for_model(family, **fields).to_dict()
    names = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES if is_speech else MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    written["architectures"] = [names[family]]
    if not is_speech:
        written["decoder_vocab_size"] = config.decoder_vocab_size
        written["target_codes"] = list(getattr(source.tokenizer, "supported_language_codes", ()))  # for the page
        written |= {"prefix": prefix} if prefix else {}
    write_json(written, folder / "config.json")


# --- Graphs


@dataclass
class Graph:
    """An ONNX graph under construction. A value is named by a string, as in ONNX."""

    name: str  # prefix of all values, so that two graphs can become one
    # `int8`: matrices have 8 bits and a scale for each output, and activations are quantized at run time. `float16`:
    # tensors are stored in 16 bits and become fp32 when the graph is loaded. `int4`: see `rounding`.
    quantization: str
    activation: str
    normalize_before: bool
    moments: Moments | None = None  # of the matrices' inputs, by which those are rounded to int4
    nodes: list = field(default_factory=list)
    constants: dict = field(default_factory=dict)
    widened: dict = field(default_factory=dict)
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    types: list = field(default_factory=list)  # of values that ONNX Runtime can't infer
    values: int = 0

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
        array = as_array(values) if isinstance(values, Tensor) else np.asarray(values)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        if self.quantization != "float16" or array.dtype != np.float32 or array.ndim < 2:
            return self._store(array)
        return self.half(array)

    def half(self, array: np.ndarray) -> str:
        """A constant that is stored in 16 bits, and becomes fp32 when the graph is loaded."""
        name = self._store(array.astype(np.float16))
        self.widened[f"{name}_fp32"] = name
        return f"{name}_fp32"

    def _store(self, array: np.ndarray) -> str:
        key = "w" + hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]
        if key not in self.constants:
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            self.constants[key] = helper.make_tensor(key, dtype, array.shape, array.tobytes(), raw=True)
        return key

    def input(self, name: str, dtype: int, shape: list) -> str:
        """Add an input."""
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
            casts + self.nodes,
            self.name,
            self.inputs,
            self.outputs,
            list(self.constants.values()),
            value_info=self.types,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lightformers_hf")

    def attend(
        self,
        attention: Attention,
        inputs: list[str],
        *,
        mask: str = "",
        bias: str = "",
        past: list[str] | None = None,
        with_scores: bool = False,
    ) -> list[str]:
        """Multi-head attention of queries (B, T, H·d_k), keys and values; these two may also be (B, H, S, d_k).

        The mask (B, S), int32, is 0 for keys that are not attended to. The bias (1, H, T, S) is added to the scores.
        Past keys and values (B, H, P, d_k) come first: the attention is causal, and returns all keys and values, too.
        Without past ones, the scores (B, H, T, S) are the fourth result, if asked for.
        """
        results = self.add_node(
            "MultiHeadAttention",
            *(*inputs, "", mask, bias, *(past or ())),
            count=4 if with_scores else 3 if past else 1,
            domain=MICROSOFT,
            num_heads=attention.heads,
            scale=float(attention.scale),
            mask_filter_value=MASKED,
            unidirectional=int(past is not None),
        )
        if with_scores:
            self.types.append(helper.make_tensor_value_info(results[3], TensorProto.FLOAT, None))
            self.nodes[-1].output[1] = self.nodes[-1].output[2] = ""
        return results

    def matmul(
        self, states: str, matrix: Tensor, bias: Tensor | None = None, *, moments_of: Tensor | None = None
    ) -> str:
        """states·matrix + bias. (…, m) → (…, n). `moments_of`: a matrix that gets these states, too."""
        if bits_of(self.quantization, len(matrix)) == 4:
            moments = self.moments and self.moments.of(matrix if moments_of is None else moments_of)
            return self._multiply_int4(states, round_rows(matrix.T, moments), bias)
        if bits_of(self.quantization, len(matrix)) == 8:
            values, scales = quantize_rows(matrix.T)
            return self._multiply(states, self.constant(values.T.numpy()), bias, scales)
        return self._multiply(states, self.constant(matrix), bias)

    def matmul_rows(self, states: str, table: Tensor, bias: Tensor | None = None) -> str:
        """states·tableᵀ + bias, for a table that is also looked up, and is stored once. (…, m), (n, m) → (…, n)."""
        bits = bits_of(self.quantization, table.shape[1])
        if bits == 4:
            return self._multiply_int4(states, self._round_table(table), bias)
        values, scales = quantize_rows(table) if bits == 8 else (table, None)
        rows = self.constant(values if scales is None else values.numpy())
        return self._multiply(states, self.op("Transpose", rows, perm=[1, 0]), bias, scales)

    def _multiply(self, states: str, matrix: str, bias: Tensor | None, scales: Tensor | None = None) -> str:
        if scales is not None:
            inputs = [states, matrix, self.constant(scales)] + ([] if bias is None else ["", self.constant(bias)])
            return self.op("DynamicQuantizeMatMul", *inputs, domain=MICROSOFT)
        product = self.op("MatMul", states, matrix)
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def _round_table(self, table: Tensor) -> RoundedRows:
        return round_rows(table, self.moments and self.moments.of(table.T), LOOKUPS)

    def _multiply_int4(self, states: str, rows: RoundedRows, bias: Tensor | None) -> str:
        """states·rowsᵀ + bias."""
        count, blocks = rows.scales.shape
        shape = self.constant([-1, blocks, BLOCK // 2])
        matrix = self.op("Reshape", self.constant(rows.packed), shape)
        scales = self.op("Reshape", self.half(rows.scales), self.constant([-1]))
        sizes = {"K": rows.width, "N": count, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        product = self.op("MatMulNBits", states, matrix, scales, domain=MICROSOFT, **sizes)
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def lookup(self, table: Tensor, ids: str) -> str:
        """Rows of a table. Ids (…) → (…, m)."""
        bits = bits_of(self.quantization, table.shape[1])
        if bits == 4:
            rounded = self._round_table(table)
            inputs = self.constant(rounded.packed), ids, self.half(rounded.scales)
            layout = {"bits": 4, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
            found = self.op("GatherBlockQuantized", *inputs, domain=MICROSOFT, **layout)
            return self.op("Slice", found, *(self.constant([value]) for value in (0, rounded.width, -1)))
        if bits == 32:
            return self.op("Gather", self.constant(table), ids)
        values, scales = quantize_rows(table)
        rows = self.op("Cast", self.op("Gather", self.constant(values.numpy()), ids), to=TensorProto.FLOAT)
        return self.op("Mul", rows, self.op("Gather", self.constant(scales[:, None]), ids))

    def project(self, states: str, linears: list[Weight]) -> list[str]:
        """Apply several layers to the same states: their first factors are one product. (…, m) → (…, nᵢ) each."""
        in_first = [linear.bias if linear.is_dense else None for linear in linears]
        widths = [linear.factors[0].shape[1] for linear in linears]
        bias = None
        if any(part is not None for part in in_first):
            parts = zip(in_first, widths, strict=True)
            bias = torch.cat([torch.zeros(width) if part is None else part for part, width in parts])
        joined = torch.cat([linear.factors[0] for linear in linears], dim=1)
        first = self.matmul(states, joined, bias, moments_of=linears[0].factors[0])
        outputs = []
        for linear, output in zip(linears, self.split(first, widths), strict=True):
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

    def norm(self, states: str, norm: nn.Module | None) -> str:
        """The states, normalized."""
        if norm is None:
            return states
        if (bias := getattr(norm, "bias", None)) is not None:
            inputs = (states, self.constant(norm.weight), self.constant(bias))
            return self.op("LayerNormalization", *inputs, axis=-1, epsilon=norm.eps)
        square = self.op("ReduceMean", self.op("Mul", states, states), self.constant([-1]), keepdims=1)
        length = self.op("Sqrt", self.op("Add", square, self.constant(norm.eps)))
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

    def enter(self, states: str, norm: nn.Module) -> str:
        """The input of a sublayer."""
        return self.norm(states, norm) if self.normalize_before else states

    def leave(self, states: str, output: str, norm: nn.Module) -> str:
        """Residual connection and LayerNorm behind a sublayer."""
        total = self.op("Add", states, output)
        return total if self.normalize_before else self.norm(total, norm)

    def feed_forward(self, states: str, layer: Layer) -> str:
        """The feed-forward network of a layer, with its residual connection and norm."""
        inner = self.enter(states, layer.ffn_norm)
        if layer.gate is None:
            hidden = self.activate(self.project(inner, [layer.fc1])[0])
        else:
            gate, value = self.project(inner, [layer.gate, layer.fc1])
            hidden = self.op("Mul", self.activate(gate), value)
        return self.leave(states, self.project(hidden, [layer.fc2])[0], layer.ffn_norm)

    def relative_bias(self, biases: Biases | None, queries: str, keys: str) -> str:
        """Return the biases of scores by relative positions, if any: places (T) and (S) → (1, H, T, S)."""
        if biases is None:
            return ""
        zero, one = self.constant([0]), self.constant([1])
        distances = self.op("Sub", self.op("Unsqueeze", keys, zero), self.op("Unsqueeze", queries, one))
        furthest = self.constant(biases.furthest)
        clipped = self.op("Max", self.op("Min", distances, furthest), self.constant(-biases.furthest))
        rows = self.op("Gather", self.constant(biases.by_distance), self.op("Add", clipped, furthest))
        return self.op("Unsqueeze", self.op("Transpose", rows, perm=[2, 0, 1]), zero)

    def position_table(self, stack: Stack) -> str:
        """The positions of a stack, from position 0 on."""
        return self.half(as_array(stack.positions)) if self.quantization == "int4" else self.constant(stack.positions)

    def embed(self, stack: Stack, ids: str, positions: str | None) -> str:
        """The first layer's input."""
        table, *basis = cast(Weight, stack.embedding).factors
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


def encoder_graph(graph: Graph, encoder: Stack, module: nn.Module) -> None:
    """Ids and mask (B, S), or a spectrogram (B, M, 2·S) → hidden states (B, S, d)."""
    if encoder.embedding is None:
        states, mask, places, length = convolve(graph, encoder, module), "", "", module.config.max_source_positions
    else:
        length = "encoder_sequence_length"
        ids = graph.input("input_ids", TensorProto.INT64, ["batch_size", length])
        mask = graph.input("attention_mask", TensorProto.INT64, ["batch_size", length])
        mask = graph.op("Cast", mask, to=TensorProto.INT32)
        zero, end = graph.constant([0]), graph.op("Shape", ids, start=1)
        places = graph.op("Range", graph.constant(0), graph.op("Squeeze", end), graph.constant(1))
        positions = None
        if encoder.positions is not None:
            positions = graph.op("Slice", graph.position_table(encoder), zero, end)
        states = graph.embed(encoder, ids, positions)
    for layer in encoder.layers:
        bias = graph.relative_bias(layer.biases, places, places)
        attention, norm = layer.attention, layer.attention_norm
        inputs = graph.project_inputs(graph.enter(states, norm), attention)
        (context,) = graph.attend(attention, inputs, mask=mask, bias=bias)
        states = graph.feed_forward(graph.leave(states, graph.project_output(context, attention), norm), layer)
    states = graph.norm(states, encoder.final_norm)
    graph.output(states, "last_hidden_state", ["batch_size", length, module.config.d_model])


def convolve(graph: Graph, encoder: Stack, module: nn.Module) -> str:
    """Spectrogram (B, M, 2·S) → the first layer's input (B, S, d). Weights have 16 bits where matrices have fewer."""
    config = module.config
    shape = ["batch_size", config.num_mel_bins, 2 * config.max_source_positions]
    states = graph.input("input_features", TensorProto.FLOAT, shape)
    for layer in (module.conv1, module.conv2):
        values = as_array(layer.weight)
        weight = graph.constant(values) if graph.quantization == "float32" else graph.half(values)
        sizes = {"kernel_shape": layer.kernel_size, "pads": 2 * layer.padding, "strides": layer.stride}
        states = graph.op("Gelu", graph.op("Conv", states, weight, graph.constant(layer.bias), **sizes))
    return graph.op("Add", graph.op("Transpose", states, perm=[0, 2, 1]), graph.position_table(encoder))


def cache_names(when: str, depth: int, side: str) -> list[str]:
    """Keys and values of a depth: outputs `present` become inputs `past_key_values`. `encoder` is cross-attention."""
    return [f"{when}.{depth}.{side}.{kind}" for kind in ("key", "value")]


def decoder_graph(graph: Graph, decoder: Stack, width: int, *, is_speech: bool = False) -> str:
    """T tokens of each of N = B·K sequences (K beams) and caches → hidden states (N, T, d) and longer caches.

    Beams of a sentence may read the same cross-attention, as if they were positions of one: the cache of
    cross-attention then has B rows. For speech there is no mask, and the weights of cross-attention (N, H, T, S) are
    outputs, from which time stamps of words follow.
    """
    ids = graph.input("input_ids", TensorProto.INT64, ["batch_size", "decoder_sequence_length"])
    hidden = graph.input("encoder_hidden_states", TensorProto.FLOAT, ["batch_size", "encoder_sequence_length", width])
    mask = ""
    if not is_speech:
        mask = graph.input("encoder_attention_mask", TensorProto.INT64, ["batch_size", "encoder_sequence_length"])
        mask = graph.op("Cast", mask, to=TensorProto.INT32)
    caches = read_caches(graph, decoder, ids, hidden)
    zero, shape = graph.constant([0]), graph.op("Shape", ids)
    past = graph.op("Shape", caches[0]["decoder"][0], start=2, end=3)
    end = graph.op("Add", past, graph.op("Shape", ids, start=1))
    positions = None
    if decoder.positions is not None:
        positions, places = graph.op("Slice", graph.position_table(decoder), past, end, zero), ["", ""]
    else:
        start, stop, step = graph.op("Squeeze", past), graph.op("Squeeze", end), graph.constant(1)
        places = [graph.op("Range", first, stop, step) for first in (start, graph.constant(0))]
    states = graph.embed(decoder, ids, positions)
    rows = graph.op("Shape", caches[0]["encoder"][0], start=0, end=1)
    for depth, layer in enumerate(decoder.layers):
        attention, norm = layer.attention, layer.attention_norm
        inner = graph.enter(states, norm)
        bias = graph.relative_bias(layer.biases, *places)
        inputs = graph.project_inputs(inner, attention)
        context, *present = graph.attend(attention, inputs, bias=bias, past=caches[depth]["decoder"])
        sizes = ["batch_size", attention.heads, "past_decoder_sequence_length + 1", attention.head_dim]
        for value, name in zip(present, cache_names("present", depth, "decoder"), strict=True):
            graph.output(value, name, sizes)
        states = graph.leave(states, graph.project_output(context, attention), norm)

        attention, norm = cast(Attention, layer.cross), layer.cross_norm
        (query,) = graph.project(graph.enter(states, norm), list(attention.inputs[:1]))
        inner_width = attention.heads * attention.head_dim
        query = graph.op("Reshape", query, graph.op("Concat", rows, graph.constant([-1, inner_width]), axis=0))
        keys = caches[layer.cross_source]["encoder"]
        context, *others = graph.attend(attention, [query, *keys], mask=mask, with_scores=is_speech)
        if is_speech:
            sizes = ["batch_size", attention.heads, "decoder_sequence_length", "encoder_sequence_length_out"]
            graph.output(graph.op("Softmax", others[-1], axis=-1), f"cross_attentions.{depth}", sizes)
        context = graph.op("Reshape", context, graph.op("Concat", shape, graph.constant([inner_width]), axis=0))
        states = graph.feed_forward(graph.leave(states, graph.project_output(context, attention), norm), layer)
    return graph.norm(states, decoder.final_norm)


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
            pasts += [
                graph.input(name, TensorProto.FLOAT, shape) for name in cache_names("past_key_values", depth, side)
            ]

    crosses = [cast(Attention, layer.cross) for layer in decoder.layers]

    def compute() -> list[str]:
        sources = sorted({layer.cross_source for layer in decoder.layers})
        linears = [linear for depth in sources for linear in crosses[depth].inputs[1:]]
        parts, made = graph.project(hidden, linears), {}
        for depth in sources:
            shape = [0, 0, crosses[depth].heads, crosses[depth].head_dim]
            heads = [graph.op("Reshape", parts.pop(0), graph.constant(shape)) for _ in range(2)]
            made[depth] = [graph.op("Transpose", part, perm=[0, 2, 1, 3]) for part in heads]
        rows, values = graph.op("Shape", ids, start=0, end=1), []
        for layer in decoder.layers:
            empty = graph.constant([layer.attention.heads, 0, layer.attention.head_dim])
            values += [graph.op("ConstantOfShape", graph.op("Concat", rows, empty, axis=0)) for _ in range(2)]
            values += made[layer.cross_source]
        return values

    found = iter(graph.choose(use_cache, {"then_branch": lambda: pasts, "else_branch": compute}))
    caches = [{side: [next(found), next(found)] for side, _ in sides} for _ in decoder.layers]
    for depth, cross in enumerate(crosses):
        for name, value in zip(cache_names("present", depth, "encoder"), caches[depth]["encoder"], strict=True):
            shape = ["batch_size", cross.heads, "encoder_sequence_length_out", cross.head_dim]
            graph.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
            graph.nodes.append(helper.make_node("Identity", [value], [name]))
    return caches


def output_logits(graph: Graph, states: str, output: Weight, scale: float | None) -> None:
    """States (N, T, d), times `scale`, → logits (N, T, V). The nodes that compute them are named `OUTPUT`…"""
    if scale is not None:
        states = graph.op("Mul", states, graph.constant(scale))
    *projection, weight = output.factors
    for factor in projection:
        states = graph.matmul(states, factor)
    before = len(graph.nodes)
    logits = graph.matmul_rows(states, weight.T, output.bias)
    for node in graph.nodes[before:]:
        node.name = f"{OUTPUT}/{node.name}"
    graph.output(logits, "logits", ["batch_size", "decoder_sequence_length", weight.shape[1]])


load, load_speech, write_speech = OnnxModel, OnnxSpeech, write
SPEECH_PROGRAM = "transformers.js"
SPEECH_EXAMPLE = """import {{ pipeline }} from "@huggingface/transformers"; // transformers.js

const transcribe = await pipeline("automatic-speech-recognition", "{folder}", {{ dtype: "{dtype}" }});
// In Node, give the samples in place of the file's name, 16,000 a second, as a Float32Array.
console.log(await transcribe("speech.wav", {{ return_timestamps: "word" }}));"""


def describe_loading(folder: Path) -> str:
    """How to run the folder without this package."""
    dtype = DTYPES[stored_form(folder) or "float32"]
    return (
        f"await pipeline('translation', {str(folder)!r}, {{ dtype: '{dtype}' }}) of @huggingface/transformers "
        f"(transformers.js), or optimum's ORTModelForSeq2SeqLM.from_pretrained({str(folder)!r}, subfolder='onnx')"
    )
