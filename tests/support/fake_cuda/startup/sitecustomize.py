"""Python imports this module at its start if this folder is in PYTHONPATH: the ranks of a run then have fake GPUs.

FAKE_CUDA_LIBRARY is the C++ library of the fake GPUs; there are as many as the stub of NVML has (STUB_NVML). Only ranks get
them, because fake GPUs import torch, which takes seconds. A rank is recognized by its command line.
"""

import os
import sys
from pathlib import Path
from typing import Any

if {"trainers", "provision.checks._trial", "provision.checks._all_reduce_ranks"}.intersection(sys.orig_argv):
    import fake_cuda

    fake_cuda.install(
        Path(os.environ["FAKE_CUDA_LIBRARY"]), devices=Path(os.environ["STUB_NVML"]).read_text().count("gpu uuid=")
    )
    from torch import profiler

    real_profile = profiler.profile

    def profile_cpu(*, activities: Any, **settings: Any) -> Any:
        """A profiler without CUPTI, which fake GPUs do not have: torch would log an error for each operator."""
        return real_profile(activities=[profiler.ProfilerActivity.CPU], **settings)

    profiler.profile = profile_cpu  # type: ignore[assignment,misc]
