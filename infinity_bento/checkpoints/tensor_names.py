"""Which stored tensor goes to which place of a module, and what is left over or missing. Called by weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from infinity_bento.checkpoints.tensor_files import TensorFiles
from infinity_bento.errors import WeightMismatch

Rename = Callable[[str], str | None]

# Heads and buffers that checkpoints carry along and a backbone does not use.
_USUAL_LEFTOVERS = (
    r"(^|\.)pooler\.",
    r"(^|\.)position_ids$",
    r"(^|\.)token_type_ids$",
    r"(^|\.)inv_freq$",
    r"(^|\.)masked_bias$",
    r"^(cls|lm_head|mlm_head|qa_outputs|classifier|score|head|decoder|predictions|sop_classifier)(\.|$)",
    r"^(pre_classifier|vocab_transform|vocab_layer_norm|vocab_projector|lm_predictions|mask_predictions)\.",
    r"^(discriminator_predictions|generator_predictions|generator_lm_head)\.",
    r"\.num_batches_tracked$",
)
_STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Patterns:
    """Names that may be missing, and names that may be left over."""

    missing: re.Pattern[str]
    unexpected: re.Pattern[str]

    def with_class(self, module: nn.Module) -> Patterns:
        """These, the usual leftovers, and those the class itself names."""
        own = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
        return Patterns(self.missing, any_of((self.unexpected.pattern, *_USUAL_LEFTOVERS, *own)))


@dataclass(frozen=True, slots=True)
class Assignment:
    """How stored tensors map to the module's names."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by the module's names
    stored: dict[str, str] = field(default_factory=dict)  # the module's name -> the name in the file
    unexpected: list[str] = field(default_factory=list)  # stored names
    ignored: list[str] = field(default_factory=list)  # stored names


def any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """One regular expression that finds any of several; nothing for none."""
    listed = tuple(patterns)
    return re.compile("|".join(f"(?:{pattern})" for pattern in listed) if listed else r"(?!)")


def some(names: Iterable[str]) -> str:
    """A count and the first names, as the subject of a sentence: "2 tensors (a, b) are"."""
    listed = list(names)
    shown = ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
    return f"1 tensor ({shown}) is" if len(listed) == 1 else f"{len(listed)} tensors ({shown}) are"


def rename_all(
    tensors: Mapping[str, Tensor], rename: Rename | None, files: TensorFiles
) -> tuple[dict[str, str], list[str]]:
    """New name -> stored name, and the stored names that ``rename`` leaves out.

    Raises:
        WeightMismatch: Two stored names become one.
    """
    names: dict[str, str] = {}
    left_out: list[str] = []
    for stored in tensors:
        name = stored if rename is None else rename(stored)
        if name is None:
            left_out.append(stored)
        elif name in names:
            raise _both(files, names[name], stored, name)
        else:
            names[name] = stored
    return names, left_out


def assign_names(
    module: nn.Module, expected: Mapping[str, Tensor], files: TensorFiles, rename: Rename | None, patterns: Patterns
) -> Assignment:
    """Find the place of every stored tensor.

    Raises:
        WeightMismatch: Two tensors for one place, or a tensor that belongs to a part the module has but has no place.
    """
    names, left_out = rename_all(files.tensors, rename, files)
    result = Assignment(ignored=left_out)
    prefix: str = getattr(module, "base_model_prefix", "")
    for name, stored in names.items():
        target = next((candidate for candidate in _candidates(name, prefix) if candidate in expected), None)
        if target is None:
            note_leftover(module, name, stored, files, patterns, result)
        elif target in result.tensors:
            raise _both(files, result.stored[target], stored, target)
        else:
            result.tensors[target] = files.tensors[stored]
            result.stored[target] = stored
    return result


def note_leftover(
    module: nn.Module, name: str, stored: str, files: TensorFiles, patterns: Patterns, result: Assignment
) -> None:
    """Record a tensor without a place.

    Raises:
        WeightMismatch: It lies inside a part the module does have, so configuration and weights differ.
    """
    prefix: str = getattr(module, "base_model_prefix", "")
    bare = name.removeprefix(f"{prefix}.") if prefix else name
    if patterns.unexpected.search(bare) or patterns.unexpected.search(name):
        result.ignored.append(stored)
        return
    base = getattr(module, prefix, module) if prefix else module
    if bare.split(".", 1)[0] in {*dict(module.named_children()), *dict(base.named_children())}:
        raise WeightMismatch(
            f"{files.origin.get(stored, files.files[0])}: tensor {stored!r} has no place in {type(module).__name__} as "
            "config.json describes it; use the config.json that belongs to these weights."
        )
    result.unexpected.append(stored)


def check_shapes(expected: Mapping[str, Tensor], found: Assignment, files: TensorFiles) -> None:
    """Compare shapes, and refuse quantized storage.

    Raises:
        WeightMismatch: A shape differs (both are named), or a floating tensor is stored as integers or float8.
    """
    wrong = [name for name, tensor in found.tensors.items() if tensor.shape != expected[name].shape]
    if wrong:
        stored, more = found.stored[wrong[0]], len(wrong) - 1
        shapes = list(found.tensors[wrong[0]].shape), list(expected[wrong[0]].shape)
        raise wrong_shape(f"{files.origin[stored]}", stored, *shapes, more)
    for name, tensor in found.tensors.items():
        if expected[name].is_floating_point() and tensor.dtype not in _STORED_DTYPES:
            stored = found.stored[name]
            raise WeightMismatch(
                f"{files.origin[stored]}: tensor {stored!r} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
                "quantized weights are not supported, so use the float16, bfloat16 or float32 weights of the model."
            )


def wrong_shape(where: str, name: str, stored: list[int], wanted: list[int], more: int) -> WeightMismatch:
    """The error for a tensor whose shape is not what config.json asks for."""
    others = f" (and {more} more)" if more else ""
    return WeightMismatch(
        f"{where}: tensor {name!r} has shape {stored}, but config.json asks for {wanted}{others}; use the config.json "
        "that belongs to these weights."
    )


def refuse_missing(missing: Iterable[str], allowed: re.Pattern[str], files: TensorFiles) -> None:
    """Refuse missing tensors unless the caller allows them.

    Raises:
        WeightMismatch: A name is missing that ``allowed`` does not find.
    """
    fatal = [name for name in missing if not allowed.search(name)]
    if fatal:
        where = files.files[0] if len(files.files) == 1 else files.files[0].parent
        raise WeightMismatch(
            f"{where}: {some(fatal)} missing, which config.json asks for; use a complete checkpoint of this "
            "architecture."
        )


def _both(files: TensorFiles, first: str, second: str, target: str) -> WeightMismatch:
    return WeightMismatch(
        f"{files.origin[second]}: tensors {first!r} and {second!r} both belong to {target!r}; keep one of them."
    )


def _candidates(name: str, prefix: str) -> Iterator[str]:
    for spelling in _spellings(name):
        yield spelling
        if prefix:
            yield spelling.removeprefix(f"{prefix}.")
            yield f"{prefix}.{spelling}"


def _spellings(name: str) -> Iterator[str]:
    """The name, and what it became after TensorFlow's names for LayerNorm."""
    yield name
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            yield name.removesuffix(old) + new
