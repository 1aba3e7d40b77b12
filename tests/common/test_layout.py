"""Where each parameter lies in the flat vector."""

import torch
from torch import nn

from hyperbloom.common.layout import Layout

THREE = Layout((("a", (2, 3)), ("b", ()), ("c", (0, 4)), ("d", (4,))))


def test_sizes_add_up_and_a_scalar_counts_one() -> None:
    assert THREE.sizes == (6, 1, 0, 4)
    assert THREE.numel == 11
    assert Layout(()).numel == 0


def test_slices_are_contiguous_in_order() -> None:
    assert list(THREE.slices()) == [
        ("a", slice(0, 6), (2, 3)),
        ("b", slice(6, 7), ()),
        ("c", slice(7, 7), (0, 4)),
        ("d", slice(7, 11), (4,)),
    ]


def test_views_show_the_vector_and_write_to_it() -> None:
    flat = torch.arange(11.0)
    views = THREE.views(flat)
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert views["b"].item() == 6
    views["d"][1] = -1
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1, 9, 10]


def test_flatten_is_the_inverse_of_views_and_copies() -> None:
    flat = torch.arange(11.0)
    again = THREE.flatten(THREE.views(flat))
    assert torch.equal(again, flat)
    again.zero_()
    assert flat.sum() == 55


def test_flatten_follows_the_layout_not_the_mapping() -> None:
    tensors = {"y": torch.tensor([3.0, 4.0]), "x": torch.tensor([[1.0], [2.0]], requires_grad=True)}
    flat = Layout((("x", (2, 1)), ("y", (2,)))).flatten(tensors)
    assert flat.tolist() == [1, 2, 3, 4]
    assert not flat.requires_grad


def test_a_module_is_laid_out_as_it_was_built() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
    shapes = (("0.weight", (2, 3)), ("0.bias", (2,)), ("1.weight", (2,)), ("1.bias", (2,)), ("2.weight", (1, 2)))
    assert Layout.of(module).shapes == shapes  # parameters only: buffers neither travel nor are generated


def test_the_digest_depends_on_names_shapes_and_order() -> None:
    a, b = ("a", (2, 3)), ("b", (3,))
    digests = [Layout(shapes).digest for shapes in ((a, b), (b, a), (("x", (2, 3)), b), (("a", (3, 2)), b), (a,))]
    assert len(set(digests)) == len(digests)
    assert Layout((a, b)).digest == digests[0]
    assert digests[0] == "6ce7401b7043efad"  # stored beside personal classifiers: it must not change
