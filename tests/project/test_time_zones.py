"""Times are right in every time zone, also around the hour that a change of the clocks repeats or leaves out."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from jobs.slurm import query
from jobs.verbs import status_table
from shardlab.terminal import moments
from tests.jobs.status.test_status import status

AUTUMN = datetime(2031, 10, 26, 0, 30, tzinfo=UTC)  # 2:30 in Berlin; half an hour later, clocks go back from 3:00 to 2:00
SPRING = datetime(2031, 3, 30, 0, 30, tzinfo=UTC)  # 1:30 in Berlin; half an hour later, clocks go on from 2:00 to 3:00


@pytest.fixture
def zone(monkeypatch):
    """Returns a function that sets the time zone of this process until the end of the test."""

    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("name", "moment", "text"),
    [
        ("Asia/Kathmandu", AUTUMN, "2031-10-26 00:30 UTC (06:15 +0545)"),
        ("Europe/Berlin", AUTUMN, "2031-10-26 00:30 UTC (02:30 CEST)"),
        ("Europe/Berlin", AUTUMN + timedelta(hours=1), "2031-10-26 01:30 UTC (02:30 CET)"),
        ("Europe/Berlin", SPRING, "2031-03-30 00:30 UTC (01:30 CET)"),
        ("Europe/Berlin", SPRING + timedelta(hours=1), "2031-03-30 01:30 UTC (03:30 CEST)"),
        ("America/St_Johns", AUTUMN, "2031-10-26 00:30 UTC (2031-10-25 22:00 NDT)"),
        ("UTC", AUTUMN, "2031-10-26 00:30 UTC"),
    ],
)
def test_a_time_in_words_names_the_local_time_of_that_moment(zone, name, moment, text):
    zone(name)
    assert moments.format_time(moment) == text
    assert moments.format_time(moment.astimezone()) == text


@pytest.mark.parametrize("name", ["Asia/Kathmandu", "Europe/Berlin", "UTC"])
def test_the_table_of_status_shows_an_hour_as_an_hour_while_clocks_go_back(zone, name):
    """All times of the table are in one zone, the present one, so that a run never seems to end when it started."""
    zone(name)
    run = status(1, started=AUTUMN, ended=AUTUMN + timedelta(hours=1), duration_s=3600.0)
    table = status_table.make_table([run])
    shown = dict(zip(table.headings, table.texts[0], strict=True))
    started, ended = (datetime.strptime(shown[key].split()[-1][:5], "%H:%M") for key in ("started", "ended"))
    assert (ended - started) % timedelta(days=1) == timedelta(hours=1)
    assert shown["took"] == "1h 00m"


@pytest.mark.parametrize("name", ["Asia/Kathmandu", "Europe/Berlin", "UTC"])
@pytest.mark.parametrize("moment", [AUTUMN, AUTUMN + timedelta(hours=1), SPRING, SPRING + timedelta(hours=1)])
def test_sacct_is_asked_from_before_the_jobs_in_every_time_zone_of_slurm(zone, name, moment):
    """Slurm reads --starttime as a local time, of which there may be two. Both must lie before the first job."""
    zone(name)
    for since in (moment, moment + timedelta(days=1)):
        (start,) = (
            word.partition("=")[2] for word in query._make_sacct_argv(since.timestamp()) if word.startswith("--starttime=")
        )
        local = datetime.fromisoformat(start)
        for fold in (0, 1):
            asked = local.replace(fold=fold).astimezone(UTC)
            assert timedelta(hours=22) <= since - asked <= timedelta(hours=26)
