"""A command as a workload: a program of the user, such as a training script, which shardlab starts and measures unchanged.

`CommandWorkload` is what a matrix file states. `Command` is what a cell has: the same command line with the values of the cell
in place of the placeholders, such as `{gpus}` or `{set.layers}`.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shardlab.errors import InputError
from shardlab.files import json_file
from shardlab.files.document import Document, Problem
from shardlab.matrix import matrix_sections
from shardlab.record_types import limit_text

CHECKPOINT_PLACEHOLDER = "checkpoint"  # in `resume`: the path of the newest checkpoint of an earlier attempt
DEFAULT_LABEL = "command"  # the strategy of a cell of a command for which the matrix gives no label
LARGEST_NUMBER = 1e15  # of what a script tells about a step; a loss may be any number, and no number
MOST_WORDS = 256  # words of a command line
Word = str | int | float
Words = Annotated[list[Word], msgspec.Meta(min_length=1, max_length=MOST_WORDS)]
Label = Annotated[
    str,
    limit_text(
        r"^(?!c[0-9]+(\.[0-9]+)?\Z)[A-Za-z0-9][A-Za-z0-9 ._+-]{0,39}\Z",
        "up to 40 letters, digits, spaces and the signs . _ + -, beginning with a letter or digit; not a short name of cells "
        "such as c1",
    ),
]
RelativePath = Annotated[
    str,
    limit_text(r"^(?!/)(?!.*(^|/)\.\.(/|\Z)).{1,500}\Z", "a path below the folder of the command, without .."),
]
# The names of the values that a script may report about a step.
STEP_NAMES = ("step", "loss", "tokens", "seconds", "ms")
# Variables that shardlab or a launcher sets for each rank, so a cell must not set them.
_RESERVED_VARIABLE = re.compile(
    r"SHARDLAB_.*|SLURM_.*|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|PYTHONPATH|CUDA_VISIBLE_DEVICES"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}")


class StepSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the steps of an unchanged script are found. Exactly one of `jsonl` and `regex` is given."""

    jsonl: RelativePath | None = None
    """A file to which the script appends a JSON object for each step, as a path below the folder of the command."""
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    """A regular expression that finds a step in a line of the script's output, with the named groups step and, if they are
    there, loss, tokens, seconds and ms."""
    names: dict[str, str] = {}
    """With jsonl: the script's own names of step, loss, tokens, seconds and ms, if they differ."""
    sample: str | None = None
    """A line of the script's output or file; `jobs plan` shows what is read from it."""


class CommandWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A workload that is a command line of the user."""

    command: Words
    """The words of the command line, with placeholders such as {gpus} or {set.layers}. A first word `python` is the interpreter
    of the run's environment."""
    folder: str = "."
    """The folder of the script, relative to the folder of the matrix file; each run starts in a copy of its own."""
    exclude: list[str] = []
    """Patterns of files in the folder that runs do not need, as in .gitignore, such as data/*."""
    include: list[str] = []
    """Patterns of files in the folder that runs need although git ignores them, such as data/*.bin."""
    name: Annotated[str, limit_text(r"^[a-z0-9][a-z0-9._-]{0,39}\Z", "up to 40 small letters, digits and . _ -")] | None = None
    """The name of the workload; null: the name of the folder."""
    steps: StepSource | None = None
    """Where the steps are found; null: the script calls shardlab.steps.report."""
    launcher_options: list[Word] = []
    """Further words for the launcher, such as --config_file for accelerate."""
    resume: list[Word] = []
    """Words that are added to the command line of a later attempt, with the placeholder {checkpoint}."""
    checkpoint: RelativePath | None = None
    """A pattern of the checkpoints that the script writes, such as out/step-*.pt; the one with the largest number is the
    newest."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """The command line of a cell."""

    words: list[str]
    """The command line, without placeholders."""
    launcher_options: list[str] = []
    """Further words for the launcher."""
    steps: StepSource | None = None
    """Where the steps are found; null: the script calls shardlab.steps.report."""
    resume: list[str] = []
    """Words for a later attempt, which may still contain {checkpoint}."""
    checkpoint: str | None = None
    """A pattern of checkpoints; null: the script writes none that shardlab knows."""


class SentFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The folder of a command that came from another machine, sent to a cluster or in an archive. This machine has no folder at
    the path that the matrix file states."""

    folder: str
    """As in `CommandWorkload`."""
    exclude: list[str]
    """As in `CommandWorkload`."""
    include: list[str]
    """As in `CommandWorkload`."""
    stated_name: str | None
    """`name` of `CommandWorkload`."""
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}\Z")]
    """The name of the workload on the user's machine."""
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """The digest of the files, which names the frozen copy."""


class StrategyLabel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The strategy of a command, which only its user knows: a label that shardlab prints and does not check."""

    label: Label
    """The label, such as ddp; the placeholder {strategy} stands for it."""


def replace_commands(
    document: Document, sections: dict[str, Any], folder: Path, problems: list[Problem]
) -> dict[str, CommandWorkload]:
    """Find the commands that a matrix file gives as workloads. Returns these commands by the names that replace them.

    document, sections, folder, problems: as for `model_file.replace_models`.
    """
    command_by_name: dict[str, CommandWorkload] = {}
    for value_container, list_key, value_path in matrix_sections.find_values(sections, "workload"):
        workload_entry = value_container[list_key]
        if not isinstance(workload_entry, dict) or "command" not in workload_entry:
            continue
        workload = msgspec.convert(workload_entry, CommandWorkload)
        try:
            sent_folder = find_sent_folder(Path(document.file), workload)
            workload_name = sent_folder.name if sent_folder else workload.name or _name_folder(folder / workload.folder)
            find_placeholders(workload)
            if workload.steps is not None and (fault := explain_wrong_steps(workload.steps)) is not None:
                raise InputError(f"steps: {fault}")
            if command_by_name.setdefault(workload_name, workload) != workload:
                raise InputError(f"found two commands with the name {workload_name}. Allowed: a `name` of its own for each.")
        except InputError as error:
            problems.append(document.problem(value_path, str(error)))
            continue
        value_container[list_key] = workload_name
    return command_by_name


def replace_labels(sections: dict[str, Any]) -> set[str]:
    """Replace each strategy of the form {label: TEXT} by its text. Returns the texts. sections: as for `replace_commands`."""
    labels = set()
    for value_container, list_key, _ in matrix_sections.find_values(sections, "strategy"):
        if isinstance(value_container[list_key], dict):
            value_container[list_key] = msgspec.convert(value_container[list_key], StrategyLabel).label
            labels.add(value_container[list_key])
    return labels


def find_sent_folders_path(matrix_path: Path) -> Path:
    """The file beside a matrix file that lists the folders of commands which came from another machine together with it."""
    return matrix_path.with_name(f"{matrix_path.name}.folders.json")


def find_sent_folder(matrix_path: Path, workload: CommandWorkload) -> SentFolder | None:
    """The folder of a command that was sent together with a matrix file; None if the folder is on this machine."""
    sent_folders = json_file.read_json_if_valid(find_sent_folders_path(matrix_path), list[SentFolder]) or []
    stated_keys = (workload.folder, workload.exclude, workload.include, workload.name)
    return next(
        (sent for sent in sent_folders if stated_keys == (sent.folder, sent.exclude, sent.include, sent.stated_name)), None
    )


def _name_folder(folder: Path) -> str:
    """The name of a command: the name of its folder."""
    workload_name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._")[:40]
    if not workload_name:
        raise InputError(f"the folder {folder} gives the workload no name. Allowed: the key `name`.")
    return workload_name


def fill_command(workload: CommandWorkload, value_by_placeholder: Mapping[str, Any]) -> Command:
    """The command line of a cell. value_by_placeholder: the values of the cell by the names of placeholders.

    Raises InputError for a placeholder without a value.
    """
    return Command(
        words=[fill_placeholders(word, value_by_placeholder) for word in workload.command],
        launcher_options=[fill_placeholders(word, value_by_placeholder) for word in workload.launcher_options],
        steps=workload.steps,
        resume=[
            fill_placeholders(word, {**value_by_placeholder, CHECKPOINT_PLACEHOLDER: f"{{{CHECKPOINT_PLACEHOLDER}}}"})
            for word in workload.resume
        ],
        checkpoint=workload.checkpoint,
    )


def fill_placeholders(word: Word, value_by_placeholder: Mapping[str, Any]) -> str:
    """A word with values in place of its placeholders. Raises InputError for a placeholder without a value."""
    filled_parts = []
    for literal_text, placeholder in _split_word(word):
        filled_parts.append(literal_text)
        if placeholder is None:
            continue
        if value_by_placeholder.get(placeholder) is None:
            allowed_placeholders = ", ".join(f"{{{name}}}" for name, value in value_by_placeholder.items() if value is not None)
            raise InputError(
                f"{str(word)!r}: this cell has no value for {{{placeholder}}}. Allowed: {allowed_placeholders}. "
                "Write {{ and }} for braces."
            )
        filled_parts.append(format_value(value_by_placeholder[placeholder]))
    return "".join(filled_parts)


def find_placeholders(workload: CommandWorkload) -> set[str]:
    """The names of all placeholders in the words of a command."""
    words = (*workload.command, *workload.launcher_options, *workload.resume)
    return {placeholder for word in words for _, placeholder in _split_word(word) if placeholder is not None}


def mark_label(strategy: str) -> str:
    """The strategy of a command as tables and figures show it: shardlab does not check what the user calls it."""
    return f"{strategy} (label)"


def format_value(matrix_value: Any) -> str:
    """A value of a matrix file as a word of a command line or as the value of a variable: true and false in small letters."""
    return str(matrix_value).lower() if isinstance(matrix_value, bool) else str(matrix_value)


def format_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables as a process gets them."""
    return {name: format_value(value) for name, value in values.items()}


def explain_wrong_setting(name: str) -> str | None:
    """Why NAME cannot be used in `set.NAME`; None if it can."""
    return None if _SETTING.fullmatch(name) else "Allowed: up to 40 letters, digits and the signs _ -, beginning with a letter."


def explain_wrong_variable(variable_name: str) -> str | None:
    """Why a cell cannot set the environment variable NAME; None if it can."""
    if not _VARIABLE.fullmatch(variable_name):
        return "Allowed: letters, digits and _, beginning with a letter."
    return "shardlab or the launcher sets this variable itself." if _RESERVED_VARIABLE.fullmatch(variable_name) else None


def explain_wrong_steps(step_source: StepSource) -> str | None:
    """Why no step can be found with this description; None if it is complete. Its sample line, if there is one, is tried."""
    if (step_source.jsonl is None) == (step_source.regex is None):
        return f"exactly one of jsonl and regex is needed, found {'neither' if step_source.jsonl is None else 'both'}."
    if unknown_names := sorted(step_source.names.keys() - set(STEP_NAMES)):
        return f"names: {unknown_names[0]!r} is no value of a step. Allowed: {', '.join(STEP_NAMES)}."
    if step_source.regex is not None:
        try:
            groups = re.compile(step_source.regex).groupindex
        except re.error as error:
            return f"regex: is not a regular expression: {error}."
        if "step" not in groups or not groups.keys() <= set(STEP_NAMES):
            return (
                f"regex: found the groups {', '.join(groups) or 'none'}. Allowed: step, and any of {', '.join(STEP_NAMES[1:])}."
            )
    if step_source.sample is not None and read_step(step_source, step_source.sample) is None:
        return f"sample: no step is found in {step_source.sample!r}."
    return None


def read_step(step_source: StepSource, output_line: str) -> dict[str, float] | None:
    """The values of a step in a line of output or of a file, by the names in STEP_NAMES; None if the line tells no step."""
    value_by_name: Mapping[str, Any] | None
    if step_source.regex is not None:
        step_match = re.search(step_source.regex, output_line)
        value_by_name = step_match.groupdict() if step_match is not None else None
    else:
        value_by_name = _read_json_step(output_line, step_source.names)
    if value_by_name is None:
        return None
    number_by_name = {
        name: number
        for name, value in value_by_name.items()
        if (number := _read_number(value)) is not None and (name == "loss" or 0 <= number <= LARGEST_NUMBER)
    }
    return number_by_name if number_by_name.get("step", math.nan).is_integer() else None


def _read_json_step(line: str, own_names: Mapping[str, str]) -> dict[str, Any] | None:
    try:
        step_object = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if not isinstance(step_object, dict):
        return None
    return {name: step_object[own_names.get(name, name)] for name in STEP_NAMES if own_names.get(name, name) in step_object}


def _read_number(told_value: Any) -> float | None:
    """A value as a number; None if it is none. Not a number (nan) and infinity are numbers here."""
    if isinstance(told_value, bool) or not isinstance(told_value, int | float | str):
        return None
    try:
        number = float(told_value.replace(",", "") if isinstance(told_value, str) else told_value)
    except (ValueError, OverflowError):
        return None
    return number


def _split_word(word: Word) -> Iterator[tuple[str, str | None]]:
    """Yields (text, the name of the placeholder after it, or None) for each part of a word. Raises InputError."""
    if not isinstance(word, str):
        yield str(word), None
        return
    try:
        word_parts = list(string.Formatter().parse(word))
    except ValueError as error:
        raise InputError(f"{word!r}: {error}. Write {{{{ and }}}} for braces that are no placeholder.") from None
    for literal_text, name, format_text, conversion in word_parts:
        if name == "" or format_text or conversion:
            raise InputError(f"{word!r}: found {{{name or ''}{conversion or ''}{format_text or ''}}}. Allowed: a name alone.")
        yield literal_text, name
