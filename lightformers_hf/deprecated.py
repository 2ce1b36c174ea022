"""Arguments, functions and options of version 0.1 under their old names, until version 0.3: see docs/migrating.md."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller that `old` is deprecated, and name the new form."""
    message = f"{old} is deprecated and will be removed in version 0.3: use {new}. See docs/migrating.md"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def renamed_arguments(**names: str) -> Callable[[F], F]:
    """Let a function accept keyword arguments under their old names.

    Args:
        names: {old name: new name}.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                new = names[old]
                warn_renamed(f"the argument {old!r} of {function.__name__}()", repr(new))
                if new in options:
                    raise TypeError(f"{function.__name__}() got both {new!r} and {old!r}, its old name")
                options[new] = options.pop(old)
            return function(*arguments, **options)

        return cast(F, call)

    return decorate


# {command: {its option in version 0.1: its option now, or `None` for the argument OUTPUT}}.
OLD_OPTIONS: dict[str, dict[str, str | None]] = {
    "demo": {"--output": None, "-o": None},
    "recover": {"--output": None, "-o": None},
    "report": {"-o": "--output"},
    "translate": {"-o": "--output"},
}


# {command, or word after `benchmark`: the script of the repository that replaces it}.
MOVED_COMMANDS = {
    "analyze": "analyze.py",
    "architectures": "benchmark_architectures.py",
    "conversion": "benchmark_conversion.py",
    "parameters": "count_parameters.py",
}


def current_words(command: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line with today's options, and a warning for each that was replaced."""
    found, outputs, warned, rest = [], [], [], iter(words)
    for word in rest:
        name, separator, value = word.partition("=")
        if name not in (old := OLD_OPTIONS.get(command, {})):
            found.append(word)
            continue
        new = old[name]
        warned.append(f"{name} is deprecated: give {f'{new}' if new else 'the folder as the last argument, OUTPUT'}")
        given = [value] if separator else [each for each in (next(rest, None),) if each is not None]
        if new is None:
            outputs += given
        else:
            found += [new, *given]
    return [*found, *outputs], warned
