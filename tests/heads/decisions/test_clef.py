"""Clef's sequence and head: what the frozen answers of ``test_joint`` do not show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity_bento.checkpoints.temperatures import Temperatures
from infinity_bento.core import Item, Task
from infinity_bento.decisions import Option
from infinity_bento.errors import InferenceError, InputTooLong, LoadError, WeightMismatch
from infinity_bento.heads.decisions.clef import ClefProtocol, load_clef, read_head_shape
from infinity_bento.heads.decisions.clef_head import Attention, cosine, span_means, summaries
from infinity_bento.heads.verdict import output_matrix
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files
from infinity_bento.models.backbone import Backbone
from infinity_bento.runners.runner import Runner
from tests import tiny_clef, tiny_laya
from tests.heads.decisions.running import decide, decide_one, probabilities, special_count, spoiled, text_backbone


def protocol_of(folder: Path, max_length: int = 4096) -> ClefProtocol:
    rows, tokenizer = output_matrix(folder, tied=False), load_tokenizer_files(folder)
    return load_clef(folder, tokenizer, rows, Temperatures(), max_length=max_length)


@pytest.fixture(scope="module")
def served() -> tuple[Backbone, ClefProtocol]:
    return text_backbone(tiny_clef.folder()), protocol_of(tiny_clef.folder())


def requests() -> list[Any]:
    return [tiny_laya.request(body["state"], body["questions"]) for body in tiny_clef.REQUESTS]


def test_requests_share_a_batch_without_seeing_each_other(served: tuple[Backbone, ClefProtocol]) -> None:
    together = decide(*served, [*requests(), *requests()[::-1]])
    assert [probabilities(found) for found in together[:3]] == [probabilities(found) for found in together[:2:-1]]
    for request, found in zip(requests(), together, strict=False):
        for alone, decision in zip(decide_one(*served, request), found, strict=True):
            np.testing.assert_allclose(alone.probabilities, decision.probabilities, atol=1e-5)


def test_renaming_counts_unless_the_ids_are_neutral(served: tuple[Backbone, ClefProtocol]) -> None:
    request = requests()[0]

    def ids(prefix: str, *, neutral: bool) -> list[int]:
        questions = [
            replace(question, id=prefix + question.id, shown_as=f"q{number}" if neutral else None)
            for number, question in enumerate(request.questions, start=1)
        ]
        return served[1].encode(replace(request, questions=tuple(questions))).input_ids

    assert ids("a-", neutral=True) == ids("b-", neutral=True)
    assert ids("a-", neutral=False) != ids("b-", neutral=False)


def test_a_question_changes_the_answers_of_the_others(served: tuple[Backbone, ClefProtocol]) -> None:
    request = requests()[0]
    changed = replace(
        request, questions=(replace(request.questions[0], instructions="broken?"), *request.questions[1:])
    )
    before, after = (probabilities(decide_one(*served, asked)) for asked in (request, changed))
    for one, two in zip(before[1:], after[1:], strict=True):
        assert np.abs(np.subtract(one, two)).max() > 1e-5


def test_an_id_changes_an_answer_but_the_order_of_labels_does_not(served: tuple[Backbone, ClefProtocol]) -> None:
    request = requests()[0]
    choice = request.questions[1]
    turned = replace(request, questions=(request.questions[0], replace(choice, options=choice.options[::-1])))
    asked = replace(request, questions=request.questions[:2])
    one, two = (decide_one(*served, each)[1].probabilities for each in (asked, turned))
    assert one == two[::-1]
    renamed = replace(asked, questions=(asked.questions[0], replace(choice, id="another")))
    assert np.abs(np.subtract(one, decide_one(*served, renamed)[1].probabilities)).max() > 1e-5


def test_native_confidence_is_the_top_probability(served: tuple[Backbone, ClefProtocol]) -> None:
    for decision in decide_one(*served, requests()[0]):
        assert decision.native_confidence == max(decision.probabilities)


def test_too_long_is_refused_and_never_cut() -> None:
    request = requests()[1]
    whole = len(protocol_of(tiny_clef.folder()).encode(request))
    assert len(protocol_of(tiny_clef.folder(), max_length=whole).encode(request)) == whole
    with pytest.raises(
        InputTooLong, match=f"have {whole} tokens together, more than the limit of {whole - 1}"
    ) as caught:
        protocol_of(tiny_clef.folder(), max_length=whole - 1).encode(request)
    assert caught.value.param == "state"


def test_the_prompt_cannot_be_forged() -> None:
    protocol = protocol_of(tiny_clef.folder())
    backend = load_tokenizer_files(tiny_clef.folder()).backend_tokenizer
    names = [*tiny_clef.SPECIAL, "<think>", "</think>"]
    special = {backend.token_to_id(name) for name in names}

    def asked(text: str) -> Any:
        questions = {
            f"q{text}": {"type": "choice", "instructions": text, "criteria": {f"l{text}": text, "m": [text]}},
            "n": {"type": "noul", "criteria": {"true": text}},
        }
        return tiny_laya.request({"s": text}, questions)

    plain = special_count(protocol.encode(asked("none")), special)
    assert plain == 7  # three turns begun and two ended, thinking begun and ended
    for name in names:
        assert special_count(protocol.encode(asked(f"a{name}b")), special) == plain, name


def test_spans_are_what_they_say() -> None:
    protocol, request = protocol_of(tiny_clef.folder()), requests()[0]
    encoded = protocol.encode(request)
    tokenizer = load_tokenizer_files(tiny_clef.folder())
    fields = encoded.readout.fields

    def text(span: tuple[int, int]) -> str:
        return str(tokenizer.decode(encoded.input_ids[slice(*span)]))

    assert [text(span) for span in fields.questions] == ["refund?", "team", "mad?"]
    assert [text(span) for span in fields.options[1]] == [
        '{"description":"pay","option_id":"a"}',
        '{"description":{"x":2,"y":1},"option_id":"m"}',
        '{"option_id":"z"}',
    ]
    assert encoded.readout.orders == ((1, 0), (1, 2, 0), (0, 1, 2))


def test_a_bad_number_is_an_error_of_its_own_request(served: tuple[Backbone, ClefProtocol]) -> None:
    backbone, protocol = served
    items = [Item(Task.DECIDE, decision=request) for request in (requests()[2], requests()[0])]
    runner = Runner(backbone, {Task.DECIDE: protocol})
    batch = runner.prepare([protocol.encode(item.decision) for item in items if item.decision])
    with torch.inference_mode():
        rows = protocol.run(spoiled(backbone.forward(batch)), batch)
    good, bad = runner.collect({Task.DECIDE: rows}, batch, items)
    assert isinstance(good, list) and isinstance(bad, InferenceError)


def test_a_noul_without_texts_has_the_published_ones(served: tuple[Backbone, ClefProtocol]) -> None:
    request = tiny_laya.request("s", {"n": {"type": "noul", "instructions": "?"}})
    (noul,) = request.questions
    texts = ("The proposition is false or the answer is no.", "The proposition is true or the answer is yes.")
    written = replace(noul, options=(Option("false", texts[0]), Option("true", texts[1])))
    protocol = served[1]
    assert protocol.encode(request).input_ids == protocol.encode(replace(request, questions=(written,))).input_ids


# Head ---------------------------------------------------------------------------------------------------------------


def test_attention_equals_torchs() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    ours = Attention(16, 4)
    ours.load_state_dict(theirs.state_dict())
    rows, memory = torch.randn(5, 16), torch.randn(9, 16)
    with torch.no_grad():
        found = ours(rows, memory, [2, 3], [5, 4])
        pieces = [(rows[:2], memory[:5]), (rows[2:], memory[5:])]
        expected = torch.cat([theirs(r[None], m[None], m[None], need_weights=False)[0][0] for r, m in pieces])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_rows_are_put_together_by_owner() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 4)
    means = span_means(rows, [(0, 1), (2, 5), (1, 3)])
    torch.testing.assert_close(means, torch.stack([rows[0], rows[2:5].mean(0), rows[1:3].mean(0)]))
    fields, owners = torch.randn(2, 4), torch.tensor([0, 0, 1, 1, 1, 1])
    expected = [(rows[owners == q] @ fields[q] / 2).softmax(0) @ rows[owners == q] for q in range(2)]
    torch.testing.assert_close(summaries(fields, rows, owners), torch.stack(expected))
    torch.testing.assert_close(cosine(rows, rows.flip(0)), torch.cosine_similarity(rows, rows.flip(0)))


# Files --------------------------------------------------------------------------------------------------------------


def broken(tmp_path: Path, change: Callable[[Path], None]) -> Path:
    folder = shutil.copytree(tiny_clef.folder(), tmp_path / "clef")
    change(folder)
    return folder


def set_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = {key: value for key, value in {**tiny_clef.HEAD, **values}.items() if value is not None}
        (folder / "joint_head_config.json").write_text(json.dumps(config))

    return change


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "joint_head.safetensors")
    del tensors["residual_gate"]
    save_file(tensors, folder / "joint_head.safetensors")


def spoil_tensor(folder: Path) -> None:
    tensors = load_file(folder / "joint_head.safetensors")
    tensors["field_norm.weight"][0] = float("nan")
    save_file(tensors, folder / "joint_head.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (set_config(width=None), LoadError, "joint_head_config.json: key 'width' is missing"),
        (set_config(heads=3), LoadError, "'heads' is 3; it must be a divisor of the width, 32"),
        (set_config(experts=3), LoadError, "'experts' is 3; it must be absent"),
        (set_config(hidden_size=32), LoadError, "'hidden_size' is 32; it must be that of the language model, 64"),
        (set_config(layers=3), WeightMismatch, r"tensor 'layers.2.\S+' of the decision head is missing"),
        (set_config(feedforward=64), WeightMismatch, "joint_head.safetensors"),
        (drop_tensor, WeightMismatch, "tensor 'residual_gate' of the decision head is missing"),
        (spoil_tensor, WeightMismatch, "'field_norm.weight' holds 1 values that are NaN"),
        (lambda folder: (folder / "joint_head.safetensors").unlink(), LoadError, "joint_head.safetensors is missing"),
        (lambda folder: (folder / "joint_head.safetensors").write_bytes(b"x" * 99), LoadError, "truncated or corrupt"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        protocol_of(broken(tmp_path, change))


def test_the_shape_of_the_head_is_read() -> None:
    shape = read_head_shape(tiny_clef.folder())
    assert (shape.width, shape.routing_layers, shape.layers, shape.feedforward) == (32, 2, 2, 48)
