"""Each command says in one sentence which optional package is missing, and how to install it here."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import support_collect
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support_e2e import HANG_S

from collect import cli
from shardlab import extras
from shardlab.errors import MissingExtra
from shardlab.workspace.workspace import Workspace

ROOT = Path(__file__).parents[2]
VERBS = [word for word in cli.parser().first_words if word.isalpha() and word != "sample"]  # sample runs until a signal arrives
FOR_DEVELOPERS = {"dev", "mutants"}
# Runs a command line with some modules blocked, and prints which modules of extras it imported.
RUN = """\
import atexit, json, os, sys
blocked, words = json.loads(sys.argv[1]), sys.argv[2:]
sys.modules.update(dict.fromkeys(blocked))
from shardlab import extras
def write():
    with open(os.environ["USED"], "w") as used:
        json.dump([name for name in extras.EXTRA_OF_MODULE if sys.modules.get(name)], used)
atexit.register(write)
from collect.cli import main
sys.exit(main(words))
"""


def test_the_table_has_each_module_of_each_extra_of_pyproject():
    """The table is compared with pyproject.toml through the metadata of the installed distributions."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules_of = {}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for distribution in distributions:
            modules_of.setdefault(canonicalize_name(distribution), set()).add(module)
    for extra, requirements in declared.items():
        if extra in FOR_DEVELOPERS:
            continue
        for requirement in map(Requirement, requirements):
            listed = modules_of[canonicalize_name(requirement.name)] & set(extras.EXTRA_OF_MODULE)
            assert listed, f"{requirement.name} of {extra} has no module in shardlab.extras.EXTRA_OF_MODULE"
            for module in listed:
                named = {Requirement(text).name for text in declared[extras.EXTRA_OF_MODULE[module]]}
                assert requirement.name in named, f"{module}: the extra {extras.EXTRA_OF_MODULE[module]} does not install it"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = Workspace(tmp_path_factory.mktemp("workspace"))
    support_collect.keep(made, [support_collect.cell()], repeats=1)
    support_collect.completed(made, support_collect.cell())
    return made


def command_lines(workspace, folder):
    """The options of each verb of VERBS, with which the verb imports what it needs."""
    run = workspace.list_run_ids()[0]
    return {
        "fetch": [],
        "summarize": ["--out", str(folder / "report")],
        "verdicts": [],
        "explain": ["ddp", "throughput_per_s"],
        "trace": [run],
        "timeline": [run],
        "watch": ["--port", "70000"],
        "compare": [str(workspace.path), str(workspace.path)],
        "export": ["--to", "csv", "--out", str(folder / "csv")],
        "history": [str(workspace.path)],
        "archive": ["--out", str(folder / "archive.shardlab.zip")],
        "open": [str(folder / "absent.zip")],
        "import": [str(folder / "absent.log")],
        "track": [run, "--to", "tensorboard"],
        "metrics": [],
    }


def run_collect(words, blocked, folder):
    environment = os.environ | {"USED": str(folder / "used.json")}
    command = [sys.executable, "-c", RUN, json.dumps(blocked), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    return done, json.loads((folder / "used.json").read_text())


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_without_a_needed_package_names_the_extra_to_install(verb, workspace, tmp_path):
    """Each package that the verb imports is blocked in turn; none may end in a traceback."""
    words = [verb, *command_lines(workspace, tmp_path)[verb], "--workspace", str(workspace.path)]
    done, used = run_collect(words, [], tmp_path)
    assert "Traceback" not in done.stderr
    for module in used:
        done, _ = run_collect(words, [module], tmp_path)
        assert done.returncode == 1, (module, done.stderr)
        (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert re.match(rf"error: collect {verb}.* needs the package '{module}', which is not installed here; ", sentence)
        assert sentence.endswith(f"install it with: {extras.make_install_command(extras.EXTRA_OF_MODULE[module])}")
        assert "Traceback" not in done.stderr


def test_the_printed_command_installs_from_this_checkout_with_this_python(tmp_path):
    """`pip install --dry-run` carries out the printed command except for the installation. No index is asked for shardlab."""
    message = str(MissingExtra("collect summarize", "polars"))
    command = message.partition("install it with: ")[2]
    assert command.startswith(f"{sys.executable} -m pip install ")
    dry = command.replace("pip install ", "pip install --dry-run ")
    done = subprocess.run(["bash", "-c", dry], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Obtaining file://{ROOT}" in done.stdout


def test_an_installation_without_a_checkout_needs_no_path(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "SOURCE_ROOT", str(tmp_path))
    assert extras.make_install_command("xlsx") == f"{sys.executable} -m pip install 'shardlab[xlsx]'"


def test_an_environment_of_pipx_or_uv_gets_a_command_of_its_program(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "SOURCE_ROOT", str(tmp_path))
    (tmp_path / "shardlab").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "shardlab"))
    (tmp_path / "shardlab" / "pipx_metadata.json").touch()
    assert extras.make_install_command("xlsx") == "pipx runpip shardlab install 'shardlab[xlsx]'"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "uv"], check=True)
    python = tmp_path / "uv" / "bin" / "python"
    code = f"from shardlab import extras; extras.SOURCE_ROOT = {str(tmp_path)!r}; print(extras.make_install_command('xlsx'))"
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run([python, "-c", code], env=variables, check=True, capture_output=True, text=True).stdout
    assert said == f"uv pip install --python {python} 'shardlab[xlsx]'\n"


def test_a_module_of_no_extra_keeps_its_traceback():
    assert MissingExtra.from_import_error(ModuleNotFoundError(name="yaml.nodes"), "jobs plan") is None
    assert MissingExtra.from_import_error(ModuleNotFoundError("without a name"), "jobs plan") is None
    assert "'polars'" in str(MissingExtra.from_import_error(ModuleNotFoundError(name="polars.io"), "jobs plan"))
