"""The loop that runs the files of `onnx` with ONNX Runtime.

It resolves `use_cache_branch` when it loads them (`specialize`): one graph computes the hidden states and the
cross-attention's keys and values, the other one step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from transformers import GenerationConfig

from .engine import pad_right
from .search import Search, Step, generate, log_softmax
from .shortlist import Shortlist, narrow_search

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at the import; else it sends events
import onnxruntime

SHORTLIST = "shortlist.json"
FOLDER, ENCODER, DECODER = "onnx", "encoder_model", "decoder_model_merged"
# Ends of file names, that which `load` prefers first.
SUFFIXES = {"int4": "_q4", "int8": "_quantized", "float16": "_fp16", "float32": ""}
DTYPES = {"int4": "q4", "int8": "q8", "float16": "fp16", "float32": "fp32"}  # as transformers.js names them
OUTPUT = "output"  # begins the names of the nodes of the output layer


def stored_form(folder: Path) -> str | None:
    """The type of numbers of an exported folder; of several, that which `load` prefers."""
    found = (form for form, end in SUFFIXES.items() if (folder / FOLDER / f"{DECODER}{end}.onnx").is_file())
    return next(found, None)


def specialize(folder: Path, suffix: str, *, sliced: bool) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The two graphs of the loop: a sentence → cross-attention's caches; a token and all caches → logits and caches.

    Where it is `sliced`, the second graph gets `candidates` (C), and computes logits of these tokens alone.
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
    kept = [value for value in step.graph.output if value.name == "logits" or ".decoder." in value.name]
    for node in step.graph.node:  # without the scores of cross-attention
        del node.output[1 if list(node.output[1:3]) == ["", ""] else len(node.output) :]
    narrow(step.graph, kept, found)
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
        name: [entry for entry in getattr(graph, name) if entry.name in needed] for name in ("input", "initializer")
    }
    for name, values in (parts | {"node": kept[::-1], "output": outputs}).items():
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        graph.ClearField(name)
        getattr(graph, name).extend(copies)


def slice_output(graph: onnx.GraphProto) -> None:
    """Make the output layer compute logits of the input `candidates` alone: some rows of its matrices."""
    (logits,) = (value for value in graph.output if value.name == "logits")
    size = logits.type.tensor_type.shape.dim[-1].dim_value
    rows = {tensor.name for tensor in graph.initializer if tensor.dims[:1] == [size]}
    rows |= {node.output[0] for node in graph.node if node.op_type == "Cast" and node.input[0] in rows}
    graph.input.append(helper.make_tensor_value_info("candidates", TensorProto.INT64, ["candidates"]))
    logits.type.tensor_type.shape.dim[-1].dim_param = "candidates"
    for node in [node for node in graph.node if node.name.startswith(OUTPUT)]:
        for index, name in enumerate(node.input):
            if name in rows:
                node.input[index] = f"{OUTPUT}/{name}"
                graph.node.insert(0, helper.make_node("Gather", [name, "candidates"], [f"{OUTPUT}/{name}"]))


class OnnxModel:
    """An exported folder, run by ONNX Runtime: see `load_engine`."""

    def __init__(self, folder: Path, search: Search, threads: int):
        self.search, options = search, onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.shortlist = Shortlist.load(folder / SHORTLIST) if (folder / SHORTLIST).is_file() else None
        if (form := stored_form(folder)) is None:
            raise ValueError(
                f"{folder} has no {FOLDER}/{DECODER}*.onnx, so that an older version of this package wrote it, or the "
                "export is incomplete: export the checkpoint again"
            )
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            for model in specialize(folder, SUFFIXES[form], sliced=self.shortlist is not None)
        )
        self._present = {value.name: value.shape for value in self.decoder.get_outputs() if value.name != "logits"}
        self._past = [name.replace("present", "past_key_values") for name in self._present]
        self._cross = [value.name for value in self.decoder.get_inputs() if ".encoder." in value.name]

    def generate(self, batch: list[list[int]], search: Search) -> list[list[int]]:
        """As `Engine.generate`."""
        if self.shortlist is None:
            return generate(self.steps(batch, search.num_beams), len(batch), search)
        tokens = self.shortlist.candidates(batch)
        compute = self.steps(batch, search.num_beams, tokens)
        rows = generate(lambda some, order: compute(tokens[some], order), len(batch), narrow_search(search, tokens))
        return [tokens[row].tolist() for row in rows]

    def steps(self, batch: list[list[int]], num_beams: int = 1, candidates: np.ndarray | None = None) -> Step:
        """Encode a batch, and return the function that computes the logits step by step, by default of all tokens."""
        padded = pad_right(batch, self.search.pad, torch.device("cpu"))
        inputs = {name: tensor.numpy() for name, tensor in padded.items()}
        feeds = {"encoder_attention_mask": inputs["attention_mask"]}
        if self.shortlist is not None:
            feeds["candidates"] = np.arange(self.shortlist.vocabulary) if candidates is None else candidates
        return self.decode(inputs, feeds, len(batch) * num_beams)

    def decode(self, inputs: dict[str, np.ndarray], feeds: dict[str, np.ndarray], rows: int) -> Step:
        """Encode inputs, and return the function that computes the logits of so many rows, step by step.

        Its tokens may also be several for each row.
        """
        names = [name.replace("past_key_values", "present") for name in self._cross]
        feeds = feeds | dict(zip(self._cross, self.encoder.run(names, inputs), strict=True))
        for name, (_, heads, _, head_dim) in zip(self._past, self._present.values(), strict=True):
            feeds[name] = np.zeros([rows, heads, 0, head_dim], dtype=np.float32)
        same = np.arange(rows)

        def step(tokens: np.ndarray, order: np.ndarray | None) -> np.ndarray:
            if order is not None and not np.array_equal(order, same):
                for name in self._past:
                    feeds[name] = feeds[name][order]
            feeds["input_ids"] = np.ascontiguousarray(tokens).reshape(rows, -1)
            logits, *caches = self.decoder.run(["logits", *self._present], feeds)
            feeds.update(zip(self._past, caches, strict=True))
            return logits[:, -1]

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


class OnnxSpeech(OnnxModel):
    """An exported model for speech: see `load_speech` of `evaluation.transcribe`."""

    def __init__(self, folder: Path, generation: GenerationConfig, threads: int):
        self.generation, end = generation, generation.eos_token_id
        suppressed = {"suppressed": generation.suppress_tokens, "first": generation.begin_suppress_tokens}
        rules: dict[str, Any] = {name: tuple(tokens or ()) for name, tokens in suppressed.items()}
        search = Search(generation.decoder_start_token_id, end, (end,), **rules)
        super().__init__(folder, search, threads)

    def find_language(self, features: np.ndarray) -> str:
        """The language of a spectrogram."""
        step = self.decode({"input_features": features}, {}, 1)
        logits, languages = step(np.array([self.search.start]), None)[0], self.generation.lang_to_id
        return max(languages, key=lambda name: logits[languages[name]]).strip("<|>")

    def transcribe(
        self, features: np.ndarray, prompt: list[int], *, num_beams: int, max_new_tokens: int
    ) -> tuple[list[int], float]:
        """As `RunningSpeech.transcribe`."""
        search = replace(self.search, start=prompt[-1], num_beams=num_beams, max_new_tokens=max_new_tokens)
        compute, scores = self.decode({"input_features": features}, {}, num_beams), []
        if len(prompt) > 1:
            compute(np.tile(prompt[:-1], (num_beams, 1)), None)

        def step(tokens: np.ndarray, order: np.ndarray | None) -> np.ndarray:
            logits = compute(tokens, order)
            scores.append(float(log_softmax(search.restrict(logits, len(scores), tokens[:, None])).max()))
            return logits

        (tokens,) = generate(step, 1, search)
        return [token for token in tokens if token not in search.ends], sum(scores)
