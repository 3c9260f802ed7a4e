"""Programs that learn in other ways: on graphs, by playing, layer by layer, to learn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from programs.generative import numbers
from programs.language import words
from programs.running import Learned, program


class GraphConv(nn.Module):
    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return torch.mm(adj, torch.mm(x, self.kernel)) + self.bias


class GCN(nn.Module):
    """After pytorch/examples/gcn."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1 = GraphConv(4, 8)
        self.gc2 = GraphConv(8, 3)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, adj))
        return F.log_softmax(self.gc2(x, adj), dim=1)


class Graph(NamedTuple):
    features: Tensor
    adj: Tensor
    target: Tensor
    idx_train: Tensor


def graph() -> Graph:
    adj = (numbers(9, 9).abs() < 0.4).to(torch.get_default_dtype()) + torch.eye(9)
    adj = (adj + adj.T) / (adj + adj.T).sum(1, keepdim=True)
    return Graph(numbers(9, 4, seed=4), adj, words(9, high=3), torch.tensor([0, 2, 3, 5, 7]))


def train_gcn(strategy: Any, batches: Any) -> Learned:
    with strategy.scope():
        model = GCN()
        optimizer = Adam(model.parameters(), lr=0.05, weight_decay=5e-4)

    def step(data: Graph) -> None:
        optimizer.zero_grad()
        output = model(data.features, data.adj)
        loss = F.nll_loss(output[data.idx_train], data.target[data.idx_train])
        loss.backward()
        optimizer.step()

    for batch in batches:
        strategy.run(step, args=(batch,))
    return model.state_dict()


def split_of_nodes(batch: Graph, num_replicas: int) -> list[Graph]:
    """Every replica sees the whole graph, and a part of the nodes whose classes are known."""
    return [batch._replace(idx_train=part) for part in batch.idx_train.tensor_split(num_replicas)]


@program()
def gcn(strategy: Any) -> Learned:
    options = uo.InputOptions(split=split_of_nodes, count_samples=lambda g: len(g.idx_train))
    batches = strategy.experimental_distribute_dataset([graph()] * 3, options)
    return train_gcn(strategy, batches)


class Policy(nn.Module):
    """After pytorch/examples/reinforcement_learning: it keeps what happened in an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(3, 8)
        self.action_head = nn.Linear(8, 2)
        self.value_head = nn.Linear(8, 1)
        self.saved_actions: list[tuple[Tensor, Tensor]] = []
        self.rewards: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


@program()
def actor_critic(strategy: Any) -> Learned:
    """A batch is some episodes: where each begins, and what its actions are drawn by."""
    with strategy.scope():
        model = Policy()
        optimizer = Adam(model.parameters(), lr=3e-2)

    def select_action(state: Tensor, draw: Tensor) -> Tensor:
        probs, state_value = model(state)
        action: Tensor = (draw > probs[0]).long()
        model.saved_actions.append((probs[action].log(), state_value))
        return action

    def finish_episode() -> Tensor:
        returns: list[Tensor] = []
        r = torch.tensor(0.0)
        for reward in model.rewards[::-1]:
            r = reward + 0.99 * r
            returns.insert(0, r)
        standard = torch.stack(returns)
        standard = (standard - standard.mean()) / (standard.std() + 1e-6)
        policy_losses, value_losses = [], []
        for (log_prob, value), expected in zip(model.saved_actions, standard, strict=True):
            policy_losses.append(-log_prob * (expected - value.item()))
            value_losses.append(F.smooth_l1_loss(value, expected[None]))
        del model.rewards[:]
        del model.saved_actions[:]
        return torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()

    def step(beginnings: Tensor, draws: Tensor) -> None:
        optimizer.zero_grad()
        losses = []
        for state, draws_of_episode in zip(beginnings, draws, strict=True):
            for draw in draws_of_episode:
                action = select_action(state, draw)
                model.rewards.append(-(state**2).sum() + action)
                state = state * 0.9 + (0.2 if action == 1 else -0.1)
            losses.append(finish_episode())
        torch.stack(losses).mean().backward()
        optimizer.step()

    dataset = TensorDataset(numbers(6, 3), numbers(6, 5, seed=4).sigmoid())
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return model.state_dict()


class Layer(nn.Linear):
    """After pytorch/examples/mnist_forward_forward: a layer with its own optimizer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.relu = nn.ReLU()
        self.opt = Adam(self.parameters(), lr=3e-2)
        self.threshold = 2.0
        self.num_epochs = 2

    def forward(self, x: Tensor) -> Tensor:
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        out: Tensor = self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))
        return out

    def train(self, x_pos: Any = True, x_neg: Any = None) -> Any:
        if x_neg is None:
            return super().train(x_pos)
        for _ in range(self.num_epochs):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(
                1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))
            ).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(nn.Module):
    """Its layers are in a plain list, so they are none of its modules."""

    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        for d in range(len(dims) - 1):
            self.layers += [Layer(dims[d], dims[d + 1])]

    def train_net(self, x_pos: Tensor, x_neg: Tensor) -> None:
        for layer in self.layers:
            x_pos, x_neg = layer.train(x_pos, x_neg)


@program()
def forward_forward(strategy: Any) -> Learned:
    with strategy.scope():
        net = Net([6, 8, 8])

    dataset = TensorDataset(numbers(10, 6), numbers(10, 6, seed=4))
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(net.train_net, args=batch)
    return {
        f"{number}.{name}": tensor
        for number, layer in enumerate(net.layers)
        for name, tensor in layer.state_dict().items()
    }


@program()
def maml(strategy: Any) -> Learned:
    """A batch is some tasks; the gradients of the inner loop are differentiated again."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        meta_optimizer = Adam(model.parameters(), lr=1e-2)

    def adapted(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(model, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: weight - 0.1 * gradient
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        return weights

    def step(amplitudes: Tensor, phases: Tensor) -> None:
        meta_optimizer.zero_grad()
        losses = []
        for amplitude, phase in zip(amplitudes, phases, strict=True):
            x = torch.linspace(-2, 2, 6)[:, None]
            y = amplitude * torch.sin(x + phase)
            weights = adapted(x[::2], y[::2])
            losses.append(F.mse_loss(functional_call(model, weights, (x[1::2],)), y[1::2]))
        torch.stack(losses).mean().backward()
        meta_optimizer.step()

    dataset = TensorDataset(numbers(10), numbers(10, seed=4))
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return model.state_dict()
