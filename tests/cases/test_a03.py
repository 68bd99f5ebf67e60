"""A03: a pad token that is the end token hides no end: what is padding is told by position, never by a token's id."""

from __future__ import annotations

import pytest
import torch

import tiny
from snugtune.data.encode import EncodedRow, encode
from snugtune.data.pack import collate
from snugtune.data.rows import LeftOut, Row
from snugtune.step import Scorer

END = 2


def _rows(*texts: tuple[str, str]) -> list[EncodedRow]:
    tokenizer = tiny.tokenizer(pad="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == END
    rows = [
        Row(
            f"rows.jsonl:{n}", f"{prompt} {answer}", ((len(prompt) + 1, len(prompt) + 1 + len(answer)),), rendered=False
        )
        for n, (prompt, answer) in enumerate(texts, 1)
    ]
    return encode(rows, tokenizer, max_length=64, left_out=LeftOut())


def test_a03_rows_of_3_and_4_tokens_learn_their_end_token():
    rows = _rows(("w5", "w6"), ("w5 w7", "w8"))
    assert [row.ids.tolist() for row in rows] == [[5, 6, END], [5, 7, 8, END]]
    batch = collate(rows)
    assert batch.labels_N.tolist() == [6, END, 8, END], "the end token's label is missing"
    assert batch.label_positions_N.tolist() == [0, 1, 4, 5]


def test_a03_the_end_token_is_learnt_where_attention_pads_rows():
    """Rows of 16, 15 and 14 tokens share an attention call, the shorter ones padded inside it."""
    rows = _rows(*((" ".join(f"w{i + 3}" for i in range(length - 3)), "w99 w98") for length in (16, 15, 14)))
    assert [row.tokens for row in rows] == [16, 15, 14]
    batch = collate(rows)
    assert any(group.pad_index is not None for group in batch.row_layout), "nothing is padded: the test sees nothing"
    assert (batch.labels_N == END).sum() == 3
    packed, reference = tiny.pair("llama")
    with torch.no_grad():
        alone = sum(float(tiny.row_loss(reference, row)) for row in rows)
    tiny.assert_close(float(Scorer(packed).loss(batch)), alone, within=1e-5, name="loss with the end tokens in it")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a03_an_end_token_inside_a_prompt_is_seen(name: str):
    """The turn-end marker of a chat has the pad's id too, and later tokens must look at it like at any other."""
    packed, _ = tiny.pair(name, pad_token_id=END) if name != "gpt2" else tiny.pair(name)
    scorer = Scorer(packed)

    def hidden_of_last(ids: list[int]) -> torch.Tensor:
        (row,) = tiny.rows([len(ids)])
        row.ids[:] = ids
        with torch.no_grad():
            return scorer._hidden(collate([row]))[-1]

    with_marker, without = hidden_of_last([5, END, 7]), hidden_of_last([5, 7])
    other = hidden_of_last([5, 9, 7])
    assert (with_marker - other).abs().max() > 1e-3
    assert (with_marker - without).abs().max() > 1e-3, "the marker was masked out"
    (row,) = tiny.rows([3])
    row.ids[:] = [5, END, 7]
    reference = tiny.model(name, attn="eager", **({} if name == "gpt2" else {"pad_token_id": END}))
    with torch.no_grad():
        expected = reference.get_decoder()(
            input_ids=torch.tensor([[5, END, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.int64), use_cache=False
        ).last_hidden_state[0, -1]
    tiny.assert_close(
        with_marker, expected, within=1e-5, name=f"{name}: hidden state after a marker that is not masked"
    )
