"""A run whose samples are also stored as columns gives the same as without columns, and the columns are really used."""

import os
import random
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

import pytest
import support_columns as support
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support_columns import is_same, sample, small_segments, without_columns, write  # noqa: F401 - a fixture
from support_long import LONG

from collect.loading import loaded_run
from collect.loading.records import RunRecords
from collect.sample_columns import segment, tables, writer
from collect.sampler import loop
from collect.sampler.source import Source
from shardlab.runs.record import GpuSample, LineWriter, NicSample, RdmaSample, Sample
from shardlab.runs.rundir import RunDir

pytestmark = pytest.mark.usefixtures("small_segments")
# No phase makes a failing example smaller, because this takes minutes.
FEW = settings(max_examples=400 if LONG else 15, phases=[Phase.explicit, Phase.reuse, Phase.generate])


SAMPLER = st.tuples(st.sampled_from(["node0", "雪"]), st.lists(support.SAMPLES, max_size=12), st.booleans())


@FEW
@given(samplers=st.lists(SAMPLER, min_size=1, max_size=4))
def test_frames_and_damage_are_the_same_with_and_without_columns(samplers):
    """Samplers on two nodes write any samples. Some are killed while they write a line, and are started again."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_run, "PART", 5)
        for host, samples, is_killed in samplers:
            path = write(Path(name), samples, host)
            if is_killed:
                with path.open("ab") as handle:
                    handle.write(b'{"schema":1,"t_s":')
        used = is_same(Path(name))
        assert used >= any(len(samples) > 2 for _, samples, _ in samplers)


def test_a_long_file_has_many_segments_and_all_are_used(tmp_path):
    path = write(tmp_path, [sample(tick) for tick in range(100)])
    written = support.parts(path.with_suffix(".columns").read_bytes())
    assert len(written) > 5
    assert [one.begin for one, _ in written[1:]] == [one.end for one, _ in written[:-1]]
    assert written[-1][0].end == path.stat().st_size
    assert is_same(tmp_path) == len(written)


def test_a_short_run_has_no_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "LEAST", 10_000)
    path = write(tmp_path, [sample(tick) for tick in range(3)])
    assert path.stat().st_size < 4000
    assert not path.with_suffix(".columns").exists()


def test_a_sampler_after_a_killed_sampler_begins_a_segment_at_its_own_line(tmp_path):
    path = RunDir(tmp_path).samples_file("node0")
    path.parent.mkdir()
    path.write_bytes(b'{"schema":1,"t_s":')
    write(tmp_path, [sample(tick) for tick in range(20)])
    written = support.parts(path.with_suffix(".columns").read_bytes())
    assert written[0][0].begin == 19
    assert is_same(tmp_path) == len(written)


@pytest.mark.parametrize("gone", [0, 1, 2, -1])
def test_lines_without_a_segment_are_decoded(tmp_path, gone):
    """One segment is missing, as after a kill: at the beginning, between others, or at the end."""
    path = write(tmp_path, [sample(tick) for tick in range(40)])
    columns = path.with_suffix(".columns")
    whole = [segment.MAGIC + part for part in columns.read_bytes().split(segment.MAGIC)[1:]]
    del whole[gone]
    columns.write_bytes(b"".join(whole))
    assert is_same(tmp_path) == len(whole) > 2


def test_columns_keep_samples_of_a_clock_set_back_and_of_several_boots(tmp_path):
    """A sampler is started again after a reboot, and its clock is set back within a segment."""
    back = [sample(tick) for tick in range(30)]
    for each in back[10:]:
        each.wall_s -= 7.5
    again = [sample(tick) for tick in range(20)]
    for each in again:
        each.boot_id, each.wall_s = "another-boot", each.wall_s + 12
    write(tmp_path, back)
    write(tmp_path, again)
    assert is_same(tmp_path) > 3


def test_zero_and_minus_zero_are_kept_apart(tmp_path):
    samples = [sample(tick) for tick in range(60)]
    for tick, each in enumerate(samples):
        each.cpu_pct = 0.0 if tick < 20 or tick % 3 == 0 else -0.0
        each.io_pressure_s = -0.0 if tick < 30 else 1.0
    write(tmp_path, samples)
    assert is_same(tmp_path) > 5
    assert "-0.0" in repr(support.ReadRun(tmp_path).frames.hosts["io_pressure_s"].to_list())


def test_samples_of_one_moment_keep_their_order(tmp_path):
    """Also if some of them are in segments and others are not, and if files have the samples of other hosts."""
    for host, named in (("a", "z"), ("b", "b"), ("z", "a")):
        samples = [sample(tick, host=named) for tick in range(30)]
        for each in samples[:25]:
            each.wall_s = 1e9
        columns = write(tmp_path, samples, host).with_suffix(".columns")
        parts = [segment.MAGIC + part for part in columns.read_bytes().split(segment.MAGIC)[1:]]
        assert is_same(tmp_path) > 2
        for kept in ([*parts[:1], *parts[2:]], parts[:1]):
            columns.write_bytes(b"".join(kept))
            assert is_same(tmp_path) > 0


def test_a_line_edited_by_hand_counts_and_not_its_column(tmp_path):
    path = write(tmp_path, [sample(tick) for tick in range(30)])
    all_used = is_same(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"memory_used_bytes":1000000009', b'"memory_used_bytes":1000000777'))
    assert path.read_bytes() != content
    assert is_same(tmp_path) == all_used - 1
    assert 1000000777 in support.ReadRun(tmp_path).frames.hosts["memory_used_bytes"].to_list()


def test_damaged_lines_are_counted_as_without_columns(tmp_path):
    """Bytes of the record file are changed, one after the other."""
    path = write(tmp_path, [sample(tick) for tick in range(25)])
    content, chance = path.read_bytes(), random.Random(5)
    for _ in range(12):
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed[: chance.choice([len(changed), chance.randrange(len(changed))])])
        is_same(tmp_path)


def test_collect_fetch_needs_no_numpy_and_finds_the_same(tmp_path):
    """`RunRecords` uses the columns as well, without the packages that frames need."""
    path = write(tmp_path, [sample(tick) for tick in range(30)])
    with path.open("ab") as handle:
        handle.write(b"no JSON\n{")
    code = (
        "import sys; from pathlib import Path; import collect.sample_columns.reader as reader; reader.LEAST = 1\n"
        "decoded = []; decode = reader.decode_lines\n"
        "reader.decode_lines = lambda raw, kind: decoded.append(raw) or decode(raw, kind)\n"
        "from collect.loading.records import RunRecords; from shardlab.runs.rundir import RunDir\n"
        "found = RunRecords.read(RunDir(Path(sys.argv[1])))\n"
        "print(found.last_record_s, found.damage, decoded, {'numpy', 'polars'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout
    with_columns = RunRecords.read(RunDir(tmp_path))
    path.with_suffix(".columns").unlink()
    found = RunRecords.read(RunDir(tmp_path))
    assert found.damage.corrupt == {"samples/node0.jsonl": 1}
    assert found.damage.truncated == ["samples/node0.jsonl"]
    assert (found.last_record_s, found.damage) == (with_columns.last_record_s, with_columns.damage)
    assert found.last_record_s == sample(29).wall_s
    decoded = [b"no JSON\n", b"{"]
    assert said.strip() == f"{found.last_record_s} {found.damage} {decoded} set()"


@pytest.mark.parametrize("kind", ["a symlink", "a FIFO", "a folder"])
def test_only_a_regular_file_of_columns_is_opened(tmp_path, kind):
    path = write(tmp_path / "run", [sample(tick) for tick in range(20)])
    columns = path.with_suffix(".columns")
    columns.rename(tmp_path / "outside")
    if kind == "a symlink":
        columns.symlink_to(tmp_path / "outside")
    elif kind == "a FIFO":
        os.mkfifo(columns)
    else:
        columns.mkdir()
    found = support.ReadRun(tmp_path / "run")
    assert found.segments == 0
    assert found.frames.hosts.height == 20


class Counting(Source):
    """A source that ends the sampler after some samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.left = samples

    def fill(self, sample):
        self.left -= 1
        sample.nics = [NicSample(name="eth0", kind="physical", tx_bytes=self.left + 1)]  # the last sample has 0


def run_sampler(path: Path, monkeypatch: pytest.MonkeyPatch, source: Counting) -> loop.TickTally:
    monkeypatch.setattr(loop.signal, "sigtimedwait", lambda *_: None if source.left > 0 else 1)
    return loop.run_sampler(path, 50, None, [source])


def test_the_loop_of_the_sampler_writes_columns_and_goes_on_after_a_restart(tmp_path, monkeypatch):
    path = RunDir(tmp_path).samples_file("node0")
    for _ in range(2):
        assert run_sampler(path, monkeypatch, Counting(40)).remarks == []
    assert is_same(tmp_path) == len(support.parts(path.with_suffix(".columns").read_bytes())) > 3
    assert support.ReadRun(tmp_path).frames.hosts.height == 82


@pytest.mark.parametrize("kind", ["a folder", "a symlink"])
def test_columns_that_cannot_be_written_are_a_remark_and_no_sample_is_lost(tmp_path, monkeypatch, kind):
    path = RunDir(tmp_path).samples_file("node0")
    path.parent.mkdir()
    if kind == "a folder":
        path.with_suffix(".columns").mkdir()
    else:
        path.with_suffix(".columns").symlink_to(tmp_path / "outside")
    tally = run_sampler(path, monkeypatch, Counting(40))
    assert tally.samples == 41
    assert "the samples are not written as columns" in tally.remarks[0]
    assert "node0.columns" in tally.remarks[0]
    assert not (tmp_path / "outside").exists()
    assert support.ReadRun(tmp_path).frames.hosts.height == 41


def test_a_number_that_no_column_can_hold_only_loses_its_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SEGMENT", 12_000)
    samples = [sample(tick) for tick in range(40)]
    samples[9].memory_used_bytes = 2**63
    for after in samples[10:15]:
        after.memory_used_bytes = None
    path = write(tmp_path, samples)
    written = support.parts(path.with_suffix(".columns").read_bytes())
    assert written
    begins = path.read_bytes().index(b"9223372036854775808")
    assert not [one for one, _ in written if one.begin <= begins < one.end]
    assert is_same(tmp_path) == len(written)
    assert support.ReadRun(tmp_path).frames.hosts["memory_used_bytes"][9] is None


def test_the_columns_are_fields_of_the_records():
    """Each column has the kind of its field, and is null only if the field may be."""
    words = {str: "text", float: "float", int: "int", bool: "bool", list[str]: "texts", list[int]: "ints"}
    records = ((tables.HOSTS, Sample), (tables.NICS, NicSample), (tables.GPUS, GpuSample), (tables.RDMA, RdmaSample))
    for columns, record in records:
        fields = typing.get_type_hints(record) | {"busiest_core_pct": float | None}
        for name, kind in columns.items():
            of_field = [one for one in (typing.get_args(fields[name]) or [fields[name]]) if one is not type(None)]
            if typing.get_origin(fields[name]) is list:
                of_field = [fields[name]]
            assert [words[one] for one in of_field] == [kind], (record, name)
            assert (name in tables.ALWAYS) == (type(None) not in typing.get_args(fields[name])), (record, name)


def test_the_memory_of_the_writer_is_that_of_one_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SEGMENT", 20_000)
    path = RunDir(tmp_path).samples_file("node0")
    most = 0
    with LineWriter(path) as lines:
        columns = writer.ColumnsWriter(path, lines.begin)
        for tick in range(300):
            columns.add(lines.write(sample(tick)))
            most = max(most, columns._tables["hosts"].rows + len(columns._waiting))
    assert most <= 20_000 / (path.stat().st_size / 300) + writer.BATCH
