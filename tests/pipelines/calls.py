"""Thirty calls of pipelines from the documentation of transformers 4.57, for tiny models: both versions run this file.

Sources: docstrings of the pipelines, `pipeline_tutorial.md`, `task_summary.md`, `tasks/translation.md`,
`tasks/summarization.md`, and the pages of Marian, NLLB, M2M100, mBART, T5, BART and Pegasus.
"""

import json
from pathlib import Path

from torch.utils.data import Dataset
from transformers import GenerationConfig, pipeline
from transformers.pipelines.pt_utils import KeyDataset

APPLE = "An apple a day, keeps the doctor away"
LEGUMES = "translate English to French: Legumes share resources with nitrogen-fixing bacteria."
MANUEL = "answer: Manuel context: Manuel has created RuPERTa-base with the support of HF-Transformers and Google"
SYRIA = "UN Chief says there is no military solution in Syria"
PLANTS = "Plants are remarkable organisms that produce their own food using a method called photosynthesis."
WORK = "In this work, we presented the Transformer, the first sequence transduction model based entirely on attention"
HELLO = ["Hello, how are you?", "My name is Sarah and I live in London", "How old are you?"]
CODES = {
    "nllb": {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"},
    "m2m_100": {"src_lang": "en", "tgt_lang": "fr"},
    "mbart50": {"src_lang": "en_XX", "tgt_lang": "fr_XX"},
}
NAMES = ("marian", "bart", "pegasus", "t5", *CODES)
TASKS = {  # of google-t5/t5-base, with shorter outputs
    "summarization": {
        "early_stopping": True,
        "length_penalty": 2.0,
        "max_length": 26,
        "min_length": 6,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "prefix": "summarize: ",
    },
    "translation_en_to_fr": {
        "early_stopping": True,
        "max_length": 22,
        "num_beams": 4,
        "prefix": "translate English to French: ",
    },
}


class Texts(Dataset):
    """A data set of rows."""

    def __len__(self):
        return len(HELLO)

    def __getitem__(self, number):
        return {"text": HELLO[number]}


def generator():
    yield from HELLO


# (task, model, arguments of `pipeline`, input, arguments of the call)
CALLS = [
    ("translation_en_to_fr", "t5", {}, "How old are you?", {}),
    ("translation_en_to_fr", "t5", {"framework": "pt"}, HELLO, {"max_length": 12}),
    ("translation_xx_to_yy", "t5", {}, LEGUMES, {}),
    ("translation", "t5", {}, "How old are you?", {"max_new_tokens": 9}),
    ("text2text-generation", "t5", {}, MANUEL, {}),
    ("text2text-generation", "t5", {"max_length": 15}, MANUEL, {"return_text": True}),
    ("text2text-generation", "t5", {}, [MANUEL, LEGUMES], {"num_return_sequences": 2}),
    ("summarization", "t5", {}, WORK, {}),
    ("summarization", "t5", {"tokenizer": "t5"}, APPLE, {"min_length": 5, "max_length": 20}),
    ("summarization", "bart", {}, APPLE, {"min_length": 5, "max_length": 20}),
    ("summarization", "bart", {}, [APPLE, WORK], {"clean_up_tokenization_spaces": True}),
    ("summarization", "bart", {}, WORK, {"truncation": True, "no_repeat_ngram_size": 2}),
    ("summarization", "pegasus", {}, PLANTS, {"length_penalty": 0.5, "max_length": 14}),
    ("summarization", "pegasus", {"batch_size": 2}, [PLANTS, WORK, APPLE], {"return_tensors": False}),
    ("text2text-generation", "bart", {}, WORK, {"return_tensors": True}),
    ("text2text-generation", "bart", {}, WORK, {"generation_config": {"max_new_tokens": 7, "num_beams": 3}}),
    ("text2text-generation", "pegasus", {}, APPLE, {"num_beams": 1, "repetition_penalty": 1.5}),
    ("translation_en_to_de", "marian", {"device": "cpu", "dtype": "float32"}, HELLO[0], {}),
    ("translation", "marian", {}, HELLO, {}),
    ("translation", "marian", {"device": -1}, HELLO, {"batch_size": 2, "num_workers": 0}),
    ("translation", "marian", {}, HELLO[0], {"num_return_sequences": 3, "num_beams": 5}),
    ("translation", "marian", {}, HELLO[1], {"return_tensors": True, "num_beams": 1}),
    ("translation", "marian", {}, HELLO[1], {"stop_sequence": "London"}),
    ("translation", "marian", {}, "data set", {"batch_size": 2}),
    ("translation", "marian", {}, "generator", {}),
    ("translation", "nllb", CODES["nllb"], SYRIA, {}),
    ("translation", "nllb", {}, [SYRIA, HELLO[2]], {**CODES["nllb"], "max_length": 12}),
    ("translation_en_to_fr", "m2m_100", {}, SYRIA, {"num_beams": 2}),
    ("translation", "mbart50", CODES["mbart50"], SYRIA, {"return_tensors": True}),
    ("translation", "mbart50", {}, HELLO, {**CODES["mbart50"], "max_length": 10, "early_stopping": True}),
]
INPUTS = {"data set": lambda: KeyDataset(Texts(), "text"), "generator": generator}


def plain(result):
    """A result as JSON: iterators and tensors are lists."""
    if isinstance(result, dict):
        return {key: value if isinstance(value, str) else value.tolist() for key, value in result.items()}
    return [plain(one) for one in result]


def run(root: Path, call: tuple):
    """Return the result of a call with the models in the folders of `root`."""
    task, name, options, inputs, arguments = call
    options, arguments = dict(options), dict(arguments)
    if "tokenizer" in options:
        options["tokenizer"] = str(root / options["tokenizer"])
    if "generation_config" in arguments:
        own = GenerationConfig.from_pretrained(root / name)
        own.update(**arguments["generation_config"], max_length=None)
        arguments["generation_config"] = own
    pipe = pipeline(task, model=str(root / name), **options)
    return plain(pipe(INPUTS[inputs]() if str(inputs) in INPUTS else inputs, **arguments))


def prepare(folder: Path) -> None:
    """Give a checkpoint settings with which outputs differ, and the tasks of a T5. Four beams are version 4's, too."""
    changes = {"generation_config.json": {"num_beams": 4, "max_length": 24, "no_repeat_ngram_size": 2}}
    if folder.name == "t5":
        changes["config.json"] = {"task_specific_params": TASKS}
    for name, fields in changes.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | fields))
