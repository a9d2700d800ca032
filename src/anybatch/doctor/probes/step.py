"""Two steps of training on a device, whose result is known to the last bit."""

from __future__ import annotations

from anybatch.doctor.facts import Step

# The loss is linear in the weights, so each step moves them by the rate times the sums of the columns
# of the samples; all numbers are whole, and exact in any format.
_SAMPLES = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
_WEIGHTS = [1.0 - 2 * 0.5 * sum(column) for column in zip(*_SAMPLES, strict=True)]


def look(device: str) -> Step:
    """See `Step`."""
    import torch

    try:
        layer = torch.nn.Linear(4, 3).to(device)
        torch.nn.init.ones_(layer.weight)
        samples = torch.tensor(_SAMPLES, device=device)
        for _ in range(2):  # by hand, since torch's optimizers load its compiler
            loss = layer(samples).sum()
            gradients = torch.autograd.grad(loss, list(layer.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.5)
        image = torch.ones(1, 1, 4, 4, device=device)
        convolved = torch.nn.functional.conv2d(image, torch.ones(1, 1, 3, 3, device=device))
        weights, sums = layer.weight.tolist(), convolved.flatten().tolist()
    except Exception as error:
        return Step(device, f"{type(error).__name__}: {error}".partition("\n")[0])
    if weights != [_WEIGHTS] * 3:
        return Step(device, f"weights came to {_shown(weights[0])}, not to {_shown(_WEIGHTS)}")
    if sums != [9.0] * 4:
        return Step(device, f"a convolution came to {_shown(sums)}, and not to 9 everywhere")
    return Step(device)


def _shown(numbers: list[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)
