"""One teacher being compressed: every matrix's rank, and every tensor of the result."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..models.configuration_base import RANK_FIELDS, FactorizedConfig
from ..models.heads import ConditionalGenerationHead
from ..models.low_rank import pattern_matches
from .calibration import Calibration, Metric, sample_pairs
from .options import CompressionOptions
from .ranks import RankPolicy, ranks_under_budget
from .refit import refit
from .report import CompressionReport, MatrixReport
from .sharing import merge, source_names
from .svd import decompose, in_workers
from .teacher import Teacher, skeleton, stored_tensors


def factorizable(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(module name, kind) of every matrix of a dense model that may become low-rank."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, module in model.named_modules():
        if hasattr(module, "kind") and f"{name}.weight" not in ties:
            yield name, module.kind


def _bare(name: str) -> str:
    """A module's name as `rank_pattern` has it: without the head's `model.`."""
    return name.removeprefix("model.")


class Compression:
    """One teacher being compressed: decides every matrix's rank, and makes every tensor of the result.

    After `run`, `config` is the result's configuration, `report` says what was done, and `state` holds its tensors
    (empty after a dry run).
    """

    def __init__(self, teacher: Teacher, options: CompressionOptions):
        self.teacher, self.options = teacher, options
        self.policy = options.policy()
        groups = {}
        for field in ("encoder_groups", "decoder_groups"):
            if (asked := getattr(options, field)) is not None:
                if not hasattr(teacher.config, field):
                    raise ValueError(
                        f"{field} is {asked}, but layers of a {teacher.config.model_type} are shared as its training "
                        "had them: leave it out"
                    )
                groups[field] = asked
        ranks = {field: None for field in RANK_FIELDS}
        self.dense_config = type(teacher.config)(
            **{**teacher.config.to_dict(), **groups, **ranks, "rank_pattern": {}, "architectures": None}
        )
        self.dense = skeleton(teacher.model_class, self.dense_config)
        self.kinds = dict(factorizable(self.dense))
        self.calibration: Calibration | None = None
        if unused := self.policy.unused_patterns(_bare(name) for name in self.kinds):
            raise ValueError(
                f"rank_pattern {unused[0]!r} matches no matrix of this model; its matrices have names like "
                f"{', '.join(_bare(name) for name in list(self.kinds)[:4])}"
            )

    def run(self, *, dry: bool, progress: bool) -> None:
        """Factorize all matrices, largest first, one a worker; then merge and copy what is no matrix."""
        if self.options.calibration is not None:
            self.calibration = self._calibrate(progress)
        self.state: dict[str, torch.Tensor] = {}
        self.ranks: dict[str, int | None] = {}
        reports: dict[str, MatrixReport] = {}
        largest_first = sorted(self.kinds, key=lambda name: -self.dense.get_submodule(name).weight.numel())
        if self.options.spends_budget:
            self.policy = self._spend_budget(largest_first, progress)
        results = in_workers(self._matrix, largest_first)
        for name, report, tensors in tqdm(
            results, desc="factorizing", unit="matrix", total=len(largest_first), disable=not progress
        ):
            reports[name], self.ranks[name] = report, report.rank
            if not dry:
                self.state |= tensors
        if not dry:
            self.state |= self._other_tensors()
        self.config = self._config()
        self.model = skeleton(self.teacher.model_class, self.config)
        if self.options.refit and not dry:
            self._refit(progress)
        matrices = [reports[name] for name in self.kinds]
        self.report = CompressionReport.of(self.teacher, self.model, self.options, matrices)

    def _calibrate(self, progress: bool) -> Calibration:
        teacher, options = self.teacher, self.options
        if not issubclass(teacher.model_class, ConditionalGenerationHead):
            raise ValueError(
                f"calibration is for sequence-to-sequence models; {teacher.name} is a {teacher.model_class.__name__}"
            )
        tokenizer, model = teacher.tokenizer(), teacher.load()
        pairs = sample_pairs(
            options.calibration,
            source=options.source_lang or getattr(tokenizer, "source_lang", None) or "source",
            target=options.target_lang or getattr(tokenizer, "target_lang", None) or "target",
            samples=options.calibration_samples,
            seed=options.calibration_seed,
        )
        linear = [name for name, kind in factorizable(model) if kind != "embedding"]
        return Calibration(model, linear, tokenizer, pairs, progress=progress)

    def _refit(self, progress: bool) -> None:
        student = self.teacher.model_class(self.config)
        student.load_state_dict({name: tensor.float() for name, tensor in self.state.items()}, strict=False)
        student.tie_weights()
        refit(student.eval(), self.calibration.model, self.calibration, progress=progress)
        self.state = {name: student.state_dict()[name] for name in self.state}

    def _source(self, name: str) -> tuple[list[str], torch.Tensor, list[torch.Tensor], Metric | None]:
        """Modules of the teacher that a matrix is made of, the matrix, their biases, and its metric, if any."""
        teacher, start, kind = self.teacher, self.options.group_start, self.kinds[name]
        modules = [module.rstrip(".") for module in source_names(f"{name}.", teacher.config, self.dense_config)]
        matrix = merge([teacher.matrix(module) for module in modules], start)
        biases = [bias for module in modules if (bias := teacher.bias(module)) is not None]
        metric = None
        if self.calibration is not None:
            metric = self.calibration.metric(modules, kind, has_bias=bool(biases))
        return modules, matrix, biases, metric

    def _spend_budget(self, names: list[str], progress: bool) -> RankPolicy:
        """The policy that gives every matrix its rank under one budget; ranks the user gave by name come first."""

        def spectrum(name: str) -> tuple[str, tuple[int, int, torch.Tensor]]:
            _, matrix, _, metric = self._source(name)
            return name, (*matrix.shape, decompose(metric.weigh(matrix), name=_bare(name)).singular_values)

        free = [name for name in names if not any(pattern_matches(p, _bare(name)) for p in self.policy.rank_pattern)]
        bar = tqdm(in_workers(spectrum, free), desc="spectra", unit="matrix", total=len(free), disable=not progress)
        spectra = dict(bar)
        dense = sum(m * n for m, n, _ in spectra.values())
        ranks = ranks_under_budget(spectra, int(dense / self.policy.default.ratio))
        own = {re.escape(_bare(name)): rank for name, rank in ranks.items()}
        return RankPolicy(None, {}, {**self.policy.rank_pattern, **own})

    def _matrix(self, name: str) -> tuple[str, MatrixReport, dict[str, torch.Tensor]]:
        """Factorize one matrix, or leave it as it is. Returns its name, what was done, and its module's tensors."""
        teacher, start, kind = self.teacher, self.options.group_start, self.kinds[name]
        modules, matrix, biases, metric = self._source(name)
        weighed = matrix if metric is None else metric.weigh(matrix)
        choose = partial(self.policy.choose, _bare(name), kind, *matrix.shape)
        if self.policy.needs_spectrum(_bare(name), kind):
            spectrum = decompose(weighed, name=_bare(name))
            rank = choose(spectrum.singular_values)
        else:  # a rank known beforehand makes the decomposition cheaper, no rank spares it
            rank = choose()
            spectrum = None if rank is None else decompose(weighed, name=_bare(name), rank=rank)

        energy, relative_error, lost = 1.0, 0.0, None
        own = teacher.factors(modules[0]) if len(set(modules)) == 1 else None
        if own is not None and (rank is None or rank >= own[0].shape[1]):
            # A source that is factorized already, and would not get smaller, keeps the factors it has.
            left, right = own
            rank = left.shape[1]
        elif rank is not None:
            factors = spectrum.truncate(rank, self.options.split)
            if metric is not None:
                factors = metric.restore(factors)
                if metric.mean is not None:
                    lost = metric.mean @ (matrix.double() - factors.left @ factors.right)
            left, right = factors.left.to(matrix.dtype), factors.right.to(matrix.dtype)
            energy, relative_error = spectrum.energy(rank), spectrum.relative_error(rank)
            if kind == "embedding":
                left[(matrix == 0).all(dim=1)] = 0  # a padding row that is exactly zero stays so

        report = MatrixReport(
            name=_bare(name),
            kind=kind,
            m=matrix.shape[0],
            n=matrix.shape[1],
            rank=rank,
            energy=energy,
            relative_error=relative_error,
        )
        bias = merge(biases, start) if biases else None
        if lost is not None:  # the mean of what the factors lose
            bias = (bias.double() + lost).to(bias.dtype)
        if rank is None:
            tensors = {f"{name}.weight": matrix if kind == "embedding" else matrix.T, f"{name}.bias": bias}
        elif isinstance(self.dense.get_submodule(name), nn.Embedding):
            tensors = {f"{name}.weight": left, f"{name}.basis": right}
        elif kind == "embedding":  # an output layer that is not tied to a table
            tensors = {f"{name}.output.weight": left, f"{name}.basis": right}
        else:
            tensors = {f"{name}.u.weight": left.T, f"{name}.v.weight": right.T, f"{name}.v.bias": bias}
        # A copy where it is a view, so that no source stays mapped and nothing is copied a second time on writing.
        tensors = {
            key: tensor.clone(memory_format=torch.contiguous_format)
            for key, tensor in tensors.items()
            if tensor is not None
        }
        return name, report, tensors

    def _other_tensors(self) -> dict[str, torch.Tensor]:
        """What belongs to no matrix: norms, positions, the classifier, the bias of the logits."""
        return {
            name: merge(
                [self.teacher.read(source) for source in source_names(name, self.teacher.config, self.dense_config)],
                self.options.group_start,
            )
            for name in stored_tensors(self.dense)
            if name.rpartition(".")[0] not in self.kinds
        }

    def _config(self) -> FactorizedConfig:
        """The result's configuration: the commonest rank of each kind as a field, the others as `rank_pattern`."""
        fields: dict[str, int | None] = {}
        common = {}
        for stack in ("encoder", "decoder"):
            for kind in ("attention", "ffn"):
                ranks = [rank for name, rank in self.ranks.items() if self.kinds[name] == kind and f"{stack}." in name]
                common[stack, kind] = Counter(ranks).most_common(1)[0][0] if ranks else None
        for kind in ("attention", "ffn"):
            encoder, decoder = common["encoder", kind], common["decoder", kind]
            fields[f"{kind}_rank"] = encoder
            fields[f"decoder_{kind}_rank"] = None if decoder == encoder else decoder
        tables = [rank for name, rank in self.ranks.items() if self.kinds[name] == "embedding"]
        fields["embedding_rank"] = tables[0] if tables else None
        config = type(self.dense_config)(**{**self.dense_config.to_dict(), **fields})
        config.rank_pattern = {
            _bare(name): rank
            for name in self.kinds
            if (rank := self.ranks[name])
            != config.rank_of_kind("decoder" if "decoder." in name else "encoder", self.kinds[name])
        }
        return config
