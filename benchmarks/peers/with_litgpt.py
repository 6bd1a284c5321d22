"""litgpt's pretraining: Fabric, its GPT, its chunked loss. Its torch.compile of the whole model is left out.

Its AdamW is fused on CUDA only, and so is not here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from clock import BATCH, FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTH, LR, STEPS, VOCAB, Clock, tokens

clock = Clock()
clock.watch()

from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from torch.utils.data import DataLoader

torch.compile = lambda model, *a, **k: model


class Tokens(DataModule):
    def connect(self, *args: Any, **kwargs: Any) -> None: ...

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tokens(), batch_size=BATCH)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tokens()[:BATCH], batch_size=BATCH)


config = Config(
    name="benchmark",
    block_size=LENGTH,
    vocab_size=VOCAB,
    padded_vocab_size=VOCAB,
    n_layer=LAYERS,
    n_head=HEADS,
    n_query_groups=KV_HEADS,
    n_embd=HIDDEN,
    intermediate_size=FFN,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    norm_eps=1e-5,
    mlp_class_name="LLaMAMLP",
)
scratch = Path(tempfile.mkdtemp())
pretrain.setup(
    "benchmark",
    model_config=config,
    out_dir=scratch / "out",
    precision="32-true",
    data=Tokens(),
    train=TrainArgs(
        save_interval=None,
        log_interval=1,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        max_tokens=STEPS * BATCH * LENGTH,
        max_norm=1.0,
        min_lr=LR,
        lr_warmup_steps=1,
        tie_embeddings=False,
    ),
    eval=EvalArgs(interval=STEPS, max_iters=1, final_validation=False),
    optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.0}},
    devices=1,
    logger_name="csv",
)
