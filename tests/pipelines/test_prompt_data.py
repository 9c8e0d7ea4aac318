"""What is wrong with a run's inputs, found before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config import ConfigError, ModelConfig, PPOConfig, load_config
from roll.data.tokenizer import build_char_tokenizer
from roll.pipelines.prompt_data import PromptData, load_prompt_data
from tests.checkpoint.folder_of_tensors import TOKENIZER_FILES, random_tensors, write_folder
from tests.pipelines.small_run import ROOT, SMALL

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def load(tmp_path: Path, *overrides: str) -> PromptData:
    settings = [*SMALL, "name=run", f"output_dir={tmp_path / 'runs'}", *overrides]
    return load_prompt_data(load_config(PPOConfig, ROOT / "examples" / "ppo_cpu.yaml", settings))


def load_folder(tmp_path: Path) -> PromptData:
    return load(tmp_path, f"model={{path: {tmp_path / 'model'}, config: null}}", "warm_start=null")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that a run can start from."""
    folder = write_folder(tmp_path / "model", MODEL, random_tensors(MODEL, "lm"))
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    build_char_tokenizer().save_pretrained(folder)
    return folder


def test_a_good_folder_is_taken(tmp_path: Path, folder: Path) -> None:
    data = load_folder(tmp_path)
    assert data.train["input_ids"].shape == (64, 10)
    assert data.held_out["input_ids"].shape == (16, 10)
    assert data.supervised is None


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def weights_of_another_model(folder: Path) -> None:
    write_folder(folder, MODEL, random_tensors(MODEL.model_copy(update={"num_hidden_layers": 2}), "lm"))


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def tokenizer_without_an_end(folder: Path) -> None:
    tokenizer = build_char_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_weights, "model holds no weights"),
        (weights_of_another_model, r"does not fit its config\.json:\n  unknown: model\.layers\.1\."),
        (no_tokenizer, "model.path: .*model has no usable tokenizer"),
        (tokenizer_without_an_end, "model.path: the tokenizer of .*model has no eos_token, which ends a response"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path)


def test_special_ids_are_the_tokenizers_or_left_to_it(tmp_path: Path) -> None:
    end = build_char_tokenizer().eos_token_id
    data = load(tmp_path, f"model.config.eos_token_id={end}", "model.config.pad_token_id=null")
    assert data.tokenizer.eos_token_id == end
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, "model.config.bos_token_id=70", "model.config.eos_token_id=71")
    assert str(refusal.value).splitlines() == [
        f"model.config.bos_token_id: 70 is not the tokenizer's, which is {data.tokenizer.bos_token_id}",
        f"model.config.eos_token_id: 71 is not the tokenizer's, which is {end}",
    ]


def test_answers_must_fit_when_there_is_a_warm_start_to_learn_them(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert data.supervised is not None and data.supervised["input_ids"].shape == (64, 10 + 10)
    with pytest.raises(ValueError, match="with its end token, max_new_tokens is 3"):
        load(tmp_path, "rollout.max_new_tokens=3")


@pytest.mark.parametrize(("file", "setting"), [("runs", "output_dir"), ("runs/run", "name")])
def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path, file: str, setting: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    with pytest.raises(ConfigError, match=f"^{setting}: .* must be a folder, and is a file$"):
        load(tmp_path)
    assert (tmp_path / file).read_text() == "mine"
