"""The model card: what was made of which model and how, what came of it, how to load it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, constants

from ..files import CARD_FILE

logger = logging.getLogger(__name__)


# A card with this line is written anew by every push.
MARK = "<!-- Written by lightformers. Remove this line to keep your changes when you push again. -->"
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
METRICS = {"bleu": "BLEU", "chrf": "chrF", "comet": "COMET"}
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModel": "feature-extraction",
}


def inherited_metadata(folder: Path, hub_name: str | None) -> dict[str, str | list[str]]:
    """Licence, languages and task that the card of a model names, for the cards of what is made from it.

    Args:
        folder: where the model lies; its card is the `README.md` there. Without one, or with metadata that cannot be
            read, nothing is inherited.
        hub_name: the model's name on the Hub, which becomes `base_model`; `None` for a folder.
    """
    metadata: dict[str, str | list[str]] = {"base_model": hub_name} if hub_name else {}
    try:
        text = (folder / CARD_FILE).read_text(encoding="utf-8")
        if not text.lstrip().startswith("---"):  # no metadata: nothing to warn of
            return metadata
        card = ModelCard(text, ignore_metadata_errors=True)
    except FileNotFoundError:
        return metadata
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning(f"The metadata of {folder / CARD_FILE} cannot be read, so nothing is inherited: {reason}")
        return metadata
    for field in INHERITED:
        value = card.data.get(field)
        values = ["no" if item is False else item for item in (value if isinstance(value, list) else [value])]
        if all(isinstance(item, str) for item in values):  # YAML reads the code of Norwegian as a truth value
            metadata[field] = values if isinstance(value, list) else values[0]
    link = metadata.get("license_link")
    if hub_name and isinstance(link, str) and "://" not in link:  # a file of the source's repository
        metadata["license_link"] = f"{constants.ENDPOINT}/{hub_name}/blob/main/{link}"
    return metadata


def read_results(file: Path, parameters: int) -> dict:
    """What `lightformers evaluate --json` wrote about a model of so many unique parameters.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, or measurements of another model.
    """
    try:
        results = json.loads(Path(file).read_text(encoding="utf-8"))
        measured = results["model"]["parameters"]
        shown = {key: results[key] for key in ("model", "data", "source", "target", "sentences", "generation")}
        # A path of this machine is nobody's business.
        shown |= {"data": Path(results["data"]).name, "rows": _rows(results)}
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is not there: `lightformers evaluate … --json {file}` writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} holds no results, as `lightformers evaluate … --json FILE` writes them") from None
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
        ("BLEU", "bleu", "{:.1f}".format),
        ("chrF", "chrf", "{:.1f}".format),
        ("COMET", "comet", "{:.4f}".format),
        ("unique parameters", "parameters", "{:,}".format),
        ("megabytes on disk", "disk_bytes", lambda size: f"{size / 1e6:,.1f}"),
        ("peak memory, megabytes", "memory_bytes", lambda size: f"{size / 1e6:,.0f}"),
        ("tokens/s, one core", "tokens_per_second", "{:.1f}".format),
    )
    head = ["", "this model"] + ([_code(Path(results["teacher"]["name"]).name)] if results["teacher"] else [])
    rows = [
        [label, *(show(column[field]) for column in columns)]
        for label, field, show in measures
        if all(column.get(field) is not None for column in columns)
    ]
    rows[-1][1] += ratio
    return [head, *rows]


def evaluation_results(results: Sequence[dict], task: str) -> list[EvalResult]:
    """The same as entries of a card's `model-index`, of which the Hub makes a table."""
    return [
        EvalResult(
            task_type=task,
            dataset_type=result["data"],
            dataset_name=f"{result['data']} ({result['source']}-{result['target']})",
            metric_type=metric,
            metric_name=METRICS[metric],
            metric_value=round(result["model"][metric], 4),
        )
        for result in results
        for metric in METRICS
        if result["model"].get(metric) is not None
    ]


def model_card(facts: dict, *, name: str | None = None, steps: int | None = None, results: Sequence[dict] = ()) -> str:
    """The text of a model card, whatever foreign text it names made harmless.

    Args:
        facts: the content of `compression.json`; of a model that was not compressed only its keys `architecture`,
            `auto_class`, `parameters_after` and `bytes_after`.
        name: the model's name on the Hub; `None` where it has none yet.
        steps: how many steps it was trained.
        results: of `read_results`.
    """
    inherited, compressed = facts.get("inherited", {}), "source" in facts
    task = inherited.get("pipeline_tag") or TASKS.get(facts["auto_class"]) or ("translation" if results else None)
    metadata = ModelCardData(
        **inherited | {"pipeline_tag": task},
        library_name="transformers",
        tags=[facts["architecture"], *(("compression", "low-rank") if compressed else ())],
        model_name=name.rpartition("/")[2] if name and results else None,
        eval_results=evaluation_results(results, task) if name and results else None,
    )
    matrices = facts.get("matrices", [])
    ranks = [matrix["rank"] for matrix in matrices if matrix["rank"] is not None and matrix["width"] is None]
    forms = {
        "ranks": ranks,
        "narrower": sum(matrix["width"] is not None for matrix in matrices),
        "dense": sum(matrix["form"] == "dense" for matrix in matrices),
    }
    return CARD.render(
        facts,
        metadata=metadata.to_yaml(),
        mark=MARK,
        name=name,
        steps=steps,
        results=results,
        labels=METRICS,
        compressed=compressed,
        **forms,
    )


def _code(text: object) -> str:
    """A code span of one line, which nothing in `text` ends."""
    return f"`{' '.join(''.join(c for c in str(text) if c not in '`|').split()) or ' '}`"


ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
ENVIRONMENT.filters["code"] = _code
CARD = ENVIRONMENT.from_string(
    """---
{{ metadata }}
---
{{ mark }}

# {% if compressed %}{{ source | code }}, compressed{% else %}{{ name | code }}{% endif %}


{% if compressed %}
A `{{ architecture }}` model: {{ source | code }} ({{ family | code }}) with its matrices made smaller
{%- if calibration %}, errors weighed on {{ calibration | code }}{% endif %}
{%- for stack, (stored, depths) in groups.items() if stored != depths %}, its {{ depths }} {{ stack }} layers sharing
{{ stored }} stored ones{% endfor %}. Of its {{ matrices | length }} matrices
{{ ranks | length }} became products of two thin ones
{%- if ranks %} (ranks {{ ranks | min }} to {{ ranks | max }}){% endif %}
{%- if narrower %}, {{ narrower }} lost attention width or neurons{% endif %}, {{ dense }} stayed as they were.

| | before | after | ratio |
|---|---|---|---|
| unique parameters | {{ "{:,}".format(parameters_before) }} | {{ "{:,}".format(parameters_after) }} | {{
"%.2f" | format(parameters_before / parameters_after) }} |
| megabytes | {{ "%.1f" | format(bytes_before / 1e6) }} | {{ "%.1f" | format(bytes_after / 1e6) }} | {{
"%.2f" | format(bytes_before / bytes_after) }} |

{% if steps %}
It was trained for {{ "{:,}".format(steps) }} steps after that.
{% else %}
Compression alone costs quality; fine-tune it before use.
{% endif %}
{% else %}
A `{{ architecture }}` model of {{ "{:,}".format(parameters_after) }} unique parameters in {{
"%.1f" | format(bytes_after / 1e6) }} megabytes
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

{% for metric in ("bleu", "chrf") if result.model[metric ~ "_signature"] %}
{{ labels[metric] }}: {{ result.model[metric ~ "_signature"] | replace("|", " ") | code }}.
{% endfor %}

{% endfor %}
{% endif %}
## Load it

```python
from transformers import {{ auto_class }}, AutoTokenizer

# Needs torch, transformers, and what the tokenizer needs: Marian's, for example, sentencepiece.
# The model's code lies beside its weights. After `import lightformers_hf` nothing needs trust_remote_code.
model = {{ auto_class }}.from_pretrained("{{ name or 'PATH' }}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{{ name or 'PATH' }}", trust_remote_code=True)
{% if auto_class in ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM") %}
inputs = tokenizer(["A sentence."], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))
{% endif %}
```

Code from elsewhere is best pinned: `revision="…"` with the commit that you have read.
{% if compressed %}

## How it was made

`lightformers convert` with these options, everything else as it comes:

```json
{{ options | tojson(indent=1) }}
```

| matrix | shape | rank | energy kept | relative error |
|---|---|---|---|---|
{% for matrix in matrices %}
| {{ matrix.name | code }} | {{ matrix.m }}×{{ matrix.n }} | {{ matrix.form }} | {{
"%.1f" | format(100 * matrix.energy) }} % | {{ "%.4f" | format(matrix.relative_error) }} |
{% endfor %}
{% endif %}
"""
)
