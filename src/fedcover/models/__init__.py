"""Build plain PyTorch modules together with the unit groups along which they are cut.

A builder takes the shape of one input, the number of classes and the kind of norm, and returns a
`Model`.
"""

from collections.abc import Callable

from fedcover.models.depth_resnet import depth_resnet
from fedcover.models.layers import Scaler as Scaler
from fedcover.models.layers import params_and_buffers as params_and_buffers
from fedcover.models.lora import lora
from fedcover.models.lstm import lstm
from fedcover.models.mlp_cnn import cnn, mlp
from fedcover.models.resnet import preact_resnet18, wide_resnet
from fedcover.models.softmax import softmax
from fedcover.models.transformer import transformer
from fedcover.types import Model

MODELS: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "wide_resnet": wide_resnet,
    "preact_resnet18": preact_resnet18,
    "depth_resnet": depth_resnet,
    "transformer": transformer,
    "lstm": lstm,
    "lora": lora,
    "softmax": softmax,
}
