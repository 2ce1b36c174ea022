"""What mkdocs does beyond its plugins: formulas as MathML, which browsers show by themselves; the commands' help."""

import html
import re

import typer
from latex2mathml.converter import convert as mathml
from typer.cli import get_docs_for_click

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', flags=re.DOTALL)
COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the help of every command where a page asks for it."""
    if COMMANDS not in markdown:
        return markdown
    from lightformers_hf.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="lightformers")
    text = get_docs_for_click(obj=command, ctx=context, name="lightformers").partition("\n")[2]  # the page has a title
    return markdown.replace(COMMANDS, re.sub(r"\[/?bold\]|\\(?=\[)", "", text))


def on_page_content(content: str, **_: object) -> str:
    """Make MathML of every formula; find the pictures of RESULTS.md from its page."""

    def replace(match: re.Match) -> str:
        return mathml(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(replace, content).replace('="docs/pictures/', '="../pictures/')
