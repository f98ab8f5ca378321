"""From a checkpoint to its decision protocol. Called by ``loading`` once the backbone is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity_bento.checkpoints.chat_decisions import TEMPLATE_FILE, read_chat
from infinity_bento.checkpoints.decisions import CONFIG_FILE, READOUT_FILE, Protocol, ReadoutSpec, read_readout
from infinity_bento.checkpoints.jev import HEAD_FILE, read_jev
from infinity_bento.checkpoints.json_files import JsonObject
from infinity_bento.checkpoints.laya import read_laya
from infinity_bento.checkpoints.pplx_joint import read_joint
from infinity_bento.checkpoints.slot_lm import read_slots
from infinity_bento.checkpoints.temperatures import Temperatures, in_force
from infinity_bento.checkpoints.tensor_files import read_file
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.decisions import chat, jev, onejev
from infinity_bento.heads.decisions.clef import load_clef
from infinity_bento.heads.decisions.laya import load_laya
from infinity_bento.heads.decisions.pplx import D3, PPLX
from infinity_bento.heads.decisions.pplx_joint import load_joint
from infinity_bento.heads.decisions.protocol import DecisionProtocol
from infinity_bento.heads.decisions.readout import Prompt, ReadoutProtocol, ReadoutWriter, Slots, same_for_all
from infinity_bento.heads.decisions.rune import MARKS, RUNE
from infinity_bento.heads.decisions.template import TemplateWriter
from infinity_bento.heads.verdict import output_matrix


@dataclass(frozen=True, slots=True)
class Model:
    """What a protocol must know of the loaded model."""

    folder: Path
    config: dict[str, Any]  # of the language model
    tokenizer: Any  # of transformers
    width: int  # of the hidden states
    max_length: int  # tokens of a sequence
    dtype: torch.dtype
    device: torch.device
    calibration: Path | None = None  # a file of temperatures; None: that of the checkpoint, if there is one


def build_protocol(protocol: Protocol, model: Model) -> DecisionProtocol:
    """The protocol of a loaded checkpoint.

    Raises:
        LoadError: Files, codes or versions do not fit; names the file and the key.
        WeightMismatch: A tensor of the head is missing or has a wrong shape.
    """
    folder, tokenizer = model.folder, model.tokenizer
    if protocol is Protocol.LAYA:
        spec = read_laya(folder)
        temperatures = in_force(spec.temperatures, folder, model.calibration)
        return load_laya(
            folder,
            spec,
            tokenizer,
            temperatures,
            max_length=model.max_length,
            dtype=model.dtype,
            device=model.device,
        )
    if protocol is Protocol.CLEF:
        rows = output_matrix(folder, _tied(model)).to(model.device)
        temperatures = in_force(Temperatures(), folder, model.calibration)
        return load_clef(folder, tokenizer, rows, temperatures, max_length=model.max_length, device=model.device)
    if protocol is Protocol.PPLX_JOINT:
        joint = read_joint(folder)
        temperatures = in_force(joint.temperatures, folder, model.calibration)
        return load_joint(
            folder,
            joint,
            tokenizer,
            temperatures,
            width=model.width,
            max_length=model.max_length,
            device=model.device,
        )
    if protocol in (Protocol.PPLX, Protocol.D3):
        return _with_readout(protocol, PPLX if protocol is Protocol.PPLX else D3, read_readout(folder), model)
    if protocol is Protocol.JEV:
        return _with_judge(model)
    if protocol is Protocol.CHAT:
        return _with_labels(model)
    return _with_output_rows(protocol, model)


def _with_readout(protocol: Protocol, prompt: Prompt, spec: ReadoutSpec, model: Model) -> ReadoutProtocol:
    """Rows of the checkpoint's own readout."""
    backend, config = model.tokenizer.backend_tokenizer, model.folder / CONFIG_FILE
    for code, wanted in zip(spec.codes, spec.token_ids, strict=True):
        ids = backend.encode(code, add_special_tokens=False).ids
        if ids != [wanted]:
            raise LoadError(
                f"{config}: code {code!r} of 'codes' is {ids} in this tokenizer, not the one token {wanted} of "
                "'token_ids'; use the tokenizer that belongs to this checkpoint."
            )
    file = model.folder / READOUT_FILE
    rows = read_file(file).get("weight")
    wanted_shape = [len(spec.codes), model.width]
    if rows is None or list(rows.shape) != wanted_shape:
        found = "is missing" if rows is None else f"has shape {list(rows.shape)}"
        raise WeightMismatch(f"{file}: tensor 'weight' {found}; it must be {wanted_shape}: codes by hidden values.")
    return _read(protocol, prompt, same_for_all(spec.codes), rows, spec.temperatures, model)


def _with_judge(model: Model) -> ReadoutProtocol:
    """Rows and, where there are some, biases of a JEV head."""
    spec, file = read_jev(model.folder), model.folder / HEAD_FILE
    tensors = read_file(file)
    for name, wanted in (("weight", [spec.rows, model.width]), ("bias", [spec.rows])):
        found = list(tensors[name].shape) if name in tensors else None
        if found != wanted and (found is not None or name == "weight"):
            text = "is missing" if found is None else f"has shape {found}"
            raise WeightMismatch(f"{file}: tensor {name!r} {text}; it must be {wanted}, a row for each verbalizer.")
    left = sorted(set(tensors) - {"weight", "bias"})
    if left:
        raise WeightMismatch(f"{file}: tensor {left[0]!r} has no place in a JEV head, which is 'weight' and 'bias'.")
    return _read(
        Protocol.JEV,
        jev.GEMMA if "gemma" in str(model.config.get("model_type")) else jev.PLAIN,
        {kind: Slots(labels, first) for kind, (first, labels) in spec.slots.items()},
        tensors["weight"],
        spec.temperatures,
        model,
        bias=tensors.get("bias"),
        softcap=spec.softcap,
    )


def _with_output_rows(protocol: Protocol, model: Model) -> ReadoutProtocol:
    """Rows of the language model's output, of the letters that are the labels."""
    slots = same_for_all(onejev.labels(model.tokenizer.backend_tokenizer))
    if protocol is Protocol.RUNE:
        prompt, own = RUNE, Temperatures()
        _check_marks(MARKS, model)
    else:
        prompt = onejev.prompt(model.tokenizer, blocks=protocol is Protocol.BLOCK)
        own = read_slots(model.folder).temperatures
    rows = _output_rows(protocol, slots[QuestionKind.CHOICE].codes, model)
    return _read(protocol, prompt, slots, rows, own, model, softcap=_softcap(model))


def _with_labels(model: Model) -> ReadoutProtocol:
    """Rows of the language model's output, of the labels of each kind of question."""
    spec = read_chat(model.folder)
    tables = list(dict.fromkeys(spec.labels.values()))
    firsts = dict(zip(tables, accumulate(map(len, tables), initial=0), strict=False))
    slots = {kind: Slots(labels, firsts[labels]) for kind, labels in spec.labels.items()}
    rows = torch.cat([_output_rows(Protocol.CHAT, labels, model) for labels in tables])
    if spec.template is None:
        prompt = chat.prompt(model.tokenizer, spec)
        return _read(Protocol.CHAT, prompt, slots, rows, spec.temperatures, model, softcap=_softcap(model))
    writer = TemplateWriter(
        model.tokenizer,
        spec.template,
        str(model.folder / TEMPLATE_FILE),
        slots,
        true_first=spec.true_first,
        max_length=model.max_length,
    )
    temperatures = in_force(spec.temperatures, model.folder, model.calibration)
    return ReadoutProtocol(
        Protocol.CHAT, writer, rows.to(model.device, torch.float32), temperatures, softcap=_softcap(model)
    )


def _output_rows(protocol: Protocol, labels: Sequence[str], model: Model) -> Tensor:
    """``[labels, D]`` as stored; each label must be a token of its own."""
    backend = model.tokenizer.backend_tokenizer
    ids: dict[int, str] = {}
    for label in labels:
        found = backend.encode(label, add_special_tokens=False).ids
        if len(found) != 1 or found[0] == model.tokenizer.unk_token_id or found[0] in ids:
            raise LoadError(
                f"The tokenizer of {model.folder} has no single token of its own for the label {label!r}; {protocol} "
                f"needs one for each of its {len(labels)} labels, {labels[0]} to {labels[-1]}."
            )
        ids[found[0]] = label
    return output_matrix(model.folder, _tied(model))[list(ids)]


def _check_marks(marks: Sequence[str], model: Model) -> None:
    """What a prompt that is not the checkpoint's own template is made of.

    Raises:
        LoadError: One is no token of the checkpoint.
    """
    missing = next((mark for mark in marks if model.tokenizer.backend_tokenizer.token_to_id(mark) is None), None)
    if missing is not None:
        raise LoadError(
            f"The tokenizer of {model.folder} has no token {missing!r}, which the prompt of rune is made of; rune "
            "needs the tokenizer of Gemma 4."
        )


def _tied(model: Model) -> bool:
    """Whether the output rows are the embeddings: the config of the whole model decides, as in transformers."""
    whole = JsonObject.read(model.folder / "config.json").data.get("tie_word_embeddings")
    return bool(model.config.get("tie_word_embeddings") if whole is None else whole)


def _softcap(model: Model) -> float | None:
    cap = model.config.get("final_logit_softcapping")
    return float(cap) if cap else None


def _read(
    protocol: Protocol,
    prompt: Prompt,
    slots: Mapping[QuestionKind, Slots],
    rows: Tensor,
    own: Temperatures,
    model: Model,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> ReadoutProtocol:
    writer = ReadoutWriter(model.tokenizer.backend_tokenizer, prompt, slots, model.max_length)
    return ReadoutProtocol(
        protocol,
        writer,
        rows.to(model.device, torch.float32),
        in_force(own, model.folder, model.calibration),
        bias_C=None if bias is None else bias.to(model.device, torch.float32),
        softcap=softcap,
    )
