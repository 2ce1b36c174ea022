"""Options stated once: a field of a record has name, type, default and help; functions, commands and pages read it.

`takes(Record)` gives a function the fields of a data class as its arguments. The help of a field is in its annotation:
`ratio: Annotated[float | None, Help("Dense / kept parameters.", "P")] = None`. A field without help is no option of a
command.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_args, get_origin

# Smallest and largest whole number of a kind; seeds have the range of numpy's.
RANGES: dict[str, tuple[int | None, int | None]] = {"count": (1, None), "seed": (0, 2**32 - 1), "port": (1, 65535)}
P = ParamSpec("P")
Record = TypeVar("Record")
R = TypeVar("R")


@dataclass(frozen=True)
class Help:
    """What is written about an option.

    Attributes:
        text: for the command line and the reference.
        metavar: placeholder of the value, such as `N`.
        more: further sentences of the reference.
        name: the option on the command line, if it is not the field's name with dashes.
        also: another name of the option.
        kind: kind of the value if it is not that of the type: `data` and `checkpoint` (a folder, file or Hub name),
            `file`, `seed`, `count` (1 or more), `port`, `number`, `minutes`, `hidden` (no option of a command).
        values: values that a shell completes.
        needs: field of another option, without which this one has no effect.
        is_for_text: whether models for speech have no use for it.
    """

    text: str
    metavar: str | None = None
    more: str = ""
    name: str | None = None
    also: str | None = None
    kind: str = ""
    values: tuple[str, ...] = ()
    needs: str = ""
    is_for_text: bool = False


@dataclass(frozen=True)
class Option:
    """A field of a record: name, type, default and help."""

    name: str
    type: Any
    default: Any
    help: Help
    is_positional: bool
    is_required: bool

    @property
    def type_name(self) -> str:
        """The type as it is written."""
        name = self.type.__name__ if isinstance(self.type, type) and not get_args(self.type) else str(self.type)
        return re.sub(r"\b(?:\w+\.)+(?=\w)|ForwardRef\('([^']*)'\)", r"\1", name).replace("NoneType", "None")


def options_of(record: type) -> Iterator[Option]:
    """The fields of a record, in the order of its arguments. The help is that of the first class that states it.

    A second help of a field, as of `Annotated[NumBeams, Help("", needs="data")]`, adds what the option needs.
    """
    parameters = inspect.signature(record).parameters
    by_name = {field.name: field for field in fields(cast(Any, record))}
    for name in parameters:
        found: list[Help] = []
        for each in record.__mro__:
            parts = getattr(inspect.get_annotations(each).get(name), "__metadata__", ())
            found = found or [part for part in parts if isinstance(part, Help)]
        kind = by_name[name].type
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        text = (
            replace(found[0], needs=found[-1].needs, is_for_text=found[-1].is_for_text)
            if found
            else Help("", kind="hidden")
        )
        field = by_name[name]
        default = None if field.default is MISSING else field.default
        yield Option(name, kind, default, text, not field.kw_only, field.default is MISSING)


def takes(record: Callable[P, Record]) -> Callable[[Callable[[Record], R]], Callable[P, R]]:
    """Give a function of a record the record's fields as its arguments, with their signature and their help.

    Type checkers and editors see the arguments of the data class.
    """

    def decorate(function: Callable[[Record], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            try:
                inspect.signature(record).bind(*arguments, **options)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            made = record(*arguments, **options)
            check_whole_numbers(made)
            check_needs(made)
            return function(made)

        of_record, found = inspect.signature(record), list(options_of(cast(type, record)))
        types = {option.name: option.type_name for option in found}
        parameters = [each.replace(annotation=types[each.name]) for each in of_record.parameters.values()]
        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        call.__doc__ = _with_arguments(inspect.getdoc(function) or "", found)
        call.__annotations__ = types | {"return": returned}
        del call.__wrapped__
        return call

    return decorate


def _with_arguments(text: str, options: list[Option]) -> str:
    """A docstring whose line `Args:` is followed by the help of options, each with its default."""
    lines = []
    for option in options:
        if option.help.text:
            line = f"{option.name}: {' '.join(filter(None, (option.help.text, option.help.more)))}"
            lines += textwrap.wrap(line, 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return text.replace("Args:\n", "Args:\n" + "\n".join(lines) + "\n", 1)


def check_whole_numbers(record: object) -> None:
    """Raise `OptionError` where a field for a whole number holds anything else, or a number out of its range."""
    for option in options_of(type(record)):
        value = getattr(record, option.name)
        if value is None or option.type not in (int, int | None):
            continue
        least, most = RANGES.get(option.help.kind, (None, None))
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or (least is not None and value < least) or (most is not None and value > most):
            limits = "" if least is None else f", {least} or more" if most is None else f" from {least} to {most}"
            raise OptionError(option.name, f" is {value!r}, expected a whole number{limits}")


def _is_given(value: object, default: object = None) -> bool:
    """Whether a value is neither a default nor empty; rows and models in memory, which may not compare, are given."""
    compares = value is None or isinstance(value, bool | int | float | str | tuple | list)
    return not compares or value not in (None, (), [], "", default)


def _given(record: object) -> Iterator[Option]:
    """The options whose values are not their defaults."""
    for option in options_of(type(record)):
        if option.help.kind != "hidden" and _is_given(getattr(record, option.name), option.default):
            yield option


def check_needs(record: object) -> None:
    """Raise `OptionError` where an option is given that has no effect without another one."""
    for option in _given(record):
        if (needed := option.help.needs) and not _is_given(getattr(record, needed)):
            raise OptionError(option.name, " needs ", needed, ": give ", needed, ", too, or remove ", option.name)


def check_speech(record: object, name: str) -> None:
    """Raise `OptionError` where an option for text is given for the model for speech of this name."""
    for option in _given(record):
        if option.help.is_for_text:
            raise OptionError(option.name, f" is for text; {name} is a model for speech: remove ", option.name)


def values_of(record: object) -> dict[str, Any]:
    """The fields of a record, by name: nothing is copied."""
    return {field.name: getattr(record, field.name) for field in fields(cast(Any, record))}


class OptionError(ValueError):
    """An option has a value that cannot be used.

    The parts of the message are names of options and text in turn: `OptionError("ratio", " is 1, expected more")`. So
    the command line can write `--ratio`. A message that begins with text has the first name `""`.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__("".join(parts))
        self.parts = parts

    @property
    def fields(self) -> tuple[str, ...]:
        """The options concerned, by the names of their fields."""
        return tuple(filter(None, self.parts[::2]))

    def spell(self, names: Mapping[str, str]) -> str:
        """The message with other names of the options: {field: name}."""
        return "".join(names.get(part, part) if index % 2 == 0 else part for index, part in enumerate(self.parts))


def join_options(names: list[str]) -> list[str]:
    """Parts of a message that enumerate options."""
    return [part for name in names for part in (name, " and ")][:-1]
