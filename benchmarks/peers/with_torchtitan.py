"""torchtitan's Trainer on its llama3 model: FSDP2 on one rank, its chunked loss, AdamW fused.

What it expects of an accelerator's module torch.cpu does not have is added here. Its language models offer flex and
varlen attention only, neither of which trains on a CPU: its own ScaledDotProductAttention takes their place.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from clock import BATCH, FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTH, LR, STEPS, VOCAB, Clock, rendezvous, tokens

clock = Clock()
clock.watch()
rendezvous()
torch._utils._get_available_device_type = lambda: "cpu"
cpu: Any = torch.cpu
cpu.get_device_name = lambda *a: "CPU"
cpu.get_device_properties = lambda *a: SimpleNamespace(total_memory=2**34, name="CPU")
cpu.memory_stats = lambda *a: {}
cpu.device_count = lambda: 1
cpu.manual_seed = cpu.manual_seed_all = lambda *a: None
for name in ("set_device", "reset_peak_memory_stats", "empty_cache"):
    setattr(cpu, name, lambda *a: None)

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

utils.set_pg_timeouts = lambda **k: None  # torch 2.13 has no torch.distributed.set_timeout
llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, **kwargs: Any) -> None: ...

    def __iter__(self) -> Any:
        while True:
            for rows in tokens().split(BATCH):
                yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCAB


norm = {"weight": torch.nn.init.ones_}
normal = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.02)}
model = llama3.Llama3Model.Config(
    dim=HIDDEN,
    vocab_size=VOCAB,
    tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=normal),
    norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=norm),
    lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCAB, param_init=normal),
    layers=llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        hidden_dim=FFN,
        rope=ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=LENGTH, theta=10000, scaling="none"),
        attn_backend="sdpa",
    ),
)
spec = ModelSpec(
    name="llama3",
    flavor="benchmark",
    model=model,
    parallelize_fn=llama3.parallelize_llama,
    pipelining_fn=None,
    post_optimizer_build_fn=None,
    state_dict_adapter=None,
)
config = Trainer.Config(
    model_spec=spec,
    dump_folder=tempfile.mkdtemp(),
    loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB)),
    optimizer=default_adamw(lr=LR, weight_decay=0.0),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
    training=TrainingConfig(
        local_batch_size=BATCH, seq_len=LENGTH, steps=STEPS, mixed_precision_param="float32", disable_cuda_graphs=True
    ),
    parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    dataloader=Tokens.Config(),
    tokenizer=NoTokenizer.Config(),
    metrics=MetricsProcessor.Config(log_freq=10),
    checkpoint=CheckpointManager.Config(enable=False),
    activation_checkpoint=None,
)
config.debug.enable_structured_logging = False
config.build().train()
