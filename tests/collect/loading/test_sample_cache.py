"""A run gives the same with and without the cache of its samples, and the cache is used wherever its lines are the same."""

import os
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

import pytest
import support_collect
import support_telemetry as support
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support_e2e import until
from support_long import LONG
from support_telemetry import ReadRun, cache, is_same, sample, without_cache, write  # noqa: F401 - a fixture

from collect.cli import main
from collect.fetching import fetched_run
from collect.loading import loaded_run, sample_cache
from collect.loading.loaded_run import LoadedRun
from collect.loading.records import RunRecords
from collect.sources import samples
from shardlab.runs.record import GpuSample, NicSample, RdmaSample, Sample
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("cache")
# No phase makes a failing example smaller, because this takes minutes.
FEW = settings(max_examples=300 if LONG else 15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
SAMPLER = st.tuples(
    st.sampled_from(["node0", "雪"]),
    st.lists(support.SAMPLES, max_size=12),
    st.sampled_from([b"", b'{"schema":1,"t_s":', b"no JSON\n", b"\n\n"]),
)


@pytest.fixture
def run(tmp_path):
    """A run folder with the samples of one host, and the path of its lines. The samples are in the cache."""
    path = write(tmp_path / "run", [sample(tick) for tick in range(30)])
    assert ReadRun(tmp_path / "run").decoded == path.stat().st_size
    return tmp_path / "run", path


def change(path: Path, old: bytes, new: bytes) -> None:
    """Change bytes of a file in place, as an editor does that keeps the inode."""
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@FEW
@given(samplers=st.lists(SAMPLER, min_size=1, max_size=4))
def test_frames_and_damage_are_the_same_with_and_without_the_cache(samplers):
    """Samplers on two nodes write any samples, and the run is read after each. Some samplers leave damaged lines."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{name}/cache")
        patch.setattr(loaded_run, "MOST_SAMPLE_RECORDS", 5)
        for least in (1, 1000):
            patch.setattr(sample_cache, "LEAST_ADDED_BYTES", least)
            for host, written, end in samplers:
                path = write(Path(name, str(least)), written, host)
                with path.open("ab") as handle:
                    handle.write(end)
                is_same(Path(name, str(least)))
                assert ReadRun(Path(name, str(least))).decoded <= 2 * (least + 20)


def test_only_lines_that_are_not_in_the_cache_are_decoded(run):
    folder, path = run
    assert is_same(folder) == 0
    size = path.stat().st_size
    write(folder, [sample(tick) for tick in range(30, 35)])
    assert is_same(folder) == path.stat().st_size - size
    assert is_same(folder) == 0


def test_few_new_lines_are_decoded_each_time_and_not_stored(run, cache, monkeypatch):  # noqa: F811
    folder, path = run
    monkeypatch.setattr(sample_cache, "LEAST_ADDED_BYTES", path.stat().st_size // 2)
    (stored,) = cache.iterdir()
    write(folder, [sample(30)])
    assert is_same(folder) > 0
    content = stored.read_bytes()
    assert is_same(folder) > 0
    assert stored.read_bytes() == content


def test_a_short_file_is_not_cached(tmp_path, cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sample_cache, "LEAST_CACHED_BYTES", 100_000)
    path = write(tmp_path / "run", [sample(tick) for tick in range(30)])
    assert is_same(tmp_path / "run") == path.stat().st_size < 100_000
    assert not cache.exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"memory_used_bytes":1000000009', b'"memory_used_bytes":1000000777'), (b'"power_w":309.25,', b"")],
    ids=["of equal size", "shorter"],
)
def test_a_line_edited_by_hand_counts_and_not_the_cache(run, old, new):
    folder, path = run
    change(path, old, new)
    assert is_same(folder) == path.stat().st_size
    assert is_same(folder) == 0


def test_an_edited_line_is_noticed_although_lines_were_appended(run):
    folder, path = run
    change(path, b'"memory_used_bytes":1000000009', b'"memory_used_bytes":1000000777')
    write(folder, [sample(30)])
    assert is_same(folder) == path.stat().st_size


def test_an_equal_copy_of_the_lines_is_not_decoded_again(run):
    """A file with another inode and time, as after a fetch, is hashed once, and then known by its new inode and time."""
    folder, path = run
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").rename(path)
    assert is_same(folder) == 0
    hashed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_cache.SampleLines, "hash_beginning", lambda *arguments: hashed.append(arguments))
        assert ReadRun(folder).decoded == 0
    assert hashed == []


def test_another_file_of_lines_in_the_same_place_is_decoded(run):
    folder, path = run
    write(folder, [sample(tick, gpus=1) for tick in range(40)], "other").replace(path)
    assert is_same(folder) == path.stat().st_size


def hide(path: Path) -> None:
    """Change a line so that the size, the time and the inode of the file stay the same."""
    status = path.stat()
    change(path, b'"memory_used_bytes":1000000009', b'"memory_used_bytes":1000000777')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_verify_compares_the_digest_of_lines_whose_size_and_time_are_the_same(run):
    folder, path = run
    hide(path)
    assert ReadRun(folder).decoded == 0
    assert is_same(folder, "verify") == path.stat().st_size
    assert is_same(folder, "verify") == 0


def test_collect_summarize_verify_uses_the_edited_lines(tmp_path, capsys):
    workspace = Workspace(tmp_path)
    support_collect.keep(workspace, [support_collect.cell()])
    folder = support_collect.completed(workspace, support_collect.cell())
    path = write(folder.path, [sample(tick) for tick in range(30)])
    assert main(["summarize", "--workspace", str(tmp_path)]) == 0
    hide(path)
    assert main(["summarize", "--workspace", str(tmp_path)]) == 0
    assert not ReadRun(folder.path).same(without_cache(folder.path))
    assert main(["summarize", "--verify", "--workspace", str(tmp_path)]) == 0
    assert is_same(folder.path) == 0
    capsys.readouterr()


def test_the_cache_of_another_version_is_not_used(run, monkeypatch):
    folder, path = run
    monkeypatch.setattr(sample_cache, "_compute_code_digest", lambda: "other")
    assert is_same(folder) == path.stat().st_size
    assert is_same(folder) == 0


def test_zero_and_minus_zero_are_kept_apart(tmp_path):
    written = [sample(tick) for tick in range(60)]
    for tick, each in enumerate(written):
        each.cpu_pct = 0.0 if tick % 3 == 0 else -0.0
    write(tmp_path / "run", written)
    assert is_same(tmp_path / "run") > is_same(tmp_path / "run") == 0
    assert "-0.0" in repr(ReadRun(tmp_path / "run").frames.hosts["cpu_pct"].to_list())


def test_samples_of_one_moment_keep_their_order_with_and_without_the_cache(tmp_path):
    """Files have the samples of other hosts, some samples are in the cache and some are not, and clocks go back."""
    for host, named in (("a", "z"), ("b", "b"), ("z", "a")):
        written = [sample(tick, host=named) for tick in range(40)]
        for each in written[:25]:
            each.wall_s = 1e9
        for each in written[30:]:
            each.wall_s -= 20
        write(tmp_path / "run", written[:20], host)
        is_same(tmp_path / "run")
        write(tmp_path / "run", written[20:], host)
        is_same(tmp_path / "run")


def test_files_of_columns_of_an_older_version_are_ignored(run):
    folder, path = run
    expected = ReadRun(folder)
    path.with_suffix(".columns").write_bytes(b'\n{"schema":1,"sha256":"' + bytes(1000))
    assert ReadRun(folder).same(expected)
    assert is_same(folder) == 0


def test_collect_fetch_makes_the_cache_and_knows_the_damage_of_cached_lines(tmp_path):
    path = write(tmp_path / "run", [sample(tick) for tick in range(30)])
    with path.open("ab") as handle:
        handle.write(b"no JSON\n{")
    read = [RunRecords.read(RunDir(tmp_path / "run")) for _ in range(2)]
    assert ReadRun(tmp_path / "run").decoded == len(b"{")
    for found in read:
        assert found.damage.corrupt == {"samples/node0.jsonl": 1}
        assert found.damage.truncated == ["samples/node0.jsonl"]
        assert found.last_record_s == sample(29).wall_s


READ = (
    "import sys; from pathlib import Path; import collect.loading.sample_cache as cache\n"
    "cache.LEAST_CACHED_BYTES = cache.LEAST_ADDED_BYTES = 1\n"
    "sys.modules |= {name: None for name in sys.argv[2:]}\n"
    "from collect.loading.records import RunRecords; from shardlab.runs.rundir import RunDir\n"
    "found = RunRecords.read(RunDir(Path(sys.argv[1])))\n"
    "print(found.last_record_s, found.damage, {'numpy', 'polars'} & {name for name, kind in sys.modules.items() if kind})"
)


def test_collect_fetch_works_without_the_packages_of_the_report(tmp_path, cache):  # noqa: F811
    """Without polars, nothing is cached. With it, a second fetch of cached lines does not import it."""
    write(tmp_path / "run", [sample(tick) for tick in range(30)])
    expected = RunRecords(RunDir(tmp_path), last_record_s=sample(29).wall_s)
    words = [sys.executable, "-c", READ, str(tmp_path / "run")]
    for missing, stored, imported in ((["polars"], 0, "set()"), ([], 1, "'"), ([], 1, "set()")):
        said = subprocess.run([*words, *missing], capture_output=True, text=True, check=True).stdout
        assert said.startswith(f"{expected.last_record_s} {expected.damage} ")
        assert imported in said
        assert len(list(cache.glob("*"))) == stored


def test_on_the_cluster_telemetry_is_only_opened(run, tmp_path):
    folder, path = run
    write(folder, [sample(0)], "other").rename(tmp_path / "outside")
    RunDir(folder).samples_file("other").symlink_to(tmp_path / "outside")
    path.write_bytes(b"no JSON\n")
    found = RunRecords.read(RunDir(folder), "open")
    assert found.damage.irregular_entries == {"samples/other.jsonl": "a symlink"}
    assert (found.damage.corrupt, found.last_record_s) == ({}, 0.0)
    assert fetched_run.check_run(RunDir(folder), is_offer=True)[0].corrupt == 0
    assert fetched_run.check_run(RunDir(folder))[0].corrupt == 1


def test_the_sampler_does_not_import_the_packages_of_frames():
    code = "import sys; import collect.sampler.loop; print({'numpy', 'polars'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_columns_of_frames_are_fields_of_the_records():
    words = {
        "String": str,
        "Float64": float,
        "Int64": int,
        "Boolean": bool,
        "List(String)": list[str],
        "List(Int64)": list[int],
    }
    records = (
        (samples.HOST_COLUMNS, Sample),
        (samples.NIC_COLUMNS, NicSample),
        (samples.GPU_COLUMNS, GpuSample),
        (samples.RDMA_COLUMNS, RdmaSample),
    )
    for columns, record in records:
        fields = typing.get_type_hints(record) | {"busiest_core_pct": float | None}
        for name, kind in columns.items():
            kind_text = str(kind() if isinstance(kind, type) else kind)
            assert fields[name] in (words[kind_text], words[kind_text] | None), (record, name)


def test_a_run_is_read_with_the_cache_while_samplers_write_and_are_killed(tmp_path):
    path = RunDir(tmp_path / "run").samples_file("node0")
    command = [sys.executable, "-m", "collect", "sample", "--out", str(path), "--hz", "50"]
    for turn in range(3):
        size = path.stat().st_size if turn else 0
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        until(lambda least=size: path.exists() and path.stat().st_size > least + 20_000, "it writes samples")
        LoadedRun.read(RunDir(tmp_path / "run"))
        (process.terminate if turn == 2 else process.kill)()
        process.communicate()
        is_same(tmp_path / "run")
    assert is_same(tmp_path / "run") == 0
