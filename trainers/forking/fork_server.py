"""The warm parent: a process that imports all modules once and then forks a parent process for each requested run.

A fork of this process is safe, because it has only one thread and never computes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import os
import selectors
import socket
import sys
import time
import traceback
from pathlib import Path

from shardlab.files import files
from shardlab.hardware import host
from trainers import menu
from trainers.forking import address, fork_ranks

# The warm parent ends after this many seconds without a run. A rehearsed study contains one run that torchrun starts; the warm
# parent has to outlive this run.
IDLE_S = 180
# Modules that ranks import in addition to the engines and tasks of the menus. If a module is missing in this list, runs only
# start more slowly.
PRELOADED_MODULES = ("numpy.ma", "psutil", "pynvml", "trainers.run.loop")
# For each optional library: the modules that are imported if the library is installed, including modules that its engine and
# its optimizers import only when they are created.
OPTIONAL_MODULES = {
    "deepspeed": (
        "deepspeed",
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.muon.original_muon",
        "deepspeed.runtime.zero.stage3",
        "trainers.deepspeed_zero.engine",
    )
}


def serve_until_idle(socket_file: Path) -> int:
    """Answer requests at the socket `socket_file`, until there was no request and no run for IDLE_S seconds. Returns the
    exit code 0.

    Returns at once if another warm parent is running.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with files.open_append(address.find_lock_path(socket_file)) as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        _import_everything()
        socket_file.unlink(missing_ok=True)  # left by a warm parent that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(socket_file))
            listener.listen(128)
            _serve_requests(listener, lock_file.fileno(), socket_file)
    return 0


def list_preloaded_modules() -> list[str]:
    """The modules that ranks import, except optional libraries."""
    plugin_modules = {strategy.engine for strategy in menu.load_strategies().values()} | {
        entry.task for entry in menu.load_workloads().values()
    }
    return [*PRELOADED_MODULES, *sorted(plugin_modules)]


def _import_everything() -> None:
    for name in list_preloaded_modules():
        importlib.import_module(name)
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads this variable only when it is imported
    for library, module_names in OPTIONAL_MODULES.items():
        if importlib.util.find_spec(library) is not None:
            for name in module_names:
                importlib.import_module(name)
    host.read_package_versions()  # called here, because reading the versions of packages imports further modules
    gc.collect()
    gc.freeze()  # then the garbage collector of a forked process does not write to these objects: pages stay shared


def _serve_requests(listener: socket.socket, lock_descriptor: int, socket_file: Path) -> None:
    """Fork a parent process for every connection of this user, until there was no request and no run for IDLE_S seconds.

    If the source has changed or was removed since this process started, the socket is removed, and the client starts a new warm
    parent. This is necessary because ranks still import some modules. This process ends when its last run has ended.
    """
    pid_by_descriptor: dict[int, int] = {}  # pidfd -> pid
    is_current = True
    idle_since = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while pid_by_descriptor or (is_current and time.monotonic() - idle_since < IDLE_S):
            for selector_key, _ in selector.select(None if pid_by_descriptor else IDLE_S):
                idle_since = time.monotonic()
                if selector_key.fileobj is not listener:
                    selector.unregister(selector_key.fd)
                    os.waitpid(pid_by_descriptor.pop(selector_key.fd), 0)
                    os.close(selector_key.fd)
                    continue
                connection, _ = listener.accept()
                with connection:
                    if not address.is_same_user(connection):
                        continue
                    if address.compute_warm_parent_key() != socket_file.stem:
                        is_current = False
                        selector.unregister(listener)
                        listener.close()
                        address.remove_socket(socket_file)
                        break
                    sys.stdout.flush()
                    sys.stderr.flush()
                    if (pid := os.fork()) == 0:
                        _become_parent_of_run(connection, [listener.fileno(), lock_descriptor, *pid_by_descriptor])
                    with contextlib.suppress(ProcessLookupError):
                        descriptor = os.pidfd_open(pid)
                        pid_by_descriptor[descriptor] = pid
                        selector.register(descriptor, selectors.EVENT_READ)
    if is_current:
        address.remove_socket(socket_file)


def _become_parent_of_run(connection: socket.socket, inherited_descriptors: list[int]) -> None:
    """In the forked process: close the descriptors of the warm parent, execute the run, and exit."""
    exit_code = 1
    try:
        for descriptor in inherited_descriptors:
            os.close(descriptor)
        fork_ranks.serve_run(connection)
        exit_code = 0
    except BaseException:  # noqa: BLE001 - no exception of the forked process may reach the parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)
