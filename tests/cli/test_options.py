"""An option is stated once: signature, command and errors come from its field."""

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import click
import pandas
import pytest

from lightformers_hf.cli.framework import explain
from lightformers_hf.cli.parameters import parameters_of
from lightformers_hf.options import Help, OptionError, check_speech, options_of, takes, values_of


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Fields with help, which a class below may state anew."""

    width: Annotated[int | None, Help("How wide.", "W")] = None
    kind: Annotated[Literal["a", "b"], Help("What. Default: a.", values=("a", "b"))] = "a"


@dataclass(frozen=True)
class Call(Sizes):
    """An argument, an option of every form, and a field that is no option."""

    model: Annotated[str, Help("The model.", kind="checkpoint")]
    _: KW_ONLY
    width: Annotated[int | None, Help("As wide as this.", "W")] = None
    texts: Annotated[tuple[str, ...], Help("Repeatable.", name="--text")] = ()
    fast: Annotated[bool | None, Help("Or not.")] = None
    force: Annotated[bool, Help("Yes.")] = False
    minutes: Annotated[float, Help("Time.", kind="minutes")] = 30.0
    hidden: object = None


@takes(Call)
def call(arguments: Call) -> dict:
    """Return the fields.

    Args:

    Example: none.
    """
    return values_of(arguments)


def test_a_function_has_the_arguments_of_its_record():
    signature = inspect.signature(call)
    assert {name: each.default for name, each in signature.parameters.items()} == {
        **{"model": inspect.Parameter.empty, "width": None, "kind": "a", "texts": (), "fast": None},
        **{"force": False, "minutes": 30.0, "hidden": None},
    }
    assert signature.parameters["width"].annotation == "int | None"
    assert call("m", width=3) == values_of(Call(model="m", width=3))
    assert "    width: As wide as this.\n    kind: What. Default: a.\n" in call.__doc__
    for wrong in ({"widht": 3}, {}):
        with pytest.raises(TypeError, match=r"^call\(\) (got an unexpected keyword|missing a required)"):
            call(*["m"][: len(wrong)], **wrong)


def test_a_command_has_the_options_of_the_record():
    made = {each.name: each for each in parameters_of(Call, {"Sizes": Sizes})}
    assert list(made) == ["model", "width", "kind", "texts", "fast", "force", "minutes"]
    parsed = click.Command("call", params=list(made.values())).make_context(
        "call", ["m", "--text", "x", "--text", "y", "--no-fast", "--width", "3", "--minutes", "0.5"]
    )
    assert parsed.params == {
        **{"model": "m", "width": 3, "texts": ("x", "y"), "fast": False, "force": False, "minutes": 0.5, "kind": None}
    }
    assert (made["width"].section, made["minutes"].section, made["minutes"].default) == ("Sizes", "Options", 30.0)
    assert made["width"].help == "As wide as this."


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Options that other ones, or the kind of a model, make void."""

    data: Annotated[object, Help("Text.")] = None
    samples: Annotated[int, Help("Of it.", needs="data")] = 8
    beams: Annotated[Annotated[int | None, Help("Beams.")], Help("", needs="data", is_for_text=True)] = None


@pytest.mark.parametrize("given", [{"samples": 3}, {"beams": 1}])
def test_an_option_without_effect_is_refused(given):
    take = takes(Parts)(values_of)
    name = next(iter(given))
    with pytest.raises(OptionError, match=f"{name} needs data: give data, too, or remove {name}"):
        take(**given)
    assert take(**given, data="x") == {**values_of(Parts()), **given, "data": "x"}
    assert take(samples=8) == values_of(Parts())  # the default
    rows = pandas.DataFrame({"de": ["Hallo"]})  # which can't be compared
    assert take(**given, data=rows)["data"] is rows
    check_speech(Parts(samples=3), "whisper")
    with pytest.raises(OptionError, match="beams is for text; whisper is a model for speech: remove beams"):
        check_speech(Parts(beams=2), "whisper")


def test_an_error_has_the_names_of_options_as_data():
    error = OptionError("encoder_groups", " is 4, but 6 layers: give ", "ratio", " alone")
    assert str(error) == "encoder_groups is 4, but 6 layers: give ratio alone"
    assert error.fields == ("encoder_groups", "ratio")
    typed = {"encoder_groups": "--encoder-groups", "ratio": "--ratio"}
    assert explain(error, typed) == "--encoder-groups is 4, but 6 layers: give --ratio alone"
    assert explain(ValueError("ratio is 4"), typed) == "ratio is 4"
    assert OptionError("", "nothing: remove ", "ratio").fields == ("ratio",)


def test_the_type_of_an_option_is_written_as_in_a_signature():
    types = {option.name: option.type_name for option in options_of(Call)}
    assert types == {
        **{"model": "str", "width": "int | None", "texts": "tuple[str, ...]", "fast": "bool | None", "force": "bool"},
        **{"minutes": "float", "hidden": "object", "kind": "Literal['a', 'b']"},
    }
