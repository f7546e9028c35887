"""Code in a workspace that came from elsewhere is not executed unless the user says --trust."""

import json
import shutil
import subprocess
import sys

import pytest
from support_archive import HOSTILE, archived, unpacked

from shardlab import workspace_trust
from shardlab.workspace import Workspace

COMMANDS = {
    "jobs workloads": 1,
    "jobs plan --matrix mine.yaml": 2,
    "jobs render --matrix mine.yaml": 2,
    "jobs submit --matrix mine.yaml --dry-run": 2,
    "jobs retry": 2,
    "collect fetch": 0,
    "collect summarize": 0,
}
