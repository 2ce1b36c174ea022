"""One teacher being compressed: what every part becomes, and every tensor of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..loading import load_tensors, skeleton, stored_tensors
from ..models.attention import MultiHeadAttention
from ..models.configuration_base import RANK_FIELDS, FactorizedConfig
from ..models.configuration_lightformer import LightFormerConfig
from ..models.layer_sharing import group_of_depth
from ..models.lm_heads import ConditionalGenerationHead
from ..text import fingerprint
from .choosing.budget import Choices, allocate, smallest
from .choosing.latency import sentence_costs
from .forms.parts import Built, HeadsPart, MatrixPart, NeuronsPart, Part, Sources, bare, parameters
from .options import CompressionOptions, StudyOptions, needs_calibration, read_quantity, settle
from .refit import refit
from .report import OWN_TEXT, CompressionReport
from .sharing.alignment import Turn, alignment, residual_factors, turned
from .sharing.merging import merge, source_names
from .statistics.calibration import Calibration, parallel_batches, sample_pairs
from .statistics.synthesis import synthetic_batches
from .teacher import Teacher
from .workers import algebra_device, is_main, own_share, shared_out

CPU = torch.device("cpu")
# What a safetensors file spends on naming a tensor, about.
HEADER_BYTES = 130


def factorizable(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(module name, kind) of every matrix of a dense model that may become low-rank."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, module in model.named_modules():
        if hasattr(module, "kind") and f"{name}.weight" not in ties:
            yield name, module.kind


class Compression:
    """One teacher being compressed: decides what every part becomes, and makes every tensor of the result.

    `whole` is the teacher with all its layers, `teacher` with those that stay.

    All processes, where there are several, go through it together and have the same results; the tensors are the main
    process's alone.

    After `run`, `config` is the result's configuration, `report` says what was done, and `state` holds its tensors
    (empty after a dry run).
    """

    def __init__(
        self,
        teacher: Teacher,
        options: CompressionOptions,
        device: torch.device = CPU,
        study: StudyOptions | None = None,
    ):
        self.whole, self.options, self.device = teacher, options, device
        self.asked, self.study = study, settle(options, study)
        self.algebra = algebra_device(device)
        layers = {stack: getattr(options, f"{stack}_layers") for stack in ("encoder", "decoder")}
        self.teacher = teacher = teacher.shortened(layers)
        self.policy = options.policy()
        groups = {}
        for field in ("encoder_groups", "decoder_groups"):
            if (asked := getattr(options, field)) is not None:
                if not hasattr(teacher.config, field):
                    raise ValueError(
                        f"{field} is {asked}, but layers of a {teacher.config.model_type} are shared as its training "
                        "had them: leave it out"
                    )
                if asked != getattr(teacher.config, field):
                    groups[field] = asked
        self.start = self.study.group_start or self._usual_start(groups)
        if groups and isinstance(teacher.config, LightFormerConfig):
            different = ("head_dim_pattern", "ffn_dim_pattern", "group_residual_rank")
            if held := [field for field in different if getattr(teacher.config, field)]:
                raise ValueError(
                    f"{next(iter(groups))} is {next(iter(groups.values()))}, but layers of {teacher.name} differ in "
                    f"shape ({held[0]}) and can't be merged: share the layers of its own teacher"
                )
            groups |= {name: getattr(self.study, name) for name in ("share_layer_norms", "group_residual_rank")}
        ranks = {field: None for field in RANK_FIELDS}
        self.dense_config = type(teacher.config)(
            **{**teacher.config.to_dict(), **groups, **ranks, "rank_pattern": {}, "architectures": None}
        )
        self.dense = skeleton(teacher.model_class, self.dense_config)
        self.kinds = dict(factorizable(self.dense))
        self.calibration: Calibration | None = None
        self.calibrated_on: list[str] = []
        if unused := self.policy.unused_patterns(bare(name) for name in self.kinds):
            raise ValueError(
                f"pattern {unused[0]!r} matches no matrix of this model; its matrices have names like "
                f"{', '.join(bare(name) for name in list(self.kinds)[:4])}"
            )
        possible = issubclass(teacher.model_class, ConditionalGenerationHead)
        self.calibrates = options.method != "paper" and possible and self.policy.compresses
        if not possible and (needing := needs_calibration(options, self.study)):
            raise ValueError(
                f"{needing} needs calibration, which is for sequence-to-sequence models; "
                f"{teacher.name} is a {teacher.model_class.__name__}"
            )

    def run(self, *, dry: bool, progress: bool) -> None:
        """Decide, then make all parts, largest first, one a worker; then merge and copy what is no matrix."""
        options = self.options
        if self.calibrates:
            self.calibration = self._calibrate(progress)
        turns = self._align() if self.start == "aligned" else {}
        metrics = self.calibration, self.study.weighting
        sources = Sources(self.teacher, self.dense, self.start, *metrics, self.algebra, turns)
        units = list(self._units(sources))
        self.parts = {name: part for unit in units for parts in unit for name, part in parts.items()}
        if self.calibrates and self._spends_budget():
            self.settings = self._spend_budget(units, progress)
        else:
            self.settings = self._follow_policy(units)
        self.state: dict[str, torch.Tensor] = {}
        coordinates: dict[str, torch.Tensor] = {}
        reports = {}
        results = shared_out(self._build, sorted(self.settings, key=self._weight, reverse=True), self.algebra)
        bar = tqdm(results, desc="factorizing", unit="part", total=len(self.settings), disable=not progress)
        for built in bar:
            reports |= {report.name: report for report in built.reports}
            coordinates |= built.coordinates
            if not dry and (is_main() or self.study.refit is not False):
                self.state |= built.tensors
        if not dry and (is_main() or self.study.refit is not False):
            self.state |= self._other_tensors(sources)
        self.reports = [reports[bare(name)] for name in self.kinds]
        self.config = self._config()
        self.model = skeleton(self.teacher.model_class, self.config)
        if self._refits() and not dry:
            self._refit(coordinates, progress)
        used = (options.calibration or OWN_TEXT) if self.calibrates else None
        speedup = None
        if options.speedup is not None:
            speedup = sentence_costs(self.teacher.source_config).total / sentence_costs(self.config).total
        texts = {"calibration": used, "calibrated_on": self.calibrated_on}
        self.report = CompressionReport.of(
            self.whole, self.model, options, self.reports, study=self.asked, estimated_speedup=speedup, **texts
        )

    def _usual_start(self, groups: dict[str, int]) -> str:
        """`aligned` where the teacher's layers have matrices for each head, and are yet to be shared."""
        config = self.teacher.config
        possible = groups and self.options.method != "paper" and isinstance(config, LightFormerConfig)
        if possible and not config.joint_qkv and config.attention_output_projection:
            return "aligned"
        return "mean"

    def _align(self) -> dict[str, Turn]:
        """Bases in which the layers of each new group are alike; the moments are turned along."""
        turns = {}
        config, moments = self.teacher.config, self.calibration and self.calibration.moments
        for stack in ("encoder", "decoder"):
            prefix, groups = f"model.{stack}.layers.", getattr(self.dense_config, f"{stack}_groups")
            names = [name.removeprefix(f"{prefix}0.") for name in self.kinds if name.startswith(f"{prefix}0.")]
            for group in range(groups or 0):
                sources = source_names(f"{prefix}{group}.{names[0]}", config, self.dense_config)
                layers = list(dict.fromkeys(source.removesuffix(names[0]) for source in sources))
                if len(layers) == 1:
                    continue
                linear = [
                    {name: self.teacher.linear(layer + name).to(self.algebra) for name in names} for layer in layers
                ]
                seen = moments and [
                    {name: moments[layer + name].inputs / moments[layer + name].count for name in names}
                    for layer in layers
                ]
                own = alignment(linear, getattr(config, f"{stack}_attention_heads"), seen)
                for layer, found in zip(layers, own, strict=True):
                    turns |= {layer + name: turn for name, turn in found.items()}
        for name, turn in turns.items() if moments else ():
            part = moments[name]
            part.inputs = turned(part.inputs, turn.inputs, turn.inputs)
            part.vectors["mean"] = turned(part.vectors["mean"], turn.inputs)
            part.gradients = turned(part.gradients, turn.outputs, turn.outputs)
        return turns

    def _calibrate(self, progress: bool) -> Calibration:
        model, options = self.teacher.load().to(self.device), self.options
        if options.calibration is None:
            author = model if self.whole is self.teacher else self.whole.load().to(self.device)
            batches = synthetic_batches(
                author, self.whole, options.calibration_samples, self.study.calibration_seed, progress=progress
            )
        else:
            tokenizer = self.teacher.tokenizer()
            if getattr(tokenizer, "tgt_lang", "") is None:
                raise ValueError(
                    f"{self.teacher.name} translates between many languages: give source_lang and target_lang, "
                    "columns of the calibration text with the tokenizer's codes: de=de_DE and en=en_XX"
                )
            pairs = sample_pairs(tokenizer, options, self.study.calibration_seed)
            self.calibrated_on = sorted({fingerprint(sentence) for sentence in pairs["source"]})
            batches = own_share(parallel_batches(model, tokenizer, pairs))
        linear = [name for name, kind in factorizable(model) if kind != "embedding"]
        return Calibration(model, linear, batches, progress=progress)

    def _units(self, sources: Sources) -> Iterator[list[dict[str, Part]]]:
        """Every attention block, feed-forward network and other matrix, with the ways to make it smaller."""

        def matrices(*names: str) -> dict[str, Part]:
            return {name: MatrixPart(name, self.kinds[name], sources, self.study.split) for name in names}

        def free(names: list[str]) -> bool:
            if getattr(self.dense_config, "group_residual_rank", None):  # each residual fits the whole matrix
                return False
            return not any(self._is_given(name) or sources.factors(name) is not None for name in names)

        taken = set()
        for name, module in self.dense.named_modules():
            if not name.startswith("model.") or not hasattr(self.dense_config, "head_dim_pattern"):
                continue
            if isinstance(module, MultiHeadAttention):
                parts, kind, method = ("q_proj", "k_proj", "v_proj", "out_proj"), HeadsPart, "attention_method"
            elif hasattr(module, "fc1"):
                parts, kind, method = ("fc1", "fc2"), NeuronsPart, "ffn_method"
            else:
                continue
            names, method = [f"{name}.{part}" for part in parts], getattr(self.study, method)
            if not all(part in self.kinds for part in names):  # joint projections, or none behind the heads
                continue
            taken.update(names)
            alternatives = [matrices(*names)] if method != kind.method or not free(names) else []
            if (method == kind.method or (method is None and self._spends_budget())) and free(names):
                alternatives.append({name: kind(name, sources)})
            yield alternatives
        for name in self.kinds:
            if name not in taken:
                yield [matrices(name)]

    def _weight(self, name: str) -> int:
        """Parameters of a part, dense."""
        return sum(parameter.numel() for parameter in self.dense.get_submodule(name).parameters())

    def _is_given(self, name: str) -> bool:
        """Whether the user gave this matrix its rank."""
        return self.policy.settles(bare(name), self.kinds[name])

    def _spends_budget(self) -> bool:
        return self.options.spends_budget and self.study.allocation != "uniform"

    def _follow_policy(self, units: list) -> dict[str, int | None]:
        """The setting that ratio, rank or energy give to each part by itself."""
        settings: dict[str, int | None] = {}
        for parts, *_ in units:
            for name, part in parts.items():
                if isinstance(part, MatrixPart):
                    settings[name] = self._follow_rule(part)
                else:
                    rule = self.policy.rule(bare(name), part.kind)
                    settings[name] = None if rule is None else rule.choose_width(bare(name), part.widths)
        return settings

    def _follow_rule(self, part: MatrixPart) -> int | None:
        shape = part.sources.matrix(part.name).shape
        needs = self.policy.needs_spectrum(bare(part.name), part.kind)
        spectrum = part.spectrum().singular_values if needs else None
        return self.policy.choose(bare(part.name), part.kind, *shape, spectrum)

    def _spend_budget(self, units: list, progress: bool) -> dict[str, int | None]:
        """The settings that lose least under one budget; ranks that the user gave by name come first."""
        parts = [
            part
            for parts, *_ in units
            for part in parts.values()
            if part.name in self.kinds and self._is_given(part.name)
        ]
        given = {part.name: self._follow_rule(part) for part in parts}
        free = [
            [{name: part for name, part in parts.items() if name not in given} for parts in unit] for unit in units
        ]
        found = dict.fromkeys(name for unit in free for parts in unit for name in parts)
        names = sorted(found, key=self._weight, reverse=True)

        def weigh(name: str) -> tuple[str, Choices]:
            return name, self.parts[name].choices(parameters)

        results = shared_out(weigh, names, self.algebra)
        choices = dict(tqdm(results, desc="weighing", unit="part", total=len(names), disable=not progress))

        def solve(budget: float, choices: dict[str, Choices]) -> dict[str, int | None]:
            weighed = [[{name: choices[name] for name in parts} for parts in unit] for unit in free]
            if (least := smallest(weighed)) > budget:
                raise BudgetError(least)
            return given | allocate(weighed, budget)

        if self.options.speedup is not None:
            return self._reach_speedup(given, names, solve)
        fixed, budget = self._budget(given)
        try:
            return solve(budget, choices)
        except BudgetError as error:
            asked = self.options.budget
            raise ValueError(
                f"{asked} is {getattr(self.options, asked) or 2}, which cannot be met: with everything at its "
                f"smallest {fixed + error.least:,.0f} parameters are left"
            ) from None

    def _reach_speedup(self, given: dict[str, int | None], names: list[str], solve: Callable) -> dict[str, int | None]:
        """The settings whose estimated time is the teacher's / speedup: a budget of microseconds."""
        wanted = self.options.speedup
        teacher, whole = sentence_costs(self.teacher.source_config), sentence_costs(self.dense_config)
        read = whole.working_set / wanted
        for _ in range(4):  # what a token reads decides how much of it stays in the cache
            measure = replace(whole, working_set=read)
            fixed = whole.overhead + sum(float(self.parts[name].size(rank, measure)) for name, rank in given.items())
            try:
                settings = solve(
                    teacher.total / wanted - fixed, {name: self.parts[name].choices(measure) for name in names}
                )
            except BudgetError as error:
                most = teacher.total / (fixed + error.least)
                raise ValueError(
                    f"speedup is {wanted:g}, which cannot be met: with everything at its smallest this model is "
                    f"estimated {most:.2g} times as fast as its teacher; decoder_layers would take it further"
                ) from None
            left = sum(float(self.parts[name].size(value, whole.bytes_read)) for name, value in settings.items())
            read = (read + left) / 2
        return settings

    def _budget(self, given: dict[str, int | None]) -> tuple[float, float]:
        """Parameters of what is not up to the budget, and what all the rest may have together."""
        sizes = {name: self.dense.get_submodule(name).weight.numel() for name in self.kinds}
        fixed = self.dense.num_parameters() - sum(sizes.values())
        for name, rank in given.items():
            fixed += sizes[name] if rank is None else rank * sum(self.dense.get_submodule(name).weight.shape)
        free = sum(size for name, size in sizes.items() if name not in given)
        options = self.options
        if options.params is not None:
            return fixed, read_quantity("params", options.params) - fixed
        if options.size is not None:  # a checkpoint holds buffers, too, and a header that names every tensor
            tensors = stored_tensors(self.dense)
            buffers = sum(tensor.numel() for tensor in tensors.values()) - self.dense.num_parameters()
            itemsize = (self.teacher.config.dtype or torch.float32).itemsize
            return fixed, (
                read_quantity("size", options.size) - HEADER_BYTES * len(tensors)
            ) / itemsize - fixed - buffers
        return fixed, free / self.policy.default.ratio

    def _refits(self) -> bool:
        """Whether layers are regressed on the teacher's outputs: unless told otherwise, where none is shared."""
        possible = isinstance(self.config, LightFormerConfig) and not any(
            getattr(self.config, f"{stack}_groups") for stack in ("encoder", "decoder")
        )
        if self.study.refit and not possible:
            raise ValueError(
                "refit is True, but layers that are shared serve several places, which one regression can't, and only "
                "a LightFormer's are known one by one: leave refit or the groups out"
            )
        lossy = any(report.relative_error for report in self.reports)
        return self.calibrates and possible and lossy and self.study.refit is not False

    def _refit(self, coordinates: dict[str, torch.Tensor], progress: bool) -> None:
        student = self.teacher.model_class(self.config)
        load_tensors(student, {name: tensor.float() for name, tensor in self.state.items()})
        student = student.eval().to(self.device)
        refit(student, self.calibration.model, self.calibration, coordinates, progress=progress)
        self.state = {name: student.state_dict()[name].cpu() for name in self.state}

    def _build(self, name: str) -> Built:
        part, setting = self.parts[name], self.settings[name]
        if setting is None and not isinstance(part, MatrixPart):  # as it is
            parts = [
                MatrixPart(f"{name}.{leaf}", part.kind, part.sources, self.study.split).build(None)
                for leaf in part.matrices
            ]
            return Built(
                [report for built in parts for report in built.reports],
                {key: tensor for built in parts for key, tensor in built.tensors.items()},
            )
        return part.build(setting)

    def _other_tensors(self, sources: Sources) -> dict[str, torch.Tensor]:
        """What belongs to no matrix: norms, positions, the classifier, the bias of the logits; residuals of depths."""
        tensors = {}
        for name in stored_tensors(self.dense):
            if name.rpartition(".")[0] in self.kinds:
                continue
            read = source_names(name, self.teacher.config, self.dense_config)
            if ".residuals." not in name or name in stored_tensors(self.teacher.model):
                tensors[name] = merge([self.teacher.read(source) for source in read], self.start)
            elif name.endswith(".u.weight"):
                left, right = self._residual(name.removesuffix(".u.weight"), sources)
                tensors |= {
                    name: left.T.contiguous().cpu(),
                    name.replace(".u.", ".v."): right.T.contiguous().cpu(),
                }
        return tensors

    def _residual(self, name: str, sources: Sources) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of what one depth's matrix is, less what its group's has become."""
        stack, _, rest = name.partition(".depths.")
        depth, _, leaf = rest.partition(".residuals.")
        layers, groups = (f"{stack.rpartition('.')[2]}_{what}" for what in ("layers", "groups"))
        stored, source = (
            f"{stack}.layers.{group_of_depth(int(depth), getattr(config, layers), getattr(config, groups))}.{leaf}"
            for config in (self.dense_config, self.teacher.config)
        )
        if f"{stored}.weight" in self.state:
            shared = self.state[f"{stored}.weight"].T
        else:
            shared = self.state[f"{stored}.u.weight"].T @ self.state[f"{stored}.v.weight"].T
        own = sources.turns.get(source, Turn()).linear(self.teacher.linear(source).to(self.algebra)).matrix
        metric = None
        if self.calibration is not None:
            metric = self.calibration.metric([source], self.kinds[stored], has_bias=False)
        shared = shared.to(self.algebra)
        return residual_factors(own, shared, self.dense_config.group_residual_rank, name=bare(name), metric=metric)

    def _config(self) -> FactorizedConfig:
        """The result's configuration: the commonest rank or width of each kind as a field, the others as patterns."""
        ranks = {report.name: report.size if report.form == "low-rank" else None for report in self.reports}
        kinds = {report.name: report.kind for report in self.reports}
        fields: dict[str, object] = {}
        common = {}
        for stack in ("encoder", "decoder"):
            for kind in ("attention", "ffn"):
                common[stack, kind] = commonest(
                    [rank for name, rank in ranks.items() if kinds[name] == kind and f"{stack}." in name]
                )
        for kind in ("attention", "ffn"):
            encoder, decoder = common["encoder", kind], common["decoder", kind]
            fields[f"{kind}_rank"] = encoder
            fields[f"decoder_{kind}_rank"] = None if decoder == encoder else decoder
        tables = [rank for name, rank in ranks.items() if kinds[name] == "embedding"]
        fields["embedding_rank"] = tables[0] if tables else None
        config = type(self.dense_config)(**{**self.dense_config.to_dict(), **fields, **self._widths()})
        config.rank_pattern = {
            name: rank
            for name, rank in ranks.items()
            if rank != config.rank_of_kind("decoder" if "decoder." in name else "encoder", kinds[name])
        }
        return config

    def _widths(self) -> dict[str, object]:
        """The fields that say how wide heads and feed-forward networks are, where any became narrower."""
        fields: dict[str, object] = {}
        heads = {
            name: self.settings.get(name) or module.head_dim
            for name, module in self.dense.named_modules()
            if isinstance(module, MultiHeadAttention)
        }
        if any(isinstance(self.parts[name], HeadsPart) for name in self.settings):
            fields["head_dim"] = usual = commonest(list(heads.values()))
            fields["head_dim_pattern"] = {bare(name): width for name, width in heads.items() if width != usual}
        if any(isinstance(self.parts[name], NeuronsPart) for name in self.settings):
            fields["ffn_dim_pattern"] = {}
            for stack in ("encoder", "decoder"):
                widths = {
                    name: self.settings.get(name) or module.fc1.out_features
                    for name, module in self.dense.named_modules()
                    if f"{stack}.layers." in name and hasattr(module, "fc1")
                }
                fields[f"{stack}_ffn_dim"] = usual = commonest(list(widths.values()))
                fields["ffn_dim_pattern"] |= {bare(name): width for name, width in widths.items() if width != usual}
        return fields


class BudgetError(Exception):
    """A budget below the `least` that the parts can have."""

    def __init__(self, least: float):
        super().__init__(least)
        self.least = least


def commonest(values: list) -> object:
    """The value that stands most often in a list; `None` of an empty one."""
    return Counter(values).most_common(1)[0][0] if values else None
