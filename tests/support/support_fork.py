"""Forks the ranks of a cell from a test's own script, so that the script can change or inspect them before they start."""

# Code that tests append to their scripts. The script defines a `cell` and a function `rank`, and the appended code forks all
# ranks of the cell. If a rank fails, its traceback is printed, the other ranks are killed, and the script exits with 1.
FORK_RANKS = """
import signal, traceback
store = tempfile.mkdtemp() + "/store"
children = set()
for number in range(cell.world_size):
    if (child := os.fork()) == 0:
        code = 1
        try:
            rank(number, store)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    children.add(child)
while children:
    child, status = os.wait()
    children.discard(child)
    if status:
        for other in children:
            os.kill(other, signal.SIGKILL)
        sys.exit(1)
"""
