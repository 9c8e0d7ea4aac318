"""What is changed in a transformers model so that its attention works on all tokens while it has some.

It is called with this rank's tokens. Four hooks and three functions do the rest:

    before the model     labels are taken, and the loss function that shifts them across the ranks is put in place
    before the decoder   the ranks compare what they were given; the documents of the whole batch are found
    mask function        transformers asks for a mask, once per kind of layer: it gets the documents
    attention function   transformers hands them to every layer, whose attention comes here and communicates
    after the decoder    every layer must have come here
    loss function        transformers calls it with labels; see model_loss
    after the model      the model has its own loss function again

Mask and attention are registered with transformers under a name of this model's own, so that other models stay as they
are.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from roll.errors import UserError
from roll.parallel.sequence.attention import attend, exchanges_heads
from roll.parallel.sequence.groups import sequence_group
from roll.parallel.sequence.inputs import find_inputs
from roll.parallel.sequence.kernels import AttentionOptions, kernel_for
from roll.parallel.sequence.model_loss import ModelLoss
from roll.parallel.sequence.segments import Documents
from roll.parallel.sequence.support import check_arguments, check_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
ATTRIBUTE = "_sequence_parallel_dispatch"
_numbers = itertools.count()


@dataclass(frozen=True)
class DocumentMask:
    """What takes the place of an attention mask on the way from the model to its layers."""

    documents: Documents
    mask_function: Callable[..., Tensor]
    group: ProcessGroup | None
    windows: set[int | None] = field(default_factory=set)
    """Those that layers named and that were found in the mask."""


class DispatchedModel:
    """One dispatched model, from its creation to `undo`."""

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel, group: ProcessGroup | None) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self.name = f"sequence_parallel_{next(_numbers)}"
        self.original: str = decoder.config._attn_implementation
        self.kernel = kernel_for(self.original)
        self.given_group = group
        self.parameters = list(inspect.signature(decoder.forward).parameters)
        self.current: tuple[Documents, ProcessGroup | None] | None = None
        self.loss = ModelLoss()
        self.problem: str | None = None
        self.facts: dict[str, object] = {}
        self.attentions = 0
        self.has_told = False
        _own_config(model)
        AttentionInterface.register(self.name, self.attention)
        AttentionMaskInterface.register(self.name, self.mask)
        model.set_attn_implementation(self.name)
        assert decoder.config._attn_implementation == self.name
        self.hooks: list[RemovableHandle] = [
            decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True),
            decoder.register_forward_hook(self.after_decoder, always_call=True),
        ]
        if model is not decoder:
            parameters = list(inspect.signature(model.forward).parameters)

            def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return (), self.before_head(model, dict(zip(parameters, args, strict=False)) | kwargs)

            def after_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                self.after_head(model, has_failed=output is None)

            self.hooks.append(model.register_forward_pre_hook(before_model, with_kwargs=True))
            self.hooks.append(model.register_forward_hook(after_model, always_call=True))
        self.marked = (model, decoder)
        for part in self.marked:
            part.__dict__[ATTRIBUTE] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchedModel:
        raise TypeError("a dispatched model cannot be copied: undispatch_modules it first, and dispatch the copy")

    def undo(self, model: PreTrainedModel) -> None:
        """Leave `model`, or its decoder, as it was."""
        from transformers import AttentionInterface, AttentionMaskInterface

        model.set_attn_implementation(self.original)
        for hook in self.hooks:
            hook.remove()
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name)
        for part in self.marked:
            part.__dict__.pop(ATTRIBUTE, None)

    def before_head(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepare the loss. A problem is told to all ranks by the decoder's hook."""
        group = sequence_group(self.given_group)
        self.problem, self.facts = self.loss.begin(model, kwargs, group)
        is_split = group is not None and group.size() > 1
        if self.problem is None and is_split and not _keeps_all(kwargs.get("logits_to_keep")):
            self.problem = (
                "logits_to_keep would keep the end of every part: compute all logits; a dispatched model cannot "
                "generate"
            )
        return kwargs

    def after_head(self, model: PreTrainedModel, has_failed: bool) -> None:
        """Take the loss function away again."""
        try:
            if not has_failed:
                self.loss.check(model)
        finally:
            self.loss.end(model)

    def before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare the ranks' inputs, find the documents, and complete what transformers would derive from a part."""
        kwargs = dict(zip(self.parameters, args, strict=False)) | kwargs
        group = sequence_group(self.given_group)
        problem, facts = self.problem, self.facts
        self.problem, self.facts, self.current, self.attentions = None, {}, None, 0
        documents, completed = find_inputs(module.config, kwargs, group, problem, facts)
        self.current = documents, group
        return (), completed

    def after_decoder(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """`output` is None if the forward pass failed."""
        self.current = None
        config: Any = module.config
        layers = config.num_hidden_layers
        if output is not None and self.attentions != layers:
            raise UserError(
                f"{type(module).__name__} has {layers} layers, but the dispatched attention was called "
                f"{self.attentions} times: what the layers do with this rank's tokens alone is not known"
            )

    def mask(self, *, mask_function: Callable[..., Tensor], **asked: Any) -> DocumentMask:
        """What transformers calls where a model makes the masks of its layers."""
        if self.current is None:
            raise RuntimeError(
                "the attention of a dispatched model was called without the model: call the model that was dispatched "
                "or its decoder"
            )
        if not asked.get("allow_is_causal_skip", True):  # a rule was added to it
            raise UserError(
                "the model asks for more than a causal mask with or without a window, which is not supported"
            )
        return DocumentMask(self.current[0], mask_function, self.current[1])

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: DocumentMask | Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """What transformers calls in every layer: `[b, heads, s, d]` to `[b, s, heads, d]`, of this rank's tokens."""
        if not isinstance(attention_mask, DocumentMask):
            raise UserError(f"{type(module).__name__} makes a mask without transformers' mask interface")
        check_arguments(module, query, key, value, is_causal, others)
        if sliding_window not in attention_mask.windows:
            check_mask(attention_mask.mask_function, sliding_window)
            attention_mask.windows.add(sliding_window)
        self.attentions += 1
        self._tell(query.shape[1], attention_mask.group)
        options = AttentionOptions(scaling, sliding_window, softcap, dropout)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend(q, k, v, attention_mask.documents, self.kernel, options, attention_mask.group), None

    def _tell(self, heads: int, group: ProcessGroup | None) -> None:
        """Once per model, on the first rank: that heads are not exchanged."""
        if group is not None and not self.has_told and not exchanges_heads(heads, group.size()):
            self.has_told = True
            if group.rank() > 0:
                return
            logger.warning(
                "%d attention heads do not divide by %d sequence-parallel ranks: keys and values are gathered "
                "instead of exchanging heads",
                heads,
                group.size(),
            )


def dispatch_of(model: PreTrainedModel) -> DispatchedModel | None:
    """What dispatched this model or its decoder."""
    found = [part.__dict__[ATTRIBUTE] for part in model.modules() if ATTRIBUTE in part.__dict__]
    return found[0] if found else None


def _keeps_all(logits_to_keep: int | Tensor | None) -> bool:
    return logits_to_keep is None or (isinstance(logits_to_keep, int) and logits_to_keep == 0)


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a configuration that no other model shares, since the attention's name is written there."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        own = module.__dict__.get("config")
        if id(own) in copies:
            module.__dict__["config"] = copies[id(own)]
