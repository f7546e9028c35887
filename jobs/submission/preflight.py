"""Asks Slurm about each distinct request before a run folder is written: `sbatch --test-only` submits nothing.

Slurm may accept a job that no node can ever run, and leave it pending. --test-only rejects such a request at once, but not a
request above the limits of its partition, which are therefore read and compared.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jobs.rendering import render, sbatch_options
from jobs.rendering.render import RenderContext
from jobs.slurm import partitions, query
from jobs.slurm.commands import SlurmOutput, call_slurm, has_slurm_commands
from jobs.slurm.submission import LIMIT_PATTERN
from shardlab.cluster.sbatch_request import advise_on_rejection
from shardlab.errors import InputError
from shardlab.runs.run import Run

MOST_TEST_S = 20.0  # sbatch itself waits about this long for a controller that does not answer
MOST_NAMED_CELLS = 5  # the most cells that a sentence names
# Slurm's words for a request that Slurm cannot start at this moment. Slurm may accept the same job later, or now as a pending
# job.
_REJECTED_FOR_NOW_PATTERN = re.compile(
    rf"{LIMIT_PATTERN.pattern}|nodes are busy|node not available|configuration not available now"
)
# Slurm's words if no node has the requested resources, but also if such nodes exist and are down or drained. In the second
# case, a job would wait for the nodes.
_NO_SUCH_NODES = re.compile(r"node configuration is not available")
_UNAVAILABLE_STATE = re.compile(r"(?im)^(?:down|drain|fail|maint|reboot|unknown|power|future|inval|resv|reserved)")
_COMMAND_PREFIX = re.compile(r"^(?:sbatch|allocation failure): (?:error: )?")
_OPTION_PATTERN = re.compile(r"(?m)^#SBATCH (\S+)")  # the user's own template may add options
_SAYS_NOTHING = "Unspecified error"  # a line that Slurm adds to the message of a submit plugin


def must_be_accepted(runs: Sequence[Run], context: RenderContext, *, pack: bool = False) -> None:
    """Raises InputError with a sentence for each distinct request that Slurm would reject.

    runs: the runs that are to be submitted. pack: as in `SubmitOptions`. If the controller does not answer, nothing is raised,
    because the submission, which follows, handles this case.
    """
    if not has_slurm_commands():
        return
    runs_by_options: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        runs_by_options.setdefault(sbatch_options.list_sbatch_options(run, context.cluster), []).append(run)
    sentences, partition_limits = [], None
    with tempfile.TemporaryDirectory(prefix="shardlab-") as temporary_folder:
        script_path = Path(temporary_folder) / "job.sbatch"
        for options, alike_runs in runs_by_options.items():
            script_text = render.render_script(alike_runs[0], Path(temporary_folder), context.cluster, context.own_templates)
            script_path.write_text(script_text)
            run_count = len(alike_runs) if pack else 1
            time_options = (
                [f"--time={sbatch_options.compute_limit_minutes(alike_runs[0]) * run_count}"] if run_count > 1 else []
            )
            output = _test_request(script_path, time_options, alike_runs[0].slurm_cluster)
            if query.is_unanswered(output):
                return
            if partition_limits is None:
                partition_limits = partitions.read_partitions(MOST_TEST_S, alike_runs[0].slurm_cluster)
            if output.exit_code != 0 and not _is_rejected_for_now(output, options):
                sentences.append(describe_rejection(alike_runs, join_error_lines(output.stderr)))
            elif rejection := partitions.find_exceeded_limit(
                partition_limits, [*_OPTION_PATTERN.findall(script_text), *time_options]
            ):
                sentences.append(describe_rejection(alike_runs, rejection, "Slurm would never start"))
    if sentences:
        raise InputError("\n".join([*sentences, "Nothing was rendered, and nothing was submitted."]))


def _test_request(script_path: Path, extra_options: Sequence[str], cluster: str | None) -> SlurmOutput:
    return call_slurm(
        ["sbatch", "--test-only", *extra_options, str(script_path)],
        cluster=cluster,
        limit_s=MOST_TEST_S,
        enough_pattern=_REJECTED_FOR_NOW_PATTERN,
    )


def _is_rejected_for_now(output: SlurmOutput, request_options: Sequence[str]) -> bool:
    """Whether Slurm rejected the test only because of the state of the cluster at this moment, so that Slurm may still accept
    the job later."""
    if output.find_error_line(_REJECTED_FOR_NOW_PATTERN) is not None:
        return True
    if output.find_error_line(_NO_SUCH_NODES) is None:
        return False
    place_options = [option for option in request_options if option.startswith(("--clusters=", "--partition="))]
    return bool(
        _UNAVAILABLE_STATE.search(call_slurm(["sinfo", *place_options, "-h", "-N", "-o", "%T"], limit_s=MOST_TEST_S).stdout)
    )


def join_error_lines(stderr: str) -> str:
    """The error messages of sbatch in one line, without the name of the command. Messages of a submit plugin come first."""
    error_lines = [_COMMAND_PREFIX.sub("", line.strip()) for line in stderr.splitlines() if line.strip()]
    informative_lines = [line for line in dict.fromkeys(error_lines) if line != _SAYS_NOTHING] or error_lines
    return "; ".join(informative_lines) or "sbatch gave no reason"


def describe_rejection(runs: Sequence[Run], why: str, first_words: str = "Slurm would reject") -> str:
    """A sentence about a request that Slurm would reject: its cells, Slurm's words, and the keys of the cluster file.
    first_words: the beginning of the sentence."""
    cell_names = list(dict.fromkeys(run.cell.name() for run in runs))
    rest_clause = f" and {len(cell_names) - MOST_NAMED_CELLS} more" if len(cell_names) > MOST_NAMED_CELLS else ""
    cells_text = f"{', '.join(cell_names[:MOST_NAMED_CELLS])}{rest_clause}"
    return f"{first_words} {len(runs)} run(s) ({cells_text}): {why.rstrip('.')}. {advise_on_rejection(why)}".rstrip()
