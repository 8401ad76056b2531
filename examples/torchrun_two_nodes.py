"""Train a network with PyTorch's DistributedDataParallel: two nodes, two processes on each.

``python examples/torchrun_two_nodes.py`` runs all four on an embedded Ray of this machine;
``python examples/torchrun_two_nodes.py --address http://ray-head:8265`` on two nodes of a cluster
whose nodes have nemo-run, torch and scikit-learn. It uses no GPU.
"""

import argparse
import sys

import nemo_run as run

from nemo_run_ray import RayExecutor


def train(epochs: int) -> None:
    """What each process runs; torchrun has told it its rank and where the others are."""
    import socket

    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    is_first, world_size = dist.get_rank() == 0, dist.get_world_size()
    hosts = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    if is_first:
        print(f"world size {world_size}, on {', '.join(hosts)}", flush=True)

    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    sampler = DistributedSampler(data)  # gives each process its own quarter
    batches = DataLoader(data, batch_size=32, sampler=sampler)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for batch, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()  # averages the gradients of all processes
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(batches) / world_size)
        if is_first:
            print(f"epoch {epoch} loss {losses[-1]:.3f}", flush=True)
    dist.destroy_process_group()
    if losses[-1] > losses[0] / 2:
        sys.exit(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} only")


def main(address: str | None, python: str | None) -> bool:
    """Run it; whether it succeeded."""
    executor = RayExecutor(
        address=address,
        python=python,
        nodes=2,
        ntasks_per_node=2,
        cpus_per_node=1,
        strategy="SPREAD",  # two different nodes, if there are
        launcher="torchrun",
        env_vars={"LOGLEVEL": "WARNING"},  # NeMo-Run sets INFO, and torchrun tells a lot then
    )
    with run.Experiment("torchrun-two-nodes", executor=executor) as experiment:
        experiment.add(run.Partial(train, epochs=5), name="train", tail_logs=True)
        experiment.run()
    return experiment.status(return_dict=True)["train"]["status"].name == "SUCCEEDED"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="dashboard of a cluster that exists")
    parser.add_argument("--python", help="the cluster's interpreter")
    given = parser.parse_args()
    sys.exit(not main(given.address, given.python))
