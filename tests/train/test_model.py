"""What the options of the model mean. Its mathematics is held against transformers' in test_families.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stoker.conf.schema import ModelConfig
from stoker.kernels import reference, select
from stoker.train.data.dataset import Batch
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.model import Decoder, DropoutKey, whole_model
from stoker.train.params import decoder_table

CONFIG = ModelConfig(vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=112)
ROWS, LENGTH = 3, 17


def build(config: ModelConfig) -> Decoder:
    """With norms that are not one, so that a missing or swapped one shows."""
    model = whole_model(config, select())
    table = decoder_table(config)
    initialize(model, table, single(), seed=3)
    with torch.no_grad():
        for facts in table.owned():
            if facts.init_std == 0.0:
                table.local(model, facts.name).uniform_(0.5, 1.5)
    return model


def make_batch(ignored: bool = True, **fields: Any) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, 97, (ROWS, LENGTH), generator=generator) for _ in range(2))
    if ignored:
        targets[1, 3:9] = -100
    batch = Batch(tokens, targets, torch.arange(LENGTH).repeat(ROWS, 1), None, torch.arange(ROWS))
    return replace(batch, **fields)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


def test_scale_multiplies_the_objective_and_not_the_loss() -> None:
    model, batch = build(CONFIG), make_batch()
    whole, small = model(batch), model(batch, scale=0.25)
    assert float(small.loss) == float(whole.loss)
    assert float(small.objective.detach()) == pytest.approx(0.25 * float(whole.loss), rel=1e-6)
    small.objective.backward()
    scaled = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(batch).objective.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(scaled[name], 0.25 * parameter.grad, rtol=1e-4, atol=1e-6)


def test_loss_is_a_sum_over_rows() -> None:
    model, batch = build(CONFIG), make_batch()
    parts = [
        model(Batch(batch.tokens[i : i + 1], batch.targets[i : i + 1], batch.positions[:1], None, batch.samples[:1]))
        for i in range(ROWS)
    ]
    whole = model(batch)
    assert float(whole.loss) == pytest.approx(sum(float(p.loss) for p in parts), rel=1e-6)
    assert int(whole.tokens) == sum(int(p.tokens) for p in parts)


def test_a_batch_without_targets_has_zero_loss_and_zero_gradients() -> None:
    model = build(CONFIG)
    sums = model(make_batch(targets=torch.full((ROWS, LENGTH), -100)))
    sums.objective.backward()
    assert (float(sums.loss), int(sums.tokens)) == (0.0, 0)
    assert all(not p.grad.any() for p in model.parameters())


def test_z_loss_is_in_the_objective_and_not_in_the_reported_loss() -> None:
    plain, batch = build(CONFIG), make_batch()
    weighted = whole_model(replace(CONFIG, z_loss=0.01), select())
    weighted.load_state_dict(plain.state_dict())
    lse = torch.logsumexp(plain.logits(batch), -1)[batch.targets != -100]
    sums = weighted(batch)
    assert float(sums.loss) == pytest.approx(float(plain(batch).loss), rel=1e-5)
    expected = float(plain(batch).loss) + 0.01 * float(lse.square().sum().detach())
    assert float(sums.objective.detach()) == pytest.approx(expected, rel=1e-5)


def test_documents_do_not_see_each_other() -> None:
    model = build(CONFIG)
    documents = (torch.arange(LENGTH) >= 8).long().repeat(ROWS, 1)
    batch = make_batch(doc_ids=documents)
    before = model.logits(batch)
    changed = batch.tokens.clone()
    changed[:, :8] = (changed[:, :8] + 1) % 97
    after = model.logits(replace(batch, tokens=changed))
    assert torch.equal(before[:, 8:], after[:, 8:])
    assert not torch.equal(model.logits(make_batch())[:, 8:], before[:, 8:])


def test_tokens_do_not_see_the_future_nor_beyond_the_window() -> None:
    model, batch = build(replace(CONFIG, sliding_window=4, num_layers=1)), make_batch()
    before = model.logits(batch)
    changed = batch.tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 97
    differs = (model.logits(replace(batch, tokens=changed)) != before).any(-1)[0]
    assert differs.tolist() == [False] * 8 + [True] * 4 + [False] * 5


def test_positions_matter_only_by_their_distance() -> None:
    model, batch = build(CONFIG), make_batch()
    moved = model.logits(replace(batch, positions=batch.positions + 1000))
    torch.testing.assert_close(moved, model.logits(batch), rtol=1e-3, atol=1e-4)
    stretched = model.logits(replace(batch, positions=batch.positions * 2))
    assert relative(stretched, moved) > 1e-3


def test_softcap_changes_attention() -> None:
    model, batch = build(CONFIG), make_batch()
    capped = whole_model(replace(CONFIG, attention_softcap=0.05), select())
    capped.load_state_dict(model.state_dict())
    assert relative(capped.logits(batch), model.logits(batch)) > 1e-3


def test_dropout_depends_on_the_sample_and_not_on_how_batches_are_cut() -> None:
    model, batch, key = build(replace(CONFIG, dropout=0.3)), make_batch(ignored=False), DropoutKey(seed=5, step=2)
    whole = model.hidden(batch, key)
    parts = [
        model.hidden(
            Batch(
                batch.tokens[i : i + 1], batch.targets[i : i + 1], batch.positions[:1], None, batch.samples[i : i + 1]
            ),
            key,
        )
        for i in range(ROWS)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    assert relative(model.hidden(batch, DropoutKey(5, 3)), whole) > 0.1
    assert relative(model.hidden(replace(batch, samples=batch.samples + 7), key), whole) > 0.1


def test_evaluation_drops_nothing() -> None:
    model, batch = build(replace(CONFIG, dropout=0.3)), make_batch()
    plain = whole_model(CONFIG, select())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.logits(batch), plain.logits(batch))


@pytest.mark.parametrize("logit_softcap", [0.0, 0.5])
def test_half_precision_has_the_loss_of_single_precision(logit_softcap: float) -> None:
    model, batch = build(replace(CONFIG, logit_softcap=logit_softcap)), make_batch()
    single_precision = float(model(batch).loss)
    assert float(model.to(torch.bfloat16)(batch).loss) == pytest.approx(single_precision, rel=5e-3)


def test_half_precision_forms_no_whole_logits_where_a_kernel_does_the_joint_op() -> None:
    calls = []

    def joint(x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append((x.dtype, tuple(weight.shape)))
        return reference.linear_cross_entropy(x, weight, *args, **options)

    plain = select()
    choices = tuple(replace(c, implementation="native") if c.op == "linear_cross_entropy" else c for c in plain.choices)
    results = []
    for ops in (plain, replace(plain, linear_cross_entropy=joint, choices=choices)):
        model = whole_model(CONFIG, ops)
        initialize(model, decoder_table(CONFIG), single(), seed=3)
        model.to(torch.bfloat16)
        results.append(float(model(make_batch()).loss))
    assert calls == [(torch.bfloat16, (CONFIG.vocab_size, CONFIG.hidden_size))]
    assert results[1] == pytest.approx(results[0], rel=5e-3)
