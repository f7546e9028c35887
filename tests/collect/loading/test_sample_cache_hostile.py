"""Files of the cache that are cut, damaged, foreign or in an unsafe place: lines are decoded, and the cache is made again."""

import hashlib
import os
import random

import msgspec
import polars as pl
import pytest
from support_telemetry import ReadRun, cache, is_same, sample, without_cache, write  # noqa: F401 - a fixture

from collect.loading import sample_cache
from collect.loading.records import RunRecords
from collect.loading.sample_cache import CacheHeader
from collect.sources import samples
from shardlab.runs.rundir import RunDir

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def run(tmp_path):
    """A run folder whose samples are in the cache."""
    write(tmp_path / "run", [sample(tick) for tick in range(12)])
    assert is_same(tmp_path / "run") > 0
    return tmp_path / "run"


@pytest.fixture
def stored(run, cache):  # noqa: F811
    """The only file of the cache."""
    (path,) = cache.iterdir()
    return path


def parts(content):
    """The header and the tables of a file of the cache."""
    line, _, rest = content[64:].partition(b"\n")
    header = msgspec.json.decode(line, type=CacheHeader)
    tables = []
    for size in header.tables:
        tables.append(rest[:size])
        rest = rest[size:]
    return header, tables


def forged(header, tables):
    """A file of the cache with the right digest, as a program can write it that is not ours."""
    content = msgspec.json.encode(header) + b"\n" + b"".join(tables)
    return hashlib.sha256(content).hexdigest().encode() + content


def is_made_again(run, stored, content):
    """Whether a run gives the same with this content of the file of the cache, for which all its lines are decoded."""
    expected, size = without_cache(run), sum(path.stat().st_size for path in (run / "samples").iterdir())
    stored.write_bytes(content)
    found = ReadRun(run)
    return found.same(expected) and found.decoded == size and ReadRun(run).decoded == 0


def test_each_byte_that_was_changed_is_noticed(run, stored):
    content, chance = stored.read_bytes(), random.Random(3)
    for place in [*range(0, 700, 13), *(chance.randrange(len(content)) for _ in range(40))]:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        assert is_made_again(run, stored, changed), place


def test_a_file_that_was_cut_or_continued_is_noticed(run, stored):
    content = stored.read_bytes()
    for end in (0, 1, 63, 64, 65, 200, 700, len(content) // 2, len(content) - 1):
        assert is_made_again(run, stored, content[:end]), end
    assert is_made_again(run, stored, content + b"\n")


def test_the_cache_of_other_lines_is_not_used(run, stored, cache, tmp_path):  # noqa: F811
    path = write(tmp_path / "run", [sample(tick, gpus=1) for tick in range(9)], "other")
    is_same(run)
    (other,) = set(cache.iterdir()) - {stored}
    content = other.read_bytes()
    path.unlink()
    assert is_made_again(run, stored, content)


def other_columns(header, tables):
    frames = samples.decode_parquet(tables)
    return samples.encode_parquet(samples.Samples(frames.hosts.drop("cpu_pct"), *frames[1:]))


def other_types(header, tables):
    frames = samples.decode_parquet(tables)
    return samples.encode_parquet(samples.Samples(frames.hosts.with_columns(pl.col("t_s").cast(pl.Int64)), *frames[1:]))


FOREIGN = {
    "no tables": lambda header, tables: [],
    "no Parquet": lambda header, tables: [b"PAR1" * 20] * 4,
    "a damaged page": lambda header, tables: [tables[0].replace(tables[0][40:60], bytes(20)), *tables[1:]],
    "a damaged footer": lambda header, tables: [tables[0][:-40] + bytes(20) + tables[0][-20:], *tables[1:]],
    "a table too few": lambda header, tables: tables[:3],
    "tables in another order": lambda header, tables: tables[::-1],
    "other columns": other_columns,
    "other types": other_types,
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_valid_digest_does_not_make_foreign_tables_valid(run, stored, foreign):
    header, tables = parts(stored.read_bytes())
    tables = FOREIGN[foreign](header, tables)
    header = msgspec.structs.replace(header, tables=[len(table) for table in tables])
    assert is_made_again(run, stored, forged(header, tables))


@pytest.mark.parametrize(
    "lie", [{"end": 2**62}, {"code": ""}, {"tables": [2**62] * 4}, {"lines": None}, {"end": -1}, {"sha256": "g"}]
)
def test_a_header_that_does_not_fit_is_not_used(run, stored, lie):
    header, tables = parts(stored.read_bytes())
    assert is_made_again(run, stored, forged(msgspec.to_builtins(header) | lie, tables))
    for document in (b"{}", b"null", b"[" * 5000, b"\xff"):
        content = document + b"\n" + b"".join(tables)
        assert is_made_again(run, stored, hashlib.sha256(content).hexdigest().encode() + content)


def test_a_file_of_the_cache_with_its_own_digest_is_used(run, stored):
    """The proof that the files above are refused for what they contain, and not for their digest."""
    stored.write_bytes(forged(*parts(stored.read_bytes())))
    assert is_same(run) == 0


@pytest.mark.parametrize("kind", ["a symlink", "a FIFO", "a folder"])
def test_only_a_regular_file_of_the_cache_is_read(run, stored, tmp_path, kind):
    stored.rename(tmp_path / "outside")
    content = (tmp_path / "outside").read_bytes()
    if kind == "a symlink":
        stored.symlink_to(tmp_path / "outside")
    elif kind == "a FIFO":
        os.mkfifo(stored)
    else:
        stored.mkdir()
    assert is_same(run) > 0
    assert is_same(run) == 0 or kind == "a folder"
    assert (tmp_path / "outside").read_bytes() == content


@pytest.mark.parametrize("unsafe", ["open to others", "a symlink"])
def test_a_folder_that_others_can_enter_is_not_used(run, stored, cache, tmp_path, unsafe):  # noqa: F811
    if unsafe == "a symlink":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        cache.chmod(0o777)
    assert is_same(run) > 0
    assert is_same(run) == 0
    (own,) = set(cache.parent.iterdir()) - {cache}
    assert own.name.startswith("telemetry-")
    assert own.stat().st_mode & 0o777 == 0o700


def test_the_cache_is_closed_to_other_users(run, stored, cache):  # noqa: F811
    assert cache.stat().st_mode & 0o777 == 0o700
    assert stored.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_into_a_folder_of_another_user(tmp_path, cache, monkeypatch):  # noqa: F811
    """As with sudo, which may keep HOME: the folder belongs to the user who called sudo."""
    write(tmp_path / "run", [sample(tick) for tick in range(12)])
    other = os.geteuid() + 1
    monkeypatch.setattr(sample_cache.os, "geteuid", lambda: other)
    for _ in range(2):
        assert is_same(tmp_path / "run") > 0
    assert not cache.parent.parent.exists()


@pytest.mark.parametrize("home", ["a file", "no folder at all"])
def test_without_a_folder_for_the_cache_lines_are_decoded(tmp_path, monkeypatch, home):
    write(tmp_path / "run", [sample(tick) for tick in range(12)])
    if home == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(sample_cache.own_folder.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    for _ in range(2):
        assert is_same(tmp_path / "run") > 0
    assert RunRecords.read(RunDir(tmp_path / "run")).last_record_s == sample(11).wall_s


def test_the_size_of_the_cache_is_limited(tmp_path, cache, monkeypatch):  # noqa: F811
    """The files that were not used for the longest time are removed first."""
    for number in range(3):
        write(tmp_path / f"run{number}", [sample(tick) for tick in range(12)])
        is_same(tmp_path / f"run{number}")
    names = {path.name for path in cache.iterdir()}
    for path in cache.iterdir():
        os.utime(path, (1e9, 1e9))
    assert is_same(tmp_path / "run1") == 0
    size = max(path.stat().st_size for path in cache.iterdir())
    monkeypatch.setattr(sample_cache, "MOST_CACHE_BYTES", 2 * size + 500)
    write(tmp_path / "run3", [sample(tick) for tick in range(12)])
    assert is_same(tmp_path / "run3") > 0
    assert len(list(cache.iterdir())) == 2
    assert len(names & {path.name for path in cache.iterdir()}) == 1
    assert is_same(tmp_path / "run1") == is_same(tmp_path / "run3") == 0
    monkeypatch.setattr(sample_cache, "MOST_CACHE_BYTES", 10)
    write(tmp_path / "run3", [sample(12)])
    for _ in range(2):
        assert is_same(tmp_path / "run3") > 0
