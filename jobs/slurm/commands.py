"""Calls Slurm's commands so that neither variables of the caller's environment nor a hanging controller affects the result."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

import msgspec

from shardlab.cluster.slurm_cluster import address_cluster, drop_cluster_headers
from shardlab.errors import ShardlabError

COMMAND_LIMIT_S = 60.0
LISTEN_INTERVAL_S = 1.0
ENDED_S = 60.0  # longer than Slurm needs to end a job that it requeues
# Variables with these prefixes, set by a job or by the user, would act as options of Slurm's commands.
DROPPED_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "PMI_", "PMIX_", "SALLOC_")
KEPT_VARIABLES = ("SLURM_CONF",)
CLUSTER_VARIABLE = "SLURM_CLUSTER_NAME"  # Slurm sets it in each job: the name of the cluster of the job
# The exit codes of a command that SIGTERM or SIGKILL ended, as Python and as a shell report them.
_ENDED_BY_SIGNAL = tuple(code for number in (signal.SIGTERM, signal.SIGKILL) for code in (-number, 128 + number))
_COMMAND_PREFIX = re.compile(r"^[a-z_]+(?: error)?: (?:error: |fatal: )?")
QUESTION_INTERVAL_S = 5.0  # seconds between two questions to the controller
# seconds for which an outage still counts after its end: in Slurm 26.05, a job step ends up to half a minute later
RECOVERY_S = 60.0


class OutageWatch:
    """Asks whether the controller is up, and remembers the answer for QUESTION_INTERVAL_S seconds.

    While the controller does not answer, since Slurm 26.05, a job step whose ranks have ended does not end: it waits for the
    controller.
    """

    def __init__(self) -> None:
        self._next_question = self._outage_end = float("-inf")

    def was_recently_down(self) -> bool:
        """Whether the controller does not answer, or did not answer at some moment of the last RECOVERY_S seconds."""
        if time.monotonic() >= self._next_question:
            if is_controller_down():
                self._outage_end = time.monotonic() + RECOVERY_S
            self._next_question = time.monotonic() + QUESTION_INTERVAL_S
        return time.monotonic() < self._outage_end


class SlurmOutput(msgspec.Struct, frozen=True):
    """The result of a command of Slurm."""

    exit_code: int | None
    """The exit code; None if the command did not end within its time limit."""
    stdout: str
    stderr: str

    @property
    def ends_own_job(self) -> bool:
        """Of a command that requeues the job of this process: whether Slurm ends this process now. Slurm then ends the command
        too, so a command that Slurm's signals ended also counts."""
        return self.exit_code in (0, *_ENDED_BY_SIGNAL)

    @property
    def error_line(self) -> str:
        """The last line of the error output, without the name of the command."""
        error_lines = [line for line in self.stderr.splitlines() if line.strip()]
        return _COMMAND_PREFIX.sub("", error_lines[-1]).strip() if error_lines else f"exit code {self.exit_code}"

    def find_error_line(self, pattern: re.Pattern[str]) -> str | None:
        """The first line of the error output in which the pattern is found, without the name of the command; None if the
        pattern is in no line."""
        error_lines = self.stderr.splitlines()
        return next((_COMMAND_PREFIX.sub("", line).strip() for line in error_lines if pattern.search(line)), None)


class ControllerUnreachable(ShardlabError):
    """Raised if Slurm's controller does not answer.

    why: what Slurm's command printed. known: sentences that say what is certain at this moment, and which command finds out
    what is not certain yet.
    """

    def __init__(self, why: str, certain_sentences: str) -> None:
        super().__init__(f"Slurm does not answer: {why}. {certain_sentences}")
        self.why = why


def has_slurm_commands() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def remove_job_variables() -> None:
    """Remove the variables of a Slurm job from the environment of this process and of the processes that it starts.

    A run that Slurm does not start may be started in the shell of a job (`srun --pty bash`), or in a container inside a job.
    The variables describe the task of this shell, such as the number of its node, and not the run.
    """
    for variable in [
        variable
        for variable in os.environ
        if variable.startswith(("SLURMD_", *DROPPED_PREFIXES)) and variable not in KEPT_VARIABLES
    ]:
        del os.environ[variable]


def read_own_cluster() -> str | None:
    """The cluster of the job in which this process runs; None outside of a job."""
    return os.environ.get(CLUSTER_VARIABLE) or None


def _needs_option(cluster: str | None) -> bool:
    """Whether Slurm's commands address this cluster only if they name it.

    The nodes of a cluster address their own cluster. With the option --clusters, a command would ask Slurm's database, which
    nodes may not reach and some sites do not have. A process inside `salloc` may run on the login node of another cluster.
    """
    if cluster is None or cluster != read_own_cluster():
        return cluster is not None
    return "SLURMD_NODENAME" not in os.environ and read_setting("ClusterName", limit_s=QUESTION_INTERVAL_S) not in ("", cluster)


def call_slurm(
    argv: Sequence[str],
    *,
    cluster: str | None = None,
    limit_s: float = COMMAND_LIMIT_S,
    enough_pattern: re.Pattern[str] | None = None,
) -> SlurmOutput:
    """Run a command of Slurm. cluster: the cluster that the command addresses; None: the default cluster of this machine.
    limit_s: seconds after which the command is ended. enough_pattern: if this pattern is found in the error output, the command
    is ended at once. Raises ShardlabError if this machine does not have the command."""
    argv = address_cluster(argv, cluster if _needs_option(cluster) else None)
    inherited_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES) or name in KEPT_VARIABLES
    }
    # Slurm prints times as seconds since the epoch, so the time zones of this machine and of the controller do not matter, and
    # prints the list of an array's tasks in full length.
    variables = inherited_variables | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    deadline = time.monotonic() + limit_s
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables
        )
    except FileNotFoundError:
        raise ShardlabError(f"this machine has no command {argv[0]}; run this on a machine with Slurm's commands.") from None
    with process:
        try:
            while True:
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    output, error_output = process.communicate(
                        timeout=left_s if enough_pattern is None else min(left_s, LISTEN_INTERVAL_S)
                    )
                    output_text = drop_cluster_headers(output.decode("utf-8", "replace"))
                    return SlurmOutput(process.returncode, output_text, error_output.decode("utf-8", "replace"))
                except subprocess.TimeoutExpired as timeout_error:
                    output, error_output = timeout_error.stdout or b"", timeout_error.stderr or b""
                partial_output = SlurmOutput(None, output.decode("utf-8", "replace"), error_output.decode("utf-8", "replace"))
                if time.monotonic() >= deadline or (
                    enough_pattern is not None and partial_output.find_error_line(enough_pattern) is not None
                ):
                    return partial_output
        finally:
            process.kill()  # does nothing if the process has ended


def is_controller_down() -> bool:
    """Whether `scontrol ping` says that no controller of this job's cluster is up. False if `scontrol` says nothing."""
    output = call_slurm(["scontrol", "ping"], cluster=read_own_cluster()).stdout
    return " is DOWN" in output and " is UP" not in output


def read_setting(name: str, *, cluster: str | None = None, limit_s: float = COMMAND_LIMIT_S) -> str:
    """The value of an entry of the controller's configuration, such as ClusterName; '' if it cannot be read. cluster: as in
    `call_slurm`."""
    output = call_slurm(["scontrol", "show", "config"], cluster=cluster, limit_s=limit_s)
    for line in output.stdout.splitlines() if output.exit_code == 0 else ():
        setting_name, _, setting_value = line.partition("=")
        if setting_name.strip() == name:
            return setting_value.strip()
    return ""


def read_number_setting(name: str, default_number: int, cluster: str | None) -> int:
    """A number of the controller's configuration, such as MaxArraySize; `default_number` if it cannot be read. cluster: as in
    `call_slurm`."""
    value_words = read_setting(name, cluster=cluster).split()  # some values have a unit behind the number
    return int(value_words[0]) if value_words and value_words[0].isdigit() else default_number
