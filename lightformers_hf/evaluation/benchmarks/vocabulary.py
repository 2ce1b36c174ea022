"""Costs of the vocabulary: shapes with all tokens and with fewer, compressed, and with a shortlist.

Weights and sentences are random, so quality is not measured. The number of tokens of a shortlist is an option, because
random weights do not determine it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from tqdm.auto import tqdm
from transformers import GenerationConfig

from ...conversion.families import find_family
from ...export.engine import Engine
from ...export.engines import load_engine_file
from ...export.search import Search
from ...export.shortlist import Shortlist, special_tokens
from ...export.source import Source
from ...loading import skeleton, unique_parameters
from ...models import LightFormerConfig, LightFormerForConditionalGeneration
from ..benchmarks import VOCABULARY_ROWS, teacher_class
from ..speed import Speed, speed_of, speed_ratio, take_turns
from .engines import time_run

ENGINE, QUANTIZATION = "ctranslate2", "int8"
SOURCE_TOKENS = 15
# Parameters of a model that is timed; of larger ones, which take 12 GB and more, they are counted.
LARGEST = 500_000_000


@dataclass(frozen=True)
class VocabularyRow:
    """A model, and how fast it is with all tokens and with few.

    Attributes:
        name, tokens, parameters: of the model.
        disk_bytes: in CTranslate2, int8; `None` where it is too large to be timed.
        speeds: {tokens that can come for a sentence: tokens a second}.
    """

    name: str
    tokens: int
    parameters: int
    disk_bytes: int | None
    speeds: dict[int, Speed]

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


def find_config(shapes: str, row: str) -> LightFormerConfig:
    """The configuration of a row of `VOCABULARY_ROWS`. Raises `ValueError` for unknown shapes."""
    if shapes not in VOCABULARY_ROWS:
        raise ValueError(f"unknown shapes {shapes!r}, expected one of {', '.join(VOCABULARY_ROWS)}")
    _, source = teacher_class(shapes)
    fields = find_family(source).own_config(source).to_dict()
    del fields["head_dim"], fields["decoder_vocab_size"]  # these follow from others
    return LightFormerConfig(**fields | VOCABULARY_ROWS[shapes][row])


def benchmark_vocabulary(
    shapes: str,
    *,
    candidates: Sequence[int] = (),
    runs: int = 5,
    sentences: int = 10,
    new_tokens: int = 25,
    progress: bool = False,
) -> list[VocabularyRow]:
    """Time all `VOCABULARY_ROWS` of these shapes in CTranslate2 int8, one core, a sentence at a time, greedy, in turn.

    Args:
        candidates: numbers of tokens that can come, besides all of them.
        runs: of which every model is timed in each.
        sentences, new_tokens: of a run, random ones of `SOURCE_TOKENS`; so many tokens each.

    Raises:
        ValueError: unknown shapes, a number below 1 or above the tokens that there are, no CTranslate2.
    """
    configs = {name: find_config(shapes, name) for name in VOCABULARY_ROWS.get(shapes, {"": {}})}
    fewest = min(config.vocab_size for config in configs.values())
    for name, values in {"runs": [runs], "sentences": [sentences], "new_tokens": [new_tokens]}.items():
        if min(values) < 1:
            raise ValueError(f"{name} is {values[0]}, expected 1 or more")
    if wrong := [number for number in candidates if not 10 <= number < fewest]:
        raise ValueError(f"candidates is {wrong[0]}, expected 10 or more, and fewer than the {fewest:,} tokens")
    counts = {name: unique_parameters(skeleton(LightFormerForConditionalGeneration, c)) for name, c in configs.items()}
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(10, fewest - 1, (sentences, 1, SOURCE_TOKENS), generator=generator).tolist()
    sizes, actions = {}, {}
    with tempfile.TemporaryDirectory() as work, tqdm(total=len(configs), disable=not progress) as bar:
        for number, (name, config) in enumerate(configs.items()):
            bar.set_description(f"write {name}")
            if counts[name] <= LARGEST:
                engines, sizes[name] = write_engines(config, Path(work, str(number)), candidates)
                actions |= {
                    (name, size): partial(time_run, one, batches, 1, new_tokens) for size, one in engines.items()
                }
            bar.update()
        bar.close()
        for action in actions.values():  # the first run of each is slower
            action()
        turns = {f"{name}, {size:,} tokens": action for (name, size), action in actions.items()}
        timed = take_turns(turns, runs=runs, progress=progress)
    speeds = {key: speed_of([tuple(run) for run in found]) for key, found in zip(actions, timed.values(), strict=True)}
    return [
        VocabularyRow(
            name=name,
            tokens=config.vocab_size,
            parameters=counts[name],
            disk_bytes=sizes.get(name),
            speeds={size: speed for (of, size), speed in speeds.items() if of == name},
        )
        for name, config in configs.items()
    ]


def write_engines(config: LightFormerConfig, folder: Path, candidates: Sequence[int]) -> tuple[dict[int, Engine], int]:
    """A model of random weights in the engine, {tokens that can come: the engine}; and the bytes of its files."""
    engine = load_engine_file(ENGINE)
    torch.manual_seed(0)
    model = LightFormerForConditionalGeneration(config).eval().requires_grad_(False)
    generation = GenerationConfig.from_model_config(config)
    source, search = Source("random weights", folder, model, None, generation), Search.of(generation)
    found, special = {}, special_tokens(search, None)
    for size in (config.vocab_size, *candidates):
        place = folder / str(size)
        place.mkdir(parents=True)
        engine.write(source, place, QUANTIZATION)
        if size == config.vocab_size:
            written = sum(file.stat().st_size for file in place.iterdir())
        else:
            others = (token for token in range(config.vocab_size) if token not in special)
            always = (*special, *(next(others) for _ in range(size - len(special))))
            engine.write_shortlist(source, place, QUANTIZATION, Shortlist(config.vocab_size, always, {}))
        found[size] = Engine(ENGINE, engine.load(place, search, 1), search, config.max_position_embeddings)
    return found, written


def vocabulary_table(rows: Sequence[VocabularyRow]) -> Table:
    """A line a row: sizes, and speeds beside the first one that was timed."""
    timed = [row for row in rows if row.speeds]
    few = sorted({size for row in timed for size in row.speeds if size != row.tokens}, reverse=True)
    names = ("tokens", "parameters", "MB", "all tokens", *(f"{size:,} tokens" for size in few))
    table = Table("", *(Column(name, justify="right", no_wrap=True) for name in names))
    for row in rows:
        cells = [_compare(row, size, timed[0]) for size in (row.tokens, *few)]
        size = "" if row.disk_bytes is None else f"{row.disk_bytes / 1e6:,.1f}"
        table.add_row(row.name, f"{row.tokens:,}", f"{row.parameters:,}", size, *cells)
    table.caption = (
        f"CTranslate2 int8, one core, one sentence at a time, greedy; tokens a second, times {timed[0].name!r} with "
        "all tokens, and in brackets times the same model with all tokens: medians of interleaved runs."
    )
    return table


def _compare(row: VocabularyRow, size: int, first: VocabularyRow) -> str:
    """A cell: speed, and how many times that of the first row and of the same with all tokens."""
    if not row.speeds:
        return ""
    speed = row.speeds[size]
    of_first = speed_ratio(speed, first.speeds[first.tokens])
    own = "" if size == row.tokens else f" ({speed_ratio(speed, row.speeds[row.tokens]):.1f}x)"
    return f"{speed.tokens_per_second:,.0f}, {of_first:.1f}x{own}"
