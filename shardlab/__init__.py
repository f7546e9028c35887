"""The code that provision, jobs, trainers and collect share, such as the types of a cluster, a matrix, a run and a record."""

__version__ = "0.1.0"

# The folders of shardlab's source that are packages of Python.
PACKAGES = ("shardlab", "matrices", "templates", "provision", "jobs", "trainers", "collect")

# What users call in Python, such as `shardlab.open(".")` -> its module and function, which are imported when they are needed.
_PYTHON_INTERFACE = {"open": "collect.results:open_results", "plan": "jobs.planned_matrix:plan_in_python"}
MYPY = False  # mypy treats a variable of this name as true; it would not check names of this package that __getattr__ may have

if not MYPY:

    def __getattr__(name):
        if name not in _PYTHON_INTERFACE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        errors = importlib.import_module("shardlab.errors")  # which imports this package
        module_name, _, function_name = _PYTHON_INTERFACE[name].partition(":")
        try:
            return getattr(importlib.import_module(module_name), function_name)
        except ModuleNotFoundError as error:
            raise errors.MissingExtra.from_import_error(error, f"shardlab.{name}") or error from None

    def __dir__():
        return sorted({*globals(), *_PYTHON_INTERFACE})
