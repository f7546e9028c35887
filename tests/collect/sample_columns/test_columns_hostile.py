"""Files of columns that are cut, damaged, or written to do harm: the samples are then decoded from the record file.

Nothing is different from a run without columns.
"""

import random
import struct
import subprocess
import sys
import time

import msgspec
import pytest
import support_columns as support
from support_columns import is_same, sample, small_segments, write  # noqa: F401 - a fixture
from support_e2e import until

from collect.loading.records import RunRecords
from collect.sample_columns import reader, segment
from collect.sample_columns.tables import LISTED
from collect.sources import segment_frames
from shardlab.runs.record import RecordLines, Sample, read_lines
from shardlab.runs.rundir import RunDir

MOST = 2**63 - 1
pytestmark = pytest.mark.usefixtures("small_segments")


def samples_of(path):
    """The times of all samples of a file, read with its columns. Checks that each sample comes once and in order."""
    times = []
    for _, piece in reader.read([str(path)], segment_frames.check_segment):
        if isinstance(piece, RecordLines):
            times += [each.wall_s for each in piece.records]
        elif isinstance(piece, reader.BuiltSegment):
            column = piece.built.columns["hosts"]["wall_s"]
            times += column.distinct if column.values is None else column.values.tolist()
    return times


def test_columns_that_are_cut_anywhere_lose_at_most_their_last_segment(tmp_path):
    """The file of columns ends at each of its bytes, as after a kill or during a fetch."""
    samples = [sample(tick, gpus=0) for tick in range(22)]
    path = write(tmp_path, samples)
    columns = path.with_suffix(".columns")
    content, expected = columns.read_bytes(), [each.wall_s for each in samples]
    ends = [len(content.rpartition(segment.MAGIC)[0]), len(content)]
    assert ends[0] > 0
    with columns.open("rb+") as handle:
        for cut in range(len(content), -1, -1):
            handle.truncate(cut)
            assert len(list(reader.read_segments(handle.fileno(), cut))) == sum(cut >= end for end in ends), cut
            if cut % 97 == 0:
                assert samples_of(path) == expected, cut


def test_a_segment_after_a_torn_segment_is_used(tmp_path):
    """A sampler was killed while it wrote a segment, and the next sampler appends to the same file."""
    path = write(tmp_path, [sample(tick) for tick in range(10)])
    columns = path.with_suffix(".columns")
    first = columns.read_bytes()
    write(tmp_path, [sample(tick) for tick in range(10, 20)])
    second = columns.read_bytes()[len(first) :]
    assert is_same(tmp_path) == len(support.parts(first + second)) > 3
    ends = [len(first[: first.index(segment.MAGIC, 1)]), len(first)]
    assert first.count(segment.MAGIC) == 2
    for cut in (1, 30, 1000, ends[0] - 1, ends[0], ends[0] + 50, ends[1] - 700, ends[1] - 1):
        columns.write_bytes(first[:cut] + second)
        assert is_same(tmp_path) == sum(cut >= end for end in ends) + len(support.parts(second)), cut


def test_a_byte_that_was_changed_is_noticed(tmp_path):
    path = write(tmp_path, [sample(tick) for tick in range(9)])
    columns = path.with_suffix(".columns")
    content, chance = columns.read_bytes(), random.Random(3)
    all_used, expected = is_same(tmp_path), support.without_columns(tmp_path)
    for place in [*range(0, 100, 9), *(chance.randrange(len(content)) for _ in range(30))]:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        columns.write_bytes(changed)
        found = support.ReadRun(tmp_path)
        assert found.segments < all_used, place
        assert found.same(expected), place


@pytest.fixture
def run(tmp_path):
    """A run folder with one segment: its record file, the segment, and the bytes of the values."""
    path = write(tmp_path, [sample(tick) for tick in range(6)])
    made = support.parts(path.with_suffix(".columns").read_bytes())
    return path, *made[0]


def columns_of(found, table):
    return {column.name: column for column in found.tables[table].columns}


def put(values, found, table, column, content, at=0):
    """The values with other bytes in a column."""
    place = support.place_of(found, table, column) + at
    return values[:place] + content + values[place + len(content) :]


def with_nulls(found, values, table, column):
    """A column gets a byte for each row that says that no value is missing but the first."""
    rows, width = found.tables[table].rows, 1 if column == "lost" else 8
    end = support.place_of(found, table, column) + rows * width
    columns_of(found, table)[column].nulls = True
    return None, values[:end] + b"\1" + bytes(rows - 1) + values[end:]


def with_codes(found, values, table, column, distinct):
    """A column that had one value gets several distinct values, and the code 0 for each row."""
    place = support.place_of(found, table, column)
    columns_of(found, table)[column].distinct = as_json(distinct)
    return None, values[:place] + bytes(found.tables[table].rows) + values[place:]


def of_one_value(found, rows):
    """All columns of hosts have one value, which takes no bytes, in any number of rows. There are no devices."""
    ones = {"text": '["a"]', "float": "[1.0]", "int": "[0]"}
    for name, table in found.tables.items():
        table.rows = rows if name == "hosts" else 0
        for column in table.columns:
            column.nulls = False
            column.distinct = as_json(ones[column.kind]) if table.rows else as_json("[]" if column.kind in LISTED else "")


def as_json(text):
    """Distinct values; "": a column has none."""
    return msgspec.Raw(text.encode()) if text else segment.StoredColumn("", "int").distinct


LIES = {
    "too many rows of no bytes": lambda s, v: (setattr(s.tables["rdma"], "rows", 2**40), v),
    "more rows than lines": lambda s, v: (setattr(s.tables["hosts"], "rows", 2**60), v),
    "fewer values": lambda s, v: (None, v[:-1]),
    "more values": lambda s, v: (None, v + b"\0"),
    "no samples": lambda s, v: (setattr(s.tables["hosts"], "rows", 0), v),
    "a code without a value": lambda s, v: (None, put(v, s, "gpus", "uuid", b"\x02")),
    "fewer distinct values": lambda s, v: (setattr(columns_of(s, "gpus")["uuid"], "distinct", as_json('["a"]')), v),
    "not a number": lambda s, v: (None, put(v, s, "hosts", "wall_s", b"\0\0\0\0\0\0\xf8\x7f")),
    "infinity at the end": lambda s, v: (None, put(v, s, "hosts", "wall_s", b"\0\0\0\0\0\0\xf0\x7f", 8 * 5)),
    "a null of 2": lambda s, v: (None, put(v, s, "hosts", "cpu_pct", b"\2", 8 * s.tables["hosts"].rows)),
    "a negative count": lambda s, v: (None, put(v, s, "hosts", "rdma", struct.pack("<6q", -1, 2, 0, 1, 0, 1))),
    "another count": lambda s, v: (None, put(v, s, "hosts", "rdma", struct.pack("<6q", 1, 1, 0, 1, 0, 1))),
    "counts that overflow": lambda s, v: (None, put(v, s, "hosts", "rdma", struct.pack("<6q", MOST, MOST, 2, 1, 1, 1))),
    "a host that is null": lambda s, v: (setattr(columns_of(s, "hosts")["host"], "distinct", as_json("[null]")), v),
    "a time that is null": lambda s, v: with_nulls(s, v, "hosts", "t_s"),
    "a truth value that is null": lambda s, v: with_nulls(s, v, "gpus", "lost"),
    "many samples of no bytes": lambda s, v: (of_one_value(s, 2**40), b""),
    "no samples at all": lambda s, v: (of_one_value(s, 0), b""),
    "a text without distinct values": lambda s, v: (setattr(columns_of(s, "hosts")["host"], "distinct", as_json("")), v),
    "a number that is a text": lambda s, v: (setattr(columns_of(s, "nics")["rx_bytes"], "distinct", as_json('["1"]')), v),
    "an integer of 65 bits": lambda s, v: (setattr(columns_of(s, "nics")["rx_bytes"], "distinct", as_json(f"[{2**64}]")), v),
    "two distinct numbers": lambda s, v: with_codes(s, v, "nics", "rx_bytes", "[1,2]"),
    "more distinct values than rows": lambda s, v: with_codes(s, v, "hosts", "boot_id", '["b","c","d","e","f","g","h"]'),
    "another kind": lambda s, v: (setattr(columns_of(s, "hosts")["t_s"], "kind", "int"), v),
    "another name": lambda s, v: (setattr(columns_of(s, "hosts")["t_s"], "name", "at_s"), v),
    "a column too many": lambda s, v: (s.tables["nics"].columns.append(s.tables["nics"].columns[0]), v),
    "a table too few": lambda s, v: (s.tables.pop("rdma"), v),
    "the middle of a line": lambda s, v: (setattr(s, "begin", 3), v),
    "not to the end of a line": lambda s, v: (setattr(s, "end", s.end - 1), v),
    "no lines": lambda s, v: (setattr(s, "end", s.begin), v),
    "lines that are not there": lambda s, v: (setattr(s, "end", s.end + 10**6), v),
    "a place far away": lambda s, v: (setattr(s, "end", 2**62), v),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_segment_with_false_values_and_a_valid_digest_is_not_used(run, tmp_path, lie):
    path, found, values = run
    records = path.read_bytes()
    _, values = LIES[lie](found, values)
    forged = support.forged(found, values, records, found.begin, found.end)
    path.with_suffix(".columns").write_bytes(forged)
    assert is_same(tmp_path) == 0
    assert RunRecords.read(RunDir(tmp_path)).last_record_s == sample(5).wall_s


def test_a_forged_segment_with_true_values_is_used(run, tmp_path):
    """The proof that the lies above fail for what they say, and not for the digest."""
    path, found, values = run
    path.with_suffix(".columns").write_bytes(support.forged(found, values, path.read_bytes(), found.begin, found.end))
    assert is_same(tmp_path) == 1


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (b'"schema":1', b'"schema":2'),
        (b'"begin":0', b'"begin":-1'),
        (b'"rows":6', b'"rows":-6'),
        (b'"sha256":"', b'"sha256":"g'),
    ],
)
def test_a_segment_with_an_invalid_header_is_not_used(run, tmp_path, text, other):
    path, found, values = run
    columns = path.with_suffix(".columns")
    content = support.forged(found, values, path.read_bytes(), found.begin, found.end)
    assert text in content
    columns.write_bytes(content.replace(text, other, 1))
    assert is_same(tmp_path) == 0


def test_segments_that_overlap_or_are_out_of_order_are_used_once(tmp_path):
    path = write(tmp_path, [sample(tick) for tick in range(30)])
    columns = path.with_suffix(".columns")
    parts = [segment.MAGIC + part for part in columns.read_bytes().split(segment.MAGIC)[1:]]
    for order, used in (((0, 0, 1), 2), ((1, 0, 2), 2), ((2, 1, 0), 1), ((0, 1, 1, 0, 2), 3)):
        columns.write_bytes(b"".join(parts[index] for index in order))
        assert is_same(tmp_path) == used


def test_a_segment_has_a_largest_size(run, tmp_path, monkeypatch):
    assert is_same(tmp_path) > 0
    monkeypatch.setattr(segment, "MOST_VALUES", 100)
    assert is_same(tmp_path) == 0


def test_a_file_of_many_segment_starts_is_abandoned_early(tmp_path, monkeypatch):
    path = write(tmp_path, [sample(tick) for tick in range(10)])
    columns, lines = path.with_suffix(".columns"), []
    whole = columns.read_bytes()
    columns.write_bytes(segment.MAGIC * 5000 + whole)
    read_line = reader.read_line
    monkeypatch.setattr(reader, "read_line", lambda line: lines.append(line) or read_line(line))
    assert is_same(tmp_path) == 0
    assert len(lines) == reader.MOST_FAULTS
    columns.write_bytes(segment.MAGIC * 50 + whole)
    assert is_same(tmp_path) > 0


def test_the_digest_is_computed_of_parts_of_the_lines(tmp_path, monkeypatch):
    """Lines longer than the parts that are decoded and hashed at a time."""
    path = write(tmp_path, [sample(tick) for tick in range(30)])
    monkeypatch.setattr(reader, "HASHED", 100)
    monkeypatch.setattr(reader, "BLOCK", 100)
    monkeypatch.setattr(reader, "USUAL_LINE", 100)
    used = is_same(tmp_path)
    assert used == len(support.parts(path.with_suffix(".columns").read_bytes()))
    path.with_suffix(".columns").unlink()
    assert samples_of(path) == [sample(tick).wall_s for tick in range(30)]
    path.write_bytes(path.read_bytes() + b'{"schema":1,' + b" " * 1000)
    assert support.ReadRun(tmp_path).damage.truncated == ["samples/node0.jsonl"]


SAMPLER = (
    "import sys; from collect.sample_columns import writer; writer.SEGMENT = 12_000; writer.LEAST = 1; writer.BATCH = 4\n"
    "from collect.cli import main; main(sys.argv[1:])"
)


def test_a_real_sampler_that_is_killed_leaves_columns_that_fit(tmp_path):
    """kill -9 at random moments, each time followed by another sampler; at last a sampler that ends by itself."""
    path, chance = RunDir(tmp_path).samples_file("node0"), random.Random(11)
    command = [sys.executable, "-c", SAMPLER, "sample", "--out", str(path), "--hz", "50"]
    columns = path.with_suffix(".columns")
    for turn in range(4):
        before = columns.stat().st_size if turn else 0
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        until(lambda least=before: columns.exists() and columns.stat().st_size > least, "it writes a segment")
        time.sleep(chance.uniform(0, 0.1))
        (process.terminate if turn == 3 else process.kill)()
        process.communicate()
    assert is_same(tmp_path) >= 4
    assert support.parts(columns.read_bytes())[-1][0].end == path.stat().st_size
    assert len(read_lines(path, Sample).records) == support.ReadRun(tmp_path).frames.hosts.height
