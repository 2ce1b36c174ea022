"""One recovery: models and data, the training, its result, and the teacher in a fast engine."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
)

from ..arguments import RecoverArguments
from ..conversion import copy_report
from ..conversion.calibration_text import random_texts
from ..corpus import Corpus, Pairs
from ..decoding import repeated_start
from ..engines import Engine, export, load_engine
from ..engines.engine import longest_input
from ..evaluation.evaluate import calibrated_on, choose_columns, warn_of_overlap
from ..evaluation.quality import METRICS, choose_metrics, labels, score, selection_metric
from ..evaluation.translate import translate
from ..files import DISTILL_FILE, read_json, write_json
from ..languages import language_code, named_columns, set_languages, split_language, split_prefix
from ..loading import build_network, check_checkpoint, load_pretrained, resolve_source, unique_parameters
from ..options import OptionError
from ..recovery import (
    RecoveryTrainer,
    ScoredPart,
    TokenBatches,
    TokenizedPool,
    find_last_checkpoint,
    load_trainable,
    train,
)
from ..recovery.runs import (
    FAR,
    FOR_VALIDATION,
    MAX_TOKENS,
    NEAR,
    NEAR_OWN,
    Clock,
    Pace,
    Progress,
    RecoverySettings,
    choose_settings,
    find_distance,
    plan_steps,
    training_arguments,
)
from ..results import Result
from ..rounding import rotate_factors, round_model
from ..text import cut_texts, fingerprint, load_parallel, tokenize_pairs

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)
VALIDATION_FILE = "validation.json"  # the pairs that were drawn for it: data may change before a recovery resumes
TRANSLATIONS_FILE = "translations.json"  # the teacher's, and their sources: data may change before it resumes
ENGINE, QUANTIZATION = "ctranslate2", "int8"  # in which a teacher translates fastest
FOR_TRANSLATIONS = 0.25  # share of the time for the teacher's translations
HELD_OUT = 1000  # pairs of the validation at most
ENOUGH = 20_000  # translations that a model can be trained on alone, where there are more sources than time
RANDOM_TEXTS = 20_000  # that are drawn where there is no text
COMPARED = 200  # at most so many translations of the teacher replace references
LONGEST = 1024  # tokens of a text at most
TRIAL_STEPS, FOR_TRIAL = 16, 0.03  # steps that measure the time of a step, and their share of the time
ROUNDED = 1 / 3  # share of a training, at its end, with weights that are rounded as the deployed ones
SAMPLE, BEAMS = 64, 4  # sources that measure the speed of translation, and the teacher's beams


@dataclass(eq=False)
class Run:
    """Models and data of one recovery.

    Attributes:
        call: the arguments of `recover`.
        output: the folder to write.
        light, teacher: folders or Hub names of the two models.
        data, validation: names of the texts.
        folder: folder of the compressed model.
        model, distiller: the two models, loaded.
        tokenizer: that of the compressed model.
        on_cpu, bf16: where and in which type they are trained.
        resumes: whether an earlier call has drawn the validation.
        exclude: pairs whose sources are not trained on.
        corpus, held_out: the text to train on, and the validation.
        metrics: those that were asked for, or that fit the references.
    """

    call: RecoverArguments
    output: Path
    light: str | Path
    teacher: str | Path
    data: str | None
    validation: str | None
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    distiller: PreTrainedModel
    on_cpu: bool
    bf16: bool
    resumes: bool = False
    exclude: str | None = None
    corpus: Corpus = field(init=False)
    held_out: Dataset = field(init=False)
    metrics: list[str] = field(init=False)
    last_pool: Any = field(init=False, default=None)  # pairs, and what was made of them
    auto_model: ClassVar[Any] = AutoModelForSeq2SeqLM
    unit: ClassVar[str] = "sentences"  # of the validation
    averages: ClassVar[bool] = False  # weights before and after a training that repeats the calibration
    cpu_attention: ClassVar[str | None] = "eager"  # with sentences, it trains faster than the fused kernel

    @classmethod
    def load_model(
        cls,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        languages: tuple[str | None, str | None],
        attention: str | None,
        quantization: str | None = None,
    ) -> PreTrainedModel:
        """The compressed model without dropout, which a recovery is better without, ready to be rounded."""
        model = load_trainable(str(folder), attention, cls.auto_model, dropout=False)
        set_languages(model, tokenizer, *languages)
        if quantization == "int4":  # whose errors are smaller then
            rotate_factors(model)
        return model

    @property
    def attention(self) -> str | None:
        """How attention is computed; `None` is the model's default."""
        return self.cpu_attention if self.on_cpu else None

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Columns, and codes of languages: source and target."""
        return self.call.source_lang, self.call.target_lang

    @property
    def ratio(self) -> float:
        """Parameters of the teacher, with the kept tokens alone, / parameters of the model."""
        return unique_parameters(self.distiller) / unique_parameters(self.model)

    @property
    def one_language(self) -> bool:
        """Whether the teacher makes the targets."""
        return not self.corpus.has_targets

    @property
    def compares_with_teacher(self) -> bool:
        """Whether the references of the validation are the teacher's."""
        return self.one_language and not self.validation

    @property
    def near(self) -> float:
        """Share of the teacher's chrF that a model near it has."""
        return NEAR_OWN if self.compares_with_teacher else NEAR

    @property
    def longest(self) -> int:
        """Tokens of a text at most."""
        return min(LONGEST, getattr(self.model.config, "max_position_embeddings", None) or LONGEST)

    @property
    def best_by(self) -> str:
        """The metric that chooses the checkpoint."""
        return selection_metric(self.metrics, self.call.metrics)

    @property
    def measured(self) -> list[str]:
        """The metrics, and chrF, by which the loss is measured (`find_distance`)."""
        return list(dict.fromkeys([*self.metrics, "chrf"]))

    @cached_property
    def own_config(self) -> PreTrainedConfig:
        """The compressed model's, as it was."""
        return load_pretrained(AutoConfig, self.folder)

    def read_data(self) -> tuple[Corpus, Dataset]:
        """Text to train on, without the sources of the validation, and the validation's pairs.

        The validation is drawn from all text, unless it is given, or an earlier call has drawn it. Text that the
        conversion was calibrated on comes last: by it the model before the training would be better than it is.
        """
        corpus, known = self.open_corpus(), calibrated_on(self.folder)
        texts = corpus.sample(HELD_OUT + len(known), self.call.seed)
        if self.validation:
            held_out = self.read_validation(self.validation)
        elif self.resumes:
            held_out = Dataset.from_dict(read_json(self.output / VALIDATION_FILE))
        else:
            size = min(HELD_OUT if corpus.has_targets else COMPARED, corpus.rows // 10)
            if not size:
                held = f"{corpus.rows} text{'s' * (corpus.rows != 1)}"
                raise ValueError(f"{self.data} holds {held}: ten and more are needed, or a validation")
            names = texts["source"][:]
            seen = [text in known for text in self.fingerprints(names)]
            held_out = texts.select(sorted(range(len(texts)), key=seen.__getitem__)[:size])
            if not corpus.has_targets:
                sources = held_out["source"][:]
                said = translate(
                    sources, self.distiller, self.tokenizer, num_beams=1, split=False, progress=self.call.progress
                )
                held_out = held_out.add_column("target", said)
        corpus.hold_out(held_out["source"])
        if self.exclude:
            corpus.hold_out(load_parallel(self.exclude, source=self.columns[0], target=self.columns[1])["source"])
        if corpus.table is not None and not corpus.table["source"]:
            raise ValueError(f"{self.data} holds only the text of the validation: give other text")
        return corpus, held_out

    def fingerprints(self, sources: list[str]) -> list[str]:
        """Fingerprints of sentences, or of sounds with these names."""
        return list(map(fingerprint, sources))

    def read_validation(self, data: str) -> Dataset:
        """The pairs of the validation that was given."""
        source, target = self.columns
        return load_parallel(data, source=source, target=target, max_samples=HELD_OUT)

    def choose_metrics(self, sources: list[str], references: list[str]) -> list[str]:
        """The metrics that are asked for, or the defaults for such pairs."""
        return choose_metrics(self.call.metrics, sources, references)

    def time_each(self) -> float:
        """Seconds in which the teacher translates a text of the validation."""
        return time_translations(self.held_out["source"][:SAMPLE], self.distiller, self.tokenizer, 1)[1]

    def collator(self, model: PreTrainedModel) -> Callable:
        """Makes batches for a model of pairs."""
        return DataCollatorForSeq2Seq(self.tokenizer, model=model)

    def open_corpus(self) -> Corpus:
        """All text: that of the user, or random tokens, without texts that would be cut."""
        if self.data is None:
            config, name = self.distiller.config, str(self.teacher)
            texts = random_texts(self.tokenizer, config, self.languages, RANDOM_TEXTS, self.call.seed, name=name)
            most, lengths = longest_input(self.distiller, self.tokenizer), map(len, self.tokenizer(texts)["input_ids"])
            texts = [text for text, n in zip(texts, lengths, strict=True) if n <= most]
            return Corpus.of(Dataset.from_dict({"source": texts}))
        source, target = named_columns(*self.languages)
        source = source and self.columns[0]
        return Corpus(self.data, source=source, target=target, default=self.columns, skip_bad=self.call.skip_bad_lines)

    @cached_property
    def columns(self) -> tuple[str, str]:
        """Texts of pairs; sources have their prefix."""
        source, target = choose_columns(str(self.light), self.model, self.tokenizer, *self.languages)
        source = source if split_prefix(source)[1] else split_language(source)[0] or ""
        return source, split_language(target)[0] or ""

    def shorten_validation(self, number: int) -> None:
        """Keep so many pairs, in the order of their lengths: batches then have little padding."""
        lengths = [len(text) for text in self.held_out["target"][:number]]
        self.held_out = self.held_out.select(sorted(range(number), key=lengths.__getitem__))

    @cached_property
    def scored(self) -> ScoredPart:
        """The validation, tokenized."""
        return ScoredPart(self.held_out, self.tokenize(self.held_out), self.tokenizer)

    @cached_property
    def start(self) -> int | None:
        """The token that targets do not begin with."""
        return repeated_start(self.distiller, self.tokenizer)

    def tokenize(self, pairs: Dataset) -> Dataset:
        """Ids of pairs, cut to the positions of the model."""
        limits = {"max_source_length": self.longest, "max_target_length": self.longest}
        return tokenize_pairs(pairs, self.tokenizer, **limits, start=self.start)

    def tokenize_pool(self, pairs: Pairs) -> Any:
        """Ids of a pool; those of the last one are kept, which is the same again in a small corpus."""
        if self.last_pool is None or self.last_pool[0] is not pairs:
            most = MAX_TOKENS["cpu" if self.on_cpu else "accelerator"]
            longest = self.longest, self.longest
            tokens = TokenizedPool(pairs, self.tokenizer, longest=longest, max_tokens=most, start=self.start)
            self.last_pool = pairs, tokens
        return self.last_pool[1]

    def prepare(self, minutes: float, translations: bool | None, start: float) -> dict[str, Any]:
        """Measure, choose the settings, and let the teacher translate if required."""
        width = self.model.config.hidden_size
        if not self.validation:
            write_json(self.held_out.to_dict(), self.output / VALIDATION_FILE)
        self.say("measuring the model, its teacher, and the time of a step")
        # Five of these validations fit into the time.
        taken = max(50, int(FOR_VALIDATION * 60 * minutes / 5 / self.time_each()))
        self.shorten_validation(min(taken, len(self.held_out)))
        names, data = self.held_out["source"][:], self.validation or self.data or ""
        seen = warn_of_overlap(self.folder, data, names, self.fingerprints(names), self.unit)
        before, evaluation_seconds = self.measure(self.model)
        teacher, _ = self.measure(self.distiller)
        kept = before["chrf"] / max(teacher["chrf"], 1)
        distance = self.ratio if self.data is None else find_distance(self.ratio, kept, self.near)
        fits = {"same_width": width == self.distiller.config.hidden_size, "random_text": self.data is None}
        settings = self.adapt(choose_settings(distance, width, bf16=self.bf16, on_cpu=self.on_cpu, **fits))
        count = self.ask_for_texts(60 * minutes, translations, lost=distance >= FAR or not fits["same_width"])
        pairs = self.training_text(count)
        step_seconds, epoch_steps = self.time_steps(pairs, settings)
        left = max(60 * minutes - (time.monotonic() - start), 0.25 * 60 * minutes)
        settings = plan_steps(
            settings, left, step_seconds, evaluation_seconds, epoch_steps, ratio=distance, width=width
        )
        self.say(
            f"before: {show_scores(before)}; the teacher: {show_scores(teacher)}"
            + ", whose translations are the references" * self.compares_with_teacher,
            f"{settings.steps:,} steps, {step_seconds:.2f} s each, learning rate {settings.learning_rate:.2g}; "
            f"the best is kept by {labels([self.best_by])[self.best_by]}",
        )
        scores = {"before": before, "teacher": teacher}
        chosen = {"settings": asdict(settings), "translations": count, "sentences": len(self.held_out), "seen": seen}
        return chosen | {"scores": scores}

    def say(self, *lines: str) -> None:
        """Print lines above the bars."""
        for line in lines if self.call.progress else ():
            tqdm.write(line)

    def measure(self, model: PreTrainedModel) -> tuple[dict[str, float], float]:
        """A model on the validation, and how long it took."""
        trainer = self.trainer(model, None, RecoverySettings(0.0, 0.0, 0.0, 1, self.bf16, steps=1, eval_steps=1))
        start = time.monotonic()
        found = trainer.evaluate()
        return {name: found[f"eval_{name}"] for name in self.measured}, time.monotonic() - start

    def adapt(self, settings: RecoverySettings) -> RecoverySettings:
        """The settings for data of this kind."""
        return settings

    def ask_for_texts(self, seconds: float, wanted: bool | None, *, lost: bool) -> int:
        """Write the teacher's translations of random sources, as the time allows, and return their number.

        With references they are made of a model that has `lost` much, or features, and of as many sources as it can
        learn from in the time: of all, or of `ENOUGH`.
        """
        if wanted is False and self.one_language:
            text = self.data or "text of the teacher's own"
            raise OptionError("", f"{text} is of one language: remove ", "translations", ", which give the targets")
        distilled = Path(os.path.expanduser(self.data or ""), DISTILL_FILE).is_file()  # by a teacher
        if not (self.one_language or wanted or (wanted is None and lost and not distilled)):
            return 0
        translator = fastest_translator(self.distiller, self.tokenizer)
        if translator is self.distiller and self.on_cpu:
            self.say("the teacher translates by generate(): CTranslate2, if installed, needs a fifth of the time")
        beams = 1 if self.data is None else BEAMS  # with random tokens more texts are better
        first = self.corpus.sample(SAMPLE, self.call.seed, without=self.corpus.without)["source"][:]
        _, took = time_translations(first, translator, self.tokenizer, beams)
        affordable = max(len(first), int(FOR_TRANSLATIONS * seconds / took))
        texts = self.corpus.sample(min(self.corpus.rows, affordable), self.call.seed, without=self.corpus.without)
        if not (self.one_language or wanted) and affordable < min(self.corpus.rows, ENOUGH):
            return 0
        made = translate(
            texts["source"][:],
            translator,
            self.tokenizer,
            num_beams=beams,
            prefix="",
            split=False,
            progress=self.call.progress,
        )
        references = {} if self.one_language else {"reference": texts["target"][:]}
        write_json({"source": texts["source"][:], "target": made} | references, self.output / TRANSLATIONS_FILE)
        return len(made)

    def training_text(self, count: int) -> Corpus:
        """All text, or that which the teacher translated, with references and translations."""
        if not count:
            return self.corpus
        made = read_json(self.output / TRANSLATIONS_FILE)
        references = made.get("reference", [])
        sources, targets = made["source"][: len(references)] + made["source"], references + made["target"]
        corpus = Corpus.of(Dataset.from_dict({"source": sources, "target": targets}), name=str(self.data))
        corpus.sample(0, self.call.seed)
        return corpus

    def time_steps(self, pairs: Corpus, settings: RecoverySettings) -> tuple[float, int]:
        """How long a step takes, and how many an epoch has."""
        clock = Clock(FOR_TRIAL * 60 * self.call.minutes)
        trial = replace(settings, steps=TRIAL_STEPS, eval_steps=TRIAL_STEPS + 1, warmup_steps=1)
        trainer = self.trainer(copy.deepcopy(self.model), pairs, trial, teacher=self.distiller)
        steps = trainer.train_dataset.count_steps()
        self.say(*cut_texts(self.last_pool[1].lengths, self.longest))
        trainer.add_callback(clock)
        trainer.train()
        return clock.seconds, steps

    def trainer(
        self,
        model: PreTrainedModel,
        pairs: Corpus | None,
        settings: RecoverySettings,
        *,
        teacher: PreTrainedModel | None = None,
        saves: bool = False,
    ) -> RecoveryTrainer:
        """A trainer with these settings; `saves`: it validates, logs, and writes checkpoints."""

        def score_validation(prediction: EvalPrediction) -> dict[str, float]:
            texts = self.scored.decode(prediction.predictions)
            language = language_code(self.languages[1], self.tokenizer)
            return score(texts, self.scored.references, self.measured, language=language)

        arguments = training_arguments(
            settings,
            saves=saves,
            best_by=self.best_by,
            greater_is_better=METRICS[self.best_by].higher_is_better,
            output_dir=str(self.output),
            use_cpu=self.on_cpu,
            seed=self.call.seed,
            generation_max_length=min(int(1.5 * self.scored.longest) + 2, self.longest),
            report_to=list(self.call.report_to) if saves else "none",
        )
        batches = None
        if pairs is not None:
            batches = TokenBatches(pairs, self.tokenize_pool, settings.max_tokens, self.call.seed)
        trainer = RecoveryTrainer(
            model,
            arguments,
            train_dataset=batches,
            eval_dataset=self.scored.tokens,
            data_collator=self.collator(model),
            processing_class=self.tokenizer,
            compute_metrics=score_validation,
            teacher=teacher,
            distillation_alpha=settings.alpha,
            hidden_weight=settings.hidden_weight if teacher is not None else 0.0,
            quantization=None if model is self.distiller else self.call.quantization,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def train(self, record: dict[str, Any]) -> Recovery:
        """Train to the end, from the last checkpoint if there is one."""
        known = {field.name for field in fields(RecoverySettings)}  # an earlier version had more
        settings = RecoverySettings(**{name: value for name, value in record["settings"].items() if name in known})
        began = time.monotonic()
        self.shorten_validation(record["sentences"])
        pairs, parameters = self.training_text(record["translations"]), unique_parameters(self.model)
        trainer = self.trainer(self.model, pairs, settings, teacher=self.distiller, saves=True)
        pace = Pace(settings, began)
        trainer.add_callback(pace)
        trainer.rounds = lambda: pace.done(trainer.state.global_step) >= 1 - ROUNDED
        checkpoint = find_last_checkpoint(self.output)
        with tqdm(total=settings.steps, desc="recovering", unit="step", disable=not self.call.progress) as bar:
            trainer.add_callback(Progress(bar, labels(self.metrics)))
            train(trainer, checkpoint)
        copy_report(str(self.folder), self.output)
        state = trainer.state
        scored = {
            entry["step"]: {name: entry[f"eval_{name}"] for name in self.measured}
            for entry in state.log_history
            if f"eval_{self.best_by}" in entry
        }
        is_new = 2 * record.get("seen", 0) <= len(self.held_out)
        if is_new:
            scored[0] = record["scores"]["before"]  # few steps may do harm
        sign = 1 if METRICS[self.best_by].higher_is_better else -1
        best_step = max(scored, key=lambda step: sign * scored[step][self.best_by])
        if best_step == 0:
            self.say("no validation was better than at first: the model stays unchanged, more minutes help")
        as_it_was = self.folder, self.tokenizer, self.languages, self.attention
        best, own = trainer.model if best_step else self.load_model(*as_it_was), self.own_config
        if self.averages and not is_new:
            self.say("calibrated on the validation: the mean of the weights before and after is saved")
            average_weights(best, self.load_model(*as_it_was))
            scored[best_step] = self.measure(best)[0]
        if best_step and self.call.quantization:
            round_model(best, self.call.quantization)
        for name in ("use_cache", *(name for name in vars(own) if "dropout" in name)):  # otherwise while it trained
            setattr(best.config, name, getattr(own, name))
        best.to(own.dtype or torch.float32).save_pretrained(self.output)  # keeps its size on disk
        return Recovery(
            output=str(self.output),
            parameters=parameters,
            # The distiller has the kept tokens alone.
            ratio=count_parameters(self.teacher, self.auto_model) / parameters,
            **record["scores"],
            after=scored[best_step],
            best_by=self.best_by,
            sentences=len(self.held_out),
            with_teacher=self.compares_with_teacher,
            steps=state.global_step,
            best_step=best_step,
            minutes=pace.elapsed / 60,
            translations=record["translations"],
            bad_lines=len(self.corpus.bad or ()),
            settings=record["settings"],
            quantization=self.call.quantization,
        )


@torch.no_grad()
def average_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Put the mean of both models' weights into `model` (Wortsman et al. 2022, arXiv 2109.01903, section 3)."""
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.lerp_(theirs.to(ours), 0.5)


def count_parameters(checkpoint: str | Path, auto_model: Any) -> int:
    """Learned parameters of a checkpoint, without memory for its weights."""
    with torch.device("meta"):
        return unique_parameters(build_network(auto_model, check_checkpoint(resolve_source(checkpoint))))


def show_scores(scores: dict[str, float]) -> str:
    """Scores of a model on the validation text, greedy: `BLEU 12.3, chrF 45.6`."""
    return ", ".join(f"{label} {scores[name]:.1f}" for name, label in labels(scores).items())


@dataclass(frozen=True)
class Recovery(Result):
    """Result of a recovery.

    Attributes:
        output: the folder of the model.
        parameters, ratio: unique parameters, and the ratio of the teacher's to them.
        before, after, teacher: {metric: score} on the validation text: before the training, after it, and of the
            teacher.
        best_by: the metric by which the best checkpoint was chosen.
        sentences: number of validation sentences.
        with_teacher: whether the references are the teacher's translations, because there are no others.
        steps, best_step: number of training steps, and the step of the best checkpoint; 0: the initial model was best.
        minutes: duration of the training, without lost time after interruptions.
        translations: number of sources that the teacher translated first.
        settings: settings of the training.
        bad_lines: damaged lines of the data that were read and skipped.
        quantization: type of the numbers to which weights were rounded for the scores of the model, and at the end of
            the training; `None`: they were not.
    """

    output: str
    parameters: int
    ratio: float
    before: dict[str, float]
    after: dict[str, float]
    teacher: dict[str, float]
    best_by: str
    sentences: int
    with_teacher: bool
    steps: int
    best_step: int
    minutes: float
    translations: int
    settings: dict[str, Any]
    bad_lines: int = 0
    quantization: str | None = None

    def parts(self) -> list[Table]:
        """Return scores before and after, sizes, and how it was trained."""
        from rich.table import Table

        table = Table(title="Recovery", show_header=False)
        what = "the teacher as reference" if self.with_teacher else "validation"
        table.add_row(f"{what}, before", show_scores(self.before))
        table.add_row(f"{what}, after", show_scores(self.after))
        table.add_row("the teacher's", f"{show_scores(self.teacher)}, greedy, {self.sentences} sentences")
        table.add_row("the best was chosen by", labels([self.best_by])[self.best_by])
        table.add_row("parameters", f"{self.parameters:,}, the teacher's / {self.ratio:.1f}")
        if self.quantization:
            written = "as written" if self.best_step else "but written as they were"
            table.add_row("its weights in these scores", f"rounded to {self.quantization}, {written}")
        best = f"best after {self.best_step:,}" if self.best_step else "none better than it was: more minutes help"
        table.add_row("trained", f"{self.steps:,} steps in {self.minutes:.1f} minutes, {best}")
        if self.translations:
            table.add_row("the teacher's translations", f"{self.translations:,}")
        if self.bad_lines:
            table.add_row("damaged lines, skipped", f"{self.bad_lines:,}")
        return [table]


def fastest_translator(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | Engine:
    """`network` in CTranslate2 and int8, a fifth of the time of `generate()`.

    Itself on a GPU, without CTranslate2, and where the engine does not support the network or its generation settings.
    """
    if network.device.type != "cpu" or find_spec(ENGINE) is None:
        return network
    try:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "exported")
            export(network, exported, tokenizer=tokenizer, to=ENGINE, quantization=QUANTIZATION)
            engine = load_engine(exported, threads=torch.get_num_threads())
    except (ValueError, OSError):  # it cannot be expressed, or the disk is full: slower is no reason to end
        return network
    fits = engine.longest_input is None or (engine.search.max_new_tokens or 0) <= engine.longest_input
    return engine if fits else network


def time_translations(
    sources: list[str], translator: PreTrainedModel | Engine, tokenizer: PreTrainedTokenizerBase, beams: int
) -> tuple[list[str], float]:
    """Translations, and the seconds that each took."""
    start = time.monotonic()
    texts = translate(sources, translator, tokenizer, num_beams=beams, prefix="", split=False)
    return texts, max(time.monotonic() - start, 1e-9) / len(texts)
