"""An imitation that was cut gives the model of one that was not, learns its teacher, and is a model that a run can take."""

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from entente.records.label import Label
from entente.telemetry.errors import InputError, TrainingError
from entente.training.imitation import imitate as module
from entente.training.imitation.accuracy import accuracy_sentences, accuracy_table
from entente.training.imitation.checkpoint import ImitationState, load_state, save_state
from entente.training.imitation.examples import Example
from entente.training.imitation.imitate import Imitation, imitate
from entente.training.imitation.loss import HeldOutFigures, backward
from entente.training.imitation.positions import Positions
from entente.training.imitation.settings import ImitationSettings
from entente.training.imitation.work import WorkFolder, begin, begun_games, begun_settings, finish, work_folder
from storage.labels import publish_labels, read_labels
from tests.command import Entente
from tests.training.imitation.small import SMALL, content


def made(models: Path, games: Path, settings: ImitationSettings = SMALL) -> Path:
    work = work_folder(models, "small")
    begin(work, settings, games)
    return imitate(work, begun_settings(work), games)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, games: Path) -> Path:
    """The model of SMALL, made in one go."""
    return made(tmp_path_factory.mktemp("models"), games)


def cut(work: WorkFolder, games: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Begin to make the model, and stop with an error in `step`, counted from 0."""
    plain = Imitation.step

    def stopping(self: Imitation) -> None:
        if self.state.step == step:
            raise KeyboardInterrupt
        plain(self)

    with monkeypatch.context() as patched:
        patched.setattr(Imitation, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            imitate(work, begun_settings(work), games)


def test_a_resumed_imitation_gives_the_same_bytes(
    tmp_path: Path, games: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
):
    work = work_folder(tmp_path, "small")
    begin(work, SMALL, games)
    cut(work, games, monkeypatch, 4)
    newest = max((work.root / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-9] + b"\0damaged\0")
    cut(work, games, monkeypatch, 5)
    losses: list[tuple[float, int]] = []
    monkeypatch.setattr(module, "backward", lambda *given: losses.append(backward(*given)) or losses[-1])
    assert imitate(work, begun_settings(work), games) == work.final
    assert len(losses) == 1, "it went on from its checkpoint"
    assert content(work.final) == content(undisturbed)
    monkeypatch.setattr(Imitation, "run", None)
    assert imitate(work, begun_settings(work), games) == work.final, "a published model is not trained again"
    finish(work)
    assert not work.root.exists()


def test_the_newest_checkpoint_stays_after_a_million_steps(tmp_path: Path):
    model = torch.nn.Linear(1, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (999_990, 999_995, 1_000_000):
        save_state(tmp_path, ImitationState(step=step), model, optimiser)
    assert load_state(tmp_path, model, optimiser).step == 1_000_000


def test_a_checkpoint_of_another_optimiser_is_refused_and_kept(tmp_path: Path, games: Path, monkeypatch: pytest.MonkeyPatch):
    work = work_folder(tmp_path, "small")
    begin(work, SMALL, games)
    with monkeypatch.context() as former:
        plain = torch.optim.AdamW
        former.setattr(module, "MuonAndAdamW", lambda model, rate, decay: plain(model.parameters(), lr=rate, weight_decay=decay))
        cut(work, games, monkeypatch, 2)
    kept = content(work.root / "checkpoints")
    with pytest.raises(InputError, match="is of a release with another optimiser: go on with that release"):
        imitate(work, begun_settings(work), games)
    assert content(work.root / "checkpoints") == kept


def test_a_model_goes_on_with_the_games_and_labels_that_it_began_with_or_not_at_all(
    tmp_path: Path, games: Path, monkeypatch: pytest.MonkeyPatch
):
    labels, work = labels_of(games, tmp_path / "round-1"), work_folder(tmp_path, "small")
    settings = SMALL.model_copy(update={"labels": (labels,)})
    undisturbed = made(tmp_path / "whole", games, settings)
    begin(work, settings, games)
    assert begun_games(work, games.parent) == games
    with pytest.raises(InputError, match=r"model 'small' began with '.*arrow', which is missing or changed"):
        begun_games(work, tmp_path)
    cut(work, games, monkeypatch, 4)
    (first,) = labels.iterdir()
    shutil.copy(first, labels / "000064.arrow")
    assert content(imitate(work, begun_settings(work), games)) == content(undisturbed), "labels of later games stay out"
    first.unlink()
    shutil.rmtree(work.final)
    with pytest.raises(InputError, match="which is missing or changed"):
        imitate(work, begun_settings(work), games)


def test_a_loss_that_is_not_finite_ends_the_work_before_the_weights_change(
    tmp_path: Path, games: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "backward", lambda *given: (float("nan"), 0))
    with pytest.raises(TrainingError, match="the loss of step 1 is not finite: lower --learning-rate"):
        made(tmp_path, games)
    assert not (tmp_path / "small").exists()


def test_it_learns_its_teacher_and_tells_how_well(undisturbed: Path):
    recipe = json.loads((undisturbed / "recipe.json").read_text())
    assert [point["step"] for point in recipe["curve"]] == [0, 3, 6]
    first, *_, last = recipe["curve"]
    assert last["completion_loss"] < first["completion_loss"] - 0.1 and last["loss"] is not None
    assert recipe["settings"]["teachers"] == ["mover", "random"] and recipe["prompts"]["own_line"] == "last"


def labels_of(games: Path, folder: Path) -> Path:
    """Labels of two games: the teacher's orders of the first power of each position, after an order set that is worse."""
    positions, rows = Positions(games), []
    for number in positions.training[:3].tolist() + positions.held_out[:3].tolist():
        board, orders = positions.board(number)
        power, own = next((power, own) for power, own in orders.items() if not board.legal_orders()[power].is_forced)
        frozen = board.snapshot(game_id="", seed=0, source="")
        rows.append(
            Label(
                game=int(number in positions.training),
                phase_index=0,
                phase=board.phase,
                power=power,
                snapshot_id=frozen.snapshot_id,
                position=frozen.position,
                orders=["not read", "; ".join(own)],
                values=[1.0, 2.0],
                visits=[8, 8],
                best=1,
            )
        )
    publish_labels(folder, 0, rows, {"search": {}})
    return folder


def test_labels_are_positions_beside_the_games_and_the_curve_is_theirs(tmp_path: Path, games: Path):
    labels = labels_of(games, tmp_path / "round-1")
    both, alone = (Positions(folder, None, read_labels([labels])) for folder in (games, tmp_path / "none"))
    assert len(both.training) == len(Positions(games).training) + 3 and len(alone.training) == len(alone.held_out) == 3
    assert {int(number) for number in both.spread(held_out=True, labels=True)} == {
        *range(both.first_label + 3, both.first_label + 6)
    }
    (table,) = read_labels([labels])
    for game in (0, 1):
        with pytest.raises(InputError, match="or the labels are too few: imitation trains on some and holds out one in 20"):
            Positions(games, None, [table.filter(pc.field("game") == game)])
    _, orders = both.board(both.first_label)
    (power,) = orders
    assert orders == {power: Positions(games).board(int(Positions(games).training[0]))[1][power]}
    settings = SMALL.model_copy(update={"labels": (labels,), "games": 0})
    recipe = json.loads((made(tmp_path / "models", tmp_path / "no-games", settings) / "recipe.json").read_text())
    assert recipe["accuracy"].keys() == {"labels", "labels learned"}
    assert recipe["curve"][-1]["orders_equal"] == recipe["accuracy"]["labels"]["equal"]


def test_a_model_that_goes_on_from_another_begins_as_good_as_that_one_ended(tmp_path: Path, games: Path, undisturbed: Path):
    settings = SMALL.model_copy(update={"begin_with": undisturbed, "steps": 3})
    recipe = json.loads((made(tmp_path, games, settings) / "recipe.json").read_text())
    before = json.loads((undisturbed / "recipe.json").read_text())
    same = {name: before["curve"][-1][name] for name in ("completion_loss", "order_loss", "orders_equal")}
    assert {name: recipe["curve"][0][name] for name in same} == pytest.approx(same)
    assert recipe["curve"][-1]["completion_loss"] < same["completion_loss"]
    assert recipe["begun_with"] == before and "hidden" not in recipe["settings"]


def test_accuracy_is_grouped_by_year_and_by_units():
    def example(phase: str) -> Example:
        none = np.zeros(0, np.int32)
        return Example(ids=none, prompt=0, phase=phase, orders=0, legal_ids=none, legal_offsets=none)

    examples = [example("S1901M"), example("F1912M"), example("W1912A")]
    equal, owner = np.array([True, False, True, True, False, True]), np.array([0, 0, 0, 1, 2, 2])
    figures = HeldOutFigures(completion_loss=0, order_loss=0, orders_equal=4 / 6, by_order=equal, example=owner)
    table = accuracy_table(examples, figures)
    assert table["by_year"] == {"1901 to 1902": {"orders": 3, "equal": 2 / 3}, "1911 to 1915": {"orders": 3, "equal": 2 / 3}}
    assert table["by_units"] == {"1 to 2": {"orders": 1, "equal": 1.0}, "3 to 4": {"orders": 3, "equal": 2 / 3}}
    (sentence,) = accuracy_sentences({"games": table})
    assert sentence.startswith("games: 66.7% of 6 orders equal; by year: 1901 to 1902 66.7%")


def test_a_name_is_taken_once_and_what_was_begun_is_resumed_with_its_settings(tmp_path: Path, games: Path):
    work = work_folder(tmp_path, "small")
    with pytest.raises(InputError, match=r"no model 'small' was started in .*: leave out --resume"):
        begun_settings(work)
    begin(work, SMALL, games)
    with pytest.raises(InputError, match="model 'small' was started: continue it with --resume"):
        begin(work, SMALL, games)
    assert begun_settings(work) == SMALL
    work.final.mkdir()
    with pytest.raises(InputError, match="there is a model in"):
        begin(work, SMALL, games)
    with pytest.raises(InputError, match="cannot name a folder"):
        work_folder(tmp_path, "../small")


def test_a_model_whose_work_was_half_removed_by_a_kill_is_finished(tmp_path: Path, games: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(folder: Path) -> None:
        (folder / "files.json").unlink()
        raise KeyboardInterrupt

    work = work_folder(tmp_path, "small")
    begin(work, SMALL, games)
    work.final.mkdir()
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        finish(work)
    with pytest.raises(InputError, match="is finished: leave out --resume"):
        begun_settings(work)


@pytest.mark.system
def test_a_kill_at_any_moment_is_resumed_by_the_command_to_the_same_bytes(entente: Entente):
    words = ["--teachers", "mover", "--games", "4", "--last-year", "1901", "--hidden", "32", "--layers", "1", "--steps", "30"]
    words += ["--positions", "2", "--eval-every", "10", "--checkpoint-minutes", "0"]
    whole = entente("model", "imitate", "whole", *words)
    assert whole.returncode == 0, whole.stderr
    models = entente.folder / "runs" / "_models"
    with entente.start("model", "imitate", "cut", *words, OMP_NUM_THREADS=str(torch.get_num_threads())) as process:
        checkpoints = models / ".cut.imitation" / "checkpoints"
        until = time.monotonic() + 120
        while not list(checkpoints.glob("step_00000[5-9].safetensors")) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (models / "cut").exists()
    resumed = entente("model", "imitate", "cut", "--resume")
    assert (resumed.returncode, resumed.stdout) == (0, "runs/_models/cut\n"), resumed.stderr
    assert content(models / "cut") == content(models / "whole")


def test_a_model_may_learn_from_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More than 40,000 made the list of them too large to be read."""
    sizes = {f"{8 * number:06d}.arrow": 100_000 for number in range(60_000)}
    monkeypatch.setattr("entente.training.imitation.work._sizes", lambda folder: sizes)
    work = work_folder(tmp_path, "small")
    begin(work, SMALL, tmp_path / "recorded-1")
    assert begun_games(work, tmp_path) == tmp_path / "recorded-1"
