"""The messages between server and clients, as plain values. Only `pack.py` knows Flower's records."""

from hyperbloom.common.wire.exchanges import (
    BackpropOrder,
    BackpropResult,
    DescribeOrder,
    DescribeResult,
    ErrorsOrder,
    ErrorsResult,
    Fit,
    FitOrder,
    FitResult,
    MomentsOrder,
    MomentsResult,
    ReferenceOrder,
    ReferenceResult,
    RepresentOrder,
    RepresentResult,
    TryOrder,
)
from hyperbloom.common.wire.masks import (
    ConfirmOrder,
    ConfirmResult,
    KeysOrder,
    KeysResult,
    MaskedOrder,
    MaskedResult,
    Masking,
    SharesOrder,
    SharesResult,
    UnmaskOrder,
    UnmaskResult,
)
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.orders import (
    ASKS,
    SGD,
    EvaluateOrder,
    EvaluateResult,
    Failed,
    Greeting,
    Introduction,
    Noise,
    Notice,
    Order,
    Refinement,
    Scope,
    SplitScore,
    Target,
    TrainOrder,
    TrainResult,
)
from hyperbloom.common.wire.weights import Weights
