"""Networks from [0, 1] images to logits; normalisation is the first layer of each."""

from __future__ import annotations

from dale.models.check import ModelCheck, ModelReport, check_model
from dale.models.convnet import ConvNet, SmallCNN
from dale.models.factory import MODELS, ImageData, create_model
from dale.models.layers import ACTIVATIONS, Normalise
from dale.models.preact import PreActResNet, WideResNet
from dale.models.resnet import ResNet
from dale.models.weights import load_weights, save_weights

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "ConvNet",
    "ImageData",
    "ModelCheck",
    "ModelReport",
    "Normalise",
    "PreActResNet",
    "ResNet",
    "SmallCNN",
    "WideResNet",
    "check_model",
    "create_model",
    "load_weights",
    "save_weights",
]
