"""megatron-core: GPTModel of local layers, its DistributedDataParallel and optimizer, its schedule without a pipeline.

It is written for CUDA. What of torch.cuda it calls on the way is answered for the CPU here; no arithmetic is touched.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from clock import BATCH, FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTH, LR, VOCAB, Clock, rendezvous, tokens


class Nothing:
    """A stream or an event where there is only one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def on_cpu(make: Any) -> Any:
    """A function that makes tensors, with "cuda" read as the CPU."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def answer_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "manual_seed", "set_device", "nvtx"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_stream = cuda.default_stream = cuda.Stream = cuda.Event = Nothing
    cuda.stream = lambda stream: nullcontext()
    cuda.get_rng_state, cuda.set_rng_state = lambda *a, **k: torch.get_rng_state(), lambda *a, **k: None
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "zeros_like", "empty_like", "ones_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    kind = torch.Tensor.type
    # Gradient clipping asserts the name of the CUDA type.
    torch.Tensor.type = lambda self, *a, **k: (  # type: ignore[method-assign]
        kind(self, *a, **k).replace("torch.Float", "torch.cuda.Float") if not a and not k else kind(self, *a, **k)
    )


answer_for_cuda()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

CudaRNGStatesTracker.fork = lambda self, *a, **k: nullcontext()  # forks the CUDA generator; without dropout unused

clock = Clock()
clock.watch()
rendezvous()
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=KV_HEADS,
    ffn_hidden_size=FFN,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    bias_activation_fusion=False,
    gradient_accumulation_fusion=False,
    pipeline_dtype=torch.float32,
    finalize_model_grads_func=finalize_model_grads,
)
model = GPTModel(
    config,
    get_gpt_layer_local_spec(normalization="RMSNorm"),
    VOCAB,
    LENGTH,
    position_embedding_type="rope",
    share_embeddings_and_output_weights=False,
)
ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=LR, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0), [ddp]
)
positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
weights = torch.ones(BATCH, LENGTH)


def batches():
    while True:
        yield from tokens().split(BATCH)


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses * weights).sum() / weights.sum()
    return loss, {"lm loss": loss.detach()}


def forward(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    rows = next(data)
    return model(rows[:, :-1].contiguous(), positions, mask, labels=rows[:, 1:].contiguous()), partial(loss_of)


run, data = get_forward_backward_func(), batches()
while True:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    run(
        forward_step_func=forward,
        data_iterator=data,
        model=[ddp],
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    optimizer.step()
