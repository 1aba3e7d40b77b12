"""Error feedback: the compression error of one reply is added to the next change before it is compressed.

Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu: 1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014.
Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi: Error Feedback Fixes SignSGD and other
Gradient Compression Schemes, ICML 2019, https://arxiv.org/abs/1901.09847.

    p_t = delta_t + e_t         the change plus the residual
    send C(p_t)
    e_(t+1) = p_t - C(p_t)      all that was sent, plus e, is the sum of all changes

This rule applies if the server uses replies as they are, like FedAvg's average (with local steps: Basu, Data, Karakus,
Diggavi: Qsparse-local-SGD, NeurIPS 2019, https://arxiv.org/abs/1906.02367). `|e|` is then at most of the order of
`|delta| P / k`.

Departure: if the server learns from a change with its own optimiser, `e` is scaled down to at most `|delta|`. A
hypernetwork follows a reply only in part, and the client's next change contains the rest again. The accumulated
residual would be many times too large, and out of date when it is sent (`docs/compression.md`).
"""

from torch import Tensor

from hyperbloom.client.keep.state import ClientState
from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.layout import LARGEST_NORM, Layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import Scope


def encode_with_feedback(
    codec: Codec, state: ClientState, scope: Scope, layout: Layout, delta: Tensor, bounded: bool, noise: str = ""
) -> bytes:
    """Encode a change plus the residual of earlier rounds, and keep the new residual on the disk.

    With `bounded`, the new residual is scaled down to at most the norm of the change `(P,)`. `noise` says which noise
    covers the change: a residual under less of it would uncover it.

    Raises:
        HyperbloomError: the change is not finite or too large, and the residual was deleted; or the disk is full.
    """
    owed = state.load_residual(scope, layout, noise)
    total = delta if owed is None else delta + owed
    norm = float(total.double().norm())
    if not norm <= LARGEST_NORM:
        state.residual_path.unlink(missing_ok=True)
        raise HyperbloomError(f"training diverged (norm {norm:.1e}); lower local.learning_rate", reason=Reason.DIVERGED)
    encoded = codec.encode(total, layout)
    lost = total - codec.decode(encoded, layout)
    size, limit = (float(values.double().norm()) for values in (lost, delta))
    if bounded and size > limit:
        lost = lost * (limit / size)
    state.save_residual(scope, layout, lost, noise)
    return encoded
