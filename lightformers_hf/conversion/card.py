"""The model card: the teacher, the compression, its results, and how to load the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from ..files import CARD_FILE
from ..models.configuration_lightformer import OLDEST_TRANSFORMERS
from ..text import is_file_name
from .forms.low_rank import LowRank
from .report import CompressionReport, ModelFacts, drop_strange_link

TRANSLATORS = ("marian", "m2m_100")  # families that do nothing else
# A card with this line is written anew by every push.
MARK = "<!-- Written by lightformers. Remove this line to keep your changes when you push again. -->"
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
    rows = [["", "this model"] + ([_code(Path(results["teacher"]["name"]).name)] if results["teacher"] else [])]
    for name in results["model"]["scores"]:
        rows.append([_plain(results["labels"][name]), *(f"{column['scores'][name]:.1f}" for column in columns)])
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


def write_export_card(
    folder: Path,
    metadata: Mapping[str, Any],
    *,
    engine: str,
    form: str,
    lines: list[str],
    library: str,
    example: str = "",
) -> None:
    """Write the card of an export into `folder`, with remarks (`lines`) and a program in Python (`example`).

    The `metadata` are those of `inherited_metadata`, the `form` is the type of the stored numbers, and the `library`
    loads the export.
    """
    relation = {"base_model_relation": "quantized" if form.startswith("int") else "finetune"}
    data = ModelCardData(
        **{**metadata, **(relation if metadata.get("base_model") else {})},
        library_name=library,
        tags=list(dict.fromkeys([engine, form, library])),
    )
    fields = {"metadata": data.to_yaml(), "engine": engine, "form": form, "lines": lines, "example": example}
    (folder / CARD_FILE).write_text(EXPORT_CARD.render(mark=MARK, **fields), encoding="utf-8")


def model_card(
    facts: ModelFacts,
    report: CompressionReport | None = None,
    *,
    name: str | None = None,
    place: str | None = None,
    steps: int | None = None,
    results: Sequence[dict] = (),
) -> str:
    """The text of a model card, whatever foreign text it names made harmless.

    Args:
        facts: facts about the model.
        report: report of its conversion; `None` for a model that was not compressed.
        name: the model's name on the Hub; `None` where it has none yet.
        place: the folder that it loads from meanwhile.
        steps: how many steps it was trained.
        results: result of `read_results`.
    """
    inherited = drop_strange_link(report.inherited) if report else {}
    if report and report.languages:
        inherited["language"] = _hub_languages(report.languages)
    translates = results or (report and report.family in TRANSLATORS)
    task = inherited.get("pipeline_tag") or TASKS.get(facts.auto_class) or ("translation" if translates else None)
    relation = {"base_model_relation": "finetune"} if inherited.get("base_model") else {}
    low_rank = report is not None and any(matrix.form == LowRank.label for matrix in report.matrices)
    metadata = ModelCardData(
        **inherited | relation | {"pipeline_tag": task},
        library_name="transformers",
        tags=[facts.architecture, *(["compression"] if report else []), *(["low-rank"] if low_rank else [])],
        model_name=name.rpartition("/")[2] if name and results else None,
        eval_results=evaluation_results(results, task) if name and results else None,
    )
    return CARD.render(
        model=facts,
        report=report,
        changes=_changes(report) if report else [],
        metadata=metadata.to_yaml(),
        mark=MARK,
        name=name,
        oldest=OLDEST_TRANSFORMERS,
        place="".join(c for c in name or place or "PATH" if c.isalnum() or c in "._-/ "),
        steps=steps,
        results=results,
    )


def _changes(report: CompressionReport) -> list[str]:
    """Describe the changes of layers and matrices in words."""
    changes = [f"{kept} of its {before} {stack} layers" for stack, (kept, before) in report.fewer_layers.items()]
    changes += ["its matrices made smaller"] if report.smaller else []
    for stack, (stored, depths) in report.groups.items():
        changes += [f"its {depths} {stack} layers sharing {stored} stored ones"] if stored != depths else []
    return changes


def _hub_languages(codes: list[str]) -> list[str]:
    """Languages as the Hub names them (ISO 639-1 or -3): `de` of de_DE and `deu` of deu_Latn, each once."""
    return [*dict.fromkeys(name for code in codes if re.fullmatch("[a-z]{2,3}", name := re.split("[_-]", code)[0]))]


def _code(text: object) -> str:
    """A code span of one line, which nothing in `text` ends."""
    words = "".join(c for c in str(text) if c not in "`|" and (c.isprintable() or c.isspace())).split()
    return f"`{' '.join(words) or ' '}`"


def _plain(text: str) -> str:
    """The text in one line without the characters that mean something in Markdown or HTML."""
    return " ".join("".join(c for c in text if c.isalnum() or c in " ,.()-").split())


ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
ENVIRONMENT.filters |= {"code": _code, "plain": _plain}
CARD = ENVIRONMENT.from_string(
    """---
{{ metadata }}
---
{{ mark }}

# {% if report %}{{ report.source | code }}, compressed{% else %}{{ name | code }}{% endif %}


{% if report %}
A `{{ model.architecture }}` model: {{ report.source | code }} ({{ report.family | code }})
{%- if changes %} with {{ changes | join(" and ") | plain }}{% endif %}
{%- if report.calibration %}, fitted to {{ report.calibration | code }}{% endif %}.
Of its {{ report.matrices | length }} matrices: {{ report.outcome | plain }}.
{%- if report.vocabulary %}{% set kept, before = report.vocabulary.target %}
{% set here, there = report.vocabulary.source %}
 Its vocabulary keeps {{ "{:,}".format(here) }} of {{ "{:,}".format(there) }} tokens
{%- if (kept, before) != (here, there) %} of the source and {{ "{:,}".format(kept) }} of {{ "{:,}".format(before) }} of
the target{% endif %}
{%- if report.languages %}, and the languages {{ report.languages | map("code") | join(", ") }}{% endif %}: text in
other languages is written character by character, if at all.{% endif %}


| | before | after | ratio |
|---|---|---|---|
| unique parameters | {{ "{:,}".format(report.parameters_before) }} | {{ "{:,}".format(model.parameters) }} | {{
"%.2f" | format(report.parameters_before / model.parameters) }} |
| megabytes | {{ "%.1f" | format(report.bytes_before / 1e6) }} | {{ "%.1f" | format(model.bytes / 1e6) }} | {{
"%.2f" | format(report.bytes_before / model.bytes) }} |

{% if report.agreement %}
As converted, it {{ report.agreement }}.
{% endif %}
{% if steps %}
It was trained for {{ "{:,}".format(steps) }} steps after that.
{% elif report.loses %}
Compression alone costs quality; fine-tune it before use.
{% endif %}
{% else %}
A `{{ model.architecture }}` model of {{ "{:,}".format(model.parameters) }} unique parameters in {{
"%.1f" | format(model.bytes / 1e6) }} megabytes
{%- if steps %}, trained for {{ "{:,}".format(steps) }} steps{% endif %}.
{% endif %}

{% if results %}
## Results

{% for result in results %}
{{ result.sentences }} sentences of {{ result.data | code }}, {{ result.source | code }} → {{ result.target | code }}
{%- for option in result.generation.items() %}, {{ option | join(" ") | code }}{% endfor %}:

{% for row in result.rows %}
| {{ row | join(" | ") }} |
{% if loop.first %}
{{ "|---" * (row | length) }}|
{% endif %}
{% endfor %}

{% for metrics, variant in result.variants.items() %}
{{ metrics | plain }}: {{ variant | replace("|", " ") | code }}.
{% endfor %}

{% endfor %}
{% endif %}
## Load it

{% if model.auto_class == "AutoModelForSpeechSeq2Seq" %}
```python
from transformers import pipeline

# Needs torch, transformers ({{ oldest }} or newer), and ffmpeg to read files of sound.
# The model's code lies beside its weights. After `import lightformers_hf` nothing needs trust_remote_code.
transcribe = pipeline("automatic-speech-recognition", "{{ place }}", trust_remote_code=True)
print(transcribe("speech.flac", return_timestamps=True)["text"])  # of any length
```
{% else %}
```python
from transformers import {{ model.auto_class }}, AutoTokenizer

# Needs torch, transformers ({{ oldest }} or newer), and the library of the tokenizer: Marian's, for example,
# sentencepiece. To train: accelerate.
# The model's code lies beside its weights. After `import lightformers_hf` nothing needs trust_remote_code.
model = {{ model.auto_class }}.from_pretrained("{{ place }}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{{ place }}", trust_remote_code=True)
{% if model.auto_class in ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM") %}
inputs = tokenizer(["A sentence."], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))
{% endif %}
```
{% endif %}

Code from elsewhere is best pinned: `revision="…"` with the commit that you have read.
{% if report %}

## How it was made

`lightformers convert` with these options, everything else as it comes:

```json
{{ report.options | tojson(indent=1) }}
```

Energy and error: {{ report.measure | code }}; of a whole block where it got narrower.

| matrix | shape | becomes | energy kept | relative error |
|---|---|---|---|---|
{% for matrix in report.matrices %}
| {{ matrix.name | code }} | {{ matrix.m }}×{{ matrix.n }} | {{ matrix.setting | plain }} | {{
"%.1f" | format(100 * matrix.energy) }} % | {{ "%.4f" | format(matrix.relative_error) }} |
{% endfor %}
{% endif %}
"""
)
EXPORT_CARD = ENVIRONMENT.from_string(
    """---
{{ metadata }}
---
{{ mark }}

# For {{ engine | plain }}, {{ form | plain }}

{% for line in lines %}
- {{ line | code }}
{% endfor %}
{% if example %}

```python
{{ example }}
```
{% endif %}
"""
)
