"""Replaces a folder atomically. Files that another program writes to the same path during the replacement are kept."""

import pytest

from collect import atomic_folder
from shardlab.errors import InputError

OURS = frozenset({"index.html"})


def replace(folder, meanwhile):
    """Replace a folder by a new folder that contains index.html.

    meanwhile: a function that is called when the new folder is complete, before it replaces the old folder.
    """
    with atomic_folder.replace_folder(folder, OURS) as fresh:
        (fresh / "index.html").write_text("new")
        meanwhile()


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_file_that_another_process_creates_during_the_replacement_is_kept(tmp_path):
    report = tmp_path / "report"
    replace(report, lambda: None)
    with pytest.raises(InputError, match=r"'notes\.txt', which is not part of a report"):
        replace(report, lambda: (report / "notes.txt").write_text("of a colleague"))
    assert texts(report) == {"index.html": "new", "notes.txt": "of a colleague"}
    assert list(tmp_path.iterdir()) == [report]


def test_a_folder_or_link_that_another_process_creates_meanwhile_is_kept(tmp_path):
    colleagues = tmp_path / "colleagues"
    colleagues.mkdir()
    (colleagues / "notes.txt").write_text("of a colleague")
    with pytest.raises(InputError, match=r"'notes\.txt', which is not part of a report"):
        replace(tmp_path / "report", lambda: colleagues.rename(tmp_path / "report"))
    with pytest.raises(InputError, match="is not a folder"):
        replace(tmp_path / "other", lambda: (tmp_path / "other").symlink_to(tmp_path / "report"))
    assert texts(tmp_path / "report") == {"notes.txt": "of a colleague"}
