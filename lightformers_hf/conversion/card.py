"""The model card: the teacher, the compression, its results, and how to load the model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from ..checkpoints.cards import MARK, as_code, as_plain_text, drop_strange_link, load_template
from ..checkpoints.families import all_families
from ..data_files import is_file_name
from ..models.configuration_lightformer import OLDEST_TRANSFORMERS
from .forms.low_rank import LowRank
from .report import CompressionReport, ModelFacts

TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModel": "feature-extraction",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
}


def read_results(file: Path, parameters: int) -> dict:
    """Read the results that `lightformers evaluate --json` wrote about a model of so many unique parameters."""
    try:
        results = json.loads(Path(file).read_text(encoding="utf-8"))
        measured = results["model"]["parameters"]
        keys = ("model", "data", "source", "target", "sentences", "generation", "labels")
        shown = {key: results[key] for key in keys}
        labels: dict[str, list[str]] = {}  # labels of the measures of each variant
        for name, variant in results["signatures"].items():
            labels.setdefault(variant, []).append(results["labels"][name])
        shown["variants"] = {", ".join(names): variant for variant, names in labels.items()}
        # A local path is private; a data set on the Hub has an owner.
        data = results["data"]
        shown |= {"data": Path(data).name if is_file_name(data) else data, "rows": _rows(results)}
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is not there: `lightformers evaluate … --json {file}` writes it") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError(
            f"{file} holds no results, as `lightformers evaluate … --json {file}` writes them: evaluate again"
        ) from None
    if measured != parameters:
        raise ValueError(
            f"{file} measures a model of {measured:,} parameters, this one has {parameters:,}: evaluate this one"
        )
    return shown


def _rows(results: dict) -> list[list[str]]:
    """A table of results: its head, then one row a measure, for the model and for its teacher if there is one."""
    columns = [results["model"]] + ([results["teacher"]] if results["teacher"] else [])
    ratio = f" ({results['speed_ratio']:.2f}x)" if results.get("speed_ratio") else ""
    measures = (
        ("unique parameters", "parameters", "{:,}".format),
        ("megabytes on disk", "disk_bytes", lambda size: f"{size / 1e6:,.1f}"),
        ("peak memory, megabytes", "memory_bytes", lambda size: f"{size / 1e6:,.0f}"),
        ("tokens/s, one core", "tokens_per_second", "{:,.1f}".format),
    )
    rows = [["", "this model"] + ([as_code(Path(results["teacher"]["name"]).name)] if results["teacher"] else [])]
    for name in results["model"]["scores"]:
        rows.append([as_plain_text(results["labels"][name]), *(f"{column['scores'][name]:.1f}" for column in columns)])
    for label, field, show in measures:
        if all(column.get(field) is not None for column in columns):
            rows.append([label, *(show(column[field]) for column in columns)])
    rows[-1][1] += ratio
    return rows


def evaluation_results(results: Sequence[dict], task: str) -> list[EvalResult]:
    """Return results as entries of a card's `model-index`, which the Hub shows as a table."""
    return [
        EvalResult(
            task_type=task,
            dataset_type=result["data"].partition(":")[0],
            dataset_name=f"{result['data']} ({result['source']}-{result['target']})",
            metric_type=metric,
            metric_name=result["labels"][metric],
            metric_value=round(value, 4),
        )
        for result in results
        for metric, value in result["model"]["scores"].items()
    ]


def result_files(results: Sequence[dict]) -> dict[str, str]:
    """Return {file: content} of results on data sets of the Hub, in the format `.eval_results/*.yaml`.

    The Hub shows these entries on the model's page and on the leaderboard of the data set. Results on local files have
    no entry, because an entry names a data set of the Hub.
    """
    files = {}
    for result in results:
        name, _, configuration = result["data"].partition(":")
        if "/" not in name:
            continue
        task = configuration or f"{result['source']}-{result['target']}"
        entries = [
            EvalResultEntry(dataset_id=name, task_id=task, value=round(value, 4), notes=result["labels"][metric])
            for metric, value in result["model"]["scores"].items()
        ]
        file = re.sub(r"[^\w.-]+", "-", result["data"])
        files[f".eval_results/{file}.yaml"] = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
    return files


def model_card(
    facts: ModelFacts,
    report: CompressionReport | None = None,
    *,
    name: str | None = None,
    folder: str | None = None,
    steps: int | None = None,
    results: Sequence[dict] = (),
) -> str:
    """The text of a model card, whatever foreign text it names made harmless.

    Args:
        facts: facts about the model.
        report: report of its conversion; `None` for a model that was not compressed.
        name: the model's name on the Hub; `None` where it has none yet.
        folder: the folder that it loads from meanwhile.
        steps: how many steps it was trained.
        results: result of `read_results`.
    """
    inherited = drop_strange_link(report.inherited) if report else {}
    if report and report.languages:
        inherited["language"] = _hub_languages(report.languages)
    translates = results or (report and getattr(all_families().get(report.family), "translates", False))
    task = inherited.get("pipeline_tag") or TASKS.get(facts.auto_class) or ("translation" if translates else None)
    relation = {"base_model_relation": "finetune"} if inherited.get("base_model") else {}
    low_rank = report is not None and any(matrix.form == LowRank.label for matrix in report.matrices)
    metadata = ModelCardData(
        **inherited | relation | {"pipeline_tag": task},
        library_name="transformers",
        tags=[facts.architecture, *(["compression"] if report else []), *(["low-rank"] if low_rank else [])],
        model_name=name.rpartition("/")[2] if name and results else None,
        eval_results=evaluation_results(results, task or "") if name and results else None,
    )
    address = "".join(c for c in name or folder or "PATH" if c.isalnum() or c in "._-/ ")
    fields: dict[str, Any] = {"model": facts, "report": report, "name": name, "address": address, "steps": steps}
    fields |= {
        "results": results,
        "changes": _changes(report) if report else [],
        "metadata": metadata.to_yaml(),
        "mark": MARK,
    }
    return load_template(__package__).render(**fields, oldest=OLDEST_TRANSFORMERS)


def _changes(report: CompressionReport) -> list[str]:
    """Describe the changes of layers and matrices in words."""
    changes = [f"{report.features[0]} of its {report.features[1]} features"] if report.fewer_features else []
    changes += [f"{kept} of its {before} {stack} layers" for stack, (kept, before) in report.fewer_layers.items()]
    changes += ["its matrices made smaller"] if report.smaller else []
    for stack, (stored, depths) in report.groups.items():
        changes += [f"its {depths} {stack} layers sharing {stored} stored ones"] if stored != depths else []
    return changes


def _hub_languages(codes: list[str]) -> list[str]:
    """Languages as the Hub names them (ISO 639-1 or -3): `de` of de_DE and `deu` of deu_Latn, each once."""
    return [*dict.fromkeys(name for code in codes if re.fullmatch("[a-z]{2,3}", name := re.split("[_-]", code)[0]))]
