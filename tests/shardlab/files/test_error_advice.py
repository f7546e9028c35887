"""If a folder cannot be created, the sentence names the variable or the option that chooses another folder."""

import errno

import pytest

from shardlab.errors import WorkspaceError


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/home/u/.cache", "set XDG_CACHE_HOME to a folder in which you may write"),
        ("/home/u/.cache/shardlab/locks/c.lock", "set XDG_CACHE_HOME to a folder in which you may write"),
        ("/state/shardlab", "set XDG_STATE_HOME to a folder in which you may write"),
        ("/home/u/work/runs", "if it is in the workspace, choose another folder with --workspace"),
        ("work/runs", "if it is in the workspace, choose another folder with --workspace"),
        (None, "if it is in the workspace, choose another folder with --workspace"),
    ],
)
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_the_advice_fits_the_folder(monkeypatch, path, words, number):
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert words in str(WorkspaceError.from_os_error(OSError(number, "no", path), "create"))
