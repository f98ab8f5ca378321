"""Writes ``clef.json``: what the vendored reference of clef-finetune 0.1.0 answers on the tiny Clef checkpoint.

Run it from the repository: ``pip install --no-deps clef-finetune==0.1.0 && python -m tests.oracles.clef``. That package
asks for peft, torchvision and accelerate, which its model code does not need; so it is no dependency of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from tests import tiny_clef

FILE = Path(__file__).with_suffix(".json")


def main() -> None:
    """Run the reference on every request."""
    from clef_finetune.jsm import load_jsm

    reference = load_jsm()
    folder = tiny_clef.folder()
    head = reference.JointSchemaHead(**tiny_clef.HEAD)
    head.load_state_dict(load_file(folder / "joint_head.safetensors"), strict=True)
    backbone = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = reference.ClefModel(backbone, head.eval())
    answers = []
    for request in tiny_clef.REQUESTS:
        record = reference.encode_record(tokenizer, request)
        with torch.inference_mode():
            batch = reference.collate_records([record], tokenizer.pad_token_id, torch.device("cpu"))
            logits = model(batch)[0]
        answers.append(
            {
                "prompt": tokenizer.decode(record.input_ids),
                "input_ids": list(record.input_ids),
                "option_ids": [list(question.option_ids) for question in record.questions],
                "logits": [row.tolist() for row in logits],
            }
        )
    FILE.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
