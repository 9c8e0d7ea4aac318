"""What is wrong with a run's inputs, found before any process starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config import ConfigError, ModelConfig, dump_config, load_config
from roll.data.tokenizer import build_char_tokenizer
from roll.pipelines.prompt_data import PromptData, load_prompt_data
from roll.pipelines.rl_config import RLConfig
from tests.checkpoint.folder_of_tensors import TOKENIZER_FILES, random_tensors, write_folder
from tests.pipelines.small_run import EXAMPLES, SMALL

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% else %}]{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[{% endif %}"
)
"""Writes the prompt `a =` as `[a =][`."""


def load(tmp_path: Path, *overrides: str) -> PromptData:
    settings = [*SMALL, "name=run", f"output_dir={tmp_path / 'runs'}", *overrides]
    return load_prompt_data(load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", settings))


def load_folder(tmp_path: Path) -> PromptData:
    return load(tmp_path, f"model_path={tmp_path / 'model'}", "warm_start=null")


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
    assert data.warm_start is None


def test_prompts_are_turns_of_the_models_chat_template(tmp_path: Path, folder: Path) -> None:
    plain = load_folder(tmp_path)
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = [f"model_path={folder}", "warm_start=null"]
    data, bare = load(tmp_path, *settings), load(tmp_path, *settings, "task.chat_template=none")
    assert bare.notes == plain.notes == ()
    note = "a prompt is a turn of the tokenizer's chat template; task.chat_template=none is the bare text"
    assert data.notes == (note,)
    for part in ("train", "held_out"):
        one, other, before = (getattr(every, part) for every in (data, bare, plain))
        assert other["input_ids"].equal(before["input_ids"])
        texts = [text.removeprefix("<pad>" * text.count("<pad>")) for text in tokenizer.batch_decode(one["input_ids"])]
        assert texts == [f"[{prompt}][" for prompt in one["prompt"]]
        assert one["prompt"].tolist() == other["prompt"].tolist()
        assert one["attention_mask"].sum(dim=1).tolist() == [len(text) for text in texts]
    with pytest.raises(ValueError, match=r"^prompt \d+ has 9 tokens, max_prompt_tokens is 8: '\w{4} ='$"):
        load(tmp_path, *settings, "task.max_prompt_tokens=8")
    with pytest.raises(ConfigError, match=r"task\.chat_template"):
        load(tmp_path, *settings, "task.chat_template=always")


def test_a_warm_start_learns_behind_the_prompts_of_its_own_setting(tmp_path: Path, folder: Path) -> None:
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    start = [f"warm_start.model={{path: {folder}, config: null}}"]
    data = load(tmp_path, *start, "warm_start.data.task.chat_template=none")
    assert data.warm_start is not None and data.from_template
    text = tokenizer.decode(data.warm_start.train[0].input_ids)
    assert " =" in text and "[" not in text
    templated = load(tmp_path, *start)
    assert templated.warm_start is not None
    assert " =][" in tokenizer.decode(templated.warm_start.train[0].input_ids)
    long = [*start, "rollout.max_new_tokens=4"]
    with pytest.raises(ValueError, match=r"^answer \d+ has 5 tokens with its end token, max_new_tokens is 4"):
        load(tmp_path, *long)


def test_a_folder_with_code_of_its_own_is_taken_where_the_run_says_so(tmp_path: Path, folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").rename(folder / "own.json")
    with pytest.raises(
        ConfigError, match=r"^model_path: the tokenizer of .*model is code of its own, tokenization_own\."
    ):
        load_folder(tmp_path)
    given = [f"model_path={folder}", "warm_start=null", "trust_remote_code=true"]
    config = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, "name=run", *given])
    assert config.trusts_remote_code
    with pytest.raises(ConfigError, match=r"has no usable tokenizer: .*tokenization_own"):  # It was looked for.
        load_prompt_data(config)
    assert config.trust_remote_code and "trust_remote_code: true" in dump_config(config)
    warm = ["trust_remote_code=true", "warm_start.model={path: somewhere, config: null, trust_remote_code: true}"]
    with pytest.raises(ConfigError, match=r"^trust_remote_code: must be false with a warm_start") as refused:
        load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, *warm])
    assert "warm_start.model.trust_remote_code is its own" in str(refused.value)
    with pytest.raises(
        ConfigError, match=r"^warm_start\.model\.trust_remote_code: must be false where there is no path"
    ):
        load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, "warm_start.model.trust_remote_code=true"])


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
        (no_tokenizer, r"model_path: .*model has no tokenizer: none of tokenizer\.json"),
        (
            tokenizer_without_an_end,
            r"^rollout\.end_tokens: name a token that ends a response: the tokenizer has no eos_token, and no "
            r"generation_config\.json or config\.json an eos_token_id in .*model$",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path)


def end_tokens_of(tmp_path: Path, folder: Path, **files: object) -> tuple[int, ...]:
    """The end tokens of a run from `folder`, of which these files name these `eos_token_id`."""
    for name, ids in files.items():
        file = folder / f"{name}.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | {"eos_token_id": ids}))
    return load_folder(tmp_path).end_token_ids


def test_the_end_tokens_are_those_that_folder_and_tokenizer_name(tmp_path: Path, folder: Path) -> None:
    assert load_folder(tmp_path).end_token_ids == (2,) and load_folder(tmp_path).notes == ()
    assert end_tokens_of(tmp_path, folder, config=None, generation_config=None) == (2,)
    assert end_tokens_of(tmp_path, folder, config=[2, 5]) == (2, 5)
    assert end_tokens_of(tmp_path, folder, config=5) == (2, 5)
    assert end_tokens_of(tmp_path, folder, generation_config=[7, 2]) == (2, 7, 5)
    assert end_tokens_of(tmp_path, folder, generation_config=[-1, 7], config=-1) == (2, 7)
    assert end_tokens_of(tmp_path, folder, generation_config=[7, 2], config=5) == (2, 7, 5)
    assert load_folder(tmp_path).notes == ("a response ends at any of the tokens 2 '<eos>', 7 '3', 5 '1'",)


def test_files_or_a_setting_name_the_end_where_the_tokenizer_names_none(tmp_path: Path, folder: Path) -> None:
    tokenizer = build_char_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    setting = (f"model_path={folder}", "warm_start=null", "rollout.end_tokens=[2]")
    assert load(tmp_path, *setting).end_token_ids == (2,)
    assert end_tokens_of(tmp_path, folder, config=5) == (5,)
    assert end_tokens_of(tmp_path, folder, config=None, generation_config=[7, -1]) == (7,)
    with pytest.raises(ConfigError, match=r"^rollout\.end_tokens: name a token that ends a response"):
        end_tokens_of(tmp_path, folder, config=[-1], generation_config=-1)


@pytest.mark.parametrize("ids", ["2", [2, "5"], -2, 2.0, True, {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, folder: Path, ids: object) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be an id or a list of ids, got"):
        end_tokens_of(tmp_path, folder, generation_config=ids)


def test_damaged_generation_configs_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: its eos_token_id names 96, which is not below vocab_size 96"):
        end_tokens_of(tmp_path, folder, generation_config=[2, 96])
    for content, message in {"{": "cannot be read: ", "[]": "eos_token_id must be"}.items():
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"generation_config\.json: {message}"):
            load_folder(tmp_path)


def test_a_setting_names_the_end_tokens(tmp_path: Path) -> None:
    def named(tokens: str) -> tuple[int, ...]:
        return load(tmp_path, f"rollout.end_tokens={tokens}").end_token_ids

    assert named("[5]") == (5,)
    assert named('["<eos>", 5, 2, "1"]') == (2, 5)
    assert named("5") == (5,)
    assert named('"<eos>"') == named("<eos>") == (2,)
    assert named('["\\n"]') == (build_char_tokenizer().encode("\n")[0],)
    with pytest.raises(ConfigError) as refusal:
        named('[-1, 96, "ab", "\u00df", "<eos>"]')
    assert str(refusal.value).splitlines() == [
        f"rollout.end_tokens: {token} is not one token of the tokenizer, which has 96"
        for token in ("-1", "96", "'ab'", "'\u00df'")
    ]
    with pytest.raises(ConfigError, match=r"^rollout\.end_tokens: must name at least one token, or be null, got \[\]$"):
        named("[]")


def test_special_ids_are_the_tokenizers_or_left_to_it(tmp_path: Path) -> None:
    end = build_char_tokenizer().eos_token_id
    config = "warm_start.model.config"
    data = load(tmp_path, f"{config}.eos_token_id={end}", f"{config}.pad_token_id=null")
    assert data.tokenizer.eos_token_id == end
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, f"{config}.bos_token_id=70", f"{config}.eos_token_id=71")
    assert str(refusal.value).splitlines() == [
        f"{config}.bos_token_id: 70 is not the tokenizer's, which is {data.tokenizer.bos_token_id}",
        f"{config}.eos_token_id: 71 is not the tokenizer's, which is {end}",
    ]


def test_answers_that_the_warm_start_learns_must_fit(tmp_path: Path) -> None:
    assert load(tmp_path).warm_start is not None
    with pytest.raises(ValueError, match="with its end token, max_new_tokens is 3"):
        load(tmp_path, "rollout.max_new_tokens=3")
    # It is the warm start's answers that count.
    longer = "warm_start.data.task.params={min_word_len: 10, max_word_len: 12}"
    with pytest.raises(ValueError, match="with its end token, max_new_tokens is 6"):
        load(tmp_path, longer, "warm_start.data.task.max_prompt_tokens=14")


def test_a_warm_start_that_learns_held_out_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^task: \d+ of its held-out problems are learned in the warm start, such as"
    ):
        load(tmp_path, "task.eval_size=32")
    with pytest.raises(
        ConfigError, match=r"^task: \d+ of its held-out problems are learned in the warm start, such as"
    ):
        load(tmp_path, "task.eval_size=32", "task.prompt='{word}, back:'", "task.max_prompt_tokens=16")
    load(tmp_path, "task.train_size=32")  # Fewer to train on, but the same that are held out.


def test_a_warm_start_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^warm_start\.data\.files: nothing is at 'no/such'$"):
        load(tmp_path, "warm_start.data={kind: text, task: null, files: [no/such]}")


def finished_warm_start(tmp_path: Path, *overrides: str) -> Path:
    """What a warm start with these settings leaves, with random weights."""
    config = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, f"output_dir={tmp_path / 'runs'}", *overrides])
    assert config.warm_start is not None
    architecture = config.architecture
    final = write_folder(config.warm_start.run_dir / "final", architecture, random_tensors(architecture, "lm"))
    for name in TOKENIZER_FILES:
        (final / name).unlink()
    build_char_tokenizer().save_pretrained(final)
    (config.warm_start.run_dir / "config.yaml").write_text(dump_config(config.warm_start))
    return final


def test_a_finished_warm_start_is_used_unless_it_had_other_settings(tmp_path: Path) -> None:
    finished_warm_start(tmp_path)
    assert load(tmp_path).warm_start is None
    assert load(tmp_path, "warm_start.eval_every=9").warm_start is None, "this does not shape the model"
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, "warm_start.steps=3", "warm_start.optimizer.lr=0.5")
    assert str(refusal.value) == (
        f"warm_start: {tmp_path}/runs/sft_cpu holds a run with other settings (optimizer.lr 0.001 "
        "there, 0.5 here; steps 2 there, 3 here): remove it, or give warm_start.name another value"
    )
    # One that was stopped has no final model, and is run again.
    assert load(tmp_path, "warm_start.name=other").warm_start is not None
    (tmp_path / "runs" / "sft_cpu" / "config.yaml").write_text("steps: 3")
    with pytest.raises(
        ConfigError, match=r"^warm_start: .*sft_cpu holds a run whose config.yaml is of no use: remove it"
    ):
        load(tmp_path)


@pytest.mark.parametrize(("file", "setting"), [("runs", "output_dir"), ("runs/run", "name")])
def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path, file: str, setting: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    with pytest.raises(ConfigError, match=f"^{setting}: .* must be a folder, and is a file$"):
        load(tmp_path)
    assert (tmp_path / file).read_text() == "mine"
