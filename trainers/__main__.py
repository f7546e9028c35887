"""``python -m trainers run|fork|warm|tokenize``: what launchers start on the nodes, and what makes data for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardlab import console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    parser = console.Parser(prog="python -m trainers", description=__doc__)
    console.add_version(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="run|fork|warm|tokenize")
    run = verbs.add_parser("run", help="one rank of a run, as a launcher's environment says which; alone without one")
    fork = verbs.add_parser("fork", help="all ranks of a run on this machine's CPU, forked from a warm parent: a rehearsal")
    for verb in (run, fork):
        verb.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, with its run.json")
    warm = verbs.add_parser("warm", help="the warm parent itself; `fork` starts it when it is needed")
    warm.add_argument("socket", type=Path, metavar="SOCKET", help="where it listens")
    tokenize = verbs.add_parser("tokenize", help="make a token file of texts, to train on")
    tokenize.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="files, one after the other")
    tokenize.add_argument(
        "--out", type=Path, required=True, metavar="FILE.tokens", help="the token file; replaced if it is there"
    )
    tokenize.add_argument(
        "--tokenizer", default="bytes", metavar="bytes|TOKENIZER.json",
        help="a token a byte (the default), or the tokenizers library's file",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.verb == "tokenize":
        return console.run(lambda: _tokenize(given.texts, given.out, given.tokenizer))
    return console.run(lambda: _do(given.verb, given.socket if given.verb == "warm" else given.run_dir))


def _tokenize(texts: list[Path], out: Path, tokenizer: str) -> int:
    from trainers.data import tokenizing

    print(tokenizing.make(texts, out, tokenizer))
    return 0


def _do(verb: str, path: Path) -> int:
    # Each verb imports its own: the client of the warm parent must not pay for what the parent has already.
    if verb == "run":
        from trainers import process

        process.run(path)
        return 0
    if verb == "fork":
        from trainers.forking import client

        return client.run(path)
    from trainers.forking import warm

    return warm.serve(path)


if __name__ == "__main__":
    sys.exit(main())
