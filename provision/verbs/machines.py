"""The verbs that run no command on a node: they print a text, or the provider of the machines carries them out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from provision import interruption, lock
from provision.cloudlab import hardware
from provision.command import command_line, display
from provision.operation import Site
from provision.operations.inventory import find_lease, store_lease
from provision.provider import Confirmation, Provider, find_provider
from provision.verbs import cluster_file
from shardlab.errors import InputError
from shardlab.terminal import console
from shardlab.terminal.console import Output, Parser
from shardlab.verb import Invocation, Verb
from shardlab.workspace import workspace_trust


class InitVerb(Verb):
    """Print a commented cluster file of a Slurm site, SSH hosts, a CloudLab experiment or this machine; change nothing."""

    name = "init"
    example = "provision init --site alice@login1.example.edu > cluster.yaml"

    def add_options(self, parser: Parser) -> None:
        site_help = "a Slurm site; without a value: this machine is its login node"
        parser.add_argument("--site", nargs="?", const="", metavar="USER@LOGIN", help=site_help)
        hosts_help = "machines with a login by SSH"
        parser.add_list_option("--ssh", type=command_line.parse_names, metavar="HOST,...", help=hosts_help)
        manifests_help = "the manifests of a CloudLab experiment; on one of its nodes none is needed"
        parser.add_list_option(
            "--cloudlab", type=command_line.parse_names, nargs="?", const=[], metavar="FILE,...", help=manifests_help
        )

    def run(self, invocation: Invocation) -> int:
        from provision.command import init  # not imported at the top: init imports psutil, which would make --help slower

        args = invocation.arguments
        manifest_paths = None if args.cloudlab is None else [Path(name) for name in args.cloudlab]
        return init.print_cluster_file(invocation.out, invocation.workspace, args.site, args.ssh or [], manifest_paths)


class HardwareVerb(Verb):
    """Print the machines of CloudLab that have GPUs, by site and type; change nothing."""

    name = "hardware"
    example = "provision hardware --json"

    def run(self, invocation: Invocation) -> int:
        output = invocation.out
        output.print_table("", hardware.CATALOGUE_COLUMNS, hardware.make_catalogue_rows())
        output.print_document(hardware.make_catalogue_document())
        return 0


class RequestVerb(Verb):
    """Print what to request from the provider (CloudLab: a request RSpec, or a profile); change nothing."""

    name = "request"
    example = "provision cluster.yaml request > request.xml"

    def add_options(self, parser: Parser) -> None:
        profile_help = "print a profile (a script for geni-lib) instead of an RSpec"
        parser.add_argument("--profile", action="store_true", help=profile_help)

    def run(self, invocation: Invocation) -> int:
        arguments, output, workspace = invocation.arguments, invocation.out, invocation.workspace
        cluster = cluster_file.read_cluster_file(invocation)
        provider = find_provider(cluster.provider)
        if provider.request is None:
            refusal = provider.carry_out_verb("request", cluster, workspace)
            raise InputError(f"{arguments.cluster or workspace.path / 'cluster.yaml'}: {refusal}")
        text = provider.carry_out_verb("profile" if arguments.profile else "request", cluster, workspace)
        if not output.json:
            output.results.file.write(text)
        output.print_document({**display.result_document("request", Site(cluster, workspace, []), [], [], []), "request": text})
        return 0


class MachinesVerb(Verb):
    """A verb that the provider carries out."""

    def add_options(self, parser: Parser) -> None:
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        output, workspace = invocation.out, invocation.workspace
        cluster = cluster_file.read_cluster_file(invocation)
        provider = find_provider(cluster.provider)
        cluster_file.check_consent(invocation)
        nodes = provider.nodes(cluster, workspace)
        lock_paths = cluster_file.list_locks(provider, cluster, workspace)
        workspace_trust.begin_workspace(workspace)
        site = Site(cluster, workspace, [])
        with lock.hold_locks(lock_paths, ["provision", *invocation.arguments.words]):
            self.ask_confirmation(invocation, provider)
            with interruption.handle_interruption(nodes, lambda: None):
                answer_text = self.carry_out_verb(invocation, provider, site)
        output.print_line(answer_text)
        output.print_document(display.result_document(self.name, site, [], [], [], find_lease(site)))
        return 0

    def ask_confirmation(self, invocation: Invocation, provider: Provider[Any]) -> None:
        """Ask the user whether the verb may act, if it destroys something. Raises InputError if it may not."""

    def carry_out_verb(self, invocation: Invocation, provider: Provider[Any], site: Site) -> str:
        """Let the provider carry out the verb; return its answer for the user. Raises ShardlabError."""
        return provider.carry_out_verb(self.name, site.cluster, site.workspace)


class WarmVerb(MachinesVerb):
    """Prepare in advance what takes long (practice nodes: base system and wheels)."""

    name = "warm"
    example = "provision examples/virtual.yaml warm"


class ExtendVerb(MachinesVerb):
    """Ask the provider for the machines for more hours."""

    name = "extend"
    example = "provision extend --hours 24 --reason 'a deadline'"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("--hours", type=command_line.parse_count, metavar="N", help="hours to ask for")
        parser.add_argument("--reason", metavar="TEXT", help="why, for the administrators of the provider")
        super().add_options(parser)

    def carry_out_verb(self, invocation: Invocation, provider: Provider[Any], site: Site) -> str:
        arguments = invocation.arguments
        try:
            return provider.carry_out_verb("extend", site.cluster, site.workspace, arguments.hours, arguments.reason)
        finally:  # also after an error: the provider may have granted a part of the hours
            store_lease(site)


class DownVerb(MachinesVerb):
    """Remove what provision created (practice nodes and their network, an experiment of CloudLab)."""

    name = "down"
    example = "provision cluster.yaml down"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("--yes", action="store_true", help="do not ask before machines are given back")
        super().add_options(parser)

    def ask_confirmation(self, invocation: Invocation, provider: Provider[Any]) -> None:
        if provider.confirmation is not None:
            confirmation = provider.confirmation(invocation.cluster, invocation.workspace)
            _confirm_down(invocation.out, confirmation, invocation.arguments.yes)


def _confirm_down(output: Output, confirmation: Confirmation | None, is_confirmed: bool) -> None:
    """Show what `down` would remove, and ask the user to type `confirmation.name`. Raises InputError if the user types another
    text."""
    if confirmation is None:
        return
    for sentence in confirmation.loss_sentences:
        output.print_remark(sentence, style="yellow")
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        raise InputError(
            f"down was not confirmed. Allowed: the option --yes, or the typed name {confirmation.name} on a terminal."
        )
    if output.ask(f"Type the name {confirmation.name} to confirm: ") != confirmation.name:
        raise InputError(f"down was not confirmed: the typed name is not {confirmation.name}. Nothing was changed.")
