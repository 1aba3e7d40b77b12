"""How well a curious server rebuilds a client's images from what really travels, beside the accuracy of such a run.

The attack is gradient inversion of Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients, NeurIPS 2020,
https://arxiv.org/abs/2003.14053: Adam on images whose gradient has the direction of the client's change, with a
penalty on their total variation. It is the server's best case. Each client has one image or eight and makes one step
with all of them (HyperFL: one for the head and one for the rest), and the server knows their labels. It has the weights
that it sent, and what its strategy learns from: after decompression, with the clients' noise, or the mean alone under
secure aggregation. What stays at the client the server guesses, and improves the guess as it goes.

* PSNR (dB) and SSIM of the rebuilt images beside the true ones, a mean over clients. Pixels are between 0 and 1.
  Images of a batch or of a sum are paired in the best way. `blind` is the mean of all digits in place of each image.
* advantage of membership inference (`figures.membership`), a mean over clients: the server puts what it has after the
  last round of an ordinary run in the network, its guess in place of all else, and calls examples with a small loss
  members. The threshold is chosen on the same examples, so that a guess has some advantage, too: that of `blind`.
* accuracy: the mean over clients at the last round of that run, 40 images each.

Without `--measure` it prints the table of `inversion.jsonl`.

    python -m figures.inversion [--measure] [--clients 8] [--steps 800] [--rounds 40] [--seed 0]
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics.functional.image import structural_similarity_index_measure

from figures.membership import losses, threshold
from hyperbloom.client.work.client import Client, client_for
from hyperbloom.common.config import DataConfig, LocalConfig, PrivacyConfig, RunConfig
from hyperbloom.common.models import build
from hyperbloom.server.grids.engine import client_settings, inline_grid
from hyperbloom.server.loop.listener import Listener
from hyperbloom.server.loop.session import Session
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Update

VARIATION = 1e-3
RATE = 0.1


IMAGES = (1, 8)
FOUND = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class Row:
    """A row of the table; `psnr_8` is for eight images in a batch, and so on."""

    label: str
    psnr_1: float
    ssim_1: float
    psnr_8: float
    ssim_8: float
    advantage: float
    accuracy: float | None


def read() -> list[Row]:
    """Return the rows that were measured."""
    return [Row(**json.loads(line)) for line in FOUND.read_text().splitlines()]


@dataclass(frozen=True)
class Case:
    """A strategy with what protects it."""

    label: str
    strategy: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _noise(times: float) -> dict[str, Any]:
    return {"privacy": PrivacyConfig(where="client", noise=times)}


CASES = (
    Case("fedavg", "fedavg"),
    Case("pfedhn", "pfedhn"),
    Case("pfedhn-pc, head at the client", "pfedhn-pc"),
    Case("hyperfl, embedding and head at the client", "hyperfl"),
    Case("hyperfl, masks: the mean of all clients", "hyperfl", {"secure_aggregation": True}),
    Case("hyperfl, noise 0.03 at clients", "hyperfl", _noise(0.03)),
    Case("fedavg, int8", "fedavg", {"compression": "int8"}),
    Case("fedavg, top-k:0.05", "fedavg", {"compression": "top-k:0.05"}),
    Case("pfedhn, noise 0.03 at clients", "pfedhn", _noise(0.03)),
    Case("pfedhn, noise 0.3 at clients", "pfedhn", _noise(0.3)),
    Case("fedavg, masks: the mean of all clients", "fedavg", {"secure_aggregation": True}),
)


class Spy(Listener):
    """Keeps what the strategy of a run is given to learn from in its first and in its last round."""

    def phase(self, strategy: Algorithm, name: str) -> None:
        """Listen at its `learn`."""
        self.strategy, self.updates, self.last = strategy, list[Update](), list[Update]()
        learn: Callable[[Sequence[Update]], None] = strategy.learn

        def overheard(updates: Sequence[Update]) -> None:
            self.updates, self.last = self.updates or list(updates), list(updates)
            learn(updates)

        strategy.keeps_sent = True
        strategy.learn = overheard  # type: ignore[method-assign]


def gradient_of(module: nn.Module, parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradients of the loss on a batch by all parameters, in their order, with their graph."""
    loss = F.cross_entropy(functional_call(module, parameters, (inputs,)), labels)
    return list(torch.autograd.grad(loss, list(parameters.values()), create_graph=True))


def invert(
    module: nn.Module,
    known: dict[str, Tensor],
    target: dict[str, Tensor],
    labels: Tensor,
    shape: Sequence[int],
    steps: int,
) -> Tensor:
    """Return images `(N, *shape)` whose gradient has the direction of `target`.

    Args:
        module: the target network; its own weights are the first guess where none are known.
        known: the weights that were sent; the attacker guesses all others.
        target: the gradient that a client's change shows, for each of these.
        labels: `(N,)` of the images.
        shape: of an image.
        steps: of Adam.
    """
    parameters = {
        name: known[name] if name in known else value.detach().clone() for name, value in module.named_parameters()
    }
    parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    images = torch.randn(len(labels), *shape, requires_grad=True)
    guessed = [value for name, value in parameters.items() if name not in known]
    optimizer = torch.optim.Adam([images, *guessed], lr=RATE)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * at // 8 for at in (3, 5, 7)], 0.1)
    wanted = torch.cat([target[name].flatten() for name in known])
    for _ in range(steps):
        optimizer.zero_grad()
        found = dict(zip(parameters, gradient_of(module, parameters, images, labels), strict=True))
        shown = torch.cat([found[name].flatten() for name in known])
        flat = images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()
        (1 - F.cosine_similarity(shown, wanted, dim=0) + VARIATION * flat).backward()
        images.grad = images.grad.sign() if images.grad is not None else None
        optimizer.step()
        schedule.step()
    return images.detach()


def likeness(rebuilt: Tensor, true: Tensor) -> tuple[float, float]:
    """Return PSNR and SSIM of images `(N, C, H, W)` between 0 and 1, paired so that the errors are smallest."""
    errors = ((rebuilt[:, None] - true[None]) ** 2).flatten(2).mean(2)
    rows, columns = linear_sum_assignment(errors.numpy())
    psnr = (-10 * errors[rows, columns].clamp_min(1e-6).log10()).mean()
    pair = (rebuilt[rows], true[columns])
    ssim = structural_similarity_index_measure(*pair, gaussian_kernel=False, kernel_size=7, data_range=1.0)
    assert isinstance(ssim, Tensor)
    return float(psnr), float(ssim)


def _config(case: Case, clients: int, seed: int, **changes: Any) -> RunConfig:
    values = {
        "clients": clients,
        "cohort": clients,
        "checkpoint_every": 0,
        "model": "mlp",
        "seed": seed,
        "gains": False,
        "options": {"start": "hypernetwork"} if case.strategy.startswith("pfedhn") else {},
    }
    return RunConfig(strategy=case.strategy, **values | dict(case.settings) | changes)


def attack(case: Case, clients: int, images: int, steps: int, seed: int) -> tuple[float, float]:
    """Play one round in which each client makes one step with all its images; return PSNR and SSIM."""
    client_for.cache_clear()
    steps_each = 2 if case.strategy == "hyperfl" else 1
    local = LocalConfig(steps=steps_each, batch_size=images, learning_rate=0.01, momentum=0.0, weight_decay=0.0)
    data = DataConfig(split="iid", max_train=images)
    config = _config(case, clients, seed, rounds=1, eval_every=1, local=local, data=data)
    spy = Spy()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Session(config, inline_grid(config, folder), "inversion", [spy]).run()
        workers = [client_for(client_settings(config, index, folder)) for index in range(clients)]
    batches = [(_pixels(each, each.train_data.inputs), each.train_data.labels) for each in workers]
    if config.secure_aggregation:  # everybody's mean, as if it were one client with all images
        whole = torch.cat([pixels for pixels, _ in batches]), torch.cat([labels for _, labels in batches])
        pairs = [(spy.updates[0], whole)]
    else:
        pairs = list(zip(spy.updates, batches, strict=True))
    found = []
    torch.manual_seed(seed)
    module = build(spy.strategy.setting.spec)
    for update, (pixels, labels) in pairs:
        assert update.layout is not None and update.sent is not None and update.returned is not None
        known = update.layout.views(update.sent)
        change = update.returned - update.sent if spy.strategy.reply == "weights" else update.returned
        target = update.layout.views(-change)
        rebuilt = invert(module, known, target, labels, workers[0].train_data.inputs.shape[1:], steps)
        found.append(likeness(_pixels(workers[0], rebuilt), pixels))
    psnr, ssim = (statistics.fmean(column) for column in zip(*found, strict=True))
    return psnr, ssim


def _pixels(worker: Client, inputs: Tensor) -> Tensor:
    """Return inputs before their normalisation, between 0 and 1."""
    scaling = worker.scaling
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (scaling.mean, scaling.std))
    return (inputs * std + mean).clamp(0, 1)


def blind(clients: int, images: int, seed: int) -> tuple[float, float]:
    """Return PSNR and SSIM of the mean digit: what is known without an attack."""
    client_for.cache_clear()
    config = _config(CASES[0], clients, seed, data=DataConfig(split="iid", max_train=images))
    with tempfile.TemporaryDirectory() as name:
        workers = [client_for(client_settings(config, index, Path(name))) for index in range(clients)]
    mean = torch.cat([_pixels(each, each.test_data.inputs) for each in workers]).mean(0)
    true = [_pixels(each, each.train_data.inputs) for each in workers]
    found = [likeness(mean.expand_as(each), each) for each in true]
    psnr, ssim = (statistics.fmean(column) for column in zip(*found, strict=True))
    return psnr, ssim


def membership(case: Case, clients: int, rounds: int, seed: int) -> tuple[float, float, float]:
    """Return the advantage of a threshold on losses after a run, without anything but a guess, and the accuracy (%)."""
    client_for.cache_clear()
    usual = {
        "local": LocalConfig(learning_rate=0.05, schedule="constant"),
        "data": DataConfig(split="iid", max_train=40),
    }
    config = _config(case, clients, seed, rounds=rounds, eval_every=rounds, **usual)
    spy = Spy()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (selection,) = Session(config, inline_grid(config, folder), "membership", [spy]).run().values()
        workers = [client_for(client_settings(config, index, folder)) for index in range(clients)]
    torch.manual_seed(seed)
    module = build(spy.strategy.setting.spec)
    guess = {name: value.detach() for name, value in module.named_parameters()}
    found, guessed = [], []
    for update, worker in zip(spy.last, workers, strict=True):
        assert update.layout is not None and update.sent is not None and update.returned is not None
        values = update.returned + (0 if spy.strategy.reply == "weights" else update.sent)
        for row, parameters in ((found, guess | update.layout.views(values)), (guessed, guess)):
            members, others = (losses(module, parameters, part)[0] for part in (worker.train_data, worker.test_data))
            row.append(threshold(members, others)[1])
    return statistics.fmean(found), statistics.fmean(guessed), selection.metrics["test_mean"]


def play(case: Case, clients: int, steps: int, rounds: int, seed: int) -> Row:
    """Return a row of the table."""
    shown = [attack(case, clients, images, steps, seed) for images in IMAGES]
    advantage, _, accuracy = membership(case, clients, rounds, seed)
    return Row(case.label, *shown[0], *shown[1], advantage, accuracy)


def table(rows: Sequence[Row]) -> str:
    """Return the table of the page."""
    head = "| what travels | PSNR, SSIM of 1 image | of 8 images | membership advantage | accuracy |\n|" + "---|" * 5
    cells = [
        f"| {row.label} | {row.psnr_1:.1f}, {row.ssim_1:.3f} | {row.psnr_8:.1f}, {row.ssim_8:.3f} | "
        f"{row.advantage:.3f} | {'' if row.accuracy is None else f'{row.accuracy:.1f} '}|"
        for row in rows
    ]
    return "\n".join([head, *cells])


def measure(clients: int, steps: int, rounds: int, seed: int) -> None:
    """Play the cases that are not in `inversion.jsonl` yet."""
    FOUND.touch()
    known = {row.label for row in read()}
    for case in (*CASES, None):
        if (case.label if case else "blind") in known:
            continue
        if case:
            row = play(case, clients, steps, rounds, seed)
        else:
            unseen = [blind(clients, images, seed) for images in IMAGES]
            row = Row("blind", *unseen[0], *unseen[1], membership(CASES[0], clients, rounds, seed)[1], None)
        with FOUND.open("a") as file:
            file.write(f"{json.dumps(asdict(row))}\n")


TABLES = {"table": lambda: table(read())}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("clients", 8), ("steps", 800), ("rounds", 40), ("seed", 0)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--measure", action="store_true", help=f"first measure what {FOUND.name} does not have")
    args = vars(parser.parse_args())
    torch.set_num_threads(1)
    if args.pop("measure"):
        measure(**args)
    print(table(read()))
