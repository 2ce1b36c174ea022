"""Two vocabularies, one a subset of the other: matching of their tokens, and models with a part of the tokens."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .loading import skeleton


def read_vocabularies(tokenizer: PreTrainedTokenizerBase) -> dict[str, dict[str, int]]:
    """{side: {token: id}} of a tokenizer, `source` alone where both sides have the same tokens."""
    # The languages of M2M100 have ids, but are no tokens for it unless its configuration names them.
    source = dict(tokenizer.get_vocab()) | getattr(tokenizer, "lang_token_to_id", {})
    if getattr(tokenizer, "separate_vocabs", False):
        return {"source": source, "target": dict(tokenizer.target_encoder)}
    return {"source": source}


def match_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> dict[str, list[int]] | None:
    """{`source` and `target`: for each of our ids, theirs of the same token}; `None` where all ids are the same."""
    our_sides, their_sides = read_vocabularies(ours), read_vocabularies(theirs)
    if our_sides == their_sides:
        return None
    matched = {}
    for side in ("source", "target"):
        tokens, known = (sides.get(side, sides["source"]) for sides in (our_sides, their_sides))
        order = sorted(tokens, key=tokens.__getitem__)
        strange = next((token for token in order if token not in known), None)
        if strange is not None or [tokens[token] for token in order] != list(range(len(order))):
            what = f"lacks {strange!r}" if strange is not None else "numbers its tokens otherwise"
            raise ValueError(
                f"The teacher {theirs.name_or_path} has another vocabulary than the model's tokenizer ({what}): "
                "distillation compares their predictions word by word, choose a teacher with the same tokenizer, or "
                "the one that the model was made from."
            )
        matched[side] = [known[token] for token in order]
    return matched


def renumber_ids(fields: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The fields of a configuration that name tokens, with new ids; bans and biases of removed tokens are dropped."""
    new = {old: number for number, old in enumerate(kept)}
    changed: dict[str, Any] = {}
    for name, ids in single_ids(fields).items():
        is_list = isinstance(fields[name], list)
        changed[name] = [new[token] for token in ids if token in new] if is_list else new.get(ids[0])
    for name in filter(fields.get, ("suppress_tokens", "begin_suppress_tokens")):
        changed[name] = [new[token] for token in fields[name] if token in new] or None
    if banned := fields.get("bad_words_ids"):  # words of several tokens
        words = (word for word in banned if {*word} <= new.keys())
        changed["bad_words_ids"] = [[new[token] for token in word] for word in words] or None
    if biases := fields.get("sequence_bias"):  # {ids: bias}, or a list of pairs
        pairs = biases.items() if isinstance(biases, Mapping) else biases
        kept_pairs = [[[new[token] for token in ids], bias] for ids, bias in pairs if {*ids} <= new.keys()]
        changed["sequence_bias"] = kept_pairs or None
    return changed


def narrow_fields(fields: Mapping[str, Any], source: Sequence[int], target: Sequence[int]) -> dict[str, Any]:
    """Changes of a model's configuration for the remaining tokens: sizes of vocabularies, and ids by name."""
    sizes = {"vocab_size": len(source), "decoder_vocab_size": len(target)}
    return renumber_ids(fields, target) | {name: size for name, size in sizes.items() if name in fields}


def renumber_generation(generation: GenerationConfig, kept: Sequence[int]) -> GenerationConfig:
    """A generation configuration with the new ids, in place; bans of removed tokens are dropped."""
    for name, value in renumber_ids(generation.to_dict(), kept).items():
        setattr(generation, name, value)
    return generation


def single_ids(fields: Mapping[str, Any]) -> dict[str, list[int]]:
    """{field: its ids} of the fields of a configuration that name a token, `pad_token_id` and the like."""
    named = ((name, value) for name, value in fields.items() if name.endswith("_token_id") and value is not None)
    return {name: value if isinstance(value, list) else [value] for name, value in named}


def check_ids(generation: GenerationConfig, size: int, name: str | os.PathLike) -> None:
    """Raise `ValueError` where a generation configuration names a token that a vocabulary of so many has not."""
    for field, ids in single_ids(generation.to_dict()).items():
        if strange := [number for number in ids if isinstance(number, int) and not 0 <= number < size]:
            raise ValueError(
                f"the generation configuration of {name} has {field} {strange[0]}, but there are {size} tokens: "
                "give the checkpoint its own generation_config.json"
            )


def keep_tokens(model: PreTrainedModel, source: Sequence[int], target: Sequence[int]) -> PreTrainedModel:
    """Leave a model the rows of some of its tokens, in place: logits are theirs, and their softmax is renormalized."""
    config = copy.deepcopy(model.config)
    for name, value in narrow_fields(config.to_dict(), source, target).items():
        setattr(config, name, value)
    smaller, axes = skeleton(type(model), config), token_axes(model)
    replaced: dict[int, torch.Tensor] = {}
    for name, tensor in _tensors(model):
        if name not in axes:
            continue
        if id(tensor) not in replaced:  # tied names have one tensor, and keep it
            rows = torch.tensor(source if "encoder." in name else target, device=tensor.device)
            part = tensor.detach().index_select(axes[name], rows)
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if is_parameter else part
        path, _, leaf = name.rpartition(".")
        module, shape_of = model.get_submodule(path), smaller.get_submodule(path)
        setattr(module, leaf, replaced[id(tensor)])
        for field in ("num_embeddings", "padding_idx", "out_features"):
            if hasattr(module, field):
                setattr(module, field, getattr(shape_of, field))
    model.config = config
    renumber_generation(model.generation_config, target)
    return model


def token_axes(model: PreTrainedModel) -> dict[str, int]:
    """Return {tensor, by any name: the dimension with one entry per token}: tensors that grow with the vocabulary."""
    config = copy.deepcopy(model.config)
    sizes = {field: getattr(config, field, None) for field in ("vocab_size", "decoder_vocab_size")}
    for field, size in sizes.items():
        if size is not None:
            setattr(config, field, size + 1)
    larger = dict(_tensors(skeleton(type(model), config)))
    return {
        name: dimension
        for name, tensor in _tensors(model)
        for dimension, (size, grown) in enumerate(zip(tensor.shape, larger[name].shape, strict=True))
        if size != grown
    }


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of all parameters and buffers, of tied ones every name."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
