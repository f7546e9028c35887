"""The Slurm that a machine already uses: whether its controller answers, whether shardlab set it up, and its nodes."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery
from provision.facts.slurm_text import is_name, parse_names, parse_pairs
from shardlab.remote.login_shell import PRINT_PATH

SHARDLAB_HEADER = "# Written by shardlab's provision"  # the beginning of slurm.conf if shardlab wrote the file
SLURM_CONF = "/etc/slurm/slurm.conf"
ANSWER_S = 10  # the time limit of each command; commands of Slurm retry for minutes if the controller does not answer
DESCRIBE_SLURM = f"""\
if command -v scontrol > /dev/null 2>&1; then echo is_in_path=yes
else path=$({PRINT_PATH}) || exit 1; PATH=$path; fi
test ! -e {SLURM_CONF} || echo conf={SLURM_CONF}
is_ours() {{ head -n 1 "$1" 2> /dev/null | grep -q "^{SHARDLAB_HEADER}" && echo is_ours=yes; }}
is_ours {SLURM_CONF}
folder=$(command -v scontrol) || exit 0
printf 'commands=%s\\n' "${{folder%/*}}"
timeout {ANSWER_S} scontrol ping 2> /dev/null | grep -q 'is UP' || exit 0
echo answers=yes
timeout {ANSWER_S} scontrol show config 2> /dev/null | sed -n \
    's/^ClusterName *= */cluster=/p; s/^SLURM_VERSION *= */version=/p; s/^SLURM_CONF *= */conf=/p'
is_ours "$(timeout {ANSWER_S} scontrol show config 2> /dev/null | sed -n 's/^SLURM_CONF *= *//p')"
timeout {ANSWER_S} scontrol show node --oneliner 2> /dev/null
timeout {ANSWER_S} scontrol show partition --oneliner 2> /dev/null
exit 0
"""
_VALUE_PATTERN = re.compile(r"^[A-Za-z0-9._/+ -]{1,200}\Z")


class KnownNode(msgspec.Struct, frozen=True):
    """A node that Slurm knows."""

    name: str
    hostname: str
    address: str
    state: str
    """As scontrol writes it, such as IDLE+DRAIN."""
    partitions: tuple[str, ...] = ()


class SlurmHere(msgspec.Struct, frozen=True):
    """Slurm as one machine sees it. Fields that only Slurm's controller knows are empty if the controller does not answer."""

    commands: str = ""
    """The folder of Slurm's commands; empty: the machine has none."""
    is_in_path: bool = False
    """Whether a command over SSH finds Slurm's commands, and not only a login shell."""
    conf: str = ""
    """The path of slurm.conf."""
    is_ours: bool = False
    """Whether shardlab wrote slurm.conf."""
    answers: bool = False
    """Whether Slurm's controller answers."""
    cluster: str = ""
    version: str = ""
    nodes: tuple[KnownNode, ...] = ()
    partitions: tuple[str, ...] = ()


def build_command(python: str) -> list[str]:
    """The command that describes Slurm. It needs only a shell."""
    return ["sh", "-c", DESCRIBE_SLURM]


def parse(stdout: str) -> SlurmHere:
    """Slurm as the output of DESCRIBE_SLURM describes it. Lines that cannot be read are skipped."""
    value_by_key: dict[str, str] = {}
    known_nodes, partition_names = [], []
    for line in stdout.splitlines():
        if line.startswith("NodeName="):
            known_nodes.append(_parse_node(parse_pairs(line)))
        elif line.startswith("PartitionName="):
            partition_names.append(parse_pairs(line)["PartitionName"])
        else:
            key, _, value = line.partition("=")
            if _VALUE_PATTERN.match(value.strip()):
                value_by_key[key] = value.strip()
    return SlurmHere(
        commands=value_by_key.get("commands", ""),
        is_in_path=value_by_key.get("is_in_path") == "yes",
        conf=value_by_key.get("conf", ""),
        is_ours=value_by_key.get("is_ours") == "yes",
        answers=value_by_key.get("answers") == "yes",
        cluster=value_by_key.get("cluster", ""),
        version=value_by_key.get("version", ""),
        nodes=tuple(node for node in known_nodes if is_name(node.name)),
        partitions=tuple(name for name in partition_names if is_name(name)),
    )


def _parse_node(value_by_key: dict[str, str]) -> KnownNode:
    node_name = value_by_key.get("NodeName", "")
    state = "".join(character for character in value_by_key.get("State", "") if character.isalpha() or character in "+_*")[:60]
    return KnownNode(
        node_name,
        value_by_key.get("NodeHostName", node_name),
        value_by_key.get("NodeAddr", node_name),
        state,
        parse_names(value_by_key.get("Partitions", "")) or (),
    )


SLURM_HERE = FactQuery("Slurm here", build_command, parse, timeout_s=6 * ANSWER_S)
