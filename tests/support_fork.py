"""Ranks forked by a script of its own, for what has to be broken or looked into before they start."""

# The end of a script of its own that has a `cell` and a function `rank`: forks all ranks of it and ends as the worst does.
FORK_RANKS = """
store = tempfile.mkdtemp() + "/store"
children = []
for number in range(cell.world_size):
    if (child := os.fork()) == 0:
        code = 1
        try:
            rank(number, store)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
