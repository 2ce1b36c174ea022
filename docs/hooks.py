"""Hooks of mkdocs: formulas as MathML, help of the commands, tables of configurations, links out of docs/."""

import dataclasses
import html
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import click
from latex2mathml.converter import convert as mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

import lightformers_hf
from lightformers_hf.cli import app

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', flags=re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*(?![^<]*>)")  # in text, not inside a tag
COMMANDS = "<!-- commands -->"
REFERENCE = re.compile(r"<!--\n(:::.*?)\n-->", flags=re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^):#]+)(#[^)]*)?\)")
RESULTS = "results.md"
CONFIGURATION = re.compile("<!-- fields of (\\w+) -->")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add RESULTS.md of the repository as a page."""
    text = (Path(config.docs_dir).parent / "RESULTS.md").read_text(encoding="utf-8")
    files.append(File.generated(config, RESULTS, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Insert what only the site shows: docstrings, help of the commands, tables of configurations.

    The source of a page hides `:::` blocks of mkdocstrings in comments, because GitHub would show them as text.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def find(match: re.Match) -> str:
        """A link that leaves docs/: to the page of RESULTS.md, or only its text."""
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if target == "../RESULTS.md":
            return f"[{match[1]}]({posixpath.relpath(RESULTS, folder or '.')}{match[3] or ''})"
        return match[1] if target.startswith("../") else match[0]

    markdown = LINK.sub(find, REFERENCE.sub(r"\1", markdown))
    markdown = CONFIGURATION.sub(lambda match: "\n".join(describe_configuration(match[1])), markdown)
    return markdown.replace(COMMANDS, "\n".join(describe(app, "lightformers"))) if COMMANDS in markdown else markdown


def describe(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """Heading and help of a command, then of its subcommands."""
    context = command.make_context(name.split()[-1], [], parent=parent, resilient_parsing=True)
    context.terminal_width = 100
    if parent is not None:  # the page has a title
        yield f"## `{name}`\n"
    examples, command.examples = command.examples, ""
    yield f"```text\n{command.get_help(context).rstrip()}\n```\n"
    command.examples = examples
    lines = [line.strip() for line in examples.splitlines() if line.strip() not in ("", "Examples:")]
    yield "```bash\n{}\n```\n".format("\n".join(line.removeprefix("Example: ") for line in lines))
    for inside, each in getattr(command, "commands", {}).items():
        yield from describe(each, f"{name} {inside}", context)


def describe_configuration(name: str) -> Iterator[str]:
    """Table of the fields that a configuration adds, or gives another default."""
    from lightformers_hf.models import configuration_lightformer

    shared = configuration_lightformer.FactorizedConfig
    config = getattr(lightformers_hf, name, shared)
    below = {field.name: field.default for field in dataclasses.fields(config.__mro__[1])}
    sentences: dict[str, str] = {}
    for each in reversed(config.__mro__[: config.__mro__.index(shared) + 1]):
        sentences |= field_sentences(each)
    yield "| field | type | default | |\n|---|---|---|---|"
    for field in dataclasses.fields(config):
        if field.name not in below or below[field.name] != field.default:
            kind = getattr(field.type, "__name__", None) if isinstance(field.type, type) else str(field.type)
            kind = kind.replace("float | int", "float").replace("|", "or")
            yield f"| `{field.name}` | {kind} | `{field.default!r}` | {sentences[field.name]} |"


def field_sentences(config: type) -> dict[str, str]:
    """{field: description in the class's docstring}, with one entry for each name of a group."""
    arguments = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(config) + "\n\n", flags=re.DOTALL)[1]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", arguments, flags=re.MULTILINE)
    return {name: " ".join(text.split()).replace("|", "\\|") for names, text in entries for name in names.split(", ")}


def on_page_content(content: str, **_: object) -> str:
    """Replace formulas by MathML, mark options so that no line breaks them, and correct the paths of RESULTS.md."""

    def replace(match: re.Match) -> str:
        display = "block" if match[1] == "div" else "inline"
        formula = mathml(html.unescape(match[2]).strip(), display=display)
        # The circumflex accent replaces the power operator, which browsers stretch over the symbol.
        formula = formula.replace("<mo>&#x0005E;</mo></mover>", '<mo stretchy="false">&#x002C6;</mo></mover>')
        return f'<div class="formula">{formula}</div>' if display == "block" else formula

    content = OPTION.sub(r'<span class="option">\g<0></span>', FORMULA.sub(replace, content))
    content = re.sub(r'="docs/([\w/-]+)\.md"', r'="\1.html"', content)
    return content.replace('="docs/pictures/', '="pictures/')


def on_post_page(output: str, *, page: Page, **_: object) -> str:
    """Load the search worker from the site: the theme's address needs a network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", get_relative_url("worker.js", page.url))
