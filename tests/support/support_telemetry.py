"""Files of telemetry samples, and what a run gives that is read with and without the cache of its samples."""

from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest

from collect.loading import records, sample_cache
from collect.loading.loaded_run import LoadedRun
from collect.loading.records import Telemetry
from shardlab.record_types import Count, Measured
from shardlab.runs.record import SCHEMA, GpuSample, LineWriter, NicSample, RdmaSample, Sample, decode_records
from shardlab.runs.rundir import RunDir

HOST = "node0"
MOST_INT = 2**63 - 1


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the cache of a user who has none yet. Short files are cached too, and read in small blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sample_cache, "LEAST_CACHED_BYTES", 1)
    monkeypatch.setattr(sample_cache, "LEAST_ADDED_BYTES", 1)
    monkeypatch.setattr(sample_cache, "BLOCK_BYTES", 3000)
    return tmp_path / "cache" / "shardlab" / "telemetry"


def sample(tick: int, gpus: int = 2, host: str = HOST) -> Sample:
    """A sample as a sampler on a node with GPUs writes it. The values differ from sample to sample."""
    return Sample(
        schema=SCHEMA, t_s=100.5 + tick, wall_s=1e9 + tick, host=host, boot_id="boot", started_hz=None if tick else 1.0,
        cpu_pct=None if tick == 0 else tick % 7 + 0.1, cores_pct=[tick % 5 + 0.3, 1.0], memory_used_bytes=10**9 + tick,
        gpus=[
            GpuSample(
                uuid=f"GPU-{gpu}", lost=tick == 7, utilization_pct=tick % 101, power_w=None if tick == 5 else 300.25 + tick,
                memory_total_bytes=None if tick else 2**36, energy_j=5.0 * tick, nvlink_tx_bytes=tick * 10**9,
                throttled=["power_cap"] * (tick % 3 == 1), xids=[79] if tick == 6 else None,
            )
            for gpu in range(gpus)
        ],
        nics=[NicSample(name="eth0", kind="physical", mac="m", tx_bytes=tick * 10**6), NicSample(name="lo", kind="loopback")],
        rdma=[RdmaSample(device="mlx5_0", port=1, tx_bytes=tick * 10**7)] if tick % 2 else None,
    )  # fmt: skip


def write(folder: Path, samples: list[Sample], host: str = HOST) -> Path:
    """Append samples to the file of a host in a run folder as a sampler does. Returns the path of the file."""
    path = RunDir(folder).samples_file(host)
    with LineWriter(path) as lines:
        for each in samples:
            lines.write_record(each)
    return path


class ReadRun:
    """A run folder that was read. decoded: how many bytes of samples were decoded."""

    def __init__(self, folder: Path, telemetry: Telemetry = "read") -> None:
        self.decoded = 0

        def counted(raw, kind):
            self.decoded += len(raw) if kind is Sample else 0
            return decode_records(raw, kind)

        with pytest.MonkeyPatch.context() as patch:
            for module in (records, sample_cache):
                patch.setattr(module, "decode_records", counted)
            run = LoadedRun.read(RunDir(folder), telemetry)
        self.damage, self.last_record_s, self.verdict = run.damage, run.last_record_s, run.verdict
        self.frames = run.samples
        self.coverage = run.coverage

    def same(self, other: "ReadRun") -> bool:
        """Whether both runs are equal: damage, and the frames with the types and the order of their rows. As text, 0.0 and
        -0.0 differ."""
        for ours, theirs in zip(self.frames, other.frames, strict=True):
            if ours.schema != theirs.schema or repr(ours.rows()) != repr(theirs.rows()):
                return False
        facts = [(one.damage, one.last_record_s, one.verdict, one.coverage) for one in (self, other)]
        return facts[0] == facts[1]


def without_cache(folder: Path) -> ReadRun:
    """The run folder, read without the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_cache, "LEAST_CACHED_BYTES", 2**62)
        return ReadRun(folder)


def is_same(folder: Path, telemetry: Telemetry = "read") -> int:
    """Check that a run folder gives the same with and without the cache. Returns how many bytes were decoded with it."""
    found = ReadRun(folder, telemetry)
    assert found.same(without_cache(folder))
    return found.decoded


FLOATS = st.none() | st.floats(-1e150, 1e150) | st.sampled_from([0.0, -0.0, 5e-324, 1.0])
INTS = st.none() | st.integers(0, MOST_INT) | st.sampled_from([0, MOST_INT, MOST_INT - 1])
NAMES = st.sampled_from(["eth0", "lo", "Ünïcode-雪", "", '"quoted"\\ \n', "0"])
TEXTS = st.none() | NAMES


def of(kind: type, /, **fields: st.SearchStrategy) -> st.SearchStrategy:
    """Records of a type. Numbers that may be absent get any value; other fields are in `fields`."""
    guessed = {}
    for field in msgspec.structs.fields(kind):
        if field.type == (Measured | None):
            guessed[field.name] = FLOATS
        elif field.type == (Count | None):
            guessed[field.name] = INTS
        elif field.type == (str | None):
            guessed[field.name] = TEXTS
    return st.builds(kind, **(guessed | fields))


GPUS = of(
    GpuSample, uuid=NAMES, lost=st.booleans(), played=st.booleans(),
    throttled=st.none() | st.lists(NAMES, max_size=2), xids=st.none() | st.lists(st.integers(-5, MOST_INT), max_size=2),
)  # fmt: skip
NICS = of(NicSample, name=NAMES, kind=st.sampled_from(["physical", "virtual", "loopback"]))
RDMA = of(RdmaSample, device=NAMES, port=st.integers(0, 3))
SAMPLES = of(
    Sample, schema=st.just(1), t_s=st.floats(0, 1e6), wall_s=st.sampled_from([1e9 + step / 4 for step in range(8)]),
    host=st.sampled_from([HOST, HOST, HOST, "snow"]), boot_id=st.sampled_from(["a", "b"]),
    started_hz=st.none() | st.just(2.0), cores_pct=st.none() | st.lists(st.floats(0, 100), max_size=3),
    gpus=st.none() | st.lists(GPUS, max_size=3), nics=st.none() | st.lists(NICS, max_size=3),
    rdma=st.none() | st.lists(RDMA, max_size=2),
)  # fmt: skip
