"""Traces are found in folders of folders, ranks in names and process groups, and other files are named for what they are."""

import bz2
import gzip
import json
import lzma
import pickle
import sqlite3
import zipfile

import pytest
from support_recordings import ALL_REDUCE, ALL_TO_ALL, Recording, collective

from collect.cli import main
from collect.traces import trace
from collect.traces.rank_analysis import analyse_rank
from collect.traces.run_answers import RunAnswers


def show(capsys, path):
    code = main(["trace", str(path), "--json"])
    return code, json.loads(capsys.readouterr().out)


def with_group(args, step=3, us=100, **info):
    """A recording of a step with one collective; args: the arguments of its kernel."""
    recording = Recording(**info)
    recording.step(step, 1000, 1000)
    recording.launch(1010, dur=100)
    recording.launch(1030, at=1200, dur=us, stream=20, name=ALL_REDUCE, **args)
    return recording


def read_groups(tmp_path, name, *groups):
    recording = Recording()
    for number, ranks in enumerate(groups):
        args = collective("allreduce", 1000, ranks, **{"Process Group Name": str(number)})
        recording.launch(1000 + 100 * number, stream=20, name=ALL_REDUCE, **args)
    return trace.read_trace(recording.write(tmp_path / name))


def test_folders_of_iterations_are_read_and_each_row_names_its_file(tmp_path, capsys):
    """The layout of torchtitan: each iteration has a folder with a file of each rank."""
    for step in (9, 19):
        for rank in range(2):
            recording = with_group(collective("allreduce", 1000, range(2)), step, 100 + 40 * rank, rank=rank)
            recording.write(tmp_path / "profile_traces" / f"iteration_{step + 1}" / f"rank{rank}_trace.json")
    (tmp_path / "profile_traces" / "records.jsonl").write_text("{}\n")
    (tmp_path / "profile_traces" / ".cache").mkdir()
    (tmp_path / "profile_traces" / ".cache" / "a.json").write_text("{}")
    code, document = show(capsys, f"{tmp_path}/profile_traces/")
    assert (code, [(row["rank"], row["file"]) for row in document["ranks"]]) == (
        0,
        [(rank, f"iteration_{step}/rank{rank}_trace.json") for rank in range(2) for step in (10, 20)],
    )
    waits = document["stragglers"]
    assert (waits["rank"], waits["matched"], waits["why"]) == (0, 2, None)
    assert [(row["rank"], row["calls"], row["waited_ns"]) for row in waits["ranks"]] == [(0, 2, 0), (1, 2, 80_000)]
    assert main(["trace", f"{tmp_path}/profile_traces/"]) == 0
    printed = capsys.readouterr()
    assert "iteration_20/rank1_trace.json" in printed.out
    assert "iteration_10/rank0_trace.json, iteration_20/rank0_trace.json" in " ".join(printed.err.split())


def test_two_files_of_one_rank_and_step_are_not_matched(tmp_path, capsys):
    for name in ("a", "b"):
        for rank in range(2):
            with_group(collective("allreduce", 1000, range(2)), rank=rank).write(tmp_path / name / f"rank{rank}.json")
    _, document = show(capsys, f"{tmp_path}/")
    assert (document["stragglers"]["matched"], "of one rank and step" in document["stragglers"]["why"]) == (0, True)


@pytest.mark.parametrize(
    ("name", "groups", "rank"),
    [
        ("rank12_trace.json", (), 12),
        ("worker_Rank-3.json", (), 3),
        ("rank_5/trace.json", (), 5),
        ("frank7.json", (), None),
        ("t.json", ((0, 1), (0, 2)), 0),
        ("t.json", ((0, 1, 2, 3), (2, 3), (0, 2)), 2),
        ("t.json", ((0, 1),), None),
        ("1773709-TP-1.trace.json", ((4, 5),), 5),
        ("dp0_pp0_tp1.trace.json", ((4, 5),), 5),
        ("1773709-DP-1-PP-0.trace.json", ((4, 5),), None),
        ("1773709-TP-2.trace.json", ((4, 5),), None),
    ],
)
def test_a_rank_is_found_in_names_and_process_groups(tmp_path, name, groups, rank):
    assert read_groups(tmp_path, name, *groups).rank == rank


def test_groups_of_one_name_are_told_apart_by_their_ranks(tmp_path):
    traces = []
    for rank in range(4):
        ranks = (0, 1) if rank < 2 else (2, 3)
        recording = with_group(collective("allreduce", 1000, ranks), rank=rank)
        traces.append(trace.read_trace(recording.write(tmp_path / f"r{rank}.json")))
    answers = RunAnswers([analyse_rank(loaded) for loaded in traces])
    assert sorted(answers.group_labels[use.group] for use in answers.collectives) == [
        "3 mesh_tp (2 ranks): 0, 1",
        "3 mesh_tp (2 ranks): 2, 3",
    ]
    one = RunAnswers([analyse_rank(traces[0])])
    assert list(one.group_labels.values()) == ["3 mesh_tp (2 ranks)"]


def test_a_list_of_ranks_that_is_cut_is_completed_from_the_head(tmp_path):
    recording = with_group(collective("allreduce", 1000, range(4), **{"Process Group Ranks": "[0, 1, ...]"}), rank=0)
    cut = analyse_rank(trace.read_trace(recording.write(tmp_path / "a.json")))
    assert next((group.ranks, group.first_ranks) for group in cut.groups) == ((), (0, 1))
    recording.info["pg_config"] = [{"pg_name": "3", "pg_size": 4, "ranks": [0, 1, 2, 3]}]
    whole = analyse_rank(trace.read_trace(recording.write(tmp_path / "b.json")))
    assert next((group.ranks, group.first_ranks) for group in whole.groups) == ((0, 1, 2, 3), ())


@pytest.mark.parametrize(
    ("splits", "sent"),
    [
        ({"In split size": "[600, 100, 200, 100]"}, 2 * 900),  # elements; rank 1 keeps its own 100
        ({"In split size": [600, 100, 200, 100]}, 2 * 900),
        ({"In split size": "[6, 1, 2, 1]"}, 2 * 900),  # rows of 100 elements
        ({"In split size": "[0, 1000, 0, 0]"}, 0),
        ({"In split size": "[]"}, 2 * 750),
        ({}, 2 * 750),
        ({"In split size": "[600, 100, ...]"}, None),
        ({"In split size": "[600, 100, 300]"}, None),  # of three ranks
        ({"In split size": "[7, 1, 2, 1]"}, None),  # 1000 elements are no whole rows
        ({"In split size": "[0, 0, 0, 0]"}, None),
        ({"In split size": "[6, 1, 2, 1]", "Process Group Ranks": "[4, 5, 6, 7]"}, None),  # without rank 1
        ({"In split size": "[6, 1, 2, 1]", "Process Group Ranks": "[0, 1, ...]"}, 2 * 900),
    ],
)
def test_an_uneven_all_to_all_sends_what_its_splits_say(tmp_path, splits, sent):
    recording = with_group(collective("all_to_allv", 1000, range(4), **splits), us=10, rank=1)
    recording.events[-1]["name"] = ALL_TO_ALL
    (use,) = RunAnswers([analyse_rank(trace.read_trace(recording.write(tmp_path / "t.json")))]).collectives
    assert (use.collective, use.message_bytes, use.sent_bytes) == ("all_to_all", 2000, sent)
    assert use.bus_gb_per_s == (sent / 10_000 if sent else None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NCCLDevKernel_ALLREDUCE_Sum_f32_RING_LL(x)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "all_gather"),
        ("rcclDevKernel_Generic(x)", "generic"),
        ("MSCCL_kernel", "generic"),
        ("Nccl_Thing", None),
    ],
)
def test_names_of_libraries_may_have_letters_of_any_case(tmp_path, name, expected):
    recording = Recording()
    recording.launch(1000, name=name)
    found = analyse_rank(trace.read_trace(recording.write(tmp_path / "t.json")))
    assert [call.name for call in found.calls] == ([expected] if expected else [])


def test_spans_of_gloo_may_have_letters_of_any_case(tmp_path):
    recording = Recording()
    recording.add("cpu_op", "aten::mm", 1000, 100)
    recording.add("user_annotation", "GLOO:all_reduce", 1200, 100, tid=2)
    found = analyse_rank(trace.read_trace(recording.write(tmp_path / "t.json")))
    assert (found.source, [call.name for call in found.calls]) == ("gloo", ["all_reduce"])


def test_times_that_are_texts_are_exact(tmp_path):
    recording = Recording()
    for index in range(3):
        at = 1747100000000000 + 100 * index
        args = {"device": 0, "stream": 7, "correlation": index + 1}
        recording.add("cuda_runtime", "cudaLaunchKernel", f"{at}.1", "5", correlation=index + 1)
        recording.add("kernel", "gemm", f"{at + 30}.123", "40.251", tid=7, **args)
    found = trace.read_trace(recording.write(tmp_path / "t.json"))
    assert (found.lost_counts, found.duration_ns[1::2].tolist()) == ({}, [40_251] * 3)
    assert found.start_ns[1] == 1747100000000030123
    # one event is damaged, so that the other events are read one by one
    path = tmp_path / "damaged.json"
    path.write_text((tmp_path / "t.json").read_text().replace('"gemm"', '"ge"mm"', 1))
    damaged = trace.read_trace(path)
    assert (damaged.lost_counts, damaged.duration_ns.tolist()) == ({"not readable": 1}, [5000, 5000, 40_251, 5000, 40_251])


def make_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.json", "{}")


def make_database(path):
    connection = sqlite3.connect(path)
    connection.execute("create table events (a)")
    connection.close()


# A pickle is read as a snapshot, and logs of other programs are named by `collect import` (tests/collect/importing).
KINDS = {
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "blank": (lambda path: path.write_bytes(b" \n\n"), "only white space"),
    "old pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=0)), "a Python pickle"),
    "page": (lambda path: path.write_text("<!DOCTYPE html>\n<html><body>Sign in</body></html>"), "an HTML page"),
    "zip": (make_zip, "a zip archive"),
    "database": (make_database, "an SQLite database"),
    "xz": (lambda path: path.write_bytes(lzma.compress(b"{}")), "compressed with xz"),
    "bzip2": (lambda path: path.write_bytes(bz2.compress(b"{}")), "compressed with bzip2"),
    "LFS": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), "git lfs pull"),
    "text": (lambda path: path.write_text("step 1\nstep 2\n"), "a text file"),
    "CSV in gzip": (
        lambda path: path.write_bytes(gzip.compress(b"a;b\n1;2\n3;4\n")),
        "compressed with gzip, and inside it is a",
    ),
    "empty gzip": (lambda path: path.write_bytes(gzip.compress(b"")), "nothing inside"),
    "cut gzip": (lambda path: path.write_bytes(gzip.compress(b'{"traceEvents": [')[:-9]), "its gzip stream ends too early"),
    "JSON lines": (lambda path: path.write_text('{"step": 1}\n{"step": 2}\n'), "lines of JSON"),
    "other JSON": (lambda path: path.write_text('{"schema": 1}'), "no list of events"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_trace_is_named_for_what_it_is(tmp_path, capsys, kind):
    make, expected = KINDS[kind]
    make(tmp_path / "t.json")
    code, document = show(capsys, tmp_path / "t.json")
    assert (code, expected in document["damage"][0]) == (1, True), document["damage"]
