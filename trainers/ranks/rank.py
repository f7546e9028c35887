"""Reads the rank of this process from the environment variables that the launcher set. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardlab.errors import InputError

STORE_VARIABLE = "SHARDLAB_STORE"  # set by the fork launcher: the path of the file that its ranks use as rendezvous


class Rank(msgspec.Struct, frozen=True):
    """The rank of this process and the world size. Without a launcher, the process is the only rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: str | None = None
    """The file for the rendezvous, if the fork launcher started this rank; else None."""
    is_slurm_task: bool = False
    """Whether Slurm itself started this process as one of its tasks."""
    local_world_size: int = 1
    """Number of ranks on this node."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Rank:
        """Read RANK, LOCAL_RANK and WORLD_SIZE from an environment. Raises InputError if only some of them are set, or if they
        contradict each other."""
        variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        present_names = [name for name in variables if name in environment]
        if not present_names:
            return cls()
        if len(present_names) < len(variables):
            absent = ", ".join(name for name in variables if name not in environment)
            raise InputError(f"the environment has {', '.join(present_names)} but not {absent}; a launcher sets all three.")
        rank, local_rank, world_size = (read_whole_number(environment, name) for name in variables)
        if not (rank < world_size and local_rank < world_size):
            raise InputError(f"RANK={rank} and LOCAL_RANK={local_rank} do not fit WORLD_SIZE={world_size}.")
        is_slurm_task = environment.get("SLURM_LOCALID") == str(local_rank)
        local_world_size = (
            read_whole_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world_size
        )
        return cls(rank, local_rank, world_size, environment.get(STORE_VARIABLE), is_slurm_task, max(1, local_world_size))


def read_whole_number(environment: Mapping[str, str], variable: str) -> int:
    """The whole number, from 0, in a variable of an environment. Raises InputError if the variable has another value."""
    value_text = environment[variable]
    if not (value_text.isascii() and value_text.isdigit()):
        raise InputError(f"{variable}: found {value_text!r}. Allowed: a whole number from 0.")
    return int(value_text)
