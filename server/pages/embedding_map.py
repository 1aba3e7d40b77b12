"""The clients in the space of their embeddings, shown in a plane by PCA and by t-SNE (figure 4 of pFedHN)."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from hyperbloom.common.errors import ConfigError

FEWEST = 10
"""Fewest clients for t-SNE, which preserves neighbourhoods."""
MOST = 1_000
"""Most clients for t-SNE, which takes many seconds for more."""

Points = npt.NDArray[np.float64]


def read_embeddings(path: Path) -> Points | None:
    """Return the embeddings `(clients, k)` in a server's state, None without finite ones; ConfigError for damage."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            found = np.asarray(file.get_tensor("embeddings") if "embeddings" in file.keys() else np.nan)  # noqa: SIM118
            return found.astype(np.float64) if np.isfinite(found).all() else None
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error})") from None


def flatten_by_pca(embeddings: Points) -> tuple[Points, tuple[str, str]]:
    """Return the first two principal components `(clients, 2)`, and a label of each with its share of the variance."""
    centred = embeddings - embeddings.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    points = (left * sizes)[:, :2]
    if points.shape[1] < 2:
        points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    shares = [*(100 * sizes**2 / max(float((sizes**2).sum()), 1e-30)), 0.0, 0.0]
    return points, (f"{shares[0]:.0f} % of the variance →", f"↑ {shares[1]:.0f} %")


def flatten_by_tsne(embeddings: Points) -> Points | None:
    """Return the t-SNE `(clients, 2)`, deterministic, or None for too few, too many or equal clients."""
    points, clients = embeddings.astype(np.float32), len(embeddings)
    if not FEWEST <= clients <= MOST or not 1e-30 < points.var(axis=0).max() < np.inf:  # else scikit-learn may crash
        return None
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (clients - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init="pca" if embeddings.shape[1] > 1 else "random", random_state=0, n_jobs=1)
    return np.asarray(tsne.fit_transform(points), dtype=np.float64)
