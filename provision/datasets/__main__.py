"""``python -m provision.datasets look|download|stage``: a program that `provision` runs on nodes. It reads the request from
standard input, because other users can read the arguments of a command and a URL may be signed. It prints JSON."""

from __future__ import annotations

import json
import sys

from provision.datasets import stage
from shardlab.errors import ShardlabError


def main(action_name: str, request_json: str) -> int:
    """Look for a data set, download its archive, or stage it, and print the state of the data set as JSON.

    request_json: the data set, a `StageRequest` as JSON. An error is printed to standard error. Returns the exit code.
    """
    stage_request = stage.StageRequest(**json.loads(request_json))
    try:
        action_by_verb = {"look": stage.inspect_data_set, "download": stage.download_archive, "stage": stage.stage_data_set}
        data_set_state = action_by_verb[action_name](stage_request)
    except ShardlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename or stage_request.data_path}: {error.strerror or error}.", file=sys.stderr)
        return 1
    print(json.dumps(stage.convert_state_to_dict(data_set_state)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.read()))
