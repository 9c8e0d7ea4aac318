"""Generation with transformers: where responses end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.protocol import DataProto
from roll.strategies import HfStrategy
from tests.strategies.tiny import settings, write_tiny

ENDS = (2, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HfStrategy:
    made = HfStrategy(settings(write_tiny(tmp_path_factory.mktemp("tiny")), "hf", optimizer=None))
    made.initialize()
    return made


def prompts(rows: int) -> DataProto:
    ids = torch.randint(6, 40, (rows, 4), generator=torch.Generator().manual_seed(0))
    return DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_a_response_ends_at_the_first_of_all_end_tokens(model: HfStrategy) -> None:
    torch.manual_seed(0)
    batch = model.generate(prompts(64), max_new_tokens=20, temperature=5.0, end_token_ids=ENDS, pad_token_id=0)
    seen = set()
    for row, mask in zip(batch["input_ids"][:, 4:].tolist(), batch["response_mask"][:, 4:].tolist(), strict=True):
        ends = [place for place, token in enumerate(row[: sum(mask)]) if token in ENDS]
        assert ends in ([], [sum(mask) - 1]), row
        assert ends or sum(mask) == 20
        assert mask == [1] * sum(mask) + [0] * (20 - sum(mask))
        seen |= {row[place] for place in ends}
    assert seen == set(ENDS), "both ended some response, so there was something to see"


def test_generation_itself_stops_there(model: HfStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    generate = model.network.generate

    def recorded(**options: Any) -> torch.Tensor:
        rows: torch.Tensor = generate(**options)
        widths.append(rows.shape[1])
        return rows

    monkeypatch.setattr(model.network, "generate", recorded)
    batch = model.generate(prompts(3), max_new_tokens=20, temperature=None, end_token_ids=range(40), pad_token_id=0)
    assert widths == [4 + 1]
    assert batch["response_mask"][:, 4:].sum(dim=1).tolist() == [1, 1, 1]
