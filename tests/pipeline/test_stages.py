"""A training in stages: which command comes next, what ends it, and what is refused."""

from pathlib import Path

import pytest

from pipeline.stages import Staged, StagedPreset, check_machine, read_staged, staged_names
from telemetry.errors import DataError, InputError

_IMITATE = {"name": "imitate", "commands": ["model imitate {run}-i --seed {seed}"], "model": "{run}-i"}
_LEARN = {
    "name": "learn",
    "commands": ["train --run {run}-l --inference.model {base} --steps 2", "train --run {run}-l --resume --steps 4"],
    "model": "{run}-l",
}


def _preset(**more: object) -> StagedPreset:
    return StagedPreset.model_validate({"cores": 2, "memory_gib": 1, "stages": [_IMITATE, _LEARN]} | more)


def _match(low: float) -> dict:
    return {"players": [{"seats": 70, "measures": {"win": {"mean": low + 0.1, "low": low, "high": low + 0.2}}}]}


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    staged = Staged("night", tmp_path / "my runs")
    staged.begin(_preset(target=0.15), 7)
    return staged


def _again(staged: Staged) -> Staged:
    """As a new process has it after a kill."""
    again = Staged(staged.name, staged.runs_root)
    again.resume()
    return again


def test_a_command_that_was_begun_is_continued_and_one_that_is_done_is_not_given_again(staged: Staged):
    root, models = staged.runs_root.as_posix(), staged.runs_root / "_models"
    assert staged.next_command() == ["model", "imitate", "night-i", "--seed", "7", "--runs-root", root]
    begun = models / ".night-i.imitation"
    begun.mkdir(parents=True)
    (begun / "settings.json").write_text("{}")
    assert _again(staged).next_command() == ["model", "imitate", "night-i", "--resume", "--runs-root", root]
    (models / "night-i").mkdir()
    published = (staged.root / "imitate").as_posix()
    assert _again(staged).next_command() == ["model", "publish", "night-i", "--to", published, "--runs-root", root]
    (staged.root / "imitate").mkdir()
    assert _again(staged).next_command() is None


def test_the_next_stage_begins_with_the_model_of_the_stage_before(staged: Staged):
    staged.stage_done(_match(0.1))
    again = _again(staged)
    words = again.next_command()
    assert words is not None and words[words.index("--inference.model") + 1] == (staged.root / "imitate").as_posix()
    run = staged.runs_root / "night-l"
    run.mkdir()
    (run / "settings.json").write_text("{}")
    assert again.next_command() == ["train", "--run", "night-l", "--resume", "--runs-root", staged.runs_root.as_posix()]
    again.command_done(words)
    assert _again(again).next_command() == again.commands()[1], "with --resume it is given as it stands"
    assert again.match_command()[2] == (staged.root / "learn").as_posix()


@pytest.mark.parametrize(("low", "done"), [(0.15, False), (0.1501, True)], ids=["reaches it", "lies above it"])
def test_a_stage_whose_interval_lies_above_the_target_is_the_last(staged: Staged, low: float, done: bool):
    staged.spend(900)
    again = _again(staged)
    again.spend(900)
    figure = again.stage_done(_match(low))
    assert (figure.hours, figure.low, figure.games) == (0.5, low, 70)
    assert _again(again).is_done is done


def test_without_a_target_all_stages_are_done(tmp_path: Path):
    staged = Staged("night", tmp_path)
    staged.begin(_preset(), 0)
    staged.stage_done(_match(0.9))
    assert not staged.is_done
    staged.stage_done(_match(0.9))
    assert staged.is_done and [figure.stage for figure in staged.figures] == ["imitate", "learn"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": [_LEARN]}, "no stage comes before it"),
        ({"stages": [_IMITATE, _IMITATE]}, "two stages have one name"),
        ({"stages": []}, "stages"),
        ({"measure": "luck"}, "measure"),
        ({"hours": 3}, "hours"),
    ],
    ids=["base of the first", "one name twice", "no stages", "unknown measure", "unknown field"],
)
def test_a_preset_that_cannot_be_run_is_refused(change: dict, said: str):
    with pytest.raises(ValueError, match=said):
        _preset(**change)


@pytest.mark.parametrize(
    ("cores", "free", "said"),
    [(1, 1 << 40, "planned for 2 CPU cores, and this machine has 1"), (2, 1 << 29, r"needs 1 GiB of free memory, and 0\.5 GiB")],
    ids=["cores", "memory"],
)
def test_a_machine_that_is_too_small_is_refused(cores: int, free: int, said: str):
    with pytest.raises(InputError, match=said):
        check_machine(_preset(), cores=cores, free_bytes=free)


def test_a_name_is_taken_once_and_a_damaged_file_is_said_to_be(staged: Staged):
    with pytest.raises(InputError, match="was begun: continue it with --resume"):
        Staged("night", staged.runs_root).begin(_preset(), 0)
    with pytest.raises(InputError, match="no training 'day' was begun"):
        Staged("day", staged.runs_root).resume()
    staged.file.write_text('{"preset": {}, "done": [], "seconds": 0, "figures": [], "seed": 0}')
    with pytest.raises(DataError, match="is damaged"):
        Staged("night", staged.runs_root).resume()


def test_shipped_presets_are_read_and_a_missing_file_is_named(tmp_path: Path):
    assert staged_names() == ["hour", "overnight"]
    for name in staged_names():
        assert read_staged(name).stages[0].name == "imitate"
    with pytest.raises(InputError, match=r"gone\.toml"):
        read_staged(str(tmp_path / "gone.toml"))
