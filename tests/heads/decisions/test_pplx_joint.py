"""Perplexity Decider v1.2's contract: its files, its sequence, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infinity_bento.checkpoints.pplx_joint import NOTE, read_joint
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import InputTooLong, InvalidInput, LoadError, WeightMismatch
from infinity_bento.heads.decisions.pplx_joint import JointProtocol, filled, load_joint
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files
from tests import tiny, tiny_laya, tiny_readouts
from tests.heads.decisions.running import decide, decide_one, probabilities, special_count, text_backbone

CODES = list("ABCDEFGH")
MARKER = "<|image_pad|>"
TEMPLATE: dict[str, Any] = {
    "system": "Classify the shared state for each numbered question.",
    "state": "State:\n{state}",
    "question": "Question {n}: {instructions}\n{options}\n{marker}",
    "option": "{code}: {text}",
    "close": "\nEnd.",
}
OWN = {"format_version": 1, "protocol": "pplx-joint", "marker": MARKER, "codes": CODES, "template": TEMPLATE}
REQUEST = tiny_laya.request(
    {"msg": "charged twice"},
    {
        "a": {"type": "noul", "instructions": "refund?"},
        "b": {"type": "choice", "instructions": "", "criteria": {"z": None, "a": "pay", "e": ""}},
        "c": {"type": "score", "instructions": {"ask": "mad?"}, "criteria": ["lo", ["mid"], "hi"]},
        "d": {"type": "noul", "criteria": {"true": "it is {n}"}},
    },
)
PROMPT = """<|im_start|>system
Classify the shared state for each numbered question.<|im_end|>
<|im_start|>user
State:
{"msg": "charged twice"}

Question 1: refund?
A: No / false
B: Yes / true
<|image_pad|>

Question 2: Choose the best matching option.
A: z
B: a: pay
C: e:\x20
<|image_pad|>

Question 3: {"ask": "mad?"}
A: lo
B: ["mid"]
C: hi
<|image_pad|>

Question 4: Choose the best matching option.
A: No / false
B: it is {n}
<|image_pad|>
End.<|im_end|>
<|im_start|>assistant
<think>

</think>

"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = shutil.copytree(tiny_readouts.readout("pplx"), tmp_path / "joint")
    (path / "decision_config.json").unlink()
    rows = torch.randn(len(CODES), tiny.WIDTH, generator=torch.Generator().manual_seed(4)) * 0.1
    save_file({"weight": rows}, path / "readout.safetensors")
    (path / "infinity_decision.json").write_text(json.dumps(OWN))
    return path


def change(folder: Path, name: str = "infinity_decision.json", **values: Any) -> Path:
    """Other keys in a file; None removes one."""
    file = folder / name
    content = (json.loads(file.read_text()) if file.is_file() else {}) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def protocol_of(folder: Path, max_length: int = 4096) -> JointProtocol:
    spec = read_joint(folder)
    tokenizer = load_tokenizer_files(folder)
    return load_joint(folder, spec, tokenizer, spec.temperatures, width=tiny.WIDTH, max_length=max_length)


def test_the_prompt_is_the_template_filled(folder: Path) -> None:
    tokenizer = load_tokenizer_files(folder)
    encoded = protocol_of(folder).encode(REQUEST)
    assert encoded.parts is None
    assert tokenizer.decode(encoded.input_ids) == PROMPT
    assert encoded.input_ids == tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    marker = tokenizer.convert_tokens_to_ids(MARKER)
    assert [encoded.input_ids[place] for place in encoded.readout.markers] == [marker] * 4
    assert encoded.readout.counts == (2, 3, 3, 2)


def test_requests_share_a_batch_and_questions_see_each_other(folder: Path) -> None:
    backbone, protocol = text_backbone(folder, causal=False), protocol_of(folder)
    other = tiny_laya.request("another state " * 9, {"x": {"type": "choice", "criteria": dict.fromkeys("abcdefg")}})
    first, middle, last = decide(backbone, protocol, [REQUEST, other, REQUEST])
    assert probabilities(first) == probabilities(last)
    for alone, decision in zip(decide_one(backbone, protocol, REQUEST), first, strict=True):
        np.testing.assert_allclose(alone.probabilities, decision.probabilities, atol=1e-5)
    assert len(middle[0].probabilities) == 7
    # Even the last question has a say in the first one's answer.
    changed = replace(REQUEST, questions=(*REQUEST.questions[:-1], replace(REQUEST.questions[-1], instructions="so?")))
    after = decide_one(backbone, protocol, changed)
    assert np.abs(np.subtract(first[0].probabilities, after[0].probabilities)).max() > 1e-5


def test_rows_of_the_readout_are_codes(folder: Path) -> None:
    """Permuted rows permute the probabilities."""
    backbone, protocol = text_backbone(folder, causal=False), protocol_of(folder)
    before = decide_one(backbone, protocol, REQUEST)[1].probabilities
    protocol.rows_CD = protocol.rows_CD[[1, 2, 0, *range(3, 8)]]
    after = decide_one(backbone, protocol, REQUEST)[1].probabilities
    np.testing.assert_allclose(after, [before[1], before[2], before[0]], atol=1e-6)


def test_true_may_come_first(folder: Path) -> None:
    tokenizer = load_tokenizer_files(folder)
    encoded = protocol_of(change(folder, noul_order=["true", "false"])).encode(REQUEST)
    assert "A: Yes / true\nB: No / false" in tokenizer.decode(encoded.input_ids)
    backbone = text_backbone(folder, causal=False)
    flat = protocol_of(change(folder, temperature=1e9))
    assert decide_one(backbone, flat, REQUEST)[0].probabilities == pytest.approx((0.5, 0.5), abs=1e-6)
    turned = protocol_of(change(folder, temperature=None))
    probabilities_true_first = decide_one(backbone, turned, REQUEST)[0].probabilities
    turned._true_first = False
    assert decide_one(backbone, turned, REQUEST)[0].probabilities == probabilities_true_first[::-1]


def test_markers_cannot_be_forged(folder: Path) -> None:
    protocol = protocol_of(folder)
    backend = load_tokenizer_files(folder).backend_tokenizer
    names = [MARKER, "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>"]
    special = {backend.token_to_id(name) for name in names}

    def asked(text: str) -> Any:
        questions = {"q": {"type": "choice", "instructions": [text], "criteria": {f"a{text}": text, "b": {"x": text}}}}
        return tiny_laya.request(text, questions)

    plain = special_count(protocol.encode(asked("none")), special)
    for name in names:
        assert special_count(protocol.encode(asked(f"x{name}y")), special) == plain, name


def test_places_are_filled_once() -> None:
    assert filled("{a} {b} {c}", {"a": "{b}", "b": "{a}"}) == "{b} {a} {c}"


def test_limits(folder: Path) -> None:
    nine = tiny_laya.request("s", {"q": {"type": "choice", "criteria": dict.fromkeys("abcdefghi")}})
    with pytest.raises(InvalidInput, match="9 options, but this model has codes for 8") as caught:
        protocol_of(folder).encode(nine)
    assert caught.value.param == "questions.q.criteria"
    whole = len(protocol_of(folder).encode(REQUEST))
    with pytest.raises(InputTooLong, match=f"{whole} tokens together, more than the limit of {whole - 1}"):
        protocol_of(folder, max_length=whole - 1).encode(REQUEST)


def test_the_checkpoints_own_files_may_have_it_all(folder: Path) -> None:
    backend = load_tokenizer_files(folder).backend_tokenizer
    ids = [backend.token_to_id(code) for code in CODES]
    (folder / "infinity_decision.json").unlink()
    change(folder, "protocol.json", version=3, marker=MARKER, template=TEMPLATE)
    change(folder, "decision_config.json", format_version=2, codes=CODES, token_ids=ids, temperature={"choice": 2.0})
    spec = read_joint(folder)
    assert spec.token_ids == tuple(ids) and spec.temperatures.of(QuestionKind.CHOICE, 3) == 2.0
    assert spec.notes == (NOTE,) and "contract-only" in NOTE
    assert load_tokenizer_files(folder).decode(protocol_of(folder).encode(REQUEST).input_ids) == PROMPT
    change(folder, "decision_config.json", token_ids=ids[::-1])
    with pytest.raises(LoadError, match=r"code 'A' of 'codes' is 1 tokens \(\d+\), not the one token"):
        protocol_of(folder)
    change(folder, "protocol.json", template="joint-question-inline-readout-v1")
    with pytest.raises(LoadError, match="names its template without the text, which is not public"):
        read_joint(folder)
    change(folder, "protocol.json", version=4)
    with pytest.raises(LoadError, match="'version' is 4; it must be 3"):
        read_joint(folder)


def test_default_instructions_and_indentation(folder: Path) -> None:
    template = TEMPLATE | {"default_instructions": {"noul": "Yes or no?"}, "noul": ["nay", "aye"], "separator": "\n"}
    change(folder, template=template, state_json={"indent": 1})
    text = load_tokenizer_files(folder).decode(protocol_of(folder).encode(REQUEST).input_ids)
    assert '{\n "msg": "charged twice"\n}\nQuestion 1: refund?\nA: nay\nB: aye\n' in text
    assert "Question 4: Yes or no?" in text and "Question 2: Choose the best matching option." in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_version": 2}, "'format_version' is 2; it must be 1"),
        ({"attention": "causal"}, "'attention' is 'causal'; it must be one of noncausal_full"),
        ({"pooling": "last"}, "'pooling' is 'last'; it must be one of marker"),
        ({"readout": {"kind": "slot_lm"}}, "'kind' is 'slot_lm'; it must be one of rows"),
        ({"marker": None}, "key 'marker' is missing"),
        ({"codes": ["A", "A"]}, "'codes' is .*different codes"),
        ({"codes": ["A"]}, "'codes' is .*2 to 255"),
        ({"noul_order": ["true"]}, "'noul_order' is"),
        ({"state_json": {"ensure_ascii": True}}, "'ensure_ascii' is True; it must be false"),
        ({"template": TEMPLATE | {"question": "{n} {instructions} {options}"}}, r"'question' is .*\{marker\} is not"),
        ({"template": TEMPLATE | {"option": "{code} {code} {text}"}}, r"'option' is .*\{code\} is not"),
        ({"template": TEMPLATE | {"noul": ["no"]}}, "'noul' is .*two texts"),
        ({"template": None}, "protocol.json names its template without the text"),
        ({"temperature": {"box": 1}}, "'temperature' has the key 'box'"),
        ({"temperature": 0}, "default=0; a temperature must be a finite number above 0"),
    ],
)
def test_a_wrong_contract_is_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_joint(change(folder, **values))


def test_tokens_and_rows_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match=r"'marker' is '<\|fim_suffix\|>', which is no token"):
        protocol_of(change(folder, marker="<|fim_suffix|>"))
    with pytest.raises(LoadError, match=r"code 'Quixotic' of 'codes' is [0-9]+ tokens"):
        protocol_of(change(folder, marker=MARKER, codes=["A", "Quixotic"]))
    with pytest.raises(WeightMismatch, match=r"'weight' has shape \[8, 64\]; .*\[7, 64\]"):
        protocol_of(change(folder, codes=CODES[:-1]))
    with pytest.raises(WeightMismatch, match="'rows' is missing"):
        protocol_of(change(folder, codes=CODES, readout={"tensor": "rows"}))
    with pytest.raises(LoadError, match=r"'file' of 'readout' is '\.\./x'"):
        protocol_of(change(folder, readout={"file": "../x"}))
    change(folder, readout=None)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(LoadError, match="has no chat template"):
        protocol_of(folder)
