"""A plan under torchrun on two hosts: two network namespaces, each with an advisor and a folder of its own, over gloo."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import data_parallel
import pytest

# Each rank writes what it has seen of the other, and how its gradients lie.
SCRIPT = """
import json, os, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
drawn, losses = torch.Generator().manual_seed(rank), []
for step in range(16):
    loss = net(torch.randn(4, 6, generator=drawn)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
views = all(p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in net.parameters())
weights = [float(p.detach().double().sum()) for p in net.parameters()]
json.dump({"losses": losses, "views": views, "weights": weights}, open("found.json", "w"))
torch.distributed.destroy_process_group()
"""
PLAN = "schema_version: 1\nscript: train.py\nitems: [{transform: ddp_bucket_views, status: kept}]\n"
# The second host's network is that of a process that sleeps; a cable lies between the two.
HOSTS = r"""
set -e
ip link set lo up
unshare -n sleep 300 & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link add cable type veth peer name cable netns $other
ip addr add 10.77.0.1/24 dev cable; ip link set cable up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev cable; ip link set cable up'
export GLOO_SOCKET_IFNAME=cable
(cd one; "$@" --node-rank 0 train.py > said 2>&1) & first=$!
second=0; (cd two; nsenter -t $other -n "$@" --node-rank 1 train.py > said 2>&1) || second=$?
wait $first || second=$?
kill $other
exit $second
"""
NAMESPACES = shutil.which("unshare") is not None and shutil.which("ip") is not None and (
    subprocess.run(["unshare", "-rnm", "ip", "link", "add", "x", "type", "veth"], capture_output=True, check=False).returncode == 0
)  # fmt: skip


def on_two_hosts(folder: Path, *advisor: str) -> dict[str, dict[str, object]]:
    """What each host has found, and said."""
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.py").write_text(SCRIPT)
        (folder / name / "plan.yaml").write_text(PLAN)
    agent = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
             "--master-addr", "10.77.0.1", "--master-port", "29777")  # fmt: skip
    done = subprocess.run(
        ["unshare", "-rnm", "bash", "-c", HOSTS, "hosts", *advisor, *agent],
        cwd=folder,
        env=data_parallel.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    said = {name: (folder / name / "said").read_text() for name in ("one", "two")}
    assert done.returncode == 0, (done.stderr, said)
    return {name: json.loads((folder / name / "found.json").read_text()) | {"said": said[name]} for name in said}


@pytest.mark.long
@pytest.mark.skipif(not NAMESPACES, reason="no network namespaces may be made here")
def test_a_plan_stands_on_both_hosts_and_changes_no_number(tmp_path: Path) -> None:
    plain = on_two_hosts(tmp_path / "plain")
    planned = on_two_hosts(tmp_path / "planned", sys.executable, "-m", "advisor", "run", "--plan", "plan.yaml", "--")
    for name in ("one", "two"):
        assert not plain[name]["views"]
        assert planned[name]["views"], planned[name]["said"]
        assert planned[name]["losses"] == plain[name]["losses"]
    assert planned["one"]["weights"] == planned["two"]["weights"]
    assert planned["one"]["losses"] != planned["two"]["losses"], "each host has data of its own"
