"""What a conversion is asked for: values checked, contradictions named, and nothing heavy imported for it."""

import pytest

from lightformers_hf import CompressionOptions, StudyOptions
from lightformers_hf.conversion.options import read_choice, read_pattern, read_quantity, resolve_study
from lightformers_hf.conversion.rules import Energy, FixedRank, RankShare, Ratio
from lightformers_hf.languages import split_language


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        ("64", FixedRank(64)),
        (64, FixedRank(64)),
        ("4x", Ratio(4)),
        ("1.5x", Ratio(1.5)),
        ("90%", Energy(0.9)),
        ("99.5%", Energy(0.995)),
        ("dense", None),
        (None, None),
    ],
)
def test_choices_of_a_pattern(choice, rule):
    assert read_choice("ffn", choice) == rule


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("4 times", r"pattern 'ffn' is '4 times', expected a rank \(64\), a ratio \(4x\), an energy \(90%\) or dense"),
        ("-3", "pattern 'ffn' is '-3'"),
        (True, "pattern 'ffn' is True"),
        (0.9, "pattern 'ffn' is 0.9"),
        (0, "pattern 'ffn' is 0: rank is 0"),
        ("1x", "pattern 'ffn' is '1x': ratio is 1.0"),
        ("0%", "pattern 'ffn' is '0%': energy is 0"),
        ("101%", "pattern 'ffn' is '101%': energy is 1.01"),
    ],
)
def test_a_choice_that_is_none_is_named(choice, message):
    with pytest.raises(ValueError, match=message):
        CompressionOptions(pattern={"ffn": choice})


def test_a_pattern_is_a_dictionary():
    with pytest.raises(ValueError, match=r"pattern is \['ffn=4x'\], expected a dictionary: {'ffn': '4x'"):
        CompressionOptions(pattern=["ffn=4x"])


@pytest.mark.parametrize(
    ("options", "default"),
    [
        ({}, Ratio(2)),
        ({"params": "9k"}, Ratio(2)),  # stands for what is not known here
        ({"rank": 3}, FixedRank(3)),
        ({"rank": "3"}, FixedRank(3)),
        ({"rank": "25%"}, RankShare(0.25)),
        ({"pattern": {"ffn": 4}}, None),
        ({"encoder_groups": 1}, None),
        ({"decoder_layers": 1}, None),
        ({"decoder_layers": 1, "energy": 0.9}, Energy(0.9)),
    ],
)
def test_the_rest_is_halved_only_where_nothing_is_asked_for(options, default):
    assert CompressionOptions(**options).policy.default == default


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rank": 8}, "rank"),
        ({"energy": 0.9}, "energy"),
        ({"pattern": {"ffn": 8}}, "pattern"),
        ({"ratio": 2, "pattern": {"attention": "90%"}}, "pattern"),
    ],
)
def test_ranks_say_nothing_of_how_narrow(options, name):
    with pytest.raises(ValueError, match=f"how narrow is chosen by ratio, .*: remove {name}"):
        CompressionOptions(method="narrow", **options)
    CompressionOptions(method="narrow", ratio=2, pattern={"embedding": 8, "ffn": "4x", "fc1": 8})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20M", 20_000_000),
        ("40MB", 40_000_000),
        ("1KB", 1000),
        ("1kb", 1000),
        ("1.5G", 1_500_000_000),
        ("2gb", 2_000_000_000),
        ("300000", 300_000),
        (300_000, 300_000),
        (" 7b ", 7),
    ],
)
def test_quantities(text, number):
    assert read_quantity("size", text) == number


@pytest.mark.parametrize("text", ["many", "", "0", "0MB", "-3M", "3TB", "1e6", "M", "nan"])
def test_no_quantity_is_named(text):
    with pytest.raises(ValueError, match=rf"size is '{text}', expected a number above 0"):
        CompressionOptions(size=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "2x"}, "ratio is '2x', expected a number above 1"),
        ({"ratio": 1}, "ratio is 1, expected a number above 1"),
        ({"params": "40MB"}, "params is '40MB', but counts parameters, not bytes"),
        ({"rank": 2.5}, "rank is 2.5, expected a whole number"),
        ({"rank": "0%"}, "rank is 0%, expected a share of the singular values above 0% and at most 100%"),
        ({"rank": "120%"}, "rank is 120%, expected a share"),
        ({"rank": "-5%"}, r"rank is '-5%', expected a whole number \(64\) or a share of the singular values \(25%\)"),
        ({"rank": True}, "rank is True, expected a whole number"),
        ({"ratio": 2, "params": "9k"}, "ratio and params are given"),
        ({"rank": 2, "energy": 0.5}, "rank and energy are given"),
        ({"rank": 2, "size": "40MB"}, "rank and size are given"),
        ({"size": "1kB", "pattern": {"ffn": "2x"}}, "size is one budget for all matrices"),
        ({"method": "best"}, "method is 'best', expected one of auto, low-rank, narrow, paper"),
        ({"method": "paper", "calibration": "text"}, "the paper's procedure has no calibration"),
        ({"method": "paper", "decoder_layers": 1}, "the paper's procedure has no decoder_layers"),
        ({"method": "paper", "size": "40MB"}, "the paper's procedure has no size"),
        ({"calibration_samples": 0}, "calibration_samples is 0, expected a whole number, 1 or more"),
        ({"calibration_samples": "10"}, "calibration_samples is '10', expected a whole number"),
        ({"calibration_samples": True}, "calibration_samples is True, expected a whole number"),
        ({"encoder_layers": 2.5}, "encoder_layers is 2.5, expected a whole number"),
        ({"languages": "de_DE"}, "languages needs vocabulary"),
        ({"vocabulary_size": 9}, "vocabulary_size needs vocabulary"),
        ({"vocabulary": {"train": ["text"]}}, "the data is a dict: expected a file"),
        ({"vocabulary": "a.txt", "vocabulary_size": 0}, "vocabulary_size is 0"),
        ({"vocabulary": "a.txt", "vocabulary_size": "9"}, "vocabulary_size is '9', expected a whole number"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        CompressionOptions(**options)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"allocation": "greedy"}, "allocation is 'greedy', expected one of uniform, budget"),
        ({"weighting": "median"}, "weighting is 'median', expected one of loss, inputs"),
        ({"weighting": "inputs"}, "it needs allocation='uniform' and refit=False"),
    ],
)
def test_switches_that_cannot_be(switches, message):
    with pytest.raises(ValueError, match=message):
        StudyOptions(**switches)


@pytest.mark.parametrize(
    ("options", "switches", "message"),
    [
        ({"method": "paper"}, {"allocation": "budget"}, "method is 'paper', which determines allocation"),
        ({"method": "paper"}, {"refit": True}, "determines refit"),
        ({"method": "low-rank"}, {"attention_method": "narrow"}, "determines attention_method"),
        ({"method": "narrow"}, {"ffn_method": "low-rank"}, "determines ffn_method"),
        ({}, {"share_layer_norms": False}, "share_layer_norms is for layers that share"),
        ({"ratio": 3, "pattern": {"ffn": "2x"}}, {"allocation": "budget"}, "one ratio for all kinds"),
        ({"size": "1kB"}, {"allocation": "uniform"}, "needs a ratio: remove size"),
    ],
)
def test_options_and_switches_that_contradict_each_other(options, switches, message):
    with pytest.raises(ValueError, match=message):
        resolve_study(CompressionOptions(**options), StudyOptions(**switches))


def test_a_method_sets_switches():
    assert resolve_study(CompressionOptions()) == StudyOptions()
    narrow = resolve_study(CompressionOptions(method="narrow"), StudyOptions(calibration_seed=3))
    assert narrow == StudyOptions(attention_method="narrow", ffn_method="narrow", calibration_seed=3)
    assert resolve_study(CompressionOptions(method="paper")).allocation == "uniform"
    assert resolve_study(CompressionOptions(method="paper"), StudyOptions(refit=False)).refit is False


@pytest.mark.parametrize(
    ("text", "pair"),
    [("de", ("de", "de")), ("de=de_DE", ("de", "de_DE")), (None, (None, None)), ("=de_DE", (None, "de_DE"))],
)
def test_column_and_code(text, pair):
    assert split_language(text) == pair
    assert CompressionOptions(source_lang=text, target_lang="en").columns == (pair[0], "en")


def test_patterns_of_the_command_line():
    assert read_pattern(["ffn=4x", "fc1=dense", "a=b=64"]) == {"ffn": "4x", "fc1": "dense", "a=b": "64"}
    for item in ("fc1", "=64"):
        with pytest.raises(ValueError, match=f"pattern is '{item}', expected NAME=CHOICE"):
            read_pattern([item])
    with pytest.raises(ValueError, match="pattern has 'fc1' twice"):
        read_pattern(["fc1=64", "fc1=dense"])
