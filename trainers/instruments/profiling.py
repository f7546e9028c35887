"""Profiles operators and kernels of a few steps with torch's profiler, into a trace that Perfetto and Chrome can open."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from shardlab import files
from trainers.instrument import Instrument

if TYPE_CHECKING:
    from shardlab.cell import Profile
    from trainers.ranks import Peers, Ranks


class Profiler(Instrument):
    """Profiles the ranks that the cell names. Its steps count as slowed down on the other ranks too, because they wait."""

    name = "profile"

    def __init__(self, profile: Profile, path: Path, ranks: Ranks, company: Peers) -> None:
        self._profile, self._path, self._company = profile, path, company
        self._last = profile.first_step + profile.steps - 1
        self._here = ranks.rank in profile.ranks
        activities = [ProfilerActivity.CPU]
        if ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)  # through CUPTI
        self._activities = activities
        self._step = ExitStack()

    def watches(self, step: int) -> bool:
        return self._profile.first_step <= step <= self._last

    def before(self, step: int) -> None:
        if not self._here:
            return
        if step == self._profile.first_step:
            self._profiler = torch.profiler.profile(
                activities=self._activities,
                record_shapes=self._profile.shapes,
                with_stack=self._profile.stacks,
                profile_memory=self._profile.memory,
            )
            self._profiler.start()
        # The name that trace readers look for; torch's own would count from the profiler's start.
        self._step.enter_context(torch.profiler.record_function(f"ProfilerStep#{step}"))

    def after(self, step: int) -> None:
        if self._here:
            self._step.close()
            if step == self._last:
                self._profiler.stop()
                self._write()
        if step == self._last:
            self._company.barrier()  # writing takes seconds: nobody else's next step shall wait for it

    def found(self) -> dict[str, Any]:
        profile = self._profile
        return {"ranks": profile.ranks, "shapes": profile.shapes, "stacks": profile.stacks, "memory": profile.memory}

    def _write(self) -> None:
        files.make_folder(self._path.parent)
        temporary = self._path.with_name(f".{self._path.name.removesuffix('.json.gz')}.tmp.json.gz")  # gzipped by its suffix
        with files.as_workspace_error("write"):
            self._profiler.export_chrome_trace(str(temporary))
            temporary.rename(self._path)
        del self._profiler  # and the events that it holds
