"""Executes a Python file of a user: a plug-in of a workspace. An error names the file and the line.

The file and its helpers are executed as they were read and digested. Neither a later change of the files nor bytecode beside
them has an effect.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from shardlab.errors import InputError
from shardlab.plugin_source import PluginSource


class HelperFinder(MetaPathFinder, Loader):
    """Imports the helpers of one folder of plug-ins from what was read. source: the plug-in that needs them."""

    def __init__(self, source: PluginSource) -> None:
        self.folder = source.file.parent
        self.helpers = {name.removesuffix(".py"): text for name, text in source.contents.items() if name.startswith("_")}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /) -> ModuleSpec | None:
        if path is not None or fullname not in self.helpers:
            return None
        return spec_from_loader(fullname, self, origin=self._file(fullname))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._file(module.__name__)
        code = compile(self.helpers[module.__name__], module.__file__, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102

    def _file(self, name: str) -> str:
        return str(self.folder / f"{name}.py")


def execute(source: PluginSource) -> ModuleType:
    """Execute the file; its helpers can be imported. Raises InputError that names the file, and the line if there is one."""
    file = str(source.file)
    module = ModuleType(f"{source.file.parent.name}.{source.name}")
    module.__file__ = file
    _let_import(HelperFinder(source))
    sys.modules[module.__name__] = module  # dataclasses look it up
    try:
        exec(compile(source.contents[source.file.name], file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except (Exception, SystemExit) as error:
        raise InputError(sentence(file, error)) from error
    return module


def _let_import(finder: HelperFinder) -> None:
    """Let modules import these helpers. They come last, so that no helper replaces a package. Raises InputError if a helper of
    another folder has the same name, because Python knows one module of each name."""
    for other in [entry for entry in sys.meta_path if isinstance(entry, HelperFinder)]:
        if other.folder == finder.folder:
            sys.meta_path.remove(other)
            for name in other.helpers.keys() | finder.helpers.keys():
                if other.helpers.get(name) != finder.helpers.get(name):
                    sys.modules.pop(name, None)
        elif both := sorted(other.helpers.keys() & finder.helpers.keys()):
            raise InputError(
                f"{finder.folder / both[0]}.py: {other.folder / both[0]}.py has the same name, and Python would import one of "
                "them for both. Allowed: different names."
            )
    sys.meta_path.append(finder)


def sentence(file: str, error: BaseException) -> str:
    """An error of a user's code as a sentence that begins with the file, or a helper beside it, and the line."""
    said = next(iter(str(error).splitlines()), "").rstrip(".")
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}:{error.lineno or 1}: {error.msg}."
    where = place(error, Path(file).parent) or file
    return f"{where}: {type(error).__name__}: {said}." if said else f"{where}: {type(error).__name__}."


def place(error: BaseException, folder: Path) -> str | None:
    """`FILE:LINE` of the last line in a plug-in or helper of this folder that an error passed; None if it passed none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == folder]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
