"""A transformers (or native) model without head, run packed: ``[T]`` tokens in, ``[T, D]`` hidden states out.

Called by the runner. Most families run transformers' own modelling code unchanged through the registered attention
function; a few are patched per instance, a few are native. ``self_check`` proves that packing really took effect.

Shape suffixes: T packed tokens, D hidden size.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinity_bento.attention import interface
from infinity_bento.attention.interface import IMPLEMENTATION, CallCounter
from infinity_bento.batching.packing import PackedBatch, pack
from infinity_bento.checkpoints import remote_layouts
from infinity_bento.checkpoints.families import Family
from infinity_bento.checkpoints.weights import WeightReport, load_module
from infinity_bento.core import Encoded
from infinity_bento.errors import LoadError
from infinity_bento.models import adapters as task_adapters
from infinity_bento.models import merged_adapter
from infinity_bento.models.adapters import AdapterSwitch
from infinity_bento.models.linears import LinearPlan, Precision, best_kernel, replace_linears
from infinity_bento.models.patches import dynamic_rope

# Largest relative difference (Frobenius norms) between a sequence packed and alone that a self-check accepts.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class CheckpointLayout(Protocol):
    """What is needed of a checkpoint's layout: its config and where the transformer's files are."""

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def transformer_path(self) -> Path: ...

    @property
    def weights_path(self) -> Path: ...

    @property
    def tensor_prefix(self) -> str: ...

    @property
    def adapter_path(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The figures of a passed self-check."""

    attention: str  # the implementation name in force
    attention_calls: int  # of one forward pass
    difference: float  # relative, packed against alone
    tolerance: float


class Backbone:
    """A loaded model that turns packed batches into hidden states. Holds no state of a batch: any thread may call it.

    Args:
        module: The model, in eval mode, already taught packing.
        family: Its row in the table.
        config: The normalised config as a plain dict.
        weights: What was loaded.
        switch: Chooses task adapters, where the checkpoint has some.
        linears: How the linears were rebuilt for the CPU; None: they are torch's.
        twin_states: Of a native encoder: what the transformers module that it was made from gave for the probes.
    """

    def __init__(
        self,
        module: nn.Module,
        family: Family,
        config: dict[str, Any],
        weights: WeightReport,
        switch: AdapterSwitch | None = None,
        *,
        linears: LinearPlan | None = None,
        twin_states: Tensor | None = None,
    ) -> None:
        self.module = module
        self.linears = linears
        self._twin_states = twin_states
        self.family = family
        self.config = config
        self.weights = weights
        self.switch = switch
        parameter = next(module.parameters())
        self.dtype = parameter.dtype
        self.device = parameter.device
        self.position_offset = family.position_offset(config)
        self.causal = family.is_causal(config)
        self._kwargs = dict(family.forward_kwargs)
        if family.decoder and config.get("is_causal") is False:
            self._kwargs["is_causal"] = False
        self._token_types = family.takes_token_types and int(config.get("type_vocab_size") or 0) > 1

    @property
    def is_native(self) -> bool:
        """Whether an encoder of our own replaced transformers' module."""
        return not type(self.module).__module__.startswith("transformers.")

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states, D."""
        return int(self.config["hidden_size"] if "hidden_size" in self.config else self.config["dim"])

    @property
    def attention_name(self) -> str:
        """The attention implementation in force, as in the report."""
        name = getattr(getattr(self.module, "config", None), "_attn_implementation", None)
        return str(name) if name is not None else IMPLEMENTATION

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the task adapters that ``forward`` can choose; empty for nearly all checkpoints."""
        return self.switch.names if self.switch is not None else ()

    def adapter_for(self, prompt_name: str | None) -> str | None:
        """The task adapter that goes with a named prompt: the one of the same name, or None."""
        if prompt_name is None or self.switch is None:
            return None
        index = self.switch.index(prompt_name)
        return None if index is None else self.switch.names[index]

    def forward(
        self,
        batch: PackedBatch,
        *,
        adapters: Sequence[str | None] | None = None,
        attention_calls: CallCounter | None = None,
    ) -> Tensor:
        """Hidden states of a packed batch; run it under ``torch.inference_mode``.

        Args:
            batch: On this backbone's device, packed with this backbone's ``position_offset``.
            adapters: The task adapter of each sequence in packed order, None for none; tasks may mix.
            attention_calls: Counts the attention calls when given.

        Returns:
            ``[T, D]`` in the model's dtype, in packed order.
        """
        if self.linears is not None and self.linears.precision is Precision.MIXED:
            batch.attention_dtype = self.linears.dtype
        kwargs = dict(self._kwargs)
        if self._token_types and batch.token_type_ids is not None:
            kwargs["token_type_ids"] = batch.token_type_ids[None]
        if attention_calls is not None:
            kwargs["attention_calls"] = attention_calls
        ids, positions = batch.input_ids, batch.position_ids
        if batch.fold is not None:
            ids, positions = ids[batch.fold.index], positions[batch.fold.index]
        ids, positions = ids[None], positions[None]
        if self.switch is None:
            output = self.module(input_ids=ids, position_ids=positions, packed=batch, **kwargs)
        else:
            with self.switch.use(adapters, batch, self.dtype):
                output = self.module(input_ids=ids, position_ids=positions, packed=batch, **kwargs)
        hidden: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
        return hidden[0] if batch.fold is None else hidden[0][batch.fold.scatter]

    def self_check(self) -> SelfCheck:
        """Prove that this model runs packed: two short inputs together equal each one alone.

        It also waits for the check of the weights, which runs on beside the rest of the loading.

        Raises:
            LoadError: If a sub-config ignored the packed attention, if the number of attention calls is not that of
                the attention layers, or if the outputs differ by more than the dtype allows.
            WeightMismatch: If a weight is NaN or infinite.
        """
        self.weights.wait_checked()
        for config in attention_configs(self.module):
            if config._attn_implementation != IMPLEMENTATION:
                raise LoadError(
                    f"{self.family.title}: {type(config).__name__} kept attention {config._attn_implementation!r} "
                    f"instead of {IMPLEMENTATION!r}, so it cannot run packed with this version of transformers."
                )
        counter = CallCounter()
        reference = self.probe_states().float()
        with torch.inference_mode():
            together = self.forward(self._probe(self._probe_ids()), attention_calls=counter)
        expected = self.family.attention_layers(self.config)
        if counter.calls != expected:
            raise LoadError(
                f"{self.family.title}: {counter.calls} packed attention calls in one forward pass instead of "
                f"{expected}, one for each attention layer, so its results would be wrong."
            )
        difference = relative_difference(together, reference)
        tolerance = TOLERANCES.get(self.linears.dtype if self.linears else self.dtype, 1e-1)
        if not difference <= tolerance:  # also when it is not a number
            raise LoadError(
                f"{self.family.title}: two inputs run packed differ from each run alone by {difference:.2e} (relative, "
                f"{str(self.dtype).removeprefix('torch.')}); at most {tolerance:.0e} is allowed, so the checkpoint "
                "cannot be served."
            )
        self._check_twin(reference, tolerance)
        return SelfCheck(self.attention_name, counter.calls, difference, tolerance)

    @torch.inference_mode()
    def probe_states(self) -> Tensor:
        """Hidden states of the probes, each run alone, end to end."""
        return torch.cat([self.forward(self._probe([ids])) for ids in self._probe_ids()])

    def _check_twin(self, states: Tensor, tolerance: float) -> None:
        """A native encoder must give what the transformers module gave that it was made from."""
        if self._twin_states is None:
            return
        difference = relative_difference(states, self._twin_states)
        self._twin_states = None
        if not difference <= tolerance:
            raise LoadError(
                f"{self.family.title}: the native encoder differs from transformers' by {difference:.2e} (relative); "
                f"at most {tolerance:.0e} is allowed. Set native-encoders=false to serve transformers' own, and report "
                "this."
            )

    def _probe_ids(self) -> list[list[int]]:
        """Two short inputs, the shorter first as packing will order them; ids spread over the vocabulary."""
        vocabulary = int(self.config["vocab_size"])
        return [[(17 + 101 * index) % vocabulary for index in range(first, last)] for first, last in ((0, 5), (5, 16))]

    def _probe(self, ids: list[list[int]]) -> PackedBatch:
        return pack([Encoded(row) for row in ids], position_offset=self.position_offset, device=self.device)


def relative_difference(states: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    expected = reference.float()
    return float((states.float() - expected).norm() / expected.norm().clamp_min(1e-12))


def attention_configs(module: nn.Module) -> Iterator[Any]:
    """Each distinct transformers config in a model that names an attention implementation."""
    seen: set[int] = set()
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None and id(config) not in seen and hasattr(config, "_attn_implementation"):
            seen.add(id(config))
            yield config


def load_backbone(
    layout: CheckpointLayout,
    family: Family,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    linears: LinearPlan | None = None,
    native_encoders: bool = True,
) -> Backbone:
    """Load a checkpoint's transformer, ready to run packed.

    Args:
        layout: The checkpoint.
        family: Its row in the table, from ``families.family_of``.
        dtype: Of the weights.
        device: Where they go.
        linears: Rebuild the linears for the CPU this way; None: leave them.
        native_encoders: With ``linears``, use the native encoder of the families that have one.

    Raises:
        LoadError: If the class is missing in the installed transformers, or ignores the packed attention.
        WeightMismatch: If weights are missing or have a wrong shape.
    """
    config = remote_layouts.normalise(layout.config)
    interface.register()
    build = native_builder(family, config) if family.native_class else transformers_builder(family, config)
    found = task_adapters.load_adapters(config, layout.transformer_path) if family.task_adapters else None
    module, report = load_module(
        build,
        layout.weights_path,
        device=device,
        dtype=dtype,
        rename=without_adapters if found else without_prefix(layout.tensor_prefix),
        allow_missing=(r"^pooler\.",),
        background_check=True,  # self_check waits for it
    )
    if layout.adapter_path is not None:
        merged_adapter.merge(module, layout.adapter_path)
    if family.native_class is None:
        config = teach_packing(module, family)
    if found is not None:
        task_adapters.install(module, *found)
    switch = found[0] if found is not None else None
    backbone = Backbone(module, family, config, report, switch)
    return backbone if linears is None else rebuilt(backbone, linears, native=native_encoders and found is None)


def rebuilt(backbone: Backbone, linears: LinearPlan, *, native: bool) -> Backbone:
    """The same model as the CPU runs it best: a native encoder where there is one, else with fast linears.

    Takes the weights over from ``backbone``, which is used up.
    """
    family = backbone.family
    if linears.kernel is None:
        linears = replace(linears, kernel=best_kernel(backbone.module))
    if native and family.native_encoder is not None:
        states = backbone.probe_states()
        module_name, function = family.native_encoder.split(":")
        encoder = getattr(importlib.import_module(module_name), function)(backbone.module, linears)
        if encoder is not None:
            return Backbone(
                encoder.eval(), family, backbone.config, backbone.weights, linears=linears, twin_states=states
            )
    replace_linears(backbone.module, linears)
    backbone.linears = linears
    return backbone


def native_builder(family: Family, config: dict[str, Any]) -> Callable[[], nn.Module]:
    """Builds a native class from the normalised config."""
    assert family.native_class is not None
    module_name, class_name = family.native_class.split(":")
    native = getattr(importlib.import_module(module_name), class_name)
    return lambda: native(config)


def transformers_builder(family: Family, config: dict[str, Any]) -> Callable[[], nn.Module]:
    """Builds transformers' class of this family from the normalised config, without pooler.

    Raises:
        LoadError: If the installed transformers has no such class, or refuses the config.
    """
    from transformers import CONFIG_MAPPING, MODEL_MAPPING, __version__

    try:
        config_class = CONFIG_MAPPING[family.model_type]
        model_class: Any = MODEL_MAPPING[config_class]
    except KeyError:
        needed = f"; version {family.since} has it" if family.since else ""
        raise LoadError(
            f"{family.title} (model_type {family.model_type!r}) is not in the installed transformers {__version__}"
            f"{needed}: install a newer version."
        ) from None
    try:
        parsed = config_class.from_dict(config)
    except (TypeError, ValueError, KeyError) as error:
        raise LoadError(f"config.json: transformers {__version__} refuses it for {family.title}: {error}") from error
    kwargs: dict[str, Any] = {}
    if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        kwargs["add_pooling_layer"] = False
    parsed._attn_implementation = "eager" if family.eager_only_load else None
    return lambda: model_class(parsed, **kwargs)


def without_prefix(prefix: str) -> Callable[[str], str | None] | None:
    """Leaves out the weights that do not begin with ``prefix``, and takes it off the others; None: all stay."""
    if not prefix:
        return None
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


def without_adapters(name: str) -> str | None:
    """Names of weights that are stored beside the adapters of their layer; None for the adapters themselves."""
    return None if ".lora_" in name else name.replace(".parametrizations.weight.original", ".weight")


def teach_packing(module: Any, family: Family) -> dict[str, Any]:
    """Set the packed attention on a transformers model, patch it where needed, and return its full config."""
    if getattr(module, "pooler", None) is not None:
        module.pooler = None  # heads pool; transformers may have built it again while converting tensors
    if family.patch is not None and family.eager_only_load:
        # The class has no attention interface, so its setter would refuse; the patch calls our attention itself.
        module.config._attn_implementation_internal = IMPLEMENTATION
    else:
        module.set_attn_implementation(IMPLEMENTATION)
    if family.patch is not None:
        importlib.import_module(family.patch).install(module)
    dynamic_rope.install(module, family.title)
    full: dict[str, Any] = module.config.to_dict()
    return full
