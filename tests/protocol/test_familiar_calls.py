"""Calls as users of verl (0.9.1) and ROLL write them: what those two give, and what `roll` gives.

The values in the column of verl and ROLL are worked out from their documentation and their own tests; neither is
imported. `SAME` stands where all agree. Where `roll` differs on purpose, the reason is said, and, if the call is
refused, its message names what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from roll.protocol import DataProto, collate_fn, pad_dataproto_to_divisor, unpad_dataproto

SAME = "the same"
FOURS = [[0, 1, 2, 3], (4, 5, 6, 7), np.arange(8, 12)]


def sample() -> DataProto:
    """Three rows of two numbers and a letter."""
    obs = torch.tensor([[1, 2], [3, 4], [5, 6]])
    return DataProto.from_dict(tensors={"obs": obs}, non_tensors={"labels": ["a", "b", "c"]}, meta_info={"info": "t"})


def letters(data: Any) -> str:
    """The labels of the rows, after a look that the numbers went the same way."""
    labels = "".join(data.non_tensor_batch["labels"])
    assert data.batch["obs"][:, 0].tolist() == [1 + 2 * "abc".index(label) for label in labels]
    assert data.meta_info == {"info": "t"}
    return labels


def several(pieces: Any) -> list[str]:
    return [letters(piece) for piece in pieces]


@dataclass(frozen=True)
class Call:
    """One way to write a call, and what comes of it."""

    written: str
    call: Callable[[DataProto], Any]
    theirs: Any
    """What verl and ROLL give; where the two differ, verl first."""
    ours: Any = SAME


def obs(*values: Any) -> dict[str, torch.Tensor]:
    return {"obs": torch.tensor(values)}


CALLS = [
    Call("repeat(repeat_times=2)", lambda d: letters(d.repeat(repeat_times=2)), "aabbcc"),
    Call("repeat()", lambda d: letters(d.repeat()), "aabbcc"),
    Call("repeat(interleave=False)", lambda d: letters(d.repeat(repeat_times=2, interleave=False)), "abcabc"),
    Call("sample_level_repeat(list)", lambda d: letters(d.sample_level_repeat(repeat_times=[3, 1, 2])), "aaabcc"),
    Call("... (tensor)", lambda d: letters(d.sample_level_repeat(torch.tensor([1, 2, 3]))), "abbccc"),
    Call("... (tuple)", lambda d: letters(d.sample_level_repeat((0, 0, 1))), "c"),
    Call("... (array)", lambda d: letters(d.sample_level_repeat(np.array([1, 0, 1]))), "ac"),
    # Elsewhere the batch itself is changed and None comes back.
    Call("reorder(indices=)", lambda d: letters(d.reorder(indices=torch.tensor([2, 0, 1]))), None, "cab"),
    Call("chunk(chunks=3)", lambda d: several(d.chunk(chunks=3)), ["a", "b", "c"]),
    # verl refuses what does not divide, ROLL and `roll` give the larger pieces first.
    Call("chunk(chunks=2)", lambda d: several(d.chunk(chunks=2)), ["AssertionError", ["ab", "c"]], ["ab", "c"]),
    Call("split(split_size=2)", lambda d: several(d.split(split_size=2)), ["ab", "c"]),
    Call("concat(data=)", lambda d: letters(DataProto.concat(data=[d, d[:1]])), "abca"),
    Call("slice(start, end)", lambda d: letters(d.slice(start=1, end=3)), "bc"),
    Call("slice(step=2)", lambda d: letters(d.slice(step=2)), "ac"),
    Call("slice()", lambda d: letters(d.slice()), "abc"),
    Call("select_idxs(idxs=)", lambda d: letters(d.select_idxs(idxs=[2, 0])), "ca"),
    Call("select_idxs(mask)", lambda d: letters(d.select_idxs(idxs=[True, False, True])), "ac"),
    Call("data[tensor]", lambda d: letters(d[torch.tensor([1, 1])]), "bb"),
    Call("data[array]", lambda d: letters(d[np.array([True, False, True])]), "ac"),
    # verl gives a DataProtoItem without the dimension of rows, ROLL a DataProto.
    Call("data[1]", lambda d: d[1].batch["obs"].tolist(), [[3, 4], [[3, 4]]], [[3, 4]]),
    Call(
        "group_by('labels')",
        lambda d: {k: letters(v) for k, v in d.group_by("labels").items()},
        {"a": "a", "b": "b", "c": "c"},
    ),
    # ROLL makes one string of several values: "1|a".
    Call(
        "group_by(keys=[..])",
        lambda d: list(d.update({"n": torch.tensor([1, 1, 2])}).group_by(["n"])),
        ["1", "2"],
        [1, 2],
    ),
    Call("make_iterator", lambda d: several(d.make_iterator(mini_batch_size=1, epochs=2)), list("abcabc")),
    # Elsewhere a seed alone does not shuffle.
    Call("... (seed=1)", lambda d: sorted(several(d.make_iterator(1, 1, seed=1))), list("abc")),
    Call(
        "... (seed=1, dataloader_kwargs={'shuffle': False})",
        lambda d: several(d.make_iterator(1, 2, seed=1, dataloader_kwargs={"shuffle": False})),
        list("abcabc"),
    ),
    Call("pad_dataproto_to_divisor(2)", lambda d: letters(pad_dataproto_to_divisor(d, size_divisor=2)[0]), "abca"),
    Call("pad_dataproto_to_divisor(7)", lambda d: letters(pad_dataproto_to_divisor(d, size_divisor=7)[0]), "abcabca"),
    Call("its pad_size", lambda d: pad_dataproto_to_divisor(d, size_divisor=7)[1], 4),
    Call("unpad_dataproto(0)", lambda d: letters(unpad_dataproto(d, pad_size=0)), "abc"),
    Call("unpad_dataproto(2)", lambda d: letters(unpad_dataproto(d, pad_size=2)), "a"),
    # verl's changes the batch itself.
    Call("padding(2)", lambda d: letters(d.padding(padding_size=2)), None, "abccc"),
    Call("padding('first')", lambda d: letters(d.padding(1, padding_candidate="first")), None, "abca"),
    Call("collate_fn(rows)", lambda d: letters(collate_fn([d[0], d[2]])), "ac"),
    # names
    Call("select(batch_keys)", lambda d: list(d.select(batch_keys=["obs"]).to_dict()), ["obs", "labels"]),
    Call("select(non_tensor)", lambda d: list(d.select(non_tensor_batch_keys=["labels"]).to_dict()), ["obs", "labels"]),
    Call("select(meta_info_keys)", lambda d: d.select(meta_info_keys=["info"]).meta_info, {"info": "t"}),
    Call("select(deepcopy)", lambda d: d.select(["obs"], deepcopy=True)["labels"] is d["labels"], False),
    # ROLL's pop takes one name as a string; elsewhere a string is taken for its letters.
    Call("select('obs', 'labels', 'info')", lambda d: letters(d.select("obs", "labels", "info")), "KeyError", "abc"),
    Call("pop(batch_keys='obs')", lambda d: list(d.pop(batch_keys="obs")[0].to_dict()), "AssertionError", ["obs"]),
    Call("pop(non_tensor)", lambda d: list(d.pop(non_tensor_batch_keys=["labels"])[0].to_dict()), ["labels"]),
    Call("pop(meta_info_keys)", lambda d: d.pop(["obs"], meta_info_keys=["info"])[1].meta_info, {}),
    Call("rename('obs', 'x')", lambda d: list(d.rename(old_keys="obs", new_keys="x").to_dict()), ["x", "labels"]),
    Call("rename(lists)", lambda d: list(d.rename(["obs"], ["x"]).batch.keys()), ["x"]),
    # verl renames tensors alone.
    Call("rename('labels', 'x')", lambda d: list(d.rename("labels", "x").to_dict()), "KeyError", ["obs", "x"]),
    Call(
        "union(other=)",
        lambda d: list(d.union(other=DataProto.from_dict({"n": torch.zeros(3)})).batch.keys()),
        ["obs", "n"],
    ),
    Call(
        "unfold_column_chunks",
        lambda d: d.unfold_column_chunks(n_split=2, split_keys=["obs"])["obs"].tolist(),
        [[i] for i in range(1, 7)],
    ),
    Call("... labels", lambda d: "".join(d.unfold_column_chunks(2, split_keys=["obs"])["labels"]), "aabbcc"),
    Call(
        "... of objects",
        lambda d: list(map(list, d.update({"labels": FOURS}).unfold_column_chunks(2, ["labels"])["labels"])),
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
    ),
    Call("... without names", lambda d: letters(d.unfold_column_chunks(2)), "aabbcc"),
    Call(
        "... of three columns each",
        lambda d: d.update({"obs": torch.arange(18).view(3, 6)}).unfold_column_chunks(2, "obs")["obs"].tolist(),
        [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(6)],
    ),
    # making one
    Call("len", len, 3),
    Call(
        "DataProto(None, objects)", lambda d: len(DataProto(batch=None, non_tensor_batch=dict(d.non_tensor_batch))), 3
    ),
    Call("DataProto(None, {})", lambda d: len(DataProto(batch=None, non_tensor_batch={}, meta_info={"a": 1})), 0),
    Call("DataProto(None, None)", lambda d: len(DataProto(batch=None, non_tensor_batch=None)), 0),  # type: ignore[arg-type]
    Call("meta_info=None", lambda d: DataProto(d.batch, meta_info=None).meta_info, [None, {}], {}),  # type: ignore[arg-type]
    Call("from_dict()", lambda d: len(DataProto.from_dict()), 0),
    Call("from_dict(None, objects)", lambda d: len(DataProto.from_dict(tensors=None, non_tensors={"a": [1, 2]})), 2),
    Call("from_dict({}, objects)", lambda d: len(DataProto.from_dict(tensors={}, non_tensors={"a": [1, 2]})), 2),
    Call("from_dict(t, None, None)", lambda d: len(DataProto.from_dict(obs(1, 2), None, None, num_batch_dims=1)), 2),
    # Rows without a tensor have a TensorDict that knows their number; verl has None, ROLL refuses them.
    Call("its batch", lambda d: DataProto.from_dict(non_tensors={"a": [1]}).batch.batch_size, None, torch.Size([1])),  # type: ignore[union-attr]
    Call(
        "from_single_dict(data=)",
        lambda d: letters(DataProto.from_single_dict(data=d.to_dict(), meta_info={"info": "t"})),
        "abc",
    ),
    Call("auto_padding", lambda d: DataProto.from_dict(obs(1), auto_padding=True).is_padding_enabled(), True),
    Call("without", lambda d: DataProto.from_single_dict(obs(1), auto_padding=False).is_padding_enabled(), False),
    Call("verl's own flag", lambda d: DataProto(meta_info={"_verl_auto_padding": True}).is_padding_enabled(), True),
    # meta data of pieces
    Call(
        "metrics of workers",
        lambda d: (
            DataProto.concat([DataProto(meta_info={"metrics": m}) for m in ([{"a": 1}], {"a": 2}, None)]).meta_info
        ),
        {"metrics": {"a": [1, 2]}},
    ),
    Call(
        "global_keys",
        lambda d: DataProto.concat([DataProto(meta_info={"lr": lr}) for lr in (1, 2)], global_keys={"lr"}).meta_info,
        {"lr": [1, 2]},
    ),
    # other forms
    Call("to(device)", lambda d: str(d.to(device="cpu").batch.device), "cpu"),
    Call("to_tensordict", lambda d: letters(DataProto.from_tensordict(d.to_tensordict())), "abc"),
    Call("its entries", lambda d: (d.to_tensordict()["labels"], d.to_tensordict()["info"]), (["a", "b", "c"], "t")),
    Call("clone", lambda d: letters(d.clone()), "abc"),
    Call("check_consistency", lambda d: d.check_consistency(), None),
    Call("get_data_info", lambda d: [word in d.get_data_info() for word in ("obs", "labels", "info")], [True] * 3),
]


@pytest.mark.parametrize("row", CALLS, ids=[row.written for row in CALLS])
def test_a_call_gives_what_it_gives_elsewhere_or_what_is_said_here(row: Call) -> None:
    data = sample()
    assert row.call(data) == (row.theirs if row.ours == SAME else row.ours)
    assert letters(data) == "abc"  # whatever was called


def test_print_size(capsys: pytest.CaptureFixture[str]) -> None:
    sample().print_size(prefix="rollouts")
    sample().print_size()
    line = "3 rows, 48 B in tensors, 24 B in references to objects\n"
    assert capsys.readouterr().out == f"rollouts, {line}{line}"


def test_files(tmp_path: Path) -> None:
    sample().save_to_disk(filepath=tmp_path / "a batch")
    assert letters(DataProto.load_from_disk(filepath=tmp_path / "a batch")) == "abc"


REFUSED: list[tuple[str, Callable[[DataProto], Any], type[Exception], str]] = [
    (
        "data.batch = ...",
        lambda d: setattr(d, "batch", None),
        FrozenInstanceError,
        r"data = dataclasses.replace\(data, batch=",
    ),
    ("data.meta_info = ...", lambda d: setattr(d, "meta_info", {}), FrozenInstanceError, r"replace\(data, meta_info="),
    (
        "data.step = 3",
        lambda d: setattr(d, "step", 3),
        FrozenInstanceError,
        r"meta_info={\*\*data.meta_info, 'step': ...}",
    ),
    ("del data.batch", lambda d: delattr(d, "batch"), FrozenInstanceError, r"batch cannot be deleted; data.select"),
    ("data['x'] = ...", lambda d: d.__setitem__("x", 0), TypeError, r"write data = data.update\({'x': ...}\)"),
    ("del data['x']", lambda d: d.__delitem__("x"), TypeError, r"write popped, data = data.pop\(\['x'\]\)"),
    ("data.pop(..).batch", lambda d: d.pop("obs").batch, AttributeError, r"popped, rest = data.pop"),
    ("num_batch_dims=2", lambda d: DataProto.from_dict(obs([1]), num_batch_dims=2), ValueError, r"flatten\(0, 1\)"),
    ("num_batch_dims=0", lambda d: DataProto.from_dict(obs([1]), num_batch_dims=0), ValueError, "rows are one dim"),
    ("reorder of some", lambda d: d.reorder([0, 0, 1]), ValueError, "stands 2 times .select_idxs takes any rows"),
    ("shuffle, no seed", lambda d: d.make_iterator(1, 1, None, {"shuffle": True}), ValueError, "shuffle needs a seed"),
    ("drop_last", lambda d: d.make_iterator(1, 1, 3, {"drop_last": True}), ValueError, r"DataLoader\(data, collate_fn"),
    ("counts", lambda d: d.sample_level_repeat([1, 2]), ValueError, "needs 3 numbers of at least 0, got .1, 2."),
    ("counts", lambda d: d.sample_level_repeat([1, 2, -1]), ValueError, "needs 3 numbers of at least 0"),
    ("counts", lambda d: d.sample_level_repeat([1.0, 2, 1]), ValueError, "needs 3 numbers of at least 0"),  # type: ignore[list-item]
    ("columns", lambda d: d.unfold_column_chunks(3, "obs"), ValueError, r"obs \[3, 2\] does not divide into 3 parts"),
    ("columns", lambda d: d.unfold_column_chunks(2, "labels"), ValueError, "labels: row 0 does not divide .* 'a'"),
    ("columns", lambda d: d.unfold_column_chunks(2, "x"), KeyError, "the batch lacks x; it has labels, obs"),
    ("columns", lambda d: d.unfold_column_chunks(0), ValueError, "parts of at least 1, got 0"),
    ("padding", lambda d: d.padding(1, "middle"), ValueError, "must be first or last, got 'middle'"),  # type: ignore[arg-type]
    ("padding", lambda d: d[:0].padding(1), ValueError, "padding of 1 rows for a batch that has none to copy"),
    ("padding", lambda d: d.padding(-1), ValueError, "number of rows of at least 0, got -1"),
    ("the flag", lambda d: DataProto(meta_info={"_verl_auto_padding": 1}), ValueError, "must be True or False, got 1"),
    ("one config", lambda d: DataProto.concat([d, d.select(meta_info_keys=[])]), ValueError, "global_keys lists"),
]


@pytest.mark.parametrize(("written", "call", "error", "message"), REFUSED)
def test_a_refusal_says_what_to_write(
    written: str, call: Callable[[DataProto], Any], error: type[Exception], message: str
) -> None:
    data = sample()
    with pytest.raises(error, match=message):
        call(data)
    assert letters(data) == "abc"


SIGNATURES = {
    "chunk": "chunks",
    "clone": "",
    "concat": "data, global_keys",
    "from_dict": "tensors, non_tensors, meta_info, num_batch_dims, auto_padding",
    "from_single_dict": "data, meta_info, auto_padding",
    "from_tensordict": "tensor_dict, meta_info",
    "get_data_info": "",
    "group_by": "keys",
    "is_padding_enabled": "",
    "load_from_disk": "filepath",
    "make_iterator": "mini_batch_size, epochs, seed, dataloader_kwargs",
    "materialize_concat": "data_refs, timeout, global_keys",
    "padding": "padding_size, padding_candidate",
    "pop": "batch_keys, non_tensor_batch_keys, meta_info_keys",
    "print_size": "prefix",
    "rename": "old_keys, new_keys",
    "reorder": "indices",
    "repeat": "repeat_times, interleave",
    "sample_level_repeat": "repeat_times",
    "save_to_disk": "filepath",
    "select": "batch_keys, non_tensor_batch_keys, meta_info_keys, deepcopy",
    "select_idxs": "idxs",
    "slice": "start, end, step",
    "split": "split_size",
    "to": "device",
    "to_tensordict": "",
    "unfold_column_chunks": "n_split, split_keys",
    "union": "other",
    "update": "other",
}


def test_keywords_have_the_names_that_people_know() -> None:
    names = {name: list(inspect.signature(getattr(DataProto, name)).parameters) for name in SIGNATURES}
    ours = {name: ", ".join(one for one in several if one != "self") for name, several in names.items()}
    assert ours == SIGNATURES


def test_a_tensordict_that_was_given_is_not_changed() -> None:
    given = TensorDict(obs(1, 2), batch_size=[2])
    data = DataProto(batch=given)
    assert data.batch is not None
    data.batch["more"] = torch.zeros(2)  # the batch's own TensorDict, as elsewhere
    assert list(given.keys()) == ["obs"] and "more" in data
