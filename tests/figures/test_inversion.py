"""Gradient inversion: right where the answer is known, good where nothing protects, blind behind noise."""

import pytest
import torch

from figures.inversion import CASES, attack, blind, gradient_of, invert, likeness, membership


def test_likeness_is_right_where_the_answer_is_known_and_pairs_images() -> None:
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert likeness(images.flip(0), images) == pytest.approx((60.0, 1.0))
    assert likeness((images + 0.1).flip(0), images)[0] == pytest.approx(20.0, abs=1e-3)


def test_the_input_of_a_linear_layer_is_in_its_gradient() -> None:
    """d loss / d W is the outer product of d loss / d b and the input, so its direction decides the input."""
    torch.manual_seed(0)
    module, image = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), torch.rand(1, 1, 8, 8)
    weights, label = dict(module.named_parameters()), torch.tensor([1])
    target = {
        name: each.detach() for name, each in zip(weights, gradient_of(module, weights, image, label), strict=True)
    }
    known = {name: value.detach() for name, value in weights.items()}
    rebuilt = invert(module, known, target, label, (1, 8, 8), 300)
    assert likeness(rebuilt.clamp(0, 1), image)[0] > 25


def test_a_server_sees_images_in_changes_and_not_through_noise() -> None:
    cases = {case.label: case for case in CASES}
    guess = blind(2, 1, 0)[0]
    open_ = attack(cases["pfedhn"], 2, 1, 150, 0)[0]
    hidden = attack(cases["pfedhn, noise 0.3 at clients"], 2, 1, 150, 0)[0]
    assert open_ > guess + 10 > guess > hidden


def test_a_server_finds_members_of_who_sent_all_and_not_by_a_guess() -> None:
    cases = {case.label: case for case in CASES}
    found, guessed, accuracy = membership(cases["fedavg"], 2, 15, 0)
    assert found > guessed and accuracy > 60
    hidden, _, _ = membership(cases["hyperfl, embedding and head at the client"], 2, 5, 0)
    assert hidden < found
