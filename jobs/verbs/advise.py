"""The verb `jobs advise`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jobs.planner import advice_text, advise, gpu, link
from jobs.planner.advise import Question
from jobs.planner.machine import plan_machine
from jobs.planning import rehearsals
from jobs.plugins.own_plugins import OwnPlugins, find_plugins
from jobs.verb import JobsVerb
from jobs.verbs import matrix_plan, shared_options
from jobs.verbs.shared_options import MOST_GPUS
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import Gpus
from shardlab.errors import InputError, UnknownName
from shardlab.matrix import model_file
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.model_file import ModelByConfiguration
from shardlab.registry import OptionValue
from shardlab.runs.rehearsed import RehearsalAnswer
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from shardlab.workspace import inventory
from trainers import menu
from trainers.model.precision import ALL
from trainers.workload import Workload


class AdviseVerb(JobsVerb):
    """Recommend a strategy for a workload on given GPUs, by predicted memory and speed with one global batch."""

    name = "advise"
    example = "jobs advise --workload gpt2-large --gpus 8 --gpu a100 --link nvlink"

    def add_options(self, parser: Parser) -> None:
        workload_help = "a workload that ships or of the workspace, or a configuration of the transformers library (FILE.json)"
        parser.add_argument("--workload", required=True, metavar="NAME|FILE", help=workload_help)
        option_help = "option of the workload, such as n_layer=48; may be given several times"
        parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=option_help)
        parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sequence (default: that of the workload)")
        batch_help = "sequences or images of a step, over all GPUs (default: usual for the model)"
        parser.add_argument("--global-batch", type=int, metavar="N", help=batch_help)
        parser.add_argument("--precision", default="bf16", metavar="NAME", help="precision of the cells (default: bf16)")
        parser.add_argument("--gpus", required=True, type=int, metavar="N", help="number of GPUs in all")
        gpu_help = "GPU model, such as a100-80gb or its NVML name (default: that of the cluster)"
        parser.add_argument("--gpu", metavar="TYPE", help=gpu_help)
        parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: as few as the cluster needs)")
        parser.add_argument("--link", metavar="LINK", help="link between the GPUs of a node (default: that of the GPU)")
        parser.add_argument("--between-nodes", metavar="LINK", help="link of a network card of a node to other nodes")
        parser.add_argument("--cards-per-node", type=int, metavar="N", help="such network cards of a node (default: one)")
        shared_options.add_cluster_option(parser)
        matrix_plan.add_rehearse_options(parser)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        arguments, out = invocation.arguments, invocation.out
        workload, plugins = _find_workload(invocation)
        cluster = _read_cluster(invocation)
        question = _make_question(invocation, workload, cluster)
        alternatives = advise.list_alternatives(question)
        if question.nodes > 1 and (cards_per_node := arguments.gpus // question.nodes) > (cluster.network.cards_per_node or 1):
            more_cards = msgspec.structs.replace(cluster.network, cards_per_node=cards_per_node)
            machine = plan_machine(msgspec.structs.replace(cluster, network=more_cards), None)
            alternatives[f"--cards-per-node {cards_per_node}"] = msgspec.structs.replace(question, machine=machine)
        all_answers: dict[str, RehearsalAnswer] = {}
        rehearsal_source = matrix_plan.make_rehearsals(invocation, plugins)

        def collect_answers(cells: Sequence[AnyCell]) -> Mapping[str, RehearsalAnswer]:
            new_answers = rehearsal_source.get_answers(cells)
            all_answers.update(new_answers)
            return new_answers

        report = advise.rank_strategies(question, alternatives, collect_answers)
        for sentence in rehearsals.describe_refused_rehearsals(all_answers):
            out.print_remark(sentence, style="yellow")
        advice_text.print_advice(out, question, report, is_default_batch=arguments.global_batch is None)
        is_rehearsed = any(advice.predicted.memory_from == "rehearsal" for advice in report.ranked)
        sources_text = "formula and rehearsal" if is_rehearsed else "formula"
        out.print_remark(
            f"note: predictions by {sources_text}, not calibrated by runs; docs/planner.md says how far to trust them."
        )
        out.print_remark("note: the table shows the best degrees (dp, tp, pp) of each strategy; --json has all.")
        out.print_document({"schema": 1, "strategies": report.ranked, "changes": report.changes, "rules": report.rules})
        return 0


def _find_workload(invocation: Invocation) -> tuple[Workload, OwnPlugins]:
    """The workload that --workload names, and the plug-ins of the workspace that define it. Raises InputError."""
    workload_name, models_by_name = invocation.arguments.workload, {}
    if workload_name.endswith(model_file.CONFIGURATION_SUFFIX):
        configuration_file = Path(workload_name).absolute()
        model_entry = ModelByConfiguration(
            f"{configuration_file.parent.name}/{configuration_file.name}", seq_len=invocation.arguments.seq_len
        )
        model = model_file.read_model(model_entry, configuration_file.parent.parent)
        workload_name, models_by_name = model.name, {model.name: model}
    own_names = {workload_name} - models_by_name.keys() - menu.load_workloads().keys()
    plugins = find_plugins(invocation.workspace, own_names, (), models_by_name)
    if (fault := plugins.workloads.fault_by_name.get(workload_name)) is not None:
        needs_length = models_by_name and invocation.arguments.seq_len is None
        raise InputError(f"{fault} A language model needs the option --seq-len." if needs_length else fault)
    if workload_name not in (workloads := plugins.make_workload_menu()):
        raise UnknownName("workload", workload_name, workloads, place="--workload")
    return workloads[workload_name], plugins


def _read_cluster(invocation: Invocation) -> Cluster:
    """The cluster of --gpu, else that of the cluster file, with the network that the options name. Raises InputError."""
    arguments = invocation.arguments
    for option in ("gpus", "nodes", "seq_len", "global_batch", "cards_per_node"):
        if (number := getattr(arguments, option)) is not None and not 1 <= number <= MOST_GPUS:
            raise InputError(f"--{option.replace('_', '-')}: found {number}. Allowed: 1 to {MOST_GPUS}.")
    for option in ("link", "between_nodes"):
        if (link_name := getattr(arguments, option)) not in (None, *link.read_link_entries()):
            raise UnknownName("link", link_name, link.read_link_entries(), place=f"--{option.replace('_', '-')}")
    cluster = invocation.cluster
    if arguments.gpu is not None:
        gpu.must_find_gpu_model(arguments.gpu)
        cluster = Cluster(schema=1, name="advise", provider="slurm", gpus=Gpus(per_node=arguments.gpus, type=arguments.gpu))
    network_keys = {key: getattr(arguments, key) for key in ("link", "between_nodes", "cards_per_node")}
    network = msgspec.structs.replace(
        cluster.network, **{key: value for key, value in network_keys.items() if value is not None}
    )
    return msgspec.structs.replace(cluster, network=network)


def _make_question(invocation: Invocation, workload: Workload, cluster: Cluster) -> Question:
    """The question that the options ask. Raises InputError."""
    arguments, options_by_name = invocation.arguments, {option.name: option for option in workload.options}
    options: dict[str, OptionValue] = {option_name: option.default for option_name, option in options_by_name.items()}
    for option_name, _, value_text in (option_argument.partition("=") for option_argument in arguments.option):
        if option_name not in options_by_name:
            raise UnknownName(f"option of {workload.name}", option_name, options_by_name, place="--option")
        options[option_name] = value_text
        with contextlib.suppress(msgspec.DecodeError):  # what is no YAML is a text
            options[option_name] = msgspec.yaml.decode(value_text.encode())
        if (refusal := options_by_name[option_name].explain_refused_value(options[option_name])) is not None:
            raise InputError(f"--option {option_name}: {refusal}")
    if arguments.precision not in ALL:
        raise UnknownName("precision", arguments.precision, ALL, place="--precision")
    if arguments.seq_len is not None and workload.seq_len is None:
        raise InputError(f"--seq-len: {workload.name} has no sequences. Allowed: leave --seq-len out.")
    gpus_per_node = cluster.gpus.per_node if cluster.gpus is not None and cluster.gpus.per_node else arguments.gpus
    nodes = arguments.nodes or -(-arguments.gpus // gpus_per_node)
    if arguments.gpus % nodes:
        raise InputError(f"--gpus {arguments.gpus} --nodes {nodes}: allowed is a number of nodes that divides the GPUs.")
    all_reduces = inventory.read_all_reduces(invocation.workspace, cluster.name)
    question = Question(
        workload=workload, options=options, machine=plan_machine(cluster, None, all_reduces), gpus=arguments.gpus, nodes=nodes,
        precision=arguments.precision, seq_len=arguments.seq_len or workload.seq_len,
        global_batch=arguments.global_batch or arguments.gpus,
    )  # fmt: skip
    if not question.machine.on_gpu:
        raise InputError(f"--gpu: needed, because the cluster {cluster.name} has no GPUs. Allowed: a GPU model, such as a100.")
    if nodes > 1 and question.machine.link_between_nodes is None:
        raise InputError("--between-nodes: needed with several nodes, such as infiniband-hdr.")
    if (refusal := workload.refuse(advise.make_cell(question, menu.find_strategy("single")))) is not None:
        raise InputError(f"--workload {arguments.workload}: {refusal}")
    if arguments.global_batch is None:
        question = msgspec.structs.replace(question, global_batch=advise.choose_global_batch(question))
    return question
