"""What holds for every decision family: found by its files, refused where they do not fit, questions left alone.

One table, which must list what docs/decisions.md lists.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infinity_bento.checkpoints.decisions import BY_OPTION_ALONE, Protocol, find_protocol
from infinity_bento.decisions import DecisionRequest
from infinity_bento.engine import Engine
from infinity_bento.errors import ConfigError, LoadError
from tests import tiny, tiny_clef, tiny_laya, tiny_readouts
from tests.heads.decisions.test_pplx_joint import CODES, OWN
from tests.heads.decisions.test_readout import decide, engine_of, outcomes, parsed

DOCS = (Path(__file__).parents[3] / "docs" / "decisions.md").read_text(encoding="utf-8")
REQUEST = parsed(tiny_readouts.REQUEST)


def joint() -> Path:
    """A Perplexity Decider v1.2 with its prompt in a file beside it."""
    path = tiny.root() / "decision-joint"
    if not path.exists():
        shutil.copytree(tiny_readouts.readout("pplx"), path)
        (path / "decision_config.json").unlink()
        rows = torch.randn(len(CODES), tiny.WIDTH, generator=torch.Generator().manual_seed(4)) * 0.3
        save_file({"weight": rows}, path / "readout.safetensors")
        (path / "infinity_decision.json").write_text(json.dumps(OWN))
    return path


@dataclass(frozen=True)
class Row:
    """A family of the table."""

    folder: Callable[[], Path]
    file: str | None  # that tells it; None: the option alone
    apart: bool = True  # a question's answer does not depend on the others


TABLE = {
    "laya": Row(tiny_laya.folder, "rl_agent_config.json"),
    "clef": Row(tiny_clef.folder, "joint_head_config.json", apart=False),
    "d3": Row(lambda: tiny_readouts.readout("d3"), "decision_config.json"),
    "pplx": Row(lambda: tiny_readouts.readout("pplx"), "decision_config.json"),
    "jev": Row(tiny_readouts.jev, "judge_config.json"),
    "pplx-joint": Row(joint, "infinity_decision.json", apart=False),
    "onejev": Row(tiny_readouts.onejev, None),
    "block": Row(tiny_readouts.block, "config.json"),
    "chat": Row(tiny_readouts.chat, None),
    "rune": Row(tiny_readouts.rune, None),
}


@pytest.fixture(scope="module", params=TABLE)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Row]]:
    row = TABLE[request.param]
    option = {} if row.file else {"decision-protocol": request.param}
    engine = engine_of(row.folder(), warmup="false", **option)
    yield engine, row
    engine.close()


def test_the_table_is_that_of_the_docs() -> None:
    section = DOCS.partition("## Families")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:] for line in section.splitlines() if line.startswith("| ")][1:]
    listed: dict[str, str] = {}
    for names, found_by, *_ in rows:
        for name in re.sub(r"\(.*?\)", "", names).split(","):
            listed[name.strip()] = found_by
    assert set(listed) == set(TABLE) == {protocol.value for protocol in Protocol}
    for name, row in TABLE.items():
        assert f"`--decision-protocol {name}`" in listed[name] or row.file is not None
        assert row.file is None or f"`{row.file}`" in listed[name], name
        assert (f"`--decision-protocol {name}`" in listed[name]) == (Protocol(name) in BY_OPTION_ALONE)


@pytest.mark.parametrize("name", TABLE)
def test_a_family_is_found_by_its_files_or_must_be_named(name: str) -> None:
    row = TABLE[name]
    found, named = find_protocol(row.folder()), find_protocol(row.folder(), name)
    assert named is not None and named[0] == name
    if row.file is None:
        assert found is None
    else:
        assert found is not None and found == named and row.file in found[1]


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("asked", TABLE)
def test_another_protocol_than_the_files_allow_is_refused(name: str, asked: str) -> None:
    row = TABLE[name]
    if asked == name or (row.file is None and Protocol(asked) in BY_OPTION_ALONE):
        found = find_protocol(row.folder(), asked)
        assert found is not None and found[0] == asked
        return
    says = "needs files that .* lacks" if row.file is None else f"contradicts .*{row.file}.*, which says {name}"
    with pytest.raises(ConfigError, match=f"--decision-protocol {asked} {says}"):
        find_protocol(row.folder(), asked)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("pplx-joint", "onejev", "block")])
def test_a_file_that_only_names_a_family_holds_nothing_else(name: str, tmp_path: Path) -> None:
    own = tmp_path / "infinity_decision.json"
    own.write_text(json.dumps({"format_version": 1, "protocol": name}))
    found = find_protocol(tmp_path)
    assert found is not None and found[0] == name
    own.write_text(json.dumps({"format_version": 1, "protocol": name, "temperature": 2}))
    with pytest.raises(LoadError, match=f"infinity_decision.json: key 'temperature' is not read for {name}"):
        find_protocol(tmp_path)
    own.write_text(json.dumps({"format_version": 2, "protocol": name}))
    with pytest.raises(LoadError, match=r"infinity_decision\.json: 'format_version' is 2"):
        find_protocol(tmp_path)


def numbered(request: DecisionRequest, number: int) -> DecisionRequest:
    """The same with other ids and instructions."""
    asked = [replace(q, id=f"{q.id}{number}", instructions=f"ask {number}") for q in request.questions]
    return replace(request, questions=tuple(asked))


def test_one_question_alone_equals_among_ten_of_several_requests(served: tuple[Engine, Row]) -> None:
    engine, row = served
    if not row.apart:  # then the whole request is what must not change
        first, _, again = outcomes(engine, REQUEST, numbered(REQUEST, 3), REQUEST)
        for one, other, alone in zip(first, again, decide(engine, REQUEST), strict=True):
            np.testing.assert_allclose(one.probabilities, alone.probabilities, atol=1e-5)
            np.testing.assert_allclose(other.probabilities, alone.probabilities, atol=1e-5)
        return
    ten = replace(REQUEST, questions=(*numbered(REQUEST, 1).questions, *numbered(REQUEST, 2).questions))
    first, _, again = outcomes(engine, ten, replace(ten, state="another state"), ten)
    for question, one, other in zip(ten.questions, first, again, strict=True):
        (alone,) = decide(engine, replace(ten, questions=(question,)))
        np.testing.assert_allclose(one.probabilities, alone.probabilities, atol=1e-5)
        np.testing.assert_allclose(other.probabilities, alone.probabilities, atol=1e-5)


def test_changing_one_question_leaves_the_others_bit_equal(served: tuple[Engine, Row]) -> None:
    engine, row = served
    # Two rare characters of as many tokens, so that the batch keeps its shape.
    first, *rest = numbered(REQUEST, 1).questions
    before, after = (
        decide(engine, replace(REQUEST, questions=(*rest, replace(first, id="other", instructions=text), first)))
        for text in ("\u9f8d", "\u9f8e")
    )
    same = [one.probabilities == other.probabilities for one, other in zip(before, after, strict=True)]
    assert not same.pop(-2)
    assert all(same) if row.apart else not any(same)
