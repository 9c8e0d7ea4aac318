"""Two call forms of one function: the document's, and that of XTuner's later releases under the same name.

                               the document (v0.1.16)                                later (v0.1.19 to v0.2.0)
pad_for_sequence_parallel      (tokens, labels, position_ids, attention_mask)        (tensor, padding_value, dim=-1)
split_for_sequence_parallel    (tokens, labels, position_ids)                        (input, dim, sp_group)
reduce_sequence_parallel_loss  (mean_loss, num_tokens)                               (mean_loss, loss_scale, sp_group)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from typing import Any

from torch.distributed import ProcessGroup

from roll.errors import UserError

Function = Callable[..., Any]


def or_later_form(later: Function, tells: Callable[[tuple[Any, ...]], bool]) -> Callable[[Function], Function]:
    """Decorate the document's form of a function so that it is called as `later` where the arguments are of that form.

    They are if one has a name that `later` alone has, or if `tells` says so of the arguments without names.

    Raises (when called):
        TypeError: they fit neither form; the message shows both.
    """

    def decorate(document: Function) -> Function:
        forms = {form: inspect.signature(form) for form in (document, later)}
        own_names = forms[later].parameters.keys() - forms[document].parameters.keys()

        @wraps(document)
        def either(*given: Any, **named: Any) -> Any:
            form = later if own_names & named.keys() or tells(given) else document
            try:
                forms[form].bind(*given, **named)
            except TypeError as error:
                shown = " or ".join(_shown(document.__name__, each) for each in forms.values())
                raise TypeError(f"{document.__name__}: {error}; it is called as {shown}") from None
            return form(*given, **named)

        return either

    return decorate


def _shown(name: str, signature: inspect.Signature) -> str:
    """A call with the arguments that may come without a name."""
    positional = [each for each in signature.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    texts = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in positional]
    return f"{name}({', '.join(texts)})"


def check_number(name: str, value: object, kind: type = float) -> None:
    """Raise ValueError unless it is a number, an integer for `kind` int."""
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        expected = "an integer" if kind is int else "a number"
        raise UserError(f"{name} must be {expected}, got {type(value).__name__}")


def check_group(group: object) -> None:
    """Raise ValueError unless it is a process group or None."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise UserError(
            f"the group must be a process group (a mesh has them: mesh.get_group(name)), got {type(group).__name__}"
        )
