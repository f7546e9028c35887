"""Shares the answers about plug-in files (own workloads and strategies) between tests.

A new process finds out what a file defines, and imports torch for that, which takes seconds. With the fixture, only the first
test that has a file with some content starts this process. Faults of files are not shared.
"""

import pytest

from jobs.plugins import plugin_store

_ANSWERS = {}


@pytest.fixture
def shared_answers(monkeypatch):
    ask = plugin_store._ask_process

    def ask_once(kind, source, seq_len, python):
        key = (kind.folder, source.file.name, source.digest, seq_len, python)
        answer = _ANSWERS.get(key) or ask(kind, source, seq_len, python)
        if not answer.fault:
            _ANSWERS[key] = answer
        return answer

    monkeypatch.setattr(plugin_store, "_ask_process", ask_once)
