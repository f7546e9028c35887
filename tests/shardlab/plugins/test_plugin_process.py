"""A process that executes files of the user may fail in every way: it never stays, and its answer is checked."""

import json
import sys
import textwrap
import time

import psutil
import pytest

from shardlab.errors import InputError
from shardlab.plugins import plugin_process
from shardlab.plugins.plugin_kind import STRATEGIES

ANSWER = {
    "none": "",
    "of another type": "open(sys.argv[-1], 'w').write('{\"plugins\": 3}')",
    "no JSON": "open(sys.argv[-1], 'wb').write(bytes(9))",
    "a link": f"os.symlink({__file__!r}, sys.argv[-1])",
    "a pipe": "os.mkfifo(sys.argv[-1])",
}


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Calls `ask_process` for a module with this source text."""

    def call(text, limit_s=60):
        (tmp_path / "user_code.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return plugin_process.ask_process(["user_code"], tmp_path / "mine.py", STRATEGIES.answer_type, limit_s)

    return call


@pytest.mark.parametrize("code", ANSWER.values(), ids=ANSWER)
def test_an_answer_that_is_not_valid_is_an_error_with_the_last_line_of_the_output(ask, tmp_path, code):
    with pytest.raises(InputError) as raised:
        ask(f"import os, sys\n{code}\nprint('one')\nprint('two', file=sys.stderr)\nsys.exit(3)\n")
    assert str(raised.value) == f"{tmp_path}/mine.py: its code gave no valid answer. {sys.executable} says: two"


def test_a_process_without_output_is_an_error_with_its_exit_code(ask, tmp_path):
    with pytest.raises(InputError, match=rf"mine\.py: its code gave no valid answer. {sys.executable} ended with code 5"):
        ask("import os\nos._exit(5)\n")
    with pytest.raises(InputError, match=r"mine\.py: its code did not end within 1 s\."):
        ask("import time\ntime.sleep(1000)\n", limit_s=1)


@pytest.mark.parametrize("replace", ["os.remove('said')", "os.remove('said'); os.mkfifo('said')"])
def test_code_that_replaces_the_file_of_its_output_is_an_error(ask, replace):
    with pytest.raises(InputError, match=r"mine\.py: its code gave no valid answer\. .* ended with code 3"):
        ask(f"import os\n{replace}\nos._exit(3)\n")


def test_a_process_sees_no_gpu_and_its_answer_is_read(ask):
    answer = {"fault": "no GPU"}
    code = f"json.dump({json.dumps(answer)}, open(sys.argv[-1], 'w'))"
    assert ask(f"import json, os, sys\nassert not os.environ['CUDA_VISIBLE_DEVICES']\n{code}\n").fault == "no GPU"


def test_code_without_end_is_killed_with_its_child_processes(tmp_path):
    """Code of the user may run without end. Here the code also prints 1 MB and starts a child process that keeps the output
    open. After a time limit, shardlab kills the code and the child. It does not keep the output in memory and does not wait
    for the child."""
    pids = tmp_path / "pids"
    code = textwrap.dedent(f"""
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "1000"])
        with open({str(pids)!r}, "w") as file:
            file.write(f"{{os.getpid()}} {{child.pid}}")
        print("x" * 1000000, flush=True)
        time.sleep(1000)
    """)
    assert plugin_process.run_process([sys.executable, "-c", code], tmp_path, tmp_path / "said", 1.5) is None
    while any(_is_alive(int(pid)) for pid in pids.read_text().split()):
        time.sleep(0.01)
    assert plugin_process.run_process([sys.executable, "-c", "raise SystemExit(5)"], tmp_path, tmp_path / "said", 60) == 5


def _is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
