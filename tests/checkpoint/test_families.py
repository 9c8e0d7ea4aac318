"""Models that transformers wrote: our logits are theirs, and what we write again is what they wrote.

One job checks all families, because building the groups takes longer than a model of this size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.checkpoint.hf import load_weights, save_hf
from roll.checkpoint.tensor_sources import HfFolder, RandomTensors, tensor_source
from roll.config import ModelConfig, ParallelSettings
from roll.data.packing import pack_rows
from roll.data.sequence_split import SequenceSplit
from roll.families import find_family
from roll.families.tensors import EMBEDDING, OUTPUT
from roll.models.family_tensors import to_family
from roll.models.gpt import build_model
from roll.models.hf_layout import hf_shapes
from roll.models.packed_sequence import PackedSequence
from roll.parallel.state import ParallelState, parallel_groups
from tests.checkpoint.families_in_transformers import CASES, Case, sequences, write_with_transformers
from tests.checkpoint.folder_of_tensors import INDEX, assert_same_bytes, random_tensors, read_folder, write_folder
from tests.families import HAVING_BIAS, NAMES, family_setting, tiny
from tests.layouts import name_of
from tests.rank_pool import RankPool

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"mode": "fsp", "tp": 2}),
    (2, {"pp": 2}),
    (4, {"mode": "msp", "tp": 4}),
    (2, {"mode": "isp", "sp": 2, "wp": 2}),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Tensor]]]:
    """Folder and logits of each case."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CASES}
    return {name: (folder, write_with_transformers(folder, CASES[name])) for name, folder in folders.items()}


def logits_of(folder: Path, case: Case, target: Path, parallel: ParallelSettings, state: ParallelState) -> Tensor:
    """Load, write to `target`, and run all sequences as one packed row: logits `[T, V]` of the last stage."""
    model = ModelConfig.from_folder(folder)
    gpt = build_model(model, parallel, state, dtype=torch.float32, head="lm").eval()
    load_weights(gpt, tensor_source(folder, model, init="load", head="lm", seed=0), state)
    save_hf(target, gpt, model, state, dtype=torch.float32, source=folder, max_shard_bytes=40 << 10)
    ids = torch.nn.utils.rnn.pad_sequence(sequences(case), batch_first=True, padding_value=-1)
    rows = pack_rows(ids, ids >= 0, multiple_of=4)
    packed = PackedSequence.of(rows, SequenceSplit(parallel, state.cp.rank()))
    if not state.is_first_stage:
        received = torch.empty(rows.input_ids.shape[1], 1, model.hidden_size)
        dist.recv(received, state.rank - 1)
        gpt.set_input_tensor(received)
    output = gpt(
        input_ids=packed.own(rows.input_ids),
        position_ids=None,
        attention_mask=None,
        packed_seq_params=packed,
    )
    if not state.is_last_stage:
        dist.send(output.contiguous(), state.rank + 1)
        return torch.empty(0)
    own = gpt.head.logits(output, parallel_output=False)[0]
    parts = [torch.empty_like(own) for _ in range(state.cp.size())]
    dist.all_gather(parts, own, group=state.cp)
    return torch.cat(parts)[: rows.num_tokens]


@torch.no_grad()
def all_logits(jobs: dict[str, tuple[Path, Path]], layout: dict[str, Any]) -> dict[str, Tensor]:
    """The logits of each case, which is also written again."""
    parallel = ParallelSettings(**layout)
    with parallel_groups(parallel) as state:
        return {name: logits_of(here, CASES[name], there, parallel, state) for name, (here, there) in jobs.items()}


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_logits_and_bytes_are_those_of_transformers(
    ranks: RankPool,
    written: dict[str, tuple[Path, list[Tensor]]],
    tmp_path: Path,
    world_size: int,
    layout: dict[str, Any],
) -> None:
    jobs = {name: (folder, tmp_path / name) for name, (folder, _) in written.items()}
    outcomes = ranks.run(all_logits, jobs, layout, world_size=world_size)
    for name, (folder, expected) in written.items():
        for ours in (outcome[name] for outcome in outcomes if len(outcome[name])):
            error = (ours - torch.cat(expected)).abs().max()
            assert error <= 1e-5, f"{name}: {error:.1e}"
        assert_same_bytes(read_folder(tmp_path / name), read_folder(folder))
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        assert ModelConfig.from_folder(tmp_path / name) == ModelConfig.from_folder(folder)


@pytest.mark.parametrize("name", ["llama3", "llama-bias", "qwen2-tied", "qwen3-dynamic"])
def test_transformers_reads_what_we_write(
    ranks: RankPool, written: dict[str, tuple[Path, list[Tensor]]], tmp_path: Path, name: str
) -> None:
    folder, expected = written[name]
    ranks.run(all_logits, {name: (folder, tmp_path / name)}, {}, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
    with torch.no_grad():
        for ids, logits in zip(sequences(CASES[name]), expected, strict=True):
            # Not to the bit: how tensors are aligned in a file that is mapped into memory changes sums in fp32.
            torch.testing.assert_close(model(ids.unsqueeze(0)).logits[0], logits, rtol=0, atol=1e-5)


def model_of(family: str, **changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 12,
        "hidden_size": 16,
        "head_dim": 4,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return tiny(family, **(sizes | changes))


def folder_of(path: Path, model: ModelConfig, files: int = 2) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write random tensors under the family's names; they, and the canonical ones."""
    canonical = random_tensors(model, "lm")
    own = {name: tensor.contiguous() for name, tensor in to_family(model, canonical.items())}
    write_folder(path, model, own, files)
    return own, canonical


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_parts_are_chunks_of_canonical_tensors(tmp_path: Path, family: str, tied: bool) -> None:
    model = model_of(family, tie_word_embeddings=tied, bias=family in HAVING_BIAS and not tied)
    _, canonical = folder_of(tmp_path, model)
    if tied:
        canonical["output.weight"] = canonical["model.tok_embeddings.weight"]
    source = tensor_source(tmp_path, model, init="load", head="lm", seed=0)
    for name, tensor in canonical.items():
        assert torch.equal(source.part(name, None, 0, 2), tensor), name
        for dim in range(tensor.ndim):
            # 4 divides the rows of wqkv, but not the two key-value heads: whole tensors are read, and cut.
            for count in (1, 2, 4):
                parts = [source.part(name, dim, index, count) for index in range(count)]
                chunks = tensor.chunk(count, dim=dim)
                assert all(torch.equal(part, chunk) for part, chunk in zip(parts, chunks, strict=True)), (name, dim)


def test_random_weights_of_a_family() -> None:
    for family in NAMES:
        model = model_of(family, tie_word_embeddings=True, bias=family in HAVING_BIAS)
        source = RandomTensors(model, "lm", seed=3)
        whole = {name: source.part(name, None, 0, 1) for name in hf_shapes(model, "lm")}
        assert torch.equal(whole["output.weight"], whole["model.tok_embeddings.weight"])
        assert all(not tensor.any() for name, tensor in whole.items() if name.endswith(".bias"))
        assert all((tensor == 1).all() for name, tensor in whole.items() if name.endswith("norm.weight"))


def test_every_tensor_that_does_not_fit_is_listed_under_the_familys_name(tmp_path: Path) -> None:
    model = model_of("qwen2", tie_word_embeddings=True)
    own, _ = folder_of(tmp_path, model)
    layer = "model.layers.1.self_attn."
    del own[layer + "k_proj.weight"], own[layer + "q_proj.bias"], own["model.norm.weight"]
    own["lm_head.weight"] = torch.ones(12, 16)
    own[layer + "o_proj.bias"] = torch.ones(16)
    own[layer + "v_proj.weight"] = torch.ones(16, 8)
    write_folder(tmp_path, model, own, files=2)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as refused:
        HfFolder(tmp_path, model).check("lm")
    assert str(refused.value).splitlines()[1:] == [
        f"  missing: {layer}k_proj.weight",
        f"  missing: {layer}q_proj.bias",
        "  missing: model.norm.weight",
        f"  unknown: {layer}o_proj.bias",
        f"  shape: {layer}v_proj.weight is (16, 8), the config asks for (8, 16)",
        "  tied: lm_head.weight differs from model.embed_tokens.weight, which tie_word_embeddings makes it: remove it "
        "from the file, or set tie_word_embeddings to false in config.json",
    ]


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("internlm2", ["attention.wo.bias", "attention.wqkv.bias"]),
        ("llama", [f"self_attn.{x}_proj.bias" for x in "koqv"]),
        ("qwen3", [f"self_attn.{x}_proj.bias" for x in "koqv"]),
    ],
)
@pytest.mark.parametrize("said", [False, True])
def test_biases_and_their_key_come_together(tmp_path: Path, family: str, biases: list[str], said: bool) -> None:
    folder_of(tmp_path, model_of(family, bias=not said))
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as refused:
        HfFolder(tmp_path, model_of(family, bias=said)).check("lm")
    wanted = [f"  {'missing' if said else 'unknown'}: model.layers.{n}.{name}" for n in range(2) for name in biases]
    assert str(refused.value).splitlines()[1:] == wanted


def test_half_a_download_is_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    folder_of(tmp_path, model, files=3)
    (tmp_path / "part-1.safetensors").unlink()
    assert (tmp_path / INDEX).is_file()
    with pytest.raises(ValueError, match=r"names files that are not there: part-1\.safetensors"):
        tensor_source(tmp_path, model, init="load", head="lm", seed=0)


@pytest.mark.parametrize("family", NAMES)
def test_frequencies_of_rope_in_old_files_are_left_out(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    own, _ = folder_of(tmp_path, model)
    outputs = [model.family.names.of(f"model.layers.{n}.attention.wo.weight")[0] for n in range(2)]
    names = [f"{wo.rsplit('.', 2)[0]}.rotary_emb.inv_freq" for wo in outputs] + ["model.rotary_emb.inv_freq"]
    write_folder(tmp_path, model, own | {name: torch.ones(2) for name in names}, files=2)
    HfFolder(tmp_path, model).check("lm")


def tied_problem(output: str, embedding: str) -> str:
    return f"tied: {output} differs from {embedding}, which tie_word_embeddings makes it: remove it from the file"


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("family", NAMES)
def test_a_tied_output_beside_its_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, files: int
) -> None:
    """Equal, it is that; otherwise transformers 4 and 5 read different models, and neither is chosen here."""
    monkeypatch.setattr("roll.checkpoint.tensor_sources.COMPARED_ROWS", 5)  # 12 rows: two pieces and a rest.
    model = model_of(family, tie_word_embeddings=True)
    own, canonical = folder_of(tmp_path, model)
    (output,), (embedding,) = (model.family.names.of(name) for name in (OUTPUT, EMBEDDING))
    assert output not in own
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    write_folder(tmp_path, model, own | {output: own[embedding].clone()}, files)
    source = tensor_source(tmp_path, model, init="load", head="lm", seed=0)
    assert torch.equal(source.part("output.weight", 0, 1, 2), canonical[EMBEDDING][6:])
    for row in (0, 7, 11):
        other = own[embedding].clone()
        other[row, 3] += 1e-3
        write_folder(tmp_path, model, own | {output: other}, files)
        with pytest.raises(ValueError, match=re.escape(tied_problem(output, embedding))):
            HfFolder(tmp_path, model).check("lm")
        HfFolder(tmp_path, model).check("value")  # which reads no output
    write_folder(tmp_path, model, own | {output: torch.ones(12, 8)}, files)
    with pytest.raises(ValueError, match=rf"\n  shape: {output} is \(12, 8\), the config asks for \(12, 16\)$"):
        HfFolder(tmp_path, model).check("lm")
    # Without the tie the same two tensors are two.
    untied = model.model_copy(update={"tie_word_embeddings": False})
    write_folder(tmp_path, untied, own | {output: other}, files)
    source = tensor_source(tmp_path, untied, init="load", head="lm", seed=0)
    assert torch.equal(source.part("output.weight", None, 0, 1), other)


@pytest.mark.parametrize("family", NAMES)
def test_a_folder_that_holds_the_network_without_its_output(tmp_path: Path, family: str) -> None:
    """`AutoModel.save_pretrained` leaves `model.` out of every name, and says so under `architectures`."""
    model = model_of(family, tie_word_embeddings=True)
    own, canonical = folder_of(tmp_path, model, files=1)
    prefix = find_family(family).base_prefix
    short = {name.removeprefix(prefix): tensor for name, tensor in own.items()}
    write_folder(tmp_path, model, short | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    content = model.to_hf_dict()
    content["architectures"] = [content["architectures"][0].replace("ForCausalLM", "Model")]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert ModelConfig.from_folder(tmp_path, family_setting(family)) == model
    source = tensor_source(tmp_path, model, init="load", head="lm", seed=0)
    canonical["output.weight"] = canonical[EMBEDDING]
    for name, tensor in canonical.items():
        assert torch.equal(source.part(name, None, 0, 1), tensor), name
    untied = model.model_copy(update={"tie_word_embeddings": False})
    (output,) = model.family.names.of(OUTPUT)
    with pytest.raises(ValueError, match=rf"missing: {output}$"):
        HfFolder(tmp_path, untied).check("lm")
    HfFolder(tmp_path, untied).check("value")
