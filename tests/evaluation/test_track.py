"""Strength over versions is read from score files; which versions are measured; incomparable versions are refused."""

from pathlib import Path
from typing import Any

import pytest

from entente.evaluation.score_files import read_track, track_label, write_score
from entente.evaluation.settings import EvaluationSettings
from entente.reports import plots, sentences
from entente.telemetry.errors import InputError
from flows.open_players import check_same_base
from flows.score_policy import due
from storage.runs import RunPaths
from tests.made_scores import made_record, made_score


def kept(paths: RunPaths, label: str, version: int, mean: float, **changed: Any) -> None:
    write_score(paths, made_record(label, made_score(mean, 0.1), policy_version=version, **changed))


def test_the_track_is_base_points_between_and_last_by_version(tmp_path: Path):
    paths = RunPaths(tmp_path)
    kept(paths, "trained", 20, 1.1)
    kept(paths, track_label(10), 10, 0.7)
    kept(paths, track_label(5), 5, 0.4)
    kept(paths, "base", 0, 0.2)
    track = read_track(paths)
    assert [(point.version, point.score.mean) for point in track] == [(0, 0.2), (5, 0.4), (10, 0.7), (20, 1.1)]


def test_only_versions_measured_as_the_newest_was_are_drawn_in_one_curve(tmp_path: Path):
    paths, code = RunPaths(tmp_path), {"entente/game": "2"}
    kept(paths, "base", 0, 0.1, code=code)
    kept(paths, track_label(5), 5, 0.3, code={"entente/game": "1"})
    kept(paths, track_label(10), 10, 0.4, code=code, settings=EvaluationSettings(horizon_years=3))
    kept(paths, track_label(15), 15, 0.5, code=code, opponents="mover")
    kept(paths, track_label(20), 20, 0.6, code=code, settings=EvaluationSettings(every=5))  # of no effect on a score
    kept(paths, "trained", 25, 0.7, code=code)
    track = read_track(paths)
    assert [point.version for point in track if point.comparable] == [0, 20, 25]
    drawn = plots.ladder(track)
    assert drawn is not None and "version 20 +0.60" in drawn and "version 10" not in drawn
    assert sentences.not_drawn(track).endswith("measured them: v5, v10, v15.")


def test_versions_are_due_every_k_but_the_last_which_is_scored_anyway():
    from entente.settings.layers import layered_settings

    settings = layered_settings("laptop", overrides={"steps": 20, "evaluation": {"every": 5}})
    assert [version for version in range(1, 21) if due(settings, version)] == [5, 10, 15]
    assert not any(due(layered_settings("laptop"), version) for version in range(1, 21))


def made_model(folder: Path, *, tokenizer: str = "{}", last: bytes = b"w") -> Path:
    """Like a real model it begins with megabytes that LoRA does not change: its embedding."""
    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "model.safetensors").write_bytes(bytes(3 << 20) + last)
    return folder


def test_versions_of_other_models_or_tokenizers_cannot_play_each_other(tmp_path: Path):
    one = made_model(tmp_path / "one")
    check_same_base({"a": one, "b": made_model(tmp_path / "same")}, tmp_path)
    with pytest.raises(InputError, match="'a' and 'b' have different base models or tokenizers"):
        check_same_base({"a": one, "b": made_model(tmp_path / "words", tokenizer="[]")}, tmp_path)
    with pytest.raises(InputError, match="'a' and 'b' have different base models or tokenizers"):
        check_same_base({"a": one, "b": made_model(tmp_path / "weights", last=b"v")}, tmp_path)
