"""One task of a run's job step: starts the telemetry sampler on its node, and the command of the launcher.

    python -m jobs.supervisor.step_task RUN_DIR -- COMMAND...

Words of COMMAND may contain the variables $SHARDLAB_RENDEZVOUS, $SHARDLAB_RENDEZVOUS_ID, $SHARDLAB_ADDRESS, $SHARDLAB_INTERFACE
and $SHARDLAB_IS_FIRST, and the variables that Slurm sets. This program replaces them, because no shell reads COMMAND. The exit
code is the exit code of COMMAND."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname
from string import Template
from types import FrameType

from jobs.node import node_processes, wait_for_gpus
from jobs.node.rendezvous import NODES_VARIABLE, RENDEZVOUS_VARIABLE, find_rendezvous_interface, read_node_number
from shardlab.errors import InputError, ShardlabError
from shardlab.hardware.socket_interfaces import choose_socket_interfaces
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console


def main(argv: list[str]) -> int:
    """Start the ranks of this task; return their exit code. argv: RUN_DIR -- COMMAND... Raises ShardlabError."""
    if len(argv) < 3 or argv[1] != "--":
        raise InputError("usage: python -m jobs.supervisor.step_task RUN_DIR -- COMMAND...")
    run_dir = RunDir(Path(argv[0]).absolute())
    if RENDEZVOUS_VARIABLE not in os.environ:
        raise InputError(f"{RENDEZVOUS_VARIABLE} is not set; jobs.supervisor.attempt sets it.")
    rendezvous_interface = find_rendezvous_interface(
        os.environ[RENDEZVOUS_VARIABLE], [name for name in os.environ.get(NODES_VARIABLE, "").split(",") if name]
    )
    node_number = read_node_number(os.environ)
    is_first_on_node = os.environ.get("SLURM_LOCALID", "0") == "0"
    run_mark = f"{run_dir.path}#{os.environ.get('SLURM_PROCID', node_number)}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    environment = {
        **os.environ,
        **_read_cell_variables(run_dir),
        node_processes.RUN_MARK_VARIABLE: run_mark,
        **choose_socket_interfaces(os.environ, rendezvous_interface.interface),
        "SHARDLAB_ADDRESS": rendezvous_interface.address,
        "SHARDLAB_INTERFACE": rendezvous_interface.interface,
        "SHARDLAB_IS_FIRST": "true" if node_number == 0 else "false",
    }
    launcher_argv = [Template(word).safe_substitute(environment) for word in argv[2:]]
    run_dir.log.mkdir(exist_ok=True)
    for signal_number in (signal.SIGUSR1, signal.SIGUSR2):
        # Slurm sends these signals to every process of the step. Ranks that keep checkpoints handle these signals; this process
        # and the other processes that it starts ignore the signals.
        signal.signal(signal_number, signal.SIG_IGN)
    if is_first_on_node:
        _wait_for_free_gpus(run_dir)
    sampler = node_processes.SamplerProcess(run_dir) if is_first_on_node else None
    oom_watch = node_processes.OomWatch()
    try:
        rank_process = node_processes.start_process(launcher_argv, None, environment)
    except node_processes.CannotStart as error:
        run_dir.write_event(f"node-{gethostname()}", "failed", why=str(error))
        raise
    sigterm_times = _forward_signals(rank_process)
    while (exit_code := rank_process.poll()) is None:
        time.sleep(0.05)
        if sampler is not None:
            sampler.restart_if_dead()
        if sigterm_times and time.monotonic() > sigterm_times[0] + node_processes.GRACE_S:
            rank_process.kill()
    if sampler is not None:
        sampler.end()
    node_processes.kill_marked_processes(run_mark)
    if is_first_on_node:
        node_processes.remove_data_copies(run_dir)
    if exit_code:
        oom_watch.record_oom(run_dir)
    return 128 - exit_code if exit_code < 0 else exit_code


def _read_cell_variables(run_dir: RunDir) -> dict[str, str]:
    """The environment variables that the cell of the run sets."""
    return run_dir.read_run().cell.env


def _wait_for_free_gpus(run_dir: RunDir) -> None:
    try:
        wait_for_gpus.wait_until_gpus_free(run_dir, run_dir.read_run(), os.environ, lambda: False)
    except ShardlabError as error:
        run_dir.write_event(f"node-{gethostname()}", "failed", why=str(error))
        raise


def _forward_signals(rank_process: subprocess.Popen[bytes]) -> list[float]:
    """From now on, forward SIGTERM and SIGUSR1 to the ranks.

    Returns a list that is empty until the first SIGTERM arrives; then the list contains the time of this signal, by the
    monotonic clock.
    """
    sigterm_times: list[float] = []

    def forward_signal(signal_number: int, _frame: FrameType | None) -> None:
        if signal_number == signal.SIGTERM and not sigterm_times:
            sigterm_times.append(time.monotonic())
        if rank_process.poll() is None:
            rank_process.send_signal(signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signal_number, forward_signal)
    return sigterm_times


if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
