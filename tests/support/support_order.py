"""A plugin of pytest: with --shuffle, tests run in random order, so that a test that depends on another test is noticed.

The tests of a file stay together, because they share its fixtures. With pytest-xdist, all workers use the seed of the main
process. Slow units still come first (tests/support/support_lanes.py): their order is not random, only the order within them.

pytest-randomly does not suit us: it imports DeepSpeed, which registers a function for it, into each process of pytest.
"""

from __future__ import annotations

import random
from typing import Any
from zlib import crc32

import pytest
import support_lanes

NEW = "new"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help=f"run tests in the random order of this seed; `{NEW}` draws a seed")


def pytest_configure(config: pytest.Config) -> None:
    if support_lanes.on_worker(config):
        config.option.shuffle = config.workerinput["shuffle"]
    elif config.option.shuffle == NEW:
        config.option.shuffle = str(random.randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shuffle"] = node.config.option.shuffle


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.shuffle
    return f"tests in random order; to repeat it: --shuffle={seed}" if seed else None


@pytest.hookimpl(tryfirst=True)  # sort first: after this, pytest puts tests with the same parameter of a fixture together
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if seed := config.option.shuffle:
        items.sort(key=lambda item: (_place(seed, item.nodeid.partition("::")[0]), _place(seed, item.nodeid)))


def _place(seed: str, text: str) -> int:
    return crc32(f"{seed} {text}".encode())
