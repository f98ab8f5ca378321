"""Layouts: both generations of sentence-transformers files, and every refusal with its file and key."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity_bento.checkpoints.layout import Layout, max_input_length, read_layout
from infinity_bento.checkpoints.st_modules import (
    DenseSpec,
    LayerNormSpec,
    LogitScoreSpec,
    MultiVectorMaskSpec,
    NormalizeSpec,
    PoolingSpec,
    RouterSpec,
    SparseStaticEmbeddingSpec,
    SpladePoolingSpec,
    StaticEmbeddingSpec,
    TransformerSpec,
)
from infinity_bento.core import Pooling
from infinity_bento.errors import LoadError

OLD = "sentence_transformers.models."
BERT = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512}


def write(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def old_modules(*names: str, transformer_path: str = "") -> list[dict[str, Any]]:
    entries = [{"idx": 0, "name": "0", "path": transformer_path, "type": f"{OLD}Transformer"}]
    return entries + [
        {"idx": n, "name": str(n), "path": f"{n}_{name}", "type": OLD + name} for n, name in enumerate(names, 1)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as sentence-transformers 2 wrote it."""
    write(tmp_path / "config.json", BERT)
    write(tmp_path / "modules.json", old_modules("Pooling", "Dense", "Normalize"))
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": True})
    write(tmp_path / "1_Pooling/config.json", {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True})
    write(tmp_path / "2_Dense/config.json", {"in_features": 8, "out_features": 4})
    return tmp_path


def test_old_generation(folder: Path) -> None:
    write(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {},
            "prompts": {"query": "q: ", "document": None},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
            "truncate_dim": 2,
        },
    )
    layout = read_layout(folder)
    assert (layout.model_type, layout.architectures, layout.config) == ("bert", ("BertModel",), BERT)
    assert layout.transformer_path == folder
    assert layout.has_sentence_transformers
    assert layout.kind == "SentenceTransformer"
    assert layout.modules == (
        PoolingSpec((Pooling.MEAN,), include_prompt=True, dimension=8),
        DenseSpec(folder / "2_Dense", 8, 4, bias=True, activation="Tanh"),
        NormalizeSpec(),
    )
    assert layout.pooling == layout.modules[0]
    assert (layout.max_seq_length, layout.do_lower_case) == (128, True)
    assert layout.prompts == {"query": "q: ", "document": ""}
    assert (layout.default_prompt_name, layout.similarity, layout.truncate_dim) == ("query", "dot", 2)


def test_transformer_in_its_own_folder(folder: Path) -> None:
    for name in ("config.json", "sentence_bert_config.json"):
        (folder / name).rename(write(folder / "0_Transformer" / name, "{}"))
    write(folder / "modules.json", old_modules("Pooling", transformer_path="0_Transformer"))
    layout = read_layout(folder)
    assert layout.transformer_path == folder / "0_Transformer"
    assert layout.max_seq_length == 128


def test_the_newest_generation_as_the_library_writes_it(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st
    from transformers import BertConfig, BertModel, BertTokenizer

    raw = tmp_path / "raw"
    settings = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=64,
    )  # fmt: skip
    BertModel(settings).save_pretrained(raw)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    BertTokenizer(vocab={name: number for number, name in enumerate(names)}).save_pretrained(raw)
    transformer = st.Transformer(str(raw), max_seq_length=32)
    model = SentenceTransformer(
        modules=[transformer, st.Pooling(8, ("max", "cls")), st.Dense(16, 4, use_residual=True), st.LayerNorm(4),
                 st.Dropout(0.1), st.Normalize()],
        prompts={"query": "query: "},
    )  # fmt: skip
    model.save(str(tmp_path / "new"))
    assert "max_seq_length" not in json.loads((tmp_path / "new/sentence_bert_config.json").read_text())
    layout = read_layout(tmp_path / "new")
    pooling, dense, norm, unit = layout.modules
    # The order of the file is the order of the vector, as in the library.
    assert pooling == PoolingSpec((Pooling.MAX, Pooling.CLS), True, 8)
    assert isinstance(dense, DenseSpec) and (dense.activation, dense.residual) == ("Tanh", True)
    assert norm == LayerNormSpec(tmp_path / "new" / "3_LayerNorm", 4)
    assert unit == NormalizeSpec()
    assert layout.prompts["query"] == "query: "
    assert layout.kind == "SentenceTransformer"
    assert layout.tokenizer_max_length == 32
    assert max_input_length(layout, 0) == 32


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode": "weightedmean"}, (Pooling.WEIGHTED_MEAN,)),
        ({"pooling_mode": ["lasttoken", "mean"]}, (Pooling.LAST_TOKEN, Pooling.MEAN)),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, (Pooling.CLS,)),
        (
            {f"pooling_mode_{name}": True for name in ("lasttoken", "mean_sqrt_len_tokens", "max_tokens", "cls_token")},
            (Pooling.CLS, Pooling.MAX, Pooling.MEAN_SQRT, Pooling.LAST_TOKEN),
        ),
        ({"pooling_mode_weightedmean_tokens": True}, (Pooling.WEIGHTED_MEAN,)),
        ({"pooling_mode_cls_token": False}, (Pooling.MEAN,)),
        ({}, (Pooling.MEAN,)),
    ],
)
def test_pooling_modes_equal_the_library(config: dict[str, Any], modes: tuple[Pooling, ...], folder: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling as Reference

    config = {"word_embedding_dimension": 4, "include_prompt": False, **config}
    write(folder / "1_Pooling/config.json", config)
    write(folder / "modules.json", old_modules("Pooling"))
    pooling = read_layout(folder).pooling
    assert pooling == PoolingSpec(modes, include_prompt=False, dimension=4)
    reference = Reference.load(str(folder / "1_Pooling")).pooling_mode
    assert (reference,) == modes if isinstance(reference, str) else reference == modes


@pytest.mark.parametrize(
    "type_name",
    [
        f"{OLD}Transformer",
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.base.models.Transformer",
        "custom_st.Transformer",
        "sentence_transformers.sparse_encoder.models.MLMTransformer",
    ],
)
def test_every_generation_of_type_names(type_name: str, folder: Path) -> None:
    modules = old_modules("Pooling")
    modules[0]["type"] = type_name
    modules[1]["type"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    write(folder / "modules.json", modules)
    layout = read_layout(folder)
    assert layout.pooling is not None
    assert layout.transformer is not None
    assert layout.transformer.task == ("fill-mask" if "MLM" in type_name else "feature-extraction")


def test_folder_without_modules(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "bert", "architectures": None})
    layout = read_layout(tmp_path)
    assert not layout.has_sentence_transformers
    assert (layout.modules, layout.kind, layout.architectures, layout.prompts) == ((), None, (), {})
    write(tmp_path / "config.json", {**BERT, "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}})
    assert read_layout(tmp_path).kind == "CrossEncoder"


def test_sparse_cross_and_multi_vector_encoders(folder: Path) -> None:
    write(folder / "modules.json", old_modules("SpladePooling"))
    write(folder / "1_SpladePooling/config.json", {"pooling_strategy": "sum", "activation_function": "log1p_relu"})
    layout = read_layout(folder)
    assert layout.modules == (SpladePoolingSpec("sum", "log1p_relu"),)
    assert layout.kind == "SparseEncoder"

    write(folder / "modules.json", old_modules("LogitScore"))
    write(folder / "1_LogitScore/config.json", {"true_token_id": 5, "false_token_id": 0})
    layout = read_layout(folder)
    assert (layout.modules, layout.kind) == ((LogitScoreSpec(5, 0),), "CrossEncoder")

    modules = [{"type": f"{OLD}Transformer", "path": ""}, {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}]
    write(folder / "modules.json", modules)
    dense = {
        "in_features": 8,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "module_input_name": "token_embeddings",
    }
    write(folder / "1_Dense/config.json", dense)
    layout = read_layout(folder)
    assert layout.kind == "MultiVectorEncoder"
    assert layout.modules == (
        DenseSpec(folder / "1_Dense", 8, 4, False, "Identity", False, "token_embeddings", "token_embeddings"),
    )
    write(folder / "config_sentence_transformers.json", {"model_type": "ColBERT", "query_prefix": "[Q] "})
    layout = read_layout(folder)
    assert layout.kind == "MultiVectorEncoder"
    assert layout.st_config["query_prefix"] == "[Q] "

    write(folder / "modules.json", [*modules, {"type": "x.MultiVectorMask", "path": "2_MultiVectorMask"}])
    write(folder / "2_MultiVectorMask/config.json", {"skiplist_words": [",", "."], "keep_only_token_ids": [7]})
    assert read_layout(folder).modules[1] == MultiVectorMaskSpec((",", "."), ("document",), (7,))


def test_static_embedding_without_transformer(tmp_path: Path) -> None:
    write(tmp_path / "modules.json", [{"type": f"{OLD}StaticEmbedding", "path": "0_StaticEmbedding"}])
    write(tmp_path / "0_StaticEmbedding/tokenizer.json", {})
    layout = read_layout(tmp_path)
    assert layout.modules == (StaticEmbeddingSpec(tmp_path / "0_StaticEmbedding"),)
    assert (layout.model_type, layout.config, layout.transformer) == ("static_embedding", {}, None)
    assert layout.transformer_path == tmp_path / "0_StaticEmbedding"
    assert max_input_length(layout, 0) is None
    (tmp_path / "0_StaticEmbedding/tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        read_layout(tmp_path)


def router_files(folder: Path) -> dict[str, Any]:
    write(folder / "modules.json", [{"type": f"{OLD}Router", "path": ""}])
    write(folder / "document_0_Transformer/config.json", BERT)
    write(folder / "document_1_SpladePooling/config.json", {})
    (folder / "query_0_SparseStaticEmbedding").mkdir()
    return {
        "types": {
            "query_0_SparseStaticEmbedding": "sentence_transformers.sparse_encoder.modules.SparseStaticEmbedding",
            "document_0_Transformer": "sentence_transformers.base.modules.transformer.Transformer",
            "document_1_SpladePooling": "sentence_transformers.sparse_encoder.models.SpladePooling",
        },
        "structure": {
            "query": ["query_0_SparseStaticEmbedding"],
            "document": ["document_0_Transformer", "document_1_SpladePooling"],
        },
        "parameters": {"default_route": "document", "route_mappings": {"('query', None)": "query"}},
    }


def test_router(tmp_path: Path) -> None:
    write(tmp_path / "router_config.json", router_files(tmp_path))
    layout = read_layout(tmp_path)
    (router,) = layout.modules
    assert isinstance(router, RouterSpec)
    assert router.routes == {
        "query": (SparseStaticEmbeddingSpec(tmp_path / "query_0_SparseStaticEmbedding"),),
        "document": (TransformerSpec(tmp_path / "document_0_Transformer"), SpladePoolingSpec()),
    }
    assert router.default_route == "document"
    assert router.mappings == {("query", None): "query"}
    assert layout.kind == "SparseEncoder"
    assert layout.transformer_path == tmp_path / "document_0_Transformer"
    assert layout.config == BERT


def test_asym_is_a_router(tmp_path: Path) -> None:
    files = router_files(tmp_path)
    files["parameters"] = {"allow_empty_key": True}
    write(tmp_path / "0_Asym/config.json", files)
    for name in files["types"]:
        (tmp_path / name).rename(tmp_path / "0_Asym" / name)
    write(tmp_path / "modules.json", [{"type": f"{OLD}Asym", "path": "0_Asym"}])
    (router,) = read_layout(tmp_path).modules
    assert isinstance(router, RouterSpec)
    assert router.default_route == "query"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"structure": {}}, ("router_config.json", "'structure'")),
        ({"structure": {"query": []}}, ("router_config.json", "route 'query'")),
        ({"structure": {"query": ["other"]}}, ("router_config.json", "'types'", "'other'")),
        ({"parameters": {"default_route": "x"}}, ("router_config.json", "'default_route' is 'x'", "query, document")),
        ({"parameters": {"route_mappings": {"query": "query"}}}, ("router_config.json", "'route_mappings'")),
        ({"parameters": {"route_mappings": {"('a', None)": "x"}}}, ("router_config.json", "'route_mappings'", "'x'")),
    ],
)
def test_router_refusals(change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path / "router_config.json", {**router_files(tmp_path), **change})
    assert_refused(lambda: read_layout(tmp_path), parts)


def assert_refused(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(LoadError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("name", ["WeightedLayerPooling", "WordWeights", "CNN", "LSTM", "BoW", "os.system", "Unheard"])
def test_unknown_modules_are_refused_by_name_and_file(name: str, folder: Path) -> None:
    modules = old_modules("Pooling")
    modules.append({"type": f"{OLD}{name}", "path": "2_X"})
    file = write(folder / "modules.json", modules)
    assert_refused(lambda: read_layout(folder), (str(file), f"{OLD}{name}", "Pooling"))


@pytest.mark.parametrize(
    ("file", "data", "parts"),
    [
        ("config.json", '{"model_type": \n "bert",}', ("line 2",)),
        ("config.json", "[]", ("holds a list",)),
        ("config.json", b"\xff\xfe\x00x", ("is not JSON",)),
        ("config.json", "[" * 200_000, ("is not JSON",)),
        ("config.json", {}, ("'model_type' is missing", "a string")),
        ("config.json", {"model_type": 3}, ("'model_type' is 3", "a string")),
        ("config.json", {"model_type": "bert", "architectures": "BertModel"}, ("'architectures'", "list of strings")),
        ("modules.json", "{}", ("list of at least one module",)),
        ("modules.json", "[]", ("list of at least one module",)),
        ("modules.json", "[1]", ("entry 0 is 1",)),
        ("modules.json", [{"path": ""}], ("'type' is missing",)),
        ("modules.json", [{"type": "x.Transformer", "path": 1}], ("'path' is 1",)),
        ("modules.json", [{"type": "x.Transformer", "path": "../other"}], ("leaves the checkpoint folder",)),
        ("modules.json", [{"type": "x.Transformer", "path": "/etc"}], ("leaves the checkpoint folder",)),
        ("modules.json", [{"type": "x.Pooling", "path": "1_Pooling"}], ("first module",)),
        ("modules.json", [*old_modules("Pooling"), {"type": "x.Pooling", "path": "1_Pooling"}], ("more than one",)),
        ("modules.json", [{"type": "x.Transformer"}, {"type": "x.Transformer"}], ("Transformer follows",)),
        ("sentence_bert_config.json", {"max_seq_length": "128"}, ("'max_seq_length' is '128'", "at least 1")),
        ("sentence_bert_config.json", {"max_seq_length": 0}, ("'max_seq_length' is 0",)),
        ("sentence_bert_config.json", {"max_seq_length": True}, ("'max_seq_length' is True",)),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}, ("'do_lower_case' is 'yes'", "true or false")),
        ("1_Pooling/config.json", {"pooling_mode": "average"}, ("'pooling_mode' is 'average'", "lasttoken")),
        ("1_Pooling/config.json", {"pooling_mode": []}, ("'pooling_mode'",)),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, ("'pooling_mode'",)),
        ("1_Pooling/config.json", {"pooling_mode_first_last": True}, ("'pooling_mode_first_last'",)),
        ("1_Pooling/config.json", {"include_prompt": 1}, ("'include_prompt' is 1",)),
        ("1_Pooling/config.json", {"embedding_dimension": "8"}, ("'embedding_dimension' is '8'",)),
        ("2_Dense/config.json", {"out_features": 4}, ("'in_features' is missing",)),
        ("2_Dense/config.json", {"in_features": 9, "out_features": 4}, ("'in_features' is 9", "width 8")),
        ("2_Dense/config.json", {"in_features": 8, "out_features": 4, "bias": None, "activation_function": "os.system"},
         ("'activation_function' is 'os.system'", "Tanh")),
        ("2_Dense/config.json", {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.Linear"},
         ("'activation_function' is 'torch.nn.Linear'",)),
        ("2_Dense/config.json", {"in_features": 8, "out_features": 4, "activation_function": "torch.load"},
         ("'activation_function' is 'torch.load'",)),
        ("2_Dense/config.json", {"in_features": 8, "out_features": 4, "module_input_name": "all_layer_embeddings"},
         ("'module_input_name' is 'all_layer_embeddings'", "token_embeddings")),
        ("config_sentence_transformers.json", {"prompts": []}, ("'prompts'", "an object")),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, ("prompt 'query'",)),
        ("config_sentence_transformers.json", {"prompts": {"a": ""}, "default_prompt_name": "b"},
         ("'default_prompt_name' is 'b'", "(a)")),
        ("config_sentence_transformers.json", {"similarity_fn_name": "cos"}, ("'similarity_fn_name'", "cosine")),
        ("config_sentence_transformers.json", {"truncate_dim": -1}, ("'truncate_dim' is -1",)),
        ("config_sentence_transformers.json", {"model_type": "Other"}, ("'model_type' is 'Other'", "CrossEncoder")),
    ],
)  # fmt: skip
def test_malformed_files_are_refused(file: str, data: Any, parts: tuple[str, ...], folder: Path) -> None:
    path = folder / file
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        write(path, data)
    assert_refused(lambda: read_layout(folder), (str(path), *parts))


@pytest.mark.parametrize(
    ("name", "config", "parts"),
    [
        ("SpladePooling", {"pooling_strategy": "mean"}, ("'pooling_strategy' is 'mean'", "max, sum")),
        ("SpladePooling", {"activation_function": "gelu"}, ("'activation_function' is 'gelu'", "log1p_relu")),
        ("LogitScore", {}, ("'true_token_id' is missing",)),
        ("LogitScore", {"true_token_id": -1}, ("'true_token_id' is -1",)),
        ("MultiVectorMask", {"keep_only_token_ids": ["a"]}, ("'keep_only_token_ids'", "token ids")),
        ("MultiVectorMask", {"skiplist_words": "."}, ("'skiplist_words'", "list of strings")),
        ("LayerNorm", {}, ("'dimension' is missing",)),
        ("Normalize", {"module_input_name": "x"}, ("'module_input_name' is 'x'",)),
    ],
)
def test_malformed_modules_are_refused(name: str, config: dict[str, Any], parts: tuple[str, ...], folder: Path) -> None:
    write(folder / "modules.json", old_modules(name))
    path = write(folder / f"1_{name}/config.json", config)
    assert_refused(lambda: read_layout(folder), (str(path), *parts))


@pytest.mark.parametrize("file", ["config.json", "1_Pooling/config.json", "2_Dense/config.json"])
def test_missing_files_are_named(file: str, folder: Path) -> None:
    (folder / file).unlink()
    assert_refused(lambda: read_layout(folder), (str(folder / file), "is missing"))


def test_missing_directory(tmp_path: Path) -> None:
    assert_refused(lambda: read_layout(tmp_path / "none"), (str(tmp_path / "none"), "is not a directory"))


def test_dense_path_replaces_the_only_dense(folder: Path) -> None:
    write(folder / "2_Dense_768/config.json", {"in_features": 8, "out_features": 768, "activation_function": None})
    dense = read_layout(folder, dense_path="2_Dense_768").modules[1]
    assert dense == DenseSpec(folder / "2_Dense_768", 8, 768, activation="Identity")
    assert_refused(
        lambda: read_layout(folder, dense_path="2_Dense_1024"), ("'2_Dense_1024'", "there are 2_Dense, 2_Dense_768")
    )
    assert_refused(lambda: read_layout(folder, dense_path="../x"), ("dense_path", "leaves the checkpoint folder"))
    write(folder / "modules.json", old_modules("Pooling"))
    assert_refused(lambda: read_layout(folder, dense_path="2_Dense_768"), ("modules.json", "0 Dense modules"))
    (folder / "modules.json").unlink()
    assert_refused(lambda: read_layout(folder, dense_path="2_Dense_768"), ("no modules.json",))


UNLIMITED = 1000000000000000019884624838656


@pytest.mark.parametrize(
    ("config", "settings", "tokenizer", "offset", "length"),
    [
        ({"max_position_embeddings": 512}, {"max_seq_length": 256}, {"model_max_length": 128}, 0, 256),
        ({"max_position_embeddings": 514}, {"max_seq_length": 514}, {}, 2, 512),
        ({"max_position_embeddings": 512}, {}, {"model_max_length": UNLIMITED}, 0, 512),
        ({"max_position_embeddings": 512}, {}, {"model_max_length": 384}, 0, 384),
        ({"max_position_embeddings": -1}, {}, {"model_max_length": 384}, 0, 384),
        ({"n_positions": 8192, "max_trained_positions": 2048}, {"max_seq_length": 8192}, {}, 0, 8192),
        ({"n_positions": 8192, "max_trained_positions": 2048}, {}, {"model_max_length": 8192}, 0, 2048),
        ({"text_config": {"max_position_embeddings": 4096}}, {}, {}, 0, 4096),
        ({}, {}, {"model_max_length": UNLIMITED}, 0, None),
        ({}, {"max_seq_length": 77}, {}, 0, 77),
    ],
)
def test_max_input_length(
    config: dict[str, Any],
    settings: dict[str, Any],
    tokenizer: dict[str, Any],
    offset: int,
    length: int | None,
    tmp_path: Path,
) -> None:
    write(tmp_path / "config.json", {"model_type": "bert", **config})
    write(tmp_path / "sentence_bert_config.json", settings)
    write(tmp_path / "tokenizer_config.json", tokenizer)
    assert max_input_length(read_layout(tmp_path), offset) == length


def test_max_input_length_refuses_a_wrong_type(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", {"model_type": "bert", "max_position_embeddings": "512"})
    layout: Layout = read_layout(tmp_path)
    assert_refused(lambda: max_input_length(layout, 0), (str(file), "'max_position_embeddings' is '512'"))


def test_reading_a_layout_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, infinity_bento.checkpoints.layout, infinity_bento.checkpoints.resolve;"
        "print([name for name in ('torch', 'transformers', 'bentoml', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
