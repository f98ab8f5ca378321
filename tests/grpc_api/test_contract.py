"""The contract: generated code as the .proto says, names and numbers as TEI published them, a handler for each."""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

from infinity_bento.grpc_api import tei_pb2
from infinity_bento.grpc_api.methods import SERVICES

FOLDER = Path(tei_pb2.__file__).parent

# The fields by number, from 1, in proto/tei.proto of huggingface/text-embeddings-inference, commit 0d124dc;
# "?" marks an optional field.
NUMBERS = {
    "InfoRequest": "",
    "InfoResponse": "version sha? docker_label? model_id model_sha? model_dtype model_type max_concurrent_requests "
    "max_input_length max_batch_tokens max_batch_requests? max_client_batch_size "
    "tokenization_workers",
    "Metadata": "compute_chars compute_tokens total_time_ns tokenization_time_ns queue_time_ns inference_time_ns",
    "EmbedRequest": "inputs truncate normalize? truncation_direction prompt_name? dimensions?",
    "EmbedResponse": "embeddings metadata",
    "EmbedSparseRequest": "inputs truncate truncation_direction prompt_name?",
    "SparseValue": "index value",
    "EmbedSparseResponse": "sparse_embeddings metadata",
    "EmbedAllRequest": "inputs truncate truncation_direction prompt_name?",
    "TokenEmbedding": "embeddings",
    "EmbedAllResponse": "token_embeddings metadata",
    "PredictRequest": "inputs truncate raw_scores truncation_direction",
    "PredictPairRequest": "inputs truncate raw_scores truncation_direction",
    "Prediction": "score label",
    "PredictResponse": "predictions metadata",
    "RerankRequest": "query texts truncate raw_scores return_text truncation_direction",
    "RerankStreamRequest": "query text truncate raw_scores return_text truncation_direction",
    "Rank": "index text? score",
    "RerankResponse": "ranks metadata",
    "EncodeRequest": "inputs add_special_tokens prompt_name?",
    "SimpleToken": "id text special start? stop?",
    "EncodeResponse": "tokens",
    "DecodeRequest": "ids skip_special_tokens",
    "DecodeResponse": "text",
}
METHODS = {
    "Info": ["Info"],
    "Embed": ["Embed", "EmbedStream", "EmbedSparse", "EmbedSparseStream", "EmbedAll", "EmbedAllStream"],
    "Predict": ["Predict", "PredictPair", "PredictStream", "PredictPairStream"],
    "Rerank": ["Rerank", "RerankStream"],
    "Tokenize": ["Tokenize", "TokenizeStream", "Decode", "DecodeStream"],
}


def compiled(*arguments: str) -> None:
    assert protoc.main(["protoc", f"-I{FOLDER}", *arguments, str(FOLDER / "tei.proto")]) == 0


def definition_in(file: Path) -> str:
    """The line that holds the whole contract; others name the version of the generator."""
    (line,) = (line for line in file.read_text().splitlines() if "AddSerializedFile(" in line)
    return line


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    compiled(f"--python_out={tmp_path}")
    ours, expected = (definition_in(folder / "tei_pb2.py") for folder in (FOLDER, tmp_path))
    assert ours == expected, "tei_pb2.py is stale: run make proto"


def test_the_types_are_those_of_the_proto(tmp_path: Path) -> None:
    compiled(f"--pyi_out={tmp_path}")
    assert (FOLDER / "tei_pb2.pyi").read_text() == (tmp_path / "tei_pb2.pyi").read_text(), "run make proto"


def test_names_and_numbers_are_teis() -> None:
    file = tei_pb2.DESCRIPTOR
    assert file.package == "tei.v1"
    for name, written in NUMBERS.items():
        fields = written.split()
        ours = sorted(file.message_types_by_name[name].fields, key=lambda field: field.number)
        assert [field.number for field in ours] == list(range(1, len(fields) + 1)), name
        optional = {field.name for field in ours if field.containing_oneof is not None}
        assert [field.name + "?" * (field.name in optional) for field in ours] == fields, name
    assert set(file.message_types_by_name) == set(NUMBERS)
    assert {name: [m.name for m in service.methods] for name, service in file.services_by_name.items()} == METHODS
    assert tei_pb2.ModelType.items() == [
        ("MODEL_TYPE_EMBEDDING", 0),
        ("MODEL_TYPE_CLASSIFIER", 1),
        ("MODEL_TYPE_RERANKER", 2),
    ]
    assert tei_pb2.TruncationDirection.items() == [("TRUNCATION_DIRECTION_RIGHT", 0), ("TRUNCATION_DIRECTION_LEFT", 1)]


def test_the_table_answers_every_method() -> None:
    assert {name: {m.removesuffix("Stream") for m in names} for name, names in METHODS.items()} == {
        name: set(row.methods) for name, row in SERVICES.items()
    }
    for name, service in tei_pb2.DESCRIPTOR.services_by_name.items():
        for method in service.methods:
            streamed = method.name.endswith("Stream")
            assert method.client_streaming == streamed, method.name
            assert method.server_streaming == (streamed and name != "Rerank"), method.name
