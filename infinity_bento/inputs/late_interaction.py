"""The tokenizer of late-interaction models: markers, a length limit per side, query expansion, and the skiplist.

Expansion adds rows to a query instead of padding: they ask, and where the checkpoint says so nobody attends to them
(``Encoded.attended``). Tokens whose vectors are no part of the output are marked in ``Encoded.kept``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity_bento.checkpoints.late_interaction import LateInteraction
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.core import Encoded, InputType, Item
from infinity_bento.errors import LoadError
from infinity_bento.inputs.sides import SIDES, SidedTokenizer
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files, tokenizer_options


class LateInteractionTokenizer(SidedTokenizer):
    """Queries become expanded rows, documents lose the skiplist's tokens; the default side is the document.

    Args:
        backend: A ``tokenizers.Tokenizer``; the markers are made special tokens of it.
        rules: Of documents, without the checkpoint's markers in its prompts.
        late: The checkpoint's rules.
        query_limit: Tokens of a query before expansion, special tokens included.
        expansion_id: The token that expands queries; unused without expansion.
        **options: Of both ``TextTokenizer``s.
    """

    def __init__(
        self,
        backend: Any,
        rules: TextRules,
        late: LateInteraction,
        *,
        query_limit: int,
        expansion_id: int = 0,
        **options: Any,
    ) -> None:
        for marker in late.markers.values():
            _register(backend, marker)
        if rules.lower_case:  # in the tokenizer, so that markers keep their case
            _lower_case(backend)
            rules = replace(rules, lower_case=False)
        query = TextTokenizer(backend, _side_rules(rules, late, "query", query_limit), **options)
        documents = _side_rules(rules, late, "document", rules.max_input_length)
        super().__init__(backend, documents, query=query, **options)
        self.late = late
        self.expansion_id = expansion_id
        self._skipped = {token for word in late.mask.skiplist_words if (token := backend.token_to_id(word)) is not None}

    def prepared(self, item: Item, side: InputType) -> Item:
        """A literal prompt follows the marker."""
        marker = self.late.markers.get(side.value, "")
        return item if item.prompt is None or not marker else replace(item, prompt=marker + item.prompt)

    def finished(self, encoded: Encoded, side: InputType) -> Encoded:
        """Expand a query; mark the tokens that are no part of the output."""
        expansion = self.late.expansion
        if side is InputType.QUERY and expansion is not None:
            missing = expansion.length - len(encoded)
            if missing > 0:
                if not expansion.attend:
                    encoded.attended = len(encoded)
                encoded.input_ids = [*encoded.input_ids, *[self.expansion_id] * missing]
                if encoded.token_type_ids is not None:
                    encoded.token_type_ids = [*encoded.token_type_ids, *[0] * missing]
        encoded.kept = self._output_mask(encoded.input_ids, side)
        return encoded

    def _output_mask(self, ids: list[int], side: InputType) -> NDArray[np.bool_] | None:
        mask = self.late.mask
        kept = np.ones(len(ids), dtype=np.bool_)
        if self._skipped and side.value in mask.skiplist_tasks:
            kept &= np.fromiter((token not in self._skipped for token in ids), np.bool_, len(ids))
        if mask.keep_only_token_ids is not None and side is not InputType.QUERY:
            kept &= np.isin(ids, mask.keep_only_token_ids)
        return None if kept.all() else kept


def load_late_interaction_tokenizer(
    layout: Layout, late: LateInteraction, rules: TextRules, *, position_limit: int | None, token_budget: int
) -> LateInteractionTokenizer:
    """The tokenizer of a late-interaction checkpoint.

    Args:
        layout: The checkpoint.
        late: Its rules.
        rules: As for any text model; ``max_input_length`` is the limit of documents.
        position_limit: Tokens of the longest input the model can run; None: no limit.
        token_budget: Tokens of one batch.

    Raises:
        LoadError: There is no tokenizer, or the query expansion cannot be honoured.
    """
    tokenizer = load_tokenizer_files(layout.transformer_path)
    expansion = late.expansion
    most = min(limit for limit in (position_limit, token_budget) if limit is not None)
    if expansion is None:
        query_limit, expansion_id = late.query_length or rules.max_input_length, 0
    else:
        if expansion.length > most:
            raise LoadError(
                f"Queries are expanded to {expansion.length} tokens, but the model and max-batch-tokens allow {most}: "
                "raise max-batch-tokens, or correct the query length in the checkpoint's files."
            )
        ceiling = late.query_length or rules.max_input_length
        query_limit = expansion.length if expansion.fixed else max(ceiling, expansion.length)
        expansion_id = _expansion_id(tokenizer, expansion.token, layout)
    return LateInteractionTokenizer(
        tokenizer.backend_tokenizer,
        rules,
        late,
        query_limit=min(query_limit, most),
        expansion_id=expansion_id,
        **tokenizer_options(tokenizer),
    )


def _side_rules(rules: TextRules, late: LateInteraction, side: str, limit: int) -> TextRules:
    """The rules of one side: each prompt behind the side's marker, and the side's own prompt as the default."""
    marker = late.markers.get(side, "")
    prompts = {
        name: text if SIDES.get(name) is not None or text.startswith(marker) else marker + text
        for name, text in {**rules.prompts, **late.prompts}.items()
    }
    default = rules.default_prompt if side == "document" and rules.default_prompt is not None else None
    if default is not None and not default.startswith(marker):
        default = marker + default
    return replace(
        rules, max_input_length=limit, prompts=prompts, default_prompt=prompts.get(side) if default is None else default
    )


def _expansion_id(tokenizer: Any, token: str | None, layout: Layout) -> int:
    """The id of the token that expands queries."""
    if tokenizer.padding_side != "right":
        raise LoadError(
            f"{layout.path.name}: queries are expanded on the {tokenizer.padding_side} (padding_side in "
            "tokenizer_config.json), which is not supported; only checkpoints that expand on the right can be served."
        )
    if token is not None:
        found = tokenizer.backend_tokenizer.token_to_id(token)
    else:
        found = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise LoadError(
            f"{layout.path.name}: queries are expanded by {token or 'the mask or end token'}, which the tokenizer does "
            "not have: set query_expansion's token to one of its vocabulary."
        )
    return int(found)


def _register(backend: Any, marker: str) -> None:
    """Make a marker of the vocabulary one special token; other markers stay text."""
    for text in _spellings(marker):
        if backend.token_to_id(text) is not None:
            if backend.encode(text, add_special_tokens=False).tokens != [text]:
                from tokenizers import AddedToken

                backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
            return


def _spellings(marker: str) -> Iterable[str]:
    """PyLate adds a marker with its trailing space to the vocabulary; older vocabularies hold the bare word."""
    words = marker.split(None, 1)
    return (marker, words[0]) if words else ()


def _lower_case(backend: Any) -> None:
    from tokenizers import normalizers

    steps = [normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer is not None else [])]
    backend.normalizer = normalizers.Sequence(steps)
