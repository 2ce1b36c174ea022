"""The two languages of a translation: columns of the data, codes of a multilingual tokenizer, prefixes of sources.

Importing this file imports nothing else: reading options needs no library.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from .options import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
# Two-letter codes of languages with three letters (ISO 639-2, 639-3; members of a group have the code of the group).
ISO_639 = dict(
    pair.split(":")
    for pair in """
    aar:aa abk:ab acm:ar acq:ar adp:dz aeb:ar afr:af ajp:ar aka:ak alb:sq als:sq amh:am apc:ar ara:ar arb:ar arg:an
    arm:hy ars:ar ary:ar arz:ar asm:as ava:av ave:ae aym:ay ayr:ay azb:az aze:az azj:az bak:ba bam:bm baq:eu bel:be
    ben:bn bis:bi bod:bo bos:bs bre:br bul:bg bur:my cat:ca ces:cs cha:ch che:ce chi:zh chu:cu chv:cv cls:sa cmn:zh
    cor:kw cos:co cre:cr cwd:cr cym:cy cze:cs dan:da deu:de div:dv drh:mn dut:nl dzo:dz ekk:et ell:el eng:en epo:eo
    esk:ik est:et eus:eu ewe:ee fao:fo fas:fa fat:ak fij:fj fin:fi fra:fr fre:fr fry:fy fuc:ff ful:ff fuv:ff gaz:om
    geo:ka ger:de gla:gd gle:ga glg:gl glv:gv gre:el grn:gn gug:gn guj:gu hat:ht hau:ha heb:he her:hz hin:hi hmo:ho
    hrv:hr hun:hu hye:hy ibo:ig ice:is ido:io iii:ii ike:iu iku:iu ile:ie ina:ia ind:id ipk:ik isl:is ita:it jav:jv
    jpn:ja kal:kl kan:kn kas:ks kat:ka kau:kr kaz:kk khk:mn khm:km kik:ki kin:rw kir:ky kmr:ku knc:kr kng:kg kom:kv
    kon:kg kor:ko kpv:kv kua:kj kur:ku lao:lo lat:la lav:lv lim:li lin:ln lit:lt ltz:lb lub:lu lug:lg lvs:lv mac:mk
    mah:mh mal:ml mao:mi mar:mr may:ms mkd:mk mlg:mg mlt:mt mol:ro mon:mn mri:mi msa:ms mya:my nau:na nav:nv nbl:nr
    nde:nd ndo:ng nep:ne nld:nl nno:nn nob:nb nor:no npi:ne nya:ny oci:oc ojg:oj oji:oj ori:or orm:om ory:or oss:os
    pan:pa pbt:ps pbu:ps per:fa pes:fa pli:pi plt:mg pol:pl por:pt prp:gu prs:fa pus:ps que:qu quy:qu quz:qu roh:rm
    ron:ro rum:ro run:rn rus:ru sag:sg san:sa scc:sr scr:hr sin:si slk:sk slo:sk slv:sl sme:se smo:sm sna:sn snd:sd
    som:so sot:st spa:es sqi:sq srd:sc srp:sr ssw:ss sun:su swa:sw swe:sv swh:sw tah:ty tam:ta tat:tt tel:te tgk:tg
    tgl:tl tha:th tib:bo tir:ti ton:to tsn:tn tso:ts tuk:tk tur:tr twi:ak uig:ug ukr:uk urd:ur uzb:uz uzn:uz ven:ve
    vie:vi vol:vo wel:cy wln:wa wol:wo xho:xh ydd:yi yid:yi yor:yo yue:zh zha:za zho:zh zsm:ms zul:zu zyb:za
    """.split()
)


def split_language(text: str | None) -> tuple[str | None, str | None]:
    """(column of the data, code of a multilingual tokenizer) of an option: `de=de_DE`, or `de` for both."""
    column, separator, code = (text or "").partition("=")
    return column or None, (code if separator else column) or None


def language_code(text: str | None, tokenizer: PreTrainedTokenizerBase | None = None) -> str | None:
    """The two-letter language (`de`) of an option or of a tokenizer's target; `None` if neither names one.

    Codes of three letters, such as NLLB's `deu_Latn`, become the code of two letters.
    """
    for name in (
        split_language(text)[1],
        getattr(tokenizer, "target_lang", None),
        getattr(tokenizer, "tgt_lang", None),
    ):
        if found := re.fullmatch(r"([a-z]{2,3})([_-].*)?", name or ""):
            language = found[1] if len(found[1]) == 2 else ISO_639.get(found[1])
            if language:
                return language
    return None


def split_prefix(text: str) -> tuple[str, str]:
    """Split an option into (column of the data, prefix of each of its texts); T5 has prefixes for its tasks.

    `de=translate German to English: ` ends with a space. Without one, the text after `=` is a code.
    """
    column, code = split_language(text)
    return column or "", code if code and code.endswith(" ") and "=" in text else ""


def named_columns(source: str | None, target: str | None) -> tuple[str | None, str | None]:
    """The columns that the options of two languages name: without codes, the source's with its prefix."""
    has_prefix = source is not None and split_prefix(source)[1]
    return source if has_prefix else split_language(source)[0], split_language(target)[0]


def task_prefixes(config: object) -> dict[str, str]:
    """Return {task: prefix of its sources} of a configuration.

    `task_specific_params` of a T5 has `{"translation_en_to_de": {"prefix": "translate English to German: "}}`.
    """
    tasks = getattr(config, "task_specific_params", None)
    named = tasks.items() if isinstance(tasks, dict) else ()
    found = {name: task.get("prefix") for name, task in named if isinstance(task, dict)}
    return {name: prefix for name, prefix in found.items() if prefix and isinstance(prefix, str)}


def code_prefix(tokenizer: PreTrainedTokenizerBase | None, target: str | None) -> str:
    """`>>spa<< ` for the target `spa` of a multilingual Marian tokenizer that has this code, else ""."""
    from .models.pipelines import split_code  # needs libraries

    token = f">>{split_language(target)[1]}<< "
    return token if tokenizer is not None and target and split_code(token, tokenizer)[0] else ""


def put_prefix(prefix: str, text: str) -> str:
    """A text behind a prefix, unless it begins with the prefix or with a code of another target language."""
    from .models.pipelines import CODE  # needs libraries

    has_code = prefix.startswith(">>") and re.match(CODE, text)
    return text if text.startswith(prefix) or has_code else prefix + text


def prefix_of(
    config: object, source: str, target: str | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """The prefix that `source` contains, otherwise that of the configuration for the two languages, or the code of the
    target language that a multilingual Marian `tokenizer` has, or "".

    The only prefix of a configuration is that of all sources, unless it is for a translation between other languages.
    The only code of a tokenizer is that of all sources.
    """
    from .models.pipelines import only_code  # needs libraries

    column, prefix = split_prefix(source)
    if prefix:
        return prefix
    goal = split_language(target)[0]
    tasks, task = task_prefixes(config), f"translation_{column}_to_{goal}"
    only = next(iter(tasks)) if len(tasks) == 1 else task
    if not (only.startswith("translation_") and language_code(column) and language_code(goal)):
        task = only
    return code_prefix(tokenizer, target) or tasks.get(task, "") or only_code(tokenizer)


def add_prefix(
    config: object, source: str, target: str | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """`source` unchanged if it contains a prefix, otherwise with that of `prefix_of`."""
    column, own = split_prefix(source)
    prefix, tasks = prefix_of(config, source, target, tokenizer), task_prefixes(config)
    if not prefix and source and tasks:
        warn_of_prefixes(source, ", ".join(tasks))
    return source if own or not prefix else f"{column}={prefix}"


@cache
def warn_of_prefixes(source: str, known: str) -> None:
    """Say once that no prefix of a model is put before its sources."""
    logger.warning(
        f"The configuration has prefixes for tasks ({known}), and none for {source!r}: texts stay as they are. If the "
        f"model reads them behind a prefix, give it, with a space at its end: --source-lang '{source}=summarize: '"
    )


def find_prefixes(
    config: object, source: str | None, target: str | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[str]:
    """Prefixes of sources: that of `prefix_of`, otherwise those of every task, if there are several, or the codes of
    every target language; at least "".
    """
    prefix = prefix_of(config, source or "", target, tokenizer)
    codes = [f"{code} " for code in getattr(tokenizer, "supported_language_codes", ())]
    tasks = list(task_prefixes(config).values())
    return [prefix] if prefix else tasks if len(tasks) > 1 else codes or [""]


def choose_prefix(
    config: object,
    source: str | None,
    target: str | None,
    *,
    name: str,
    columns: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> str:
    """Prefix of every source: that of `prefix_of`."""
    prefixes, prefix = task_prefixes(config), prefix_of(config, source or "", target, tokenizer)
    if prefix or not prefixes:
        return prefix
    known = ", ".join(prefixes)
    if columns and source:
        warn_of_prefixes(source, known)
        return ""
    if source or target:
        raise OptionError(
            "source_lang",
            " and ",
            "target_lang",
            f" are {source!r} and {target!r}, for which {name} has no prefix; it has those "
            f"of {known}. Give the languages of one of them, or a prefix that ends with a space: 'en=translate it: '",
        )
    logger.warning(
        f"{name} has a prefix for each of its tasks ({known}), and none is added: give source_lang and target_lang, "
        "or write a prefix before every text"
    )
    return ""


def keep_prefix(
    config: Any, source: str | None, target: str | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a prefix that is given, or the code of the target language, into `task_specific_params`, where
    `add_prefix` finds it.
    """
    (column, prefix), goal = split_prefix(source or ""), split_language(target)[0]
    prefix = prefix or code_prefix(tokenizer, target)
    column = column or getattr(tokenizer, "source_lang", None) or "source"
    if prefix and goal:
        tasks = dict(getattr(config, "task_specific_params", None) or {})
        config.task_specific_params = tasks | {f"translation_{column}_to_{goal}": {"prefix": prefix}}


def set_language_codes(
    tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None, *, columns: bool = True
) -> dict[str, int | None] | None:
    """Set the language codes of a multilingual tokenizer, and return the first token of a translation: `first_token`.

    Args:
        source, target: codes as the tokenizer has them, such as `de_DE` (mBART-50), `deu_Latn` (NLLB) or `de`
            (M2M100), or `COLUMN=CODE`. Without either nothing is done, and `None` returned. So it is where a plain
            name can be a column alone: the tokenizer has one pair of languages, or its pair was set before. Nor is
            anything done for a code that stands in the sources (`code_prefix`).
        columns: whether plain names can be columns. Otherwise they are languages, which the tokenizer must have.

    Raises:
        ValueError: one code alone, an unknown code, or one for a tokenizer without codes.
    """
    from .models.pipelines import find_unsupported, first_token, language_tokens  # needs libraries

    if not (source or target):
        return None
    if source and split_prefix(source)[1]:
        source = split_prefix(source)[0]
    explicit = "=" in f"{source}{target}"
    if not hasattr(tokenizer, "src_lang"):
        own = [getattr(tokenizer, side, None) for side in ("source_lang", "target_lang")]
        if code_prefix(tokenizer, target):
            target, source = own[1], source if columns else split_language(source)[1]
        elif explicit:
            raise OptionError(
                "source_lang",
                " and ",
                "target_lang",
                f" are {source!r} and {target!r}, but codes go with a multilingual "
                "tokenizer only: give columns alone, or before = that of the source and behind it a prefix that ends "
                "with a space",
            )
        if not columns and all(own) and [source or own[0], target or own[1]] != own:
            goals = ", ".join(code.strip("<>") for code in getattr(tokenizer, "supported_language_codes", ()))
            remedy = f"give one of its target languages ({goals})" if goals else "remove both"
            raise ValueError(
                f"the languages {source or own[0]!r} and {target or own[1]!r} are asked for, but "
                f"{tokenizer.name_or_path} translates from {own[0]} to {own[1]}: {remedy}"
            )
        return None
    tokens = language_tokens(tokenizer)
    codes = {name: split_language(text)[1] for name, text in (("source_lang", source), ("target_lang", target))}
    if columns and not explicit and tokenizer.tgt_lang is not None and not tokens.keys() >= set(codes.values()):
        return None
    for name, code in codes.items():
        if code is None:
            raise OptionError(name, " is missing: the codes of a multilingual tokenizer's languages go together")
        if fault := find_unsupported(code, tokenizer):
            raise OptionError(name, f"{fault} (where the data's column has another name, COLUMN=CODE)")
    tokenizer.src_lang, tokenizer.tgt_lang = codes["source_lang"], codes["target_lang"]
    return first_token(tokenizer, tokenizer.tgt_lang)


def target_ids(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int, start: int | None
) -> list[list[int]]:
    """Ids of targets as a decoder writes them: cut to the longest, without the token `start` in front."""
    ids = tokenizer(text_target=texts, max_length=longest, truncation=True)["input_ids"]
    if getattr(tokenizer, "legacy_behaviour", False):  # of NLLB: the language stands behind the text
        ids = [[*some[-1:], *some[:-1]] for some in ids]
    return [some[1:] if some[:1] == [start] else some for some in ids]


def begin_with(model: PreTrainedModel, first: dict[str, int | None] | None) -> None:
    """Let the translations of a model, and the targets that it is trained with, begin as of `first_token`."""
    for name, number in (first or {}).items():
        setattr(model.generation_config, name, number)
        if name == "decoder_start_token_id":
            model.config.decoder_start_token_id = number


def first_token_of(model: PreTrainedModel) -> dict[str, int | None]:
    """Options of `generate()` by which the translations of a model begin, as of `first_token`."""
    own = model.generation_config
    return {name: getattr(own, name) for name in ("decoder_start_token_id", "forced_bos_token_id")}


def set_languages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    target: str | None,
    *,
    columns: bool = True,
) -> None:
    """As `set_language_codes`, and let the model's translations begin in the target language."""
    begin_with(model, set_language_codes(tokenizer, source, target, columns=columns))
