from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laya.common import build_sequence, collate_items, temp_bucket
from safetensors.torch import load_file, save_file

from infinity_bento.checkpoints.families import family_of
from infinity_bento.checkpoints.laya import read_laya
from infinity_bento.checkpoints.layout import read_layout
from infinity_bento.core import Encoded, Item, Task
from infinity_bento.decisions import DecisionRequest
from infinity_bento.errors import InferenceError, InputTooLong, InvalidInput, LoadError, WeightMismatch
from infinity_bento.heads.decisions.laya import LayaProtocol, load_laya
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files
from infinity_bento.models.backbone import Backbone, load_backbone
from infinity_bento.runners.runner import Runner
from tests import tiny_laya
from tests.heads.decisions.running import decide, decide_one, outcomes, special_count, spoiled

LAYOUTS = ("sequential", "parallel")
LONG = "the customer was charged twice and asks for the money back. " * 40
STATES: list[Any] = [
    tiny_laya.STATE,
    "short",
    LONG,
    [{"role": "user", "content": LONG}, {"role": "user", "content": "the newest turn"}],
    "a [MASK] in the state",
]


def protocol_of(folder: Path, max_length: int = 512) -> LayaProtocol:
    spec = read_laya(folder)
    tokenizer = load_tokenizer_files(read_layout(folder).tokenizer_path)
    return load_laya(folder, spec, tokenizer, spec.temperatures, max_length=max_length, dtype=torch.float32)


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request: pytest.FixtureRequest) -> tuple[Path, Backbone, LayaProtocol]:
    folder = tiny_laya.folder(request.param)
    layout = read_layout(folder)
    backbone = load_backbone(layout, family_of(layout.config, folder), dtype=torch.float32)
    backbone.self_check()
    return folder, backbone, protocol_of(folder)


def reference(folder: Path, state: Any, questions: dict[str, Any]) -> tuple[list[dict[str, Any]], Any, Any]:
    """The sequences, option logits and act probabilities of the reference package."""
    agent = tiny_laya.oracle(folder)
    internal = {name: agent._to_internal(question) for name, question in questions.items()}
    items = agent._encode_state(state, list(questions), internal)
    with torch.no_grad():
        logits, act = agent._forward(collate_items([items], agent.tok.pad_token_id))
    return items, logits, act


def expected(folder: Path, state: Any, questions: dict[str, Any]) -> list[np.ndarray]:
    """The probabilities of the reference package before it rounds them."""
    agent = tiny_laya.oracle(folder)
    items, logits, _ = reference(folder, state, questions)
    rows = []
    for item, row in zip(items, logits, strict=True):
        kind, count = item["qtype"], len(item["markers"])
        scale = agent.temperature_by_options.get(temp_bucket(kind, count), agent.temperature[kind])
        rows.append(torch.tensor(row[:count] / scale).double().softmax(-1).numpy())
    return rows


@pytest.mark.parametrize("state", STATES, ids=["object", "text", "long", "turns", "mask"])
def test_equals_the_reference(served: tuple[Path, Backbone, LayaProtocol], state: Any) -> None:
    folder, backbone, protocol = served
    asked = tiny_laya.request(state, tiny_laya.QUESTIONS)
    encoded = protocol.encode(asked)
    items, _, act = reference(folder, state, tiny_laya.QUESTIONS)
    assert encoded.parts is not None
    for part, item in zip(encoded.parts, items, strict=True):
        assert part.input_ids == item["ids"]
        assert list(part.readout.markers) == item["markers"]
        if "layout" in item:
            assert part.position_ids == item["layout"]["position_ids"]
            assert part.blocks is not None and part.blocks.tolist() == item["layout"]["option_ids"]
    got = decide_one(backbone, protocol, asked)
    for decision, wanted, row in zip(got, expected(folder, state, tiny_laya.QUESTIONS), act, strict=True):
        np.testing.assert_allclose(decision.probabilities, wanted, atol=1e-5)
        assert decision.extras["act_probability"] == pytest.approx(float(row[0]), abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = tiny_laya.oracle(folder).system_one(state, tiny_laya.QUESTIONS)["answers"]
    for question, decision in zip(asked.questions, got, strict=True):
        assert decision.native_confidence == pytest.approx(answers[question.id]["confidence"], abs=1e-4)
        assert decision.extras["answer_confidence"] == pytest.approx(
            answers[question.id]["answer_confidence"], abs=1e-4
        )


def test_the_answers_are_not_trivial(served: tuple[Path, Backbone, LayaProtocol]) -> None:
    _, backbone, protocol = served
    decisions = decide_one(backbone, protocol, tiny_laya.request(tiny_laya.STATE, tiny_laya.QUESTIONS))
    spread = [max(decision.probabilities) - min(decision.probabilities) for decision in decisions[:5]]
    assert max(spread) > 0.05
    assert any(0.05 < decision.extras["act_probability"] < 0.95 for decision in decisions)


@pytest.mark.parametrize("count", [1, 7, 30, 47])
def test_budgets_equal_the_reference(count: int) -> None:
    """Options are cut, then the question, then the state."""
    folder = tiny_laya.folder()
    words = "one two three four five six seven eight nine ten "
    question = {"type": "choice", "instructions": words * 8, "criteria": {f"n{i}": words * 5 for i in range(count)}}
    (part,) = protocol_of(folder).encode(tiny_laya.request(LONG, {"q": question})).parts or ()
    tokenizer = tiny_laya.oracle(folder).tok
    internal = {"t": "choice", "ins": question["instructions"], "crit": question["criteria"]}
    ids, markers, stats = build_sequence(tokenizer, LONG, internal, return_truncation_stats=True)
    assert (part.input_ids, list(part.readout.markers)) == (ids, markers)
    assert part.truncated_from is not None and part.truncated_from > len(part)
    assert part.readout.extras["state_tokens_dropped"] == stats["state_tokens_dropped"]
    assert part.readout.extras["question_tokens_dropped"] > 0


def test_cuts_are_reported() -> None:
    protocol = protocol_of(tiny_laya.folder())
    questions = {name: tiny_laya.QUESTIONS[name] for name in ("a", "b")}
    assert protocol.encode(tiny_laya.request("short", questions)).truncated_from is None
    encoded = protocol.encode(tiny_laya.request(LONG, questions))
    assert encoded.truncated_from is not None and encoded.truncated_from > len(encoded)
    assert encoded.characters > 2000


def test_one_question_alone_equals_it_among_ten_and_in_any_batch(
    served: tuple[Path, Backbone, LayaProtocol],
) -> None:
    _, backbone, protocol = served
    questions = {f"q{i}": list(tiny_laya.QUESTIONS.values())[i % 6] for i in range(10)}
    everything = tiny_laya.request(tiny_laya.STATE, questions)
    other = tiny_laya.request(LONG, tiny_laya.QUESTIONS)
    batch = decide(backbone, protocol, [other, everything, other])
    assert batch[0] == batch[2]
    for index, question in enumerate(everything.questions):
        (alone,) = decide_one(backbone, protocol, replace(everything, questions=(question,)))
        np.testing.assert_allclose(alone.probabilities, batch[1][index].probabilities, atol=1e-5)
        assert alone.extras["act_probability"] == pytest.approx(batch[1][index].extras["act_probability"], abs=1e-5)


def test_another_question_changes_nothing(served: tuple[Path, Backbone, LayaProtocol]) -> None:
    _, backbone, protocol = served
    first, second = dict(tiny_laya.QUESTIONS), dict(tiny_laya.QUESTIONS)
    first["b"] = {"type": "choice", "instructions": "xxxx", "criteria": {"1": "a", "2": "b"}}
    second["b"] = {"type": "choice", "instructions": "yyyy", "criteria": {"3": "c", "4": "d"}}
    one, two = (decide_one(backbone, protocol, tiny_laya.request(tiny_laya.STATE, q)) for q in (first, second))
    assert one[1] != two[1]
    for index in (0, 2, 3, 4, 5):
        assert one[index] == two[index]


def test_ids_do_not_count(served: tuple[Path, Backbone, LayaProtocol]) -> None:
    _, _, protocol = served
    renamed = {f"other {name}": question for name, question in tiny_laya.QUESTIONS.items()}
    one, two = (protocol.encode(tiny_laya.request("s", q)).parts for q in (tiny_laya.QUESTIONS, renamed))
    assert one is not None and two is not None
    assert [part.input_ids for part in one] == [part.input_ids for part in two]


def test_the_order_of_options_counts_only_in_sequence(served: tuple[Path, Backbone, LayaProtocol]) -> None:
    folder, backbone, protocol = served
    asked = tiny_laya.request(tiny_laya.STATE, {"d": tiny_laya.QUESTIONS["d"]})
    question = asked.questions[0]
    turned = replace(asked, questions=(replace(question, options=question.options[::-1]),))
    (one,), (two,) = (decide_one(backbone, protocol, request) for request in (asked, turned))
    difference = np.abs(np.array(one.probabilities) - np.array(two.probabilities)[::-1]).max()
    assert difference < 1e-5 if read_laya(folder).parallel else difference > 1e-3


def test_markers_cannot_be_forged(served: tuple[Path, Backbone, LayaProtocol]) -> None:
    """The reference takes [SEP] and [CLS] in a text as the tokens; here they are text, like any other."""
    folder, _, protocol = served
    special = set(tiny_laya.oracle(folder).tok.all_special_ids)

    def asked(text: str) -> DecisionRequest:
        questions = {
            "q": {"type": "choice", "instructions": f"a{text}", "criteria": {f"b{text}": f"c{text}", "d": [text]}},
            "n": {"type": "noul", "instructions": {"x": text}, "criteria": {"true": text, "false": text}},
        }
        return tiny_laya.request({"state": f"e {text}"}, questions)

    plain = special_count(protocol.encode(asked("none")), special)
    for text in ("[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]", "[SEP][MASK][SEP]", " [MASK] "):
        assert special_count(protocol.encode(asked(text)), special) == plain, text


def test_a_question_needs_instructions() -> None:
    protocol = protocol_of(tiny_laya.folder())
    for missing in (None, "", "  ", {}, []):
        question = {"type": "noul", "instructions": missing, "criteria": {"true": "a"}}
        with pytest.raises(InvalidInput, match="'q' has no instructions") as caught:
            protocol.encode(tiny_laya.request("s", {"q": question}))
        assert caught.value.param == "questions.q.instructions"


def test_too_many_options_are_refused() -> None:
    protocol = protocol_of(tiny_laya.folder())
    question = {"type": "choice", "instructions": "which", "criteria": {f"option {i}": "text" for i in range(200)}}
    with pytest.raises(InputTooLong, match="of the 200 options of question 'q' fit into the 512 tokens"):
        protocol.encode(tiny_laya.request("s", {"q": question}))


def test_the_length_limit_may_be_lower() -> None:
    encoded = protocol_of(tiny_laya.folder(), max_length=64).encode(
        tiny_laya.request(LONG, {"a": tiny_laya.QUESTIONS["a"]})
    )
    assert [len(part) for part in encoded.sequences] == [64]


def test_a_bad_number_is_an_error_of_its_own_request() -> None:
    folder = tiny_laya.folder()
    layout, protocol = read_layout(folder), protocol_of(folder)
    backbone = load_backbone(layout, family_of(layout.config, folder), dtype=torch.float32)
    requests = [tiny_laya.request("s", {"a": tiny_laya.QUESTIONS["a"]}), tiny_laya.request(LONG, tiny_laya.QUESTIONS)]
    items = [Item(Task.DECIDE, decision=request) for request in requests]
    runner = Runner(backbone, {Task.DECIDE: protocol})
    batch = runner.prepare([protocol.encode(request) for request in requests])
    with torch.inference_mode():
        rows = protocol.run(spoiled(backbone.forward(batch)), batch)
    good, bad = runner.collect({Task.DECIDE: rows}, batch, items)
    assert isinstance(good, list) and isinstance(bad, InferenceError)


def test_runs_in_bfloat16() -> None:
    folder = tiny_laya.folder()
    layout, spec = read_layout(folder), read_laya(folder)
    backbone = load_backbone(layout, family_of(layout.config, folder), dtype=torch.bfloat16)
    tokenizer = load_tokenizer_files(layout.tokenizer_path)
    protocol = load_laya(folder, spec, tokenizer, spec.temperatures, max_length=512, dtype=torch.bfloat16)
    (found,) = outcomes(backbone, protocol, [tiny_laya.request("s", tiny_laya.QUESTIONS)])
    assert isinstance(found, list) and all(abs(sum(d.probabilities) - 1) < 1e-6 for d in found)


# Files --------------------------------------------------------------------------------------------------------------


def changed(folder: Path, target: Path, **values: Any) -> Path:
    """A copy of a checkpoint with other keys in its config; None removes one."""
    shutil.copytree(folder, target)
    file = target / "rl_agent_config.json"
    config = {key: value for key, value in (json.loads(file.read_text()) | values).items() if value is not None}
    file.write_text(json.dumps(config))
    return target


def test_temperatures_are_those_of_the_reference(tmp_path: Path) -> None:
    """Beyond 0.5 to 5, or no number: clamped or 1, and said so."""
    folder = changed(
        tiny_laya.folder(),
        tmp_path / "laya",
        temperature=[0.1, True, "warm"],
        temperature_by_options={"choice:11+": 99, "choice:3-5": 1.5, "noul:2": 0.7},
    )
    spec = read_laya(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent = tiny_laya.oracle(folder)
    protocol = protocol_of(folder)
    for index, kind in enumerate(("choice", "score", "noul")):
        for count in (1, 2, 3, 5, 6, 10, 11, 40):
            wanted = agent.temperature_by_options.get(temp_bucket(index, count), agent.temperature[index])
            assert protocol.temperatures.of(kind, count) == wanted  # type: ignore[arg-type]
    assert len(spec.notes) == 1 and "choice 0.1 as 0.5" in spec.notes[0] and "score True as 1" in spec.notes[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": [1.0]}, "'temperature' is .*it must be a list of three numbers"),
        ({"temperature_by_options": {"choice:4": 1.0}}, "'temperature_by_options' is .*choice:2, score:3-5"),
        ({"option_layout": "spiral"}, "'option_layout' is 'spiral'; it must be one of sequential, parallel"),
        ({"max_len": "long"}, "'max_len' is 'long'; it must be a whole number"),
        ({"head_layers": -1}, "'head_layers' is -1"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_laya(changed(tiny_laya.folder(), tmp_path / "laya", **values))


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    deeper = changed(tiny_laya.folder(), tmp_path / "deeper", head_layers=3)
    with pytest.raises(WeightMismatch, match=r"tensor 'head.layers.2.\S+' of the decision head is missing"):
        protocol_of(deeper)
    flatter = changed(tiny_laya.folder(), tmp_path / "flatter", head_layers=1)
    with pytest.raises(WeightMismatch, match=r"tensor 'head.layers.1.\S+' has no place in the decision head"):
        protocol_of(flatter)
    more = changed(tiny_laya.folder(), tmp_path / "more", act_costs={"a": 1, "b": 2})
    with pytest.raises(WeightMismatch, match=r"act_head.2.weight"):
        protocol_of(more)
    broken = changed(tiny_laya.folder(), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["scorer.3.bias"] = tensors["scorer.3.bias"].to(torch.int8)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"'scorer.3.bias' is stored as int8"):
        protocol_of(broken)


def test_the_layout_knows_its_folders() -> None:
    folder = tiny_laya.folder()
    layout = read_layout(folder)
    assert layout.weights_path == folder
    assert layout.tokenizer_path == folder / "tokenizer"
    assert (layout.model_type, layout.max_seq_length) == ("modernbert", 512)
    with pytest.raises(LoadError, match="is a Laya checkpoint"):
        read_layout(folder, dense_path="2_Dense")


def test_parts_are_ordinary_sequences() -> None:
    encoded = protocol_of(tiny_laya.folder()).encode(tiny_laya.request("s", tiny_laya.QUESTIONS))
    assert encoded.input_ids == [] and all(isinstance(part, Encoded) for part in encoded.sequences)
    assert len(encoded) == sum(len(part) for part in encoded.sequences)
