"""The demo's corpus: honest splits, and two sides that say the same."""

import re
from datetime import datetime

import pytest

from lightformers_hf.demo.corpus import SPLITS, make_corpus

COUNTS = {"train": 4000, "validation": 60, "test": 60}
MONTHS_DE = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split()


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(COUNTS, seed=3)


@pytest.fixture(scope="module")
def pairs(corpus):
    return [(sentence.de, sentence.en) for split in SPLITS for sentence in corpus[split]]


def test_as_many_as_asked_for(corpus):
    assert {split: len(sentences) for split, sentences in corpus.items()} == COUNTS


def test_seed_decides():
    counts = {"train": 50, "validation": 5, "test": 5}
    assert make_corpus(counts, seed=1) == make_corpus(counts, seed=1)
    assert make_corpus(counts, seed=1) != make_corpus(counts, seed=2)


def test_no_sentence_twice(pairs):
    for side in zip(*pairs, strict=True):
        assert len(set(side)) == len(side)


def test_every_held_out_sentence_has_a_combination_of_its_split_alone(corpus):
    used = {split: set().union(*(s.combinations for s in corpus[split])) for split in SPLITS}
    for split in ("validation", "test"):
        elsewhere = set().union(*(used[other] for other in SPLITS if other != split))
        assert all(sentence.combinations - elsewhere for sentence in corpus[split])


def test_held_out_words_are_known(corpus):
    """What is new in the test split is how words meet, not the words: apart from digits and numbers in words."""
    known = set(re.findall(r"[A-ZÄÖÜ][a-zäöüß]+", " ".join(s.de for s in corpus["train"])))
    new = set(re.findall(r"(?<!^)[A-ZÄÖÜ][a-zäöüß]+", " ".join(s.de for s in corpus["test"]))) - known
    assert not {word for word in new if not re.search("zehn|zig|hundert|zwölf|elf", word)}


def decimals(text, thousands, point):
    numbers = re.findall(r"\d(?:[\d.,]*\d)?", text)
    return sorted(float(number.replace(thousands, "").replace(point, ".")) for number in numbers)


def test_amounts_agree(pairs):
    amounts = [
        pair
        for pair in pairs
        if pair[0].startswith(("Das Hotel", "Das Paket", "Die Strecke", "Der Wind", "Der Preis"))
    ]
    assert len(amounts) > 100
    for de, en in amounts:
        assert decimals(de, ".", ",") == decimals(en, ",", ".") != []


def test_dates_agree(pairs):
    found = 0
    for de, en in pairs:
        if match := re.fullmatch(r"Der Flug von .* startet am (?:\w+, )?(\d+)\. (\w+) (\d{4})\.", de):
            day, month, year = match.groups()
            english = re.search(r"leaves on (?:\w+day, )?(\w+ \d+, \d{4})\.", en)[1]
            date = datetime.strptime(english, "%B %d, %Y")
            assert (date.day, date.month, date.year) == (int(day), MONTHS_DE.index(month) + 1, int(year))
            found += 1
    assert found > 20


def test_clock_times_agree(pairs):
    found = 0
    for de, en in pairs:
        if match := re.fullmatch(r"Der Zug nach .* um (\d\d:\d\d) Uhr ab\.", de):
            english = datetime.strptime(re.search(r"departs at (.*)\.", en)[1], "%I:%M %p")
            assert english.strftime("%H:%M") == match[1]
            found += 1
    assert found > 20


AGREEMENT = {  # article and end of the adjective, as a grammar lists them: nominative or accusative
    "m": {("der", "e"), ("den", "en"), ("ein", "er"), ("einen", "en")},
    "f": {("die", "e"), ("eine", "e")},
    "n": {("das", "e"), ("ein", "es")},
}
GENDERS = {"Bus": "m", "Traktor": "m", "Fähre": "f", "Kutsche": "f", "Schiff": "n", "Flugzeug": "n"}
THINGS = {"Bus": "bus", "Traktor": "tractor", "Fähre": "ferry", "Kutsche": "carriage", "Schiff": "ship"}
ENGLISH = {"neu": "new", "alt": "old", "rostig": "rusty", "unbekannt": "unknown", "amerikanisch": "American"}


def test_adjectives_agree_with_their_nouns(pairs):
    found = {gender: set() for gender in AGREEMENT}
    for de, en in pairs:
        for article, stem, ending, noun in re.findall(r"\b([Dd]\w\w|[Ee]in\w*) (\w+?)(e[nrs]?) ([A-ZÄÖÜ]\w+)", de):
            if noun in GENDERS and stem in ENGLISH:
                found[GENDERS[noun]].add((article.lower(), ending))
                english = f" {ENGLISH[stem]} {THINGS.get(noun, 'plane')} "
                word = "the" if article.lower().startswith("d") else "an" if english[1] in "aouA" else "a"
                assert re.search(rf"\b{word}{english}", f"{en} ", re.IGNORECASE), (de, en)
    assert found == AGREEMENT


def test_some_names_are_rare(pairs):
    text = " ".join(de for de, _ in pairs)
    assert text.count("Rom ") > 3 * text.count("Bogotá ") > 0


def test_spaces_are_plain(pairs):
    for text in (text for pair in pairs for text in pair):
        assert not re.search(r"[^\S ]|  |^ | $|\.\.|[{}]", text), text
