"""The fork server serves only its own user and only its own version of the code. The runs that it serves do not affect each
other."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support_e2e import HANG_S

from shardlab.errors import ShardlabError
from trainers.forking import address

pytest_plugins = ["support_trainers"]


@pytest.fixture
def runtime(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    return short


def test_only_this_user_can_enter_the_folder_of_sockets(runtime):
    folder = address.choose_socket_folder()
    assert folder == runtime / f"shardlab-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert address.choose_socket_folder() == folder


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_others_could_have_prepared_is_not_used(short, monkeypatch, kind):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    path = short / f"shardlab-{os.getuid()}"
    if kind == "link":
        (short / "elsewhere").mkdir(mode=0o700)
        path.symlink_to("elsewhere")
    elif kind == "file":
        path.touch(0o700)
    else:
        path.mkdir()
        path.chmod(0o755)
    folder = address.choose_socket_folder()
    assert folder.parent == short
    assert folder.name.startswith(f"{path.name}-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert address.choose_socket_folder() == folder, "the next command finds the same folder"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_folder_made_first_by_another_user_does_not_stop_this_user(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        Path(shared).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", shared)
        make = f"mkdir -m 0700 {shared}/shardlab-0 {shared}/shardlab-0-aaaaaaaa && touch {shared}/shardlab-0/mine"
        subprocess.run(["sh", "-c", make], user=65534, group=65534, extra_groups=[], cwd="/", check=True)
        folder = address.choose_socket_folder()
        found = folder.stat()
        assert (found.st_uid, found.st_mode & 0o777) == (0, 0o700)
        assert address.choose_socket_folder() == folder
        look = subprocess.run(["ls", str(folder)], user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True)
        assert look.returncode != 0
        assert [path.name for path in Path(shared, "shardlab-0").iterdir()] == ["mine"]


def test_a_runtime_folder_that_others_can_write_into_is_not_used(short, monkeypatch):
    (short / "runtime").mkdir()
    (short / "runtime").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short / "runtime"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    assert address.choose_socket_folder() == short / f"shardlab-{os.getuid()}"


def test_a_temporary_folder_in_which_nothing_can_be_made_is_one_sentence(short, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short / "missing"))
    with pytest.raises(ShardlabError, match="Set XDG_RUNTIME_DIR to a folder of your own with mode 0700"):
        address.choose_socket_folder()


def test_a_folder_whose_path_is_too_long_for_a_socket_is_not_used(tmp_path, monkeypatch):
    """A path of a socket has at most 107 bytes, but TMPDIR may be longer."""
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for runtime in ("", str(long)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        path = address.find_socket_path()
        assert path.parent.parent == Path("/tmp")
        with socket.socket(socket.AF_UNIX) as listener:
            path = path.with_name(f"{os.getpid():016}.sock")
            listener.bind(str(path))
            path.unlink()


def test_changed_code_has_another_socket(runtime, tmp_path, monkeypatch):
    for package in ("shardlab", "trainers"):
        (tmp_path / "source" / package).mkdir(parents=True)
        (tmp_path / "source" / package / "a.py").write_text("1")
    monkeypatch.setattr(address, "SOURCE_ROOT", tmp_path / "source")
    seen = {address.find_socket_path()}
    (tmp_path / "source" / "trainers" / "a.py").write_text("2")
    seen.add(address.find_socket_path())
    (tmp_path / "source" / "trainers" / "a.py").rename(tmp_path / "source" / "trainers" / "b.py")
    seen.add(address.find_socket_path())
    monkeypatch.setattr(address.host, "read_package_versions", lambda: {"torch": "0"})
    seen.add(address.find_socket_path())
    assert len(seen) == 4


def test_the_client_imports_neither_torch_nor_numpy(bench):
    run_dir = bench.run_dir(steps=1)
    code = (
        "import sys; from trainers.__main__ import main; assert main(['fork', '.']) == 0\n"
        "print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=run_dir.path, env=bench.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
    assert "rehearsal" in done.stderr


def test_ranks_of_simultaneous_runs_do_not_connect_to_each_other(bench):
    runs = [bench.run_dir(strategy="ddp", gpus=2, seed=seed) for seed in (1, 2, 3)]
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(bench.finish, runs))
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert len({run.read_result().final_loss for run in runs}) == 3


def test_a_run_has_the_environment_of_its_client(bench):
    run_dir = bench.run_dir(strategy="ddp", gpus=2, steps=1)
    assert bench.finish(run_dir, OMP_NUM_THREADS="2", RANK="7", MASTER_ADDR="nowhere.invalid")[0] == 0
    host = json.loads(next((run_dir.path / "env").iterdir()).read_text())
    assert host["torch"]["threads"] == 2
    refused = bench.run_dir()
    assert bench.finish(refused, OMP_NUM_THREADS="many")[0] == 1
    assert "OMP_NUM_THREADS: found 'many'" in refused.read_events()[0].data["why"]


def test_noise_at_the_socket_harms_no_run(bench):
    assert bench.finish(bench.run_dir(steps=1))[0] == 0  # starts the fork server if there is none
    for noise in (b"", b"\x80\x04\x95", b"[]\n", b"{}\n", b'{"run_dir": 1'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(address.find_socket_path()))
            connection.sendall(noise)
    assert bench.finish(bench.run_dir(steps=1))[0] == 0


def test_a_client_starts_the_warm_parent_also_after_a_killed_one(bench):
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as runtime:
        for _ in range(2):
            runs = [bench.run_dir(steps=1) for _ in range(2)]
            with ThreadPoolExecutor() as pool:  # two clients that start at the same time must start only one fork server
                ended = list(pool.map(lambda run: bench.finish(run, XDG_RUNTIME_DIR=runtime), runs))
            assert [code for code, _ in ended] == [0, 0], ended
            (warm,) = [process for process in psutil.process_iter() if runtime in " ".join(_arguments(process))]
            warm.kill()
            psutil.wait_procs([warm], timeout=HANG_S)


def _arguments(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
