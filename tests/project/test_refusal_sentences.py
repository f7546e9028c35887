"""Whole sentences of refusals: what is wrong, at which line and column, what is allowed. Golden file: golden/refusals.txt.

The other tests of these files compare parts of sentences.
"""

from functools import partial

from support_bounds import refusal
from support_golden import same_as_golden

from jobs.planning import plan
from shardlab.cluster import cluster
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.errors import InputError
from shardlab.workspace.workspace import Workspace

NODES = "nodes: [{name: a, host: h1, roles: [controller, worker]}, {name: b, host: h2}]\n"
PRACTICE = "provider: virtual\nstorage: {shared: /srv/x}\n"
GPU = "gpus: {per_node: 1, type: t}"
SGD = "optimizer: {name: sgd, lr: 0.1}"
SITE = "provider: slurm\nlogin: {host: uni}\nstorage: {shared: /scratch/me}\n"
CLUSTERS = {
    "an anchor": "provider: &p local\n",
    "an alias": "provider: *p\n",
    "a tag": "provider: !!str local\n",
    "an anchor on a key": "&k provider: local\n",
    "a merge key": "<<: {provider: local}\n",
    "a key twice": "provider: local\nprovider: ssh\n",
    "a second document": "provider: local\n---\nprovider: ssh\n",
    "a key that is a list": "? [a]\n: 1\n",
    "an octal number": "provider: local\ngpus: {per_node: 0o17}\n",
    "a word for true": "provider: local\nssh: {sudo: yes}\n",
    "a time without quotes": "provider: ssh\nslurm: {time: 1:30:00}\n",
    "cloudlab without its key": "provider: cloudlab\n",
    "the key cloudlab elsewhere": f"provider: ssh\ncloudlab: {{manifest: m.xml}}\n{NODES}",
    "no nodes": "provider: ssh\n",
    "a name twice": "provider: ssh\nnodes: [{name: a, host: h}, {name: a, host: i}]\n",
    "a node without a host": "provider: ssh\nnodes: [{name: a}]\n",
    "mac with ssh": "provider: ssh\nnodes: [{name: a, host: h, mac: '00:11:22:33:44:55'}]\n",
    "an address of a practice node": f"{PRACTICE}nodes: [{{name: a, address: 10.0.0.1}}]\n",
    "two controllers": f"provider: ssh\nslurm: {{}}\n{NODES.replace('h2', 'h2, roles: [controller]')}",
    "no worker": "provider: ssh\nslurm: {}\nnodes: [{name: a, host: h, roles: [controller]}]\n",
    "login with ssh": f"provider: ssh\nlogin: {{host: uni}}\n{NODES}",
    "a disk without a mount": f"provider: ssh\nstorage: {{disk: /dev/sdb}}\n{NODES}",
    "a server without a folder": f"provider: ssh\nstorage: {{server: a}}\n{NODES}",
    "an unknown server": f"provider: ssh\nstorage: {{server: c, shared: /data}}\n{NODES}",
    "a mount in a folder of the system": f"provider: ssh\nstorage: {{disk: /dev/sdb, mount: /usr/x}}\n{NODES}",
    "the user of practice nodes": f"{PRACTICE}ssh: {{user: me}}\nnodes: [{{name: a}}]\n",
    "a subnet that is none": f"{PRACTICE}lan: {{subnet: 10.0.0.0/99}}\nnodes: [{{name: a}}]\n",
    "a subnet that is too small": f"{PRACTICE}lan: {{subnet: 10.0.0.0/30}}\nnodes: [{{name: a}}, {{name: b}}]\n",
    "nodes of a site": f"{SITE}slurm: {{partition: gpu}}\nnodes: [{{name: a}}]\n",
    **{f"{key} at a site": f"{SITE}slurm: {{partition: gpu}}\n{key}: {value}\n" for key, value in {
        "lan": "{subnet: 10.1.0.0/24}", "release": "trixie", "ssh": "{between_nodes: true}",
    }.items()},
    **{f"storage.{key} at a site": f"{SITE.replace('me}', f'me, {key}: {value}}}')}slurm: {{partition: gpu}}\n"
       for key, value in {"server": "a", "disk": "/dev/sdb", "mount": "/data"}.items()},
    **{f"{key} of a practice node": f"{PRACTICE}nodes: [{{name: a, {key}: {value}}}]\n"
       for key, value in {"host": "h", "port": "22", "user": "me"}.items()},
    **{f"a provider that is {value}": f"provider: {value}\n"
       for value in ("1", "1.5", "true", "null", "[a]", "{a: b}", "cloud")},
    "a site without slurm": SITE,
    "sudo at a site": f"{SITE}slurm: {{partition: gpu}}\nssh: {{sudo: false}}\n",
    "an option of jobs": f"{SITE}slurm: {{partition: gpu, extra: {{nodes: '2'}}}}\n",
    "a time above the longest": f'{SITE}slurm: {{partition: gpu, time: "2:00:00", max_time: "1:00:00"}}\n',
    "a type of GPU twice": f"{SITE}slurm: {{partitions: [{{name: p, {GPU}}}, {{name: q, {GPU}}}]}}\n",
    "partitions with ssh": f"provider: ssh\nslurm: {{partition: gpu, partitions: [{{name: p, {GPU}}}]}}\n{NODES}",
    "an unprintable line of setup": f'{SITE}slurm: {{partition: gpu, setup: ["a\\tb"]}}\n',
    "a data set twice": "provider: local\ndata: {path: /data, sets: [mnist, mnist]}\n",
    "a checksum alone": f"provider: local\ndata: {{path: /data, sets: [{{name: mnist, sha256: {'a' * 64}}}]}}\n",
    "a URL without a checksum": "provider: local\ndata: {path: /data, sets: [{name: mnist, archive: 'https://h/x.zip'}]}\n",
    "a space in a URL": "provider: local\ndata: {path: /data, sets: [{name: mnist, archive: 'https://h/x y.zip'}]}\n",
    "a user in a URL": "provider: local\ndata: {path: /data, sets: [{name: mnist, archive: 'https://me:pw@h/x.zip'}]}\n",
    "another protocol": "provider: local\ndata: {path: /data, sets: [{name: mnist, archive: 'ftp://h/x.zip?sig=1'}]}\n",
}  # fmt: skip
CELL = "workload: gpt2-tiny, strategy: ddp, gpus: 2, global_batch_size: 8, micro_batch_size: 2, steps: 2"
CHECKPOINTS = "instruments: {checkpoints: {every_steps: 1}}"
MATRICES = {
    "no length": f"defaults: {{{CELL.replace(', steps: 2', '')}}}\n",
    "two lengths": f"defaults: {{{CELL}, epochs: 1}}\n",
    "no batch": f"defaults: {{{CELL.replace('global_batch_size: 8, ', '')}}}\n",
    "two batches": f"defaults: {{{CELL}, gpu_batch_size: 4}}\n",
    "a batch that ranks cannot divide": f"defaults: {{{CELL.replace('size: 8', 'size: 9')}}}\n",
    "a batch that passes cannot divide": f"defaults: {{{CELL.replace('size: 2', 'size: 3')}}}\n",
    "passes and micro-batches": f"defaults: {{{CELL}, microbatches: 2}}\n",
    "no time": f'defaults: {{{CELL}, time_limit: "00:00:00"}}\n',
    "a time in words": f"defaults: {{{CELL}, time_limit: long}}\n",
    "everything excluded": f"defaults: {{{CELL}}}\naxes: {{seed: [1]}}\nexclude: [{{seed: 1, why: none}}]\n",
    "another dimension": f"defaults: {{{CELL}, tp: 2}}\n",
    "no dimension": f"defaults: {{{CELL.replace('ddp, gpus: 2', 'tp-pp, gpus: 8')}}}\n",
    "dimensions of another size": f"defaults: {{{CELL.replace('ddp', 'tp')}, tp: 4}}\n",
    "segments of a divided model": f"defaults: {{{CELL.replace('ddp', 'tp')}, activation_checkpointing: segments-2}}\n",
    "an unsupported switch": f"defaults: {{{CELL.replace('ddp', 'ps-sync')}, max_grad_norm: 1.0, {SGD}}}\n",
    "servers of another strategy": f"defaults: {{{CELL}, servers: 1}}\n",
    "checkpoints of asynchronous servers": f"defaults: {{{CELL.replace('ddp', 'ps-async')}, {SGD}, {CHECKPOINTS}}}\n",
    "sequences of images": f"defaults: {{{CELL.replace('gpt2-tiny', 'vit-tiny')}, seq_len: 8}}\n",
    "a long claim": f"defaults: {{{CELL}}}\nclaims: [{{id: a, says: b, where: c, test: '{'1 + ' * 3000}1'}}]\n",
    "a claim without a metric": f"defaults: {{{CELL}}}\nclaims: [{{id: a, says: b, where: c, test: '1 < 2'}}]\n",
    "a claim on a name": f"defaults: {{{CELL}}}\nclaims: [{{id: a, says: b, where: c, test: 'final_loss < 2'}}]\n",
    "a claim with a method": f"defaults: {{{CELL}}}\nclaims: [{{id: a, says: b, where: c, test: 'final_loss.real < 2'}}]\n",
    "a claim that is no expression": f"defaults: {{{CELL}}}\nclaims: [{{id: a, says: b, where: c, test: '1 <'}}]\n",
    "a model elsewhere": f"defaults: {{{CELL.replace('gpt2-tiny', '{transformers: ../x.json}')}}}\n",
    "two models": f"defaults: {{{CELL.replace('gpt2-tiny', '{transformers: x.json, torchvision: resnet18}')}}}\n",
    "sequences of a network for images": f"defaults: {{{CELL.replace('gpt2-tiny', '{torchvision: resnet18, seq_len: 8}')}}}\n",
}  # fmt: skip


def test_refusals_of_files_are_whole_sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace, lines = Workspace(tmp_path), []
    plan_all = partial(plan.plan_matrix, where=None, repeats=None)
    for name, text in CLUSTERS.items():
        (tmp_path / "c.yaml").write_text(f"schema: 1\nname: c\n{text}")
        lines.append(f"{name}\n    {refusal(cluster.load_cluster, tmp_path / 'c.yaml', of=InputError)}\n")
    for name, text in MATRICES.items():
        (tmp_path / "m.yaml").write_text(f"schema: 1\nname: m\n{text}")
        lines.append(f"{name}\n    {refusal(plan_all, workspace, str(tmp_path / 'm.yaml'), THIS_MACHINE, of=InputError)}\n")
    same_as_golden("refusals.txt", "".join(lines).replace(f"{tmp_path}/", ""))
