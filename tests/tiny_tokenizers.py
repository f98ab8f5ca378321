"""Small tokenizers trained in the process, one kind per family: WordPiece, byte BPE, Unigram, BPE with byte fallback.

Called by ``tests.tiny``. Post-processor, padding side and chat template are the family's.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "What is Deep Learning?",
    "Deep Learning is a part of machine learning.",
    "The capital of France is Paris.",
    "A plane is taking off. An air plane is flying over the sea.",
    "I like you. I am not having a great day.",
    "def add(a, b): return a + b",
    "query: how do embeddings work? passage: vectors of numbers",
    "yes no Yes No true false A B C D E F G H",
    "Kurzer deutscher Satz mit Umlauten: \u00e4\u00f6\u00fc\u00df.",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u4e2d\u6587\u6587\u672c \ud55c\uad6d\uc5b4",
    "emoji \U0001f600 and numbers 0123456789 3.14",
] * 20

BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_NAMES = {
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ROBERTA_NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACE = "\u2581"


def fast(tokenizer: Tokenizer, names: dict[str, str], length: int, *, types: bool = False, **kwargs: Any) -> Any:
    """A transformers tokenizer around a trained one."""
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=length, model_input_names=inputs, **names, **kwargs
    )


def template(tokenizer: Tokenizer, single: str, pair: str, names: list[str]) -> None:
    """Set what is added around one text and around a pair."""
    special = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


@functools.cache
def wordpiece_json(special: tuple[str, ...], unknown: str) -> str:
    """WordPiece, lower-casing."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@functools.cache
def byte_bpe_json(special: tuple[str, ...]) -> str:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@functools.cache
def unigram_json(special: tuple[str, ...]) -> str:
    """Unigram with SentencePiece's spaces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=list(special), unk_token=special[3], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@functools.cache
def sentencepiece_json(special: tuple[str, ...]) -> str:
    """BPE with byte fallback; the bytes are ordinary entries, not special ones."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*special, *byte_tokens], max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    return json.dumps(content)


def bert(types: bool = True) -> Any:
    """BERT's: [CLS] a [SEP] b [SEP], second text of type 1."""
    tokenizer = Tokenizer.from_str(wordpiece_json(tuple(BERT_SPECIAL), "[UNK]"))
    template(tokenizer, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["[CLS]", "[SEP]"])
    return fast(tokenizer, BERT_NAMES, 512, types=types)


def bert_without_types() -> Any:
    """DistilBERT's."""
    return bert(types=False)


def mpnet() -> Any:
    """WordPiece with RoBERTa's special tokens."""
    tokenizer = Tokenizer.from_str(wordpiece_json(("<s>", "<pad>", "</s>", "[UNK]", "<mask>"), "[UNK]"))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return fast(tokenizer, {**ROBERTA_NAMES, "unk_token": "[UNK]"}, 512)


def roberta() -> Any:
    """RoBERTa's: <s> a </s></s> b </s>."""
    tokenizer = Tokenizer.from_str(byte_bpe_json(tuple(ROBERTA_SPECIAL)))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return fast(tokenizer, ROBERTA_NAMES, 512)


def modernbert() -> Any:
    """Byte BPE with BERT's special tokens, no types."""
    tokenizer = Tokenizer.from_str(byte_bpe_json(tuple(BERT_SPECIAL)))
    tokenizer.normalizer = normalizers.NFC()
    template(tokenizer, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0", ["[CLS]", "[SEP]"])
    return fast(tokenizer, BERT_NAMES, 8192)


def xlmr() -> Any:
    """XLM-RoBERTa's."""
    tokenizer = Tokenizer.from_str(unigram_json(tuple(ROBERTA_SPECIAL)))
    template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>", ["<s>", "</s>"])
    return fast(tokenizer, ROBERTA_NAMES, 512)


def deberta() -> Any:
    """DeBERTa v3's."""
    tokenizer = Tokenizer.from_str(unigram_json(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")))
    template(tokenizer, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["[CLS]", "[SEP]"])
    return fast(tokenizer, BERT_NAMES, 512, types=True)


def qwen(end: bool = True) -> Any:
    """Qwen3-Embedding's: the pad token is appended as end token."""
    tokenizer = Tokenizer.from_str(byte_bpe_json(tuple(QWEN_SPECIAL)))
    tokenizer.normalizer = normalizers.NFC()
    if end:
        template(tokenizer, "$A <|endoftext|>", "$A $B <|endoftext|>", ["<|endoftext|>"])
    names = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return fast(tokenizer, names, 4096, padding_side="left", chat_template=QWEN_CHAT)


def qwen_without_end() -> Any:
    """Qwen3's own: nothing is appended."""
    return qwen(end=False)


def gemma() -> Any:
    """Gemma's: <bos> a <eos>."""
    tokenizer = Tokenizer.from_str(sentencepiece_json(("<pad>", "<eos>", "<bos>", "<unk>")))
    template(tokenizer, "<bos> $A <eos>", "<bos> $A <eos> $B <eos>", ["<bos>", "<eos>"])
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return fast(tokenizer, names, 2048, padding_side="right")


def llama() -> Any:
    """Llama's: <s> a."""
    tokenizer = Tokenizer.from_str(sentencepiece_json(("<unk>", "<s>", "</s>", "<pad>")))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    template(tokenizer, "<s> $A", "<s> $A <s> $B", ["<s>"])
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return fast(tokenizer, names, 2048, padding_side="left")
