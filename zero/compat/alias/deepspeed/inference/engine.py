"""`deepspeed.inference.engine`."""

from zero.inference import InferenceEngine

__all__ = ["InferenceEngine"]
