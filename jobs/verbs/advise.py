"""The verb `jobs advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs.planner import advise, gpu, link, planner_table
from jobs.planner.machine import PlannedMachine
from jobs.planning import rehearsals
from jobs.plugins.own_plugins import OwnPlugins
from jobs.verb import JobsVerb
from jobs.verbs import matrix_plan
from jobs.verbs.shared_options import MOST_GPUS
from shardlab.errors import InputError, UnknownName
from shardlab.matrix.cell import Cell
from shardlab.runs.rehearsed import Answer
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from trainers import menu
from trainers.model.precision import ALL


class AdviseVerb(JobsVerb):
    """Rank the strategies for a workload on given GPUs by predicted speed and memory."""

    name = "advise"
    example = "jobs advise --workload gpt2-large --gpus 8 --gpu a100 --link nvlink"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("--workload", required=True, metavar="NAME", help="a workload that ships (jobs workloads)")
        parser.add_argument("--gpus", required=True, type=int, metavar="N", help="number of GPUs in all")
        parser.add_argument("--gpu", required=True, metavar="TYPE", help="GPU model, such as a100-80gb or its NVML name")
        link_help = "link between the GPUs of a node, or between nodes if there are several (default: that of the GPU)"
        parser.add_argument("--link", metavar="LINK", help=link_help)
        parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
        parser.add_argument("--precision", default="bf16", metavar="NAME", help="precision of the cells (default: bf16)")
        matrix_plan.add_rehearse(parser)

    def run(self, invocation: Invocation) -> int:
        args, out = invocation.arguments, invocation.out
        gpu_model = gpu.must_find_model(args.gpu)
        workload = menu.workload(args.workload)
        if args.precision not in ALL:
            raise UnknownName("precision", args.precision, ALL, where="--precision")
        if args.link is not None and args.link not in link.link_entries():
            raise UnknownName("link", args.link, link.link_entries(), where="--link")
        if not 1 <= args.gpus <= MOST_GPUS or not 1 <= args.nodes <= args.gpus or args.gpus % args.nodes:
            given_numbers = f"--gpus {args.gpus} --nodes {args.nodes}"
            raise InputError(f"{given_numbers}: allowed are 1 to {MOST_GPUS} GPUs, and a number of nodes that divides them.")
        if args.nodes > 1 and args.link is None:
            raise InputError("--link: with several nodes, the link between them is needed, such as infiniband-hdr.")
        inside = link.make_data_sheet_link(gpu_model)
        between = None
        if args.link is not None:
            chosen_link = link.find_link(args.link, gpu_model)
            assert chosen_link is not None
            inside, between = (chosen_link, None) if args.nodes == 1 else (inside, chosen_link)
        planned = PlannedMachine(True, args.gpu, gpu_model, gpu.capacity(gpu_model, None), inside, between)
        slowest = args.link or ("nvlink" if gpu_model.link.startswith("NVLink") else "pcie")
        all_answers: dict[str, Answer] = {}
        source = matrix_plan.make_rehearsals(invocation, OwnPlugins())

        def answers(cells: Sequence[Cell]) -> Mapping[str, Answer]:
            new_answers = source.get_answers(cells)
            all_answers.update(new_answers)
            return new_answers

        report = advise.rank_strategies(workload, planned, args.gpus, args.nodes, args.precision, slowest, answers)
        for sentence in rehearsals.describe_refused(all_answers):
            out.print_remark(sentence, style="yellow")
        planner_table.print_advice(out, report)
        source_text = (
            "formula and rehearsal"
            if any(advice.predicted.memory_from == "rehearsal" for advice in report.ranked)
            else "formula"
        )
        out.print_remark(
            f"note: predictions by {source_text}, not calibrated by runs; docs/planner.md says how far to trust them."
        )
        out.print_document({"schema": 1, "strategies": report.ranked, "rules": report.rules})
        return 0
