"""FairMT in a plain PyTorch loop: group gaps before and after, on a problem where the truth is known.

    python examples/planted.py

A minority's labels can be read off the inputs as well as anyone's, but only by a direction that is learned late; a
plain mean of the losses leaves the minority behind (see fairmt.data.planted). The two runs differ in the loss alone.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import fairmt
from fairmt.data import Planted, planted

EPOCHS = 40
WIDTH = 64


class Network(nn.Module):
    """One encoder, one linear head a task."""

    def __init__(self, problem: Planted) -> None:
        super().__init__()
        inputs = problem.inputs.shape[1]
        self.encoder = nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.heads = nn.ModuleDict({"signs": nn.Linear(WIDTH, 3), "kind": nn.Linear(WIDTH, 4)})
        self.heads.update({"level": nn.Linear(WIDTH, 1), "pace": nn.Linear(WIDTH, 1)})

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.encoder(inputs)
        return features, {name: head(features) for name, head in self.heads.items()}


def train(people: Planted, fair: bool) -> Network:
    torch.manual_seed(0)
    network = Network(people)
    if fair:
        criterion = fairmt.FairMT(people.tasks, people.groups, heads=network.heads)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    batches = range(0, len(people), 256)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    for epoch in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(people)), 256):
            batch = people.take(rows)
            features, logits = network(batch.inputs)
            if fair:
                loss = criterion(features, logits, batch.labels, batch.members)
            else:
                loss = plain_loss(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if (epoch + 1) % 10 == 0:
            name = "FairMT" if fair else "plain"
            print(f"  {name:7} epoch {epoch + 1:2} of {EPOCHS}   loss {loss.item():.3f}", flush=True)
    return network


def plain_loss(logits: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> Tensor:
    """The mean of the tasks' losses."""
    signs = nn.functional.binary_cross_entropy_with_logits(logits["signs"], labels["signs"].float()) * 3
    kind = nn.functional.cross_entropy(logits["kind"], labels["kind"].long())
    numbers = [nn.functional.mse_loss(logits[name].squeeze(1), labels[name]) for name in ("level", "pace")]
    return (signs + kind + numbers[0] + numbers[1]) / 6


@torch.no_grad()
def rates(network: Network, people: Planted) -> dict[str, list[float]]:
    """For each group: true and false positive rate (mean of the three signs), accuracies, and mean errors, in %."""
    _, logits = network(people.inputs)
    says_yes, yes = logits["signs"] > 0, people.labels["signs"] == 1
    right = logits["kind"].argmax(1) == people.labels["kind"]
    table: dict[str, list[float]] = {}
    for number, name in enumerate(("majority", "minority")):
        own = people.members["group"] == number
        tpr = sum((says_yes & yes)[own, k].sum() / yes[own, k].sum() for k in range(3)) / 3
        fpr = sum((says_yes & ~yes)[own, k].sum() / (~yes)[own, k].sum() for k in range(3)) / 3
        errors = [(logits[t].squeeze(1) - people.labels[t])[own].abs().mean() for t in ("level", "pace")]
        values = (tpr, fpr, (says_yes == yes)[own].float().mean(), right[own].float().mean(), *errors)
        table[name] = [100 * float(value) for value in values]
    return table


def main() -> None:
    torch.set_num_threads(1)
    people, others = planted(8_000, seed=0), planted(20_000, seed=1)
    print(f"training on {len(people)} people, {people.members['group'].float().mean():.0%} of them the minority")
    networks = {"plain": train(people, fair=False), "FairMT": train(people, fair=True)}
    print(f"\n{'on 20,000 others, in %':24}{'TPR':>8}{'FPR':>8}{'signs':>8}{'kind':>8}{'|level|':>9}{'|pace|':>8}")
    for name, network in networks.items():
        table = rates(network, others)
        for group, values in table.items():
            print(f"{name:8}{group:16}" + "".join(f"{v:8.1f}" for v in values))
        gap = [abs(a - b) for a, b in zip(*table.values(), strict=True)]
        print(f"{name:8}{'gap':16}" + "".join(f"{v:8.1f}" for v in gap) + "\n")


if __name__ == "__main__":
    main()
