"""OLMo-core's Trainer, train module and data loader over a file of tokens; AdamW fused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from clock import BATCH, FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTH, LR, STEPS, VOCAB, Clock, rendezvous, tokens
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
from olmo_core.train.train_module import TransformerTrainModuleConfig

clock = Clock()
clock.watch()


def main() -> None:
    rendezvous()
    prepare_training_environment(seed=0, backend="gloo")
    scratch = Path(tempfile.mkdtemp())
    tokens().numpy().astype(np.uint16).tofile(scratch / "tokens.npy")
    shape = TransformerConfig.llama_like(
        d_model=HIDDEN,
        vocab_size=VOCAB,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        rope_theta=10_000,
        hidden_size_multiple_of=256,
    )
    model = shape.build(init_device="cpu")
    assert model.blocks["0"].feed_forward.hidden_size == FFN
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=BATCH * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        max_grad_norm=1.0,
    ).build(model)
    data = NumpyFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=VOCAB, eos_token_id=0, pad_token_id=0),
        paths=[str(scratch / "tokens.npy")],
        sequence_length=LENGTH,
        work_dir=str(scratch),
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=BATCH * LENGTH, seed=0).build(data)
    trainer = TrainerConfig(
        save_folder=str(scratch / "run"), max_duration=Duration.steps(STEPS), no_checkpoints=True, no_evals=True
    ).build(module, loader)
    trainer.fit()


if __name__ == "__main__":
    main()
