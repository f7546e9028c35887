"""A practice cluster that is set up like a managed site, and a user who works on it from another machine.

The user has no root. The site has a login node, modules and its own rules.
"""

import contextlib
import copy
import functools
import http.server
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from support_e2e import logs
from support_slurm import SlurmCluster

USER, UID, ACCOUNT = "alice", 1200, "abc_g"
PASSWORD = "correct-horse"
# The user's home folder is shared by all nodes. The site has environment modules, and a variable that names the folder for
# large data.
SETUP = f"""\
id {USER} > /dev/null 2>&1 || useradd --uid {UID} --shell /bin/bash --no-create-home --home-dir HOME {USER}
usermod -p '*' {USER}
dpkg -s environment-modules charliecloud-runtime > /dev/null 2>&1 || \
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    environment-modules charliecloud-runtime > /dev/null
mkdir -p /etc/environment-modules/modules/python
printf '#%%Module1.0\\nsetenv SITE_PYTHON 3.11.2\\n' > /etc/environment-modules/modules/python/3.11.2
printf 'export SCRATCH=%s\\n' SCRATCH > /etc/profile.d/scratch.sh
"""
# Slurm's accounting has an account for the user. The submit plugin rejects jobs without an account and jobs with the option
# --gpus.
RULES = f"""\
sacctmgr -i add account {ACCOUNT} GrpTRESMins=gres/gpu=6000 > /dev/null
sacctmgr -i add user {USER} account={ACCOUNT} > /dev/null
cat > /etc/slurm/job_submit.lua <<'LUA'
function slurm_job_submit(job, partitions, user)
    if user ~= {UID} then return slurm.SUCCESS end
    if job.account == nil then
        slurm.log_user("this cluster needs an account: use --account")
        return slurm.ERROR
    end
    if job.tres_per_job ~= nil then
        slurm.log_user("--gpus is not allowed here: use --gpus-per-node")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, before, partitions, user)
    return slurm.SUCCESS
end
LUA
"""
WITHOUT_RULES = (
    f"sacctmgr -i delete user {USER} account={ACCOUNT} > /dev/null; sacctmgr -i delete account {ACCOUNT} > /dev/null"
)
PLUGIN = "JobSubmitPlugins=lua"
# Compute nodes reach the other nodes of the cluster, but not the internet.
NO_NETWORK = "ip -4 route show default > /run/default-route; ip route flush default; ! ip -4 route show default | grep -q ."
NETWORK = "while read -r route; do ip route add $route; done < /run/default-route"
# A site without accounting: the commands exist, but they only print an error.
NO_ACCOUNTING = """\
for name in sacct sacctmgr sreport sshare; do
    printf '#!/bin/sh\\necho "Slurm accounting storage is disabled" >&2\\nexit 1\\n' > /usr/local/bin/$name
    chmod 755 /usr/local/bin/$name
done
"""
ACCOUNTING = "cd /usr/local/bin; rm -f sacct sacctmgr sreport sshare"
WITHOUT = f"""\
pkill -KILL -u {USER} || true
rm -f /etc/profile.d/scratch.sh /etc/ssh/sshd_config.d/second.conf
systemctl reload ssh
userdel {USER} || true
"""
# After the key, the login asks for a password on the terminal, as a login with a one-time code does.
SECOND_FACTOR = f"""\
usermod -p "$(openssl passwd -6 {PASSWORD})" {USER}
printf 'Match User {USER}\\n  AuthenticationMethods publickey,keyboard-interactive\\n  KbdInteractiveAuthentication yes\\n' \
    > /etc/ssh/sshd_config.d/second.conf
grep -q '^UsePAM yes' /etc/ssh/sshd_config
systemctl reload ssh
"""
# An image of the node's own system without Slurm's commands. Its Python has the packages of a virtual environment.
IMAGE = f"""\
set -e
mkdir -p "$1" "$1/proc" "$1/sys" "$1/dev" "$1/tmp" "$1/opt" "$1/home" "$1/root" "$1/run" "$1/var/tmp" "$1/ch" "$1$3"
cp -a /bin /lib /lib64 /sbin /usr /etc "$1"
for name in sbatch srun scontrol squeue sinfo sacct; do rm -f "$1/usr/bin/$name"; done
rm -f "$1/etc/os-release"
printf 'PRETTY_NAME="an image"\n' > "$1/etc/os-release"
cp -al "$2" "$1/opt/venv"
printf 'PATH=/opt/venv/bin:/usr/bin:/bin\nOMP_NUM_THREADS=77\n' > "$1/ch/environment"
chown -R {USER}: "$1/opt/venv"
"""
CONFIG = """\
Host uni
  HostName {address}
  HostKeyAlias {address}
  User {user}
  IdentityFile "{identity}"
"""


class Site:
    """The imitated site, the user's files in its shared folder, and the commands that the user runs on this machine (desk)."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.home, self.scratch = slurm.shared / "site" / "home", slurm.shared / "site" / "scratch"
        self.shared = self.scratch / "shardlab"
        self.desk = folder / "desk"
        # The folder has a short path, because a Unix socket is created in it, and the path of a socket has a maximum length.
        self.cache = Path(tempfile.mkdtemp(prefix="site"))
        self._before = self._person()
        for path in (self.home / ".ssh", self.scratch, self.desk):
            path.mkdir(parents=True)
        (self.home / ".ssh/authorized_keys").write_bytes((folder / "key.pub").read_bytes())
        for path in (self.home, self.home / ".ssh", self.home / ".ssh/authorized_keys", self.scratch):
            os.chown(path, UID, UID)
        (self.home / ".ssh").chmod(0o700)
        script = SETUP.replace("HOME", str(self.home)).replace("SCRATCH=%s\\n' SCRATCH", f"SCRATCH=%s\\n' {self.scratch}")
        for name in slurm.nodes:
            slurm.run(name, script, root=True)
        slurm.run("head", RULES, root=True)
        self._rules = slurm.configured(PLUGIN)
        self._rules.__enter__()
        for name in self._workers():
            slurm.run(name, NO_NETWORK, root=True)

    def _workers(self) -> list[str]:
        return [name for name in self.slurm.nodes if name != "head"]

    @contextlib.contextmanager
    def without_accounting(self) -> Iterator[None]:
        """During the block, Slurm's accounting commands answer as on a site without accounting."""
        self.slurm.run("head", NO_ACCOUNTING, root=True)
        try:
            yield
        finally:
            self.slurm.run("head", ACCOUNTING, root=True)

    @contextlib.contextmanager
    def small_folder(self, size: str) -> Iterator[Path]:
        """A folder of the user on the login node. The folder is on a file system of its own with this size."""
        folder = self.scratch / "small"
        self.as_user(f"mkdir -p {folder}")
        self.slurm.run("head", f"mount -t tmpfs -o size={size},uid={UID} tmpfs {folder}", root=True)
        try:
            yield folder
        finally:
            self.slurm.run("head", f"umount {folder}", root=True)

    def _person(self) -> list[str]:
        """Words to put before each command of the user. They give the command a home folder with a key and ~/.ssh/config."""
        home = self.folder / "home"
        (home / ".ssh").mkdir(parents=True)
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        address = self.slurm.nodes["head"].address
        (home / ".ssh/config").write_text(CONFIG.format(address=address.host, user=USER, identity=key))
        (home / ".ssh/known_hosts").write_bytes((self.slurm.folder / ".shardlab/known_hosts").read_bytes())
        passwd = self.folder / "passwd"  # OpenSSH takes the home folder from this file and ignores $HOME
        me = pwd.getpwuid(os.geteuid())
        lines = Path("/etc/passwd").read_text().replace(f":{me.pw_dir}:{me.pw_shell}", f":{home}:{me.pw_shell}", 1)
        passwd.write_text(lines)
        mount = 'mount --bind "$0" /etc/passwd && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(passwd), "env", f"HOME={home}", f"XDG_CACHE_HOME={self.cache}"]

    def command(self, *words: str) -> list[str]:
        """The command line of one of our commands, run on the user's machine."""
        return [*self._before, sys.executable, "-P", "-m", *words, "--workspace", str(self.desk)]

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == code, (
            f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{logs(self.slurm.shared)}"
        )
        return done

    def at(self, name: str, described: str, environment: dict[str, object], setup: Sequence[str] = ()) -> "Site":
        """The same user with another workspace.

        described: the text of the cluster file. environment: replaces its key `environment`. setup: replaces its key
        `slurm.setup`.
        """
        other = copy.copy(self)
        other.desk = self.folder / name
        other.desk.mkdir()
        keys = yaml.safe_load(described)
        keys["slurm"]["setup"] = list(setup)
        (other.desk / "cluster.yaml").write_text(json.dumps(keys | {"environment": environment}))
        return other

    def make_image(self, venv: Path) -> Path:
        """Make an image for Charliecloud whose Python has the packages of a virtual environment."""
        image = self.scratch / "image"
        self.slurm.run("head", f"set -- {image} {venv} {self.shared}\n{IMAGE}", root=True)
        return image

    def log_out(self) -> None:
        """Close the SSH connection that the commands share."""
        socket = f"{self.cache}/shardlab/ssh/%C"
        words = [*self._before, "ssh", "-o", f"ControlPath={socket}", "-O", "exit", "uni"]
        subprocess.run(words, capture_output=True, check=False)

    def as_user(self, script: str) -> str:
        """Run a script as the user on the login node, and return its output."""
        return self.slurm.run("head", f"runuser -l {USER} -c {_quoted(script)}", root=True)

    def remove(self) -> None:
        self.log_out()
        for name in self._workers():
            self.slurm.run(name, NETWORK, root=True)
        self._rules.__exit__(None, None, None)
        for name in self.slurm.nodes:
            self.slurm.run(name, WITHOUT, root=True)
        self.slurm.run("head", WITHOUT_RULES, root=True)
        shutil.rmtree(self.cache)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@contextlib.contextmanager
def package_index(wheels: Path, folder: Path, address: str) -> Iterator[str]:
    """Yield the URL of a package index that offers the wheels in the folder `wheels`.

    address: the address of this machine at which the index answers.
    """
    for wheel in wheels.glob("*.whl"):
        project = folder / re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        project.mkdir(exist_ok=True)
        (project / wheel.name).symlink_to(wheel)
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A file server that lists folders and sends files, and writes no log."""

    def log_message(self, *words: object) -> None:
        pass


def answered(argv: list[str], question: str, answer: str, limit_s: float) -> tuple[int, str, int]:
    """Run a command on a terminal and answer each question.

    Returns (exit code, everything that the command showed, number of questions).
    """
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execvp(argv[0], argv)
    shown, asked, ends = "", 0, time.monotonic() + limit_s
    while time.monotonic() < ends:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the command has ended
            break
        if not part:
            break
        shown += part.decode("utf-8", "replace")
        if shown.count(question) > asked:
            asked += 1
            os.write(terminal, f"{answer}\n".encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown, asked
