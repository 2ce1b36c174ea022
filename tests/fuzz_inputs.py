"""Damaged and malicious inputs for `fuzz.py`: files written beside whole ones, and a command."""

import gzip
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import click
from hypothesis import strategies as st

from lightformers_hf.cli import app

DEEP = "[" * 100_000
NUMBERS = [0, 1, -1, 2, 3, 7, 8, 59, 60, 61, 10**4, 10**6, 10**9, 2**31, 2**63, 10**18, 10**40, -(10**9), 0.5, 1e300]
WORDS = [
    "",
    " ",
    "x",
    "0",
    "no",
    "None",
    "float7",
    "float16",
    "int8",
    "relu",
    "../..",
    "/",
    "é\x1b[31m",
    "\udc80",
    "<b>",
]
TYPES = ["F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "X", "", None, 3]

# A command that reads a model, and how often it is chosen: those that take longer less often.
COMMANDS = {
    "convert MODEL out --rank 2 --method paper": 16,
    "translate MODEL text": 8,
    "plan MODEL --rank 2 --method paper": 8,
    "export MODEL out --to ctranslate2": 4,
    "push MODEL user/model --dry-run": 4,
    "evaluate MODEL --data data.jsonl --no-speed": 2,
    "report MODEL --output page.html": 1,
    "convert MODEL out --ratio 1.5 --calibration data.jsonl --calibration-samples 2": 1,
}
READ_DATA = {
    "convert dense out --ratio 1.5 --calibration DATA --calibration-samples 2": 1,
    "evaluate dense --data DATA --no-speed --max-samples 1": 1,
}
# What options are added to. Those that are left out ask for more than a minute of work, or show tracebacks.
OPTIONS_OF = {
    "plan": "dense --rank 2 --method paper",
    "convert": "dense out --rank 2 --method paper",
    "export": "dense out --to ctranslate2",
    "translate": "dense text",
    "evaluate": "dense --data data.jsonl --no-speed",
    "report": "light --output page.html",
    "push": "light user/model --dry-run",
}
LEFT_OUT = {"--verbose", "--speed", "--comet", "--help", "--push-to-hub"}


@dataclass(frozen=True)
class Case:
    """An input: files as they are to be (`None`: removed), and the words of the command."""

    files: dict[str, bytes | None]
    words: list[str]


def frequent(weights: dict[str, int]) -> st.SearchStrategy[str]:
    """One of the keys, each as often as its weight says."""
    return st.sampled_from([key for key, weight in weights.items() for _ in range(weight)])


def json_values() -> st.SearchStrategy:
    """Whatever JSON can hold, mostly short; Python's own NaN and Infinity, too."""
    plain = st.one_of(
        st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.none(), st.booleans(), st.floats(), st.text(max_size=5)
    )
    inner = st.one_of(st.lists(plain, max_size=3), st.dictionaries(st.text(max_size=3), plain, max_size=2))
    return st.one_of(plain, plain, inner, st.lists(inner, max_size=2))


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes, first: int = 2000) -> bytes:
    """`content` with some bytes changed, most among the first, cut short, or something else."""
    how = draw(st.sampled_from(["change", "change", "cut", "other"]))
    if how == "cut":
        return content[: draw(st.integers(0, len(content)))]
    if how == "other":
        return draw(st.one_of(st.binary(max_size=40), st.sampled_from([DEEP.encode(), b"{}", b"[]", b"null", b"3"])))
    changed = bytearray(content)
    for _ in range(draw(st.sampled_from([1, 4, 32]))):
        place = draw(st.integers(0, min(first, len(content)) - 1))
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed)


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes, extra: tuple[str, ...] = ()) -> bytes:
    """An object of JSON with other fields, or damaged as any file."""
    if draw(st.integers(0, 9)) == 0:
        return draw(damaged_bytes(content))
    fields = json.loads(content)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        place, name = fields, draw(st.sampled_from([*fields, *extra]))
        # One step down, into what stands there, half the time.
        while isinstance(place.get(name) if isinstance(place, dict) else place[name], dict | list) and draw(
            st.booleans()
        ):
            inner = place[name]
            if not inner:
                break
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            place, name = inner, draw(st.sampled_from(keys))
        if isinstance(place, dict) and draw(st.integers(0, 7)) == 0:
            place.pop(name, None)
        else:
            place[name] = draw(json_values())
        if not fields:
            break
    return json.dumps(fields).encode()


def model_commands(model: str) -> st.SearchStrategy[list[str]]:
    """Words of a command that reads a model."""
    return frequent(COMMANDS).map(lambda words: words.replace("MODEL", model).split())


def models() -> st.SearchStrategy[str]:
    """A dense model or one of this package."""
    return st.sampled_from(["dense", "light"])


CONFIG_EXTRA = (
    "auto_map",
    "quantization_config",
    "rank_pattern",
    "task_specific_params",
    "forced_bos_token_id",
    "encoder_groups",
    "bad_words_ids",
    "id2label",
    "torch_dtype",
)
GENERATION_EXTRA = (
    "num_beams",
    "max_length",
    "max_new_tokens",
    "bad_words_ids",
    "length_penalty",
    "do_sample",
    "top_k",
)


@st.composite
def json_cases(draw: st.DrawFn, base: Path, names: tuple[str, ...], extra: tuple[str, ...] = ()) -> Case:
    """One of the JSON files of a model damaged."""
    model = draw(models())
    name = draw(st.sampled_from([name for name in names if (base / model / name).is_file()]))
    content = draw(damaged_json((base / model / name).read_bytes(), extra))
    return Case({f"{model}/{name}": content}, draw(model_commands(model)))


@st.composite
def header_cases(draw: st.DrawFn, base: Path) -> Case:
    """A damaged safetensors file: what its header says of the tensors, its length, its bytes; or a damaged pickle."""
    model = draw(models())
    words = draw(model_commands(model))
    how = draw(st.sampled_from(["header", "header", "header", "bytes", "pickle"]))
    if how == "pickle":
        content = draw(damaged_bytes((base / "pytorch_model.bin").read_bytes()))
        return Case(
            {"dense/model.safetensors": None, "dense/pytorch_model.bin": content},
            [w.replace("light", "dense") for w in words],
        )
    whole = (base / model / "model.safetensors").read_bytes()
    if how == "bytes":
        return Case({f"{model}/model.safetensors": draw(damaged_bytes(whole))}, words)
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        name = draw(st.sampled_from(sorted(header)))
        entry = header[name]
        what = draw(st.sampled_from(["remove", "rename", "entry", "dtype", "shape", "data_offsets"]))
        if what == "remove":
            del header[name]
        elif what == "rename":
            header[draw(st.sampled_from(WORDS[:-2]))] = header.pop(name)
        elif what == "entry" or not isinstance(entry, dict):
            header[name] = draw(json_values())
        elif what == "dtype":
            entry["dtype"] = draw(st.sampled_from(TYPES))
        else:
            numbers = st.sampled_from([number for number in NUMBERS if isinstance(number, int)])
            entry[what] = draw(st.one_of(st.lists(numbers, max_size=3), json_values()))
    text = json.dumps(header).encode()
    wrong = draw(st.sampled_from([None, None, None, 0, 7, 2**31, 2**63]))
    content = struct.pack("<Q", len(text) if wrong is None else wrong) + text + whole[8 + length :]
    return Case({f"{model}/model.safetensors": content}, words)


@st.composite
def index_cases(draw: st.DrawFn, base: Path) -> Case:
    """A damaged index of weights in two files."""
    index = json.loads((base / "model.safetensors.index.json").read_bytes())
    files = {f"dense/{name}": (base / name).read_bytes() for name in sorted(set(index["weight_map"].values()))}
    wrong = ["../data.jsonl", "/etc/passwd", "none.safetensors", "config.json", ".", *files]
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(index["weight_map"])))
        index["weight_map"][name] = draw(st.one_of(st.sampled_from(wrong), json_values()))
    content = json.dumps(index).encode()
    if draw(st.booleans()):
        content = draw(damaged_json(content))
    files |= {"dense/model.safetensors": None, "dense/model.safetensors.index.json": content}
    return Case(files, draw(model_commands("dense")))


@st.composite
def data_cases(draw: st.DrawFn, base: Path) -> Case:
    """A damaged data file of any type, packed or not; or text to translate that is none."""
    if draw(st.integers(0, 3)) == 0:
        content = draw(
            st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
        )
        return Case({"text": content}, ["translate", draw(models()), "text"])
    name = draw(st.sampled_from(["data.jsonl", "data.jsonl", "data.json", "data.csv", "data.tsv", "data.parquet"]))
    whole = (base / name).read_bytes()
    pairs = st.dictionaries(st.sampled_from(["de", "en", "fr", ""]), st.sampled_from(["Ein Hund", "", None, 3]))
    columns = st.sampled_from(["de", "en", "translation", ""])
    rows = st.dictionaries(columns, st.one_of(json_values(), pairs), max_size=3)
    lines = st.lists(rows, max_size=3).map(lambda found: "\n".join(map(json.dumps, found)).encode())
    cells = st.text(alphabet='de,en\t"\n\r; é\0', max_size=60).map(str.encode)
    content = draw(st.one_of(damaged_bytes(whole), lines if "json" in name else cells))
    name = draw(st.sampled_from(["", "", "", "x[1]", "a?*", "c::d", "$HOME", "~e"])) + name
    packed = draw(st.sampled_from(["no", "no", "no", "gz", "cut"]))
    if packed != "no":
        name, content = f"{name}.gz", gzip.compress(content, mtime=0)
        content = content[: draw(st.integers(0, len(content)))] if packed == "cut" else content
    return Case({name: content}, draw(frequent(READ_DATA)).replace("DATA", name).split())


def option_values(option: click.Option) -> st.SearchStrategy[str]:
    """What is typed for an option, right or wrong."""
    number = st.sampled_from(
        ["0", "-1", "1", "2", "3", "1000000000", "1e9", "nan", "inf", "-inf", "1" * 20, "0.5", "1e-300"]
    )
    words = [
        "",
        "-",
        "x",
        ".",
        "/",
        "dense",
        "none",
        "text",
        "data.jsonl",
        "light",
        "cuda",
        "meta",
        "é",
        "a=b",
        "ffn=4x",
    ]
    words += [
        "fc1=64",
        "ffn=90%",
        "=",
        "fc1=dense",
        "40MB",
        "1B",
        "-5M",
        "12G",
        "auto",
        "low-rank",
        "narrow",
        "de=xx",
        "de",
        "en",
    ]
    own = [word for word in (option.type.choices if isinstance(option.type, click.Choice) else ())]
    return st.one_of(
        number, st.sampled_from([*words, *own]), st.text(max_size=4).filter(lambda text: "\0" not in text)
    )


@st.composite
def option_cases(draw: st.DrawFn) -> Case:
    """Options with values of all kinds, some more than once."""
    name = draw(st.sampled_from(sorted(OPTIONS_OF.keys() - {"report"}) * 5 + ["report"]))  # pictures take seconds
    words = [name, *OPTIONS_OF[name].split()]
    options = [
        key for key in app.commands[name].params if isinstance(key, click.Option) and not LEFT_OUT & set(key.opts)
    ]
    for option in draw(st.lists(st.sampled_from(options), min_size=1, max_size=3)):
        words.append(max(option.opts, key=len))
        words += [] if option.is_flag else [draw(option_values(option))]
    return Case({}, words)


def cases(base: Path) -> dict[str, st.SearchStrategy[Case]]:
    """{kind: its inputs}, from the whole files that `fuzz.make_base` left in `base`."""
    others = (
        "tokenizer_config.json",
        "vocab.json",
        "special_tokens_map.json",
        "compression.json",
        "trainer_state.json",
    )
    return {
        "configuration": json_cases(base, ("config.json",), CONFIG_EXTRA),
        "generation": json_cases(base, ("generation_config.json",), GENERATION_EXTRA),
        "other files": json_cases(base, others, ("log_history", "matrices")),
        "index": index_cases(base),
        "header": header_cases(base),
        "data": data_cases(base),
        "options": option_cases(),
    }
