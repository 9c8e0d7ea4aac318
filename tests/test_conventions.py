"""The conventions of CONTRIBUTING.md that a linter does not know, each read from the syntax tree of roll/.

Every check is a function of one module, so that the last test can show it a module that breaks the rule.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "roll").rglob("*.py"))

MAX_LINES = 400

# Modules outside roll/platform that may name a device or its collective backend, each with the reason.
MAY_NAME_A_DEVICE: dict[str, str] = {}

# Modules that call a user's code and raise again, under its name, whatever it raises; each with what it calls.
MAY_CATCH_EVERYTHING: dict[str, str] = {
    "roll/data/tasks.py": "the user's reward function",
    "roll/environments/episodes.py": "the user's environment",
    "roll/named.py": "a user's module, which may raise anything while it is imported",
    "roll/parallel/sequence/model_loss.py": "the user's loss function, for the ranks that wait for it",
    "roll/data/tokenizer_folder.py": "the tokenizers library, whose errors have no narrower type",
    "roll/protocol/broadcast.py": "whatever keeps an object from being pickled, for the ranks that wait for it",
    "roll/protocol/delivery.py": "whatever keeps a leader from sending, for the ranks that wait for it",
    "roll/protocol/delivery_messages.py": "whatever is wrong with a batch, for the ranks that wait for it",
    "roll/protocol/equality.py": "the `==` of a user's class, whatever it raises, for the name of the field",
    "roll/workers/connection.py": "the start of Ray, whose error has no class of its own",
    "roll/workers/worker.py": "a role's method, whose traceback goes to the driver",
}

DEVICE_NAME = re.compile(r"(cuda|nccl)(:\d+)?")
Check = Callable[[ast.Module], Iterator[str]]


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that a user can reach by names without a leading underscore, and the dunder methods."""

    def visit(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from visit(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                dunder = node.name.startswith("__") and node.name.endswith("__")
                if dunder or not node.name.startswith("_"):
                    yield node

    yield from visit(tree.body)


def broad_excepts(tree: ast.Module) -> Iterator[str]:
    """`except:`, `except Exception` and `except BaseException`, alone or in a tuple, also where they raise again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {"everything" if kind is None else ast.unparse(kind).split(".")[-1] for kind in caught}
            if names & {"everything", "Exception", "BaseException"}:
                yield f"line {node.lineno}: except {', '.join(sorted(names))}"


def device_names(tree: ast.Module) -> Iterator[str]:
    """String literals that are a device or backend name, and uses of torch.cuda or Tensor.cuda."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DEVICE_NAME.fullmatch(node.value):
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom | ast.Import) and "cuda" in ast.unparse(node).replace(".", " ").split():
            yield f"line {node.lineno}: {ast.unparse(node)}"


def arguments_without_a_type(tree: ast.Module) -> Iterator[str]:
    """Arguments of public functions and methods without an annotation; self and cls need none."""
    for function in public_functions(tree):
        given = function.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        starred = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
        for position, argument in enumerate([*named, *starred]):
            is_receiver = position == 0 and argument.arg in ("self", "cls", "mcs")
            if argument.annotation is None and not is_receiver:
                yield f"line {argument.lineno}: {function.name}({argument.arg})"


def unasked_questions(tree: ast.Module) -> Iterator[str]:
    """Calls of transformers' Auto classes that do not say whether code of a folder may run: transformers would ask."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = ast.unparse(node.func.value).split(".")[-1]
        loads = node.func.attr in ("from_pretrained", "from_config")
        if name.startswith("Auto") and loads and "trust_remote_code" not in {word.arg for word in node.keywords}:
            yield f"line {node.lineno}: {name}.{node.func.attr} without trust_remote_code"


def unnamed_mistakes(tree: ast.Module) -> Iterator[str]:
    """Every ValueError that is made as such: a mistake of the user is a UserError, all else is an assertion."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ValueError":
            yield f"line {node.lineno}: {ast.unparse(node)}"


def relative(path: Path) -> str:
    """The path as it is written in messages and in MAY_NAME_A_DEVICE: from the root, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def findings(check: Check, files: list[Path]) -> list[str]:
    """What `check` finds in the files, one `path: finding` each."""
    return [
        f"{relative(path)}: {finding}"
        for path in files
        for finding in check(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_the_package_is_found() -> None:
    assert ROOT / "roll" / "__init__.py" in FILES


def test_no_broad_except() -> None:
    assert findings(broad_excepts, [path for path in FILES if relative(path) not in MAY_CATCH_EVERYTHING]) == []


def test_devices_are_named_in_platform_only() -> None:
    outside = [path for path in FILES if not relative(path).startswith("roll/platform/")]
    assert findings(device_names, [path for path in outside if relative(path) not in MAY_NAME_A_DEVICE]) == []


@pytest.mark.parametrize(
    ("check", "exceptions"), [(broad_excepts, MAY_CATCH_EVERYTHING), (device_names, MAY_NAME_A_DEVICE)]
)
def test_every_exception_is_needed(check: Check, exceptions: dict[str, str]) -> None:
    assert [name for name in exceptions if not findings(check, [ROOT / name])] == []


def test_every_question_of_transformers_is_answered() -> None:
    assert findings(unasked_questions, FILES) == []


def test_mistakes_of_a_user_are_named_so() -> None:
    assert findings(unnamed_mistakes, FILES) == []


def test_public_arguments_have_types() -> None:
    assert findings(arguments_without_a_type, FILES) == []


def test_no_long_file() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_package_for_everything_else() -> None:
    named = {relative(path): {*path.relative_to(ROOT).parts, path.stem} for path in FILES}
    assert [name for name, parts in named.items() if parts & {"utils", "util", "helpers", "misc"}] == []


def test_every_folder_is_a_package() -> None:
    assert [relative(path.parent) for path in FILES if not (path.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("check", "source", "count"),
    [
        (broad_excepts, "try:\n    f()\nexcept:\n    raise", 1),
        (broad_excepts, "try:\n    f()\nexcept Exception as error:\n    raise", 1),
        (broad_excepts, "try:\n    f()\nexcept (OSError, builtins.BaseException):\n    raise", 1),
        (broad_excepts, "try:\n    f()\nexcept (OSError, ValueError):\n    raise", 0),
        (device_names, "torch.device('cuda:0')\ninit_process_group('nccl')", 2),
        (device_names, "torch.cuda.synchronize()\nx.cuda()", 2),
        (device_names, "from torch import cuda\nfrom torch.cuda import Stream\nimport torch.cuda", 3),
        (device_names, "'''Runs on cuda.'''\nx.is_cuda\nname = 'cudagraphs'", 0),
        (unasked_questions, "AutoTokenizer.from_pretrained(folder)\ntransformers.AutoModel.from_config(config)", 2),
        (unasked_questions, "AutoConfig.from_pretrained(a, trust_remote_code=no)\nAutoConfig.for_model('llama')", 0),
        (unnamed_mistakes, "raise ValueError('a')\nerror = ValueError()", 2),
        (unnamed_mistakes, "raise UserError('a')\nisinstance(error, ValueError)", 0),
        (arguments_without_a_type, "def f(a, /, b, *c, d, **e): ...", 5),
        (arguments_without_a_type, "class A:\n    def __init__(self, size): ...\n    def f(self): ...", 1),
        (arguments_without_a_type, "def f(a: int, *b: int, **c: int): ...\ndef _g(a): ...", 0),
    ],
)
def test_a_check_sees_what_breaks_it(check: Check, source: str, count: int) -> None:
    assert len(list(check(ast.parse(source)))) == count
