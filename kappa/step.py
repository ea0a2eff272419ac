"""Old name of the step's part of `kappa.cost`."""

from kappa.cost import StepModel, StepParts, step_model

__all__ = ["StepModel", "StepParts", "step_model"]
