"""Registration of the pipelines of transformers 4 (`models/pipelines.py`), which also run exported models.

`import lightformers_hf` calls `register`. Two interfaces of transformers are changed: the list of tasks that version 5
removed, and the lookup of a task, because `translation_xx_to_yy` is none of the names that can be registered.
"""

import os
from typing import Any

import torch
import transformers
from transformers import pipelines

from .models.configuration_lightformer import PIPELINE_CLASSES
from .models.pipelines import PIPELINES, Text2TextGenerationPipeline

T5_BASE = ("google-t5/t5-base", "a9723ea")
# Task → model without the argument `model`, as in version 4: of all languages, or of a pair of languages.
DEFAULTS: dict[str, dict[Any, Any]] = {
    "translation": {("en", language): {"model": T5_BASE} for language in ("fr", "de", "ro")},
    "summarization": {"model": ("sshleifer/distilbart-cnn-12-6", "a4f8f3e")},
    "text2text-generation": {"model": T5_BASE},
}


class AutoModelForSeq2SeqLM(transformers.AutoModelForSeq2SeqLM):
    """The class of transformers, which also loads folders that `export` wrote.

    It has the name of its base class, because a saved pipeline names the class of its model in transformers.
    """

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, *args: Any, **options: Any) -> Any:
        """Return a model of transformers, or an `Engine`."""
        from .engines.engine import load_engine  # which needs a second, and only a pipeline uses
        from .loading import is_export

        if is_export(name):
            return load_engine(name, threads=torch.get_num_threads())
        return super().from_pretrained(name, *args, **options)


def find_language(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """As `engines.engine.source_language`."""
    from .engines.engine import source_language

    return source_language(tokenizer)


def register() -> None:
    """Register the pipelines in transformers, except tasks that it has."""
    registry, removed = pipelines.PIPELINE_REGISTRY, getattr(pipelines, "REMOVED_TASKS", {})
    Text2TextGenerationPipeline.find_language = staticmethod(find_language)
    find = registry.check_task
    for task in PIPELINE_CLASSES.keys() - registry.supported_tasks.keys():
        removed.pop(task, None)
        registry.register_pipeline(task, PIPELINES[task], pt_model=AutoModelForSeq2SeqLM, type="text")
        # A copy: a saved pipeline writes what was registered to JSON, which has no place for pairs of languages.
        registry.supported_tasks[task] = registry.supported_tasks[task] | {"default": DEFAULTS[task]}

    def check_task(task: str) -> tuple[str, dict[str, Any], Any]:
        """Extend the base class: `translation_xx_to_yy` is the task `translation` with two languages."""
        if task in registry.supported_tasks or not task.startswith("translation"):
            return find(task)
        words = task.split("_")
        if len(words) != 4 or words[0] != "translation" or words[2] != "to":
            raise KeyError(f"Invalid translation task {task}, use 'translation_XX_to_YY' format")
        return "translation", registry.supported_tasks["translation"], (words[1], words[3])

    registry.check_task = check_task
