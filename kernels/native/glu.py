"""SwiGLU, GeGLU and GELU by csrc/glu.cu: the ops' signatures over the raw ops, and their gradients, which keep nothing
but the inputs. Import after `library.load`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..geglu import check_geglu
from ..numerics import apply
from ..swiglu import check_swiglu
from .library import fake, raw, refuse

_swiglu, _swiglu_grad = raw("swiglu"), raw("swiglu_grad")
_geglu, _geglu_grad = raw("geglu"), raw("geglu_grad")
_gelu, _gelu_grad = raw("gelu"), raw("gelu_grad")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See stoker.kernels.swiglu. float32, bfloat16 or float16 on CUDA; halves of one tensor are read where they lie."""
    try:
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            return apply(_SwiGlu, gate, up)  # type: ignore[no-any-return]
        return _swiglu(gate, up)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("swiglu", error, lambda: check_swiglu(gate, up))


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """See stoker.kernels.geglu. float32, bfloat16 or float16 on CUDA; halves of one tensor are read where they lie."""
    try:
        if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
            return apply(_GeGlu, gate, up)  # type: ignore[no-any-return]
        return _geglu(gate, up)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("geglu", error, lambda: check_geglu(gate, up))


def gelu(x: Tensor) -> Tensor:
    """See stoker.kernels.gelu. float32, bfloat16 or float16 on CUDA."""
    try:
        if torch.is_grad_enabled() and x.requires_grad:
            return apply(_Gelu, x)  # type: ignore[no-any-return]
        return _gelu(x)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("gelu", error, lambda: None)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _swiglu_grad(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


class _GeGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _geglu(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _geglu_grad(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gelu_grad(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


@fake("swiglu")
@fake("geglu")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@fake("swiglu_grad")
@fake("geglu_grad")
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@fake("gelu")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake("gelu_grad")
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
