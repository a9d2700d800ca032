"""A generative adversarial network: two models, two optimizers, in turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import anybatch as ab

NOISE = 6


def make(cuttable: bool) -> Any:
    """Generator, discriminator, their optimizers, and batches of images and noise."""
    norm = nn.Identity if cuttable else nn.BatchNorm2d
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 16, 4, bias=False), norm(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 16, 3, 1, 1, bias=False), norm(16), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 1, 4, bias=False), nn.Flatten(0),
    )  # fmt: skip
    adam = {"lr": 1e-3, "betas": (0.5, 0.999)}
    return SimpleNamespace(
        generator=generator,
        discriminator=discriminator,
        of_g=torch.optim.Adam(generator.parameters(), **adam),
        of_d=torch.optim.Adam(discriminator.parameters(), **adam),
        criterion=nn.BCEWithLogitsLoss(),
        batches=[(torch.randn(16, 1, 8, 8), torch.randn(16, NOISE, 1, 1)) for _ in range(10)],
        trained=[generator, discriminator],
    )


def by_hand(work: Any) -> None:
    net_g, net_d, criterion = work.generator, work.discriminator, work.criterion
    for real, noise in work.batches:
        net_d.zero_grad()
        output = net_d(real)
        err_real = criterion(output, torch.ones_like(output))
        err_real.backward()
        fake = net_g(noise)
        output = net_d(fake.detach())
        err_fake = criterion(output, torch.zeros_like(output))
        err_fake.backward()
        work.of_d.step()

        net_g.zero_grad()
        output = net_d(net_g(noise))
        err_g = criterion(output, torch.ones_like(output))
        err_g.backward()
        work.of_g.step()


def by_step(work: Any, **options: Any) -> None:
    net_g, net_d, criterion = work.generator, work.discriminator, work.criterion

    def loss_of_d(net_d: Any, batch: Any) -> Tensor:
        real, fake = (net_d(images) for images in batch)
        return criterion(real, torch.ones_like(real)) + criterion(fake, torch.zeros_like(fake))

    def loss_of_g(net_g: Any, noise: Tensor) -> Tensor:
        output = net_d(net_g(noise))
        return criterion(output, torch.ones_like(output))

    step_d = ab.Step(net_d, work.of_d, loss_of_d, **options)
    step_g = ab.Step(net_g, work.of_g, loss_of_g, **options)
    for real, noise in work.batches:
        fake = net_g(noise)
        step_d((real, fake.detach()))
        step_g(noise)
    step_d.close()
    step_g.close()
