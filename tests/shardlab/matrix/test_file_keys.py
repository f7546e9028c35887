"""Each key of a matrix file outside a cell, and each of its allowed values, changes the plan, the record of a run, the stored
expansion or the report, or is refused. (The keys of a cell: test_matrix_keys.py.)"""

import functools
import itertools
import json

import pytest
from support_matrix_effects import EFFECTS, measure

from shardlab.errors import InputError
from shardlab.files import source_digest
from shardlab.hardware import host
from shardlab.matrix.matrix import MatrixFile
from shardlab.workspace.workspace import Workspace
from tests.shardlab.cluster.test_cluster_keys import REFUSED, Case, keys_of, values_of, with_keys

DDP, FSDP = {"strategy": "ddp"}, {"strategy": "fsdp2"}
CELL = {
    "workload": "gpt2-tiny", "gpus": 2, "nnodes": 2, "global_batch_size": 8, "steps": 10, "seq_len": 64, "warmup_steps": 2,
}  # fmt: skip
BASE = {"defaults": CELL, "axes": {"strategy": ["ddp", "fsdp2"]}}
NUMBER = {"where": "table 1", "metric": "train_time_s", "printed": "61 s", "cell": FSDP}
GAIN = NUMBER | {"metric": "speed_gain_pct", "printed": "1 %"}
CLAIM = {"id": "c1", "says": "It is slow.", "test": "train_time_s(strategy='ddp') > 1", "where": "section 1"}
PRINTED = {"where": "table 7", "title": "A guide", "columns": ["Name"], "rows": [{"texts": ["Text"], "cell": DDP}]}
LEFT_OUT = {"key": "gpus", "study": 64, "here": 32, "why": "No room."}
STUDY = BASE | {"reported": [NUMBER]}
CLAIMED, TABLED, ADAPTED = BASE | {"claims": [CLAIM]}, BASE | {"tables": [PRINTED]}, BASE | {"deviations": [LEFT_OUT]}
SET, NOTED = STUDY | {"settings": [{"where": "section 3"}]}, BASE | {"notes": [{"where": "section 9", "says": "Unclear."}]}
OF_DDP = STUDY | {"reported": [NUMBER | {"cell": DDP}], "settings": [{"where": "section 3"}]}
CITED = BASE | {"citation": {"title": "Of strategies"}}
CHOSEN = BASE | {"assumed": [{"key": "seed", "value": 42, "why": "Not stated."}]}
SEARCH = {"key": "gpu_batch_size", "for": "fastest", "at_most": 64}
FREE = {"defaults": {key: CELL[key] for key in CELL if key != "global_batch_size"}, "axes": BASE["axes"]}  # no batch size
SEARCHED, LARGEST = FREE | {"search": SEARCH}, FREE | {"search": SEARCH | {"for": "largest_that_fits"}}
RETRIES = ("oom", "failed", "hung", "node_fail", "preempted", "timeout")
# No command shows these keys: they tell a reader of the matrix file where its entries come from.
SHOWN_NOWHERE = {"source": "paper 1", "text_sha256": "ab" * 32, "settings.where": "section 4"}

CASES: dict[str, list[Case]] = {
    "schema": [Case(2, BASE, REFUSED, "Allowed: 1.")],
    "name": [Case("other", BASE, "record", '"matrix":"other"'), Case("O", BASE, REFUSED, "name")],
    "title": [Case("Of ranks", BASE, "planned", "m: Of ranks"), Case("Of ranks", BASE, "report", "Of ranks")],
    "citation.title": [Case("Of ranks", CITED, "report", "{Of ranks}")],
    "citation.authors": [Case(["Ann Oak"], CITED, "report", "Ann Oak")],
    "citation.year": [Case(2021, CITED, "report", "2021}")],
    "citation.published": [Case("A journal", CITED, "report", "A journal")],
    "citation.doi": [Case("10.1234/x", CITED, "report", "10.1234/x")],
    "citation.url": [Case("https://example.org/s", CITED, "report", "https://example.org/s")],
    "defaults": [Case(CELL | {"seq_len": 32}, BASE, "planned", '"seq_len":32'), Case({"seqlen": 1}, BASE, REFUSED, "seqlen")],
    "axes": [Case({"strategy": ["zero3"]}, BASE, "planned", "zero3"), Case({"seed": []}, BASE, REFUSED, "an empty list")],
    "zip": [
        Case([{"seed": [6, 7], "steps": [8, 9]}], BASE, "planned", '"runs":4'),
        Case([{"seed": [6, 7], "steps": [8]}], BASE, REFUSED, "same length"),
    ],
    "exclude": [
        Case([DDP | {"why": "It is known."}], BASE, "planned", "- ddp-"),
        Case([DDP | {"why": "It is known."}], BASE, "planned", "excluded: strategy=ddp: It is known."),
        Case([DDP], BASE, REFUSED, "the key 'why' is missing"),
    ],
    "include": [
        Case([{"strategy": "zero3"}], BASE, "planned", "zero3"),
        Case([DDP | {"seed": 7}], BASE, "planned", '"seed":7'),
        Case([{"when": "gpus > 1"}], BASE, REFUSED, "without any cell key"),
    ],
    "repeats": [Case(3, BASE, "planned", "2 cell(s) x 3 repeat(s) = 6 run(s)"), Case(0, BASE, REFUSED, "repeats")],
    "repeats.claims": [Case(4, CLAIMED, "planned", "1 cell(s) that claims name x 4 repeat(s) + 1 other(s) x 1 = 5 run(s)")],
    "repeats.others": [Case(2, CLAIMED, "planned", "+ 1 other(s) x 2 = 7 run(s)", {"repeats.claims": 5})],
    **{
        f"retry.{state}": [Case(7, BASE, "record", f'"{state}":7'), Case(101, BASE, REFUSED, f"retry.{state}")]
        for state in RETRIES
    },
    "search.key": [
        Case("gpu_batch_size", FREE, "planned", '"key":"gpu_batch_size"', {"search": SEARCH}),
        Case("gpu_batch_size", BASE, REFUSED, "leave global_batch_size out", {"search.for": "fastest"}),
    ],
    "search.for": [
        Case("fastest", LARGEST, "planned", "gpu_batch_size, the fastest"),
        Case("largest_that_fits", SEARCHED, "planned", "gpu_batch_size, the largest that fits"),
    ],
    "search.at_most": [Case(48, SEARCHED, "planned", '"largest":48')],
    "settings.gpu": [Case("H100", SET, "report", "another GPU: NVIDIA A100 here, H100 in the study")],
    "settings.link": [
        Case("NVLink", SET, "report", "another link between GPUs: no NVLink here, NVLink in the study"),
        Case("PCIe", OF_DDP, "report", "another link between GPUs: NVLink here, PCIe in the study"),
    ],
    "settings.network_mbps": [Case(25_000, SET, "report", "another network: 10000 Mbit/s here, 25000 Mbit/s in the study")],
    "settings.software": [Case({"torch": "2.4"}, SET, "report", "other software: torch 2.13.0 here, 2.4 in the study")],
    "settings.cell": [
        Case(DDP, STUDY | {"settings": [{"where": "section 3", "gpu": "H100"}]}, "report", "- another GPU"),
        Case({"strategi": 1}, SET, REFUSED, "strategi"),
    ],
    "baseline": [Case("ddp", BASE, "report", "relative to ddp"), Case("ddq", BASE, REFUSED, "ddq")],
    "traces": [Case("like-hta", BASE, "expansion", '"traces":"like-hta"'), Case("hta", BASE, REFUSED, "like-hta")],
    "assumed.key": [
        Case("steps", CHOSEN, "report", "<dt><code>steps</code>"),
        Case("sed", CHOSEN, REFUSED, "sed"),
    ],
    "assumed.value": [Case(4711, CHOSEN, "report", "4711"), Case("x", CHOSEN, REFUSED, "assumed[0].value")],
    "assumed.why": [Case("We guessed.", CHOSEN, "report", "We guessed.")],
    "reported.where": [Case("table 44", STUDY, "report", "44")],
    "reported.metric": [
        Case("peak_memory_bytes", STUDY, "report", '"name">Peak memory'),
        Case("train_time", STUDY, REFUSED, "train_time_s"),
    ],
    "reported.printed": [Case("62.5 s", STUDY, "report", "62.5 s")],
    "reported.cell": [Case({"strategy": "zero3"}, STUDY, "report", "zero3"), Case({"strategi": 1}, STUDY, REFUSED, "strategi")],
    "reported.adapted": [Case("gpus 2 instead of 4", STUDY, "report", "dapted to the cluster: gpus 2 instead of 4")],
    "reported.unit": [Case("min", BASE | {"reported": [NUMBER | {"printed": "61"}]}, "report", "61 min")],
    "reported.of": [Case("gemm", BASE | {"reported": [NUMBER | {"metric": "operator_count"}]}, "report", "gemm")],
    "reported.against": [
        Case(DDP, BASE | {"reported": [GAIN]}, "report", ", against ddp"),
        Case({"strategi": 1}, STUDY, REFUSED, "strategi"),
    ],
    "reported.kind": [
        Case("estimated", STUDY, "report", "the study computed its number"),
        Case("assumed", STUDY, "report", "the study assumed its number: nobody measured it"),
    ],
    "tables.where": [Case("table 8", TABLED, "report", "Table 8")],
    "tables.title": [Case("A chart", TABLED, "report", "A chart")],
    "tables.columns": [
        Case(["Label"], TABLED, "report", "Label"),
        Case(["A", "B"], TABLED, REFUSED, "Allowed: 2, one for each"),
    ],
    "tables.rows.texts": [Case(["Words"], TABLED, "report", "Words")],
    "tables.rows.cell": [
        Case(
            FSDP,
            BASE | {"tables": [PRINTED | {"measured": ["throughput_per_s"]}]},
            "report",
            'Text</th><td class="number"><a class="quiet" href="#runs-1">',
        ),
        Case({"strategi": 1}, TABLED, REFUSED, "strategi"),
    ],
    "tables.measured": [
        Case(["throughput_per_s"], TABLED, "report", "Throughput, here"),
        Case(["throughput"], TABLED, REFUSED, "metric without an argument"),
    ],
    "tables.choice": [
        Case("wins", TABLED, "report", "in 1 of 1 comparison"),
        Case("best", TABLED, "report", "fastest on 2 ranks"),
    ],
    "claims.id": [Case("c9", CLAIMED, "report", "c9")],
    "claims.says": [Case("It is fast.", CLAIMED, "report", "It is fast.")],
    "claims.test": [
        Case("train_time_s(strategy='ddp') > 44", CLAIMED, "report", "44"),
        Case("train_time(strategy='ddp') > 1", CLAIMED, REFUSED, "train_time_s"),
    ],
    "claims.where": [Case("section 55", CLAIMED, "report", "ection 55")],
    "claims.quote": [
        Case("slow, it seemed", CLAIMED, "report", "slow, it seemed"),
        Case("so " * 31, CLAIMED, REFUSED, "30 or fewer"),
    ],
    "claims.adapted": [Case("gpus 2 instead of 4", CLAIMED, "report", "dapted to the cluster: gpus 2 instead of 4")],
    "notes.where": [Case("section 66", NOTED, "report", "ection 66")],
    "notes.says": [Case("Two values.", NOTED, "report", "Two values.")],
    "deviations.key": [Case("nnodes", ADAPTED, "report", "nnodes"), Case("nnodes", ADAPTED, "planned", '"key":"nnodes"')],
    "deviations.study": [Case(4711, ADAPTED, "report", "4711")],
    "deviations.here": [Case(4712, ADAPTED, "report", "4712")],
    "deviations.why": [Case("No node.", ADAPTED, "report", "No node.")],
    "deviations.cells": [Case(4713, ADAPTED, "report", "4,713")],
}
TABLE = [(key, case) for key, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def effect_of(tmp_path_factory):
    """Returns a function that gives the effect of the content of a matrix file as text; for REFUSED the message, or an empty
    text if the file is accepted. The workspace has a run of each cell of BASE."""
    folder = tmp_path_factory.mktemp("matrix")
    workspace, path = Workspace(folder / "workspace"), folder / "m.yaml"
    workspace.path.mkdir()

    def effect(name, file):
        path.write_text(json.dumps({"schema": 1, "name": "m"} | file))
        if name != REFUSED:
            return EFFECTS[name](path, workspace)
        try:
            EFFECTS["planned"](path, workspace)
        except InputError as error:
            return str(error)
        return ""

    # Each plan would read the commit, the packages and the source again, which takes most of the time of a plan.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "read_git_commit", lambda: None)
        patch.setattr(host, "read_package_versions", dict)
        patch.setattr(source_digest, "digest_source", functools.cache(source_digest.digest_source))
        effect("planned", BASE)
        measure(path, workspace)
        yield effect


@pytest.mark.parametrize("name", [*EFFECTS, REFUSED])
def test_keys_of_a_matrix_file_have_their_effects(effect_of, name):
    without = functools.cache(lambda file: effect_of(REFUSED if file == json.dumps(FREE) else name, json.loads(file)))
    wrong = []
    for key, case in TABLE:
        if case.effect == name:
            before = without(json.dumps(case.file))
            changed = effect_of(name, with_keys(case.file, case.also | {key: case.value}))
            text, goes = case.text.removeprefix("- "), case.text.startswith("- ")
            if (text in before, text in changed) != (goes, not goes):
                wrong.append((key, case.value, case.text, text in before, text in changed))
    assert "\n".join(map(str, wrong)) == ""


def test_each_key_and_each_allowed_value_of_a_matrix_file_is_in_the_table():
    keys = keys_of(MatrixFile)
    assert set(CASES) | set(SHOWN_NOWHERE) == set(keys)
    assert not set(CASES) & set(SHOWN_NOWHERE)
    written = {key: {*itertools.chain.from_iterable(values_of(case) for case in cases)} for key, cases in CASES.items()}
    lacking = {key: values - written.get(key, set()) for key, values in keys.items() if values - written.get(key, set())}
    assert lacking == {"schema": {1}}  # each file of the table has this value


@pytest.mark.parametrize("key", SHOWN_NOWHERE)
def test_a_key_for_readers_of_the_file_changes_no_output(effect_of, key):
    for name in ("planned", "record", "report"):
        assert effect_of(name, with_keys(SET, {key: SHOWN_NOWHERE[key]})) == effect_of(name, SET)
