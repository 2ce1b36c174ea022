"""LightFormer → CTranslate2, by a Transformer specification of its own library, without any change to the engine.

Supported forms stay as small as they are: narrow heads (`head_dim` of each attention), narrow feed-forward
networks, the low-rank token table and output layer of the decoder (`project_in`, `project_out`), repeated layers
(stored once, as aliases). It has no low-rank linear layer: other low-rank factors are expanded. Attention then
gets narrower again: a head depends on the products W_Q·W_Kᵀ and W_V·W_O, of rank maybe below the head's width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs import common_spec, transformer_spec, whisper_spec
from ctranslate2.specs.model_spec import LayerSpec
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..checkpoints.teacher import Teacher
from ..files import read_json, write_json
from ..matrices import Weight
from ..models.configuration_lightformer import RELATIVE_POSITIONS
from ..options import OptionError
from ..rounding import quantize_rows
from ..vocabularies import read_vocabularies
from .layers import Attention, Expansion, Layer, bias_or_zero, model_type, narrow_heads, read_output, read_stack
from .search import NEVER, Search
from .shortlist import SHORTLIST_FILES, Shortlist, special_tokens

Activation = common_spec.Activation
ACTIVATIONS = dict.fromkeys(("gelu", "gelu_python"), Activation.GELU)
ACTIVATIONS |= dict.fromkeys(("gelu_fast", "gelu_new", "gelu_pytorch_tanh"), Activation.GELUTanh)
ACTIVATIONS |= {"quick_gelu": Activation.GELUSigmoid, "relu": Activation.RELU, "sigmoid": Activation.Sigmoid}
ACTIVATIONS |= {"silu": Activation.SWISH, "swish": Activation.SWISH, "tanh": Activation.Tanh}
NAME = "CTranslate2"
EXPANDS_LOW_RANK = True
QUANTIZATIONS = ("float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
VMAP, ORDER = SHORTLIST_FILES[0], "token_order.json"


def write(source: Teacher, folder: Path, quantization: str, *, first: Sequence[int] = ()) -> Expansion:
    """Write model, configuration and vocabularies. Target tokens `first` get the first ids of the engine."""
    config, expansion = source.model.config, Expansion()
    if config.activation_function not in ACTIVATIONS:
        raise OptionError(
            f"activation_function is {config.activation_function!r}, which CTranslate2 does not have (it has "
            f"{', '.join(ACTIVATIONS)}): export to another engine, or train the model with one of these"
        )
    sizes = {"source": config.vocab_size, "target": config.decoder_vocab_size}
    tokens = {side: vocabulary(source.tokenizer, size, side) for side, size in sizes.items()}
    target = order_ids(len(tokens["target"]), first)
    orders = {"source": target if tokens["source"] == tokens["target"] else None, "target": target}
    spec = _specification(source, expansion, orders)
    for side, order in orders.items():
        ordered = tokens[side] if order is None else [tokens[side][number] for number in order]
        getattr(spec, f"register_{side}_vocabulary")(ordered)
    _set_special_tokens(spec, source, tokens)
    spec.validate()
    quantize(spec, quantization)
    spec.save(str(folder))
    return expansion


def quantize(spec: LayerSpec, quantization: str) -> None:
    """Store weights in another type, those in int8 rounded as every processor multiplies them (`quantize_rows`).

    CTranslate2 leaves int8 products to oneDNN on other processors than Intel's, and oneDNN cuts off what 16 bits do
    not hold where there is no VNNI: a model of the demo that has 86.3 BLEU in fp32 had 75.0 there, and has 86.1 so.
    """
    rounded = {
        name: quantize_rows(torch.from_numpy(variable.numpy()))
        for name, variable in spec.variables().items()
        if quantization.startswith("int8") and variable.dtype == "float32" and len(variable.shape) == 2
    }
    spec.optimize(quantization)
    stored = {name: variable for name, variable in spec.variables().items() if not isinstance(variable, str)}
    for name in rounded.keys() & stored.keys():
        if stored[name].dtype == "int8":
            values, scales = rounded[name]
            stored[name].numpy()[:] = values.numpy()
            stored[f"{name}_scale"].numpy()[:] = (1 / scales).numpy()


def order_ids(size: int, first: Sequence[int]) -> list[int] | None:
    """All ids, some first; `None` if no id changes its place."""
    chosen = set(first)
    return [*first, *(number for number in range(size) if number not in chosen)] if chosen else None


def write_shortlist(source: Teacher, folder: Path, quantization: str, shortlist: Shortlist) -> None:
    """Write `vmap.txt`: a line a source token, a tab behind it, and the target tokens that can come with it.

    The line without a source token has those that always can. The model is written again, with the tokens that every
    search needs first in its vocabulary, as `token_order.json` lists them. CTranslate2, at least to 4.8, keeps using
    their places among the tokens of the batch before (`_to_output_word_id` is not emptied), which so never change.
    """
    first = special_tokens(Search.of(source.generation_config), getattr(source.tokenizer, "unk_token_id", None))
    write(source, folder, quantization, first=first)
    write_json({"first": first}, folder / ORDER)
    tokens, targets = (read_tokens(folder, side) for side in ("source", "target"))
    spaced = {number for number, token in enumerate(targets) if any(c in token for c in " \t\n\r")}
    if spaced:
        raise OptionError(
            "shortlist",
            f" cannot be written for CTranslate2, whose file has no place for {targets[min(spaced)]!r}, a "
            "token with a space: remove ",
            "shortlist",
            ", or export to onnx",
        )
    with (folder / VMAP).open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t" + " ".join(targets[number] for number in shortlist.always) + "\n")
        for number, ids in shortlist.given.items():
            if ids and not any(c in tokens[number] for c in " \t\n\r"):
                file.write(f"{tokens[number]}\t{' '.join(targets[target] for target in ids)}\n")


def vocabulary(tokenizer: PreTrainedTokenizerBase | None, size: int, side: str) -> list[str]:
    """The token of every id, each another one: the tokenizer's, else (no tokenizer, or more ids) made from the id."""
    if tokenizer is None:
        return [str(token_id) for token_id in range(size)]
    known = read_vocabularies(tokenizer)
    token_of = {token_id: token for token, token_id in known.get(side, known["source"]).items()}
    tokens = [token_of.get(token_id, f"<id_{token_id}>") for token_id in range(size)]
    if len(set(tokens)) < size:
        raise ValueError(
            f"the tokenizer has one token for several of the {size} {side} ids: CTranslate2 needs one each"
        )
    return tokens


def _specification(
    source: Teacher, expansion: Expansion, orders: Mapping[str, list[int] | None]
) -> transformer_spec.TransformerSpec:
    model, config = source.model, source.model.config
    shapes = {
        "activation": ACTIVATIONS[config.activation_function],
        "ffn_glu": config.gated_ffn,
        "rms_norm": config.normalization == "rms_norm",
        "relative_attention_bias": config.position_embedding_type in RELATIVE_POSITIONS,
    }
    encoder, decoder = read_stack(model.model.encoder), read_stack(model.model.decoder)
    encoder_class, decoder_class = transformer_spec.TransformerEncoderSpec, transformer_spec.TransformerDecoderSpec
    specs = []
    for make, stack, heads in (
        (encoder_class, encoder, config.encoder_attention_heads),
        (partial(decoder_class, project_in_out=True), decoder, config.decoder_attention_heads),
    ):
        # `pre_norm` here means that there is a final LayerNorm, which Python builds only for pre-norm models.
        first, last = stack.embedding_norm is not None, stack.final_norm is not None
        spec = make(len(stack.layers), heads, pre_norm=last, layernorm_embedding=first, **shapes)
        specs.append(spec)
        spec.pre_norm = config.normalize_before
        spec.scale_embeddings = np.float32(stack.scale)
        if stack.positions is not None:
            spec.position_encodings.encodings = _array(stack.positions)
        _set_norm(getattr(spec, "layernorm_embedding", None), stack.embedding_norm)
        _set_norm(getattr(spec, "layer_norm", None), stack.final_norm)
        for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
            _set_layer(layer_spec, layer, expansion)
    if model.output_scale is not None:
        specs[1].scale_outputs = np.float32(model.output_scale)
    own, other = cast(Weight, encoder.embedding), cast(Weight, decoder.embedding)
    table = expansion.multiply(own)
    expansion.encoder_table = 0 if own.is_dense else table.numel()
    specs[0].embeddings[0].weight = _array(table if orders["source"] is None else table[orders["source"]])
    suppressed = Search.of(source.generation_config).suppressed
    _set_vocabulary_layers(specs[1], other, read_output(model), suppressed, orders["target"])
    return transformer_spec.TransformerSpec(*specs)


def _set_vocabulary_layers(
    spec: transformer_spec.TransformerDecoderSpec,
    embedding: Weight,
    output: Weight,
    suppressed: tuple[int, ...],
    order: list[int] | None,
) -> None:
    """Token table and output layer of the decoder, each in one piece or with its second factor as a projection."""
    (table, *basis), (*projection, weight) = embedding.factors, output.factors
    places: list[int] | slice = slice(None) if order is None else order
    spec.embeddings.weight = _array(table[places])
    spec.projection.weight = _array(weight.T[places])
    for name, factors in (("project_in", basis), ("project_out", projection)):
        if factors:
            getattr(spec, name).weight = _array(factors[0].T)
        else:
            delattr(spec, name)
    bias = output.bias
    if suppressed:
        # Tokens that generation_config.json forbids stay forbidden for users who call the engine directly.
        bias = torch.zeros(weight.shape[1]) if bias is None else bias.clone()
        bias[list(suppressed)] = float(NEVER)
    if bias is not None:
        spec.projection.bias = _array(bias[places])


def _set_layer(spec: LayerSpec, layer: Layer, expansion: Expansion) -> None:
    _set_attention(spec.self_attention, layer.attention, expansion, cross=False)
    _set_norm(spec.self_attention.layer_norm, layer.attention_norm)
    if layer.cross is not None:
        _set_attention(spec.attention, layer.cross, expansion, cross=True)
        _set_norm(spec.attention.layer_norm, layer.cross_norm)
    if layer.biases is not None:
        spec.self_attention.relative_attention_bias = _array(layer.biases.table)
        spec.self_attention.relative_attention_max_distance = np.int32(layer.biases.furthest)
    ffn = {"linear_0": layer.fc1, "linear_1": layer.fc2}
    if layer.gate is not None:
        ffn |= {"linear_0": layer.gate, "linear_0_noact": layer.fc1}
    for name, linear in ffn.items():
        _set_linear(getattr(spec.ffn, name), expansion.multiply(linear), linear.bias)
    _set_norm(spec.ffn.layer_norm, layer.ffn_norm)


def _set_attention(spec: LayerSpec, attention: Attention, expansion: Expansion, *, cross: bool) -> None:
    (query, key, value, output), head_dim = narrow_heads(attention, expansion)
    joined = [(query,), (key, value)] if cross else [(query, key, value)]
    for index, linears in enumerate([*joined, (output,)]):
        _set_linear(spec.linear[index], *_join(*linears))
    # The library declares both only for other models, but the engine reads them from any attention.
    spec.__dict__["head_dim"] = np.int32(head_dim)
    spec.queries_scale = np.float32(attention.scale)


def _join(*linears: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    matrices = torch.cat([matrix for matrix, _ in linears], dim=1)
    if all(bias is None for _, bias in linears):
        return matrices, None
    return matrices, torch.cat([bias_or_zero(linear) for linear in linears])


def _set_linear(spec: common_spec.LinearSpec, matrix: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(matrix.T)
    if bias is not None:
        spec.bias = _array(bias)


def _set_norm(spec: common_spec.LayerNormSpec, norm: nn.Module | None) -> None:
    if norm is not None:
        spec.gamma = _array(norm.weight)
        if getattr(norm, "bias", None) is not None:
            spec.beta = _array(norm.bias)


def _array(tensor: Tensor) -> np.ndarray:
    # A copy: the library quantizes in place, and the model's own weights must stay as they are.
    return np.array(tensor.detach().float().numpy(), order="C")


def _set_special_tokens(
    spec: transformer_spec.TransformerSpec, source: Teacher, tokens: Mapping[str, list[str]]
) -> None:
    search = Search.of(source.generation_config)
    target = tokens["target"]
    spec.config.layer_norm_epsilon = source.model.config.norm_epsilon
    spec.config.decoder_start_token = target[search.start]
    spec.config.eos_token = target[search.ends[0]] if search.ends else target[search.pad]
    # Both must be tokens of the vocabulary, or the engine adds one of its own behind the model's.
    for name in ("unk_token", "bos_token"):
        token = getattr(source.tokenizer, name, None)
        known = token in tokens["source"] and token in target
        setattr(spec.config, name, token if known else spec.config.eos_token)


# --- Speech


def write_speech(source: Teacher, folder: Path, quantization: str) -> Expansion:
    """Write a model for speech as CTranslate2's Whisper, which faster-whisper loads, and its vocabulary."""
    model, config, expansion = source.model, source.model.config, Expansion()
    if config.activation_function != "gelu" or config.gated_ffn:
        raise ValueError(
            f"activation_function is {config.activation_function!r}, but CTranslate2's Whisper has gelu alone"
        )
    stacks = [read_stack(stack) for stack in (model.model.encoder, model.model.decoder)]
    heads = config.encoder_attention_heads, config.decoder_attention_heads
    spec = whisper_spec.WhisperSpec(len(stacks[0].layers), heads[0], len(stacks[1].layers), heads[1])
    spec.decoder = transformer_spec.TransformerDecoderSpec(len(stacks[1].layers), heads[1], project_in_out=True)
    spec.decoder.activation, spec.decoder.scale_embeddings = np.int8(Activation.GELU), False
    for part, stack in zip((spec.encoder, spec.decoder), stacks, strict=True):
        part.position_encodings.encodings = _array(stack.positions)
        _set_norm(part.layer_norm, stack.final_norm)
        for layer_spec, layer in zip(part.layer, stack.layers, strict=True):
            _set_layer(layer_spec, layer, expansion)
    for name in ("conv1", "conv2"):
        layer = getattr(model.model.encoder, name)
        getattr(spec.encoder, name).weight, getattr(spec.encoder, name).bias = _array(layer.weight), _array(layer.bias)
    _set_vocabulary_layers(spec.decoder, cast(Weight, stacks[1].embedding), read_output(model), (), None)
    tokens = source.need_tokenizer().convert_ids_to_tokens(range(config.decoder_vocab_size))
    first = source.generation_config.no_timestamps_token_id + 1  # some tokenizers lack the tokens of times
    spec.register_vocabulary([t if t is not None else f"<|{(i - first) * 0.02:.2f}|>" for i, t in enumerate(tokens)])
    generation = source.generation_config
    spec.config.suppress_ids = list(generation.suppress_tokens or ())
    spec.config.suppress_ids_begin = list(generation.begin_suppress_tokens or ())
    spec.config.lang_ids = sorted((getattr(generation, "lang_to_id", None) or {}).values())
    last = config.decoder_layers - 1
    spec.config.alignment_heads = getattr(generation, "alignment_heads", None) or [
        [last, head] for head in range(heads[1])
    ]
    spec.validate()
    quantize(spec, quantization)
    spec.save(str(folder))
    return expansion


class CTranslate2Speech:
    """An exported model for speech, run by CTranslate2: see `load_speech` of `evaluation.transcribe`."""

    def __init__(self, folder: Path, generation: GenerationConfig, threads: int):
        self.model = ctranslate2.models.Whisper(str(folder), device="cpu", intra_threads=threads, inter_threads=1)

    def find_language(self, features: np.ndarray) -> str:
        """The language of a spectrogram."""
        return self.model.detect_language(ctranslate2.StorageView.from_array(features))[0][0][0].strip("<|>")

    def transcribe(
        self, features: np.ndarray, prompt: list[int], *, num_beams: int, max_new_tokens: int
    ) -> tuple[list[int], float]:
        """As `RunningSpeech.transcribe`."""
        # The engine generates half of `max_length` at most, and leaves the other half to the prompt.
        longest = 2 * max(max_new_tokens, len(prompt))
        options = {"beam_size": num_beams, "max_length": longest, "length_penalty": 0}
        view = ctranslate2.StorageView.from_array(features)
        (result,) = self.model.generate(view, [prompt], return_scores=True, **options)
        return result.sequences_ids[0], result.scores[0]


class CTranslate2Model:
    """An exported folder, run by CTranslate2: see `load_engine`."""

    def __init__(self, folder: Path, search: Search, threads: int):
        self.search, self.use_shortlist = search, (folder / VMAP).is_file()
        self.translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=threads, inter_threads=1)
        self._source, self._target = (read_tokens(folder, side) for side in ("source", "target"))
        self._id_of = {token: token_id for token_id, token in enumerate(self._target)}

    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        return [ids for ids, _ in self.generate_scored(batch, search)]

    def generate_scored(self, batch: list[list[int]], search: Search) -> list[tuple[list[int], float]]:
        """As `Engine.generate_scored`, less the last value."""
        sources = [[self._source[token] for token in sentence] for sentence in batch]
        most, ends = search.limit, [self._target[token] for token in search.ends]
        prefix = None if search.forced_start is None else [[self._target[search.forced_start]]] * len(batch)
        results = self.translator.translate_batch(
            sources,
            prefix,
            beam_size=search.num_beams,
            length_penalty=search.length_penalty,
            no_repeat_ngram_size=search.no_repeat_ngram_size,
            end_token=ends or None,
            return_end_token=True,
            max_input_length=0,
            max_decoding_length=most,
            min_decoding_length=min(search.min_new_tokens, most) if ends else most,
            use_vmap=self.use_shortlist,
            return_scores=True,
        )
        outputs = [[self._id_of[token] for token in result.hypotheses[0]] for result in results]
        if search.forced_end is not None:
            outputs = [[*ids[:-1], search.forced_end] if len(ids) == most else ids for ids in outputs]
        # The engine divides the sum of log p by the length to the power of the penalty.
        shares = [len(result.hypotheses[0]) ** (search.length_penalty - 1) for result in results]
        return [(ids, result.scores[0] * share) for ids, result, share in zip(outputs, results, shares, strict=True)]

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """log p of every token of `targets`, and of the end behind them, given `sources`."""
        results = self.translator.score_batch(
            [[self._source[token] for token in sentence] for sentence in sources],
            [[self._target[token] for token in sentence] for sentence in targets],
            max_input_length=0,
        )
        return [result.log_probs for result in results]


load, load_speech = CTranslate2Model, CTranslate2Speech
EXAMPLE = """import json

import ctranslate2
from tokenizers import Tokenizer

translator = ctranslate2.Translator("{folder}")
tokenizer = Tokenizer.from_file("{folder}/tokenizer.json")
longest = json.load(open("{folder}/export.json"))["max_position_embeddings"] or 256

tokens = [tokenizer.encode(text).tokens for text in ["{text}"]]
for result in translator.translate_batch(tokens, {first}beam_size=1, max_decoding_length=longest):
    print(tokenizer.decoder.decode(result.hypotheses[0]{skip}))"""


def write_config(source: Teacher, folder: Path, prefix: str) -> None:
    """Name the family in CTranslate2's `config.json`, without which transformers knows no pipeline for the folder."""
    write_json({**read_json(folder / "config.json"), "model_type": model_type(source)}, folder / "config.json")


SPEECH_PROGRAM = "faster-whisper"
SPEECH_EXAMPLE = """from faster_whisper import WhisperModel

model = WhisperModel("{folder}", device="cpu", compute_type="default")
segments, _ = model.transcribe("speech.flac", beam_size=1)
print(" ".join(segment.text.strip() for segment in segments))"""


def describe_loading(folder: Path) -> str:
    """How to run the folder without this package."""
    own_way = f"ctranslate2.Translator({str(folder)!r}), AutoTokenizer.from_pretrained({str(folder)!r})"
    return f"{own_way}, with translate_batch(..., use_vmap=True)" if (folder / VMAP).is_file() else own_way


def read_tokens(folder: Path, side: str) -> list[str]:
    """The token of every id of the tokenizer."""
    file = folder / f"{side}_vocabulary.json"
    shared = not file.is_file()
    tokens = json.loads((folder / "shared_vocabulary.json" if shared else file).read_text(encoding="utf-8"))
    first = read_json(folder / ORDER).get("first", ()) if shared or side == "target" else ()
    order = order_ids(len(tokens), first)
    return tokens if order is None else [token for _, token in sorted(zip(order, tokens, strict=True))]
