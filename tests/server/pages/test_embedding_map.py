"""Embeddings in a plane."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.decomposition import PCA

from hyperbloom.common.errors import ConfigError
from hyperbloom.server.pages.embedding_map import FEWEST, MOST, flatten_by_pca, flatten_by_tsne, read_embeddings


def test_principal_components_are_those_of_scikit_learn() -> None:
    embeddings = np.random.default_rng(0).normal(size=(30, 6)) * np.arange(1, 7)
    points, axes = flatten_by_pca(embeddings)
    pca = PCA(2)
    expected = pca.fit_transform(embeddings)
    np.testing.assert_allclose(np.abs(points), np.abs(expected), atol=1e-10)
    first, second = 100 * pca.explained_variance_ratio_
    assert axes == (f"{first:.0f} % of the variance →", f"↑ {second:.0f} %")


def test_one_dimension_and_no_spread_are_points_too() -> None:
    points, axes = flatten_by_pca(np.array([[1.0], [3.0]]))
    np.testing.assert_allclose(sorted(points[:, 0]), [-1.0, 1.0])
    assert (points[:, 1].tolist(), axes) == ([0.0, 0.0], ("100 % of the variance →", "↑ 0 %"))
    points, axes = flatten_by_pca(np.ones((3, 2)))
    assert np.abs(points).max() == 0 and axes == ("0 % of the variance →", "↑ 0 %")


def test_neighbours_stay_neighbours_in_tsne_the_same_every_time() -> None:
    generator = np.random.default_rng(0)
    embeddings = np.concatenate([generator.normal(size=(10, 5)), 30 + generator.normal(size=(10, 5))])
    points = flatten_by_tsne(embeddings)
    assert points is not None
    distances = np.linalg.norm(points[:, None] - points[None], axis=2) + 1e9 * np.eye(20)
    assert all((nearest < 10) == (index < 10) for index, nearest in enumerate(distances.argmin(axis=1)))
    again = flatten_by_tsne(embeddings)
    assert again is not None and np.array_equal(points, again)


def test_too_few_or_too_many_have_no_tsne() -> None:
    assert flatten_by_tsne(np.zeros((FEWEST - 1, 3))) is None
    assert flatten_by_tsne(np.zeros((MOST + 1, 3))) is None


@pytest.mark.parametrize("spread", [0.0, 1e-25])
def test_equal_points_have_no_tsne(spread: float) -> None:
    """scikit-learn divides by their variance, and its tree of the results then ends the process."""
    points = spread * np.random.default_rng(0).normal(size=(100, 26))
    assert flatten_by_tsne(points) is None


def test_embeddings_are_read_where_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "hypernetwork.safetensors"
    assert read_embeddings(path) is None
    save_file({"w": torch.ones(2)}, path)
    assert read_embeddings(path) is None
    save_file({"embeddings": torch.tensor([[1.0, 2.0]])}, path)
    found = read_embeddings(path)
    assert found is not None and found.tolist() == [[1.0, 2.0]]
    path.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is damaged"):
        read_embeddings(path)
