"""``python -m trainers run|fork|warm|tokenize|describe|refuse|rehearse``: the commands that launchers start on the nodes, and
tools."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardlab.files import files
from shardlab.terminal import console


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute one command, such as `run`, and return its exit code. arguments: the words after the name
    of the program; None: the words of this process's command line."""
    parser = console.Parser(prog="python -m trainers", description=__doc__)
    console.add_version_option(parser)
    subcommands = parser.add_subparsers(dest="verb", required=True, metavar="run|fork|warm|tokenize|describe|refuse|rehearse")
    run_parser = subcommands.add_parser(
        "run", help="one rank of a run, by the environment that the launcher sets; else the only rank"
    )
    fork_parser = subcommands.add_parser(
        "fork", help="a rehearsal: all ranks of a run on this machine's CPU, forked from the warm parent"
    )
    for subparser in (run_parser, fork_parser):
        subparser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, which contains run.json")
    warm_parser = subcommands.add_parser(
        "warm", help="the warm parent: imports torch once and forks ranks; `fork` starts it if needed"
    )
    warm_parser.add_argument("socket", type=Path, metavar="SOCKET", help="path of the Unix socket for requests")
    tokenize_parser = subcommands.add_parser("tokenize", help="convert text files into a token file for training")
    tokenize_parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="text files, in the order of their tokens")
    tokenize_parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.tokens", help="the token file; an existing file is replaced"
    )
    tokenize_parser.add_argument(
        "--tokenizer", default="bytes", metavar="bytes|TOKENIZER.json",
        help="bytes: one token per byte (default); else a file of the tokenizers library",
    )  # fmt: skip
    describe_parser = subcommands.add_parser(
        "describe", help="find out what workload or strategies a user's file defines; executes code"
    )
    describe_parser.add_argument("file", type=Path, metavar="FILE", help="code (.py), or a model by its configuration (.json)")
    describe_parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sequence, for a configuration")
    describe_parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="where the answer is written")
    refuse_parser = subcommands.add_parser(
        "refuse", help="answer questions of `jobs`, lines of JSON, about a user's file of strategies"
    )
    refuse_parser.add_argument("file", type=Path, metavar="FILE", help="the file, which is executed")
    rehearse_parser = subcommands.add_parser(
        "rehearse", help="memory, collectives and operations of one step of a cell, without its hardware; prints JSON"
    )
    rehearse_parser.add_argument(
        "request", metavar="FILE", help="JSON with a resolved `cell`, such as a run's run.json; -: standard input"
    )
    rehearse_parser.add_argument(
        "--full-depth", action="store_true", help="rehearse a deep model as it is, without extrapolation"
    )
    rehearse_parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="a folder with earlier answers; new ones are added"
    )
    args = parser.parse_args(arguments)
    if args.verb == "refuse":
        return console.run_command(lambda: _answer_refusal_questions(args.file))
    if args.verb == "rehearse":
        request_file = None if args.request == "-" else Path(args.request)
        return console.run_command(lambda: _rehearse_cells(request_file, args.cache, full_depth=args.full_depth))
    if args.verb == "describe":
        return console.run_command(lambda: _describe_plugins(args.file, args.seq_len, args.out))
    if args.verb == "tokenize":
        return console.run_command(lambda: _tokenize_texts(args.texts, args.out, args.tokenizer))
    return console.run_command(lambda: _run_command(args.verb, args.socket if args.verb == "warm" else args.run_dir))


def _tokenize_texts(text_files: list[Path], token_file: Path, tokenizer: str) -> int:
    from trainers.data import tokenizing

    print(tokenizing.tokenize_texts(text_files, token_file, tokenizer))
    return 0


def _describe_plugins(plugin_file: Path, seq_len: int | None, description_file: Path) -> int:
    sys.dont_write_bytecode = True  # so that Python writes no __pycache__ beside the user's files
    from trainers.description import describe

    files.write_json(description_file, describe.describe_file(plugin_file.absolute(), seq_len), sync=False)
    return 0


def _answer_refusal_questions(strategy_file: Path) -> int:
    sys.dont_write_bytecode = True
    from trainers.plugins import own_strategy

    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # prints of the user's code go to standard error, so that they do not mix with the answers
        own_strategy.answer_questions(strategy_file.absolute(), sys.stdin.buffer, answers)
    return 0


def _rehearse_cells(request_file: Path | None, cache_folder: Path | None, *, full_depth: bool) -> int:
    from trainers.rehearsal import command

    return command.run_rehearsal(request_file, cache_folder, full_depth=full_depth)


def _run_command(verb: str, run_dir_or_socket: Path) -> int:
    # Each verb imports only the modules that it needs: `fork`, the client of the warm parent, must start fast, so it must
    # not import torch. The warm parent, which forks the ranks, has already imported torch.
    if verb == "run":
        from trainers.ranks import process_exit
        from trainers.run import process

        if process.run_rank(run_dir_or_socket) != "nccl":
            # A thread of gloo may still wait for the interpreter. When Python before 3.14 exits, it ends such a thread, and C++
            # then aborts the process, although the training is complete. With NCCL the process exits as usual, because
            # profilers such as nsys write their data at that time.
            process_exit.exit_at_once(0)
        return 0
    if verb == "fork":
        from trainers.forking import client

        return client.run_forked(run_dir_or_socket)
    from trainers.forking import fork_server

    return fork_server.serve_until_idle(run_dir_or_socket)


if __name__ == "__main__":
    sys.exit(main())
