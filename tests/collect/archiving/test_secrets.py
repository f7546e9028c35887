"""No archive contains a secret: each planted secret is found in each kind of file, and nothing else is taken for a secret."""

import base64
import gzip
import json
import random
import re
import string
import zipfile
from pathlib import Path

import plotly
import pytest
import support_collect as support

from collect import cli
from collect.archiving import command, secret_scan
from shardlab import url
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

ROOT = Path(__file__).parents[3]
RANDOM = random.Random(37)
LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"
BASE32 = string.ascii_uppercase + "234567"


def drawn(count: int, letters: str = LETTERS) -> str:
    """Random characters, of which the first is a digit and the second a letter that `letters` has."""
    fixed = "".join(next(char for char in letters if test(char)) for test in (str.isdigit, str.isalpha))
    return fixed + "".join(RANDOM.choices(letters, k=count - 2))


def pem(kind: str) -> str:
    body = base64.b64encode(RANDOM.randbytes(96)).decode()
    return "\n".join([f"-----{'BEGIN'} {kind}PRIVATE KEY-----", body[:64], body[64:], f"-----END {kind}PRIVATE KEY-----"])


def token(*parts: str) -> str:
    """A token of these parts. The parts are joined when the tests run, so that this file has no text in the form of a token."""
    return "".join(parts)


def jwt() -> str:
    return ".".join(
        base64.urlsafe_b64encode(text).decode().rstrip("=")
        for text in (b'{"alg":"HS256"}', b'{"sub":"1234567"}', RANDOM.randbytes(32))
    )


# By what the secret is: (the name to which it is assigned, or "" if its form is enough; the text with the secret; the part of
# the text that no message may contain, or None if this is the whole text).
SECRETS: dict[str, tuple[str, str, str | None]] = {
    "AWS access key id": ("", token("AKIA", drawn(16, BASE32)), None),
    "AWS temporary key id": ("", token("ASIA", drawn(16, BASE32)), None),
    "AWS secret": ("AWS_SECRET_ACCESS_KEY", drawn(38) + "/+", None),
    "AWS secret in a profile": ("aws_secret_access_key", drawn(40), None),
    "AWS session": ("AWS_SESSION_TOKEN", drawn(300), None),
    "GCP API key": ("", token("AI", "za", drawn(35)), None),
    "GCP access token": ("", token("ya", "29.", drawn(60)), None),
    "GCP client secret": ("", token("GOC", "SPX-", drawn(28)), None),
    "GCP service account": ("private_key", pem(""), None),
    "Azure storage": ("", f"AccountName=ada;AccountKey={(key := drawn(86))}==;EndpointSuffix=x", key),
    "Azure service bus": ("", f"Endpoint=sb://ada.example.net/;KeyName=all;SharedAccessKey={(key := drawn(43))}=", key),
    "Azure SAS": ("", f"https://ada.example.net/c.tar?sv=2024-11-04&sr=b&sig={(key := drawn(43))}%3D", key),
    "Azure SAS in HTML": ("", f"https://ada.example.net/c.tar?sv=2024-11-04&amp;sig={(key := drawn(43))}%3D", key),
    "S3 URL": ("", f"https://sets.s3.example.com/c.tar?X-Amz-Expires=3600&X-Amz-Signature={(key := drawn(64, HEX))}", key),
    "GCS URL": ("", f"https://storage.example.com/c.tar?X-Goog-Date=1&X-Goog-Signature={(key := drawn(256, HEX))}", key),
    "CloudFront URL": ("", f"https://d1.example.net/c.tar?Expires=1&Signature={(key := drawn(80))}&Key-Pair-Id=K1", key),
    "Hugging Face": ("", token("h", "f_", drawn(34)), None),
    "Hugging Face in a line": ("", f"401 Client Error: the token {(key := token('h', 'f_', drawn(34)))} is not valid", key),
    "W&B, 40 digits": ("WANDB_API_KEY", drawn(40, HEX), None),
    "W&B, new": ("", token("wandb", "_v1_", drawn(48)), None),
    "W&B login": ("", f"wandb login --relogin {(key := drawn(40, HEX))}", key),
    "GitHub personal": ("", token("g", "hp_", drawn(36)), None),
    "GitHub OAuth": ("", token("g", "ho_", drawn(36)), None),
    "GitHub server": ("", token("g", "hs_", drawn(36)), None),
    "GitHub fine-grained": ("", token("github", "_pat_", drawn(22), "_", drawn(59)), None),
    "GitHub in a URL": ("", f"https://ada:{(key := token('g', 'hp_', drawn(36)))}@github.example.com/ada/x.git", key),
    "GitLab": ("", token("gl", "pat-", drawn(20)), None),
    "OpenAI project": ("", token("s", "k-proj-", drawn(48), "T3Blbk", drawn(40)), None),
    "OpenAI": ("", token("s", "k-", drawn(48)), None),
    "Anthropic": ("", token("s", "k-ant-api03-", drawn(90), "AA"), None),
    "Slack": ("", token("xo", "xb-", drawn(12, "0123456789a"), "-", drawn(24)), None),
    "NVIDIA": ("", token("nv", "api-", drawn(64)), None),
    "bearer": ("", f"Authorization: Bearer {(key := drawn(40))}", key),
    "basic": ("", f"Authorization: Basic {(key := base64.b64encode(b'ada:' + RANDOM.randbytes(12)).decode())}", key),
    "curl": ("", f"curl -H 'authorization: bearer {(key := drawn(40))}' https://example.com/x", key),
    "JSON Web Token": ("", jwt(), None),
    "RSA key": ("", pem("RSA "), None),
    "OpenSSH key": ("", pem("OPENSSH "), None),
    "encrypted key": ("", pem("ENCRYPTED "), None),
    "PuTTY key": ("", f"{token('PuTTY-User', '-Key-File-3')}: ada\nPrivate-Lines: 1\n{(key := drawn(48))}", key),
    "password in a URL": ("", f"postgresql://ada:{(key := drawn(12))}@db.example.com/runs", key),
    "password": ("DB_PASSWORD", "Tr0ub4dor" + "&3", "Tr0ub4dor"),
    "password of words": ("password", "correct-horse" + "-battery", None),
    "client secret": ("client_secret", drawn(40), None),
    "secret variable": ("MY_SECRET", drawn(24), None),
    "any token": ("COMET_TOKEN", drawn(25), None),
    "API key": ("apiKey", drawn(32), None),
    "netrc": ("", f"machine api.wandb.example login user password {(key := drawn(40, HEX))}", key),
    "Stripe": ("", token("sk_", "live_", drawn(24)), None),
    "SendGrid": ("", token("S", "G.", drawn(22), ".", drawn(43)), None),
    "Kaggle": ("KAGGLE_KEY", drawn(32, HEX), None),
    "kaggle.json": ("", f'{{"username":"ada","key":"{(key := drawn(32, HEX))}"}}', key),
    "webhook of Slack": ("", token("https://hooks.slack.com", "/services/", "T01234567/B01234567/", key := drawn(24)), key),
    "webhook of Discord": ("", token("https://example.com/api/web", "hooks/", "123456789012345678/", key := drawn(68)), key),
    "W&B printed": ("", f"wandb: API key is {(key := drawn(40, HEX))}", key),
    "curl -u": ("", f"curl -s -u ada:{(key := drawn(8))} https://example.com/x", key),
    "sshpass": ("", f"sshpass -p {(key := drawn(10))} ssh node0", key),
    "option": ("", f"python train.py --hub-token {(key := drawn(30))} --steps 10", key),
}  # fmt: skip
# By the kind of a file: the path in an archive, and a function that writes a text with this name into the file.
PLACES = {
    "cluster file": ("archived-cluster.yaml", lambda name, text: f"schema: 1\nssh:\n  {name or 'user'}: {yaml(text)}\n"),
    "title": ("matrix/mine.yaml", lambda name, text: f"name: mine\n{name or 'title'}: {yaml(text)}\n"),
    "variables": ("runs/a/env/node0.json", lambda name, text: indented({"host": "a", "variables": {name or "NCCL_X": text}})),
    "setup": ("runs/a/job.sbatch", lambda name, text: f"#!/bin/sh\n{f'export {name}=' if name else 'echo '}{text}\n"),
    "log": ("runs/a/log/rank-00000.log", lambda name, text: f"step 1\n\x1b[31m2026-01-01 {name and name + '='}{text}\x1b[0m\n"),
    "event": ("runs/a/events.b.jsonl", lambda name, text: "{}\n" + json.dumps({"why": f"a:\n{name and name + '='}{text}"})),
    "trace": ("runs/a/trace/rank-00000.json.gz", lambda name, text: "\n" + json.dumps({"events": [], name or "cmd": text})),
}  # fmt: skip


def indented(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2)


def yaml(text: str) -> str:
    return "|\n" + "".join(f"    {line}\n" for line in text.split("\n")) if "\n" in text or ": " in text else text


def scan(folder: Path, name: str, content: str | bytes) -> None:
    """Search an archive that has one file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    secret_scan.check_no_secrets(folder, command.build_index(folder, "mine", [], [], anonymous=False))


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_secret_is_found_and_never_shown(tmp_path, place):
    file, written = PLACES[place]
    wrong = {}
    for kind, (name, text, secret) in SECRETS.items():
        try:
            scan(tmp_path, file, written(name, text))
            wrong[kind] = "not found"
        except InputError as error:
            said = str(error)
            has_name = f"{name}: a " in said or ("\n" in text and not file.endswith((".json", ".gz")))
            if not re.search(rf"^  {re.escape(file)}: line [2-9]", said, re.MULTILINE) or not (has_name or not name):
                wrong[kind] = said
            if any(line in said for line in (secret or text).split("\n")):
                wrong[kind] = f"shown: {said}"
    assert not wrong
    assert len(SECRETS) >= 40


HARMLESS = [
    f'"sha256": "{drawn(64, HEX)}", "git_commit": "{drawn(40, HEX)}", "cell_hash": "{drawn(12, HEX)}"',
    f"wandb: run {drawn(8, HEX)} of commit {drawn(40, HEX)}, synced",
    f'"token": "quickstart.{drawn(10, HEX)}", "job": "77"',
    '"tokens_per_s": 1234.5678901234567, "pad_token_id": 50256, "eos_token": "<|endoftext|>", "tokenizer": "hf-internal/gpt2"',
    f"task-{drawn(40)} disk-{drawn(40)} --ask-{drawn(40)} sk-learn-like-estimators-and-pipelines",
    "from huggingface_hub import hf_hub_download_with_a_long_name_that_has_no_token",
    "token = tokenizer.decode(ids)\nnext_token = self.sampler.sample_token_4_times\npassword: str | None = None\nsecret = b[0]",
    "password = getpass.getpass()\napi_key = os.environ['WANDB_API_KEY']\nTOKEN_VARIABLE = 'CLOUDLAB_TOKEN'",
    "export HF_TOKEN=$HF_TOKEN_OF_TEAM_2026\nexport WANDB_API_KEY=...\nHF_TOKEN=<your token 123456789>",
    "MY_TOKEN: ${{ secrets.T0KEN }}\napi_key: YOUR_API_KEY_1234567890\npassword: changeme1\npassword: null\n",
    "DB_PASSWORD=********\npassword required for ada1",
    "https://user:password@host/x  https://ada:$PASSWORD@host/x  ssh://git@host:22/x  http://127.0.0.1:8080/",
    token("AKIA", "IOSFODNN7", "EXAMPLE"),
    f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{drawn(43)} ada@host\nSHA256:{drawn(43)}",
    "PWD=/home/ada/study-2026/workspace\ncredentials: ~/.config/site/credentials.json\nHF_TOKEN_PATH=/home/ada/.token1",
    "the bearer of this message; -----BEGIN CERTIFICATE-----\nMIIB\n-----BEGIN PUBLIC KEY-----\nMIIB",
    "design=0123456789abcdef0123 &sign=0123456789abcdef0123 permission denied (publickey,password).",
    'secret/keys: see "--token FILE", or token_file: /run/secrets/token-1234567890',
]  # fmt: skip


def test_harmless_texts_are_not_reported_as_secrets(tmp_path):
    for text in HARMLESS:
        scan(tmp_path, "runs/a/log/rank-00000.log", text)
        scan(tmp_path, "runs/a/trace/x.json", json.dumps({"name": text}))


def test_scripts_of_the_report_our_code_and_our_pages_have_no_secret(tmp_path):
    scripts = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    ours = [
        path
        for folder in ("docs", "matrices", "examples", "templates", "trainers", "jobs")
        for path in (ROOT / folder).rglob("*")
    ]
    texts = [path for path in ours if path.suffix in (".py", ".md", ".yaml", ".j2", ".json")]
    assert len(texts) > 300
    scan(tmp_path, "report/index.html", b"\n".join(path.read_bytes() for path in [scripts, *texts]))


def test_a_secret_on_the_border_of_two_blocks_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_scan, "BLOCK_BYTES", 5000)
    secret = SECRETS["Hugging Face"][1]
    for before in (4950, 4965, 4980, 4995, 4999, 5000, 5001):
        with pytest.raises(InputError, match="log: line 1: a token of Hugging Face"):
            scan(tmp_path, "runs/a/log/rank-00000.log", " " * before + secret + " " * 9000)


def test_a_damaged_gzip_file_is_searched_up_to_the_damage(tmp_path):
    content = gzip.compress(SECRETS["Hugging Face"][1].encode() + b"\n" + RANDOM.randbytes(10_000))[:8000]
    (tmp_path / "runs/a/trace").mkdir(parents=True)
    (tmp_path / "runs/a/trace/x.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.gz: line 1: a token"):
        secret_scan.check_no_secrets(tmp_path, command.build_index(tmp_path, "mine", [], [], anonymous=False))


def test_a_long_list_is_shortened_and_file_names_that_are_secrets_are_hidden(tmp_path):
    for number in range(13):
        (tmp_path / f"runs/r{number}").mkdir(parents=True)
        (tmp_path / f"runs/r{number}/job.sh").write_text(f"export HF_TOKEN={drawn(30)}\n")
    index = command.build_index(tmp_path, "mine", [], [], anonymous=False)
    with pytest.raises(InputError, match=r"because 13 file\(s\)[^\0]* runs/r5/job.sh: line 1, HF_TOKEN") as error:
        secret_scan.check_no_secrets(tmp_path, index)
    assert str(error.value).count("HF_TOKEN") == secret_scan.MOST_NAMED_FILES
    secret = SECRETS["GitHub personal"][1]
    (tmp_path / f"runs/{secret}.log").write_text(secret)
    with pytest.raises(InputError, match=r"archive\.json: line \d+") as error:
        secret_scan.check_no_secrets(tmp_path, command.build_index(tmp_path, "mine", [], [], anonymous=False))
    assert secret not in str(error.value)


CLUSTER = """\
schema: 1
name: okapi
provider: slurm
login: {{host: login.example.edu, user: ada}}
ssh: {{identity: ~/.ssh/id_ada}}
slurm:
  partition: gpu
  constraint: {feature}
  setup: ["export WANDB_API_KEY={wandb}", "export HF_TOKEN={hf}"]
  extra: {{comment: "{hf}"}}
storage: {{shared: /scratch/ada}}
environment: {{container: "docker://ada:{hf}@registry.example.com#team/torch:1", runtime: pyxis}}
data:
  sets: [{{name: cifar10, archive: "https://example.com/c.tar?X-Amz-Signature={hex}", sha256: {hex}}}]
"""


def cluster(feature: str = "a100") -> str:
    wandb, hf, hex_ = SECRETS["W&B, 40 digits"][1], SECRETS["Hugging Face"][1], SECRETS["S3 URL"][2]
    return CLUSTER.format(wandb=wandb, hf=hf, hex=hex_, feature=feature)


def small(path: Path, title: str = "plain") -> tuple[Workspace, RunDir]:
    """A workspace with one run, and this run."""
    workspace = Workspace(path)
    support.keep(workspace, [support.cell()], repeats=1, title=title)
    return workspace, support.completed(workspace, support.cell())


@pytest.mark.parametrize("hidden", [(), ("--anonymous",)])
def test_secrets_of_the_cluster_file_are_left_out_and_the_archive_says_so(tmp_path, monkeypatch, capsys, hidden):
    support.log_in(monkeypatch, "zebra_user")
    theirs, _ = small(tmp_path / "work")
    (theirs.path / "cluster.yaml").write_text(cluster())
    out = tmp_path / "new" / "folder" / "a.zip"
    assert cli.main(["archive", *hidden, "--json", "--out", str(out), "--workspace", str(theirs.path)]) == 0
    (why,) = [one["why"] for one in json.loads(capsys.readouterr().out)["left_out"] if one["name"] == "cluster.yaml"]
    assert "without ssh.identity, slurm.setup, slurm.extra" in why
    with zipfile.ZipFile(out) as zipped:
        texts = {name: zipped.read(name) for name in zipped.namelist()}
    kept = json.loads(texts["workspace/archived-cluster.yaml"])
    assert kept["data"]["sets"][0]["archive"] == "https://example.com/c.tar"
    assert kept["environment"]["container"].startswith("docker://registry.example.com#team")
    assert (kept["slurm"]["setup"], kept["slurm"]["extra"], kept["ssh"]["identity"]) == ([], {}, None)
    for name in ("W&B, 40 digits", "Hugging Face"):
        assert not [file for file, text in texts.items() if SECRETS[name][1].encode() in text]


@pytest.mark.parametrize(
    ("place", "hidden"),
    [("cluster file", ["--anonymous"]), ("title", []), ("environment", []), ("log", []), ("record", ["--anonymous"])],
)
def test_an_archive_with_a_secret_is_refused_and_leaves_no_file(tmp_path, monkeypatch, capsys, place, hidden):
    support.log_in(monkeypatch, "zebra_user")
    secret = SECRETS["Hugging Face"][1]
    theirs, run = small(tmp_path / "work", title=f"with {secret}" if place == "title" else "plain")
    if place == "cluster file":
        (theirs.path / "cluster.yaml").write_text(cluster(feature=secret))
    if place == "environment":
        path = run.environment_file(support.HOST)
        path.write_text(path.read_text().replace("{", f'{{"variables": {{"NCCL_NET_PLUGIN": "{secret}"}},', 1))
    if place == "log":
        files.make_folder(run.log)
        run.rank_log(0).write_text(f"export HF_TOKEN={secret}\n")
    if place == "record":
        support.event(run, "failed", 9, why=f"401 for {secret}")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "new" / "a.zip"
    assert cli.main(["archive", *hidden, "--out", str(out), "--workspace", str(theirs.path)]) == 2
    said = capsys.readouterr().err
    expected = {
        "cluster file": "constraint: a token of", "title": ".shardlab/matrices/quickstart.json: line 4, title: a token of",
        "environment": "NCCL_NET_PLUGIN: a token of", "log": "log/rank-00000.log: line 1, HF_TOKEN",
        "record": ", why: a token of",
    }  # fmt: skip
    assert expected[place] in said
    assert secret not in said
    assert "Replace each secret" in said
    assert not list((tmp_path / "out").iterdir())


def test_a_url_is_shown_without_user_password_and_query():
    assert url.remove_secrets("https://h:80/a/b.tar?X-Amz-Signature=1&b=2") == "https://h:80/a/b.tar"
    assert (
        url.remove_secrets("fetch 'https://ada:pw@h/a?b=c' as /data, not http://h2/x?y")
        == "fetch 'https://h/a' as /data, not http://h2/x"
    )
    assert url.remove_secrets("docker://ada:pw@h/a#b:1") == "docker://h/a#b:1"
    assert url.remove_secrets("https://ada:p/w#x@h/a, s3://b/c#access_token=1&d") == "https://h/a, s3://b/c"
    assert url.remove_secrets("http://h:80/@scope/a") == "http://h:80/@scope/a"
    assert url.remove_secrets("a/b?c d@e") == "a/b?c d@e"
