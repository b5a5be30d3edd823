"""Errors of the Hub's client, told as mistakes of the user."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from finlm.base.errors import UserError
from finlm.recipe.models import config_json


def test_without_a_network_the_hub_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")  # a name that never resolves (RFC 6761)
    with pytest.raises(UserError) as error, config_json.hub_errors("cannot fetch it", "check the network"):
        hf_hub_download("someone/model", "config.json", revision="a" * 40, cache_dir=str(tmp_path))
    assert "hub.invalid" in error.value.evidence and "network" in error.value.evidence
    assert not constants.HF_HUB_OFFLINE, "the next call may find a network"


def test_a_config_of_a_commit_that_was_fetched_before_is_read_without_a_look_at_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = "a" * 40
    kept = tmp_path / "models--someone--model/snapshots" / commit / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was looked at"))
    assert config_json.config_path("someone/model", commit) == kept
