"""German-English pairs of a small grammar, as many as are wanted: text for measurements of time and memory alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

NOUNS = {"Mann": "man", "Hund": "dog", "Junge": "boy", "Arbeiter": "worker", "Läufer": "runner", "Sänger": "singer",
         "Verkäufer": "salesman", "Spieler": "player", "Radfahrer": "cyclist", "Fotograf": "photographer"}  # fmt: skip
ADJECTIVES = {"junger": "young", "alter": "old", "großer": "tall", "kleiner": "small", "müder": "tired",
              "lachender": "laughing", "nasser": "wet", "brauner": "brown", "stiller": "quiet"}  # fmt: skip
VERBS = {"steht": "stands", "sitzt": "sits", "läuft": "walks", "wartet": "waits", "spielt": "plays",
         "arbeitet": "works", "singt": "sings", "schläft": "sleeps", "tanzt": "dances"}  # fmt: skip
PLACES = {"vor einem Haus": "in front of a house", "am Strand": "at the beach", "auf der Straße": "on the street",
          "neben einem roten Auto": "next to a red car", "in einem Park": "in a park", "im Schnee": "in the snow",
          "unter einem Baum": "under a tree", "auf einer Bank": "on a bench", "am Wasser": "by the water"}  # fmt: skip
COMPANY = {"mit zwei Kindern": "with two children", "allein": "alone", "mit einer Frau": "with a woman",
           "mit seinem Freund": "with his friend", "mit vielen Leuten": "with many people"}  # fmt: skip


def write_pairs(path: Path, number: int, seed: int = 0) -> None:
    """Write so many pairs as lines of JSON, of one and two clauses."""
    draw, tables = random.Random(seed), [[*table.items()] for table in (ADJECTIVES, NOUNS, VERBS, PLACES, COMPANY)]
    dump, choice = json.dumps, draw.choice
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            german, english = [], []
            for _ in range(1 + (draw.random() < 0.5)):
                parts = [choice(table) for table in tables]
                german.append("ein " + " ".join(part[0] for part in parts))
                english.append("a " + " ".join(part[1] for part in parts))
            pair = {"de": f"E{' und '.join(german)[1:]}.", "en": f"A{' and '.join(english)[1:]}."}
            file.write(dump({"translation": pair}, ensure_ascii=False) + "\n")
