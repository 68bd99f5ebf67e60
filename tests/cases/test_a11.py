"""A11: packed rows do not see each other. (Every family and many lengths: tests/models/test_families.py.)"""

from __future__ import annotations

import torch

import tiny
from snugtune.data.pack import collate
from snugtune.step import Scorer


def test_a11_rows_of_9_and_7_tokens_packed_into_16_are_the_two_alone():
    packed, reference = tiny.pair("llama")
    rows = tiny.rows([9, 7])
    batch = collate(rows)
    scorer = Scorer(packed)
    with torch.no_grad():
        logits = scorer._hidden(batch) @ packed.lm_head.weight.t()
        alone = torch.cat(
            [reference(input_ids=torch.tensor([r.ids.tolist()]), use_cache=False).logits[0] for r in rows]
        )
        loss = sum(float(tiny.row_loss(reference, row)) for row in rows)
    tiny.assert_close(logits, alone, within=1e-5, name="logits")
    tiny.assert_close(float(scorer.loss(batch)), loss, within=1e-5, name="loss")


def test_a11_positions_restart_and_no_label_lies_across_the_seam():
    rows = tiny.rows([9, 7], labels=[8, 6])
    batch = collate(rows)
    assert batch.position_ids_1T[0].tolist() == [*range(9), *range(7)]
    assert batch.label_positions_N.tolist() == [*range(8), *range(9, 15)], "position 8 predicts nothing"
    assert batch.labels_N.tolist() == [*rows[0].ids[1:].tolist(), *rows[1].ids[1:].tolist()]


def test_a11_changing_one_row_leaves_the_other_bit_equal():
    packed, _ = tiny.pair("llama")
    rows, changed = tiny.rows([9, 7]), tiny.rows([9, 7])
    changed[0].ids[:] = 5
    with torch.no_grad():
        before, after = (Scorer(packed)._hidden(collate(r)) for r in (rows, changed))
    assert not torch.equal(before[:9], after[:9])
    assert torch.equal(before[9:], after[9:]), "the second row saw the first"
