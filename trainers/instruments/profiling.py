"""The instrument `profile`: records operators and kernels of a few steps with torch's profiler.

Perfetto and Chrome can open the trace.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from shardlab.files import files
from trainers.instrument import Instrument

if TYPE_CHECKING:
    from shardlab.matrix.cell import Profile
    from trainers.ranks.ranks import Peers, Ranks


class Profiler(Instrument):
    """Profiles the ranks that the cell names. The profiled steps are marked as slowed down on the other ranks too, because
    these ranks wait for the profiled ranks."""

    name = "profile"

    def __init__(self, profile: Profile, path: Path, ranks: Ranks, peers: Peers) -> None:
        self._profile, self._path, self._peers = profile, path, peers
        self._last_step = profile.first_step + profile.steps - 1
        self._is_profiled = ranks.rank in profile.ranks
        activities = [ProfilerActivity.CPU]
        if ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)  # torch records kernels with CUPTI
        self._activities = activities
        self._step_context = ExitStack()

    def watches_step(self, step: int) -> bool:
        return self._profile.first_step <= step <= self._last_step

    def before_step(self, step: int) -> None:
        if not self._is_profiled:
            return
        if step == self._profile.first_step:
            self._profiler = torch.profiler.profile(
                activities=self._activities,
                record_shapes=self._profile.shapes,
                with_stack=self._profile.stacks,
                profile_memory=self._profile.memory,
            )
            self._profiler.start()
        # Programs that read traces look for the name ProfilerStep#NUMBER. Torch's profiler could add it itself, but would count
        # the steps from the start of the profiler.
        self._step_context.enter_context(torch.profiler.record_function(f"ProfilerStep#{step}"))

    def after_step(self, step: int) -> None:
        if self._is_profiled:
            self._step_context.close()
            if step == self._last_step:
                self._profiler.stop()
                self._write_trace()
        if step == self._last_step:
            self._peers.barrier()  # writing takes seconds, for which other ranks would wait inside their next step

    def collect_results(self) -> dict[str, Any]:
        profile = self._profile
        return {"ranks": profile.ranks, "shapes": profile.shapes, "stacks": profile.stacks, "memory": profile.memory}

    def _write_trace(self) -> None:
        files.make_folder(self._path.parent)
        # Torch compresses the trace because of the suffix .gz.
        temporary_path = self._path.with_name(f".{self._path.name.removesuffix('.json.gz')}.tmp.json.gz")
        with files.as_workspace_error("write"):
            self._profiler.export_chrome_trace(str(temporary_path))
            temporary_path.rename(self._path)
        del self._profiler  # frees the recorded events
