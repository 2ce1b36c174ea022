"""Commands that look inside: `analyze`, `report`, `parameters`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .output import CHECKPOINT, DATA, PLACE, Answer, Argument, check_installed, check_new_folder, command, option
from .use import (
    AT_LEAST_ONE,
    DATA_HELP,
    DEVICE,
    FILE,
    MAX_NEW_TOKENS,
    MAX_SAMPLES,
    METRIC,
    NUM_BEAMS,
    SOURCE_LANG,
    SPLIT,
    TARGET_LANG,
    generation_options,
    languages,
)


@command(
    Argument(
        "models",
        type=CHECKPOINT,
        nargs=-1,
        required=True,
        about="Folders or Hub names of checkpoints, shown side by side.",
    ),
    option("--data", type=DATA, required=True, help=DATA_HELP),
    option("--output", "-o", type=FILE, help="Folder for a picture of every measure, for light and for dark pages."),
    option("--overwrite", is_flag=True, help="Replace what the folder holds, if a command wrote it."),
    SOURCE_LANG,
    TARGET_LANG,
    SPLIT,
    MAX_SAMPLES,
    DEVICE,
)
def analyze(
    models: tuple[str, ...],
    data: str,
    output: Path | None,
    overwrite: bool,
    source_lang: str | None,
    target_lang: str | None,
    **options: Any,
) -> Answer:
    """Look inside checkpoints by the papers' measures: heads, tokens, neurons, MACs, memory, singular values.

    Head diversity, token uniformity, activated neurons: layer by layer, while the model reads the text's two sides.
    MACs and memory of the matrices follow from the shapes, the steps to convergence from a trainer_state.json beside
    the weights. Pictures need pip install 'lightformers_hf[demo]'.

    Example: lightformers analyze ./teacher ./small --data test.jsonl --output inside
    """
    inputs = [*models, data]
    if output is not None:
        check_installed("matplotlib", "demo", "--output")
        check_new_folder(output, overwrite, inputs)
    from ..evaluation.analysis import analysis_table
    from ..evaluation.analysis import analyze as run
    from ..files import atomic_output

    with atomic_output(output, overwrite=overwrite, inputs=inputs) if output else nullcontext() as folder:
        analyses = run(list(models), data, **languages(source_lang, target_lang), **options, progress=True)
        if folder:
            from ..evaluation.plots import draw_analyses

            draw_analyses(analyses, folder)
    return Answer(
        [analysis.to_dict() for analysis in analyses], draw=lambda console: console.print(analysis_table(analyses))
    )


@command(
    Argument("model", type=CHECKPOINT, about="What convert or a training run wrote: folder, or Hub name."),
    option("--output", "-o", type=FILE, default="report.html", help="The page to write, in place of what is there."),
    option(
        "--teacher",
        type=CHECKPOINT,
        help="What it was made of: adds singular values with the chosen ranks, and its translations.",
    ),
    option("--data", type=DATA, help="Parallel text, as for evaluate: adds sample translations."),
    option(
        "--results",
        type=FILE,
        multiple=True,
        help="What evaluate --json wrote, of this model or others: adds quality against size and speed; or "
        "benchmark engines --json. Repeatable.",
    ),
    METRIC,
    option("--samples", type=AT_LEAST_ONE, default=8, help="Translations shown, evenly spread over the data."),
    SOURCE_LANG,
    TARGET_LANG,
    SPLIT,
    NUM_BEAMS,
    MAX_NEW_TOKENS,
)
def report(
    model: str,
    output: Path,
    source_lang: str | None,
    target_lang: str | None,
    num_beams: int | None,
    max_new_tokens: int | None,
    **options: Any,
) -> Answer:
    """Write one HTML page of what became of a model: plan, pictures, translations beside the teacher's.

    The page holds all of it, loads nothing, and is light or dark as its reader's browser. The plan and the errors come
    from compression.json, the training curve from trainer_state.json. Needs pip install 'lightformers_hf[demo]'.

    Example: lightformers report ./small --teacher ./teacher --data test.jsonl --results results.json
    """
    check_installed("matplotlib", "demo", "report")
    from ..files import check_file

    check_file(output, [model, *(options[name] for name in ("teacher", "data")), *options["results"]])
    from ..evaluation.page import report_page
    from ..files import write_whole

    generation = generation_options(num_beams=num_beams, max_new_tokens=max_new_tokens)
    page = report_page(model, **languages(source_lang, target_lang), **options, progress=True, **generation)
    with write_whole(output) as file:
        file.write(page.encode())
    return Answer({"output": str(output)}, [f"Written to {output}: open it in a browser."])


@command(
    Argument(
        "models", type=PLACE, nargs=-1, about="Recipes (.yaml), folders or Hub names. Default: the papers' tables."
    ),
    option(
        "--vocab-size", type=AT_LEAST_ONE, help="Tokens of recipes' models. Default: their tokenizer's, or head's."
    ),
    option("--table", default="", help="Only rows whose name contains this, e.g. 'Subformer T2'."),
)
def parameters(models: tuple[str, ...], vocab_size: int | None, table: str) -> Answer:
    """Count the parameters of recipes and models, without training or loading them; or print the papers' tables.

    Shared and tied parameters count once. A table has the printed count, ours, and the difference; the command exits
    with 1 where a row differs by more than its tolerance.

    Examples:

        lightformers parameters training/recipes/multi30k/lightformer.yaml --vocab-size 8000

        lightformers parameters --table PartialFormer
    """
    if models:
        if table:
            raise ValueError("--table is of the papers' tables: leave it out, or the models")
        from ..evaluation.parameters import model_parameters

        found = {place: model_parameters(place, vocab_size) for place in models}
        return Answer(found, [f"{count:15,}  {place}" for place, count in found.items()])
    if vocab_size is not None:
        raise ValueError("--vocab-size is of a recipe's model: name a recipe")
    from ..evaluation.parameters import count_parameters, parameter_table

    counts = count_parameters(table)
    return Answer(
        [count.to_dict() for count in counts],
        draw=lambda console: console.print(parameter_table(counts)),
        exit_code=0 if all(count.within for count in counts) else 1,
    )
