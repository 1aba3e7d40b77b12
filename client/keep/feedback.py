"""Error feedback: what compression left out of one reply is added to the next change before it is compressed.

Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu: 1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014.
Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi: Error Feedback Fixes SignSGD and other
Gradient Compression Schemes, ICML 2019, https://arxiv.org/abs/1901.09847.

    p_t = delta_t + e_t         the change, and what is still owed
    send C(p_t)
    e_(t+1) = p_t - C(p_t)      so that all that was sent, and e, add up to all changes

This is the rule where the server takes replies as they are, as FedAvg's average does (with local steps: Basu, Data,
Karakus, Diggavi: Qsparse-local-SGD, NeurIPS 2019, https://arxiv.org/abs/1906.02367). `|e|` is then of the order of
`|delta| P / k` at most.

Departure, where the server learns from a change by an optimiser of its own: `e` is scaled down to `|delta|` where it is
larger. A hypernetwork follows a reply in part only, and what it did not follow the client asks for again in the next
round; the sum of all that would be many times too large, and out of date before its turn comes (`docs/compression.md`).
"""

from torch import Tensor

from hyperbloom.client.keep.state import ClientState
from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.layout import Layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import Scope
from hyperbloom.common.wire.weights import LARGEST_NORM

__all__ = ["encode_with_feedback"]


def encode_with_feedback(
    codec: Codec, state: ClientState, scope: Scope, layout: Layout, delta: Tensor, bounded: bool
) -> bytes:
    """Return the bytes for a change and what is owed, and keep on the disk what they lose.

    Args:
        codec: what the order asked for.
        state: where what is owed lies.
        scope: the run to which it is owed, and the round.
        layout: of the change.
        delta: `(P,)`, the change of this round.
        bounded: keep no more than the norm of `delta`.

    Raises:
        HyperbloomError: the change is not finite or too large; nothing of it is kept.
    """
    owed = state.load_residual(scope, layout)
    total = delta if owed is None else delta + owed
    norm = float(total.double().norm())
    if not norm <= LARGEST_NORM:
        state.forget_residual()
        raise HyperbloomError(
            f"training diverged (norm of the change {norm:.1e}); lower local.learning_rate", reason=Reason.DIVERGED
        )
    encoded = codec.encode(total, layout)
    lost = total - codec.decode(encoded, layout)
    size, limit = (float(values.double().norm()) for values in (lost, delta))
    if bounded and size > limit:
        lost = lost * (limit / size)
    state.save_residual(scope, layout, lost)
    return encoded
