"""From a checkpoint to its decision protocol. Called by ``loading`` once the backbone is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity_bento.checkpoints.decisions import CONFIG_FILE, READOUT_FILE, Protocol, ReadoutSpec, read_readout
from infinity_bento.checkpoints.jev import HEAD_FILE, read_jev
from infinity_bento.checkpoints.laya import read_laya
from infinity_bento.checkpoints.pplx_joint import read_joint
from infinity_bento.checkpoints.temperatures import Temperatures, in_force
from infinity_bento.checkpoints.tensor_files import read_file
from infinity_bento.decisions import QuestionKind
from infinity_bento.errors import LoadError, WeightMismatch
from infinity_bento.heads.decisions import jev, onejev
from infinity_bento.heads.decisions.clef import load_clef
from infinity_bento.heads.decisions.laya import load_laya
from infinity_bento.heads.decisions.pplx import D3, PPLX
from infinity_bento.heads.decisions.pplx_joint import load_joint
from infinity_bento.heads.decisions.protocol import DecisionProtocol
from infinity_bento.heads.decisions.readout import Prompt, ReadoutProtocol, ReadoutWriter, Slots, same_for_all
from infinity_bento.heads.decisions.rune import RUNE
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
        rows = output_matrix(folder, bool(model.config.get("tie_word_embeddings"))).to(model.device)
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
    """Rows of the language model's output, of the tokens that are the labels."""
    backend = model.tokenizer.backend_tokenizer
    if protocol is Protocol.ONEJEV and not getattr(model.tokenizer, "chat_template", None):
        raise LoadError(f"{model.folder} has no chat template, in which OneJev's prompt is written; add the original.")
    codes = onejev.labels(backend)
    ids = [backend.encode(code, add_special_tokens=False).ids for code in codes]
    several = next((code for code, found in zip(codes, ids, strict=True) if len(found) != 1), None)
    if several is not None:
        raise LoadError(
            f"The tokenizer of {model.folder} has no single token for the label {several!r}; {protocol} needs A to Z."
        )
    matrix = output_matrix(model.folder, bool(model.config.get("tie_word_embeddings")))
    rows = matrix[[token for (token,) in ids]]
    prompt = onejev.prompt(model.tokenizer) if protocol is Protocol.ONEJEV else RUNE
    cap = model.config.get("final_logit_softcapping")
    return _read(
        protocol, prompt, same_for_all(codes), rows, Temperatures(), model, softcap=float(cap) if cap else None
    )


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
