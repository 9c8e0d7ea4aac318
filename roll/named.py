"""Objects of a user that settings name as `module:Name`, imported from wherever the user has them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import traceback
from collections.abc import Iterable, Set
from typing import Any

from roll.errors import UserError


def load_named(name: str, setting: str, kind: str) -> Any:
    """Import what `setting` names as `module:Name`; `kind` says what it is, in messages.

    Raises UserError when the name has another form, the module cannot be imported, or it has no such object.
    """
    module_name, colon, object_name = name.partition(":")
    if not (colon and object_name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise UserError(f"{setting} {name!r} must be 'module:{kind}'")
    try:
        module = importlib.import_module(module_name)
    # The module is the user's: whatever it raises is reported under its name, also that it calls exit().
    except (Exception, SystemExit) as error:
        reason = str(error)
        if not isinstance(error, ImportError | SyntaxError):
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({where.filename} line {where.lineno})"
        raise UserError(f"{setting} {name!r}: cannot import module {module_name!r}: {reason}") from error
    if not hasattr(module, object_name):
        public = [each for each in vars(module) if not each.startswith("_")]
        near = difflib.get_close_matches(object_name, public, n=3)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise UserError(f"{setting} {name!r}: module {module_name!r} has no {kind} {object_name!r}{hint}")
    return getattr(module, object_name)


def subclass_of(base: type, found: object, called: str) -> Any:
    """`found`, a class that settings name. Raises UserError, which begins with `called`, if it is no subclass of `base`
    or lacks a method that `base` asks for.
    """
    wanted = f"{base.__module__}.{base.__qualname__}"
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{called} is no subclass of {wanted}")
    lacking = sorted(getattr(found, "__abstractmethods__", ()))
    if lacking:
        raise UserError(f"{called} lacks {listed(lacking, 'and')}, which {wanted} asks for")
    return found


def check_names(called: str, **declared: object) -> None:
    """Raise UserError, which begins with `called`, unless each declaration of a user's class is a set of names."""
    for what, names in declared.items():
        if not isinstance(names, Set) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{called}: {what} must be a set of names, got {names!r}")


def find_class(name: str, base: type, package: str, constant: str, shared: frozenset[str], kind: str) -> Any:
    """The subclass of `base` that `name` stands for: `module:Name` of a user's own, or what `load_listed` finds.

    Args:
        kind: what has these names; a word that takes the article "an".

    Raises UserError if there is none, or it lacks a method that `base` asks for.
    """
    if ":" in name:
        found = load_named(name, kind, base.__name__)
    else:
        found = load_listed(name, package, constant, shared, f"an {kind}")
    return subclass_of(base, found, f"{kind} {name!r}")


def load_listed(name: str, package: str, constant: str, shared: frozenset[str], kind: str) -> Any:
    """The object called `constant` in the file `name` of a package that has one file for each of a kind.

    Args:
        shared: files of the package that have no such object.
        kind: what has these names, with its article.

    Raises UserError, which lists the files, if there is no such file.
    """
    files = sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))
    known = [file for file in files if file not in shared]
    if name not in known:
        raise unknown_name(name, known, kind)
    return getattr(importlib.import_module(f"{package}.{name}"), constant)


def unknown_name(name: str, known: Iterable[str], kind: str) -> UserError:
    """The error for a `name` that is none of the `known`; `kind` says with its article what has these names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UserError(f"must be {listed(known, 'or')}{hint}, or module:Name of {kind} of your own")


def listed(names: Iterable[str], word: str) -> str:
    """`'a', 'b' and 'c'` with `word` before the last."""
    *first, last = (repr(name) for name in names)
    return f"{', '.join(first)} {word} {last}" if first else last
