"""Weights of a checkpoint into a module: built without memory, tensors assigned from the mapped file, all checked.

Called by ``models.backbone``, native classes and heads. Classes for which transformers converts tensors (fused or
split projections, experts) go through its ``from_pretrained`` with the tensors read here; the report says so.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity_bento.checkpoints.buffers import compute_buffers, tensors_on_meta
from infinity_bento.checkpoints.tensor_files import TensorFiles, read_tensors, refuse_non_finite
from infinity_bento.checkpoints.tensor_names import (
    Assignment,
    Patterns,
    Rename,
    any_of,
    assign_names,
    check_shapes,
    note_leftover,
    refuse_missing,
    rename_all,
    some,
    wrong_shape,
)
from infinity_bento.errors import LoadError, WeightMismatch

# transformers switches weight initialization off by patching torch.nn.init for the whole process, and two threads
# that do so at once would leave it patched for good.
_BUILD_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What was loaded, and everything that did not fit exactly."""

    files: tuple[Path, ...]
    tensors: int  # in the files
    bytes: int  # of these, as stored
    seconds: float
    method: str  # "direct", or "transformers" where that library converts the tensors
    missing: tuple[str, ...] = ()  # allowed to be missing; zero
    unexpected: tuple[str, ...] = ()  # in the files, belonging to no part of the module
    ignored: tuple[str, ...] = ()  # in the files, of a kind that is usually left over
    tied: tuple[str, ...] = ()  # not in the files, the same as another parameter
    _check: Future[None] | None = field(default=None, repr=False, compare=False)

    def wait_checked(self) -> None:
        """Wait for the check for NaN and Inf.

        Raises:
            WeightMismatch: A tensor holds such a value.
        """
        if self._check is not None:
            self._check.result()

    def notes(self) -> tuple[str, ...]:
        """Sentences for the log and ``/info``; empty if everything fitted."""
        notes = []
        if self.method != "direct":
            notes.append("weights were converted by transformers, which is slower than direct loading")
        if self.missing:
            notes.append(f"{some(self.missing)} not in the checkpoint, set to zero")
        if self.unexpected:
            notes.append(f"{some(self.unexpected)} in the checkpoint and not used")
        return tuple(notes)


def load_module(
    build: Callable[[], nn.Module],
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rename: Rename | None = None,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    background_check: bool = False,
) -> tuple[nn.Module, WeightReport]:
    """Build a module and load its weights.

    Names are taken with and without the class's base prefix (``bert.``, ``model.``), LayerNorm ``gamma``/``beta`` as
    ``weight``/``bias``. Buffers that no checkpoint stores are computed: see ``buffers.compute_buffers``.

    Args:
        build: Makes the module; runs on the meta device, so it allocates nothing. Buffers take the dtype it gives.
        folder: Where the weight files lie.
        device: Where parameters and buffers go.
        dtype: Floating type of the parameters; those a class insists on keeping in float32 stay there.
        rename: Stored name -> name in the module, or None to leave the tensor out. Applied first.
        allow_missing: Regular expressions (searched) of names that may be missing. Such a parameter is zero.
        allow_unexpected: Regular expressions (searched) of renamed names to leave out.
        background_check: Let the check for NaN and Inf run on; the caller must call ``report.wait_checked()`` before
            it serves. It reads all weights once, which is most of the time of a load.

    Returns:
        The module in eval mode without gradients, and the report.

    Raises:
        LoadError: Weight files are missing, corrupt or quantized, or a buffer cannot be computed.
        WeightMismatch: Tensors are missing, left over inside a part of the module, have a wrong shape or are not
            finite.
    """
    started = time.perf_counter()
    files = read_tensors(folder, device=device)
    # The check runs without the GIL and building needs it, so they can overlap.
    check = None if background_check else _start_check(files)
    patterns = Patterns(any_of(allow_missing), any_of(allow_unexpected))
    with _BUILD_LOCK, _garbage_collection_paused():
        module, fields = _load(build, folder, files, rename, dtype, torch.device(device), patterns)
    left = tensors_on_meta(module)
    if left:
        raise LoadError(f"{folder}: {some(left)} without a value after loading {type(module).__name__}; this is a bug.")
    module.eval()
    if check is None:
        check = _start_check(files)
    else:
        check.result()
    size = sum(tensor.nbytes for tensor in files.tensors.values())
    seconds = time.perf_counter() - started
    return module, WeightReport(files.files, len(files.tensors), size, seconds, _check=check, **fields)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A named place for a tensor in a module."""

    table: dict[str, Any]  # the owner's parameters or buffers
    key: str
    tensor: Tensor

    def assign(self, tensor: Tensor) -> None:
        is_parameter = isinstance(self.tensor, nn.Parameter)
        self.table[self.key] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _start_check(files: TensorFiles) -> Future[None]:
    checker = ThreadPoolExecutor(1, "check-weights")
    future = checker.submit(refuse_non_finite, files)
    checker.shutdown(wait=False)
    return future


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """A build makes tens of thousands of objects that all stay, so collecting in between only costs time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load(
    build: Callable[[], nn.Module],
    folder: Path,
    files: TensorFiles,
    rename: Rename | None,
    dtype: torch.dtype,
    device: torch.device,
    patterns: Patterns,
) -> tuple[nn.Module, dict[str, Any]]:
    module = _build_on_meta(build)
    _refuse_quantized(module, folder)
    patterns = patterns.with_class(module)
    if _is_converted(module):
        loaded, fields = _load_converted(module, files, rename, dtype, patterns)
        return loaded.requires_grad_(False).to(device), fields
    return module, _load_direct(module, files, rename, dtype, device, patterns)


def _build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return build()


def _refuse_quantized(module: nn.Module, folder: Path) -> None:
    if getattr(getattr(module, "config", None), "quantization_config", None) is not None:
        raise LoadError(
            f"{folder / 'config.json'}: 'quantization_config' is set; quantized checkpoints are not supported, so use "
            "the float16, bfloat16 or float32 weights of the model."
        )


def _is_converted(module: nn.Module) -> bool:
    """Whether transformers converts tensors for this class or one inside it."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(module, add_legacy=False))


def _load_direct(
    module: nn.Module,
    files: TensorFiles,
    rename: Rename | None,
    dtype: torch.dtype,
    device: torch.device,
    patterns: Patterns,
) -> dict[str, Any]:
    slots = dict(_persistent_slots(module))
    expected = {name: slot.tensor for name, slot in slots.items()}
    found = assign_names(module, expected, files, rename, patterns)
    check_shapes(expected, found, files)
    keep = _kept_in_float32(module, dtype)
    for name, tensor in found.tensors.items():
        target = torch.float32 if keep.search(name) else dtype
        slots[name].assign(tensor.to(target) if expected[name].is_floating_point() else tensor)
    absent = set(expected) - set(found.tensors)
    tied = _tie(module, absent)
    missing = sorted(absent - set(tied))
    refuse_missing(missing, patterns.missing, files)
    for name in missing:
        kind = dtype if expected[name].is_floating_point() else expected[name].dtype
        slots[name].assign(torch.zeros(expected[name].shape, dtype=kind, device=device))
    compute_buffers(module, device)
    return {"method": "direct", "missing": tuple(missing), "tied": tied, **_leftovers(found)}


def _leftovers(found: Assignment) -> dict[str, Any]:
    return {"unexpected": tuple(found.unexpected), "ignored": tuple(found.ignored)}


def _persistent_slots(module: nn.Module) -> Iterator[tuple[str, _Slot]]:
    """Every parameter and buffer that a state dict has, by its name there."""
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None and key not in part._non_persistent_buffers_set:
                    yield prefix + key, _Slot(table, key, tensor)


def _kept_in_float32(module: nn.Module, dtype: torch.dtype) -> Any:
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names.update(getattr(module, "_keep_in_fp32_modules", None) or ())
    return any_of(rf"(^|\.){name}(\.|$)" for name in sorted(names))


def _tie(module: nn.Module, absent: set[str]) -> tuple[str, ...]:
    """Let a transformers class tie its parameters; returns the absent names that got a value by it."""
    pairs: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
    groups: dict[str, set[str]] = {}
    for target, source in pairs.items():
        groups.setdefault(source, {source}).add(target)
    if not pairs or any(group <= absent for group in groups.values()):
        return ()  # nothing to tie, or nothing to tie it to, which the caller reports
    still = set(absent)
    model: Any = module
    model.tie_weights(missing_keys=still, recompute_mapping=False)
    return tuple(sorted(absent - still))


def _load_converted(
    module: nn.Module, files: TensorFiles, rename: Rename | None, dtype: torch.dtype, patterns: Patterns
) -> tuple[nn.Module, dict[str, Any]]:
    """Through ``from_pretrained``, which knows how this class's stored tensors are split and fused."""
    names, left_out = rename_all(files.tensors, rename, files)
    cls: Any = type(module)
    folder = files.files[0].parent
    try:
        loaded, info = cls.from_pretrained(
            None,
            config=module.config,
            state_dict={name: files.tensors[stored] for name, stored in names.items()},
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise WeightMismatch(
            f"{folder}: transformers cannot convert the tensors for {cls.__name__} ({lines[0]}); use a checkpoint of "
            "this architecture."
        ) from error
    wrong = sorted(info["mismatched_keys"])
    if wrong:
        name, stored_shape, wanted = wrong[0]
        raise wrong_shape(str(folder), name, list(stored_shape), list(wanted), len(wrong) - 1)
    missing = sorted(info["missing_keys"])
    refuse_missing(missing, patterns.missing, files)
    found = Assignment(ignored=left_out)
    for name in sorted(info["unexpected_keys"]):
        note_leftover(loaded, name, names.get(name, name), files, patterns, found)
    with torch.no_grad():
        for name in missing:
            loaded.get_parameter(name).zero_()
    return loaded, {"method": "transformers", "missing": tuple(missing), **_leftovers(found)}
