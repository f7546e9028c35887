"""Executes a plug-in of a workspace, which is a Python file of the user. An error message names the file and the line.

The code that is executed is the content that was read into a PluginSource, whose digest is known. If the files change after
that, or if Python's bytecode lies beside the files, this has no effect.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from shardlab.errors import InputError, ShardlabError
from shardlab.files.plugin_source import PluginSource


class HelperFinder(MetaPathFinder, Loader):
    """An importer for the helpers in one folder of plug-ins. It executes the contents in `source`, not the files on the disk.

    source: the source of the plug-in that imports the helpers.
    """

    def __init__(self, source: PluginSource) -> None:
        self.folder = source.file.parent
        self.code_by_helper = {name.removesuffix(".py"): text for name, text in source.contents.items() if name.startswith("_")}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /) -> ModuleSpec | None:
        if path is not None or fullname not in self.code_by_helper:
            return None
        return spec_from_loader(fullname, self, origin=self._make_helper_path(fullname))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._make_helper_path(module.__name__)
        compiled_helper = compile(self.code_by_helper[module.__name__], module.__file__, "exec", dont_inherit=True)
        exec(compiled_helper, module.__dict__)  # noqa: S102

    def _make_helper_path(self, name: str) -> str:
        return str(self.folder / f"{name}.py")


def execute_plugin(source: PluginSource) -> ModuleType:
    """Execute the file of a plug-in, which may import its helpers. Returns the module that was executed.

    Raises an InputError that names the file and, if possible, the line.
    """
    plugin_path = str(source.file)
    module = ModuleType(f"{source.file.parent.name}.{source.name}")
    module.__file__ = plugin_path
    _install_finder(HelperFinder(source))
    sys.modules[module.__name__] = module  # a dataclass in the file looks for its module in sys.modules
    with raise_plugin_errors(plugin_path, passed_errors=()):
        exec(compile(source.contents[source.file.name], plugin_path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    return module


@contextlib.contextmanager
def raise_plugin_errors(
    plugin_file: str, further_sentence: str = "", passed_errors: tuple[type[Exception], ...] = (ShardlabError,)
) -> Iterator[None]:
    """The context of a call of the user's code: an error becomes an InputError as `describe_error` words it.

    further_sentence: a sentence that follows. passed_errors: errors that are raised unchanged.
    """
    try:
        yield
    except passed_errors:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{describe_error(plugin_file, error)} {further_sentence}".rstrip()) from error


def _install_finder(finder: HelperFinder) -> None:
    """Add an importer of helpers to Python's import system, after all other importers, so that no helper replaces a package.

    An earlier importer for the same folder is removed, together with its imported helpers that have changed. Raises InputError
    if a helper in another folder has the same name, because Python allows only one module with a name.
    """
    for other_finder in [importer for importer in sys.meta_path if isinstance(importer, HelperFinder)]:
        if other_finder.folder == finder.folder:
            sys.meta_path.remove(other_finder)
            for helper_name in other_finder.code_by_helper.keys() | finder.code_by_helper.keys():
                if other_finder.code_by_helper.get(helper_name) != finder.code_by_helper.get(helper_name):
                    sys.modules.pop(helper_name, None)
        elif common_names := sorted(other_finder.code_by_helper.keys() & finder.code_by_helper.keys()):
            raise InputError(
                f"{finder.folder / common_names[0]}.py: {other_finder.folder / common_names[0]}.py has the same name, and "
                "Python would import one of "
                "them for both. Allowed: different names."
            )
    sys.meta_path.append(finder)


def describe_error(plugin_file: str, error: BaseException) -> str:
    """An error in the user's code as a sentence. The sentence begins with the file and line of the error.

    plugin_file: the file of the plug-in. The error may be in this file or in a helper. If the traceback contains no line of the
    folder of plug-ins, the sentence names only `plugin_file`.
    """
    error_line = next(iter(str(error).splitlines()), "").rstrip(".")
    if isinstance(error, SyntaxError):
        return f"{error.filename or plugin_file}:{error.lineno or 1}: {error.msg}."
    location = find_error_line(error, Path(plugin_file).parent) or plugin_file
    return f"{location}: {type(error).__name__}: {error_line}." if error_line else f"{location}: {type(error).__name__}."


def find_error_line(error: BaseException, folder: Path) -> str | None:
    """`FILE:LINE` of the innermost line of code in `folder` in the traceback of an error; None if there is no such line."""
    folder_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == folder]
    return f"{folder_frames[-1].filename}:{folder_frames[-1].lineno}" if folder_frames else None
