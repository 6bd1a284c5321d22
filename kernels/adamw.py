"""The AdamW update of a list of tensors in place: signature and reference.

Does not know parameter groups, schedules, clipping or sharding: the optimizer computes the numbers and passes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .rounding import RoundingAddress, stochastic_round


class AdamW(Protocol):
    """The signature of `adamw`, see there."""

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        masters: Sequence[Tensor] | None,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float | Tensor = 1.0,
        rounding: Sequence[RoundingAddress] | None = None,
    ) -> None: ...


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float | Tensor = 1.0,
    rounding: Sequence[RoundingAddress] | None = None,
) -> None:
    """One AdamW step with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101), as torch.optim.AdamW.

    With g = grad * grad_scale: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
    w = w (1 - lr weight_decay) - lr m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps).

    params, exp_avgs, exp_avg_sqs: updated in place. masters: None, then params are float32 or float64; or the float32
    copies that are updated instead, params being their rounded image afterwards. The averages have the dtype of what is
    updated; gradients may be narrower. step counts from 1. grad_scale: a float, or a 0-dim tensor that is not waited
    for; applied within the same pass over memory.
    rounding: without masters, params are bfloat16 and get the new values by stochastic rounding (rounding.py), each
    with its own address; the averages are float32. In float32 only one parameter exists at a time.
    grads are scratch: they may hold the scaled gradients afterwards, or not. The same inputs give the same bits.
    Raises ValueError when lists, shapes or dtypes do not fit.
    """
    check_adamw(params, grads, exp_avgs, exp_avg_sqs, masters, step, rounding)
    if rounding is not None:
        for param, grad, avg, avg_sq, address in zip(params, grads, exp_avgs, exp_avg_sqs, rounding, strict=True):
            wide = param.float()
            adamw([wide], [grad], [avg], [avg_sq], None, lr, beta1, beta2, eps, weight_decay, step, grad_scale)
            stochastic_round([param], [wide], [address])
        return
    updated = params if masters is None else masters
    if not updated:
        return
    # The fused kernel walks raw memory: it must get contiguous tensors, and results are copied back where it did not.
    state = [[t if t.is_contiguous() else t.contiguous() for t in ts] for ts in (updated, exp_avgs, exp_avg_sqs)]
    scaled, divisor = _scale([g.to(w.dtype).contiguous() for g, w in zip(grads, updated, strict=True)], grad_scale)
    # Filled on the device: a copy from the host would wait for it.
    counter = torch.full((), float(step), dtype=torch.float32, device=updated[0].device)
    with torch.no_grad():
        torch._fused_adamw_(
            state[0],
            scaled,
            state[1],
            state[2],
            [],
            [counter] * len(updated),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )
        for given, contiguous in zip((updated, exp_avgs, exp_avg_sqs), state, strict=True):
            for target, result in zip(given, contiguous, strict=True):
                if target is not result:
                    target.copy_(result)
        if masters is not None:
            torch._foreach_copy_(list(params), list(masters))


def _scale(grads: list[Tensor], grad_scale: float | Tensor) -> tuple[list[Tensor], Tensor | None]:
    """What the fused kernel gets: gradients and the float32 number it divides them by, None for no division."""
    if isinstance(grad_scale, float | int) and grad_scale == 1:
        return grads, None
    device = grads[0].device
    if any(g.dtype == torch.float64 for g in grads):
        # The kernel's divisor is a float32: too coarse here, where nothing is in a hurry.
        factor = grad_scale.double() if isinstance(grad_scale, Tensor) else grad_scale
        return [g * factor for g in grads], None
    if isinstance(grad_scale, Tensor):
        return grads, grad_scale.to(device, torch.float32).reciprocal()
    return grads, torch.full((), grad_scale, dtype=torch.float32, device=device).reciprocal()


def check_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    step: int,
    rounding: Sequence[RoundingAddress] | None,
) -> None:
    """Raises ValueError, see `adamw`."""
    if step < 1:
        raise ValueError(f"adamw: step={step}, the first step is 1")
    if rounding is not None and masters is not None:
        raise ValueError("adamw: with masters the params are their nearest image; leave rounding=None")
    updated = params if masters is None else masters
    rounded: Sequence[object] = params if rounding is None else rounding
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "masters": updated, "rounding": rounded}
    for name, values in lists.items():
        if len(values) != len(params):
            raise ValueError(f"adamw: {len(values)} {name} for {len(params)} params")
    for i, target in enumerate(updated):
        wanted = target.dtype if rounding is None else torch.float32
        if target.dtype not in ((torch.float32, torch.float64) if rounding is None else (torch.bfloat16,)):
            what = "params" if masters is None else "masters"
            raise ValueError(
                f"adamw: {what}[{i}] is {target.dtype}; small updates vanish in it, pass float32 masters beside the "
                "params, or addresses for stochastic rounding to bfloat16"
            )
        if not params[i].shape == grads[i].shape == exp_avgs[i].shape == exp_avg_sqs[i].shape == target.shape:
            raise ValueError(
                f"adamw: tensors at {i} differ in shape: param {tuple(params[i].shape)}, grad {tuple(grads[i].shape)}, "
                f"averages {tuple(exp_avgs[i].shape)} and {tuple(exp_avg_sqs[i].shape)}, master {tuple(target.shape)}"
            )
        if exp_avgs[i].dtype != wanted or exp_avg_sqs[i].dtype != wanted:
            raise ValueError(
                f"adamw: averages at {i} are {exp_avgs[i].dtype} and {exp_avg_sqs[i].dtype}, expected {wanted}"
            )
