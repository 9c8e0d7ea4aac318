"""How the roles of a run are started, with clusters that start nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.config import Delivery, load_config
from roll.pipelines.prompt_data import load_prompt_data
from roll.pipelines.rl_config import RLConfig
from roll.pipelines.roles import ranks_of_roles, start_roles
from roll.protocol import ROW_DELIVERIES
from roll.workers.method import RoleMethod, Sender
from tests.pipelines.small_run import EXAMPLES, SMALL


class NotStarted(Sender):
    """Keeps its settings and the names of the methods that are called."""

    def __init__(self, worker_cls: type, **settings: Any) -> None:
        self.worker_cls, self.settings = worker_cls, settings
        self.called: list[str] = []

    def send(self, method: RoleMethod[..., Any, Any], *_: Any, **__: Any) -> Any:
        self.called.append(method.name)
        return SimpleNamespace(result=lambda: None)

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("delivery", ["object_store", "broadcast"])
def test_each_role_is_started_as_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivery: Delivery
) -> None:
    config = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, f"ray.delivery={delivery}"])
    monkeypatch.setattr("roll.workers.role.Cluster", NotStarted)
    data: Any = SimpleNamespace(end_token_ids=(2,), tokenizer=load_prompt_data(config).tokenizer)
    placement: Any = SimpleNamespace()
    roles = start_roles(config, tmp_path, data, placement)
    clusters: dict[str, Any] = {name: role.cluster for name, role in vars(roles).items()}
    assert {name: cluster.settings["degrees"].world_size for name, cluster in clusters.items()} == ranks_of_roles(
        config
    )
    for name, cluster in clusters.items():
        assert cluster.worker_cls.__name__ == f"{name.capitalize()}Worker"
        assert cluster.settings["role"] == name and cluster.settings["placement"] is placement
        assert cluster.settings["delivery"] is ROW_DELIVERIES[delivery]
        assert cluster.called == ([] if name == "reward" else ["initialize"])
