"""The model: mathematics only. It knows axes it is cut over, but no run, optimizer or schedule."""

from .decoder import Decoder, Stages, whole_model
from .forward_pass import IGNORE, DropoutKey, Sums
from .parts import Parts

__all__ = ["IGNORE", "Decoder", "DropoutKey", "Parts", "Stages", "Sums", "whole_model"]
