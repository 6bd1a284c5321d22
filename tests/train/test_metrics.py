"""The metrics line, the log for people, and the arithmetic behind MFU."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from stoker.conf.schema import Activation, ModelConfig, Norm, Positions
from stoker.train.device import memory_gib
from stoker.train.flops import flops_per_token, peak_flops, peak_of
from stoker.train.metrics import Clock, StepLog, StepMetrics
from stoker.train.params import decoder_table

METRICS = StepMetrics(
    step=3,
    loss=2.5,
    lr=1e-3,
    grad_norm=0.5,
    tokens=1000,
    consumed_samples=24,
    step_seconds=0.5,
    mfu=0.41234567,
    memory_gib=1.5,
    parts={"data": 0.1},
)


def test_line_has_the_fields_that_readers_know() -> None:
    line = json.loads(METRICS.line())
    assert line.pop("time") > 1.7e9
    assert line == {
        "step": 3,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 1000,
        "consumed_samples": 24,
        "step_seconds": 0.5,
        "tokens_per_second": 2000.0,
        "mfu": 0.41235,
        "memory_gib": 1.5,
        "parts": {"data": 0.1},
    }


def test_numbers_that_are_not_finite_become_null() -> None:
    line = json.loads(replace(METRICS, loss=math.nan, grad_norm=math.inf, mfu=None, eval_loss=math.nan).line())
    assert (line["loss"], line["grad_norm"], line["mfu"], line["eval_loss"]) == (None, None, None, None)


def test_losses_survive_the_line_bit_by_bit() -> None:
    loss = 2.0794415416798357
    assert json.loads(replace(METRICS, loss=loss).line())["loss"] == loss


def test_clock_starts_over_after_each_take() -> None:
    clock = Clock()
    with clock.measure("data"):
        pass
    with pytest.raises(ValueError, match="broken"), clock.measure("save"):
        raise ValueError("broken")
    first = clock.take()
    assert set(first) == {"data", "forward_backward", "communication", "optimizer", "save_wait", "save"}
    assert first["data"] > 0
    assert first["save"] > 0
    assert set(clock.take().values()) == {0.0}


def test_log_shows_the_first_and_the_last_step_and_few_between(capsys: pytest.CaptureFixture[str]) -> None:
    log = StepLog(steps=5, interval=3600.0)
    for step in range(1, 6):
        log.step(replace(METRICS, step=step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1/5", "step 5/5"]


def test_flops_are_palms_formula() -> None:
    config = ModelConfig(vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=8)
    # Per layer: wq 16, wk 8, wv 8, wo 16, gate, up, down 32 each; output projection 40. Attention 12 L H E S.
    expected = 6 * (2 * 144 + 40) + 12 * 2 * 2 * 2 * 16
    assert flops_per_token(config, decoder_table(config), 16) == expected
    tied = replace(config, tied_embeddings=True)
    assert flops_per_token(tied, decoder_table(tied), 16) == expected
    windowed = replace(config, sliding_window=4)
    assert flops_per_token(windowed, decoder_table(windowed), 16) == expected - 12 * 2 * 2 * 2 * 12


def test_flops_count_what_a_family_multiplies_with() -> None:
    config = ModelConfig(vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=8)
    plain = flops_per_token(config, decoder_table(config), 16)
    alternating = replace(config, sliding_window=4, global_every=2)
    assert flops_per_token(alternating, decoder_table(alternating), 16) == plain - 12 * 2 * 2 * 12
    gpt2 = replace(config, activation=Activation.gelu, norm=Norm.layernorm, qkv_bias=True, linear_bias=True)
    gpt2.positions, gpt2.max_positions = Positions.learned, 16
    # No gate: 32 weights less per layer. Biases, norms and looked-up positions multiply nothing.
    assert flops_per_token(gpt2, decoder_table(gpt2), 16) == plain - 6 * 2 * 32
    experts = replace(config, num_experts=6, experts_per_token=2, expert_ffn_size=5, shared_expert_ffn_size=3)
    experts.dense_layers = 1
    # In the second layer two experts of 3 x 20 weights, the shared one of 3 x 12, a router of 24; not the dense 96.
    assert flops_per_token(experts, decoder_table(experts), 16) == pytest.approx(plain + 6 * (2 * 60 + 36 + 24 - 96))


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51.2e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 2500e12, 80e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("Somebody's GPU", None, None),
    ],
)
def test_peak_is_the_right_devices(name: str, bf16: float | None, fp32: float | None) -> None:
    assert peak_of(name, torch.bfloat16) == (bf16 and pytest.approx(bf16))
    assert peak_of(name, torch.float32) == (fp32 and pytest.approx(fp32))


def test_a_cpu_has_no_peak_and_its_memory_is_what_the_process_holds() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    before = memory_gib(torch.device("cpu"))
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert memory_gib(torch.device("cpu")) - before == pytest.approx(0.0625, abs=0.02)
    del held
