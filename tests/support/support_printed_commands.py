"""The commands that pages and the product print, and the real parsers that have to accept them.

A page prints a command as a line of a code block or of an indented block, in the comment of such a line, or in its text between
backticks. The product prints commands in messages and help texts: after a colon, between backticks, and as examples.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import collect.cli
import jobs.cli
import provision.cli
import shardlab.cli
from shardlab.errors import InputError, UnknownName

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference" / "commands.md"  # repeats the help of all commands; `help_commands` has its examples
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *(ROOT / "docs").rglob("*.md")} - {GENERATED})
PACKAGES = ("collect", "jobs", "provision", "shardlab", "trainers")
PROGRAMS = ("collect", "jobs", "make", "provision", "shardlab")
BEFORE = re.compile(r"(?:\$ |sudo |time |env |\.venv/bin/|[A-Z_]+=\S+ )*")  # what may stand before the name of a program
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TICKS = re.compile(r"(?<!`)`([^`]+)`(?!`)")
INSIDE = re.compile(r"\$\((.*?)\)")  # a command whose output is a word of another command
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb of a command."""
    return next(dict(action.choices) for action in parser._actions if isinstance(action, argparse._SubParsersAction))


# In a sentence, a command begins with its program and its verb or file. It ends where the sentence or its part ends.
VERBS = {
    "collect": verbs_of(collect.cli.parser()),
    "jobs": verbs_of(jobs.cli.parser()),
    "provision": ["FILE", r"CLUSTER\.yaml", r"cluster\.yaml", r"examples/\S+", "X", ">", "--"],
    "shardlab": [*shardlab.cli.COMMAND_SUMMARIES, "shell-init", "schema"],
}
VERBS["provision"] += verbs_of(provision.cli.parser())
BEGIN = "|".join(f"{program} (?:{'|'.join(verbs)})" for program, verbs in VERBS.items())
IN_SENTENCE = re.compile(rf"(?:: |\bor )((?:{BEGIN})(?:(?!\.(?:\s|$)|,\s)[^;#`()\n])*)")


class Printed(NamedTuple):
    """A command that is printed.

    place: FILE:LINE. line: the text as it is printed. whole: whether a reader types the line as it is; otherwise it only
    mentions a verb or an option, so words that the parser requires may be missing at its end.
    """

    place: str
    line: str
    whole: bool


def page_commands(page: Path) -> Iterator[Printed]:
    """The commands of a page."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for fence in FENCE.finditer(text):
        is_shell = fence[1] in ("sh", "bash", "console")
        yield from _block_commands(fence[2], name, _line(text, fence.start(2)), is_typed=is_shell)
    for block in re.finditer(r"(?:^(?: {4,}|\t).*\n?)+", prose, re.MULTILINE):
        yield from _block_commands(block[0], name, _line(prose, block.start()), is_typed=True)
    yield from _in_ticks(prose, name)


def _block_commands(block: str, name: str, first: int, *, is_typed: bool) -> Iterator[Printed]:
    """The commands of a block. If some of its lines have the prompt `$ `, the other lines are output."""
    has_prompt = any(line.strip().startswith("$ ") for line in block.splitlines())
    for number, line in enumerate(block.splitlines(), first):
        command, _, comment = line.strip().partition(" # ")
        if starts_program(command) and (command.startswith("$ ") if has_prompt else is_typed):
            yield Printed(f"{name}:{number}", command.strip(), whole=True)
        elif has_prompt or not is_typed:
            yield from _in_sentence(command, f"{name}:{number}")
        yield from _in_sentence(f": {comment}", f"{name}:{number}")


def _in_ticks(text: str, name: str) -> Iterator[Printed]:
    for span in TICKS.finditer(text):
        if starts_program(line := " ".join(span[1].split())):
            yield Printed(f"{name}:{_line(text, span.start())}", line, whole=False)


def _in_sentence(text: str, place: str) -> Iterator[Printed]:
    for match in IN_SENTENCE.finditer(text):
        yield Printed(place, match[1].strip(), whole=False)


def product_commands() -> Iterator[Printed]:
    """The commands in the texts of our Python files, and in the comments and messages of our templates."""
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for number, text in _texts(ast.parse(path.read_text())):
                for printed in (*_in_ticks(text, name), *_in_sentence(text, "")):
                    yield printed._replace(place=f"{name}:{number}")
    for path in sorted((ROOT / "templates").rglob("*.j2")):
        text = re.sub(r"\{\{.*?\}\}", "X", path.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            for printed in (*_in_ticks(line, ""), *_in_sentence(line, "")):
                yield printed._replace(place=f"{path.relative_to(ROOT)}:{number}")


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each text of a Python file, with its line. In an f-string, each value is the placeholder X."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def help_commands() -> Iterator[Printed]:
    """The examples in the help of each command and of each of its verbs."""
    parsers: dict[str, argparse.ArgumentParser] = {"shardlab": shardlab.cli._make_parser()}
    for top in (provision.cli.parser(), jobs.cli.parser(), collect.cli.parser()):
        parsers |= {top.prog: top} | {f"{top.prog} {verb}": made for verb, made in verbs_of(top).items()}
    for name, made in parsers.items():
        for line in (made.epilog or "").splitlines():
            columns = re.split(r" {3,}", line.strip())  # a command, and what it does or another command
            for column in columns:
                if line.startswith("  ") and starts_program(column) and not column.startswith("make "):
                    yield Printed(f"{name} --help", column, whole=True)


def starts_program(text: str) -> bool:
    """Whether a text is a command of ours with at least one more word, or `provision` alone, which is a command."""
    match = re.match(rf"{BEFORE.pattern}(\S+)( +\S)?", text)
    is_shell = text.startswith((". ", "cd ", "eval ", "mkdir ")) and bool(commands(text))
    return is_shell or (match is not None and match[1] in PROGRAMS and (match[2] is not None or match[1] == "provision"))


def refusal(printed: Printed) -> str | None:
    """Why the parsers refuse a printed command; None if they accept it."""
    line = printed.line if printed.whole else re.sub(r"[\[\]]", "", printed.line)  # brackets: the part is optional
    for words in commands(line):
        if (why := _refusal(words, whole=printed.whole)) is not None:
            return f"{printed.place}: {printed.line}: {why}"
    return None


def commands(line: str) -> list[list[str]]:
    """The words of each command of ours in a line, without redirections, and without what stands before the program."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in ("&&", "|", ";", "||"):
            parts.append([])
        elif re.fullmatch(r"[<>]+", word):
            next(words)
        elif parts[-1] or not BEFORE.fullmatch(f"{word} "):
            parts[-1].append(word.removeprefix(".venv/bin/"))
            parts += [inner.split() for inner in INSIDE.findall(word)]
    return [command for command in parts if command and command[0] in PROGRAMS]


def _refusal(words: Sequence[str], *, whole: bool) -> str | None:
    program, *rest = words
    for place, word in enumerate(rest):
        if word in ("...", "--X"):  # the page or the f-string does not say which words follow
            rest, whole = rest[:place], False
            break
    if program == "make":
        return _refusal_of_make(tuple(rest))
    if program == "shardlab" and rest and rest[0] in shardlab.cli.COMMAND_SUMMARIES:
        return _refusal(rest, whole=whole)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            parsers(whole)[program](rest)
    except SystemExit as ended:
        return errors.getvalue().strip() if ended.code else None
    except InputError as error:
        return str(error)
    return None


@functools.cache
def parsers(whole: bool) -> dict[str, Callable[[list[str]], object]]:
    """The real parser of each program. whole: as in `Printed`; if it is false, nothing is required."""
    made = {"jobs": jobs.cli.parser(), "collect": collect.cli.parser(), "shardlab": shardlab.cli._make_parser()}
    made["provision"] = provision.cli.parser()
    for parser in made.values():
        _prepare(parser, whole)

    def provision_command(words: list[str]) -> object:
        placeholders = ({"FILE": "cluster.yaml", "X": "cluster.yaml"}, {"VERB": "plan", "X": "plan"})
        first = [names.get(word, word) for names, word in zip(placeholders, words, strict=False)]
        return made["provision"].parse_args([*first, *words[2:]])

    def shardlab_command(words: list[str]) -> object:
        arguments = made["shardlab"].parse_args(words)
        if arguments.command not in ("shell-init", "schema", *shardlab.cli.COMMAND_SUMMARIES):
            raise UnknownName("command", arguments.command, shardlab.cli.COMMAND_SUMMARIES)
        return arguments

    parse = {name: parser.parse_args for name, parser in made.items()}
    return {**parse, "provision": provision_command, "shardlab": shardlab_command}


def _prepare(parser: argparse.ArgumentParser, whole: bool) -> None:
    """Let a parser accept a placeholder such as N for a number. If a command is not whole, let the parser require nothing."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _prepare(verb, whole)
        elif action.type is not None:
            action.type = functools.partial(_read, action.type)
        if not whole:
            action.required = False
            if action.nargs is None and not isinstance(action, argparse._SubParsersAction):
                action.nargs = "?"
    for group in parser._mutually_exclusive_groups:
        group.required = group.required and whole


def _read(read: Callable[[str], Any], text: str) -> Any:
    return text if PLACEHOLDER.fullmatch(text) else read(text)


@functools.cache
def _refusal_of_make(words: tuple[str, ...]) -> str | None:
    """Why make refuses these words. A variable has to occur in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for name in (word.partition("=")[0] for word in words if "=" in word):
        if f"$({name})" not in makefile:
            return f"the Makefile has no variable {name}"
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # variables of a `make test` that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--dry-run", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else None


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
