"""Describes each JSON document of shardlab by its type in the code, or key by key if the document has no type.

tests/project/test_documents.py compares these descriptions with real documents, and support_documents_page.py makes pages of
them."""

from __future__ import annotations

from support_document import Described, Key

from collect.archiving.command import OpenedArchive, WrittenArchive
from collect.comparison.compare import Comparison
from collect.explain.explanation import Explanation
from collect.fetching.fetched_run import FetchedRun
from collect.history.command import History
from collect.sampler.loop import SamplerTally
from collect.summary import Summary
from collect.timeline.clocks import ComparedClock
from collect.timeline.straggler import Straggler
from collect.traces.advice import Saving
from collect.traces.attention import AttentionUse
from collect.traces.breakdown import Breakdown, DeviceTime, EventTally
from collect.traces.collectives import CollectiveUse
from collect.traces.difference import StepDifference
from collect.traces.idle_causes import IdleCauses, LaunchDelays
from collect.traces.lacks import Lack
from collect.traces.layers import LayerTime
from collect.traces.matrix_products import MatrixProduct
from collect.traces.memory_use import MemoryUse
from collect.traces.operator_times import OperatorTime
from collect.traces.operators import OperatorDifference
from collect.traces.phases import PhaseTime
from collect.traces.rank_work import RankWork
from collect.traces.stragglers import RankWait
from jobs.planner.advise import Advice
from jobs.planner.rules import JudgedRule
from jobs.planner.scale_out import ScaledCell
from jobs.planning.gpu_hours import GpuHours, RunTime
from jobs.planning.repeats import EstimatedCost
from jobs.slurm.share import AccountShare
from jobs.status.reconcile import Status
from provision.check import Outcome
from provision.cloudlab.hardware import HardwareType
from shardlab.cluster.lease import Lease
from shardlab.hardware.host import Host
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.matrix.expansion import ExcludedPoint
from shardlab.registry import Option
from shardlab.runs.checksums import ModelChecksum
from shardlab.runs.prediction import Prediction
from shardlab.runs.record import Event, Result, Sample, StepRecord, ValidationRecord
from shardlab.runs.run import Run
from shardlab.transfer.manifest import RunManifest
from shardlab.workspace.inventory import Inventory, InventoryNode
from trainers.instruments.memory_timeline import Timeline

SCHEMA = {"schema": Key("integer", "version of the format of this document")}
SHIPS = {
    "file": Key("text or null", "the file of the workspace that defines it; null: it ships"),
    "code": Key("text or null", "digest of the files that define it; null: it ships"),
}
FILES = (
    Described("runs/RUN_ID/run.json", "What the run is. It is written before the run is submitted, and does not change.", Run),
    Described("runs/RUN_ID/prediction.json", "What the planner predicted before the run was submitted.", Prediction),
    Described(
        "runs/RUN_ID/events.WRITER.jsonl",
        "What happened to the run; one line per event, one file per writer. The state of the run is computed from these files.",
        Event,
    ),
    Described(
        "runs/RUN_ID/env/HOST.json",
        "The machine, its software and what the ranks use of them, one file per host.",
        Host,
        {
            "torch": Key("mapping", "version, cuda, device, backend, nccl, threads (number of threads of a rank)"),
            "variables": Key("mapping", "environment variables that change how a rank computes or communicates"),
            "interfaces": Key("mapping", "used_by: gloo, or nccl to meet; sockets: number of connections by interface", False),
        },
    ),
    Described("runs/RUN_ID/steps/rank-RRRRR.jsonl", "One line per optimizer step of a rank.", StepRecord),
    Described(
        "runs/RUN_ID/checksums/rank-RRRRR.jsonl", "One line per call of `shardlab.steps.checksum` on a rank.", ModelChecksum
    ),
    Described("runs/RUN_ID/validation.jsonl", "One line per validation, by rank 0.", ValidationRecord),
    Described("runs/RUN_ID/samples/HOST.jsonl", "Telemetry of a host, one line per sample.", Sample),
    Described(
        "runs/RUN_ID/memory/rank-RRRRR.json",
        "Memory of a rank in one step or several, with `instruments: {memory: categories}` ([instruments](../instruments.md)).",
        Timeline,
        {
            **SCHEMA,
            "rank": Key("integer", "number of the rank, from 0"),
            "step": Key("integer", "the first step that was observed"),
            "steps": Key("integer", "number of consecutive steps that were observed"),
            "device": Key("`cpu`, `cuda`", "where the memory is"),
            "allocated": Key("integer", "on a GPU: bytes that the allocator counted at the peak", False),
            "unknown": Key("integer", "on a GPU: the part of them that is in no category", False),
            "unknown_is": Key("text", "on a GPU: what this part may be", False),
            "categories": Key("list of text", "the categories"),
        },
    ),
    Described("runs/RUN_ID/result.json", "The result, the last file of a run: if it is there, the run is complete.", Result),
    Described("runs/RUN_ID/manifest.json", "The files of a fetched run with their digests, by `collect fetch`.", RunManifest),
    Described(
        ".shardlab/inventory.json",
        "The nodes of the cluster as `provision` found them. With a Slurm that existed before, `slurm` describes it.",
        Inventory,
        {
            "provider": Key("text", "provider of the cluster file"),
            "lease": Key("Lease", "only if the machines are lent for a time", False),
            "node_types": Key("list", "at a managed Slurm site: the types of compute nodes that a check found", False),
            "environments": Key(
                "mapping to ProvisionedEnvironment", "only if the cluster file names further environments that exist", False
            ),
            "slurm": Key("mapping", "cluster, version, conf, partition, installed_by_shardlab", False),
        },
    ),
    Described("report/summary.json", "All results of a matrix: what tables, page and exports show.", Summary),
)

RUNS = {"runs": Key("list of Status", "one per selected run")}
LEASE = {"lease": Key("Lease", "the lease of the nodes; for `jobs plan`: null if the machines are not lent", False)}
PROVISION = {
    **SCHEMA,
    "cluster": Key("text", "name of the cluster"),
    "provider": Key("text", "provider of the cluster file"),
    "verb": Key("text", "plan, apply, verify, ..."),
    "changes": Key("integer", "number of changes that were made, or that would be made"),
    "nodes": Key("list of [node](#nodes-of-provision)", "one per machine"),
    "verified": Key("boolean or null", "whether every check passed; null: nothing was checked"),
    "checks": Key("list", "node, check (both text), and the fields of Outcome"),
    "lease": Key("Lease", "only if the machines are lent for a time", False),
    "request": Key("text or mapping", "`request`: what to request; a plan before machines exist: what would be created", False),
}
COMMANDS = (
    Described(
        "provision",
        "`provision --json` and its verbs, such as `plan`: what was found and done.",
        keys=PROVISION,
    ),
    Described(
        "nodes of provision",
        "An entry of `nodes` above.",
        keys={
            "name": Key("text", "name in the cluster file"),
            "host": Key("text", "host name or address for SSH"),
            "port": Key("integer or null", "port for SSH"),
            "user": Key("text or null", "user for SSH"),
            "addresses": Key("mapping or null", "name of a network interface -> its IPv4 addresses"),
            "facts": Key("mapping", "name of a fact -> the answer"),
            "unanswered": Key("mapping", "name of a fact -> why it has no answer"),
            "operations": Key("list", "name, state, changes (a number), says (sentences); administrator: commands to ask for"),
        },
        listed=True,
    ),
    Described(
        "provision init",
        "The cluster file that the command prints without `--json`.",
        keys={
            **SCHEMA,
            "cluster_yaml": Key("text", "the content of the file"),
        },
    ),
    Described(
        "provision hardware",
        "The hardware catalogue of CloudLab.",
        keys={
            **SCHEMA,
            "sites": Key("mapping", "short name of a site -> what it is"),
            "types": Key("list of HardwareType", "the types of machines"),
        },
    ),
    Described(
        "jobs plan",
        "What would run. [Predictions](../planner.md) explains how the numbers are obtained.",
        keys={
            "matrix": Key("text", "name of the matrix"),
            "scale": Key("`full`, `tiny`", "tiny: every cell is its tiny twin"),
            "repeats": Key("integer", "the largest number of repeats of a cell"),
            "runs": Key("integer", "number of runs"),
            "cost": Key("EstimatedCost", "time of the runs, from earlier runs"),
            "gpu_hours": Key("GpuHours or null", "GPU hours of the runs"),
            "shares": Key("list of AccountShare", "what the account has left of its limits, by `sshare`; empty: not known"),
            **{name: key._replace(always=True) for name, key in LEASE.items()},
            "cells": Key("list of [planned cell](#cells-of-jobs-plan)", "the cells"),
            "models": Key("list", "models that do not ship: what was derived, and in `not_derived` what was not"),
            "excluded": Key("list of ExcludedPoint", "combinations that the matrix excludes"),
            "deviations": Key("list of Deviation", "what `--adapt` changed, so that the matrix fits the cluster"),
            "misfits": Key("list", "id, why: cells that the cluster cannot run"),
            "missing_data": Key("list of text", "data sets that are missing, as sentences"),
            "claim_hints": Key(
                "list of text", "claims and printed numbers that the cells cannot decide as they are, as sentences"
            ),
        },
    ),
    Described(
        "cells of jobs plan",
        "An entry of `cells` above.",
        keys={
            "id": Key("text", "id of the cell"),
            "repeats": Key("integer", "number of its runs"),
            "rehearsal": Key("boolean", "whether its runs are planned as rehearsals"),
            "cell": Key("Cell", "the resolved cell"),
            "predicted": Key("Prediction", "the prediction for one run"),
            "run_time": Key("RunTime or null", "how long a run takes; null: not known, or its ranks have no GPU"),
            "scale_out": Key("list of ScaledCell", "with `--scale-out`: the predictions on other numbers of GPUs", False),
        },
        listed=True,
    ),
    Described(
        "jobs render",
        "The runs that were written, as a list.",
        keys={"id": Key("text", "id of the run"), "path": Key("text", "its folder")},
        listed=True,
    ),
    Described(
        "jobs submit --dry-run",
        "What would be submitted, as a list.",
        keys={
            "id": Key("text", "id of the run"),
            "send": Key("boolean", "whether it would be submitted"),
            "why": Key("text", "the reason, in words"),
        },
        listed=True,
    ),
    Described("jobs submit, jobs retry, jobs trace", "The runs after the command; with `--wait`, after they ended.", keys=RUNS),
    Described("jobs status", "The selected runs. `lease` is there only if the machines are lent.", keys={**RUNS, **LEASE}),
    Described("jobs cancel", "The runs that were cancelled.", keys=RUNS),
    Described(
        "jobs advise",
        "Strategies for a workload, the best first.",
        keys={
            **SCHEMA,
            "strategies": Key("list of Advice", "by groups of ties, the recommended first; last those without a throughput"),
            "changes": Key("mapping", "what could be different -> the Advice that would be recommended then"),
            "rules": Key("list of JudgedRule", "the rules of the studies that apply"),
        },
    ),
    Described(
        "jobs strategies",
        "The strategies, as a list; those of the workspace first.",
        keys={
            "name": Key("text", "the name in a matrix"),
            "summary": Key("text", "what it does, in one line"),
            **SHIPS,
            "precisions": Key("list of text", "the precisions that it supports"),
            "options": Key("list of Option", "its options"),
        },
        listed=True,
    ),
    Described(
        "jobs workloads",
        "The workloads, as a list; those of the workspace first.",
        keys={
            "name": Key("text", "the name in a matrix"),
            "summary": Key("text", "what it is, in one line"),
            **SHIPS,
            "parameters": Key("integer", "number of parameters"),
            "unit": Key("text", "what a batch counts, such as images or tokens"),
            "flops_per_unit": Key("number or null", "FLOPs per unit, forward and backward; null: not known"),
            "flops_source": Key("text", "where this number comes from"),
            "seq_len": Key("integer or null", "tokens of a sequence; null: no sequences"),
            "optimizer": Key("Optimizer", "the default optimizer"),
            "options": Key("list of Option", "its options"),
        },
        listed=True,
    ),
    Described(
        "jobs launchers",
        "The launchers, as a list.",
        keys={
            "name": Key("text", "the name in a matrix"),
            "summary": Key("text", "what it starts, in one line"),
            "several_nodes": Key("boolean", "whether its ranks may be on several nodes"),
            "rehearsal": Key("boolean", "whether its runs are rehearsals"),
            "needs": Key("list of text", "programs that each node needs"),
        },
        listed=True,
    ),
    Described(
        "jobs matrices",
        "The matrices that ship, as a list.",
        keys={
            "name": Key("text", "the name for `--matrix`"),
            "summary": Key("text", "its title"),
            "cells": Key("integer", "number of cells"),
            "path": Key("text", "the file"),
        },
        listed=True,
    ),
    Described("collect fetch", "The runs that were fetched, as a list.", FetchedRun, listed=True),
    Described("collect summarize", "The same as [report/summary.json](json-files.md#reportsummaryjson).", Summary),
    Described(
        "collect verdicts",
        "The part of the summary that is about the study.",
        Summary,
        only=(
            "matrix",
            "title",
            "rehearsal",
            "illustrative",
            "remarks",
            "verdicts",
            "reported",
            "deviations",
            "assumed",
            "notes",
        ),
    ),
    Described("collect compare", "Two workspaces, A and B.", Comparison),
    Described(
        "collect explain",
        "Where a number comes from. [The how-to page](../how-to/see-where-a-number-comes-from.md)",
        Explanation,
    ),
    Described("collect history", "Equal cells over time. [The how-to page](../how-to/see-what-changed-over-time.md)", History),
    Described("collect archive", "An archive that was written.", WrittenArchive),
    Described("collect open", "An archive that was opened.", OpenedArchive),
    Described(
        "collect metrics",
        "The metrics, as a list.",
        keys={
            "name": Key("text", "the name in a claim and in the summary"),
            "unit": Key("text", "its unit"),
            "direction": Key("text", "what is better, if anything is"),
            "definition": Key("text", "what it is"),
            "file": SHIPS["file"],
        },
        listed=True,
    ),
    Described(
        "collect export",
        "The files of an export.",
        keys={"format": Key("text", "name of the format"), "files": Key("list of text", "the paths that were written")},
    ),
    Described(
        "collect import",
        "A run that was made from logs of another program ([your own logs](../bring-your-own-logs.md)).",
        keys={
            "run": Key("text", "its id"),
            "matrix": Key("text", "the matrix that has the run"),
            "files": Key("list of ImportedFile", "the logs"),
            "remarks": Key("list of text", "what a reader must know to judge the numbers, as sentences"),
            "steps": Key("mapping", "rank -> number of steps"),
            "samples": Key("integer", "number of samples of telemetry"),
        },
    ),
    Described(
        "collect trace",
        "Where the time of profiled steps went ([what traces answer](../trace-answers.md)). For a snapshot of the CUDA "
        "allocator, the document has other keys: file, segments, entries, bytes and at_peak. `collectives` and `stragglers` "
        "are absent with `--like-hta`; `against`, `why` and `operators` are there only with `--against`.",
        keys={
            "run": Key("text", "the run, or the path that was given"),
            "rehearsals": Key("list of text", "which of the named runs are rehearsals"),
            "like_hta": Key("boolean", "whether the figures are rounded as HolisticTraceAnalysis does"),
            "ranks": Key("list of [rank](#ranks-of-collect-trace)", "one per trace"),
            "without_figures": Key("list of text", "traces without figures, as sentences"),
            "lacks": Key("list of Lack", "what each recording lacks, with the file and the rank", False),
            "damage": Key("list of text", "damage of the traces, as sentences"),
            "collectives": Key(
                "list of CollectiveUse",
                "of all ranks together",
                False,
            ),
            "stragglers": Key(
                "mapping",
                "rank: the slowest rank, or null and `why`; matched, unmatched_calls (numbers of calls); "
                "skew_mean_ns, skew_median_ns, skew_longest_ns: from the first to the last rank in a call; "
                "lost_pct; ranks: list of RankWait",
                False,
            ),
            "missing_ranks": Key("text or null", "how many ranks were profiled, if not all were, as a sentence", False),
            "advice": Key("list of Saving", "at most three things to change, the largest saving first", False),
            "against": Key("text", "the other run", False),
            "why": Key("StepDifference or null", "the difference to the other run, in parts", False),
            "operators": Key("list of OperatorDifference or null", "kernels or operators beside those of the other run", False),
            "not_compared": Key("text or null", "why the runs are not compared, as a sentence; null: they are", False),
        },
    ),
    Described(
        "ranks of collect trace",
        "An entry of `ranks` above: the fields of Breakdown, and these.",
        Breakdown,
        {
            "bounds": Key("mapping", "times that are only bounds -> at least, at most or unknown"),
            "exposed_communication_ns": Key("integer", "collectives run and nothing computes"),
            "overlap_pct": Key("number or null", "share of communication_ns in which something computes"),
            "idle": Key("IdleCauses or null", "idle_ns by cause; null: not known", False),
            "launch_delay": Key("LaunchDelays or null", "null: the trace has no launches", False),
            "work": Key("RankWork", "the time by category of work, operator, launching call and stream", False),
            "phases": Key("list of PhaseTime", "in the order of a step", False),
            "layers": Key("list of LayerTime", "the modules of the model, if the trace records them", False),
            "memory": Key("list of MemoryUse", "the memory of each device, if the trace records it", False),
            "matrix_products": Key("list of MatrixProduct", "of matrix products by their sizes", False),
            "attention": Key("list of AttentionUse", "the implementations of attention that ran", False),
        },
        listed=True,
    ),
    Described(
        "collect timeline",
        "All ranks and hosts of a run on one clock.",
        keys={
            "run": Key("text", "id of the run"),
            "ranks": Key(
                "list",
                "rank, host, steps (a number), medians of step_ms, data_ms, forward_ms, ...",
            ),
            "clocks": Key("list of ComparedClock", "one per host"),
            "rehearsal": Key("boolean", "whether the run is a rehearsal"),
            "uncorrected": Key("list of text", "hosts whose clock was not compared"),
            "instruments": Key("list", "rank, host, end_s, and the fields of InstrumentAct"),
            "straggler": Key("Straggler or null", "null: no rank is slower than the others"),
            "faults": Key("text", "the faults on purpose, in words; empty: none"),
            "file": Key("text", "with `--perfetto`: the file that was written", False),
            "events": Key("integer", "with `--perfetto`: number of its events", False),
        },
    ),
    Described(
        "collect track",
        "What was logged to a tracker.",
        keys={
            "run": Key("text", "id of the run"),
            "tracker": Key("text", "name of the tracker"),
            "folder": Key("text", "where the tracker keeps its files"),
            "points": Key("integer", "number of points that were logged"),
        },
    ),
    Described(
        "collect watch",
        "Printed when the page can be opened.",
        keys={"workspace": Key("text", "the workspace"), "url": Key("text", "the address of the page")},
    ),
    Described("collect sample", "Printed when the sampler ends.", SamplerTally),
)
USED = (
    Cell, Optimizer, Option, ExcludedPoint, EstimatedCost, GpuHours, RunTime, AccountShare, Lease, Prediction, ScaledCell,
    Status, Advice, JudgedRule, Outcome, HardwareType, CollectiveUse, RankWait, StepDifference, OperatorDifference, IdleCauses,
    LaunchDelays, RankWork, Saving, PhaseTime, LayerTime, MemoryUse, MatrixProduct, AttentionUse, Lack, DeviceTime,
    ComparedClock, Straggler,
    Host,
)  # fmt: skip
# For some types: the keys that their objects in JSON documents have in addition to the fields of the type.
ALSO = {
    InventoryNode: {
        "addresses": Key("mapping or null", "name of a network interface -> its IPv4 addresses"),
        "facts": Key("mapping", "the machine at the last `provision`: the keys of Host"),
        "networks": Key("list", "on CloudLab: the networks of the experiment to which the node is attached", False),
    },
    HardwareType: {"cuda_builds": Key("list of text or null", "the CUDA builds of torch that work there")},
    CollectiveUse: {
        "is_partial": Key("boolean", "whether ranks of the group were not profiled, so that times and bandwidths are bounds"),
        "transfer_ns": Key("integer or null", "total_ns without waiting for slow ranks; null unless all calls were matched"),
        "hidden_pct": Key("number or null", "hidden_ns as a share of total_ns"),
        "algorithm_gb_per_s": Key("number or null", "algorithm bandwidth as nccl-tests defines it, in 1e9 bytes/s"),
        "bus_gb_per_s": Key("number or null", "bus bandwidth as nccl-tests defines it, in 1e9 bytes/s"),
        "link_pct": Key("number or null", "bus bandwidth as a share of link_gb_per_s"),
    },
    RankWait: {"lost_pct": Key("number or null", "lost_ns as a share of span_ns")},
    ComparedClock: {"drift_s": Key("number or null", "change of the offset from the first to the last comparison")},
    Straggler: {"host": Key("text", "the host of the rank")},
    OperatorTime: {
        "flops_per_s": Key("number or null", "achieved FLOP per second", False),
        "bytes_per_s": Key("number or null", "bytes per second of the time of its kernels", False),
        "roofline_pct": Key("number or null", "least_ns as a share of kernel_ns", False),
    },
    MatrixProduct: {"flops_per_s": Key("number or null", "achieved FLOP per second; null: not known")},
    EventTally: {"mean_ns": Key("number", "mean duration of a call")},
}
