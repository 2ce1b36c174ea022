"""What mkdocs does beyond its plugins: formulas as MathML, which browsers show by themselves; the commands' help."""

import html
import re
from collections.abc import Iterator

import click
from latex2mathml.converter import convert as mathml

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', flags=re.DOTALL)
COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the help of every command where a page asks for it."""
    if COMMANDS not in markdown:
        return markdown
    from lightformers_hf.cli import app

    return markdown.replace(COMMANDS, "\n".join(describe(app, "lightformers")))


def describe(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """Heading and help of a command, then of those inside it."""
    context = command.make_context(name.split()[-1], [], parent=parent, resilient_parsing=True)
    context.terminal_width = 100
    if parent is not None:  # the page has a title
        yield f"## `{name}`\n"
    yield f"```text\n{command.get_help(context)}\n```\n"
    for inside, each in getattr(command, "commands", {}).items():
        yield from describe(each, f"{name} {inside}", context)


def on_page_content(content: str, **_: object) -> str:
    """Make MathML of every formula; find the pictures of RESULTS.md from its page."""

    def replace(match: re.Match) -> str:
        return mathml(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(replace, content).replace('="docs/pictures/', '="../pictures/')
