"""Programs that look at images."""

from __future__ import annotations

import copy
from typing import Any

import torch
from on_replica import replica as context
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from programs.generative import numbers, prefixed
from programs.language import words
from programs.running import Learned, program, refused


class SiameseNetwork(nn.Module):
    """After pytorch/examples/siamese_network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(24, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
        self.sigmoid = nn.Sigmoid()
        self.body.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        output = torch.cat((self.body(input1), self.body(input2)), 1)
        scores: Tensor = self.sigmoid(self.fc(output))
        return scores


@program()
def siamese_network(strategy: Any) -> Learned:
    with strategy.scope():
        model = SiameseNetwork()
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        criterion = nn.BCELoss()

    def step(images_1: Tensor, images_2: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze(1)
        loss: Tensor = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    targets = words(10, high=2).to(torch.get_default_dtype())
    dataset = TensorDataset(numbers(10, 1, 4, 4), numbers(10, 1, 4, 4, seed=4), targets)
    batches = strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    losses = []
    for _ in range(2):
        for batch in batches:
            losses.append(strategy.reduce("MEAN", strategy.run(step, args=batch)))
        scheduler.step()
    return {**model.state_dict(), "losses": torch.stack(losses)}


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


class AverageMeter:
    """Computes and stores the average, as in pytorch/examples/imagenet."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, val: float, n: int) -> None:
        self.sum += val * n
        self.count += n

    @property
    def avg(self) -> Tensor:
        return torch.tensor(self.sum / self.count)


@program(synchronize_batch_norm=True)
def imagenet(strategy: Any) -> Learned:
    """Trains with batch normalization over the batches of all replicas, and validates."""
    with strategy.scope():
        model = convolutions()
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def train_step(images: Tensor, target: Tensor) -> Tensor:
        output = model(images)
        loss: Tensor = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def validate_step(images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = model(images)
        is_right = (output.argmax(1) == target).double()
        return criterion(output, target), is_right

    dataset = TensorDataset(numbers(10, 1, 5, 5), words(10, high=3))
    loader = strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    learned: Learned = {}
    for epoch in range(2):
        losses, top1 = AverageMeter(), AverageMeter()
        model.train()
        for batch, size in zip(loader, (4, 4, 2), strict=True):
            loss = strategy.reduce("MEAN", strategy.run(train_step, args=batch))
            losses.update(loss.item(), size)
        model.eval()
        for batch, size in zip(loader, (4, 4, 2), strict=True):
            loss, is_right = strategy.run(validate_step, args=batch)
            losses.update(strategy.reduce("MEAN", loss).item(), size)
            top1.update(strategy.reduce("MEAN", is_right, axis=0).item(), size)
        scheduler.step()
        learned |= {f"losses {epoch}": losses.avg, f"top1 {epoch}": top1.avg}
    return {**model.state_dict(), **learned}


@program()
def contrastive(strategy: Any) -> Learned:
    """Separates every image from those of all replicas, as in SimCLR and CLIP."""
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        temperature = nn.Parameter(torch.tensor(0.5))
        model.register_parameter("temperature", temperature)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(view_1: Tensor, view_2: Tensor, number: Tensor) -> Tensor:
        optimizer.zero_grad()
        z_1, z_2 = F.normalize(model(view_1)), F.normalize(model(view_2))
        everybody = context().all_gather(z_2, 0)
        numbers_of_all = context().all_gather(number, 0)
        logits = z_1 @ everybody.T / model.temperature
        target = (numbers_of_all[None] == number[:, None]).double().argmax(1)
        loss = F.cross_entropy(logits, target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = TensorDataset(numbers(10, 1, 4, 4), numbers(10, 1, 4, 4, seed=4), torch.arange(10))
    losses = [
        strategy.reduce("MEAN", strategy.run(step, args=batch))
        for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    ]
    return {**model.state_dict(), "losses": torch.stack(losses)}


def train_mean_teacher(strategy: Any, update_teacher: Any) -> Learned:
    with strategy.scope():
        student = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.3)

    def step(images: Tensor, noisy: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(images)
        loss = F.cross_entropy(student(images), target) + F.mse_loss(student(noisy), wanted)
        loss.backward()
        optimizer.step()
        update_teacher(student, teacher)

    dataset = TensorDataset(numbers(10, 1, 4, 4), numbers(10, 1, 4, 4, seed=4), words(10, high=3))
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return prefixed(student=student, teacher=teacher)


def update_ema(student: nn.Module, teacher: nn.Module) -> None:
    with torch.no_grad():
        for ema, param in zip(teacher.parameters(), student.parameters(), strict=True):
            ema.mul_(0.9).add_(param, alpha=0.1)


@program()
def mean_teacher(strategy: Any) -> Learned:
    """A teacher that is a moving average of the student."""

    def update(student: nn.Module, teacher: nn.Module) -> None:
        uo.once(update_ema, student, teacher)

    return train_mean_teacher(strategy, update)


@refused(uo.errors.ContextError, "1.weight", "unisono.once")
def mean_teacher_by_hand(strategy: Any) -> Learned:
    return train_mean_teacher(strategy, update_ema)


@program()
def averaged_model(strategy: Any) -> Learned:
    """torch's own average is updated once for all replicas, by itself."""
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
        ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(images: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), target).backward()
        optimizer.step()
        ema_model.update_parameters(model)

    dataset = TensorDataset(numbers(10, 1, 4, 4), words(10, high=3))
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return prefixed(model=model, ema=ema_model)


class Quantized(nn.Module):
    """After torch's tutorial of eager quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = torch.ao.quantization.QuantStub()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(36, 3)
        self.dequant = torch.ao.quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        scores: Tensor = self.dequant(self.fc(x.flatten(1)))
        return scores

    def fuse_model(self) -> None:
        parts = [["conv", "bn", "relu"]]
        torch.ao.quantization.fuse_modules_qat(self, parts, inplace=True)


@program(tolerance=1e-5, dtype=torch.float32)
def quantization_aware_training(strategy: Any) -> Learned:
    """Observers and batch statistics are frozen after the first batch, as the tutorial says."""
    quantization: Any = torch.ao.quantization
    images, target = numbers(10, 1, 5, 5), words(10, high=3)
    with strategy.scope():
        model = Quantized()
        model.train()
        model.fuse_model()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(images)
    model.apply(quantization.disable_observer)
    model.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    dataset = TensorDataset(images, target)
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
