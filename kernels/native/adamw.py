"""AdamW by csrc/adamw.cu: the op's signature over the raw op. Import after `library.load`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..adamw import check_adamw
from ..rounding import RoundingAddress
from .library import fake, raw_without_gradient, refuse
from .multi_tensor import mutated, number_and_tensor
from .rounding import flat_addresses

_adamw = raw_without_gradient("adamw")


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
    """See stoker.kernels.adamw. What is updated is float32, or bfloat16 with addresses; gradients are left as they are.

    One pass over memory for all tensors, in as many launches as their addresses need (a few dozen tensors each).
    Against the exact update of the same float32 numbers: averages within 3 ulp of the larger of old and new, the weight
    within 0.51 ulp of itself plus 8 ulp of its change. The same bits on every device and for every cut into shards.
    """
    if not params or (masters is not None and not masters):
        return check_adamw(params, grads, exp_avgs, exp_avg_sqs, masters, step, rounding)
    try:
        number, tensor = number_and_tensor(grad_scale, params)
        addresses = flat_addresses(rounding, params)
        _adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            masters or [],
            tensor,
            number,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            step,
            addresses,
        )
    except RuntimeError as error:
        refuse("adamw", error, lambda: check_adamw(params, grads, exp_avgs, exp_avg_sqs, masters, step, rounding))
    mutated(params)  # averages and masters are in no graph


@fake("adamw")
def _(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    scale: Tensor | None,
    number: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    addresses: list[int],
) -> None:
    return None
