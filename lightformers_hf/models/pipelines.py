"""The pipelines `translation`, `summarization` and `text2text-generation` of transformers 4; the sentences of texts.

Version 5 of transformers removed these pipelines. Arguments, keys and results are those of version 4.57, except that
translations are made sentence by sentence, that a list is translated in batches of similar lengths, and that mBART-25
reads the target language once. This file travels with a checkpoint, for `pipeline("translation", model=...,
trust_remote_code=True)`.
"""

import difflib
import enum
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.pipelines import Pipeline
from transformers.utils.logging import get_logger

try:
    from sentencex import segment
except ImportError:  # users without the package may lack it
    segment = None

logger = get_logger(__name__)

# Places where a sentence that is too long is split: behind a mark, else behind a space.
PLACES = (r"[,;:–—)]\s+|[、，；：）]", r"\s+")
SOURCE_LANGUAGES = ("source_lang", "src_lang")  # attributes of tokenizers of translation models
LANGUAGE = re.compile(r"[a-z]{2}(?=[_-]|$)")  # the language at the beginning of a code: `de_DE`
CODE = re.compile(r"\s*(>>[^<>\s]+<<)\s*")  # the target language of a source of multilingual Marian models
OTHER_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # special tokens that are no language
BATCH = 32  # sentences of a list in one batch, unless batch_size is given
WINDOW = 16  # batches of a data set that are sorted by length together
# Arguments of the base class. All others are arguments of a call.
BASE_ARGUMENTS = {"feature_extractor", "image_processor", "video_processor", "processor", "task", "device", "dtype"}
BASE_ARGUMENTS |= {"torch_dtype", "binary_output", "args_parser"}
# Version 4's defaults of settings that neither the call nor the checkpoint contains.
DEFAULTS = {"max_new_tokens": 256, "num_beams": 4}


# Sentences -----------------------------------------------------------------------------------------------------------
@dataclass
class SplitText:
    """A text as pieces that a model translates one by one."""

    pieces: list[str]  # together they are the text, without codes of a language
    prefixes: list[str]  # what stands before each piece, at first
    ids: dict[int, list[int]]  # {place of a piece: its token ids}, less pieces of spaces
    cut: int = 0  # sentences that were too long for the model

    def join(self, outputs: Mapping[int, str]) -> str:
        """The outputs of the pieces, with the spaces and line breaks around the pieces; those of one as it is."""
        if len(self.pieces) == 1:
            return outputs.get(0, "")
        parts = []
        for index, piece in enumerate(self.pieces):
            before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
            parts.append(before + outputs[index].strip() + after if index in outputs else piece)
        return "".join(parts)


def is_translator(tokenizer: PreTrainedTokenizerBase, prefix: str = "") -> bool:
    """Whether a tokenizer, or the prefix of every source, is of a translation model."""
    return prefix.startswith("translate") or any(hasattr(tokenizer, name) for name in SOURCE_LANGUAGES)


def split_texts(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    prefix: str = "",
    split: bool | None = None,
    cut: bool = False,
    language: str | None = None,
) -> list[SplitText]:
    """Split texts into sentences, and sentences of more than `limit` tokens at the mark or space nearest their middle.

    A `prefix` stands once before every sentence, also if its line begins with it. Instead of it, a code of the target
    language (`>>spa<<`) that a line begins with stands before every sentence of the line, and of the next lines
    without a code.
    If `split` is `False`, no text is split, and what is beyond `limit` tokens is cut; `None`: as of `is_translator`.
    `cut` cuts long sentences, too. `language` is that of the sources (`de`), by default that of the tokenizer.
    """
    split = is_translator(tokenizer, prefix) if split is None else split
    if split and segment is None:
        logger.warning_once("texts are not split into sentences, because sentencex is missing: pip install sentencex")
    named = (LANGUAGE.match(getattr(tokenizer, name, None) or "") for name in SOURCE_LANGUAGES)
    language = language or next((found[0] for found in named if found), "en")
    found = [_split(text, tokenizer, prefix, language if split else None) for text in texts]
    places = [(text, index) for text in found for index, piece in enumerate(text.pieces) if piece.strip()]

    def tokenize(sources: list[str]) -> list[list[int]]:
        # Without truncation or padding: a fast tokenizer keeps both as a state that other threads would see.
        return tokenizer(sources, verbose=False)["input_ids"] if sources else []

    sources = [text.prefixes[index] + text.pieces[index] for text, index in places]
    for (text, index), ids in zip(places, tokenize(sources), strict=True):
        text.ids[index] = ids

    def fit(piece: str, ids: list[int], prefix: str) -> Iterator[tuple[str, list[int]]]:
        halves = _halve(piece) if split and not cut and len(ids) > limit else []
        if len(ids) > limit and not halves:
            ids = cut_tokens(prefix + piece, ids, tokenizer, limit)
        if not halves:
            yield piece, ids
        for half, its in zip(halves, tokenize([prefix + half for half in halves]), strict=True):
            yield from fit(half, its, prefix)

    for text in found:
        text.cut = sum(len(ids) > limit for ids in text.ids.values())
        if text.cut:
            pieces = enumerate(zip(text.pieces, text.prefixes, strict=True))
            parts = [part for index, (piece, own) in pieces for part in fit(piece, text.ids.get(index, []), own)]
            text.pieces = [piece for piece, _ in parts]
            text.ids = {index: ids for index, (piece, ids) in enumerate(parts) if piece.strip()}
    return found


def _split(text: str, tokenizer: PreTrainedTokenizerBase, prefix: str, language: str | None) -> SplitText:
    """The sentences of every line with their prefixes, or, without a language, the whole text as one piece."""
    pieces: list[str] = []
    prefixes: list[str] = []
    given = prefix
    for line in re.split(r"([\r\n]+)", text) if language else [text]:
        code, line = split_code(line.removeprefix(given), tokenizer)
        prefix = code or prefix
        if not code:
            _warn_about_code(line, tokenizer)
        sentences = segment(language, line) if segment and language and line.strip() else [line]
        found = [sentence for sentence in sentences if sentence] or [""] * (not language)
        pieces += found
        prefixes += [prefix] * len(found)
    return SplitText(pieces or [""], prefixes or [prefix], {})


def cut_tokens(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[int]:
    """The token ids of a text, cut to `limit` as by `truncation=True`: special tokens stay, at both ends."""
    body = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    others = len(ids) - len(body)
    first = next((index for index in range(others + 1) if ids[index : index + len(body)] == body), 0)
    keep = max(limit - others, 0)
    kept = body[len(body) - keep :] if tokenizer.truncation_side == "left" else body[:keep]
    return ids[:first] + kept + ids[first + len(body) :]


def _halve(piece: str) -> list[str]:
    """A piece as two, split near its middle; an empty list where it is one character."""
    begin, end = len(piece) - len(piece.lstrip()), len(piece.rstrip())
    middle = (begin + end) // 2
    for pattern in PLACES:
        found = [match.end() for match in re.finditer(pattern, piece) if begin < match.start() and match.end() < end]
        if found:
            middle = min(found, key=lambda index: abs(index - middle))
            break
    return [piece[:middle], piece[middle:]] if begin < middle < end else []


# Languages -----------------------------------------------------------------------------------------------------------
def split_code(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Split a text into the code of the target language that it begins with, as a prefix, and the rest.

    Multilingual Marian models translate into the language whose token the source begins with: `>>spa<< Hund`. Without
    a code that the tokenizer has, the prefix is empty.
    """
    found = re.match(CODE, text)
    if not found or tokenizer.convert_tokens_to_ids(found[1]) in (None, tokenizer.unk_token_id):
        return "", text
    return f"{found[1]} ", text[found.end() :]


def only_code(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """`>>spa<< ` where this is the only target language of a multilingual Marian tokenizer, otherwise ""."""
    codes = getattr(tokenizer, "supported_language_codes", ())
    return f"{codes[0]} " if len(codes) == 1 else ""


def _warn_about_code(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning if a text begins with a code that a tokenizer with other codes of target languages lacks."""
    if found := re.match(CODE, text):
        known = sorted(token for token in tokenizer.get_vocab() if re.fullmatch(CODE, token))
        if near := difflib.get_close_matches(found[1], known) or known[:5]:
            logger.warning_once(
                f"{found[1]} is no target language of {tokenizer.name_or_path or 'the tokenizer'}, so it is "
                f"translated as text; there is {', '.join(near)}"
            )


def language_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return {code: token} of the languages of a multilingual tokenizer; empty if it has one pair, or none."""
    if not hasattr(tokenizer, "src_lang"):
        return {}
    others = {getattr(tokenizer, f"{kind}_token", None) for kind in OTHER_TOKENS}
    special = {token: token for token in tokenizer.all_special_tokens if token not in others}
    return dict(getattr(tokenizer, "lang_code_to_token", None) or special)  # M2M100's codes are no tokens


def find_unsupported(code: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """What is wrong with the code of a language that the tokenizer does not support; otherwise nothing."""
    known = [*language_tokens(tokenizer)]
    if code in known:
        return ""
    near = (
        difflib.get_close_matches(code, known)
        or [language for language in known if language[:2] == code[:2]]
        or known[-5:]
    )
    return f" is {code!r}, which {tokenizer.name_or_path} does not support; there is {' or '.join(near[:5])}"


def first_token(tokenizer: PreTrainedTokenizerBase, code: str) -> dict[str, int | None]:
    """Options of `generate()` by which a translation begins in the language of a code that the tokenizer has.

    The tokenizer's format decides. A code behind the end token (mBART-25) is the token that decoding starts from. A
    code before the text (mBART-50, NLLB, M2M100) is the first token that is generated.
    """
    number = tokenizer.convert_tokens_to_ids(language_tokens(tokenizer)[code])
    is_behind = not getattr(tokenizer, "prefix_tokens", True) and not getattr(tokenizer, "legacy_behaviour", False)
    if is_behind:
        return {"decoder_start_token_id": number, "forced_bos_token_id": None}
    return {"forced_bos_token_id": number}


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


# Pipelines -----------------------------------------------------------------------------------------------------------
class ReturnType(enum.Enum):
    """What a result contains: the tokens, or the text."""

    TENSORS = 0
    TEXT = 1


class Text2TextGenerationPipeline(Pipeline):
    """Text to text, by a sequence-to-sequence model: `pipeline("text2text-generation", model=...)`.

    The model is a checkpoint that `AutoModelForSeq2SeqLM` loads, or an exported one (`load_engine`). Settings that
    neither the call nor the checkpoint contains are `max_new_tokens=256` and `num_beams=4`.

    Raises:
        ValueError: a model without a tokenizer, or one that is no sequence-to-sequence model.

    Example:
        >>> pipeline("text2text-generation", model="google/flan-t5-small")("Translate to German: Good morning.")
        [{'generated_text': 'Guten Morgen.'}]
    """

    # A tokenizer is necessary. Exported models bring it themselves, which transformers does not expect.
    _load_tokenizer = None
    _load_processor = _load_image_processor = _load_feature_extractor = _load_video_processor = False
    return_name = "generated"
    find_language: Callable[[PreTrainedTokenizerBase], str] | None = None  # of the sources; the package sets it
    splits: bool | None = False  # whether texts are split into sentences; `None`: if the model translates

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any):
        self.is_engine = not isinstance(model, torch.nn.Module)
        if self.is_engine:
            if str(device := kwargs.pop("device", "cpu")) not in ("cpu", "-1"):
                raise ValueError(f"device is {device!r}, but the model was exported to run on the CPU: remove device")
            kwargs["device"] = "cpu"
            tokenizer = tokenizer or (AutoTokenizer.from_pretrained(model.folder) if model.folder else None)
        elif not model.config.is_encoder_decoder:
            raise ValueError(
                f"the model is a {model.config.model_type!r}: this pipeline needs an encoder-decoder, such as Marian, "
                "BART, T5 or LightFormer"
            )
        added = {"▁", "Ġ"} if tokenizer is None else {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        if tokenizer is None or not tokenizer.get_vocab().keys() - added - {"▁", "Ġ"}:
            raise ValueError(
                "the model has no tokenizer: give tokenizer, or a checkpoint whose folder holds one "
                "(tokenizer_config.json and the files that it names)"
            )
        if (framework := kwargs.pop("framework", "pt")) != "pt":
            raise ValueError(f"framework is {framework!r}, but the pipelines use PyTorch alone: remove framework")
        kwargs.pop("num_workers", None)
        self.batch_size = kwargs.pop("batch_size", None)
        names = [name for name in kwargs if name in BASE_ARGUMENTS]
        super().__init__(model=model, tokenizer=tokenizer, **{name: kwargs.pop(name) for name in names})
        self.prefix, self.task_settings = "", {}
        self.parameters = self._sanitize_parameters(**kwargs)
        if self.is_engine:
            self.prefix = model.prefix or only_code(self.tokenizer)
            return
        tasks = getattr(model.config, "task_specific_params", None) or {}
        pairs = [task for task in tasks if task.startswith("translation_")]
        if self.task == "translation" and pairs:
            first = self.task = pairs[0]
            logger.warning(f"the model has several pairs of languages: {first} is used, give the task of another")
        settings = dict(tasks.get(self.task) or {})
        prefix = settings.pop("prefix", None) or getattr(model.config, "prefix", None)
        self.prefix = prefix or only_code(self.tokenizer)
        self.task_settings = {
            name: value for name, value in settings.items() if hasattr(model.generation_config, name)
        }

    def __repr__(self) -> str:
        model = self.model.name if self.is_engine else type(self.model).__name__
        return f"{type(self).__name__}: {{'model': {model!r}, 'task': {self.task!r}, 'device': {self.device.type!r}}}"

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        return_type: ReturnType | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: Any = None,
        stop_sequence: str | None = None,
        split: bool | None = None,
        **generation: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Distribute the arguments of a call. `return_text` has no effect, as in version 4."""
        if return_tensors is not None and return_type is None:
            return_type = ReturnType.TENSORS if return_tensors else ReturnType.TEXT
        if stop_sequence is not None:
            stop = self.tokenizer.encode(stop_sequence, add_special_tokens=False)
            if len(stop) > 1:
                logger.warning(f"stop_sequence {stop_sequence!r} has several tokens: the first alone ends an output")
            generation["eos_token_id"] = stop[0]
        before = {"truncation": truncation, "split": split}
        after = {"return_type": return_type, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return _given(before), generation, _given(after)

    def __call__(
        self, inputs: Any, *args: Any, num_workers: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Return the outputs of texts.

        Args:
            inputs: a text, a list of texts, or a data set (`KeyDataset`) or iterator of texts.
            batch_size: sentences in one batch. A list and a data set have 32 by default, an iterator 1.
            return_tensors: return `..._token_ids`, the tokens, instead of `..._text`.
            clean_up_tokenization_spaces: remove spaces before punctuation.
            truncation: cut a sentence that is longer than the model's positions instead of dividing it.
            stop_sequence: text whose first token ends an output.
            split: split texts into sentences; only translations are split by default.
            kwargs: arguments of `generate()`. A text has `num_return_sequences` results.

        Returns:
            Of a text, a list of its results, which are dictionaries. Of a list, one result for each text, or a list of
            results for each text if they have several. Of a data set or an iterator, an iterator over the lists of
            the texts.

        Raises:
            TypeError: an input that is no text.
        """
        if args:
            logger.warning(f"Ignoring args : {args}")
        size = batch_size or self.batch_size
        given = self._sanitize_parameters(**kwargs)
        parameters = [{**before, **call} for before, call in zip(self.parameters, given, strict=True)]
        if isinstance(inputs, str):
            return self._run([inputs], size or BATCH, parameters)[0]
        if isinstance(inputs, list | tuple):
            results = self._run(inputs, size or BATCH, parameters)
            return [result[0] for result in results] if all(len(result) == 1 for result in results) else results
        if isinstance(inputs, Iterator):
            return self._stream(inputs, size or 1, size or 1, parameters)
        if isinstance(inputs, Iterable) or hasattr(inputs, "__getitem__"):
            texts = inputs if isinstance(inputs, Iterable) else (inputs[number] for number in range(len(inputs)))
            return self._stream(iter(texts), WINDOW * (size or BATCH), size or BATCH, parameters)
        raise TypeError(f"the input has the type {type(inputs).__name__}: expected a text, or texts")

    def _stream(
        self, texts: Iterator[str], window: int, batch_size: int, parameters: list[dict[str, Any]]
    ) -> Iterator[list[dict[str, Any]]]:
        while some := list(islice(texts, window)):
            yield from self._run(some, batch_size, parameters)

    def _run(
        self, texts: Sequence[str], batch_size: int, parameters: list[dict[str, Any]]
    ) -> list[list[dict[str, Any]]]:
        """Return the results of texts, whose sentences are batched by length."""
        before, generation, after = parameters
        split, languages = self.preprocess(texts, **before)
        jobs = [(number, index, ids) for number, text in enumerate(split) for index, ids in text.ids.items()]
        jobs.sort(key=lambda job: -len(job[2]))
        if self.tokenizer.pad_token_id is None and len(jobs) > 1:
            batch_size = 1
        outputs: list[dict[int, torch.Tensor]] = [{} for _ in split]
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            sequences = self.forward(self._pad([ids for *_, ids in batch]), **{**languages, **generation})
            for (number, index, _), rows in zip(batch, sequences["output_ids"], strict=True):
                outputs[number][index] = rows
        return [self.postprocess((text, rows), **after) for text, rows in zip(split, outputs, strict=True)]

    def _pad(self, batch: list[list[int]]) -> dict[str, torch.Tensor]:
        if len(batch) == 1:
            ids = torch.tensor(batch)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        padded = self.tokenizer.pad({"input_ids": batch}, return_tensors="pt", verbose=False)
        return {name: padded[name] for name in ("input_ids", "attention_mask")}

    def preprocess(
        self, inputs: Sequence[str], truncation: Any = False, split: bool | None = None
    ) -> tuple[list["SplitText"], dict[str, Any]]:
        """Return the texts as sentences of token ids, and arguments of `generate()`."""
        for text in inputs:
            if not isinstance(text, str):
                raise TypeError(
                    f"the input contains the type {type(text).__name__}: expected texts (strings), such as one column "
                    "of a data set: KeyDataset(data, 'text')"
                )
        split = self.splits if split is None else split
        split = is_translator(self.tokenizer, self.prefix) if split is None else split
        positions = self.model.longest_input if self.is_engine else None
        positions = positions or getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        cut = truncation not in (False, "do_not_truncate") and str(truncation).rpartition(".")[2] != "DO_NOT_TRUNCATE"
        limit = min(positions or sys.maxsize, self.tokenizer.model_max_length if split or cut else sys.maxsize)
        language = self.find_language(self.tokenizer) if self.find_language else None
        options: dict[str, Any] = {"prefix": self.prefix, "split": split, "cut": cut, "language": language}
        found = split_texts(inputs, self.tokenizer, limit, **options)
        if (number := sum(text.cut for text in found)) and not cut:
            done = "divided at punctuation or cut" if split else "cut"
            logger.warning(f"{number} inputs have more than {limit} tokens, and were {done}")
        return found, {}

    def _forward(self, model_inputs: dict[str, torch.Tensor], **generation: Any) -> dict[str, torch.Tensor]:
        """Sentences (B, S) → `output_ids` (B, results, T), which begin with the start token."""
        if self.is_engine:
            return {"output_ids": self._run_engine(model_inputs, generation)}
        arguments = {"return_dict_in_generate": False, **self._settings(generation)}
        output = self.model.generate(**model_inputs, **arguments)
        return {"output_ids": output.unflatten(0, (len(model_inputs["input_ids"]), -1))}

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `generate()`: those of the call, of the task, and the defaults of version 4."""
        settings = {**self.task_settings, **given}
        if "max_new_tokens" in given and "max_length" not in given:
            settings["max_length"] = None  # which would only cause a warning
        if "generation_config" in given:
            return given
        known = {**self.model.generation_config.to_diff_dict(), **settings}
        for name, value in DEFAULTS.items():
            if known.get(name) is None and not (name == "max_new_tokens" and known.get("max_length")):
                settings[name] = value
        return settings

    def _run_engine(self, model_inputs: dict[str, torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
        """Run an exported model: (B, S) → (B, 1, T)."""
        search, options = self.model.search, dict(given)
        if (most := options.pop("max_length", None)) is not None:
            options.setdefault("max_new_tokens", most - 1)
        for name, own in (("forced_bos_token_id", search.forced_start), ("decoder_start_token_id", search.start)):
            if options.pop(name, own) != own:
                raise ValueError("the model was exported for another language than tgt_lang: give its checkpoint")
        fixed = {"num_return_sequences": 1, "do_sample": False}
        others = [name for name, value in options.items() if fixed.get(name, ...) != value]
        if unknown := sorted({*others} - {"num_beams", "max_new_tokens"}):
            raise ValueError(
                f"{unknown[0]} is no setting of an exported model, which has num_beams, max_new_tokens and "
                f"max_length: remove {unknown[0]}, or give the checkpoint"
            )
        rows = self.model.generate(model_inputs, **{name: options[name] for name in others})
        length = max(map(len, rows))
        rows = [[search.start, *row, *[search.pad] * (length - len(row))] for row in rows]
        return torch.tensor(rows).unsqueeze(1)

    def postprocess(
        self,
        model_outputs: tuple["SplitText", dict[int, torch.Tensor]],
        return_type: ReturnType = ReturnType.TEXT,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the results of a text: its sentences' outputs (results, T) joined."""
        text, outputs = model_outputs
        results = []
        for number in range(max(map(len, outputs.values()), default=1)):
            if return_type == ReturnType.TENSORS:
                rows = [self._without_padding(outputs[index])[number] for index in sorted(outputs)]
                ids = torch.cat(rows) if rows else torch.empty(0, dtype=torch.long)
                results.append({f"{self.return_name}_token_ids": ids})
                continue
            options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
            decoded = {index: self.tokenizer.decode(rows[number], **options) for index, rows in outputs.items()}
            results.append({f"{self.return_name}_text": text.join(decoded)})
        return results

    def _without_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """Results (results, T) without the padding that other texts of the batch caused."""
        filled = (rows != self.tokenizer.pad_token_id).any(dim=0).nonzero()
        return rows[:, : int(filled.max()) + 1] if len(filled) else rows[:, :1]


class SummarizationPipeline(Text2TextGenerationPipeline):
    """Summaries, with the key `summary_text`: `pipeline("summarization", model=...)`.

    Example:
        >>> pipeline("summarization", model="facebook/bart-large-cnn")(article, min_length=5, max_length=20)
        [{'summary_text': '...'}]
    """

    return_name = "summary"


class TranslationPipeline(Text2TextGenerationPipeline):
    """Translations, with the key `translation_text`: `pipeline("translation", model=...)`.

    Texts of translation models are split into sentences, and spaces and line breaks between sentences are kept. With
    the task `translation_xx_to_yy`, `xx` and `yy` are the languages of a multilingual model or the prefix of a T5.

    Args of a call, besides those of `Text2TextGenerationPipeline`:
        src_lang, tgt_lang: codes of the languages of a multilingual model. A model of one pair ignores them.

    Raises:
        ValueError: a code that the model does not support, or none for a multilingual model.

    Example:
        >>> pipeline("translation", model="Helsinki-NLP/opus-mt-de-en")("Zwei Hunde spielen im Schnee.")
        [{'translation_text': 'Two dogs play in the snow.'}]
    """

    return_name = "translation"
    splits = None

    def _sanitize_parameters(  # type: ignore[override]
        self, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        languages = {name: kwargs.pop(name, None) for name in ("src_lang", "tgt_lang")}
        before, generation, after = super()._sanitize_parameters(**kwargs)
        words = self.task.split("_")
        if not any(languages.values()) and len(words) == 4:
            languages = {"src_lang": words[1], "tgt_lang": words[3]}  # translation, xx, to, yy
        return before | _given(languages), generation, after

    def preprocess(
        self,
        inputs: Sequence[str],
        truncation: Any = False,
        split: bool | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> tuple[list["SplitText"], dict[str, Any]]:
        """Extend the base class: the languages of a multilingual model."""
        tokens, tokenizer = language_tokens(self.tokenizer), self.tokenizer
        if not tokens:
            pair = {"src_lang": (src_lang, "source_lang"), "tgt_lang": (tgt_lang, "target_lang")}
            for name, (code, attribute) in pair.items():
                if code and (own := getattr(tokenizer, attribute, None)) and own != code:
                    logger.warning(f"{name} {code!r} has no effect: the model has one pair of languages, with {own!r}")
            return super().preprocess(inputs, truncation, split)
        before = tokenizer.src_lang
        source, target = src_lang or before, tgt_lang or getattr(tokenizer, "tgt_lang", None)
        configured = (
            self.model.search.forced_start if self.is_engine else self.model.generation_config.forced_bos_token_id
        )
        if source is None or (target is None and configured is None):
            raise ValueError("Translation requires a `src_lang` and a `tgt_lang` for this model")
        for name, code in (("src_lang", source), ("tgt_lang", target)):
            if code is not None and (fault := find_unsupported(code, tokenizer)):
                raise ValueError(f"{name}{fault}")
        tokenizer.src_lang = source
        try:
            found, _ = super().preprocess(inputs, truncation, split)
        finally:
            tokenizer.src_lang = before
        if target is None:
            return found, {"forced_bos_token_id": configured}
        return found, first_token(tokenizer, target)


PIPELINES = {
    "translation": TranslationPipeline,
    "summarization": SummarizationPipeline,
    "text2text-generation": Text2TextGenerationPipeline,
}
