"""Another kind of file in place of a file of a workspace blocks no command, is not read through, and causes no traceback.

The long form executes all verbs for each file and each kind.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import support_replaced as support
from support_long import LONG

from jobs import cli


def drawn() -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """For each kind of file, the places where it stands, and the verbs: all of them in the long form, else a few."""
    if LONG:
        return {kind: [(place, support.VERBS) for place in support.PLACES] for kind in support.KINDS}
    draw = random.Random(37)
    places = draw.sample(support.PLACES, len(support.PLACES))
    verbs = ("jobs status", "collect summarize", *draw.sample(support.VERBS, 1))
    return {kind: [(place, verbs) for place in places[number::4]] for number, kind in enumerate(support.KINDS)}


@pytest.mark.parametrize("kind", support.KINDS)
def test_every_command_ends_with_a_sentence(tmp_path, kind):
    source, secret = tmp_path / "source", tmp_path / "shadow"
    support.workspace(source)
    secret.write_text(support.SECRET)
    secret.chmod(0o600)
    cases = [(str(source), str(tmp_path / "ws"), place, kind, str(secret), verbs) for place, verbs in drawn()[kind]]
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", Path(support.__file__)], cwd=tmp_path, input="\n".join(map(json.dumps, cases)),
        env={**os.environ, "PYTHONPATH": str(Path(support.__file__).parent), "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    asked, answers = lines[::2], lines[1::2]
    assert len(asked) == len(answers), f"{asked[-1]} did not end: {done.returncode} {done.stderr[-2000:]}"
    assert len(asked) == sum(len(verbs) for *_, verbs in cases), done.stderr
    wrong = [(case, said) for case, (code, said) in zip(asked, answers) if code not in (0, 1, 2) or "Traceback" in said]
    assert wrong == []
    shown = [case for case, (_, said) in zip(asked, answers) if "THE-SECRET" in said and case[0] not in support.MAY_BE_LINKS]
    assert shown == []
    assert secret.read_text() == support.SECRET, "a command wrote through the link"


def test_runs_are_listed_although_the_inventory_is_a_fifo(tmp_path, capsys):
    support.workspace(tmp_path / "ws")
    inventory = tmp_path / "ws/.shardlab/inventory.json"
    inventory.unlink()
    os.mkfifo(inventory)
    assert cli.main(["--workspace", str(tmp_path / "ws"), "status"]) == 0
    assert "completed" in capsys.readouterr().out
