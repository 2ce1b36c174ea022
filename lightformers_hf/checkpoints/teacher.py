"""A trained model in this package's classes, of a supported family: from a folder, from the Hub, or from memory.

`read` checks it completely. `trim`, `shorten` and `replace_model` return other teachers, and change none.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoTokenizer,
    FeatureExtractionMixin,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import models
from ..files import check_folder, shorten_list
from ..in_memory import (
    AnyModel,
    AnyTokenizer,
    check_tokenizer_of,
    is_loaded,
    lacks_processor,
    lacks_tokenizer,
    model_name,
    split_processor,
)
from ..languages import keep_prefix, set_language_codes
from ..loading import (
    DAMAGED,
    assemble,
    check_finite,
    check_no_export,
    check_stored,
    check_tokenizer,
    check_vocabulary,
    dequantize,
    find_architecture,
    has_tokenizer,
    is_quantized,
    load_network,
    load_pretrained,
    main_dtype,
    no_extractor,
    no_tokenizer,
    printable_name,
    resolve_source,
    skeleton,
    stored_tensors,
    take_forced_start,
)
from ..matrices import STACKS
from ..models.configuration_lightformer import FactorizedConfig, LightFormerConfig
from ..speech import check_extractor, complete_generation, reads_sound
from ..stored import CheckpointReader, raise_unless_damaged
from ..vocabularies import check_ids, renumber_generation
from .families import SHARED, Family, find_family

if TYPE_CHECKING:
    from ..conversion.vocabulary import KeptTokens

WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained model with everything that belongs to it.

    Its tensors may be mapped from files, or shared with other models: they are not to be changed.
    """

    model: PreTrainedModel  # of this package, in float32, in evaluation mode; its `config.dtype` is the stored type
    tokenizer: PreTrainedTokenizerBase | None
    generation_config: GenerationConfig  # begins in the target language
    name: str  # in reports: the last part of a path, or a name on the Hub
    family: str  # `model_type` of the source
    source: Path | PreTrainedModel  # the folder or the loaded model that it was read from
    hub_name: str | None = None  # `None` unless the model is on the Hub
    languages: tuple[str | None, str | None] = (None, None)  # source and target, as they were given
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)  # {stack: layers of the source that it has}
    kept: KeptTokens | None = None  # its tokens, if it has fewer than the source
    feature_extractor: FeatureExtractionMixin | None = None  # of a model for speech

    @property
    def folder(self) -> Path | None:
        """The folder that it was read from; `None` for a loaded model."""
        return self.source if isinstance(self.source, Path) else None

    @property
    def config(self) -> FactorizedConfig:
        """The configuration of its model."""
        return self.model.config

    def need_extractor(self) -> FeatureExtractionMixin:
        """The feature extractor. Raises `ValueError` if there is none, or that of another model."""
        if self.feature_extractor is None:
            raise no_extractor(self.name) if self.folder else lacks_processor()
        check_extractor(self.feature_extractor, self.config, self.name)
        return self.feature_extractor

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises `ValueError` if there is none."""
        if self.tokenizer is None:
            raise lacks_tokenizer() if self.folder is None else no_tokenizer(self.folder)
        return self.tokenizer


def read(
    source: AnyModel,
    tokenizer: AnyTokenizer | None = None,
    languages: tuple[str | None, str | None] = (None, None),
) -> Teacher:
    """Read a model of a supported family, and check that no tensor is missing, extra, damaged or of another shape.

    Args:
        source: a checkpoint folder, a name on the Hub, or a loaded model.
        tokenizer: that of a loaded model, or its processor. Without text and languages it may be missing.
        languages: codes of source and target, of a multilingual model that is to translate between these two.

    Raises:
        ValueError: no supported family, no sequence-to-sequence model, or tensors that do not fit the configuration.
        FileNotFoundError: no such model, no `config.json`, no weights, or a shard that is not there.
    """
    check_tokenizer_of(tokenizer, source, optional=True)
    tokenizer, extractor = split_processor(tokenizer)
    origin: Path | PreTrainedModel = source if is_loaded(source) else resolve_source(source)
    folder, name = origin if isinstance(origin, Path) else None, model_name(source)
    where = folder or f"the loaded model {name}"
    source_config = _read_config(origin) if isinstance(origin, Path) else _copy_config(origin)
    architecture, family = find_architecture(source_config, where), find_family(source_config)
    if isinstance(origin, Path):
        tensors = CheckpointReader(origin).read_all()
    else:
        if is_quantized(origin):
            origin = copy.deepcopy(origin)
            dequantize(origin, where)
        tensors = _share_tensors(origin)
    check_stored(source_config, {key: tuple(tensor.shape) for key, tensor in tensors.items()}, where)
    if is_quantized(source_config):
        if folder is not None:
            tensors = _share_tensors(load_network(folder))
        del source_config.quantization_config
    try:
        config = family.fit_weights(family.own_config(source_config), tensors, where)
        if config.dtype is None and (stored := main_dtype(tensors.values())) in WEIGHT_TYPES:
            config.dtype = stored  # in which transformers loads it, too
        model_class = getattr(models, architecture or family.architectures[0], getattr(models, family.model_class))
        expected = skeleton(model_class, config)
    except DAMAGED as error:
        raise_unless_damaged(error, where)
        raise ValueError(
            f"{Path(where, 'config.json')} describes no model, a field has a wrong type or value: {error}"
        ) from error
    named = match_tensors(tensors, expected, family, where)
    if folder is not None and has_tokenizer(folder):
        tokenizer = load_pretrained(AutoTokenizer, folder)
    starts, tokenizer = {}, copy.deepcopy(tokenizer)
    if tokenizer is None and any(languages):
        raise lacks_tokenizer() if folder is None else no_tokenizer(folder)
    if tokenizer is not None:
        check_tokenizer(tokenizer, where)
        tokenizer.padding_side = "right"  # as `load_pretrained` has it
        check_vocabulary(tokenizer, config, where)
        starts = set_language_codes(tokenizer, *languages) or {}
    keep_prefix(config, *languages, tokenizer)
    if start := starts.get("decoder_start_token_id"):
        config.decoder_start_token_id = start
    size = config.decoder_vocab_size or config.vocab_size
    generation = _generation_config(origin, folder, source_config, starts, size)
    if reads_sound(config):
        complete_generation(generation, tokenizer, name)
    in_folder = folder is not None and Path(os.path.expanduser(name)).is_dir()
    return Teacher(
        assemble(model_class, config, named),
        tokenizer,
        generation,
        name=printable_name((folder or name) if in_folder else name),
        family=type(source_config).model_type,
        source=origin,
        hub_name=name if not in_folder and (folder is not None or "/" in name) else None,
        languages=languages,
        layers={stack: range(getattr(config, f"{stack}_layers")) for stack in STACKS},
        feature_extractor=(_read_extractor(folder) if folder else extractor) if reads_sound(config) else None,
    )


def _read_extractor(folder: Path) -> FeatureExtractionMixin | None:
    try:
        return load_pretrained(AutoFeatureExtractor, folder)
    except OSError:
        return None


def _read_config(folder: Path) -> PreTrainedConfig:
    check_folder(folder)
    check_no_export(folder)
    return load_pretrained(AutoConfig, folder)


def _copy_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of a loaded model as it would be read from a file, by a class of an installed package."""
    known = model.config.model_type in CONFIG_MAPPING
    config_class = CONFIG_MAPPING[model.config.model_type] if known else type(model.config)
    config = config_class.from_dict(model.config.to_dict())
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    return config


def _share_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a loaded model by their names, on the CPU; shared, if they are there."""
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in tensors.items()}


def match_tensors(
    tensors: Mapping[str, Tensor], model: PreTrainedModel, family: type[Family], where: str | Path
) -> dict[str, Tensor]:
    """Return {this package's name: tensor in float32} for every stored tensor of a skeleton."""
    expected, config = stored_tensors(model), model.config
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    names: dict[str, str] = {}
    repeats: list[tuple[str, str]] = []
    unknown, shared = [], None
    for key in sorted(tensors):
        name = family.own_name(key)
        if name == SHARED and not config.share_encoder_decoder_embeddings:
            shared = key  # read by a stack without a separate embedding matrix
        elif name in ties:
            repeats.append((ties[name], key))
        elif name in expected:
            names[name] = key
        elif name is not None and not family.is_computed(name, config):
            unknown.append(key)
    tables = [f"model.{stack}.embed_tokens.weight" for stack in STACKS]
    if shared is not None:
        names = dict.fromkeys(tables, shared) | names
    for name, key in repeats:  # a checkpoint may keep any one name of a tied tensor, or several
        first = names.setdefault(name, key)
        if key != first and not _are_equal(tensors[key], tensors[first]):
            raise ValueError(
                f"{key} and {first} of {where} differ, but by config.json they are one tensor: "
                "set tie_word_embeddings or share_encoder_decoder_embeddings to false there"
            )
    if unknown:
        raise ValueError(
            f"{where} holds tensors its configuration has no place for: {shorten_list(unknown, 5)}. If the outputs "
            "do not need them, load the model with from_pretrained and save it with save_pretrained, without them"
        )
    omitted = {name: family.substitute(name, expected[name].shape, config) for name in expected.keys() - names.keys()}
    missing = [name for name in expected if name in omitted and omitted[name] is None]
    if missing:
        raise ValueError(f"{where} lacks tensors its configuration asks for: {shorten_list(missing, 5)}")
    for name, key in names.items():
        if (dtype := tensors[key].dtype) not in WEIGHT_TYPES:
            raise ValueError(
                f"{key} of {where} holds {str(dtype).removeprefix('torch.')}; weights are expected in "
                "float32, float16, bfloat16 or float64: give the checkpoint before it was quantized"
            )
        if tensors[key].shape != expected[name].shape:
            raise ValueError(
                f"{key} of {where} has shape {tuple(tensors[key].shape)}; "
                f"its configuration asks for {tuple(expected[name].shape)}"
            )
    for key in names.values():
        check_finite(tensors[key], key, where)
    found = {name: tensors[names[name]].float() if name in names else cast(Tensor, omitted[name]) for name in expected}
    if shared and names[tables[0]] == names[tables[1]]:  # saved as two tensors
        found[tables[1]] = found[tables[1]].clone()
    return found


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return (first.data_ptr() == second.data_ptr() and first.shape == second.shape) or torch.equal(first, second)


def _generation_config(
    source: AnyModel, folder: Path | None, config: PreTrainedConfig, starts: Mapping[str, int | None], size: int
) -> GenerationConfig:
    """The generation configuration of a model, or that of its configuration, with the tokens of `starts`.

    Raises `ValueError` if it names a token beyond the `size` of the vocabulary, or contradicts itself.
    """
    where = folder or f"the loaded model {model_name(source)}"
    if folder is not None and (folder / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(folder)
            take_forced_start(found, folder)
        except (OSError, *DAMAGED) as error:
            raise_unless_damaged(error, folder)
            raise ValueError(f"{folder / 'generation_config.json'} cannot be read: {error}") from error
    elif is_loaded(source) and source.generation_config is not None:
        found = copy.deepcopy(source.generation_config)
        if found.forced_bos_token_id is None:
            found.forced_bos_token_id = getattr(config, "forced_bos_token_id", None)
    else:
        found = GenerationConfig.from_model_config(config)
        # A parsed configuration lacks the settings of generation that older checkpoints store there.
        said = {} if folder is None else PreTrainedConfig.get_config_dict(folder)[0]
        for name in vars(found).keys() & said.keys() - {"transformers_version"}:
            setattr(found, name, said[name])
    for name, number in starts.items():
        setattr(found, name, number)
    check_ids(found, size, where)
    _validate(found, where, strict=bool(starts))
    return found


def _validate(generation_config: GenerationConfig, where: str | Path, *, strict: bool) -> None:
    """Raise `ValueError` for contradictions; `strict` if it was changed, because it is then saved only if valid."""
    try:
        generation_config.validate(strict=strict)
    except ValueError as error:
        raise ValueError(f"the generation configuration of {where} contradicts itself: {error}") from None


def replace_model(teacher: Teacher, config: FactorizedConfig, tensors: Mapping[str, Tensor], **others: Any) -> Teacher:
    """Return a teacher with a model of another configuration, made of these tensors themselves."""
    return replace(teacher, model=assemble(type(teacher.model), config, tensors), **others)


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose modules are others, and whose tensors are the same: new ones may be put in place."""
    return assemble(type(model), model.config, stored_tensors(model))


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return the model, if it is on a device, otherwise a copy that is."""
    return model if model.device == device else copy_model(model).to(device)


def trim(teacher: Teacher, kept: KeptTokens) -> Teacher:
    """Return a teacher with fewer tokens: their rows, and their new ids in its configurations and its tokenizer."""
    if getattr(teacher.config, "embedding", None) == "adaptive":
        raise ValueError(
            f"vocabulary cannot be trimmed: {teacher.name} has an adaptive embedding, whose bands follow the ids"
        )
    rows = kept.rows(teacher.model)
    tensors = {
        name: tensor.index_select(*rows[name]) if name in rows else tensor
        for name, tensor in stored_tensors(teacher.model).items()
    }
    generation_config = renumber_generation(copy.deepcopy(teacher.generation_config), kept.target)
    _validate(generation_config, teacher.folder or teacher.name, strict=True)
    others = {"tokenizer": kept.tokenizer, "generation_config": generation_config, "kept": kept}
    return replace_model(teacher, kept.config(teacher.config), tensors, **others)


def shorten(teacher: Teacher, layers: Mapping[str, int | None]) -> Teacher:
    """Return a teacher with fewer layers: so many of the `encoder` and of the `decoder` (`None`: all).

    Those that stay are the last ones of parts of about equal length.
    """
    config, kept = teacher.config, {}
    for stack, count in layers.items():
        depths = getattr(config, f"{stack}_layers")
        if count is not None and not 1 <= count <= depths:
            raise ValueError(f"{stack}_layers is {count}; {teacher.name} has {depths} layers: give 1 to {depths}")
        if count is not None and count < depths:
            kept[stack] = [(part + 1) * depths // count - 1 for part in range(count)]
    if not kept:
        return teacher
    special = ("encoder_groups", "decoder_groups", *config.patterns)
    if held := [field for field in special if getattr(config, field, None)]:
        raise ValueError(
            f"{next(iter(kept))}_layers can't be changed: layers of {teacher.name} share weights or differ in shape "
            f"({held[0]}); remove layers of its own teacher"
        )
    if not isinstance(config, LightFormerConfig):
        raise ValueError(f"{next(iter(kept))}_layers can't be changed in a {config.model_type}")
    tensors = {}
    for name, tensor in stored_tensors(teacher.model).items():
        match = re.match(r"(.*\b(encoder|decoder)\.layers\.)(\d+)(\..*)", name)
        if match is None or match[2] not in kept:
            tensors[name] = tensor
        elif (depth := int(match[3])) in kept[match[2]]:
            tensors[f"{match[1]}{kept[match[2]].index(depth)}{match[4]}"] = tensor
    fields = {f"{stack}_layers": len(depths) for stack, depths in kept.items()}
    shorter = type(config)(**{**config.to_dict(), **fields})
    generation_config = copy.deepcopy(teacher.generation_config)
    if (heads := getattr(generation_config, "alignment_heads", None)) and "decoder" in kept:
        # Heads of Whisper that tell the times of words, of the layers that stay; else those of the last layer.
        left = [[kept["decoder"].index(layer), head] for layer, head in heads if layer in kept["decoder"]]
        last = len(kept["decoder"]) - 1
        generation_config.alignment_heads = left or [[last, head] for head in range(config.decoder_attention_heads)]
    others = {"generation_config": generation_config, "layers": {**teacher.layers, **kept}}
    return replace_model(teacher, shorter, tensors, **others)
