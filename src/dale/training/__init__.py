"""Training: state, loop, schedules, averaging, checkpoints and run folders."""

from dale.training.averaging import Averaging
from dale.training.config import Algorithm, DataConfig, ModelConfig, RunConfig, Training
from dale.training.fit import fit
from dale.training.optimisers import SGD, Adadelta, AdamW, Constant, Cosine, OneCycle, Optimiser, Piecewise, Schedule
from dale.training.runs import Run, RunFolder, load_model, load_run
from dale.training.state import TrainState
from dale.training.validation import Validation

__all__ = [
    "SGD",
    "Adadelta",
    "AdamW",
    "Algorithm",
    "Averaging",
    "Constant",
    "Cosine",
    "DataConfig",
    "ModelConfig",
    "OneCycle",
    "Optimiser",
    "Piecewise",
    "Run",
    "RunConfig",
    "RunFolder",
    "Schedule",
    "TrainState",
    "Training",
    "Validation",
    "fit",
    "load_model",
    "load_run",
]
