"""Executes a Python file of a user: a plug-in of a workspace. An error names the file and the line."""

from __future__ import annotations

import sys
import traceback
from types import ModuleType

from shardlab.errors import InputError
from shardlab.own_workload import WorkloadSource


def execute(source: WorkloadSource) -> ModuleType:
    """Execute the file; its helpers can be imported. Raises InputError that names the file, and the line if there is one."""
    file, folder = str(source.file), str(source.file.parent)
    module = ModuleType(f"{source.file.parent.name}.{source.name}")
    module.__file__ = file
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no helper replaces a package
    sys.modules[module.__name__] = module  # dataclasses look it up
    try:
        exec(compile(source.contents[source.file.name], file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except (Exception, SystemExit) as error:
        raise InputError(sentence(file, error)) from error
    return module


def sentence(file: str, error: BaseException) -> str:
    """An error of a user's code as a sentence that begins with the file and the line."""
    said = next(iter(str(error).splitlines()), "").rstrip(".")
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}:{error.lineno or 1}: {error.msg}."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{file}:{frames[-1].lineno}" if frames else file
    return f"{where}: {type(error).__name__}: {said}." if said else f"{where}: {type(error).__name__}."
