"""A small German-English corpus made of locale data: dates, times, amounts, units, names of places, numbers in words.

The sentences are templates; their slots (how each language writes a date, an amount of money, a number in words,
its names of Lisbon or the Icelandic króna) come from Babel's CLDR tables and from num2words. Much is in it that sets
German apart: verbs at the end, adjectives that agree. Some words are ten times as rare as others. Every validation and
test sentence holds a *combination* that neither of the other splits has: an amount in a currency, a date in a format,
a city in a template. A model that scores well on the test split has learned to compose, not to remember.
"""

from __future__ import annotations

import datetime
import random
import re
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from importlib.resources import files
from itertools import accumulate

from babel import Locale, dates, lists, numbers, units
from num2words import num2words

# Templates of sentences, and lists of words.
TEXT = tomllib.loads(files(__package__).joinpath("corpus.toml").read_text(encoding="utf-8"))
# Article, ending of the adjective behind it: by German case and article, then gender.
ARTICLES = {
    "the": {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    "the_accusative": {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    "a": {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
    "a_accusative": {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
}
SPLITS = ("train", "validation", "test")
HELD_OUT_PERMILLE = 25  # of all combinations: so many for validation, and as many for test
# Units by quantity; values go up to about 10 to the power of the number.
UNITS = {
    "length": (3, "length-kilometer length-meter length-mile length-nautical-mile"),
    "mass": (3, "mass-kilogram mass-gram mass-pound mass-ounce"),
    "speed": (2.2, "speed-kilometer-per-hour speed-meter-per-second speed-mile-per-hour speed-knot"),
    "temperature": (2, "temperature-celsius temperature-fahrenheit temperature-kelvin"),
    "energy": (3, "energy-kilowatt-hour energy-kilojoule energy-kilocalorie energy-joule"),
    "duration": (2, "duration-second duration-minute duration-hour duration-day duration-week duration-month"),
    "area": (3, "area-hectare area-acre area-square-meter area-square-kilometer area-square-mile"),
    "volume": (3, "volume-liter volume-milliliter volume-cup volume-gallon volume-cubic-meter"),
}
MINUTES_PER_DAY = 24 * 60
DELTAS = {"minutes": 50, "hours": 20, "days": 5, "weeks": 3}  # the largest count that Babel prints in this unit


@dataclass(frozen=True)
class Sentence:
    """A sentence in both languages, and the combinations of values in it."""

    de: str
    en: str
    combinations: frozenset[str]


@dataclass(frozen=True)
class Filling:
    """Content of a slot. `composed`: made of several values, held out by itself; else held out with its template."""

    de: str
    en: str
    key: str = ""
    composed: bool = False


def make_corpus(
    counts: dict[str, int], *, seed: int = 0, advance: Callable[[int], None] = lambda _: None
) -> dict[str, list[Sentence]]:
    """Make `counts[split]` sentence pairs for each of the splits train, validation and test.

    No source sentence and no target sentence occurs twice in all splits together. Some combinations are reserved for
    validation and some for test: each sentence there holds one, and no sentence of another split does. The same seed
    and library versions give the same corpus. `advance(n)` is called after every n new sentences.
    """
    rng = random.Random(seed)
    lines = TEXT["TEMPLATES"].strip().splitlines()
    templates = list(zip(lines[::2], lines[1::2], strict=True))
    corpus: dict[str, list[Sentence]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    while any(len(corpus[split]) < counts[split] for split in SPLITS):
        sentence = _fill(rng, *rng.choice(templates))
        split = _split_of(sentence.combinations, seed)
        if split is None or len(corpus[split]) >= counts[split] or not seen.isdisjoint({sentence.de, sentence.en}):
            continue
        seen |= {sentence.de, sentence.en}
        corpus[split].append(sentence)
        advance(1)
    return corpus


def _fill(rng: random.Random, german: str, english: str) -> Sentence:
    """Fill every slot of a template, each with another value."""
    fillings: dict[str, Filling] = {}
    for slot in re.findall(r"{(\w+)}", german):
        while (filling := SLOTS[slot.rstrip("2")](rng)) in fillings.values():
            pass
        fillings[slot] = filling
    combinations = {f if value.composed else f"{german}|{f}" for value in fillings.values() if (f := value.key)}
    de = german.format(**{slot: filling.de for slot, filling in fillings.items()})
    en = english.format(**{slot: filling.en for slot, filling in fillings.items()})
    return Sentence(_tidy(de), _tidy(en), frozenset(combinations))


def _tidy(text: str) -> str:
    """Capitalize the first letter, and write CLDR's thin and no-break spaces as spaces."""
    text = re.sub(r"\s+", " ", text).replace("..", ".")
    return text[0].upper() + text[1:]


def _split_of(combinations: frozenset[str], seed: int) -> str | None:
    """The split these combinations are reserved for; None where some are reserved for validation, some for test."""
    buckets = {zlib.crc32(f"{seed}|{key}".encode()) % 1000 // HELD_OUT_PERMILLE for key in combinations}
    held_out = buckets & {0, 1}
    if held_out == {0, 1}:
        return None
    return SPLITS[1 + held_out.pop()] if held_out else "train"


# --- names: closed lists, each value to be seen in training, but not in every template -----------------------------

NAMED = {"territories": TEXT["TERRITORIES"], "languages": TEXT["LANGUAGES"], "time_zones": TEXT["CITIES"]}


@cache
def _pairs(kind: str) -> list[tuple[str, str]]:
    """Names in German and English. CLDR has cities' names for time zones, where they differ from the zone's."""
    de, en = (getattr(Locale(language), kind) for language in ("de", "en"))
    if kind != "time_zones":
        return [(de[code], en[code]) for code in NAMED[kind].split()]
    zones = NAMED[kind].split()
    return [(de[zone]["city"], en.get(zone, {}).get("city") or zone.split("/")[1].replace("_", " ")) for zone in zones]


@cache
def _weights(count: int) -> list[float]:
    """Cumulative: names are rarer the later they stand, as words are (Zipf), the last about ten times as the first."""
    return list(accumulate(1 / (5 + index) for index in range(count)))


def _name(kind: str, rng: random.Random) -> Filling:
    [(de, en)] = rng.choices(_pairs(kind), cum_weights=_weights(len(_pairs(kind))))
    return Filling(de, en, de)


def _list(kind: str, rng: random.Random) -> Filling:
    chosen = rng.sample(_pairs(kind), rng.choice([2, 3]))
    de, en = ([pair[side] for pair in chosen] for side in (0, 1))
    return Filling(lists.format_list(de, locale="de"), lists.format_list(en, locale="en"), "|".join(de), True)


NOUNS = [tuple(entry.split(maxsplit=2)) for entry in TEXT["VEHICLES"].split(",")]


def _vehicle(article: str, rng: random.Random) -> Filling:
    """A noun with article and adjective. Pairs of words are held out, in any case."""
    (noun, gender, en_noun), (adjective, en_adjective) = (
        rng.choice(NOUNS),
        rng.choice(TEXT["ADJECTIVES"].split(",")).split(),
    )
    word, ending = ARTICLES[article][gender]
    en_word = "the" if article.startswith("the") else "an" if en_adjective[0] in "aeiouA" else "a"
    de, en = f"{word} {adjective}{ending} {noun}", f"{en_word} {en_adjective} {en_noun}"
    return Filling(de, en, f"{adjective} {noun}", composed=True)


# --- text of Babel and num2words -----------------------------------------------------------------------------------


def _both(write: Callable[[str], str], key: str = "", *, composed: bool = False) -> Filling:
    """A filling from a function of the language; the key is the German text unless given."""
    de = write("de")
    return Filling(de, write("en"), key or de, composed)


def _quantity(rng: random.Random, largest: float, decimals: int) -> Decimal:
    """A number from 2 to 10**largest, small ones as likely as large ones, with at most so many decimals."""
    return Decimal(str(round(2 + 10 ** rng.uniform(0, largest), rng.choice([0, decimals])))).normalize() + 0


def _day(rng: random.Random) -> datetime.date:
    return datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(30 * 365))


def _date(rng: random.Random) -> Filling:
    day, style = _day(rng), rng.choice(["full", "long", "medium", "short"])
    return _both(lambda lang: dates.format_date(day, style, locale=lang), f"{day}|{style}", composed=True)


def _span(rng: random.Random) -> Filling:
    start = _day(rng)
    end = start + datetime.timedelta(days=rng.randrange(2, 60))
    return _both(lambda lang: dates.format_interval(start, end, "yMMMd", locale=lang), composed=True)


def _clock(rng: random.Random) -> Filling:
    time = datetime.time(*divmod(rng.randrange(0, MINUTES_PER_DAY, 5), 60))
    return _both(lambda lang: dates.format_time(time, "short", locale=lang))


def _hours(rng: random.Random) -> Filling:
    start = rng.randrange(0, MINUTES_PER_DAY - 65, 5)
    minutes, pattern = (start, rng.randrange(start + 60, MINUTES_PER_DAY, 5)), {"de": "Hm", "en": "hm"}
    times = [datetime.time(*divmod(minute, 60)) for minute in minutes]
    return _both(lambda lang: dates.format_interval(*times, pattern[lang], locale=lang), composed=True)


def _money(style: str, rng: random.Random) -> Filling:
    amount, code = _quantity(rng, 3.5, 2), rng.choice(TEXT["CURRENCIES"].split())
    write = partial(numbers.format_currency, amount, code, format_type=style)
    return _both(lambda lang: write(locale=lang), f"{amount}|{code}", composed=True)


def _unit(kind: str, rng: random.Random) -> Filling:
    largest, names = UNITS[kind]
    value, unit = _quantity(rng, largest, 1), rng.choice(names.split())
    return _both(lambda lang: units.format_unit(value, unit, "long", locale=lang), composed=True)


def _compact(rng: random.Random) -> Filling:
    value, options = _quantity(rng, 5, 0) * 10_000, {"format_type": "long", "fraction_digits": 1}
    return _both(lambda lang: numbers.format_compact_decimal(value, locale=lang, **options), composed=True)


def _percent(rng: random.Random) -> Filling:
    share = Decimal(rng.randrange(1, 1000)) / 1000
    return _both(lambda lang: numbers.format_percent(share, locale=lang, decimal_quantization=False), composed=True)


def _words(kind: str, values: range, rng: random.Random) -> Filling:
    while (value := rng.choice(values)) % 100 == 1 and kind == "cardinal":  # "einhunderteins Gäste" is not used
        pass
    return _both(lambda lang: num2words(value, lang=lang, to=kind), composed=True)


def _delta(sign: int, rng: random.Random) -> Filling:
    unit = rng.choice(list(DELTAS))
    delta = sign * datetime.timedelta(**{unit: rng.randint(2, DELTAS[unit])})
    return _both(lambda lang: dates.format_timedelta(delta, add_direction=True, locale=lang))


def _calendar(get_names: Callable[..., dict[int, str]], rng: random.Random) -> Filling:
    which = rng.choice(sorted(get_names("wide", locale="de")))
    return _both(lambda lang: get_names("wide", locale=lang)[which])


SLOTS: dict[str, Callable[[random.Random], Filling]] = {"date": _date, "span": _span, "clock": _clock, "hours": _hours}
SLOTS |= {"compact": _compact, "percent": _percent, "ago": partial(_delta, -1), "ahead": partial(_delta, +1)}
SLOTS |= {"money": partial(_money, "standard"), "money_name": partial(_money, "name")}
SLOTS |= {"month": partial(_calendar, dates.get_month_names), "weekday": partial(_calendar, dates.get_day_names)}
SLOTS |= {"territory": partial(_name, "territories"), "territories": partial(_list, "territories")}
SLOTS |= {"city": partial(_name, "time_zones"), "cities": partial(_list, "time_zones")}
SLOTS |= {
    "cardinal": partial(_words, "cardinal", range(2, 1000)),
    "ordinal": partial(_words, "ordinal", range(2, 400)),
}
SLOTS |= {"year_words": partial(_words, "year", range(1850, 2030)), "language": partial(_name, "languages")}
SLOTS["name"] = lambda rng: Filling(name := rng.choice(TEXT["NAMES"].split()), name)
SLOTS["year"] = lambda rng: Filling(year := str(rng.randrange(1950, 2030)), year, year)
SLOTS |= {kind: partial(_unit, kind) for kind in UNITS} | {article: partial(_vehicle, article) for article in ARTICLES}
