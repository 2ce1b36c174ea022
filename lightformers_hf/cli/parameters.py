"""Arguments and options of commands: made from the records of functions, or stated here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from ..conversion.options import CompressionOptions, read_pattern
from ..data_files import check_data
from ..files import check_folder, find_folder
from ..options import RANGES, Option, options_of


class FilePath(click.Path):
    """A path that may begin with `~`, the home folder, which shells do not replace in `--json=~/results.json`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        return super().convert(os.path.expanduser(value), param, ctx)


# Files or folders, or names on the Hub. A model or data file that does not exist is refused
# before torch is imported.
CHECKPOINT, DATA = click.Path(), click.Path()
FILE = FilePath(path_type=Path)
TYPES: dict[str, click.ParamType] = {"checkpoint": CHECKPOINT, "data": DATA, "file": FILE, "number": click.INT}
TYPES |= {kind: click.IntRange(*limits) for kind, limits in RANGES.items()}
TYPES |= {"minutes": click.FloatRange(min=0, min_open=True)}


class CommandOption(click.Option):
    """An option, under the heading `section` of the help."""

    section = "Options"


class Argument(click.Argument):
    """An argument with a help text, `about`, which older versions of click do not have."""

    def __init__(self, name: str, about: str, **settings: Any):
        super().__init__([name], **settings)
        self.about = about

    @property
    def word(self) -> str:
        """Its form in the help: NAME, [NAME] if it is optional, NAME... for several."""
        name = str(self.name).upper()
        return (name if self.required else f"[{name}]") + "..." * (self.nargs == -1)


def option(*names: str, values: Callable[[], Sequence[str]] | Sequence[str] = (), **settings: Any) -> CommandOption:
    """Return an option, with its default in the help. The shell completes it with `values`."""
    if values:

        def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
            return [value for value in (values() if callable(values) else values) if value.startswith(begun)]

        settings["shell_complete"] = complete
    if settings.get("type") in (int, click.INT) or isinstance(settings.get("type"), click.IntRange):
        settings = {"metavar": "N", **settings}
    return CommandOption(names, show_default=settings.get("default") is not None, **settings)


def parameters_of(record: type, headings: Mapping[str, type] | None = None) -> Iterator[click.Parameter]:
    """The arguments and options of a command, from the record of its function.

    `headings`: {heading in the help: a record whose fields stand under it}.
    """
    titles = {field.name: title for title, each in (headings or {}).items() for field in fields(each)}
    for found in options_of(record):
        if found.help.kind == "hidden":
            continue
        if found.is_positional:
            many = get_origin(found.type) is Sequence
            settings = {"default": found.default, "required": False} if "Default:" in found.help.text else {}
            about = found.help.text
            yield Argument(found.name, about, type=TYPES.get(found.help.kind), nargs=-1 if many else 1, **settings)
        else:
            made = make_option(found)
            made.section = titles.get(found.name, "Options")
            yield made


def make_option(found: Option) -> CommandOption:
    """The option of a field: a bool is a flag, a sequence can be repeated. Its help has the default."""
    types = get_args(found.type) if get_origin(found.type) is not Literal else (str,)
    types = types or (found.type,)
    name = found.help.name or f"--{found.name.replace('_', '-')}"
    settings: dict[str, Any] = {"help": found.help.text}
    if bool in types:
        if found.default is False:
            return option(name, found.name, is_flag=True, **settings)
        return option(f"{name}/--no-{name[2:]}", default=found.default, **settings)
    numbers = [kind for kind in (float, int) if kind in types and str not in types]
    settings["type"] = TYPES.get(found.help.kind, numbers[0] if numbers else str)
    kinds = (found.type, *types)
    settings["multiple"] = any(get_origin(kind) in (dict, tuple, Iterable, Sequence) for kind in kinds)
    if found.help.metavar:
        settings["metavar"] = found.help.metavar
    if found.default is not None and not settings["multiple"] and "Default:" not in found.help.text:
        settings["default"] = found.default
    values = metric_names if found.help.kind == "metric" else found.help.values
    names = filter(None, (name, found.help.also, found.name))
    return option(*dict.fromkeys(names), values=values, required=found.is_required, **settings)


def check_inputs(parameters: Sequence[click.Parameter], arguments: Mapping[str, Any]) -> None:
    """Raise an error where a model's folder or a file of data that is named is not there."""
    for parameter in parameters:
        value = arguments.get(str(parameter.name))
        for name in filter(None, value if isinstance(value, tuple) else (value,)):
            if parameter.type is DATA:
                check_data(name)
            elif parameter.type is CHECKPOINT and (folder := find_folder(name)):
                check_folder(folder)


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise `ValueError` where a module of an optional extra is missing, without which `what` can't be done."""
    if find_spec(module) is None:
        raise ValueError(f"{what} needs {module}: pip install 'lightformers_hf[{extra}]'")


def metric_names() -> list[str]:
    """Return the values of `--metric`."""
    from ..evaluation.quality import metric_names

    return metric_names()


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def pop_languages(options: dict[str, Any]) -> dict[str, Any]:
    """Take the two languages out of the options, under the names that functions behind the public ones have."""
    return {"source": options.pop("source_lang"), "target": options.pop("target_lang")}


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given. An error in those of a conversion is raised before torch is imported."""
    found = given(**options)
    found |= {"pattern": read_pattern(found["pattern"])} if "pattern" in found else {}
    CompressionOptions.of(found)
    return found
