"""Programs that learn to make samples, after pytorch/examples and others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from programs.running import Learned, program


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(12, 8)
        self.fc21 = nn.Linear(8, 3)
        self.fc22 = nn.Linear(8, 3)
        self.fc3 = nn.Linear(3, 8)
        self.fc4 = nn.Linear(8, 12)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor, eps: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 12))
        z = self.reparameterize(mu, logvar, eps)
        return self.decode(z), mu, logvar


@program(reduce_gradients="SUM")
def vae(strategy: Any) -> Learned:
    """Its loss is a sum over samples, so gradients are summed. The noise is a part of the data."""
    with strategy.scope():
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 12), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    def step(data: Tensor, eps: Tensor) -> Tensor:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data, eps)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = TensorDataset(torch.sigmoid(numbers(10, 3, 4)), numbers(10, 3, seed=4))
    batches = strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    train_loss = torch.tensor(0.0)
    for _ in range(2):
        for batch in batches:
            train_loss += strategy.reduce("SUM", strategy.run(step, args=batch))
    return {**model.state_dict(), "train_loss": train_loss}


def weights_init(module: nn.Module) -> None:
    classname = module.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(module.weight, 0.0, 0.2)  # type: ignore[arg-type]
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(module.weight, 1.0, 0.2)  # type: ignore[arg-type]
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]


def generator() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(5, 4, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 1, 2, 2, bias=False),
        nn.Tanh(),
    )


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 1, 2, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


@program(synchronize_batch_norm=True)
def dcgan(strategy: Any) -> Learned:
    with strategy.scope():
        net_g, net_d = generator(), discriminator()
        net_g.apply(weights_init)
        net_d.apply(weights_init)
        criterion = nn.BCELoss()
        optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
        optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def step(real: Tensor, noise: Tensor) -> None:
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        net_d.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        criterion(net_d(real), label).backward()
        fake = net_g(noise)
        label.fill_(0.0)
        criterion(net_d(fake.detach()), label).backward()
        optimizer_d.step()
        # (2) Update G network: maximize log(D(G(z)))
        net_g.zero_grad()
        label.fill_(1.0)
        criterion(net_d(fake), label).backward()
        optimizer_g.step()

    dataset = TensorDataset(numbers(10, 1, 4, 4), numbers(10, 5, 1, 1, seed=4))
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return prefixed(g=net_g, d=net_d)


def prefixed(**modules: nn.Module) -> Learned:
    return {f"{k}.{name}": t for k, m in modules.items() for name, t in m.state_dict().items()}


@program()
def wgan_gp(strategy: Any) -> Learned:
    """The penalty is a gradient with respect to the input, and is differentiated again."""
    with strategy.scope():
        critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.0, 0.9))
        optimizer_m = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.0, 0.9))

    def gradient_penalty(real: Tensor, fake: Tensor, alpha: Tensor) -> Tensor:
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = critic(interpolates)
        (gradients,) = torch.autograd.grad(
            outputs=scores,
            inputs=interpolates,
            grad_outputs=torch.ones_like(scores),
            create_graph=True,
            retain_graph=True,
        )
        penalty: Tensor = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        return penalty

    def step(real: Tensor, noise: Tensor, alpha: Tensor) -> None:
        optimizer_c.zero_grad()
        fake = maker(noise).detach()
        penalty = gradient_penalty(real, fake, alpha)
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer_c.step()
        optimizer_m.zero_grad()
        (-critic(maker(noise)).mean()).backward()
        optimizer_m.step()

    dataset = TensorDataset(
        numbers(10, 6), numbers(10, 3, seed=4), numbers(10, 1, seed=5).sigmoid()
    )
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return prefixed(critic=critic, maker=maker)
