"""Expert parallelism: tokens travel to the ranks that hold the experts they chose, and back (dropless: none is cut).

Owns: the exchange of counts, both all-to-alls and their derivatives, and the order in which copies of tokens arrive.
Does not own: who chooses which expert and why, or what an expert computes (the mixture of experts), or the order in
which a rank sends copies and how rows are moved into it (kernels/moe_permute.py).

Every copy of a token has a fixed place: by expert, then by the rank it came from, then by token. Sums over the copies
of a token run in the order of its choices, without atomic additions: two runs of one layout agree bit by bit.

Shapes: T tokens of this rank, K experts per token, D features, E experts, R ranks that share them; N copies that this
rank sends (T x K less those of padding), M copies that its own experts get.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels import Ops
from ...kernels.numerics import apply
from ..comm import Communicator, Work


@dataclass(frozen=True, eq=False)
class Groups:
    """How the rows of a tensor [M, ...] are shared out among this rank's experts: neighbours, in the experts' order."""

    counts: tuple[int, ...]  # rows of each
    ends: Tensor  # int32, where the rows of each end; on the device

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def slices(self) -> list[slice]:
        """The rows of each expert."""
        ends = list(accumulate(self.counts, initial=0))
        return [slice(begin, end) for begin, end in pairwise(ends)]


@dataclass(frozen=True, eq=False)
class Routes:
    """Where the copies of this rank's tokens go: made once per forward pass, used on every way."""

    copies_N: Tensor  # int64: which of the T x K choices each copy is, in the order in which copies are sent
    places_TK: Tensor  # int64: where each choice's copy lies among the N; behind them for padding
    send: tuple[int, ...]  # rows to each rank
    receive: tuple[int, ...]  # rows from each rank
    by_expert_M: Tensor | None  # int64: from the order of arrival (rank, expert) to (expert, rank); None: the same
    by_rank_M: Tensor | None  # int64: and back
    groups: Groups
    load_E: Tensor  # int64: copies that this rank sends to each expert of the layer


class ExpertAxis:
    """The ranks that share one set of experts: rank r of R holds the experts r x E / R and on, E / R of them."""

    def __init__(self, comm: Communicator, ops: Ops) -> None:
        self.comm, self.ops = comm, ops

    def local(self, num_experts: int) -> int:
        """How many of the experts this rank holds."""
        assert num_experts % self.comm.size == 0, f"{num_experts} experts over {self.comm.size} ranks"
        return num_experts // self.comm.size

    @torch.no_grad()
    def routes(self, choice_TK: Tensor, num_experts: int, is_real_T: Tensor | None = None) -> Routes:
        """Plan the ways of one batch's tokens. Collective; the host waits for the device once, to learn the counts.

        choice_TK: int64, expert numbers, distinct within a row. is_real_T: bool, False for tokens that only fill up:
        they are sent nowhere and counted nowhere; None: all are real. Raises PeerLostError.
        """
        size = self.comm.size
        if is_real_T is not None:
            choice_TK = choice_TK.masked_fill(~is_real_T[:, None], num_experts)  # behind all experts, and cut off there
        copies, places_TK, load_E = self.ops.moe_sort(choice_TK, num_experts)
        arriving_RE = self.comm.all_to_all(load_E).view(size, -1)
        if choice_TK.is_meta:
            sent, arriving = _even(len(copies), num_experts, size, self.comm.rank)
        else:
            sent, arriving = torch.stack([load_E.view(size, -1), arriving_RE]).tolist()
        by_expert_M, by_rank_M = _regroup(arriving_RE, sum(map(sum, arriving)))
        counts = tuple(map(sum, zip(*arriving, strict=True)))
        return Routes(
            copies_N=copies[: sum(map(sum, sent))],
            places_TK=places_TK,
            send=tuple(map(sum, sent)),
            receive=tuple(map(sum, arriving)),
            by_expert_M=by_expert_M,
            by_rank_M=by_rank_M,
            groups=Groups(counts, arriving_RE.sum(0).cumsum(0).to(torch.int32)),
            load_E=load_E,
        )

    def dispatch(self, x_TD: Tensor, routes: Routes) -> Transfer:
        """Send the copies off; `Transfer.arrive` waits for those of this rank's experts. Raises PeerLostError."""
        transfer = Transfer(self.comm, routes)
        transfer.rows = apply(_Send, self.ops.moe_permute(x_TD, routes.copies_N, routes.places_TK), transfer)
        return transfer

    def combine(self, rows_MD: Tensor, weights_TK: Tensor, routes: Routes) -> Tensor:
        """Send what the experts made of the copies back, and sum each token's by weight: [T, D], in the rows' dtype.

        weights_TK: accumulate_dtype of the rows; the sum is formed in it. Padding gets 0. Raises PeerLostError.
        """
        back_ND = apply(_Return, rows_MD, self.comm, routes)
        return self.ops.moe_unpermute(back_ND, routes.copies_N, routes.places_TK, weights_TK)


class Transfer:
    """Copies on their way to the experts: what lies between start and arrival runs while they travel, in both passes
    (backward, gradients leave at `arrive` and are waited for where the copies were sent off)."""

    def __init__(self, comm: Communicator, routes: Routes) -> None:
        self.comm, self.routes = comm, routes
        self.rows: Tensor | None = None  # on their way to the experts
        self.grad_ND: Tensor | None = None  # on its way back
        self.work = Work(None)

    def arrive(self) -> Tensor:
        """[M, D], by expert. Once. Raises PeerLostError."""
        # Let go of: their graph holds this object, and a circle would keep both until the garbage collector comes.
        rows, self.rows = self.rows, None
        return apply(_Arrive, rows, self)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        routes = transfer.routes
        rows, transfer.work = transfer.comm.all_to_all_async(rows_ND, routes.send, routes.receive)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        """grad_MD stands for what _Arrive.backward has sent: autograd wants the shape of the forward pass."""
        transfer = ctx.transfer
        transfer.work.wait()
        grad_ND, transfer.grad_ND = transfer.grad_ND, None
        return grad_ND, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.work.wait()
        return _rearranged(rows_MD, transfer.routes.by_expert_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        transfer, routes = ctx.transfer, ctx.transfer.routes
        grad_MD = _rearranged(grad_MD, routes.by_rank_M)
        transfer.grad_ND, transfer.work = transfer.comm.all_to_all_async(grad_MD, routes.receive, routes.send)
        return grad_MD.new_zeros(1, 1).expand_as(grad_MD), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, comm: Communicator, routes: Routes) -> Tensor:
        ctx.comm, ctx.routes = comm, routes
        return comm.all_to_all(_rearranged(rows_MD, routes.by_rank_M), routes.receive, routes.send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        routes = ctx.routes
        grad_MD = ctx.comm.all_to_all(grad_ND, routes.send, routes.receive)
        return _rearranged(grad_MD, routes.by_expert_M), None, None


def _rearranged(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows.view_as(rows) if order is None else rows[order]


def _even(copies: int, num_experts: int, ranks: int, rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """(rows sent, rows that arrive), by rank and its experts, where every expert is chosen equally often: what a plan
    assumes, because choices without values (meta tensors) cannot be counted."""
    each, local = divmod(copies, num_experts), num_experts // ranks
    load = [each[0] + (e < each[1]) for e in range(num_experts)]
    sent = [load[r * local : (r + 1) * local] for r in range(ranks)]
    return sent, [sent[rank]] * ranks


def _regroup(arriving_RE: Tensor, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """(by_expert_M, by_rank_M) of Routes, from how many rows come from each rank for each of this rank's experts."""
    ranks, experts = arriving_RE.shape
    if ranks == 1 or experts == 1:
        return None, None
    numbers = torch.arange(experts, device=arriving_RE.device).repeat(ranks)
    experts_M = torch.repeat_interleave(numbers, arriving_RE.reshape(-1), output_size=rows)
    by_expert_M = torch.argsort(experts_M, stable=True)
    by_rank_M = torch.empty_like(by_expert_M)
    by_rank_M[by_expert_M] = torch.arange(rows, device=by_rank_M.device)
    return by_expert_M, by_rank_M
