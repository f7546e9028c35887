"""Strategies that a workspace defines in its own files: what identifies a strategy, what is refused, and which code is
executed."""

import json
import os
import sys
import time

import msgspec
import psutil
import pytest
from support_cells import CELL
from support_page import files_of
from support_trust import make_own

from jobs.cli import main
from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.plugins import own_code, plugin_process
from shardlab.plugins.plugin_process import RefusingProcess
from shardlab.remote.upload import main as upload_main
from trainers import menu
from trainers.description.describe import describe_file
from trainers.plugins import own_strategy

pytest_plugins = ["support_own_answers"]
pytestmark = pytest.mark.usefixtures("shared_answers")
PLAIN = """\
from shardlab.registry import Option
from trainers.strategy import Strategy
def refuse(cell):
    {refuse}
VARIANTS = (Strategy(name="{name}", summary="One process.", precisions=("fp32",), refuse=refuse,
                     engine="trainers.engines.single", options=(Option("wait", 1, "nothing", least=0),)),)
"""
MATRIX = """\
schema: 1
name: mine
title: mine
defaults: {workload: gpt2-tiny, launcher: fork, global_batch_size: 4, steps: 2}
axes: {strategy: [alone]}
"""


def text_of(name="alone", refuse="return None"):
    return PLAIN.format(name=name, refuse=refuse)


def workspace(folder, text, name="alone"):
    """An own workspace whose strategy file contains `text`. The matrix of the workspace uses the strategy `alone`."""
    (folder / "strategies").mkdir(parents=True)
    (folder / "strategies" / f"{name}.py").write_text(text)
    (folder / "m.yaml").write_text(MATRIX)
    return make_own(folder)


def call(made, verb, *words):
    return main([verb, *(["--matrix", str(made.path / "m.yaml")] if verb in ("plan", "render") else []),
                 *words, "--workspace", str(made.path)])  # fmt: skip


@pytest.fixture(autouse=True)
def _only_ours():
    """Removes the helper modules of workspaces that a test imported, so that the next test cannot import them."""
    yield
    for finder in [entry for entry in sys.meta_path if isinstance(entry, own_code.HelperFinder)]:
        sys.meta_path.remove(finder)
        for name in finder.code_by_helper:
            sys.modules.pop(name, None)


def described(folder, text, helper=""):
    folder = folder / "strategies"
    folder.mkdir()
    (folder / "alone.py").write_text(text)
    if helper:
        (folder / "_engine.py").write_text(helper)
    return describe_file(folder / "alone.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\n1 / 0\n", "alone.py:2: ZeroDivisionError: division by zero."),
        ("VARIANTS = (:\n", "alone.py:1: invalid syntax."),
        ("raise SystemExit(3)\n", "alone.py:1: SystemExit: 3."),
        ("VARIANTS = 3\n", "alone.py: defines no VARIANTS."),
        ("x = '\udcff'\n", "alone.py:1: (unicode error) 'utf-8' codec"),
        (text_of("other"), "alone.py: found the strategy 'other'. Allowed: alone, or alone-..."),
        (text_of() + "VARIANTS = VARIANTS * 2\n", "alone.py: defines the strategy alone twice."),
        (text_of().replace('("fp32",)', '("fp31",)'), "alone.py: alone: Invalid enum value 'fp31'"),
        (text_of().replace("precisions=", "degrees=('xp',), precisions="), "alone.py: alone: Invalid enum value 'xp'"),
        (text_of().replace("refuse=refuse", "refuse=None"), "alone.py: alone: refuse is no function of a cell."),
        (text_of().replace("trainers.engines.single", "os"), "alone: engine: found 'os'. Allowed: a helper beside the file"),
        (text_of().replace('"trainers.engines.single"', "__name__"), "alone.py: defines no function `build`"),
    ],
)
def test_the_fault_of_a_file_is_a_sentence_that_names_it(tmp_path, text, said):
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "alone.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = describe_file(tmp_path / "strategies" / "alone.py")
    assert said in found.fault
    assert found.plugins == []


@pytest.mark.parametrize(
    ("helper", "said"),
    [
        ("1 / 0\n", "_engine.py:1: ZeroDivisionError"),
        ("def build(:\n", "_engine.py:1: invalid syntax."),
        ("x = 3\n", "_engine.py: defines no function `build`, which makes the engine of alone."),
        ("import _engin\n", "_engine.py:1: ModuleNotFoundError: No module named '_engin'."),
        ("def build(cell, task, ranks):\n    pass\n", ""),
    ],
)
def test_the_engine_is_a_helper_beside_the_file_and_its_faults_name_it(tmp_path, helper, said):
    found = described(tmp_path, text_of().replace("trainers.engines.single", "_engine"), helper)
    assert said in found.fault
    assert [one.name for one in found.plugins] == ([] if said else ["alone"])


def test_helpers_are_executed_from_the_digested_content_and_not_from_bytecode(tmp_path):
    """A helper is executed from the content that was read for the digest, even if its file changes. No bytecode is written."""
    text = text_of().replace("trainers.engines.single", "_engine")
    assert not described(tmp_path, text, "def build(cell, task, ranks):\n    pass\n").fault
    source = plugin_source.read_plugin(tmp_path / "strategies" / "alone.py")
    (tmp_path / "strategies" / "_engine.py").write_text("1 / 0\n")
    sys.modules.pop("_engine")
    (strategy,) = own_strategy.load_strategy_file(source)
    own_strategy._check_engine("", strategy)  # the engine is built from the content of _engine.py before the change above
    assert describe_file(source.file).fault.startswith(f"{tmp_path}/strategies/_engine.py:1: ZeroDivisionError")
    assert not (tmp_path / "strategies" / "__pycache__").exists()


def test_a_rank_refuses_a_file_with_another_digest(tmp_path):
    (tmp_path / "alone.py").write_text(text_of())
    code = plugin_source.read_plugin(tmp_path / "alone.py").digest
    own_strategy.add_strategies(tmp_path / "alone.py", code)
    cell = msgspec.structs.replace(CELL, strategy="alone", strategy_code=code, options={"wait": 1})
    assert menu.find_strategy_of_cell(cell).engine == "trainers.engines.single"
    with pytest.raises(InputError, match="is not known here"):
        menu.find_strategy_of_cell(msgspec.structs.replace(cell, strategy_code="0" * 16))
    (tmp_path / "alone.py").write_text(text_of() + "\n")
    with pytest.raises(InputError, match=f"has the digest .*, the run was submitted with {code}"):
        own_strategy.add_strategies(tmp_path / "alone.py", code)


def test_faulty_files_are_named_with_their_line_and_the_others_work(tmp_path, capsys):
    made = workspace(tmp_path, text_of())
    folder = made.path / "strategies"
    (folder / "broken.py").write_text("\n1 / 0\n")
    (folder / "ddp.py").write_text(text_of("ddp"))
    (folder / "alone_too.py").write_text(text_of("alone-too"))
    (folder / "alone.py").write_text(text_of() + text_of("alone-too").replace("VARIANTS = ", "VARIANTS += "))
    assert call(made, "strategies", "--json") == 1
    shown = capsys.readouterr()
    assert "broken.py:2: ZeroDivisionError" in shown.err
    assert "ddp.py: the strategy ddp ships with shardlab and cannot be replaced." in shown.err
    assert f"alone_too.py: the strategy alone-too is defined by {folder}/alone.py as well." in shown.err
    files = {entry["name"]: entry["file"] for entry in json.loads(shown.out)}
    assert files["alone"] == files["alone-too"] == str(folder / "alone.py")
    assert files["ddp"] is None
    (made.path / "m.yaml").write_text(MATRIX.replace("[alone]", "[ddp]"))
    assert call(made, "plan") == 2
    assert "m.yaml:5:19: axes.strategy[0]: " in (said := capsys.readouterr().err)
    assert "the strategy ddp ships with shardlab and cannot be replaced" in said


def test_a_helper_of_strategies_must_not_have_the_name_of_a_helper_of_workloads(tmp_path, capsys):
    made = workspace(tmp_path, text_of())
    (made.path / "workloads").mkdir()
    for folder in ("strategies", "workloads"):
        (made.path / folder / "_common.py").touch()
    assert call(made, "plan") == 2
    assert "strategies/_common.py: workloads/_common.py has the same name" in capsys.readouterr().err
    own_code.execute_plugin(plugin_source.read_plugin(made.path / "strategies" / "alone.py"))
    (made.path / "workloads" / "mine.py").touch()
    with pytest.raises(InputError, match=r"workloads/_common\.py: .*strategies/_common\.py has the same name"):
        own_code.execute_plugin(plugin_source.read_plugin(made.path / "workloads" / "mine.py"))


def test_a_refusal_of_an_own_strategy_is_reported_at_the_option(tmp_path, capsys):
    """If the strategy's `refuse` rejects an option, the error names the option's line. Other files are not executed."""
    made = workspace(tmp_path, text_of(refuse="return f'wait: found {cell.options[\"wait\"]}. Allowed: 7.'"))
    (made.path / "strategies" / "other.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (made.path / "m.yaml").write_text(MATRIX.replace("steps: 2", "steps: 2, options: {wait: 3}"))
    assert call(made, "plan") == 2
    said = capsys.readouterr().err
    assert "options.wait: wait: found 3. Allowed: 7." in said
    assert "m.yaml:4:" in said
    assert not (tmp_path / "executed").exists()


def question(strategy="alone"):
    return msgspec.structs.replace(CELL, strategy=strategy, strategy_code="0" * 16, options={"wait": 1})


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ("return 1 / 0", "alone.py:5: ZeroDivisionError: division by zero. So refuse of alone is not known."),
        ("return 3", "refuse of alone returned 3. Allowed: a sentence or None."),
        ("raise SystemExit", "alone.py:5: SystemExit. So refuse of alone is not known."),
        ("import os; os._exit(0)", "its code ended the process that asks it"),
        ("import time, subprocess; subprocess.Popen(['sleep', '1000']); time.sleep(1000)", "did not answer within 1 s."),
    ],
)
def test_a_failing_refuse_function_is_an_error_of_one_sentence_without_leftovers(tmp_path, monkeypatch, refuse, said):
    """If the strategy's function `refuse` fails or hangs, the error is one sentence and no process of it is left."""
    file = tmp_path / "alone.py"
    file.write_text(text_of(refuse="if cell.steps == 1: return None\n    " + refuse))
    process = RefusingProcess(file)
    first = msgspec.structs.replace(question(), steps=1)
    assert process.ask_refusal(first, None) is None
    monkeypatch.setattr(plugin_process, "NEXT_ANSWER_S", 1.0)
    group = process._process.pid
    with pytest.raises(InputError) as raised:
        process.ask_refusal(msgspec.structs.replace(first, steps=2), None)
    assert said in str(raised.value)
    process.close()
    wait_for_end([pid for pid in psutil.pids() if _group(pid) == group])


def wait_for_end(pids):
    """Waits until these processes are gone or are zombies."""
    while any(psutil.pid_exists(pid) and _is_alive(pid) for pid in pids):
        time.sleep(0.01)


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_output_of_strategy_code_is_ignored_and_each_question_has_a_process(tmp_path):
    """Text that the strategy's code prints is ignored. After `close`, the next call starts a new process."""
    file, said = tmp_path / "alone.py", "print('{}', flush=True)"
    file.write_text(f"{said}\n{text_of(refuse=f'{said}; return cell.workload')}")
    process = RefusingProcess(file)
    try:
        assert process.ask_refusal(question(), None) == CELL.workload
        process.close()
        assert process.ask_refusal(question(), None) == CELL.workload
    finally:
        process.close()


def _is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_own_strategies_are_uploaded_and_removed_strategies_removed_on_the_cluster(tmp_path, monkeypatch, capsys):
    made = workspace(tmp_path / "here", text_of())
    (made.path / "strategies" / "_engine.py").write_text("# engine\n")
    texts = plugin_source.read_carried_files(made.path)
    assert set(texts) == {"strategies/alone.py", "strategies/_engine.py"}
    there = tmp_path / "there"
    (there / "strategies").mkdir(parents=True)
    (there / "strategies" / "old.py").touch()
    sent = {"cluster.yaml": "x", **{name: text.decode() for name, text in texts.items()}}
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        json.dump(sent, out)
    monkeypatch.setattr(sys, "argv", ["upload", "--workspace", str(there), "--json"])
    with os.fdopen(read) as given:
        monkeypatch.setattr(sys, "stdin", given)
        assert upload_main() == 0
    capsys.readouterr()
    assert plugin_source.read_carried_files(there) == texts


def test_the_example_of_the_docs_uses_only_the_interface(tmp_path):
    """The engine in docs/own-strategies.md uses only the interface that the page describes. shardlab finds both strategies of
    the page, and `average-rarely` refuses a period that does not divide the number of steps."""
    for path, text in files_of("own-strategies.md").items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    source = plugin_source.read_plugin(tmp_path / "strategies" / "average.py")
    found = describe_file(source.file)
    assert [one.name for one in found.plugins] == ["average", "average-rarely"]
    _, rarely = own_strategy.load_strategy_file(source)
    cell = msgspec.structs.replace(CELL, strategy="average-rarely", steps=5, options={"every": 2})
    assert rarely.refuse(cell) == "every: found 2. Allowed: a divisor of the 5 steps."
    assert rarely.communication_period(cell) == 2
