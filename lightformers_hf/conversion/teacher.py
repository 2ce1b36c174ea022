"""A teacher on disk: its configuration and its tensors, read one at a time under this package's names."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import models
from ..files import check_folder
from ..languages import keep_prefix, set_language_codes
from ..loading import (
    DAMAGED,
    CheckpointReader,
    assemble,
    check_finite,
    check_no_export,
    check_stored,
    check_vocabulary,
    find_architecture,
    has_tokenizer,
    load_pretrained,
    printable_name,
    skeleton,
    stored_tensors,
    take_forced_start,
)
from ..matrices import Weight
from ..models.configuration_lightformer import LightFormerConfig
from ..models.layers import make_positions
from ..vocabularies import check_ids, renumber_generation
from .families import SHARED, STACKS, find_family

if TYPE_CHECKING:
    from .vocabulary import KeptTokens

WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Teacher:
    """A checkpoint folder of a supported family, checked completely: no tensor is missing, extra or of another shape.

    Args:
        folder: where the checkpoint lies.
        source: its name as the user gave it: this folder, or a name on the Hub.
        languages: codes of source and target, of a multilingual checkpoint that is to translate between these two.

    Attributes:
        name: its name in reports: the folder's name without the path to it, or the name on the Hub.
        source_config: the checkpoint's own configuration.
        config: the configuration of this package that computes the same.
        model_class: the class of this package with the checkpoint's head.
        model: its skeleton, whose stored tensors are exactly those that `read` gives.
        kept: its tokens, where it has fewer than the checkpoint.

    Raises:
        ValueError: no supported family, no sequence-to-sequence model, or tensors that do not fit the configuration.
        FileNotFoundError: no `config.json`, no weights, or a shard that is not there.
    """

    def __init__(self, folder: Path, source: str, languages: tuple[str | None, str | None] = (None, None)):
        check_folder(folder)
        check_no_export(folder)
        self.source_config = load_pretrained(AutoConfig, folder)
        architecture = find_architecture(self.source_config, folder)
        self.family = find_family(self.source_config)
        self.reader = CheckpointReader(folder)
        check_stored(self.source_config, self.reader, folder)
        try:
            self.config = self.family.fit_weights(self.family.own_config(self.source_config), self.reader)
            if self.config.dtype is None and (stored := self.reader.main_dtype()) in WEIGHT_TYPES:
                self.config.dtype = stored  # in which transformers loads it, too
            self.model_class = getattr(
                models, architecture or self.family.architectures[0], models.LightFormerForConditionalGeneration
            )
            self.model = skeleton(self.model_class, self.config)
        except DAMAGED as error:
            raise ValueError(
                f"{folder / 'config.json'} describes no model, a field has a wrong type or value: {error}"
            ) from error
        self.folder = folder
        self.languages = languages
        self._tokenizer: PreTrainedTokenizerBase | None = None
        # The token that translations begin with. Wrong languages end it here.
        self._first_token = set_language_codes(self.tokenizer(), *languages) if any(languages) else None
        keep_prefix(self.config, *languages, self._tokenizer)
        if start := (self._first_token or {}).get("decoder_start_token_id"):
            self.config.decoder_start_token_id = start
        self.kept: KeptTokens | None = None
        self._rows: dict[str, tuple[int, Tensor]] = {}
        self._changed: dict[str, Tensor] = {}
        self._kept_layers: dict[str, list[int]] = {}
        self.name = printable_name(folder if Path(source).is_dir() else source)
        self._names = self._match_names()

    def _match_names(self) -> dict[str, str]:
        """{this package's name: name in the checkpoint} of every stored tensor."""
        expected = stored_tensors(self.model)
        ties = self.model.get_expanded_tied_weights_keys(all_submodels=True)
        names: dict[str, str] = {}
        repeats: list[tuple[str, str]] = []
        unknown, shared = [], None
        for key in self.reader.keys():  # noqa: SIM118, a reader is no dict
            name = self.family.own_name(key)
            if name == SHARED and not self.config.share_encoder_decoder_embeddings:
                shared = key  # read by a stack without a separate embedding matrix
            elif name in ties:
                repeats.append((ties[name], key))
            elif name in expected:
                names[name] = key
            elif name is not None and not self.family.is_computed(name, self.config):
                unknown.append(key)
        for name in (f"model.{stack}.embed_tokens.weight" for stack in STACKS if shared):
            names.setdefault(name, shared)
        for name, key in repeats:  # a checkpoint may keep any one name of a tied tensor, or several
            first = names.setdefault(name, key)
            if key != first and not torch.equal(self.reader.read(key), self.reader.read(first)):
                raise ValueError(
                    f"{key} and {first} of {self.folder} differ, but by config.json they are one tensor: "
                    "set tie_word_embeddings or share_encoder_decoder_embeddings to false there"
                )
        if unknown:
            raise ValueError(
                f"{self.folder} holds tensors its configuration has no place for: {_listing(unknown)}. If the outputs "
                "do not need them, load the model with from_pretrained and save it with save_pretrained, without them"
            )
        missing = [name for name in expected if name not in names and self._substitute(name) is None]
        if missing:
            raise ValueError(f"{self.folder} lacks tensors its configuration asks for: {_listing(missing)}")
        for name, key in names.items():
            if (dtype := self.reader.dtype(key)) not in WEIGHT_TYPES:
                raise ValueError(
                    f"{key} of {self.folder} holds {str(dtype).removeprefix('torch.')}; weights are expected in "
                    "float32, float16, bfloat16 or float64: give the checkpoint before it was quantized"
                )
            if tuple(self.reader.shape(key)) != tuple(expected[name].shape):
                raise ValueError(
                    f"{key} of {self.folder} has shape {tuple(self.reader.shape(key))}; "
                    f"its configuration asks for {tuple(expected[name].shape)}"
                )
        return names

    def keep_layers(self, layers: dict[str, int | None]) -> Teacher:
        """This teacher with fewer layers: so many of the `encoder` and of the `decoder` (`None`: all).

        Those that stay are the last ones of parts of about equal length.
        """
        kept: dict[str, list[int]] = {}
        for stack, count in layers.items():
            depths = getattr(self.config, f"{stack}_layers")
            if count is not None and not 1 <= count <= depths:
                raise ValueError(f"{stack}_layers is {count}; {self.name} has {depths} layers: give 1 to {depths}")
            if count is not None and count < depths:
                kept[stack] = [(part + 1) * depths // count - 1 for part in range(count)]
        if not kept:
            return self
        special = ("encoder_groups", "decoder_groups", *self.config.patterns)
        if held := [field for field in special if getattr(self.config, field, None)]:
            raise ValueError(
                f"{next(iter(kept))}_layers can't be changed: layers of {self.name} share weights or differ in shape "
                f"({held[0]}); remove layers of its own teacher"
            )
        if not isinstance(self.config, LightFormerConfig):
            raise ValueError(f"{next(iter(kept))}_layers can't be changed in a {self.config.model_type}")
        shorter = copy.copy(self)
        shorter._kept_layers = kept
        fields = {f"{stack}_layers": len(depths) for stack, depths in kept.items()}
        shorter.config = type(self.config)(**{**self.config.to_dict(), **fields})
        shorter.model = skeleton(self.model_class, shorter.config)

        def before(name: str) -> str:
            match = re.match(r"(.*\b(encoder|decoder)\.layers\.)(\d+)(\..*)", name)
            return f"{match[1]}{kept[match[2]][int(match[3])]}{match[4]}" if match and match[2] in kept else name

        sources = {name: before(name) for name in stored_tensors(shorter.model)}
        shorter._names = {name: self._names[source] for name, source in sources.items() if source in self._names}
        return shorter

    @property
    def depths(self) -> dict[str, Sequence[int]]:
        """The layers of the checkpoint that this teacher has, of `encoder` and `decoder`."""
        counts = {stack: getattr(self.config, f"{stack}_layers") for stack in STACKS}
        return {stack: self._kept_layers.get(stack, range(count)) for stack, count in counts.items()}

    def change(self, tensors: dict[str, Tensor]) -> Teacher:
        """This teacher with other tensors under these names."""
        changed = copy.copy(self)
        changed._changed = tensors
        return changed

    def keep_tokens(self, kept: KeptTokens) -> Teacher:
        """This teacher with fewer tokens: their rows alone, and their new ids in its configurations and tokenizer."""
        if getattr(self.config, "embedding", None) == "adaptive":
            raise ValueError(
                f"vocabulary cannot be trimmed: {self.name} has an adaptive embedding, whose bands follow the ids"
            )
        smaller = copy.copy(self)
        smaller.config = kept.config(self.config)
        smaller.model = skeleton(self.model_class, smaller.config)
        smaller.kept, smaller._tokenizer = kept, kept.tokenizer
        smaller._rows = kept.rows(self.model)
        return smaller

    def read(self, name: str) -> Tensor:
        """One stored tensor, or what its source's class computes for one that a checkpoint may omit."""
        if name in self._changed:
            return self._changed[name]
        if name not in self._names:
            return self._substitute(name)
        tensor = self.reader.read(self._names[name])
        check_finite(tensor, self._names[name], self.folder)
        if name in self._rows:
            tensor = tensor.index_select(*self._rows[name])
        return tensor

    def _substitute(self, name: str) -> Tensor | None:
        """A tensor that a checkpoint may omit: a bias of zero, or sinusoids where only one stack has trained ones."""
        if name.endswith("final_logits_bias"):
            return torch.zeros(stored_tensors(self.model)[name].shape)
        if name.endswith("embed_positions.weight") and self.family.reads_positions:
            return make_positions(self.family.own_config(self.source_config)).table
        return None

    def load(self) -> PreTrainedModel:
        """The whole model, fp32, in evaluation mode: its outputs must not depend on chance.

        Its tensors are the files', whose pages the system may drop and read again: they are not to be changed.
        """
        tensors = {name: self.read(name).float() for name in stored_tensors(self.model)}
        return assemble(self.model_class, self.config, tensors)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds one."""
        return has_tokenizer(self.folder)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer. Raises `ValueError` where it has none, one too large, or lacks a language."""
        if self._tokenizer is None:
            tokenizer = load_pretrained(AutoTokenizer, self.folder)
            check_vocabulary(tokenizer, self.config, self.folder)
            set_language_codes(tokenizer, *self.languages)
            self._tokenizer = tokenizer
        return self._tokenizer

    def module(self, name: str) -> nn.Module:
        """A module with its own tensors, as they are stored."""
        module = copy.deepcopy(self.model.get_submodule(name))
        tensors = {leaf: self.read(f"{name}.{leaf}") for leaf in module.state_dict()}
        module.load_state_dict(tensors, assign=True)
        return module.requires_grad_(False)

    def weight(self, name: str) -> Weight:
        """The weight of a module, dense or factorized, as it is stored."""
        return Weight.of(self.module(name))

    def generation_config(self) -> transformers.GenerationConfig:
        """The checkpoint's own, or that of its configuration; it begins in the target language."""
        if (self.folder / "generation_config.json").is_file():
            try:
                config = transformers.GenerationConfig.from_pretrained(self.folder)
                take_forced_start(config, self.folder)
            except (OSError, *DAMAGED) as error:
                raise ValueError(f"{self.folder / 'generation_config.json'} cannot be read: {error}") from error
        else:
            config = transformers.GenerationConfig.from_model_config(self.source_config)
            # A parsed configuration lacks the settings of generation that older checkpoints store there.
            said = transformers.PreTrainedConfig.get_config_dict(self.folder)[0]
            for name in vars(config).keys() & said.keys() - {"transformers_version"}:
                setattr(config, name, said[name])
        for name, number in (self._first_token or {}).items():
            setattr(config, name, number)
        if self.kept is not None:
            renumber_generation(config, self.kept.target)
        else:
            check_ids(config, self.config.decoder_vocab_size, self.folder)
        try:  # a changed configuration is saved only if it is valid
            config.validate(strict=self.kept is not None or self._first_token is not None)
        except ValueError as error:
            raise ValueError(f"the generation configuration of {self.folder} contradicts itself: {error}") from None
        return config


def _listing(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
